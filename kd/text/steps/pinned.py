"""Pinned memory of the host, from and to which a GPU copies while it does other work.

torch rounds pinned memory up to a power of two (ATen/core/CachingHostAllocator.h). Its option
against that, ``pinned_max_round_threshold_mb``, overflows buffers in torch 2.13 (pytorch#192722).
So large tensors are cut into powers of two: one piece takes up to twice its bytes, four take a
fifteenth more at most.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor

#: Pieces of a copy in host memory, at most.
MOST_PIECES = 4


def copy_to_device(values: np.ndarray, device: torch.device) -> Tensor:
    """Return ``values`` on ``device``, without waiting for the work that the device has."""
    tensor = torch.from_numpy(values)
    if device.type != "cuda":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


@functools.cache
def find_copy_stream(device: torch.device, purpose: str) -> torch.cuda.Stream:
    """Return the stream of ``device`` for copies of one ``purpose``, which wait for each other."""
    return torch.cuda.Stream(device)


@contextmanager
def beside_work(device: torch.device, purpose: str) -> Iterator[Any]:
    """Let copies begin when ``device`` has done what it has now, beside what it gets later.

    The value is their stream, a ``torch.cuda.Stream``; None on a CPU.
    """
    if device.type == "cpu":
        yield None
        return
    stream = find_copy_stream(device, purpose)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        yield stream


def copy_to_pieces(tensor: Tensor) -> list[Tensor]:
    """Copy the bytes of ``tensor`` to the host, which pins their pieces if there is a GPU.

    From a GPU they may still be on their way.
    """
    flat = tensor.flatten().view(torch.uint8)
    pinned = torch.cuda.is_available()
    return [
        torch.empty(len(part), dtype=part.dtype, pin_memory=pinned).copy_(part, non_blocking=True)
        for part in flat.split(cut_pieces(len(flat)))
    ]


def copy_from_pieces(pieces: list[Tensor], target: Tensor) -> None:
    """Begin to copy the bytes of ``pieces`` into ``target``, whose elements must lie in order."""
    parts = target.view(-1).view(torch.uint8).split([len(each) for each in pieces])
    for part, piece in zip(parts, pieces, strict=True):
        part.copy_(piece, non_blocking=True)


def cut_pieces(size: int) -> list[int]:
    """Cut ``size`` bytes into the largest powers of two, and what is left of them."""
    pieces: list[int] = []
    while size and len(pieces) < MOST_PIECES - 1:
        pieces.append(1 << (size.bit_length() - 1))
        size -= pieces[-1]
    return [*pieces, size] if size else pieces
