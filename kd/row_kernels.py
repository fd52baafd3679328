"""Triton kernels for a GPU: what the loss needs of each row of logits, and the gradient written over them; and what a
capture needs of rows and of blocks of the vocabulary.

The logits stay in the dtype of the matrix product that made them, are read twice and written once. All else is float32
in registers: what the model does to its logits (``kd.models.Head``), both softmaxes, and their sums. The few entries of
a record are not the kernels' business: ``kd.student_rows`` gathers their logits before and sets their gradients after.

A row may be longer than its vocabulary: ``z_NV`` is what a slice of a wider buffer is, so that rows can be aligned.

Bytes of each logit in bfloat16: 2 read, then 2 read and 2 written; counted so, PyTorch's own operations move some 30.

Needs triton, which CUDA builds of torch come with. Under ``TRITON_INTERPRET=1`` the same kernels run on a CPU, slowly.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from kd.models import Head

REDUCE_BLOCK, WRITE_BLOCK, WARPS = 4096, 2048, 8


@dataclass(frozen=True)
class Rows:
    """Sums over the rows of the student's logits s, (N,) in float32; None where they were not asked for.

    ``lse`` is LSE(s), ``soft_lse`` LSE(s / T), ``total`` the sum of s, and ``mean`` E_q[s] with q = softmax(s / T).
    """

    lse_N: Tensor
    soft_lse_N: Tensor
    total_N: Tensor | None
    mean_N: Tensor | None


#: A head that leaves x Wᵀ as it is.
PLAIN = Head(torch.empty(0), None, 1.0, None, 0)


def reduce_rows(
    z_NV: Tensor,
    head: Head = PLAIN,
    temperature: float = 1.0,
    total: bool = False,
    mean: bool = False,
    least: float = -math.inf,
) -> Rows:
    """The sums of each row; ``z_NV`` is x Wᵀ, before the head's bias, scale and soft cap.

    A logit below ``least`` counts as that: where one is -inf, ``mean`` needs it.
    """
    lse_N, soft_lse_N, total_N, mean_N = z_NV.new_empty((4, len(z_NV)), dtype=torch.float32)
    tempered = temperature != 1.0 or mean
    _reduce[(len(z_NV),)](
        z_NV,
        head.bias,
        lse_N,
        soft_lse_N,
        total_N,
        mean_N,
        z_NV.shape[1],
        z_NV.stride(0),
        1.0 / temperature,
        head.scale,
        head.softcap or 1.0,
        least,
        BIASED=head.bias is not None,
        CAPPED=bool(head.softcap),
        TEMPERED=tempered,
        TOTAL=total,
        MEAN=mean,
        BLOCK=REDUCE_BLOCK,
        num_warps=WARPS,
    )
    return Rows(lse_N, soft_lse_N if tempered else lse_N, total_N if total else None, mean_N if mean else None)


def reduce_blocks(s_NV: Tensor, lse_N: Tensor, block: int, least: float) -> tuple[Tensor, Tensor]:
    """Sum and maximum (N, J) of softmax(s) over each ``block`` of tokens; a logit counts as ``least`` or more."""
    blocks = triton.cdiv(s_NV.shape[1], block)
    sums_NJ, largest_NJ = s_NV.new_empty((2, len(s_NV), blocks), dtype=torch.float32)
    grid = (len(s_NV), triton.cdiv(blocks * block, WRITE_BLOCK))
    _blocks[grid](
        s_NV,
        lse_N,
        sums_NJ,
        largest_NJ,
        s_NV.shape[1],
        s_NV.stride(0),
        blocks,
        least,
        BLOCKS=max(WRITE_BLOCK // block, 1),
        BLOCK=block,
        num_warps=WARPS,
    )
    return sums_NJ, largest_NJ


def write_gradient_(
    z_NV: Tensor, head: Head, temperature: float, rows: Rows, hard_N: Tensor, soft_N: Tensor, flat: float
) -> None:
    """Turn x Wᵀ into hard * softmax(s) + soft * softmax(s / T) - flat, times ds/dz: the gradient with respect to it."""
    tempered = temperature != 1.0
    if not tempered:
        hard_N = hard_N + soft_N
    grid = (len(z_NV), triton.cdiv(z_NV.shape[1], WRITE_BLOCK))
    _write[grid](
        z_NV,
        head.bias,
        rows.lse_N,
        rows.soft_lse_N,
        hard_N.float(),
        soft_N.float(),
        z_NV.shape[1],
        z_NV.stride(0),
        1.0 / temperature,
        head.scale,
        head.softcap or 1.0,
        flat,
        BIASED=head.bias is not None,
        CAPPED=bool(head.softcap),
        TEMPERED=tempered,
        BLOCK=WRITE_BLOCK,
        num_warps=WARPS,
    )


@triton.jit
def _student(z, bias_V, columns, inside, scale, softcap, BIASED: tl.constexpr, CAPPED: tl.constexpr):  # type: ignore[no-untyped-def]
    """s of a block: softcap(scale * (z + bias)) in float32. tanh(x) = 2 sigmoid(2x) - 1."""
    s = z.to(tl.float32)
    if BIASED:
        s += tl.load(bias_V + columns, mask=inside, other=0.0).to(tl.float32)
    s *= scale
    if CAPPED:
        s = softcap * (2.0 * tl.sigmoid(2.0 * s / softcap) - 1.0)
    return s


@triton.jit
def _reduce(  # type: ignore[no-untyped-def]
    z_NV,
    bias_V,
    lse_N,
    soft_lse_N,
    total_N,
    mean_N,
    vocabulary,
    stride,
    beta,
    scale,
    softcap,
    least,
    BIASED: tl.constexpr,
    CAPPED: tl.constexpr,
    TEMPERED: tl.constexpr,
    TOTAL: tl.constexpr,
    MEAN: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One row a program, a block at a time. Sums stay per lane until the end, scaled by the largest logit so far."""
    row = tl.program_id(0).to(tl.int64)
    best = -float("inf")
    sum_B = tl.zeros((BLOCK,), tl.float32)
    soft_B = tl.zeros((BLOCK,), tl.float32)
    product_B = tl.zeros((BLOCK,), tl.float32)
    total_B = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, vocabulary, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        inside = columns < vocabulary
        z = tl.load(z_NV + row * stride + columns, mask=inside, other=0.0)
        s = _student(z, bias_V, columns, inside, scale, softcap, BIASED, CAPPED)
        s = tl.where(s < least, least, s)  # NaN stays NaN
        s_or_none = tl.where(inside, s, -float("inf"))
        top = tl.maximum(best, tl.max(s_or_none, 0))
        sum_B = sum_B * tl.exp(best - top) + tl.exp(s_or_none - top)
        if TEMPERED:
            kept = tl.exp(beta * (best - top))
            share_B = tl.exp(beta * (s_or_none - top))
            soft_B = soft_B * kept + share_B
            if MEAN:
                product_B = product_B * kept + tl.where(inside, share_B * s, 0.0)
        if TOTAL:
            total_B += tl.where(inside, s, 0.0)
        best = top
    tl.store(lse_N + row, best + tl.log(tl.sum(sum_B, 0)))
    if TEMPERED:
        soft = tl.sum(soft_B, 0)
        tl.store(soft_lse_N + row, beta * best + tl.log(soft))
        if MEAN:
            tl.store(mean_N + row, tl.sum(product_B, 0) / soft)
    if TOTAL:
        tl.store(total_N + row, tl.sum(total_B, 0))


