"""Make the records of sequences: hidden states -> logits of a few positions at a time -> records of
a profile.

    this thread     hidden states -> logits -> sample, on the device -> a copy to the host begins
    any thread      the copy has arrived -> random rounding -> records

Shapes: N positions with a target (of a sequence, or of a chunk), D hidden width, V vocabulary,
K entries of topk.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from cache.codec import Codec
from cache.records import Records, TailSums
from cache.rounding import RecordPositions, round_to_bfloat16
from cache.units.dither import DitherTables
from kd.capture.host_copy import HostCopy
from kd.capture.sampling import LOWEST, Randomness, Sampler, make_sample, reduce_by_row
from kd.capture.units.drawing import UnitRandomness, UnitSampler
from kd.errors import ModelError
from kd.models.cosines import to_cosines
from kd.models.lm_head import LMHead

#: Logits in memory at once. The matrix product of the LM head is faster for many rows, but beyond
#: this number only the memory grows.
LOGIT_ELEMENTS = {"cpu": 2**24, "cuda": 2**26}


@dataclass(frozen=True)
class TeacherReading:
    """The output of a teacher for some sequences, before it is encoded.

    ``encode`` makes the records, in any thread; it raises ``ModelError`` if the teacher's
    logits are not finite. ``nbytes`` is the memory that it holds until then.
    """

    sequences: int
    positions: int
    nbytes: int
    encode: Callable[[], Records]


@dataclass(frozen=True)
class SequenceStates:
    """The targets of one sequence: hidden states (N, D), next tokens (N,) and positions (N,)."""

    number: int
    hidden_ND: Tensor
    gold_N: Tensor
    positions_N: np.ndarray


class TailMeter:
    """Adds up the tails of the sequences that are read, token by token, until ``take``.

    ``cache.records.TailSums`` says what the sums are for. They are on the device of the logits.
    Only sequences with a number below ``train_sequences`` count: those after it are held out.
    """

    def __init__(self, train_sequences: int) -> None:
        self.train_sequences = train_sequences
        self._sequences = 0
        self._positions = 0
        self._sum_V = torch.zeros(1, dtype=torch.float64)
        self._square_V = torch.zeros(1, dtype=torch.float64)

    def counts(self, number: int) -> bool:
        """Return whether the sequence ``number`` counts."""
        return number < self.train_sequences

    def add(self, sum_V: Tensor, positions: int) -> None:
        """Add one sequence: the sum of its tails, and the number of its positions."""
        wide_V = sum_V.double()
        self._sum_V = self._sum_V.to(wide_V.device) + wide_V
        self._square_V = self._square_V.to(wide_V.device) + wide_V.square()
        self._sequences += 1
        self._positions += positions

    def take(self, vocabulary: int) -> TailSums:
        """Return the sums of the sequences since the last call, and begin anew."""
        sums = [each.expand(vocabulary).cpu().numpy() for each in (self._sum_V, self._square_V)]
        found = TailSums(self._sequences, self._positions, *sums)
        self._sequences = 0
        self._positions = 0
        self._sum_V = torch.zeros_like(self._sum_V)
        self._square_V = torch.zeros_like(self._square_V)
        return found


Chance = Randomness | UnitRandomness


@dataclass(frozen=True)
class _Piece:
    """Positions of sequence ``number`` whose logits are one matrix product."""

    number: int
    hidden_ND: Tensor
    gold_N: Tensor
    chance: Chance | None


@dataclass(frozen=True)
class Recorder:
    """Makes records of a teacher's hidden states.

    Profile tempered needs the number of ``knots``, and profile threshold the ``tables`` of its
    dither. A ``meter`` gets the tails of profile threshold.
    """

    lm_head: LMHead
    codec: Codec
    knots: int = 0
    meter: TailMeter | None = None
    tables: DitherTables | None = None
    _rooms: dict[torch.dtype, Tensor] = field(default_factory=dict, init=False, compare=False)

    def record(
        self, hidden_ND: Tensor, gold_N: Tensor, number: int, positions_N: np.ndarray
    ) -> Records:
        """Return the records of positions ``positions_N`` of sequence ``number``."""
        return self.read([SequenceStates(number, hidden_ND, gold_N, positions_N)]).encode()

    def read(self, rows: Sequence[SequenceStates]) -> TeacherReading:
        """Compute what the records of some sequences, at least one, are made of.

        A chunk of positions may span sequences. Logits are computed sequence by sequence, in parts
        of a fixed size, so a record does not depend on the other sequences of its chunk.
        """
        device = rows[0].hidden_ND.device
        sampled = self.codec.rules.sampled
        # Random numbers depend on sequence and position, so they do not depend on how parts are
        # cut. They are made while the device computes the hidden states.
        numbers = [row.number for row in rows]
        positions = [row.positions_N for row in rows]
        chances: Sequence[Chance | None] = [None] * len(rows)
        if sampled:
            kind = UnitRandomness if self.codec.rules.dithered else Randomness
            chances = kind.of_each(self.codec, numbers, positions, device)
        tails: dict[int, Tensor] = {}
        copies = [
            HostCopy.start(self._sample(chunk, tails) if sampled else self._read(chunk))
            for chunk in self._cut(rows, chances)
        ]
        # Only now: where memory ran out in one of the chunks, all of them are read again.
        for row in rows:
            if row.number in tails and self.meter is not None:
                self.meter.add(tails[row.number], len(row.positions_N))
        counts = [len(positions_N) for positions_N in positions]
        places = RecordPositions(np.repeat(np.array(numbers), counts), np.concatenate(positions))
        return TeacherReading(
            len(rows),
            len(places.position_N),
            sum(each.nbytes for each in copies),
            partial(self._encode_sample if sampled else self._encode_whole, copies, places),
        )

    def _cut(
        self, rows: Sequence[SequenceStates], chances: Sequence[Chance | None]
    ) -> Iterator[list[_Piece]]:
        """Cut sequences into pieces, and yield chunks of consecutive pieces.

        The logits of a chunk fit into ``LOGIT_ELEMENTS``.
        """
        size = max(LOGIT_ELEMENTS[rows[0].hidden_ND.device.type] // self.lm_head.vocabulary, 1)
        chunk: list[_Piece] = []
        held = 0
        for row, chance in zip(rows, chances, strict=True):
            # At least one piece, so that sequences without targets give records of no position.
            for start in range(0, max(len(row.gold_N), 1), size):
                cut = slice(start, start + size)
                part = chance.select(cut) if chance is not None else None
                piece = _Piece(row.number, row.hidden_ND[cut], row.gold_N[cut], part)
                if chunk and held + len(piece.gold_N) > size:
                    yield chunk
                    chunk = []
                    held = 0
                chunk.append(piece)
                held += len(piece.gold_N)
        yield chunk

    def _sample(self, chunk: Sequence[_Piece], tails: dict[int, Tensor]) -> dict[str, Tensor]:
        """Draw the sample of a chunk, and add its tails to those of each sequence, (V,)."""
        chances: list[Any] = [piece.chance for piece in chunk]
        chance = type(chances[0]).join(chances)
        sampler = self._sampler
        logits_NV = self._compute_logits(chunk)
        if isinstance(sampler, UnitSampler):
            # Piece by piece, because the roundings of a matrix product depend on its shape.
            states = [sampler.find_clusters(piece.hidden_ND) for piece in chunk]
            found = sampler.draw_units(logits_NV, _join_gold(chunk), torch.cat(states), chance)
        else:
            found = sampler.draw(logits_NV, _join_gold(chunk), chance)
        if self.meter is not None:
            self._sum_tails(chunk, self.meter, tails)
        return found

    def _sum_tails(
        self, chunk: Sequence[_Piece], meter: TailMeter, tails: dict[int, Tensor]
    ) -> None:
        drawn = self._sampler.tails
        assert drawn is not None, "a sample was drawn"
        start = 0
        for piece in chunk:
            stop = start + len(piece.gold_N)
            if meter.counts(piece.number):
                # Piece by piece: the sum does not depend on the other sequences of the chunk.
                # After a draw, sizes are those of the tails.
                sum_V = drawn.size_NQU[start:stop].flatten(1).sum(0)[: self.lm_head.vocabulary]
                before_V = tails.get(piece.number)
                tails[piece.number] = sum_V if before_V is None else before_V + sum_V
            start = stop

    def take_tail_sums(self) -> TailSums | None:
        """Return the sums of the tails since the last call; None without a meter."""
        return None if self.meter is None else self.meter.take(self.lm_head.vocabulary)

    def _encode_sample(self, copies: Sequence[HostCopy], places: RecordPositions) -> Records:
        found = make_sample([each.wait() for each in copies], self.codec.rules.reading)
        return self.codec.encode(found, places)

    def make_lm_head_arrays(self) -> dict[str, np.ndarray]:
        """Return the LM head in the form that a hidden cache stores.

        ``weight`` has its own precision; ``bias`` is empty if there is none; ``transform`` holds
        scale and soft cap, 0 for none.
        """
        lm_head = self.lm_head
        weight = lm_head.weight[: lm_head.vocabulary].float().cpu().numpy()
        bias = np.zeros(0, np.float32)
        if lm_head.bias is not None:
            bias = lm_head.bias[: lm_head.vocabulary].float().cpu().numpy()
        # numpy has no bfloat16: such weights are stored as the upper halves of float32.
        narrow = lm_head.weight.dtype == torch.bfloat16
        return {
            "weight": round_to_bfloat16(weight) if narrow else weight,
            "bias": bias,
            "transform": np.array([lm_head.scale, lm_head.softcap or 0.0]),
        }

    def _compute_logits(self, chunk: Sequence[_Piece]) -> Tensor:
        """Return the logits (N, V) of a chunk, in memory that the next call overwrites.

        Allocating that memory anew would cost as much as a pass over it. The dtype is float32, or
        float64 where the hidden states have it.
        """
        positions = sum(len(piece.gold_N) for piece in chunk)
        wide = torch.promote_types(chunk[0].hidden_ND.dtype, torch.float32)
        room = self._rooms.get(wide)
        if room is None or len(room) < positions:
            room = chunk[0].hidden_ND.new_empty((positions, self.lm_head.vocabulary), dtype=wide)
            self._rooms[wide] = room
        room_NV = room[:positions]
        parts = room_NV.split([len(piece.gold_N) for piece in chunk])
        for piece, part_NV in zip(chunk, parts, strict=True):
            self.lm_head.compute_logits(piece.hidden_ND, part_NV)
        return room_NV

    @cached_property
    def _sampler(self) -> Sampler:
        if not self.codec.rules.dithered:
            return Sampler(self.codec, self.knots)
        assert self.tables is not None, "they are made before the first record"
        return UnitSampler(self.codec, self.tables)

    def _read(self, chunk: Sequence[_Piece]) -> dict[str, Tensor]:
        """Return the columns of N positions: the next token's log-probability, the entropy and the
        profile's own, and whether all are finite.
        """
        logp_NV = torch.log_softmax(self._compute_logits(chunk), -1).clamp_(min=LOWEST)
        entropy_N = -reduce_by_row(torch.linalg.vecdot, logp_NV.exp(), logp_NV)
        found = {
            "known_logprobs": logp_NV.gather(1, _join_gold(chunk)[:, None]),
            "entropy": entropy_N,
            "finite": torch.isfinite(entropy_N).all(),
        }
        if self.codec.rules.needs_lm_head:
            # Sequence by sequence, because the roundings of a matrix product depend on its shape.
            parts = [piece.hidden_ND.float() for piece in chunk]
            states = list(map(to_cosines, parts)) if self.codec.cosines else parts
            return found | {"states": torch.cat(states)}
        if not self.codec.k:
            return found | {"logprobs": logp_NV}
        top_NK, ids_NK = logp_NV.topk(self.codec.k, dim=1)
        # A sum over all other tokens: 1 minus the sum of the entries would lose precision.
        log_sum_exp = partial(torch.logsumexp, dim=1)
        rest_N = reduce_by_row(log_sum_exp, logp_NV.scatter(1, ids_NK, -torch.inf))
        return found | {"ids": ids_NK, "logprobs": top_NK, "residual": rest_N}

    def _encode_whole(self, copies: Sequence[HostCopy], places: RecordPositions) -> Records:
        parts = [each.wait() for each in copies]
        if not all(part["finite"] for part in parts):
            remedy = "Run it in float32 or bfloat16 (teacher.dtype)."
            raise ModelError("The teacher's logits are NaN or infinite.", remedy)
        found = {
            name: np.concatenate([part[name] for part in parts])
            for name in parts[0]
            if name != "finite"
        }
        return self.codec.encode(self.codec.rules.reading(**found), places)


def _join_gold(chunk: Sequence[_Piece]) -> Tensor:
    """Return the next tokens (N,) of a chunk."""
    if len(chunk) == 1:
        return chunk[0].gold_N
    return torch.cat([piece.gold_N for piece in chunk])
