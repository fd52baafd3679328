"""Draw the ids that a server is asked to score, and weigh its answers.

A small model, the proposal, reads the text here. Before the server is asked, n ids are drawn at
every position by systematic sampling, each with a known chance

    pi_i = min(1, n g_i / c),   sum of pi = n,   g = (q + q_2) / 2

q is the proposal's distribution at temperature 1, and q_2 at 2, whose tail is heavier: a proposal
that errs costs noise and no bias, because every token has a chance. The server returns the most
probable tokens, whose p is exact, and p of the drawn ids. A drawn id that is not among the most
probable weighs p / pi (Horvitz and Thompson, 1952), so that the mean of each weight is p.

Shapes: N positions with a target, V vocabulary, A asked ids of a position, K entries of an answer,
X all ids of a position: the K entries, the next token and the asked ones.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from kd.capture.served.scoring import Scores

#: The temperature of the half of g that has the heavier tail.
HEAVY_TEMPERATURE = 2.0
#: Points lie below the sum of all chances by at least this share, in spite of rounding.
_BELOW = 1.0 - 1e-12


@dataclass(frozen=True)
class DrawnIds:
    """The ids to ask for, (N, A) in int64, and the chance of each to be drawn, in float64."""

    ids_NA: Tensor
    chance_NA: Tensor


def draw_ids(logits_NV: Tensor, gold_N: Tensor, count: int, uniform_N: Tensor) -> DrawnIds:
    """Draw ``count`` ids, or all others, at each position; the next token is told anyway.

    ``uniform_N`` in [0, 1) is all the randomness.
    """
    s_NV = logits_NV.double()
    g_NV = s_NV.softmax(1).add_((s_NV / HEAVY_TEMPERATURE).softmax(1))
    g_NV.scatter_(1, gold_N[:, None], 0.0)
    count = min(count, g_NV.shape[1] - 1)
    chance_NV = find_chances(g_NV, count)
    ends_NV = chance_NV.cumsum(1)
    share_NA = (uniform_N[:, None] + torch.arange(count, device=g_NV.device)) / count
    points_NA = share_NA * _BELOW * ends_NV[:, -1:]
    ids_NA = torch.searchsorted(ends_NV, points_NA, right=True)
    return DrawnIds(ids_NA, chance_NV.gather(1, ids_NA))


def find_chances(g_NV: Tensor, count: int) -> Tensor:
    """Return min(1, g / c) with the c of each position for which they sum to ``count``, (N, V)."""
    top_NA, heaviest_NA = g_NV.topk(count, dim=1)
    # Added up from the least on: a difference of sums would lose a small rest.
    beside_N1 = g_NV.scatter(1, heaviest_NA, 0.0).sum(1, keepdim=True)
    rest_NA = top_NA.flip(1).cumsum(1).flip(1) + beside_N1
    left_A = count - torch.arange(count, device=g_NV.device)
    # The heaviest tokens are certain as long as each has more than its part of what they leave.
    certain_NA = (top_NA * left_A > rest_NA).long().cumprod(1)
    first_N1 = certain_NA.sum(1, keepdim=True).clamp(max=count - 1)
    c_N1 = rest_NA.gather(1, first_N1) / left_A[first_N1]
    return (g_NV / c_N1.clamp(min=torch.finfo(g_NV.dtype).tiny)).clamp_(max=1.0)


@dataclass(frozen=True)
class Weights:
    """The ids of N positions that weigh more than 0, (N, X), and the estimated entropies, (N,).

    ``logw_NX`` has the logarithms of the weights, -inf where an id comes a second time.
    """

    ids_NX: Tensor
    logw_NX: Tensor
    entropy_N: Tensor

    def spread(self, rows: slice, vocabulary: int) -> Tensor:
        """Return the logarithm of the weight of every token at some positions, (n, V)."""
        ids_nX, logw_nX = self.ids_NX[rows], self.logw_NX[rows]
        logw_nV = logw_nX.new_full((len(ids_nX), vocabulary), -torch.inf)
        return logw_nV.scatter_reduce_(1, ids_nX, logw_nX, "amax")


def weigh(scores: Scores, drawn: DrawnIds, gold_N: Tensor) -> Weights:
    """Weigh what a server said: the mean of each weight is p, and that of an entropy H(p)."""
    top = scores.top
    parts = (top.ids.astype(np.int64), top.logprobs, top.gold[:, None], scores.asked)
    top_NK, *values = (torch.from_numpy(part).to(gold_N.device) for part in parts)
    logp_NX = torch.cat(values, 1).double()
    ids_NX = torch.cat([top_NK, gold_N[:, None], drawn.ids_NA], 1)
    logw_NX = logp_NX.clone()
    logw_NX[:, -drawn.ids_NA.shape[1] :] -= drawn.chance_NA.log()
    known = top_NK.shape[1]
    again_NX = (ids_NX[:, known:, None] == top_NK[:, None, :]).any(2)
    logw_NX[:, known:].masked_fill_(again_NX, -torch.inf)
    entropy_N = -torch.linalg.vecdot(logw_NX.exp(), logp_NX.clamp(min=-1e4))
    return Weights(ids_NX, logw_NX, entropy_N)
