"""The least that any logits could come to: what a student loses that knows its targets by heart.

At T = 1 with forward KL that is a student whose distribution is (1 - alpha) p + alpha label; with alpha 0 or 1 it is
p_T or the label itself. Of other objectives the minimum is searched from there.

Shapes: N positions that have a target, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kd.dense_loss import dense_loss
from kd.losses import Objective
from kd.models import Head
from kd.targets import Target, Targets, TopTarget

#: What counts as impossible: its logarithm is finite.
_LEAST = 1e-12
_ITERATIONS = 60


class _Free(Head):
    """No head at all: what goes in are the logits."""

    def logits(self, hidden_ND: Tensor, room_NV: Tensor | None = None) -> Tensor:
        """The logits themselves."""
        return hidden_ND


def least_loss(targets: Targets, objective: Objective, vocabulary: int) -> float:
    """The smallest sum over the N positions. Builds (N, V) in float64 some times over.

    Where T, alpha and the divergence leave no formula, it is the smallest that a search came to.
    """
    free = _Free(targets.gold_N.new_empty(0), None, 1.0, None, vocabulary)
    s_NV = _sought(targets, objective, vocabulary).log()
    with torch.no_grad():
        least = float(dense_loss(s_NV, free, targets, objective).total)
    mixed = objective.divergence == "forward_kl" and float(targets.temperature) == 1.0
    if objective.alpha in (0.0, 1.0) or (mixed and not objective.entropy_weighting):
        return least
    return min(least, _searched(s_NV.requires_grad_(), free, targets, objective))


def _searched(s_NV: Tensor, free: Head, targets: Targets, objective: Objective) -> float:
    search = torch.optim.LBFGS([s_NV], max_iter=_ITERATIONS, line_search_fn="strong_wolfe")

    def step() -> Tensor:
        search.zero_grad()
        total = dense_loss(s_NV, free, targets, objective).total
        total.backward()
        return total

    search.step(step)
    with torch.no_grad():
        return float(dense_loss(s_NV, free, targets, objective).total)


def _sought(targets: Targets, objective: Objective, vocabulary: int) -> Tensor:
    """The mixture of the teacher's distribution, as a student at T = 1 must have it, and the smoothed label, (N, V)."""
    label_NV = _label(targets.gold_N, vocabulary, objective.label_smoothing)
    if targets.teacher is None or objective.alpha == 1.0:
        return label_NV.clamp_(min=_LEAST)
    p_NV = _probabilities(targets.teacher, label_NV).clamp_(min=_LEAST)
    p_NV = torch.softmax(p_NV.log() * float(targets.temperature), 1)
    return torch.lerp(p_NV, label_NV, objective.alpha).clamp_(min=_LEAST)


def _label(gold_N: Tensor, vocabulary: int, smoothing: float) -> Tensor:
    spread_NV = torch.full((len(gold_N), vocabulary), smoothing / vocabulary, dtype=torch.float64, device=gold_N.device)
    return spread_NV.scatter_add(1, gold_N[:, None], spread_NV.new_full((len(gold_N), 1), 1.0 - smoothing))


def _probabilities(teacher: Target, label_NV: Tensor) -> Tensor:
    """The teacher's target (N, V) at its temperature, in float64."""
    chunk, p_NV = teacher.chunk(slice(0, len(label_NV)), torch.float64), torch.zeros_like(label_NV)
    chunk.subtract_(p_NV, -1.0)
    if isinstance(chunk, TopTarget):
        # Where the rest lies is the student's choice: as the label does, where the label is not all among the k.
        outside_NV = (label_NV + _LEAST).scatter_(1, chunk.ids_Nk, 0.0)
        p_NV += chunk.rest_N[:, None] * outside_NV / outside_NV.sum(1, keepdim=True)
    return p_NV
