"""Fit the tables of the dither: the teacher reads the first training sequences of a capture twice.

Its hidden states are cut into clusters by k-means, and the tails and heads of each cluster are
added up. The table of a cluster has slots in proportion to its tails.

Shapes: F positions that are read, N positions of one product, C clusters, D hidden width,
V vocabulary, Z slots of a table, L leading tokens.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np
import torch
from torch import Tensor

from cache.codec import Codec
from cache.units.dither import DitherTables, choose_leading, share_slots
from kd.capture.sampling import Sampler
from kd.capture.units.drawing import find_nearest
from kd.models.lm_head import LMHead

#: Rounds of k-means, which changes little after them.
_ROUNDS = 12
#: The share of the mean of all clusters in the prior of one, so that no likely token is missed.
_SHARED = 0.1
#: Shares below the inverse of this are of the lowest class.
_FINEST_CLASS = 2.0**24
#: Positions whose logits are in memory at once.
_ROWS = 64

#: Hidden states (N, D) and next tokens (N,) of one sequence.
States = tuple[Tensor, Tensor]


def fit_tables(
    states: Iterable[States], lm_head: LMHead, codec: Codec, clusters: int
) -> DitherTables:
    """Fit the tables of ``clusters`` clusters to the states of sequences."""
    kept = list(states)
    hidden_FD = torch.cat([hidden_ND for hidden_ND, _ in kept])
    # As they are stored, so that a capture that goes on finds the same clusters.
    centres_CD = find_centres(hidden_FD.float(), clusters).bfloat16().float()
    tails_CV = torch.zeros(clusters, lm_head.vocabulary, device=hidden_FD.device)
    heads_CV = torch.zeros_like(tails_CV)
    sampler = Sampler(codec)
    for hidden_ND, gold_N in _cut(kept):
        logits_NV = lm_head.compute_logits(hidden_ND).float()
        sizes, (rows_H, ids_H) = sampler.split(logits_NV, sampler.list_known(gold_N))
        nearest_N = find_nearest(centres_CD, hidden_ND.float())
        tails_CV.index_add_(0, nearest_N, sizes.size_NQU.flatten(1)[:, : lm_head.vocabulary])
        places = (nearest_N[rows_H], ids_H)
        heads_CV.index_put_(places, torch.ones_like(ids_H, dtype=torch.float32), accumulate=True)
    return make_tables(
        tails_CV.double().cpu().numpy(), heads_CV.cpu().numpy(), centres_CD.cpu().numpy()
    )


def _cut(states: Iterable[States]) -> Iterator[States]:
    for hidden_ND, gold_N in states:
        yield from zip(hidden_ND.split(_ROWS), gold_N.split(_ROWS), strict=True)


def find_centres(hidden_FD: Tensor, clusters: int) -> Tensor:
    """Find the centres of clusters by k-means, from states that are chosen with a fixed seed.

    There may be fewer states than clusters: then some centres are equal, and the first counts.
    """
    count = len(hidden_FD)
    if not count or clusters == 1:
        return hidden_FD.new_zeros(clusters, hidden_FD.shape[1])
    order_F = torch.randperm(count, generator=torch.Generator().manual_seed(0))
    first_C = order_F.to(hidden_FD.device)[torch.arange(clusters) % count]
    centres_CD = hidden_FD[first_C].clone()
    for _ in range(_ROUNDS):
        nearest_F = torch.cat([find_nearest(centres_CD, part) for part in hidden_FD.split(8192)])
        sums_CD = torch.zeros_like(centres_CD).index_add_(0, nearest_F, hidden_FD)
        number_C1 = torch.bincount(nearest_F, minlength=clusters)[:, None]
        centres_CD = torch.where(number_C1 > 0, sums_CD / number_C1.clamp(min=1), centres_CD)
    return centres_CD


def make_tables(tails_CV: np.ndarray, heads_CV: np.ndarray, centres_CD: np.ndarray) -> DitherTables:
    """Make tables from the mass of tails and the number of heads of each token and cluster."""
    # Every token has a little, so that there is an order and a prior without any text.
    tails_CV = tails_CV + 1e-12
    mean_V = tails_CV.sum(0) / tails_CV.sum()
    own_CV = tails_CV / tails_CV.sum(1, keepdims=True)
    slots = [share_slots((1.0 - _SHARED) * own_V + _SHARED * mean_V) for own_V in own_CV]
    # Heads by their number, then the tokens that are likely in the tail.
    leading = [np.lexsort((-own, -heads)) for own, heads in zip(own_CV, heads_CV, strict=True)]
    most = choose_leading(len(mean_V))
    share_V = mean_V + heads_CV.sum(0) / max(heads_CV.sum(), 1.0)
    classes_V = np.ceil(np.log2(share_V * _FINEST_CLASS + 1.0)).astype(np.uint8)
    leading_CL = np.stack([each[:most] for each in leading])
    return DitherTables(np.stack(slots), leading_CL, classes_V, centres_CD)
