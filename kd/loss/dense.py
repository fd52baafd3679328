"""The plain loss: all logits at once, float64 and autograd. The fused pass is compared with it.

It computes the definitions that ``kd.loss.fused`` computes, and shares none of its arithmetic. It
builds (N, V) several times, so use it for a few positions at a time.

Shapes: N positions that have a target, V vocabulary, D hidden width, E entries, K top-k entries.
"""

from __future__ import annotations

import itertools
import math

import torch
from torch import Tensor
from torch.nn import functional as F

from cache.rounding import make_cosine_basis
from kd.loss.aligned.targets import ProjectedTarget
from kd.loss.fused import LossTerms
from kd.loss.joined.targets import JoinedTarget
from kd.loss.objective import Objective
from kd.loss.sparse_targets import SparseTarget
from kd.loss.targets import Targets, TeacherTarget, widen_logprobs
from kd.loss.whole_targets import DenseTarget, HiddenTarget, TopTarget
from kd.models.lm_head import LMHead


def compute_dense_loss(
    hidden_ND: Tensor, lm_head: LMHead, targets: Targets, objective: Objective
) -> LossTerms:
    """The reference for ``compute_distillation_loss``; its gradients come from autograd."""
    return compute_dense_loss_from_logits(
        lm_head.compute_logits(hidden_ND.double()), targets, objective
    )


def compute_dense_loss_from_logits(
    s_NV: Tensor, targets: Targets, objective: Objective
) -> LossTerms:
    """The loss for the student's logits, (N, V) in float64."""
    if targets.teacher is None:
        return _sum_terms(s_NV, targets, objective, None, None)
    temperature = torch.as_tensor(targets.temperature, dtype=torch.float64, device=s_NV.device)
    logq_NV = torch.log_softmax(s_NV if objective.teacher_only else s_NV / temperature, 1)
    value_N, entropy_N = _compute_values(targets.teacher, logq_NV, temperature, objective)
    value_N = value_N if objective.teacher_only else temperature**2 * value_N
    return _sum_terms(s_NV, targets, objective, value_N, entropy_N)


def _compute_values(
    teacher: TeacherTarget, logq_NV: Tensor, temperature: Tensor, objective: Objective
) -> tuple[Tensor, Tensor]:
    """The divergence at each position, and the teacher's entropy."""
    match teacher:
        case SparseTarget() as entries:
            entropy_N = entries.entropy_N
            positions_N = torch.arange(len(logq_NV), device=logq_NV.device)
            rows_E = torch.repeat_interleave(positions_N, entries.offsets_N1.diff())
            places = (rows_E, entries.ids_E)
            # Accumulate, because an always_keep id that is the gold token is an entry twice.
            p_NV = torch.zeros_like(logq_NV).index_put(places, entries.weights_E, accumulate=True)
            value_N = -(p_NV * logq_NV).sum(1) - entropy_N  # -sum_i w_i log q_i - H
        case ProjectedTarget() as projected:
            entropy_N = projected.entropy_N
            value_N = _compute_projected_kl(projected, logq_NV)
        case TopTarget() as top:
            value_N, entropy_N = _compute_kl_of_top(top, logq_NV)
        case DenseTarget() | HiddenTarget() as whole:
            logp_NV = torch.log_softmax(compute_teacher_logits(whole) / temperature, 1)
            logp_NV = widen_logprobs(logp_NV, logq_NV.shape[1])
            value_N = _compute_divergence(objective, logp_NV, logq_NV)
            entropy_N = _compute_expectation(logp_NV, -logp_NV)
        case JoinedTarget() as joined:
            # The sum over its teachers, each at its own positions.
            value_N, entropy_N = logq_NV.new_zeros(2, len(logq_NV)).unbind()
            for places_R, weight, target in joined.shares:
                found = _compute_values(target, logq_NV[places_R], temperature, objective)
                value_N = value_N.index_add(0, places_R, weight * found[0])
                entropy_N = entropy_N.index_add(0, places_R, weight * found[1])
        case other:
            raise TypeError(f"there is no plain loss for {type(other).__name__}")
    return value_N, entropy_N


def _sum_terms(
    s_NV: Tensor,
    targets: Targets,
    objective: Objective,
    value_N: Tensor | None,
    entropy_N: Tensor | None,
) -> LossTerms:
    none = s_NV.new_zeros(())
    gold_N = targets.gold_N
    ce = F.cross_entropy(s_NV, gold_N, reduction="sum")
    e = objective.label_smoothing
    smooth = F.cross_entropy(s_NV, gold_N, reduction="sum", label_smoothing=e)
    z = objective.z_loss * s_NV.logsumexp(1).square().sum()
    kd = none if value_N is None else (compute_token_weights(targets, objective) * value_N).sum()
    # ``smooth`` includes the cross-entropy of the hard label; reports show the two apart.
    total = (1.0 - objective.alpha) * kd + objective.alpha * smooth + z
    entropy = none if entropy_N is None else entropy_N.sum()
    return LossTerms(
        total, kd.detach(), ce.detach(), z.detach(), entropy.detach(), (smooth - ce).detach()
    )