@triton.jit
def _blocks(  # type: ignore[no-untyped-def]
    s_NV,
    lse_N,
    sums_NJ,
    largest_NJ,
    vocabulary,
    stride,
    blocks,
    least,
    BLOCKS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Some blocks of a row a program."""
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1) * BLOCKS + tl.arange(0, BLOCKS)
    columns = block[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    inside = columns < vocabulary
    s = tl.load(s_NV + row * stride + columns, mask=inside, other=0.0).to(tl.float32)
    s = tl.where(s < least, least, s)
    p = tl.where(inside, tl.exp(s - tl.load(lse_N + row)), 0.0)
    place = row * blocks + block
    tl.store(sums_NJ + place, tl.sum(p, 1), mask=block < blocks)
    tl.store(largest_NJ + place, tl.max(p, 1), mask=block < blocks)


@triton.jit
def _write(  # type: ignore[no-untyped-def]
    z_NV,
    bias_V,
    lse_N,
    soft_lse_N,
    hard_N,
    soft_N,
    vocabulary,
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
    """One block of a row a program, read and written once."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < vocabulary
    place = z_NV + row * stride + columns
    z = tl.load(place, mask=inside, other=0.0)
    s = _student(z, bias_V, columns, inside, scale, softcap, BIASED, CAPPED)
    g = tl.load(hard_N + row) * tl.exp(s - tl.load(lse_N + row)) - flat
    if TEMPERED:
        g += tl.load(soft_N + row) * tl.exp(beta * s - tl.load(soft_lse_N + row))
    if CAPPED:
        g *= 1.0 - (s / softcap) * (s / softcap)
    tl.store(place, (g * scale).to(z_NV.dtype.element_ty), mask=inside)
