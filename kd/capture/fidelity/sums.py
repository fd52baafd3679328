"""Sums over samples that should equal the teacher's.

They are sums over tokens with pseudo-random signs, over buckets of equally frequent tokens, and
over tokens of similar probability. The z of a sum divides its error by

    se^2 = max(variance over redraws, sum p^2 (1 - pi) / pi) + event^2 + systematic^2

The second term in max is the variance of the sampling itself (pi = probability to be drawn);
``event`` is the most that one draw or one rounding can change; ``systematic`` bounds the error of
interpolation. The last two keep z small where a change is so rare that redraws never show it, or
show it once. By Bennett's inequality a sum of N independent changes exceeds z = 8.5 with a
probability below 1e-9, for any rate of changes (Boucheron, Lugosi, Massart, "Concentration
inequalities", 2013, theorem 2.9). A capture checks about 200 such sums.

Shapes: N sampled positions, V vocabulary, E entries of N positions, R redraws, F sums.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from cache.codec import Codec
from cache.profiles.threshold import WHOLE, count_rest, find_counted
from cache.records import Records
from kd.capture.fidelity.decoding import LEAST, KnownTokens, RecordDecoder
from kd.capture.fidelity.samples import PositionSample
from kd.loss.sparse_targets import SparseTarget

#: Sums over tokens with pseudo-random signs.
_SIGNS = 8
#: Sums over buckets of equally frequent tokens.
_BUCKETS = 8
#: Sums over tokens of similar probability: one for each factor of 10 below the threshold.
_LEVELS = 4


@dataclass(frozen=True)
class SampledSums:
    """The sums of the teacher, of stored and of redrawn records, and the variance of one sample.

    ``event`` is the most that one draw or one rounding can change a sum.
    """

    live_F: Tensor
    stored_F: Tensor
    redrawn_RF: Tensor
    variance_F: Tensor
    event: float

    def __add__(self, other: SampledSums) -> SampledSums:
        return SampledSums(
            self.live_F + other.live_F,
            self.stored_F + other.stored_F,
            self.redrawn_RF + other.redrawn_RF,
            self.variance_F + other.variance_F,
            max(self.event, other.event),
        )

    def compute_scores(self, systematic: float, noise: float) -> tuple[float, float]:
        """Return the largest |z| of the mean over redraws, and that of the stored sums."""
        redraws = len(self.redrawn_RF)
        one_F = torch.maximum(self.redrawn_RF.var(0), self.variance_F)
        mean_F = one_F / redraws + (self.event / redraws) ** 2 + systematic**2
        bias_F = (self.redrawn_RF.mean(0) - self.live_F).abs() / mean_F.sqrt()
        stored_F = one_F + self.event**2 + systematic**2 + noise**2
        own_F = (self.stored_F - self.live_F).abs() / stored_F.sqrt()
        return float(bias_F.max()), float(own_F.max())


@dataclass(frozen=True)
class _TokenFunctions:
    """F functions of a token; their means under p and under an unbiased sample of p are equal."""

    sign_8V: Tensor
    bucket_V: Tensor
    level_NV: Tensor

    @classmethod
    def of(cls, p_NV: Tensor, size_NV: Tensor, threshold: float) -> _TokenFunctions:
        """Make pseudo-random signs, buckets of equal mass, and a level for each factor of 10.

        The seed is fixed, so a cache is always measured by the same signs.
        """
        dice = torch.Generator().manual_seed(0)
        sign_8V = torch.randint(2, (_SIGNS, p_NV.shape[1]), generator=dice).double() * 2 - 1
        mass_V, order_V = p_NV.mean(0).sort(descending=True)
        rank_V = (mass_V.cumsum(0) * _BUCKETS).long().clamp_(max=_BUCKETS - 1)
        below_NV = (threshold / size_NV.clamp(min=LEAST)).log10().floor() + 1
        level_NV = below_NV.clamp(0, _LEVELS - 1).long()
        bucket_V = torch.empty_like(rank_V).scatter(0, order_V, rank_V)
        return cls(sign_8V.to(p_NV.device), bucket_V, level_NV)

    def evaluate(self, rows_E: Tensor, ids_E: Tensor) -> Tensor:
        """Return the functions at each entry, (E, F)."""
        kinds = (self.bucket_V[ids_E], _BUCKETS), (self.level_NV[rows_E, ids_E], _LEVELS)
        ones = (torch.nn.functional.one_hot(*kind) for kind in kinds)
        return torch.cat([self.sign_8V[:, ids_E].T, *ones], 1)

    def sum_all(self, weights_NV: Tensor, squared: bool = False) -> Tensor:
        """Return the sums (F,) over all tokens of a weight times the functions or their squares."""
        weights_V = weights_NV.sum(0)
        sign_8V = self.sign_8V.square() if squared else self.sign_8V
        buckets = torch.bincount(self.bucket_V, weights_V, _BUCKETS)
        levels = torch.bincount(self.level_NV.flatten(), weights_NV.flatten(), _LEVELS)
        return torch.cat([sign_8V @ weights_V, buckets, levels])

    def sum_entries(self, target: SparseTarget) -> Tensor:
        """Return the sums (R, F) over entries; ``target`` holds the positions R times."""
        rows_E = target.rows_E
        positions = len(self.level_NV)
        values_EF = self.evaluate(rows_E % positions, target.ids_E) * target.weights_E[:, None]
        sums_RF = values_EF.new_zeros((len(target.offsets_N1) - 1) // positions, values_EF.shape[1])
        return sums_RF.index_add_(0, rows_E // positions, values_EF)


def compute_sums(
    part: PositionSample, fresh: Records, decoder: RecordDecoder, p_NV: Tensor
) -> SampledSums:
    """Sum the functions of tokens over stored and redrawn records, and over the teacher's ``p``.

    ``fresh`` holds the positions of ``part`` R times.
    """
    codec = decoder.codec
    redraws = len(fresh) // len(part.gold_N)
    size_NV = _compute_sizes(part.logp_NV, codec)
    functions = _TokenFunctions.of(p_NV, size_NV, codec.threshold)
    redrawn = decoder.decode(fresh, part.gold_N.repeat(redraws))
    stored = decoder.decode(part.stored, part.gold_N)
    assert isinstance(redrawn, SparseTarget) and isinstance(stored, SparseTarget)
    one = fresh.slice(0, len(p_NV))
    variance_NV, largest = _compute_sampling_variance(p_NV, size_NV, one, part, decoder)
    return SampledSums(
        live_F=functions.sum_all(p_NV),
        stored_F=functions.sum_entries(stored)[0],
        redrawn_RF=functions.sum_entries(redrawn),
        variance_F=functions.sum_all(variance_NV, squared=True),
        event=2 * largest + codec.rules.find_step(codec) / decoder.temperature,
    )


def _compute_sizes(logp_NV: Tensor, codec: Codec) -> Tensor:
    """Return the sizes that tails are drawn by.

    They are p, or for profile tempered the mean of p_T over the proposal's temperatures.
    """
    if not codec.rules.keeps_partition:
        return logp_NV.exp()
    return torch.stack([(logp_NV * beta).softmax(1) for beta in codec.proposal_betas]).mean(0)


def _compute_sampling_variance(
    p_NV: Tensor, size_NV: Tensor, fresh: Records, part: PositionSample, decoder: RecordDecoder
) -> tuple[Tensor, float]:
    """Return the variance of each token's weight under independent draws, and the largest weight.

    The variance is p^2 (1 - pi) / pi, with pi the probability to be drawn. Units of a token are
    floor or ceil of p in units, which has the variance f (1 - f), f the part beside whole units.
    """
    codec = decoder.codec
    if codec.rules.dithered:
        unit_N1 = _find_units(fresh, part, codec).to(p_NV.device)[:, None]
        part_NV = (p_NV / unit_N1.clamp(min=LEAST)).frac()
        return unit_N1.square() * part_NV * (1.0 - part_NV), float(unit_N1.max())
    target = decoder.decode(fresh, part.gold_N)
    tail_NV = size_NV.masked_fill(KnownTokens.of(target, fresh, p_NV).known_NV, 0.0)
    count_N1 = torch.from_numpy(fresh["tail_count"].astype(np.float64)).to(p_NV.device)[:, None]
    chance_NV = (count_N1 * tail_NV / tail_NV.sum(1, keepdim=True).clamp(min=LEAST)).clamp(max=1.0)
    weight_NV = (p_NV / chance_NV.clamp(min=LEAST)).masked_fill(chance_NV <= LEAST, 0.0)
    return p_NV * weight_NV * (1.0 - chance_NV), float(weight_NV.max())


def _find_units(records: Records, part: PositionSample, codec: Codec) -> Tensor:
    """Return the weight of a unit at each position, (N,)."""
    known_NK = records["known"]
    counted_NK = find_counted(codec, known_NK, part.gold_N.cpu().numpy())
    rest_N, number_N = count_rest(codec, known_NK, counted_NK)
    return torch.from_numpy(rest_N / WHOLE / np.maximum(number_N, 1)).clamp(min=0.0)
