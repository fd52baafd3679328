"""Copies to this machine's memory, made while the device does other work.

On a GPU all tensors of a chunk go to the host as one packed copy, on a stream of its own, into
pinned memory. On a CPU nothing is copied.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from kd.text.steps.pinned import beside_work

#: The dtype and the shape of a tensor in a packed buffer.
_Form = tuple[torch.dtype, torch.Size]


@dataclass(frozen=True)
class HostCopy:
    """Tensors on their way to the host; ``wait`` returns them as arrays.

    Any thread may wait. Do not write to the tensors on a CPU before the arrays are used.
    """

    tensors: dict[str, Tensor]
    forms: dict[str, _Form]
    arrived: torch.cuda.Event | None = None

    @classmethod
    def start(cls, tensors: dict[str, Tensor]) -> HostCopy:
        """Start the copy of ``tensors``, of which there must be at least one, all on one device."""
        if next(iter(tensors.values())).device.type == "cpu":
            return cls(tensors, {})
        packed, forms = pack_tensors(tensors)
        with beside_work(packed.device, "outputs") as stream:
            host = torch.empty(packed.shape, dtype=packed.dtype, pin_memory=True)
            host.copy_(packed, non_blocking=True)
            # Its memory must not be given to other tensors before the copy has ended.
            packed.record_stream(stream)
            return cls({"packed": host}, forms, stream.record_event())

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.nbytes for tensor in self.tensors.values())

    def wait(self) -> dict[str, np.ndarray]:
        """Return the tensors as arrays, once all of them have arrived."""
        if self.arrived is None:
            return {name: tensor.numpy() for name, tensor in self.tensors.items()}
        self.arrived.synchronize()
        return unpack_arrays(self.tensors["packed"], self.forms)


def pack_tensors(tensors: dict[str, Tensor]) -> tuple[Tensor, dict[str, _Form]]:
    """Copy ``tensors`` into one buffer of bytes; also return their forms, in their order there."""
    # The widest types come first, so that each tensor begins at a multiple of its own width.
    ordered = sorted(tensors.items(), key=lambda item: -item[1].itemsize)
    packed = torch.cat([tensor.flatten().view(torch.uint8) for _, tensor in ordered])
    return packed, {name: (tensor.dtype, tensor.shape) for name, tensor in ordered}


def unpack_arrays(packed: Tensor, forms: dict[str, _Form]) -> dict[str, np.ndarray]:
    """Return the arrays of a packed buffer in this machine's memory; nothing is copied."""
    parts = packed.split([dtype.itemsize * shape.numel() for dtype, shape in forms.values()])
    return {
        name: part.view(dtype).view(shape).numpy()
        for part, (name, (dtype, shape)) in zip(parts, forms.items(), strict=True)
    }
