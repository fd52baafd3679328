"""Copies to this machine's memory, made while the device does other work.

On a GPU all tensors of a chunk go to the host as one packed copy, on a stream of its own, into
pinned memory. On a CPU nothing is copied.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from kd.text.steps.pinned import beside_work


@dataclass(frozen=True)
class _Place:
    """The place of a tensor in a packed buffer: its first byte, dtype and shape."""

    first: int
    dtype: torch.dtype
    shape: torch.Size

    @property
    def stop(self) -> int:
        """The byte after the last one."""
        return self.first + self.dtype.itemsize * math.prod(self.shape)


@dataclass(frozen=True)
class HostCopy:
    """Tensors on their way to the host; ``wait`` returns them as arrays.

    Any thread may wait. Do not write to the tensors on a CPU before the arrays are used.
    """

    tensors: dict[str, Tensor]
    places: dict[str, _Place]
    arrived: torch.cuda.Event | None = None

    @classmethod
    def start(cls, tensors: dict[str, Tensor]) -> HostCopy:
        """Start the copy of ``tensors``, of which there must be at least one, all on one device."""
        if next(iter(tensors.values())).device.type == "cpu":
            return cls(tensors, {})
        packed, places = pack_tensors(tensors)
        with beside_work(packed.device, "outputs") as stream:
            host = torch.empty(packed.shape, dtype=packed.dtype, pin_memory=True)
            host.copy_(packed, non_blocking=True)
            # Its memory must not be given to other tensors before the copy has ended.
            packed.record_stream(stream)
            return cls({"packed": host}, places, stream.record_event())

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.nbytes for tensor in self.tensors.values())

    def wait(self) -> dict[str, np.ndarray]:
        """Return the tensors as arrays, once all of them have arrived."""
        if self.arrived is None:
            return {name: tensor.numpy() for name, tensor in self.tensors.items()}
        self.arrived.synchronize()
        return unpack_arrays(self.tensors["packed"], self.places)


def pack_tensors(tensors: dict[str, Tensor]) -> tuple[Tensor, dict[str, _Place]]:
    """Copy ``tensors`` into one buffer of bytes; also return the place of each in it."""
    places = {}
    first = 0
    # The widest types come first, so that each tensor begins at a multiple of its own width.
    ordered = sorted(tensors.items(), key=lambda item: -item[1].itemsize)
    for name, tensor in ordered:
        places[name] = _Place(first, tensor.dtype, tensor.shape)
        first = places[name].stop
    return torch.cat([tensor.flatten().view(torch.uint8) for _, tensor in ordered]), places


def unpack_arrays(packed: Tensor, places: dict[str, _Place]) -> dict[str, np.ndarray]:
    """Return the arrays of a packed buffer in this machine's memory; nothing is copied."""
    return {
        name: packed[place.first : place.stop].view(place.dtype).view(place.shape).numpy()
        for name, place in places.items()
    }
