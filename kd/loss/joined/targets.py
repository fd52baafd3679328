"""Targets of several teachers as one: of other positions each, or of the same ones in a mixture.

With weights a_k that add up to 1 at each position, the terms of the loss are linear in p:

    W = sum_k a_k W_k      E[s] = sum_k a_k E_k[s]      p = sum_k a_k p_k

so the gradient W q - p is that of KL(sum_k a_k p_k || q), and unbiased where each record is. H of
the mixture is not known: in its place stands sum_k a_k H_k, so that the value is

    sum_k a_k KL(p_k || q) = KL(sum_k a_k p_k || q) + JSD_a(p_1 .. p_K)

which differs by a term that no student changes. Entries are joined into entries. Other records are
added up chunk by chunk; the k most probable tokens and a bucket are no mean of p, so a position
that has them has one teacher.

Shapes: N positions that have a target, R those of a teacher, E entries, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from kd.loss.aligned.targets import UnsettledTarget
from kd.loss.sparse_targets import SparseTarget
from kd.loss.targets import TargetChunk, TeacherTarget

#: The best token before any teacher of a position was asked.
_UNASKED = -2


class Share(NamedTuple):
    """A teacher's target, the places of its R positions in ascending order, and its weight."""

    places_R: Tensor
    weight: float
    target: TeacherTarget


def join_targets(shares: list[Share], positions: int) -> TeacherTarget:
    """Join the targets of some of N positions each; one of all positions stays as it is."""
    first = shares[0]
    if len(shares) == 1 and first.weight == 1.0 and len(first.places_R) == positions:
        return first.target
    entries = [
        (share.places_R, share.weight, share.target)
        for share in shares
        if isinstance(share.target, SparseTarget)
    ]
    if len(entries) == len(shares):
        return _join_entries(entries, positions)
    waits = any(isinstance(share.target, UnsettledTarget) for share in shares)
    return (UnsettledJoin if waits else JoinedTarget)(tuple(shares))


def _join_entries(shares: list[tuple[Tensor, float, SparseTarget]], positions: int) -> SparseTarget:
    """Put the entries of each position side by side, those of the first teacher first."""
    counts_N = shares[0][0].new_zeros(positions)
    begins = []
    for places_R, _, target in shares:
        begins.append(counts_N[places_R])
        counts_N = counts_N.index_add(0, places_R, target.offsets_N1.diff())
    starts_N = counts_N.cumsum(0) - counts_N
    place_E = torch.cat(
        [
            (starts_N[places_R] + begin_R - target.offsets_N1[:-1])[target.rows_E]
            + torch.arange(len(target.ids_E), device=places_R.device)
            for (places_R, _, target), begin_R in zip(shares, begins, strict=True)
        ]
    )
    ids_E = torch.cat([target.ids_E for *_, target in shares])
    weights_E = torch.cat([target.weights_E * weight for _, weight, target in shares])
    entropy_N = weights_E.new_zeros(positions)
    for places_R, weight, target in shares:
        entropy_N = entropy_N.index_add(0, places_R, target.entropy_N * weight)
    found = [(places_R, target.find_best_N) for places_R, _, target in shares]
    return SparseTarget(
        torch.cat([starts_N, counts_N.sum()[None]]),
        torch.empty_like(ids_E).scatter(0, place_E, ids_E),
        torch.empty_like(weights_E).scatter(0, place_E, weights_E),
        entropy_N,
        torch.zeros_like(counts_N),
        normalized=all(target.normalized for *_, target in shares),
        find_best=lru_cache(maxsize=1)(lambda: find_common_best(found, positions)),
    )


def find_common_best(found: list[tuple[Tensor, Callable[[], Tensor]]], positions: int) -> Tensor:
    """Find the token that all teachers of a position find the best, (N,); else -1.

    Such a token is the best of the mixture too. Of other tokens the records do not tell it.
    """
    best_N = found[0][0].new_full((positions,), _UNASKED)
    for places_R, find in found:
        own_R, before_R = find(), best_N[places_R]
        same_R = (before_R == _UNASKED) | (before_R == own_R)
        best_N[places_R] = torch.where(same_R, own_R, -1)
    return best_N.clamp(min=-1)


@dataclass(frozen=True)
class JoinedTarget:
    """Targets of any kind, whose chunks are added up."""

    shares: tuple[Share, ...]
    #: The divergences of whole distributions need the mixture itself.
    whole: ClassVar[bool] = False

    def take_chunk(self, rows: slice, dtype: torch.dtype = torch.float32) -> JoinedChunk:
        """The targets of positions ``rows``."""
        chunks = []
        for places_R, weight, target in self.shares:
            first, stop = torch.searchsorted(
                places_R, places_R.new_tensor([rows.start, rows.stop])
            ).tolist()
            if first < stop:
                chunk = target.take_chunk(slice(first, stop), dtype)
                chunks.append((places_R[first:stop] - rows.start, weight, chunk))
        return JoinedChunk(tuple(chunks), rows.stop - rows.start)


@dataclass(frozen=True)
class UnsettledJoin(JoinedTarget):
    """A join of which a target needs the student's probabilities of its labels first."""

    def settle(self, gold_N: Tensor, logq_N: Tensor) -> TeacherTarget:
        """Settle these targets, and join all of them anew."""
        shares = [
            share._replace(target=share.target.settle(gold_N[places_R], logq_N[places_R]))
            if isinstance(share.target, UnsettledTarget)
            else share
            for share in self.shares
            for places_R in [share.places_R]
        ]
        return join_targets(shares, len(gold_N))


@dataclass(frozen=True)
class JoinedChunk:
    """Chunks of several teachers, each with the places of its positions among N and its weight."""

    shares: tuple[tuple[Tensor, float, TargetChunk], ...]
    positions: int

    @property
    def entropy_N(self) -> Tensor:
        """The weighted mean of the teachers' entropies."""
        return self._add(lambda chunk, _: chunk.entropy_N)

    @property
    def total_N(self) -> Tensor | None:
        """The weighted sum of W; None if it is 1 at all positions."""
        if all(chunk.total_N is None for *_, chunk in self.shares):
            return None
        return self._add(_get_total)

    def compute_expected_N(self, s_NV: Tensor) -> Tensor:
        """E_p[s] of each position, float64."""
        return self._add(lambda chunk, places_R: chunk.compute_expected_N(s_NV[places_R]))

    def subtract_(self, q_NV: Tensor, share: float | Tensor) -> None:
        """q - share * p, in place."""
        for places_R, weight, chunk in self.shares:
            own_RV = q_NV[places_R]
            own = share[places_R] if isinstance(share, Tensor) else share
            chunk.subtract_(own_RV, own * weight)
            q_NV[places_R] = own_RV

    def find_best_N(self) -> Tensor:
        """The token that all teachers of a position find the best, or -1."""
        found = [(places_R, chunk.find_best_N) for places_R, _, chunk in self.shares]
        return find_common_best(found, self.positions)

    def _add(self, measure: Callable[[TargetChunk, Tensor], Tensor]) -> Tensor:
        total_N = self.shares[0][0].new_zeros(self.positions, dtype=torch.float64)
        for places_R, weight, chunk in self.shares:
            total_N.index_add_(0, places_R, weight * measure(chunk, places_R).double())
        return total_N


def _get_total(chunk: TargetChunk, places_R: Tensor) -> Tensor:
    total_R = chunk.total_N
    return places_R.new_ones(len(places_R), dtype=torch.float64) if total_R is None else total_R
