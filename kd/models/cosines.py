"""The cosine transform of hidden states: h = z C, with C the DCT-II matrix of ``cache.rounding``.

Records in int8 store z, the cosines, in place of h.

Shapes: N positions, D hidden width.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from cache.rounding import make_cosine_basis
from kd.models.precision import float32_products


def to_cosines(hidden_ND: Tensor) -> Tensor:
    """Return the cosines z = h Cᵀ of hidden states h, in their dtype."""
    with float32_products():
        return hidden_ND @ _get_basis(hidden_ND.shape[1], hidden_ND.dtype, hidden_ND.device).T


def from_cosines(cosines_ND: Tensor) -> Tensor:
    """Return the hidden states h = z C of cosines z, in their dtype."""
    with float32_products():
        return cosines_ND @ _get_basis(cosines_ND.shape[1], cosines_ND.dtype, cosines_ND.device)


@functools.lru_cache(maxsize=4)
def _get_basis(width: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return C (D, D); the last few are kept, because computing one takes longer than using it."""
    return torch.from_numpy(make_cosine_basis(width)).to(device, dtype)
