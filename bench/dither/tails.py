"""Tails with shared dither: ids as gaps between candidates that writer and reader both draw.

Candidate k = 1, 2, ... of a position is the token in slot hash(seed, sequence, position, k) of a
table. So tokens arrive as draws from the prior b = slots / size. First arrivals are geometric, so
u = 1 - (1 - b)^(k - 1) (1 - b U), with U uniform, is a uniform number for any b. A token that is
not among the first K candidates has u = 1 - (1 - b)^K (1 - U). From the numbers u of all tokens
Pareto sampling takes m: those with the least odds(u) / odds(pi), pi = m p / sum p (Rosén,
"Asymptotic theory for order sampling", 1997). A token that arrived is kept as the gap between the
k of accepted candidates, which are short where the prior is near p; the others are kept as ids.

So an entry costs what the prior does not know of p, and not the randomness of the draw.

    N   positions      V   vocabulary      C   clusters, each with a table and a prior
    K   candidates of a position      Z   slots of a table      M   drawn tokens
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

#: Candidates for each token that is drawn: later arrivals are kept as ids.
PATIENCE = 64
#: The distance of the states of SplitMix64.
_GAMMA = np.uint64(0x9E3779B97F4A7C15)
#: The share of the mean of all clusters in the prior of one, so that no likely token is missed.
_SHARED = 0.1


@dataclass(frozen=True)
class Tables:
    """The token in each slot, (C, Z), and the prior that the slots make, (C, V)."""

    slots_CZ: Tensor
    prior_CV: Tensor

    @classmethod
    def of(cls, mass_CV: Tensor, size: int) -> Tables:
        """Share ``size`` slots, a power of two, in proportion to the tails' mass of each cluster.

        Whole slots by the largest remainders.
        """
        mean_V = mass_CV.sum(0) / mass_CV.sum()
        own_CV = mass_CV / mass_CV.sum(1, keepdim=True).clamp(min=1e-30)
        ideal_CV = ((1.0 - _SHARED) * own_CV + _SHARED * mean_V) * size
        # A cluster without any mass has only the shared part, and gets the rest of it.
        ideal_CV *= size / ideal_CV.sum(1, keepdim=True)
        counts_CV = ideal_CV.floor().long()
        order_CV = (ideal_CV - counts_CV).argsort(dim=1, descending=True, stable=True)
        for counts_V, order_V in zip(counts_CV, order_CV, strict=True):
            counts_V[order_V[: size - int(counts_V.sum())]] += 1
        ids_V = torch.arange(mass_CV.shape[1], dtype=torch.int32)
        slots = [ids_V.repeat_interleave(counts_V) for counts_V in counts_CV]
        return cls(torch.stack(slots), counts_CV.double() / size)

    def read(self, cluster_E: NDArray[np.int64], slot_E: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the tokens in slots."""
        tokens: NDArray[np.int64] = self.slots_CZ.numpy()[cluster_E, slot_E].astype(np.int64)
        return tokens


def draw_slots(
    seed: int,
    sequence: int,
    position_E: NDArray[np.int64],
    k_E: NDArray[np.int64],
    size: int,
) -> NDArray[np.int64]:
    """Return the slot of candidate k of each position, which depends on nothing else.

    It is number k of SplitMix64 (Steele, Lea, Flood, "Fast splittable pseudorandom number
    generators", 2014), whose start is a hash of seed, sequence and position. Philox takes nine
    times as long, more than a reader of a million tokens a second has.
    """
    with np.errstate(over="ignore"):  # single numbers are modulo 2^64, too
        start = _mix(np.uint64(seed) + np.uint64(sequence) * _GAMMA)
        start_E = _mix(start ^ position_E.astype(np.uint64))
        words_E = _mix(start_E + k_E.astype(np.uint64) * _GAMMA)
    slots: NDArray[np.int64] = (words_E & np.uint64(size - 1)).astype(np.int64)
    return slots


def _mix(words: Any) -> Any:
    """Apply the last step of SplitMix64."""
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        words = (words ^ (words >> np.uint64(shift))) * np.uint64(factor)
    return words ^ (words >> np.uint64(31))


@dataclass(frozen=True)
class Drawn:
    """The drawn tokens: row and id of each, and the candidate that brought it, 0 for none."""

    rows_M: Tensor
    ids_M: Tensor
    candidate_M: Tensor


