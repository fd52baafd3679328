"""Hidden states and their cosines, which records in int8 keep: h = z C with C the DCT-II of ``cache.codec``.

Shapes: N positions, D hidden width.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from cache.codec import cosine_basis
from kd.precision import float32_products


def to_cosines(hidden_ND: Tensor) -> Tensor:
    """z = h C^T, in the dtype of the states."""
    with float32_products():
        return hidden_ND @ _basis(hidden_ND.shape[1], hidden_ND.dtype, hidden_ND.device).T


def from_cosines(cosines_ND: Tensor) -> Tensor:
    """h = z C, in the dtype of the cosines."""
    with float32_products():
        return cosines_ND @ _basis(cosines_ND.shape[1], cosines_ND.dtype, cosines_ND.device)


@functools.lru_cache(maxsize=4)
def _basis(width: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """C, (D, D)."""
    return torch.from_numpy(cosine_basis(width)).to(device, dtype)
