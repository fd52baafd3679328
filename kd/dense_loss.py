"""The loss the plain way: all logits at once, float64, and autograd. What the fused pass is compared with.

It says the same as ``kd.losses`` in the words of the definitions, and shares none of its arithmetic. It builds (N, V)
many times over: a few positions at a time only.

Shapes: N positions that have a target, V vocabulary, D hidden width, E entries, k most probable tokens.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional as F

from cache.codec import cosine_basis
from kd.losses import LossTerms, Objective
from kd.models import Head
from kd.targets import DenseTarget, HiddenTarget, SparseTarget, Targets, TopTarget


def dense_loss(hidden_ND: Tensor, head: Head, targets: Targets, objective: Objective) -> LossTerms:
    """What ``distillation_loss`` should give, and by autograd its gradients for the same tensors."""
    return dense_loss_of(head.logits(hidden_ND.double()), targets, objective)


def dense_loss_of(s_NV: Tensor, targets: Targets, objective: Objective) -> LossTerms:
    """The same of the student's logits, (N, V) in float64."""
    if targets.teacher is None:
        return _terms(s_NV, targets, objective, None, None)
    temperature = torch.as_tensor(targets.temperature, dtype=torch.float64, device=s_NV.device)
    logq_NV = torch.log_softmax(s_NV if objective.teacher_only else s_NV / temperature, 1)
    match targets.teacher:
        case SparseTarget() as entries:
            value_N, entropy_N = _of_entries(entries, logq_NV), entries.entropy_N
        case TopTarget() as top:
            value_N, entropy_N = _of_top(top, logq_NV)
        case DenseTarget() | HiddenTarget() as whole:
            logp_NV = torch.log_softmax(teacher_logits(whole) / temperature, 1)
            value_N, entropy_N = _of_all(objective, logp_NV, logq_NV), _mean(logp_NV, -logp_NV)
        case other:
            raise TypeError(f"there is no plain loss of {type(other).__name__}")
    value_N = value_N if objective.teacher_only else temperature**2 * value_N
    return _terms(s_NV, targets, objective, value_N, entropy_N)


def dense_terms(
    logits_NV: Tensor,
    teacher_NV: Tensor,
    gold_N: Tensor,
    temperature: float | Tensor,
    objective: Objective,
    entropy_N: Tensor | None = None,
) -> LossTerms:
    """The same of the logits of a student and a teacher, or of log-probabilities; differentiable in all of them.

    ``entropy_N`` is the teacher's at T = 1, for entropy weighting; by default that of ``teacher_NV``.
    """
    s_NV, z_NV = logits_NV.double(), teacher_NV.double()
    logq_NV = torch.log_softmax(s_NV if objective.teacher_only else s_NV / temperature, 1)
    logp_NV, logp_at_1_NV = torch.log_softmax(z_NV / temperature, 1), torch.log_softmax(z_NV, 1)
    entropy_N = _mean(logp_at_1_NV, -logp_at_1_NV) if entropy_N is None else entropy_N
    scale = 1.0 if objective.teacher_only else temperature**2
    value_N = scale * _of_all(objective, logp_NV, logq_NV)
    targets = Targets(gold_N, None, temperature, entropy_N)
    return _terms(s_NV, targets, objective, value_N, _mean(logp_NV, -logp_NV))


def _terms(
    s_NV: Tensor, targets: Targets, objective: Objective, value_N: Tensor | None, entropy_N: Tensor | None
) -> LossTerms:
    none, gold_N = s_NV.new_zeros(()), targets.gold_N
    ce = F.cross_entropy(s_NV, gold_N, reduction="sum")
    smooth = F.cross_entropy(s_NV, gold_N, reduction="sum", label_smoothing=objective.label_smoothing)
    z = objective.z_loss * s_NV.logsumexp(1).square().sum()
    kd = none if value_N is None else (token_weights(targets, objective) * value_N).sum()
    total = (1.0 - objective.alpha) * kd + objective.alpha * smooth + z
    entropy = none if entropy_N is None else entropy_N.sum()
    return LossTerms(total, kd.detach(), ce.detach(), z.detach(), entropy.detach(), (smooth - ce).detach())


def token_weights(targets: Targets, objective: Objective) -> Tensor:
    """(1 + H)^w, scaled to mean 1 over those that are known, which the others have."""
    if objective.entropy_weighting == 0.0:
        return torch.ones(len(targets), dtype=torch.float64, device=targets.gold_N.device)
    assert targets.entropy_N is not None, "entropy_weighting needs the teacher's entropies"
    known_N = ~targets.entropy_N.isnan()
    weight_N = (1.0 + targets.entropy_N.double()) ** objective.entropy_weighting
    return torch.where(known_N, weight_N / weight_N[known_N].mean(), 1.0)


def _of_entries(target: SparseTarget, logq_NV: Tensor) -> Tensor:
    """-sum_i w_i log q_i - H."""
    rows_E = torch.repeat_interleave(torch.arange(len(logq_NV), device=logq_NV.device), target.offsets_N1.diff())
    p_NV = torch.zeros_like(logq_NV).index_put((rows_E, target.ids_E), target.weights_E, accumulate=True)
    return -(p_NV * logq_NV).sum(1) - target.entropy_N


def _of_top(target: TopTarget, logq_NV: Tensor) -> tuple[Tensor, Tensor]:
    """KL(p || q) of k tokens and one bucket for the rest; and H of the same."""
    inside = torch.zeros_like(logq_NV, dtype=torch.bool).scatter(1, target.ids_Nk, True)
    logq_Nk1 = torch.cat(
        [logq_NV.gather(1, target.ids_Nk), logq_NV.masked_fill(inside, -torch.inf).logsumexp(1, keepdim=True)], 1
    )
    p_Nk1 = torch.cat([target.p_Nk, target.rest_N[:, None]], 1)
    entropy_N = torch.special.entr(p_Nk1).sum(1)
    return -(p_Nk1 * logq_Nk1).where(p_Nk1 > 0.0, 0.0).sum(1) - entropy_N, entropy_N


def teacher_logits(target: DenseTarget | HiddenTarget) -> Tensor:
    """The teacher's logits, or its log-probabilities at T = 1, (N, V) in float64."""
    if isinstance(target, DenseTarget):
        return target.logprobs_NV.double()
    states_ND = target.hidden_ND.double() * target.scale_N.double()[:, None]
    if target.cosines:
        states_ND = states_ND @ torch.from_numpy(cosine_basis(states_ND.shape[1])).to(states_ND.device)
    return target.head.logits(states_ND)


def _of_all(objective: Objective, logp_NV: Tensor, logq_NV: Tensor) -> Tensor:
    """The divergence by its definition."""
    beta = objective.beta
    if objective.divergence == "forward_kl":
        return _mean(logp_NV, logp_NV - logq_NV)
    if objective.divergence == "reverse_kl":
        return _mean(logq_NV, logq_NV - logp_NV)
    if objective.divergence == "total_variation":
        return (logp_NV.exp() - logq_NV.exp()).abs().sum(1) / 2.0
    logm_NV = torch.logaddexp(logp_NV + math.log(beta), logq_NV + math.log1p(-beta))  # finite where p and q underflow
    teacher_N = _mean(logp_NV, logp_NV - logm_NV)
    if objective.divergence == "skew_kl":
        return teacher_N
    return beta * teacher_N + (1.0 - beta) * _mean(logq_NV, logq_NV - logm_NV)


def _mean(logp_NV: Tensor, value_NV: Tensor) -> Tensor:
    """E_p[value], (N,)."""
    return (logp_NV.exp() * value_NV).sum(1)