def draw_tails(
    tail_NV: Tensor,
    count_N: Tensor,
    tables: Tables,
    cluster_N: Tensor,
    places: tuple[int, int, NDArray[np.int64]],
    uniform_NV: Tensor,
) -> Drawn:
    """Draw ``count_N`` tokens of each tail; ``places`` are seed, sequence and positions (N,).

    ``uniform_NV`` are the numbers U. They are the writer's own: a reader needs none of them.
    """
    seed, sequence, position_N = places
    limit_N1 = (PATIENCE * count_N)[:, None]
    k_K = np.arange(1, PATIENCE * max(int(count_N.max()), 1) + 1)
    size = tables.slots_CZ.shape[1]
    slots = draw_slots(seed, sequence, position_N[:, None], k_K[None], size)
    tokens_NK = tables.slots_CZ[cluster_N].gather(1, torch.from_numpy(slots)).long()
    never = len(k_K) + 1
    first_NV = torch.full(tail_NV.shape, never, dtype=torch.int32)
    k_NK = torch.from_numpy(k_K.astype(np.int32)).expand(len(tail_NV), -1)
    first_NV.scatter_reduce_(1, tokens_NK, k_NK, "amin")
    arrived_NV = first_NV <= limit_N1
    prior_NV = tables.prior_CV[cluster_N]
    # 1 - u, the chance to arrive later still.
    waited_NV = torch.where(arrived_NV, first_NV - 1, limit_N1)
    late_NV = (torch.log1p(-prior_NV.clamp(max=1.0 - 1e-12)) * waited_NV).exp_()
    late_NV *= 1.0 - torch.where(arrived_NV, prior_NV, 1.0) * uniform_NV
    chance_NV = tail_NV * (count_N / tail_NV.sum(1).clamp(min=1e-300))[:, None]
    chance_NV.clamp_(max=1.0 - 1e-9)
    odds_NV = (1.0 - late_NV) * (1.0 - chance_NV) / (late_NV * chance_NV).clamp(min=1e-300)
    odds_NV.masked_fill_(tail_NV <= 0, torch.inf)
    most = max(int(count_N.max()), 1)
    ids_Nm = odds_NV.topk(min(most, tail_NV.shape[1]), dim=1, largest=False).indices
    rows_M, place_M = (torch.arange(ids_Nm.shape[1]) < count_N[:, None]).nonzero(as_tuple=True)
    ids_M = ids_Nm[rows_M, place_M]
    candidate_M = first_NV[rows_M, ids_M].long().where(arrived_NV[rows_M, ids_M], 0)
    return Drawn(rows_M, ids_M, candidate_M)


@dataclass(frozen=True)
class Written:
    """What a shard holds of drawn tokens: gaps between accepted candidates, and the ids of others.

    ``accepted_N`` and ``other_N`` are their numbers in each record.
    """

    accepted_N: NDArray[np.int64]
    k_E: NDArray[np.int64]
    other_N: NDArray[np.int64]
    other_ids: NDArray[np.int64]


def write_drawn(drawn: Drawn, positions: int) -> Written:
    """Put accepted candidates in their order, and the others by their ids."""
    rows, ids, k = (each.numpy() for each in (drawn.rows_M, drawn.ids_M, drawn.candidate_M))
    came = k > 0
    order = np.lexsort((k[came], rows[came]))
    others = np.lexsort((ids[~came], rows[~came]))
    return Written(
        np.bincount(rows[came], minlength=positions),
        k[came][order],
        np.bincount(rows[~came], minlength=positions),
        ids[~came][others],
    )


def read_drawn(
    written: Written,
    tables: Tables,
    cluster_N: NDArray[np.int64],
    places: tuple[int, int, NDArray[np.int64]],
) -> list[list[int]]:
    """Return the ids of each record, sorted, from what a shard holds: one slot for each entry."""
    seed, sequence, position_N = places
    rows = np.repeat(np.arange(len(position_N)), written.accepted_N)
    size = tables.slots_CZ.shape[1]
    slots = draw_slots(seed, sequence, position_N[rows], written.k_E, size)
    ids = tables.read(cluster_N[rows], slots)
    found = np.split(ids, np.cumsum(written.accepted_N)[:-1])
    others = np.split(written.other_ids, np.cumsum(written.other_N)[:-1])
    return [sorted([*a.tolist(), *b.tolist()]) for a, b in zip(found, others, strict=True)]
