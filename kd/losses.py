"""The loss: LM head, distillation and cross-entropy in one chunked pass that never builds (N, V).

    L = (1 - alpha) T^2 [LSE(s / T) - E_p[s / T] - H(p)]   forward KL(teacher || student) at temperature T
      +      alpha      [LSE(s) - s_gold]                  cross-entropy of the hard label

with s the student's logits and p the teacher's distribution at T (``kd.targets``). Where p is a sample, E[sample] = p
and L is linear in it, so value and gradient are unbiased: their mean over draws of the record is full distillation.
The gradient with respect to s is (1 - alpha) T [softmax(s / T) - p] + alpha [softmax(s) - e_gold]; at T = 1 both parts
share one softmax, and the hard label is one more entry.

Shapes: N positions that have a target, V vocabulary, D hidden width.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kd.models import Head
from kd.targets import Chunk, Targets

CHUNK_ELEMENTS = 2**24  # logits held at once: 64 MiB in float32


@dataclass(frozen=True)
class LossTerms:
    """Sums over N positions, in nats (float64). ``total`` carries the gradient; the parts are for reporting.

    ``kd`` is T^2 KL, so that total = (1 - alpha) kd + alpha ce.
    """

    total: Tensor
    kd: Tensor
    ce: Tensor


def distillation_loss(hidden_ND: Tensor, head: Head, targets: Targets, alpha: float) -> LossTerms:
    """The summed loss of N positions; exact gradients for the hidden states, the head's weight and its bias.

    T is the targets' own. Divide ``total`` by the number of targets of the whole optimiser step, not of this
    micro-batch. Matrix products run in the dtype of ``hidden_ND``, everything else in float32 or better.
    """
    if targets.teacher is None and alpha != 1.0:
        raise ValueError(f"alpha must be 1 without the teacher's records, but got {alpha}")
    total, kd, ce = _FusedHead.apply(hidden_ND, head.weight, head.bias, head, targets, alpha)
    return LossTerms(total, kd, ce)


@dataclass(frozen=True)
class _Part:
    """The targets of one chunk."""

    rows: slice
    gold_N: Tensor
    teacher: Chunk | None
    temperature: float


@dataclass(frozen=True)
class _Student:
    """The student's distribution at the positions of a chunk, at some temperature: softmax(s)."""

    s_NV: Tensor
    lse_N: Tensor

    @classmethod
    def of(cls, s_NV: Tensor) -> _Student:
        return cls(s_NV, torch.logsumexp(s_NV, dim=-1))

    def at(self, temperature: float) -> _Student:
        return self if temperature == 1.0 else _Student.of(self.s_NV / temperature)

    def probabilities_(self) -> Tensor:
        """softmax(s), written over the logits."""
        return self.s_NV.sub_(self.lse_N[:, None]).exp_()


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
        for part in _parts(targets, head.vocabulary):
            x_ND = hidden_ND[part.rows]
            s_NV = head.logits(x_ND)
            student = _Student.of(s_NV)
            soft = student.at(part.temperature)
            kd += part.temperature**2 * _kl_sum(soft, part)
            ce += _ce_sum(student, part)
            if not (needs_hidden or needs_weight or needs_bias):
                continue
            if head.softcap:  # its slope needs the logits, over which the gradient is written
                student = replace(student, s_NV=s_NV.clone())
                soft = student if part.temperature == 1.0 else soft
            g_NV = _through_transform(_logit_gradient(student, soft, part, alpha), s_NV, head)
            if d_bias is not None:
                d_bias[: head.vocabulary] += g_NV.sum(0)
            g_NV = g_NV.to(hidden_ND.dtype)
            if d_hidden_ND is not None:
                torch.mm(g_NV, head.weight, out=d_hidden_ND[part.rows])
            if d_weight is not None:
                _add_product(d_weight[: head.vocabulary], g_NV.T, x_ND)
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


