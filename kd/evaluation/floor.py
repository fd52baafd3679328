"""The floor of a loss: the least value for any logits.

It is the loss of a student that knows its targets by heart. At T = 1 with forward KL, that
student's distribution is (1 - alpha) p + alpha label; with alpha 0 or 1 it is p_T or the label. For
other objectives the minimum is searched from there.

Shapes: N positions that have a target, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kd.loss.dense import compute_dense_loss
from kd.loss.objective import Objective
from kd.loss.targets import Targets
from kd.loss.whole_targets import TopTarget
from kd.models.lm_head import LMHead

#: Probability of an impossible token; its logarithm is finite.
_LEAST_PROBABILITY = 1e-12
#: Iterations of the search.
_ITERATIONS = 60


class _IdentityLMHead(LMHead):
    """An LM head that returns its input, so that the logits themselves can be searched."""

    def compute_logits(self, hidden_ND: Tensor, room_NV: Tensor | None = None) -> Tensor:
        """The logits, which are the input."""
        return hidden_ND


def find_least_loss(targets: Targets, objective: Objective, vocabulary: int) -> float:
    """The smallest sum of the loss over N positions.

    Where T, alpha and the divergence leave no formula, it is the smallest value that a search
    found. It builds (N, V) in float64 several times.
    """
    free = _IdentityLMHead(targets.gold_N.new_empty(0), None, 1.0, None, vocabulary)
    s_NV = _make_target_mixture(targets, objective, vocabulary).log()
    with torch.no_grad():
        least = float(compute_dense_loss(s_NV, free, targets, objective).total)
    mixed = objective.divergence == "forward_kl" and float(targets.temperature) == 1.0
    if objective.alpha in (0.0, 1.0) or (mixed and not objective.entropy_weighting):
        return least
    s_NV.requires_grad_()
    search = torch.optim.LBFGS([s_NV], max_iter=_ITERATIONS, line_search_fn="strong_wolfe")

    def step() -> Tensor:
        search.zero_grad()
        total = compute_dense_loss(s_NV, free, targets, objective).total
        total.backward()
        return total

    search.step(step)
    with torch.no_grad():
        return min(least, float(compute_dense_loss(s_NV, free, targets, objective).total))


def _make_target_mixture(targets: Targets, objective: Objective, vocabulary: int) -> Tensor:
    """The mixture of the teacher's distribution and the smoothed label, (N, V).

    The teacher's is the one that a student at T = 1 must have to match p_T when tempered.
    """
    gold_N, smoothing = targets.gold_N, objective.label_smoothing
    label_NV = torch.full(
        (len(gold_N), vocabulary), smoothing / vocabulary, dtype=torch.float64, device=gold_N.device
    )
    gold_N1 = gold_N[:, None]
    label_NV.scatter_add_(1, gold_N1, label_NV.new_full(gold_N1.shape, 1.0 - smoothing))
    if targets.teacher is None or objective.alpha == 1.0:
        return label_NV.clamp_(min=_LEAST_PROBABILITY)
    chunk = targets.teacher.take_chunk(slice(0, len(label_NV)), torch.float64)
    p_NV = torch.zeros_like(label_NV)
    chunk.subtract_(p_NV, -1.0)  # 0 - (-1) p
    if isinstance(chunk, TopTarget):
        # The student may place the rest anywhere: best on the label, if it is outside the K.
        outside_NV = (label_NV + _LEAST_PROBABILITY).scatter_(1, chunk.ids_NK, 0.0)
        if chunk.vocabulary is not None:  # rows without a token get no part of it
            outside_NV[:, chunk.vocabulary :] = 0.0
        p_NV += chunk.rest_N[:, None] * outside_NV / outside_NV.sum(1, keepdim=True)
    p_NV = torch.softmax(p_NV.clamp_(min=_LEAST_PROBABILITY).log() * float(targets.temperature), 1)
    return torch.lerp(p_NV, label_NV, objective.alpha).clamp_(min=_LEAST_PROBABILITY)
