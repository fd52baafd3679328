"""Divergences of two whole distributions, with what their gradients are made of.

    forward_kl       sum p log(p / q)
    reverse_kl       sum q log(q / p)
    jsd              b sum p log(p / m) + (1 - b) sum q log(q / m)    generalised Jensen-Shannon (GKD, arXiv 2306.13649)
    skew_kl          sum p log(p / m)                                 skew KL (DistiLLM, arXiv 2402.03898)
    total_variation  1/2 sum |p - q|

with p the teacher, q the student and m = b p + (1 - b) q. With u and a the logits of q and p, the gradients are

    dD/du = A - q sum(A),  A = q dD/dq          dD/da = B - p sum(B),  B = p dD/dp

so that A and B, which stay finite where q or p is 0, say all of them. A constant may be left out of dD/dq or dD/dp.

Shapes: N positions, V vocabulary.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from kd.config.loss import Divergence


@dataclass(frozen=True)
class Divergent:
    """A divergence of N pairs of distributions: values (N,), and A and B of the formula above, (N, V)."""

    value_N: Tensor
    a_NV: Tensor
    b_NV: Tensor


def diverge(name: Divergence, beta: float, logp_NV: Tensor, logq_NV: Tensor) -> Divergent:
    """The divergence ``name`` of the teacher's p and the student's q; ``beta`` is the teacher's weight in m."""
    p_NV, q_NV = logp_NV.exp(), logq_NV.exp()
    match name:
        case "forward_kl":
            b_NV = p_NV * (logp_NV - logq_NV)
            return Divergent(b_NV.sum(1), p_NV.neg_(), b_NV)
        case "reverse_kl":
            a_NV = q_NV * (logq_NV - logp_NV)
            return Divergent(a_NV.sum(1), a_NV, q_NV.neg_())
        case "jsd":
            logm_NV = _mixture(beta, logp_NV, logq_NV)
            a_NV, b_NV = q_NV.mul_(logq_NV - logm_NV), p_NV.mul_(logp_NV - logm_NV)
            a_NV, b_NV = a_NV.mul_(1.0 - beta), b_NV.mul_(beta)
            return Divergent(a_NV.sum(1) + b_NV.sum(1), a_NV, b_NV)
        case "skew_kl":
            logm_NV = _mixture(beta, logp_NV, logq_NV)
            gap_NV = logp_NV - logm_NV
            a_NV = (logq_NV - logm_NV).exp_().mul_(p_NV).mul_(beta - 1.0)
            return Divergent(torch.linalg.vecdot(p_NV, gap_NV), a_NV, p_NV * (gap_NV - beta * gap_NV.exp()))
        case "total_variation":
            half_NV = (q_NV - p_NV).sign_().mul_(0.5)
            return Divergent((half_NV * (q_NV - p_NV)).sum(1), q_NV.mul_(half_NV), p_NV.mul_(half_NV.neg_()))


def _mixture(beta: float, logp_NV: Tensor, logq_NV: Tensor) -> Tensor:
    """log m."""
    return torch.logaddexp(logp_NV + math.log(beta), logq_NV + math.log1p(-beta))


def logit_gradient(part_NV: Tensor, prob_NV: Tensor) -> Tensor:
    """part - prob sum(part): the gradient with respect to the logits of ``prob``, from A for q or from B for p."""
    return part_NV - prob_NV * part_NV.sum(1, keepdim=True)


def slope_N(part_NV: Tensor, logprob_NV: Tensor) -> Tensor:
    """The gradient times the logits, (N,); with logits z / T, dD/dT is -1/T of it."""
    mean_N = torch.linalg.vecdot(logprob_NV.exp(), logprob_NV)
    return torch.linalg.vecdot(part_NV, logprob_NV) - part_NV.sum(1) * mean_N
