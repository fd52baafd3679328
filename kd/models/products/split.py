"""Products in all of float32, as sums of products in bfloat16.

The matrix units of a GPU multiply bfloat16 some fifteen times as fast as its other units multiply
float32. A number in float32 is the sum of three in bfloat16, each of which holds the next 8 of its
24 bits. So with x = x0 + x1 + x2 and w = w0 + w1 + w2

    x w = sum of xi wj with i + j < 3,

where what is left out lies below 2^-24 of x w, the rounding of float32 itself. The sums are in
float32. A weight that is stored in bfloat16 has one part, so its product takes three; one in
float32 takes six. Three products of two parts each (hi hi + hi lo + lo hi) would do for both, but
at ten times the error of float32: ``bench/products.py`` prints all of them.

Shapes: N positions, D hidden width, V rows of the weight.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kd.models.precision import find_hardware
from kd.models.products.wide import add_product_, can_sum_wide, write_product_

#: Parts in bfloat16 that hold a number of a dtype exactly.
_PARTS = {torch.bfloat16: 1, torch.float32: 3}


def can_split(device: torch.device) -> bool:
    """Whether ``device`` is a GPU with matrix units for bfloat16 that sum in float32."""
    return (
        device.type == "cuda"
        and find_hardware(device).precision == "bf16"
        and can_sum_wide(device, torch.bfloat16)
    )


def split_into_halves(matrix: Tensor) -> tuple[Tensor, ...]:
    """Return matrices in bfloat16 whose sum is ``matrix``, largest first.

    A matrix in bfloat16 is its only part.
    """
    parts = [matrix.bfloat16()]
    rest = matrix
    while len(parts) < _PARTS[matrix.dtype]:
        rest = rest - parts[-1]
        parts.append(rest.bfloat16())
    return tuple(parts)


def write_split_product_(out_NV: Tensor, x_ND: Tensor, parts: tuple[Tensor, ...]) -> None:
    """Write x Wᵀ into ``out_NV``, in float32; W (V, D) is the sum of ``parts``."""
    x_parts = split_into_halves(x_ND)
    places = [(i, j) for i in range(len(x_parts)) for j in range(len(parts))]
    # The smallest terms first: added to large ones, they would lose their last bits.
    kept = sorted((each for each in places if sum(each) < len(x_parts)), key=sum, reverse=True)
    for number, (i, j) in enumerate(kept):
        put = add_product_ if number else write_product_
        put(out_NV, x_parts[i], parts[j].T)
