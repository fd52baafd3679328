"""Write tensors as a safetensors file, with a block of one of them as the only copy.

The library's own writer first copies all tensors of a GPU to this machine, and ends the process
where it finds no memory.

    8 bytes    length of the header, little-endian
    header     JSON: {name: {dtype, shape, data_offsets}}, padded with spaces to a multiple of 8
    data       the tensors, one after the other, with those of the widest numbers first
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

#: Names of the numbers that a checkpoint may hold.
_DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
#: Bytes of a tensor that are written at once.
_BLOCK_BYTES = 16 * 2**20


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write ``tensors`` to ``path``, as ``safetensors.torch.load_file`` reads them.

    A tensor that is on a GPU, or not contiguous, is copied by rows, some 16 MiB at a time. Raises
    ``OSError`` where the disk is full, and ``KeyError`` for a dtype that no checkpoint holds.
    """
    # Numbers of 8 bytes first, then of 4, 2 and 1: each begins at a multiple of its size.
    names = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))
    content = {}
    begin = 0
    for name in names:
        tensor = tensors[name]
        offsets = [begin, begin + tensor.numel() * tensor.element_size()]
        shape = list(tensor.shape)
        content[name] = {"dtype": _DTYPES[tensor.dtype], "shape": shape, "data_offsets": offsets}
        begin = offsets[1]
    text = json.dumps(content, separators=(",", ":"), ensure_ascii=False).encode()
    header = text.ljust(8 * math.ceil(len(text) / 8))
    with path.open("wb") as file:
        file.write(len(header).to_bytes(8, "little"))
        file.write(header)
        for name in names:
            for block in _iterate_blocks(tensors[name].detach()):
                file.write(block.cpu().view(torch.uint8).numpy().data)


def list_tensors(path: Path) -> set[str]:
    """List the names of the tensors in a safetensors file."""
    with safe_open(path, framework="pt") as file:
        return set(file.keys())


def _iterate_blocks(tensor: Tensor) -> Iterator[Tensor]:
    """The numbers of ``tensor`` in their order, in parts of one dimension."""
    if tensor.is_contiguous():
        yield from tensor.reshape(-1).split(max(_BLOCK_BYTES // tensor.element_size(), 1))
        return
    row_bytes = tensor[0].numel() * tensor.element_size()
    for rows in tensor.split(max(_BLOCK_BYTES // max(row_bytes, 1), 1)):
        yield rows.reshape(-1).contiguous()  # one row may be reshaped without a copy
