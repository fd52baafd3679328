"""The loss: LM head, distillation and cross-entropy in one chunked pass that never builds (N, V).

    L = (1 - alpha) * [LSE(s) - sum_i w_i s_i - H(p)]   forward KL(teacher || student), from a sampled record
      +      alpha  * [LSE(s) - s_gold]                 cross-entropy of the hard label

with s the student's logits and (i, w_i) the record's entries, whose weights sum to 1. E[w] = p, and L is linear
in w, so value and gradient are unbiased: their mean over draws of the record is full distillation. The gradient
with respect to s is softmax(s) - [(1 - alpha) w + alpha e_gold]: the hard label is one more entry.

Shapes: N positions that have a target, E record entries of all of them, V vocabulary, D hidden width.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kd.models import Head

CHUNK_ELEMENTS = 2**24  # logits held at once: 64 MiB in float32


@dataclass(frozen=True)
class Targets:
    """What N positions should predict. ``record`` is None where there is no teacher (alpha must be 1)."""

    gold_N: Tensor
    record: RecordTargets | None = None

    def __len__(self) -> int:
        return self.gold_N.shape[0]


@dataclass(frozen=True)
class RecordTargets:
    """The teacher's sampled distributions as CSR rows.

    Entries ``offsets_N1[n]`` to ``offsets_N1[n + 1]`` belong to position n; their weights sum to 1.
    """

    offsets_N1: Tensor
    ids_E: Tensor
    weights_E: Tensor
    entropy_N: Tensor


@dataclass(frozen=True)
class LossTerms:
    """Sums over N positions, in nats (float64). ``total`` carries the gradient; the parts are for reporting."""

    total: Tensor
    kd: Tensor
    ce: Tensor


def distillation_loss(hidden_ND: Tensor, head: Head, targets: Targets, alpha: float) -> LossTerms:
    """The summed loss of N positions; exact gradients for the hidden states, the head's weight and its bias.

    Divide ``total`` by the number of targets of the whole optimiser step, not of this micro-batch. Matrix products
    run in the dtype of ``hidden_ND``, everything else in float32 or better.
    """
    if targets.record is None and alpha != 1.0:
        raise ValueError(f"alpha must be 1 without the teacher's records, but got {alpha}")
    total, kd, ce = _FusedHead.apply(hidden_ND, head.weight, head.bias, head, targets, alpha)
    return LossTerms(total, kd, ce)


class _FusedHead(torch.autograd.Function):
    """Forward computes loss and gradients chunk by chunk; backward only scales them.

    The gradients stay unscaled until backward: dividing by the token count first would underflow in float16.
    """

    @staticmethod
    def forward(ctx, hidden_ND, weight, bias, head: Head, targets: Targets, alpha: float):  # type: ignore[no-untyped-def]
        wide = torch.promote_types(hidden_ND.dtype, torch.float32)
        needs_hidden, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        head = replace(head, weight=weight[: head.vocabulary].detach().to(hidden_ND.dtype))  # cast once, not per chunk
        d_hidden_ND = torch.empty_like(hidden_ND) if needs_hidden else None
        d_weight = torch.zeros_like(weight, dtype=wide) if needs_weight else None
        d_bias = torch.zeros_like(bias, dtype=wide) if needs_bias else None
        kd, ce = hidden_ND.new_zeros(2, dtype=torch.float64)
        for rows, part in _chunks(targets, head.vocabulary):
            z_NV = head.project(hidden_ND[rows])
            s_NV = head.transform(z_NV)
            lse_N = torch.logsumexp(s_NV, dim=-1)
            kd += _kd_sum(s_NV, lse_N, part)
            ce += _ce_sum(s_NV, lse_N, part)
            if not (needs_hidden or needs_weight or needs_bias):
                continue
            g_NV = _logit_gradient(s_NV.clone() if head.softcap else s_NV, lse_N, part, alpha)
            g_NV = _through_transform(g_NV, s_NV, head)
            if d_bias is not None:
                d_bias[: head.vocabulary] += g_NV.sum(0)
            g_NV = g_NV.to(hidden_ND.dtype)
            if d_hidden_ND is not None:
                torch.mm(g_NV, head.weight, out=d_hidden_ND[rows])
            if d_weight is not None:
                _add_product(d_weight[: head.vocabulary], g_NV.T, hidden_ND[rows])
        ctx.save_for_backward(d_hidden_ND, d_weight, d_bias)
        ctx.dtypes = hidden_ND.dtype, weight.dtype, bias.dtype if bias is not None else None
        ctx.mark_non_differentiable(kd, ce)
        return (1.0 - alpha) * kd + alpha * ce, kd, ce

    @staticmethod
    def backward(ctx, d_total, d_kd, d_ce):  # type: ignore[no-untyped-def]
        grads = (
            None if grad is None else (grad.to(torch.promote_types(grad.dtype, torch.float32)) * d_total).to(dtype)
            for grad, dtype in zip(ctx.saved_tensors, ctx.dtypes, strict=True)
        )
        return (*grads, None, None, None)


def _add_product(sum_VD: Tensor, a_VN: Tensor, b_ND: Tensor) -> None:
    """sum += a b, in place where the dtypes allow it."""
    if a_VN.dtype == sum_VD.dtype:
        sum_VD.addmm_(a_VN, b_ND)
    else:
        sum_VD += a_VN @ b_ND


def _chunks(targets: Targets, vocabulary: int) -> Iterator[tuple[slice, Targets]]:
    """Cut N positions into runs whose logits hold at most ``CHUNK_ELEMENTS`` numbers."""
    size = max(CHUNK_ELEMENTS // vocabulary, 1)
    record = targets.record
    bounds = record.offsets_N1.tolist() if record is not None else []
    for start in range(0, len(targets), size):
        rows = slice(start, min(start + size, len(targets)))
        part = None
        if record is not None:
            entries = slice(bounds[rows.start], bounds[rows.stop])
            part = RecordTargets(
                record.offsets_N1[rows.start : rows.stop + 1] - bounds[rows.start],
                record.ids_E[entries],
                record.weights_E[entries],
                record.entropy_N[rows],
            )
        yield rows, Targets(targets.gold_N[rows], part)


def _flat_entries(record: RecordTargets, vocabulary: int) -> Tensor:
    """The place of each entry (E,) in a flattened (N, V)."""
    counts_N = record.offsets_N1.diff()
    row_E = torch.repeat_interleave(torch.arange(len(counts_N), device=counts_N.device), counts_N)
    return row_E * vocabulary + record.ids_E


def _kd_sum(s_NV: Tensor, lse_N: Tensor, targets: Targets) -> Tensor:
    """Sum of LSE(s) - sum_i w_i s_i - H(p); 0 without a record."""
    if targets.record is None:
        return lse_N.new_zeros((), dtype=torch.float64)
    record = targets.record
    picked_E = s_NV.reshape(-1)[_flat_entries(record, s_NV.shape[1])]
    return (lse_N - record.entropy_N).sum(dtype=torch.float64) - (record.weights_E * picked_E).sum(dtype=torch.float64)


def _ce_sum(s_NV: Tensor, lse_N: Tensor, targets: Targets) -> Tensor:
    """Sum of LSE(s) - s_gold."""
    return (lse_N - s_NV.gather(1, targets.gold_N[:, None])[:, 0]).sum(dtype=torch.float64)


def _logit_gradient(s_NV: Tensor, lse_N: Tensor, targets: Targets, alpha: float) -> Tensor:
    """softmax(s) - [(1 - alpha) w + alpha e_gold], written over ``s_NV``."""
    g_NV = s_NV.sub_(lse_N[:, None]).exp_()
    flat = g_NV.view(-1)
    if targets.record is not None and alpha < 1.0:
        # No entry stands twice in a record, so the scatter has no collisions and is deterministic.
        flat.index_add_(
            0, _flat_entries(targets.record, g_NV.shape[1]), targets.record.weights_E.to(g_NV.dtype), alpha=alpha - 1.0
        )
    if alpha > 0.0:
        gold = torch.arange(len(targets), device=g_NV.device) * g_NV.shape[1] + targets.gold_N
        flat.index_add_(0, gold, g_NV.new_full((1,), -alpha).expand(len(targets)))
    return g_NV


def _through_transform(g_NV: Tensor, s_NV: Tensor, head: Head) -> Tensor:
    """Chain rule of ``Head.transform``: d/dz c tanh(kz / c) = k (1 - (s / c)²)."""
    if head.softcap:
        g_NV = g_NV * (1.0 - (s_NV / head.softcap) ** 2)
    return g_NV * head.scale if head.scale != 1.0 else g_NV


@dataclass(frozen=True)
class Score:
    """Sums over N positions of an evaluation.

    On ``agreed`` of the ``comparable`` positions the student's best token is the teacher's.
    """

    ce: float
    kd: float | None
    agreed: int
    comparable: int


@torch.no_grad()
def score(hidden_ND: Tensor, head: Head, targets: Targets, best_N: Tensor | None) -> Score:
    """Cross-entropy, KL to the records, and top-1 agreement; ``best_N`` is the teacher's best id, -1 where unknown."""
    ce = kd = 0.0
    agreed = 0
    for rows, part in _chunks(targets, head.vocabulary):
        s_NV = head.logits(hidden_ND[rows])
        lse_N = torch.logsumexp(s_NV, dim=-1)
        kd += float(_kd_sum(s_NV, lse_N, part))
        ce += float(_ce_sum(s_NV, lse_N, part))
        if best_N is not None:
            agreed += int((s_NV.argmax(-1) == best_N[rows]).sum())
    return Score(ce, None if targets.record is None else kd, agreed, 0 if best_N is None else int((best_N >= 0).sum()))
