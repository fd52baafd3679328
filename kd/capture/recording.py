"""Make the records of one sequence: hidden states -> logits of a few positions at a time -> records
of a profile.

Shapes: N positions of one sequence with a target, D hidden width, V vocabulary, K entries of topk.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from cache.codec import Codec, RecordPositions, round_to_bfloat16
from cache.profiles import PROFILES
from cache.records import Records
from kd.capture.block_sizes import LOWEST
from kd.capture.sampling import Randomness, Sampler, join_samples, reduce_by_row, reduce_log_sum_exp
from kd.errors import ModelError
from kd.kernels.available import can_run_kernels
from kd.models.cosines import to_cosines
from kd.models.lm_head import LMHead

#: Logits in memory at once. The matrix product of the LM head is faster for many rows, but beyond
#: this number only the memory grows.
LOGIT_ELEMENTS = {"cpu": 2**24, "cuda": 2**26}


@dataclass(frozen=True)
class Recorder:
    """Makes records of a teacher's hidden states.

    Profile tempered needs the number of ``knots``.
    """

    lm_head: LMHead
    codec: Codec
    knots: int = 0

    def record(
        self, hidden_ND: Tensor, gold_N: Tensor, number: int, positions_N: np.ndarray
    ) -> Records:
        """Return the records of positions ``positions_N`` of sequence ``number``.

        Positions are processed in parts of one sequence, so a record does not depend on the other
        sequences of its micro-batch.
        """
        places = RecordPositions(np.full(len(positions_N), number), positions_N)
        size = max(LOGIT_ELEMENTS[hidden_ND.device.type] // self.lm_head.vocabulary, 1)
        chunks = [slice(start, start + size) for start in range(0, max(len(positions_N), 1), size)]
        if not PROFILES[self.codec.profile].sampled:
            return self._encode_whole(
                [self._read(hidden_ND[rows], gold_N[rows]) for rows in chunks], places
            )
        # Random numbers depend on sequence and position, so they do not depend on how parts are
        # cut.
        chance = Randomness.of(self.codec, number, positions_N, hidden_ND.device)
        samples = [
            self._sampler.sample(
                self._compute_logits(hidden_ND[rows]), gold_N[rows], chance.select(rows)
            )
            for rows in chunks
        ]
        return self.codec.encode_sample(join_samples(samples), places)

    def make_lm_head_arrays(self) -> dict[str, np.ndarray]:
        """Return the LM head in the form that a hidden cache stores.

        ``weight`` has its own precision; ``bias`` is empty if there is none; ``transform`` holds
        scale and soft cap, 0 for none.
        """
        lm_head = self.lm_head
        weight = lm_head.weight[: lm_head.vocabulary].float().cpu().numpy()
        bias = (
            np.zeros(0, np.float32)
            if lm_head.bias is None
            else lm_head.bias[: lm_head.vocabulary].float().cpu().numpy()
        )
        # numpy has no bfloat16: such weights are stored as the upper halves of float32.
        narrow = lm_head.weight.dtype == torch.bfloat16
        return {
            "weight": round_to_bfloat16(weight) if narrow else weight,
            "bias": bias,
            "transform": np.array([lm_head.scale, lm_head.softcap or 0.0]),
        }

    def _compute_logits(self, hidden_ND: Tensor) -> Tensor:
        """Return logits (N, V) in memory that the next call overwrites.

        Allocating that memory anew would cost as much as a pass over it. The dtype is float32 or
        float64, except for kernels that convert the logits when they read them.
        """
        room = self._rooms.get(hidden_ND.dtype)
        if room is None or len(room) < len(hidden_ND):
            self._rooms[hidden_ND.dtype] = room = hidden_ND.new_empty(
                len(hidden_ND), self.lm_head.vocabulary
            )
        room_NV = room[: len(hidden_ND)]
        if self.codec.profile == "threshold" and self.lm_head.plain and can_run_kernels(hidden_ND):
            return self.lm_head.multiply(hidden_ND, room_NV)
        return self.lm_head.compute_logits(hidden_ND, room_NV)

    @cached_property
    def _rooms(self) -> dict[torch.dtype, Tensor]:
        return {}

    @cached_property
    def _sampler(self) -> Sampler:
        return Sampler(self.codec, self.knots)

    def _read(self, hidden_ND: Tensor, gold_N: Tensor) -> tuple[np.ndarray, ...]:
        """Return the next token's log-probability, the entropy and the profile's own columns of N
        positions.
        """
        logp_NV = torch.log_softmax(self._compute_logits(hidden_ND), -1).clamp_(min=LOWEST)
        entropy_N = -reduce_by_row(torch.linalg.vecdot, logp_NV.exp(), logp_NV)
        if not torch.isfinite(entropy_N).all():
            remedy = "Run it in float32 or bfloat16 (teacher.dtype)."
            raise ModelError("The teacher's logits are NaN or infinite.", remedy)
        kept = {
            "topk": self._keep_top,
            "dense": lambda _, logp_NV: (logp_NV,),
            "hidden": self._keep_states,
        }
        own = kept[self.codec.profile](hidden_ND, logp_NV)
        return tuple(
            each.cpu().numpy() for each in (logp_NV.gather(1, gold_N[:, None]), entropy_N, *own)
        )

    def _keep_top(self, hidden_ND: Tensor, logp_NV: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return ids and log-probabilities (N, K), most probable first, and the log-mass (N,) of
        all other tokens.

        The log-mass is a sum over those tokens: 1 minus the sum of the entries would lose
        precision.
        """
        top_NK, ids_NK = logp_NV.topk(self.codec.k, dim=1)
        rest_N = reduce_by_row(reduce_log_sum_exp, logp_NV.scatter(1, ids_NK, -torch.inf))
        return ids_NK, top_NK, rest_N

    def _keep_states(self, hidden_ND: Tensor, _: Tensor) -> tuple[Tensor]:
        """Return the hidden states or their cosines, in float32."""
        states_ND = hidden_ND.float()
        return (to_cosines(states_ND) if self.codec.cosines else states_ND,)

    def _encode_whole(
        self, parts: list[tuple[np.ndarray, ...]], places: RecordPositions
    ) -> Records:
        known, entropy, *own = (np.concatenate(column) for column in zip(*parts, strict=True))
        if self.codec.profile == "topk":
            ids, logprobs, residual = own
            return self.codec.encode_top(known, entropy, (ids, logprobs), residual, places)
        encode = (
            self.codec.encode_dense if self.codec.profile == "dense" else self.codec.encode_hidden
        )
        return encode(known, entropy, own[0], places)
