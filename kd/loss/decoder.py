"""Decode the cache's columns into targets at a temperature, on the device that trains.

Shapes: N positions that have a target.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from cache.codec import Codec
from kd.loss.aligned.targets import ChunkTarget, Projection
from kd.loss.joined.targets import Share, join_targets
from kd.loss.sparse_targets import SparseTarget, decode_tempered, decode_threshold
from kd.loss.targets import Columns, Targets, TeacherTarget, decode_entropies, detach_number
from kd.loss.whole_targets import DenseTarget, HiddenTarget, decode_lm_head, decode_top
from kd.models.lm_head import LMHead
from kd.text.batches import Source
from kd.text.joined.source import JoinedSource, take_columns


@dataclass(frozen=True)
class TargetDecoder:
    """Decodes the columns of a batch into targets; a run makes one.

    ``codec`` is None if there is no teacher. ``lm_head`` is the teacher's, for profile hidden.
    ``k`` reads only that many entries of topk records. ``projection`` is for records in other
    tokens than the student's.
    """

    codec: Codec | None
    lm_head: LMHead | None = None
    k: int | None = None
    projection: Projection | None = None

    @classmethod
    def of(cls, source: Source, device: torch.device) -> TargetDecoder:
        """The decoder for the batches of ``source``."""
        if isinstance(source, JoinedSource):
            members = [(weight, cls.of(each, device)) for weight, each in source.members]
            return JoinedDecoder(source.codec, members=tuple(members))
        codec = source.codec
        lm_head = None
        # Only hidden states need the teacher's LM head to become log-probabilities.
        if codec is not None and codec.rules.needs_lm_head:
            lm_head = decode_lm_head(source.teacher_head(), codec.vocabulary_size, device)
        arrays = source.projection()
        projection = None if arrays is None else Projection.of(arrays, device)
        return cls(codec, lm_head, projection=projection)

    def decode(
        self, gold_N: Tensor, columns: Columns | None, temperature: float | Tensor = 1.0
    ) -> Targets:
        """The targets of N positions, on the device of their columns.

        Without columns there are hard labels only.
        ``temperature`` is a number, or a 0-dim tensor; if it requires a gradient, the loss
        computes it. Raises ``ValueError`` if the profile cannot serve it.
        """
        if columns is None:
            return Targets(gold_N, temperature=temperature)
        assert self.codec is not None, "records come with their codec"
        learned = isinstance(temperature, Tensor) and temperature.requires_grad
        value = detach_number(temperature)
        if why := self.codec.why_unsupported(temperatures=(value,), learned=learned):
            raise ValueError(f"{why}.")
        teacher = self._decode_teacher(gold_N, columns, temperature)
        # NaN tells an unknown entropy from one of 0; entropy weighting needs the difference.
        return Targets(
            gold_N, teacher, temperature, decode_entropies(columns["entropy"], unknown=torch.nan)
        )

    def _decode_teacher(
        self, gold_N: Tensor, columns: Columns, temperature: float | Tensor
    ) -> TeacherTarget:
        assert self.codec is not None, "records come with their codec"
        if "chunk" in columns:
            return ChunkTarget(columns["chunk"], columns["chunk_logprob"])
        if self.projection is not None:
            alone = replace(self, projection=None)
            theirs = columns["teacher_gold"].clamp(min=0)
            target = alone._decode_teacher(theirs, columns, temperature)
            assert isinstance(target, SparseTarget), "require_served refuses other profiles"
            return self.projection.project(columns, target)
        match self.codec.profile:
            case "threshold":
                return decode_threshold(self.codec, columns, gold_N)
            case "tempered":
                return decode_tempered(self.codec, columns, gold_N, temperature)
            case "topk":
                return decode_top(columns, self.k, self.codec.vocabulary_size)
            # Whole distributions take T as a number: the loss has formulas for their gradient.
            case "dense":
                return DenseTarget(columns["logprobs"], detach_number(temperature))
            case _:
                assert self.lm_head is not None, "a hidden cache comes with its teacher's head"
                states = columns["hidden"], columns["hidden_scale"]
                return HiddenTarget(
                    *states, self.lm_head, detach_number(temperature), self.codec.cosines
                )


@dataclass(frozen=True)
class JoinedDecoder(TargetDecoder):
    """Decodes the columns of a ``JoinedSource``: those of each member with a decoder of its own.

    ``members`` are the weights and decoders, in the order of the members.
    """

    members: tuple[tuple[float, TargetDecoder], ...] = ()

    def decode(
        self, gold_N: Tensor, columns: Columns | None, temperature: float | Tensor = 1.0
    ) -> Targets:
        """The targets of N positions, as ``TargetDecoder.decode`` returns them."""
        if columns is None:
            return Targets(gold_N, temperature=temperature)
        shares = []
        for number, (weight, decoder) in enumerate(self.members):
            own = take_columns(columns, number)
            if own:
                places_R = own.pop("places")
                found = decoder.decode(gold_N[places_R], own, temperature).teacher
                assert found is not None, "records come with a teacher"
                shares.append(Share(places_R, weight, found))
        teacher = join_targets(shares, len(gold_N))
        entropy_N = decode_entropies(columns["entropy"], unknown=torch.nan)
        return Targets(gold_N, teacher, temperature, entropy_N, columns.get("balance"))