def compute_token_weights(targets: Targets, objective: Objective) -> Tensor:
    """(1 + H)^w over its mean, times ``weight_N``, (N,). An unknown entropy weighs 1."""
    balance_N = targets.weight_N
    if balance_N is None:
        balance_N = torch.ones(len(targets), device=targets.gold_N.device)
    if objective.entropy_weighting == 0.0:
        return balance_N.double()
    assert targets.entropy_N is not None, "entropy_weighting needs the teacher's entropies"
    # The mean is over known entropies alone: unknown ones must not change the others' weights.
    known_N = ~targets.entropy_N.isnan()
    weight_N = (1.0 + targets.entropy_N.double()) ** objective.entropy_weighting
    mean = weight_N[known_N].mean() if objective.mean_weight is None else objective.mean_weight
    return torch.where(known_N, weight_N / mean, 1.0) * balance_N


def _compute_kl_of_top(target: TopTarget, logq_NV: Tensor) -> tuple[Tensor, Tensor]:
    """KL(p || q) over K tokens and one bucket for the rest, and H(p) over the same."""
    inside = torch.zeros_like(logq_NV, dtype=torch.bool).scatter(1, target.ids_NK, True)
    outside_NV = logq_NV.masked_fill(inside, -torch.inf)[:, : target.vocabulary]
    logq_NK1 = torch.cat([logq_NV.gather(1, target.ids_NK), outside_NV.logsumexp(1, True)], 1)
    p_NK1 = torch.cat([target.p_NK, target.rest_N[:, None]], 1)
    entropy_N = torch.special.entr(p_NK1).sum(1)
    # 0 log 0 is 0: where K covers the vocabulary, the bucket has p = 0 and log q = -inf.
    return -(p_NK1 * logq_NK1).where(p_NK1 > 0.0, 0.0).sum(1) - entropy_N, entropy_N


def _compute_projected_kl(target: ProjectedTarget, logq_NV: Tensor) -> Tensor:
    """-sum_i w_i log Q_i - H, with Q_i the student's mass on the tokens that stand for i, (N,)."""
    entries, groups = target.entries, target.projection
    value_N = []
    for row, (first, end) in enumerate(itertools.pairwise(entries.offsets_N1.tolist())):
        logs = [
            logq_NV[row, groups.ids[slice(*groups.offsets[number : number + 2].tolist())]]
            .logsumexp(0)
            .add(groups.logs[number])
            for number in entries.ids_E[first:end].tolist()
        ]
        weights = entries.weights_E[first:end]
        terms = torch.stack([logq_NV.new_zeros(()), *logs])[1:].where(weights != 0.0, 0.0)
        value_N.append(-(weights * terms).sum() - target.entropy_N[row])
    return torch.stack(value_N) if value_N else logq_NV.new_zeros(0)


def compute_teacher_logits(target: DenseTarget | HiddenTarget) -> Tensor:
    """The teacher's logits or, of profile dense, log-probabilities at T = 1, (N, V) in float64."""
    if isinstance(target, DenseTarget):
        return target.logprobs_NV.double()
    states_ND = target.hidden_ND.double() * target.scale_N.double()[:, None]
    if target.cosines:
        # The basis is orthogonal, so a product with it inverts the transform.
        basis_DD = torch.from_numpy(make_cosine_basis(states_ND.shape[1]))
        states_ND = states_ND @ basis_DD.to(states_ND.device)
    return target.lm_head.compute_logits(states_ND)


def _compute_divergence(objective: Objective, logp_NV: Tensor, logq_NV: Tensor) -> Tensor:
    """The divergence by its definition."""
    beta = objective.beta
    if objective.divergence == "forward_kl":
        return _compute_expectation(logp_NV, logp_NV - logq_NV)
    if objective.divergence == "reverse_kl":
        return _compute_expectation(logq_NV, logq_NV - logp_NV)
    if objective.divergence == "total_variation":
        return (logp_NV.exp() - logq_NV.exp()).abs().sum(1) / 2.0
    # In logs m stays finite where p and q underflow.
    logm_NV = torch.logaddexp(logp_NV + math.log(beta), logq_NV + math.log1p(-beta))
    teacher_N = _compute_expectation(logp_NV, logp_NV - logm_NV)
    if objective.divergence == "skew_kl":
        return teacher_N
    return beta * teacher_N + (1.0 - beta) * _compute_expectation(logq_NV, logq_NV - logm_NV)


def _compute_expectation(logp_NV: Tensor, value_NV: Tensor) -> Tensor:
    """E_p[value], (N,)."""
    return (logp_NV.exp() * value_NV).sum(1)