def _parts(targets: Targets, vocabulary: int) -> Iterator[_Part]:
    """Cut N positions into runs whose logits hold at most ``CHUNK_ELEMENTS`` numbers."""
    size, teacher = max(CHUNK_ELEMENTS // vocabulary, 1), targets.teacher
    for start in range(0, len(targets), size):
        rows = slice(start, min(start + size, len(targets)))
        chunk = None if teacher is None else teacher.chunk(rows)
        yield _Part(rows, targets.gold_N[rows], chunk, targets.temperature)


def _kl_sum(student: _Student, part: _Part) -> Tensor:
    """Sum of LSE(s) - E_p[s] - H(p); 0 without a teacher."""
    if part.teacher is None:
        return student.lse_N.new_zeros((), dtype=torch.float64)
    return (student.lse_N - part.teacher.entropy_N).sum(dtype=torch.float64) - part.teacher.expected(student.s_NV)


def _ce_sum(student: _Student, part: _Part) -> Tensor:
    """Sum of LSE(s) - s_gold."""
    return (student.lse_N - student.s_NV.gather(1, part.gold_N[:, None])[:, 0]).sum(dtype=torch.float64)


def _logit_gradient(student: _Student, soft: _Student, part: _Part, alpha: float) -> Tensor:
    """(1 - alpha) T [softmax(s / T) - p] + alpha [softmax(s) - e_gold], written over the logits of both.

    At T = 1 ``soft`` is ``student``, and there is one softmax: q - (1 - alpha) p - alpha e_gold.
    """
    if soft is student or part.teacher is None or alpha == 1.0:
        g_NV = student.probabilities_()
        if part.teacher is not None and alpha < 1.0:
            part.teacher.subtract_(g_NV, 1.0 - alpha)
        _subtract_gold_(g_NV, part, alpha)
        return g_NV
    g_NV = soft.probabilities_()
    part.teacher.subtract_(g_NV, 1.0)
    g_NV.mul_((1.0 - alpha) * part.temperature)
    if alpha > 0.0:
        g_NV.add_(student.probabilities_(), alpha=alpha)
        _subtract_gold_(g_NV, part, alpha)
    return g_NV


def _subtract_gold_(g_NV: Tensor, part: _Part, share: float) -> None:
    """g - share * e_gold, in place."""
    if share > 0.0:
        gold = torch.arange(len(part.gold_N), device=g_NV.device) * g_NV.shape[1] + part.gold_N
        g_NV.view(-1).index_add_(0, gold, g_NV.new_full((1,), -share).expand(len(gold)))


def _through_transform(g_NV: Tensor, s_NV: Tensor, head: Head) -> Tensor:
    """Chain rule of ``Head.transform``: d/dz c tanh(kz / c) = k (1 - (s / c)²)."""
    if head.softcap:
        g_NV = g_NV * (1.0 - (s_NV / head.softcap) ** 2)
    return g_NV * head.scale if head.scale != 1.0 else g_NV


@dataclass(frozen=True)
class Score:
    """Sums over N positions of an evaluation, in nats; ``kd`` is KL at the targets' T, without the T^2 of the loss.

    On ``agreed`` of the ``comparable`` positions the student's best token is the teacher's.
    """

    ce: float
    kd: float | None
    agreed: int
    comparable: int


@torch.no_grad()
def score(hidden_ND: Tensor, head: Head, targets: Targets) -> Score:
    """Cross-entropy, KL to the teacher, and top-1 agreement where the teacher's best token is known."""
    ce = kd = 0.0
    agreed = comparable = 0
    for part in _parts(targets, head.vocabulary):
        student = _Student.of(head.logits(hidden_ND[part.rows]))
        ce += float(_ce_sum(student, part))
        if part.teacher is not None:
            kd += float(_kl_sum(student.at(part.temperature), part))
            best_N = part.teacher.best_N()
            agreed += int((student.s_NV.argmax(-1) == best_N).sum())
            comparable += int((best_N >= 0).sum())
    return Score(ce, None if targets.teacher is None else kd, agreed, comparable)
