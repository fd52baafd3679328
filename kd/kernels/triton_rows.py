"""Triton kernels for rows of the student's logits: their sums, and the gradient.

The gradient overwrites the logits, which stay in the dtype of the matrix product that made them,
are read twice and written once. All else is float32 in registers: the model's own transform of its
logits (``kd.models.lm_head.LMHead``), both softmaxes, and their sums. The kernels do not handle a
record's few entries: ``kd.loss.student_rows`` gathers their logits before and sets their gradients
after.

Rows are padded (``kd.kernels.padded_rows``): so that each access is of 16 bytes, a kernel reads and
writes the padding up to the column ``end``, and leaves it out of every sum.

Memory traffic in bfloat16 is 6 bytes for each logit: 2 read, then 2 read and 2 written. PyTorch's
own operations move about 30. The kernels need triton, which CUDA builds of torch include. With
``TRITON_INTERPRET=1`` the same kernels run on a CPU, slowly.

Shapes: N rows, V vocabulary, U lanes of a program.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from kd.kernels.padded_rows import count_columns
from kd.models.lm_head import LMHead

#: Logits that a program reduces at a time.
REDUCE_BLOCK = 4096
#: Logits that a program reads and writes once.
WRITE_BLOCK = 2048
#: Warps of a program.
WARPS = 8


@dataclass(frozen=True)
class RowSums:
    """Sums over the rows of the student's logits s, (N,) in float32; None where not requested.

    ``lse_N`` is LSE(s), ``soft_lse_N`` LSE(s / T), ``total_N`` the sum of s, and ``mean_N`` E_q[s]
    with q = softmax(s / T).
    """

    lse_N: Tensor
    soft_lse_N: Tensor
    total_N: Tensor | None
    mean_N: Tensor | None


#: An LM head that leaves x Wᵀ as it is.
PLAIN_LM_HEAD = LMHead(torch.empty(0), None, 1.0, None, 0)


def reduce_rows(
    z_NV: Tensor,
    lm_head: LMHead = PLAIN_LM_HEAD,
    temperature: float = 1.0,
    total: bool = False,
    mean: bool = False,
) -> RowSums:
    """Return the sums of each row.

    ``z_NV`` is x Wᵀ, before the LM head's bias, scale and soft cap.
    """
    lse_N, soft_lse_N, total_N, mean_N = z_NV.new_empty((4, len(z_NV)), dtype=torch.float32)
    tempered = temperature != 1.0 or mean  # the kernel sums E_q[s] with the tempered softmax
    _reduce_rows_kernel[(len(z_NV),)](
        z_NV,
        lm_head.bias,
        lse_N,
        soft_lse_N,
        total_N,
        mean_N,
        z_NV.shape[1],
        count_columns(z_NV),
        z_NV.stride(0),
        1.0 / temperature,
        lm_head.scale,
        lm_head.softcap or 1.0,
        BIASED=lm_head.bias is not None,
        CAPPED=bool(lm_head.softcap),
        TEMPERED=tempered,
        TOTAL=total,
        MEAN=mean,
        BLOCK=REDUCE_BLOCK,
        num_warps=WARPS,
    )
    return RowSums(
        lse_N,
        soft_lse_N if tempered else lse_N,
        total_N if total else None,
        mean_N if mean else None,
    )


def write_gradient_(
    z_NV: Tensor,
    lm_head: LMHead,
    temperature: float,
    rows: RowSums,
    hard_N: Tensor,
    soft_N: Tensor,
    flat: float,
) -> None:
    """Turn x Wᵀ into the gradient with respect to it, in place.

    The gradient is hard * softmax(s) + soft * softmax(s / T) - flat, times ds/dz.
    """
    tempered = temperature != 1.0
    if not tempered:
        hard_N = hard_N + soft_N  # at T = 1 both softmaxes are one
    grid = (len(z_NV), triton.cdiv(z_NV.shape[1], WRITE_BLOCK))
    _write_gradient_kernel[grid](
        z_NV,
        lm_head.bias,
        rows.lse_N,
        rows.soft_lse_N,
        hard_N.float(),
        soft_N.float(),
        z_NV.shape[1],
        count_columns(z_NV),
        z_NV.stride(0),
        1.0 / temperature,
        lm_head.scale,
        lm_head.softcap or 1.0,
        flat,
        BIASED=lm_head.bias is not None,
        CAPPED=bool(lm_head.softcap),
        TEMPERED=tempered,
        BLOCK=WRITE_BLOCK,
        num_warps=WARPS,
    )


@triton.jit
def _load_logits(row_V, columns, inside, end):  # type: ignore[no-untyped-def]
    """Logits of a row; 0 outside the vocabulary, where the padding holds anything."""
    # A mask that ends with the vocabulary would make loads of one element each.
    return tl.where(inside, tl.load(row_V + columns, mask=columns < end, other=0.0), 0.0)


@triton.jit
def _transform_logits(  # type: ignore[no-untyped-def]
    z, bias_V, columns, inside, scale, softcap, BIASED: tl.constexpr, CAPPED: tl.constexpr
):
    """s of a block in float32: softcap(scale * (z + bias)). tanh(x) = 2 sigmoid(2x) - 1."""
    s = z.to(tl.float32)
    if BIASED:
        s += tl.load(bias_V + columns, mask=inside, other=0.0).to(tl.float32)
    s *= scale
    if CAPPED:
        s = softcap * (2.0 * tl.sigmoid(2.0 * s / softcap) - 1.0)
    return s


@triton.jit
def _reduce_rows_kernel(  # type: ignore[no-untyped-def]
    z_NV,
    bias_V,
    lse_N,
    soft_lse_N,
    total_N,
    mean_N,
    vocabulary,
    end,
    stride,
    beta,
    scale,
    softcap,
    BIASED: tl.constexpr,
    CAPPED: tl.constexpr,
    TEMPERED: tl.constexpr,
    TOTAL: tl.constexpr,
    MEAN: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Each program reduces one row, a block at a time.

    Sums stay per lane until the end, and are relative to the largest logit so far.
    """
    row = tl.program_id(0).to(tl.int64)  # row * stride may exceed int32
    best = -float("inf")
    sum_U = tl.zeros((BLOCK,), tl.float32)
    soft_U = tl.zeros((BLOCK,), tl.float32)
    product_U = tl.zeros((BLOCK,), tl.float32)
    total_U = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, vocabulary, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        inside = columns < vocabulary
        z = _load_logits(z_NV + row * stride, columns, inside, end)
        s = _transform_logits(z, bias_V, columns, inside, scale, softcap, BIASED, CAPPED)
        # Beyond the vocabulary -inf adds 0 to a sum of exponentials.
        s_or_none = tl.where(inside, s, -float("inf"))
        # A new maximum rescales the sums so far.
        top = tl.maximum(best, tl.max(s_or_none, 0))
        sum_U = sum_U * tl.exp(best - top) + tl.exp(s_or_none - top)
        if TEMPERED:
            kept = tl.exp(beta * (best - top))
            share_U = tl.exp(beta * (s_or_none - top))
            soft_U = soft_U * kept + share_U
            if MEAN:
                product_U = product_U * kept + tl.where(inside, share_U * s, 0.0)
        if TOTAL:
            total_U += tl.where(inside, s, 0.0)
        best = top
    tl.store(lse_N + row, best + tl.log(tl.sum(sum_U, 0)))
    if TEMPERED:
        soft = tl.sum(soft_U, 0)
        tl.store(soft_lse_N + row, beta * best + tl.log(soft))
        if MEAN:
            tl.store(mean_N + row, tl.sum(product_U, 0) / soft)
    if TOTAL:
        tl.store(total_N + row, tl.sum(total_U, 0))


@triton.jit
def _write_gradient_kernel(  # type: ignore[no-untyped-def]
    z_NV,
    bias_V,
    lse_N,
    soft_lse_N,
    hard_N,
    soft_N,
    vocabulary,
    end,
    stride,
    beta,
    scale,
    softcap,
    flat,
    BIASED: tl.constexpr,
    CAPPED: tl.constexpr,
    TEMPERED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Each program reads and writes one block of one row, once."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < vocabulary
    z = _load_logits(z_NV + row * stride, columns, inside, end)
    s = _transform_logits(z, bias_V, columns, inside, scale, softcap, BIASED, CAPPED)
    g = tl.load(hard_N + row) * tl.exp(s - tl.load(lse_N + row)) - flat
    if TEMPERED:
        g += tl.load(soft_N + row) * tl.exp(beta * s - tl.load(soft_lse_N + row))
    if CAPPED:
        g *= 1.0 - (s / softcap) * (s / softcap)  # d c tanh(x / c) / dx
    g = (g * scale).to(z_NV.dtype.element_ty)
    tl.store(z_NV + row * stride + columns, g, mask=columns < end)
