"""Products of factors in half precision, summed and returned in float32.

A product of two numbers in bfloat16 or float16 is exact in float32, so only its sums are rounded.
CUDA's libraries do this in one call. Elsewhere the factors are converted first: that gives the same
numbers up to the order of the sums, and TF32, where a GPU uses it, still holds every such factor.

On a CPU torch hands products in float32 to oneDNN only where they may be rounded to bfloat16. That
changes no factor that was in bfloat16 before, so it is allowed for these. The sums are in float32.
oneDNN uses AMX where the CPU has it, and AVX-512 on AMD, which torch's default (MKL) does not.

Shapes: N positions, D hidden width, V rows of a weight.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

#: Rows of a product whose factors are converted at a time. More would be read from memory again.
CONVERTED_ROWS = 8192


def write_product_(out_NV: Tensor, a_ND: Tensor, b_DV: Tensor) -> None:
    """Write a b into ``out_NV``, whose dtype is that of the factors or a wider one."""
    if out_NV.dtype == a_ND.dtype:
        torch.mm(a_ND, b_DV, out=out_NV)
    elif sums_wide(a_ND, out_NV.dtype):
        torch.mm(a_ND, b_DV, out_dtype=out_NV.dtype, out=out_NV)
    else:
        with _exact_products(a_ND):
            b_DV = b_DV.to(out_NV.dtype)
            for out_nV, a_nD in _pair_rows(out_NV, a_ND):
                torch.mm(a_nD.to(out_NV.dtype), b_DV, out=out_nV)


def add_product_(sum_VD: Tensor, a_VN: Tensor, b_ND: Tensor) -> None:
    """Add a b to ``sum_VD``, in place; its dtype is that of the factors or a wider one."""
    if sums_wide(a_VN, sum_VD.dtype):
        torch.addmm(sum_VD, a_VN, b_ND, out_dtype=sum_VD.dtype, out=sum_VD)
    else:
        with _exact_products(a_VN):
            b_ND = b_ND.to(sum_VD.dtype)
            for sum_vD, a_vN in _pair_rows(sum_VD, a_VN):
                sum_vD.addmm_(a_vN.to(sum_VD.dtype), b_ND)


def sums_wide(factor: Tensor, dtype: torch.dtype) -> bool:
    """Whether the device of ``factor`` multiplies in its dtype and sums in the wider ``dtype``."""
    return (
        factor.is_cuda
        and dtype == torch.float32
        and factor.dtype != dtype
        and can_sum_wide(factor.device, factor.dtype)
    )


@functools.cache
def can_sum_wide(device: torch.device, dtype: torch.dtype) -> bool:
    """Try both products on a GPU, once: not every build of torch has them for ``dtype``."""
    sum_DD = torch.ones(16, 16, device=device)
    ones_DD = torch.ones(16, 16, dtype=dtype, device=device)
    try:
        torch.mm(ones_DD, ones_DD, out_dtype=torch.float32, out=sum_DD)
        torch.addmm(sum_DD, ones_DD, ones_DD, out_dtype=torch.float32, out=sum_DD)
    except RuntimeError:
        return False
    return bool((sum_DD == 32.0).all())  # 16 products of 1, twice


@functools.cache
def multiplies_bfloat16(device: torch.device) -> bool:
    """Whether ``device`` is a CPU with instructions for bfloat16, for which oneDNN is used."""
    if device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return False
    known = torch.cpu.get_capabilities()
    return bool(known.get("avx512_bf16") or known.get("amx_bf16"))


@contextmanager
def _exact_products(factor: Tensor) -> Iterator[None]:
    """Let oneDNN multiply numbers in float32 that bfloat16 holds, if that is ``factor``'s dtype.

    This switch of torch acts on the whole process, so no other product may run beside it.
    """
    if factor.dtype != torch.bfloat16 or not multiplies_bfloat16(factor.device):
        yield
        return
    products: Any = torch.backends.mkldnn.matmul  # type: ignore[attr-defined]
    before = products.fp32_precision
    products.fp32_precision = "bf16"
    try:
        yield
    finally:
        products.fp32_precision = before


def _pair_rows(out_NV: Tensor, a_ND: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield some rows of a product, and those of its first factor."""
    return zip(out_NV.split(CONVERTED_ROWS), a_ND.split(CONVERTED_ROWS), strict=True)
