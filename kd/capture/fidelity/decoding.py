"""Records as probabilities of single tokens, decoded as for training.

Shapes: N sampled positions, V vocabulary, E entries of N positions.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from cache.codec import Codec
from cache.records import Records
from kd.loss.decoder import TargetDecoder
from kd.loss.sparse_targets import SparseTarget
from kd.loss.targets import TargetChunk
from kd.loss.whole_targets import TopTarget
from kd.models.lm_head import LMHead

#: The smallest probability whose logarithm is taken.
LEAST = 1e-30


@dataclass(frozen=True)
class KnownTokens:
    """The tokens whose probability a target contains.

    All others form one bucket of mass ``rest_N``.
    """

    p_NV: Tensor
    known_NV: Tensor
    rest_N: Tensor

    @classmethod
    def of(cls, target: TargetChunk, records: Records, like_NV: Tensor) -> KnownTokens:
        """Collect the probabilities of single tokens in ``target``, the decoded ``records``."""
        if isinstance(target, SparseTarget):
            return cls._of_entries(target, records, like_NV)
        p_NV = torch.zeros_like(like_NV)
        if isinstance(target, TopTarget):
            p_NV.scatter_add_(1, target.ids_NK, target.p_NK)
            return cls(p_NV, p_NV > 0, target.rest_N)
        # A target of all V tokens offers no copy of p: subtracting it -1 times from 0 gives one.
        target.subtract_(p_NV, -1.0)
        return cls(p_NV, torch.ones_like(p_NV, dtype=torch.bool), p_NV.new_zeros(len(p_NV)))

    @classmethod
    def _of_entries(cls, target: SparseTarget, records: Records, like_NV: Tensor) -> KnownTokens:
        """Collect the tokens with a stored probability, which come first among the entries."""
        known_N = torch.full_like(target.entropy_N, records["known"].shape[1]).cpu()
        if "head_units" not in records.columns:  # units of heads are a sample, too
            known_N += torch.from_numpy(records["head_count"].astype(np.int64))
        rows_E = target.rows_E
        rank_E = torch.arange(len(rows_E), device=rows_E.device) - target.offsets_N1[rows_E]
        keeps_E = rank_E < known_N.to(rows_E.device)[rows_E]
        places = (rows_E[keeps_E], target.ids_E[keeps_E])
        weights = target.weights_E[keeps_E]
        p_NV = torch.zeros_like(like_NV).index_put_(places, weights, accumulate=True)
        known_NV = torch.zeros_like(like_NV, dtype=torch.bool)
        known_NV.index_put_(places, torch.tensor(True).to(rows_E.device))
        return cls(p_NV, known_NV, 1.0 - p_NV.sum(1))

    def compute_kl(self, p_NV: Tensor) -> Tensor:
        """Return KL(p || these probabilities), (N,), with all other tokens as one bucket."""
        ratio_NV = p_NV.clamp(min=LEAST).log() - self.p_NV.clamp(min=LEAST).log()
        inside_N = (p_NV * ratio_NV * self.known_NV).sum(1)
        rest_N = p_NV.masked_fill(self.known_NV, 0.0).sum(1)
        ratio_N = rest_N.clamp(min=LEAST).log() - self.rest_N.clamp(min=LEAST).log()
        return inside_N + rest_N * ratio_N


@dataclass(frozen=True)
class RecordDecoder:
    """Decodes records at one temperature; profile hidden needs the teacher's ``lm_head``."""

    codec: Codec
    lm_head: LMHead | None
    temperature: float

    def decode(self, records: Records, gold_N: Tensor) -> TargetChunk:
        """Return the target of ``records``, decoded as for training."""
        columns = {
            name: torch.from_numpy(column).to(gold_N.device)
            for name, column in records.columns.items()
        }
        decoder = TargetDecoder(self.codec, self.lm_head)
        teacher = decoder.decode(gold_N, columns, self.temperature).teacher
        assert teacher is not None
        return teacher.take_chunk(slice(0, len(gold_N)))
