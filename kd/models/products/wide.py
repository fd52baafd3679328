"""Products of factors in half precision, summed and returned in float32.

A product of two numbers in bfloat16 or float16 is exact in float32, so only its sums are rounded.
CUDA's libraries do this in one call. Elsewhere the factors are converted first: that gives the same
numbers up to the order of the sums, and TF32, where a GPU uses it, still holds every such factor.

Shapes: N positions, D hidden width, V rows of a weight.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor


def write_product_(out_NV: Tensor, a_ND: Tensor, b_DV: Tensor) -> None:
    """Write a b into ``out_NV``, whose dtype is that of the factors or a wider one."""
    if out_NV.dtype == a_ND.dtype:
        torch.mm(a_ND, b_DV, out=out_NV)
    elif sums_wide(a_ND, out_NV.dtype):
        torch.mm(a_ND, b_DV, out_dtype=out_NV.dtype, out=out_NV)
    else:
        torch.mm(a_ND.to(out_NV.dtype), b_DV.to(out_NV.dtype), out=out_NV)


def add_product_(sum_VD: Tensor, a_VN: Tensor, b_ND: Tensor) -> None:
    """Add a b to ``sum_VD``, in place; its dtype is that of the factors or a wider one."""
    if sums_wide(a_VN, sum_VD.dtype):
        torch.addmm(sum_VD, a_VN, b_ND, out_dtype=sum_VD.dtype, out=sum_VD)
    else:
        sum_VD.addmm_(a_VN.to(sum_VD.dtype), b_ND.to(sum_VD.dtype))


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
