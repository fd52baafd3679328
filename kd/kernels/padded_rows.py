"""Rows of logits that the kernels read and write 16 bytes at a time, whatever the vocabulary.

A vocabulary such as 151,669 is no multiple of anything: in rows of that length all but the first
begin at odd addresses, and a mask that ends there allows no more than one element at a time. So
rows are padded, and the kernels go on to the end of their last 16 elements.

Shapes: N rows, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

#: Rows begin at multiples of this: 64 elements of 2 bytes are a whole line of GPU memory.
ALIGNMENT = 64
#: Kernels touch whole groups of this many elements. Triton knows of a number whether it is a
#: multiple of 16.
GROUP = 16


def make_rows(like: Tensor, count: int, vocabulary: int, dtype: torch.dtype) -> Tensor:
    """Return memory for ``count`` padded rows of ``vocabulary`` numbers, on the device of ``like``.

    The kernels may overwrite the padding.
    """
    return like.new_empty(count, _round_up(vocabulary, ALIGNMENT), dtype=dtype)[:, :vocabulary]


def count_columns(z_NV: Tensor) -> int:
    """Return how many numbers of a row the kernels may touch.

    ``z_NV`` comes from ``make_rows``, or its rows have no padding.
    """
    padded = _round_up(z_NV.shape[1], GROUP)
    return padded if z_NV.stride(0) >= padded else z_NV.shape[1]


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple
