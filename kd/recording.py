"""Hidden states of one sequence -> logits, one chunk at a time -> the records of a profile.

Shapes: N positions of one sequence that have a target, D hidden width, V vocabulary, k entries of topk.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from cache.codec import Codec, Places, bfloat16_bits
from cache.profiles import PROFILES
from cache.records import Records
from kd.block_sizes import LOWEST
from kd.cosines import to_cosines
from kd.errors import ModelError
from kd.models import Head
from kd.sampling import Chance, Sampler, by_row, joined, log_sum
from kd.student_rows import kernels_run

#: Logits held at once. The head's matrix product wants many rows; more than this and memory is all that grows.
LOGIT_ELEMENTS = {"cpu": 2**24, "cuda": 2**26}


@dataclass(frozen=True)
class Recorder:
    """Keeps of a teacher what the codec's profile keeps; ``nodes`` is the size of a tempered log-partition."""

    head: Head
    codec: Codec
    nodes: int = 0

    def records(self, hidden_ND: Tensor, gold_N: Tensor, number: int, positions_N: np.ndarray) -> Records:
        """The records of positions ``positions_N`` of sequence ``number``.

        Chunks are cut within a sequence, so a record does not depend on what else is in the micro-batch.
        """
        places = Places(np.full(len(positions_N), number), positions_N)
        size = max(LOGIT_ELEMENTS[hidden_ND.device.type] // self.head.vocabulary, 1)
        chunks = [slice(start, start + size) for start in range(0, max(len(positions_N), 1), size)]
        if not PROFILES[self.codec.profile].sampled:
            return self._whole([self._read(hidden_ND[rows], gold_N[rows]) for rows in chunks], places)
        chance = Chance.of(self.codec, number, positions_N, hidden_ND.device)
        samples = [
            self._sampler.sample(self._logits(hidden_ND[rows]), gold_N[rows], chance.rows(rows)) for rows in chunks
        ]
        return self.codec.encode_sample(joined(samples), places)

    def head_arrays(self) -> dict[str, np.ndarray]:
        """The teacher's head as a hidden cache keeps it: ``weight`` in its own precision, ``bias``, ``transform``."""
        head = self.head
        weight = head.weight[: head.vocabulary].float().cpu().numpy()
        bias = np.zeros(0, np.float32) if head.bias is None else head.bias[: head.vocabulary].float().cpu().numpy()
        narrow = head.weight.dtype == torch.bfloat16
        return {
            "weight": bfloat16_bits(weight) if narrow else weight,
            "bias": bias,
            "transform": np.array([head.scale, head.softcap or 0.0]),
        }

    def _logits(self, hidden_ND: Tensor) -> Tensor:
        """A chunk's logits, which the next call may write over: fresh memory costs as much as a pass over it.

        In float32 or better, but for kernels that widen what they read.
        """
        room = self._rooms.get(hidden_ND.dtype)
        if room is None or len(room) < len(hidden_ND):
            self._rooms[hidden_ND.dtype] = room = hidden_ND.new_empty(len(hidden_ND), self.head.vocabulary)
        room_NV = room[: len(hidden_ND)]
        if self.codec.profile == "threshold" and self.head.plain and kernels_run(hidden_ND):
            return self.head.product(hidden_ND, room_NV)
        return self.head.logits(hidden_ND, room_NV)

    @cached_property
    def _rooms(self) -> dict[torch.dtype, Tensor]:
        return {}

    @cached_property
    def _sampler(self) -> Sampler:
        return Sampler(self.codec, self.nodes)

    def _read(self, hidden_ND: Tensor, gold_N: Tensor) -> tuple[np.ndarray, ...]:
        """Gold log-probability and entropy of N positions, and what the profile keeps besides."""
        logp_NV = torch.log_softmax(self._logits(hidden_ND), -1).clamp_(min=LOWEST)
        entropy_N = -by_row(torch.linalg.vecdot, logp_NV.exp(), logp_NV)
        if not torch.isfinite(entropy_N).all():
            remedy = "Run it in float32 or bfloat16 (teacher.dtype)."
            raise ModelError("The teacher's logits are NaN or infinite.", remedy)
        kept = {"topk": self._top, "dense": lambda _, logp_NV: (logp_NV,), "hidden": self._state}
        own = kept[self.codec.profile](hidden_ND, logp_NV)
        return tuple(each.cpu().numpy() for each in (logp_NV.gather(1, gold_N[:, None]), entropy_N, *own))

    def _top(self, hidden_ND: Tensor, logp_NV: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Ids and log-probabilities (N, k), most probable first, and the log of the rest's mass, summed as such."""
        top_Nk, ids_Nk = logp_NV.topk(self.codec.k, dim=1)
        rest_N = by_row(log_sum, logp_NV.scatter(1, ids_Nk, -torch.inf))
        return ids_Nk, top_Nk, rest_N

    def _state(self, hidden_ND: Tensor, _: Tensor) -> tuple[Tensor]:
        """The states, or their cosines, in float32."""
        states_ND = hidden_ND.float()
        return (to_cosines(states_ND) if self.codec.cosines else states_ND,)

    def _whole(self, parts: list[tuple[np.ndarray, ...]], places: Places) -> Records:
        known, entropy, *own = (np.concatenate(column) for column in zip(*parts, strict=True))
        if self.codec.profile == "topk":
            ids, logprobs, residual = own
            return self.codec.encode_top(known, entropy, (ids, logprobs), residual, places)
        encode = self.codec.encode_dense if self.codec.profile == "dense" else self.codec.encode_hidden
        return encode(known, entropy, own[0], places)
