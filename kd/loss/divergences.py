"""Divergences of two whole distributions, and the parts of their gradients.

    forward_kl       sum p log(p / q)
    reverse_kl       sum q log(q / p)
    jsd              b sum p log(p / m) + (1 - b) sum q log(q / m)    generalised Jensen-Shannon
                                                                      (GKD, arXiv 2306.13649)
    skew_kl          sum p log(p / m)                                 (DistiLLM, arXiv 2402.03898)
    total_variation  1/2 sum |p - q|

with p the teacher, q the student and m = b p + (1 - b) q. With u and a the logits of q and p, the
gradients are

    dD/du = A - q sum(A),  A = q dD/dq          dD/da = B - p sum(B),  B = p dD/dp

so A and B, which stay finite where q or p is 0, determine both. A constant may be left out of dD/dq
and of dD/dp, because it cancels.

Shapes: N positions, V vocabulary.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from kd.config.loss import Divergence


@dataclass(frozen=True)
class DivergenceTerms:
    """A divergence of N pairs of distributions: values (N,), and A and B of the formula, (N, V)."""

    value_N: Tensor
    a_NV: Tensor
    b_NV: Tensor


def compute_divergence(
    name: Divergence, beta: float, logp_NV: Tensor, logq_NV: Tensor
) -> DivergenceTerms:
    """The divergence ``name`` of the teacher's p and the student's q; ``beta`` weighs p in m."""
    p_NV = logp_NV.exp()
    q_NV = logq_NV.exp()
    match name:
        case "forward_kl":
            b_NV = p_NV * (logp_NV - logq_NV)
            return DivergenceTerms(b_NV.sum(1), p_NV.neg_(), b_NV)  # A = -p
        case "reverse_kl":
            a_NV = q_NV * (logq_NV - logp_NV)
            return DivergenceTerms(a_NV.sum(1), a_NV, q_NV.neg_())  # B = -q
        case "jsd":
            logm_NV = _mix_logprobs(beta, logp_NV, logq_NV)
            # The derivatives through m are constants, so the two logarithms are all.
            a_NV = q_NV.mul_(logq_NV - logm_NV).mul_(1.0 - beta)
            b_NV = p_NV.mul_(logp_NV - logm_NV).mul_(beta)
            return DivergenceTerms(a_NV.sum(1) + b_NV.sum(1), a_NV, b_NV)
        case "skew_kl":
            logm_NV = _mix_logprobs(beta, logp_NV, logq_NV)
            gap_NV = logp_NV - logm_NV
            # A = -(1 - b) p q / m, from logarithms: p q would underflow.
            a_NV = (logq_NV - logm_NV).exp_().mul_(p_NV).mul_(beta - 1.0)
            return DivergenceTerms(
                torch.linalg.vecdot(p_NV, gap_NV), a_NV, p_NV * (gap_NV - beta * gap_NV.exp())
            )
        case "total_variation":
            half_NV = (q_NV - p_NV).sign_().mul_(0.5)  # dD/dq = -dD/dp
            return DivergenceTerms(
                (half_NV * (q_NV - p_NV)).sum(1), q_NV.mul_(half_NV), p_NV.mul_(half_NV.neg_())
            )


def _mix_logprobs(beta: float, logp_NV: Tensor, logq_NV: Tensor) -> Tensor:
    """log m."""
    return torch.logaddexp(logp_NV + math.log(beta), logq_NV + math.log1p(-beta))


def compute_logit_gradient(part_NV: Tensor, prob_NV: Tensor) -> Tensor:
    """part - prob sum(part): the gradient for the logits of q from A, or of p from B."""
    return part_NV - prob_NV * part_NV.sum(1, keepdim=True)


def compute_slope(part_NV: Tensor, logprob_NV: Tensor) -> Tensor:
    """The gradient times the logits, (N,). With logits z / T, dD/dT is this times -1/T."""
    mean_N = torch.linalg.vecdot(logprob_NV.exp(), logprob_NV)
    return torch.linalg.vecdot(part_NV, logprob_NV) - part_NV.sum(1) * mean_N
