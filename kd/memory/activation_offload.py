"""Activation offload: what the decoder layers keep for the backward pass waits in host memory.

Autograd hands over each tensor that a layer keeps. Activations of some size are copied to pinned
memory of the host, each once for all who keep it, and come back when the backward pass asks for
them. Weights stay, and so do their copies in the precision of the products. Copies in both
directions are in the order of the device's own work, so nothing waits for them but that work. All
gradients stay the same, bit for bit.

A layer that activation checkpointing recomputes keeps only the hidden states that enter it: then
only these are copied.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from kd.errors import ModelError
from kd.models.layers import find_decoder_layers

#: Bytes below which a tensor stays on the device: most tensors are that small, and all of them
#: together are little.
LEAST_BYTES = 2**16
#: What autograd calls views and casts: a tensor that only these made of a parameter is a weight.
_WEIGHT_NODES = {
    "TBackward0", "TransposeBackward0", "PermuteBackward0", "ViewBackward0", "UnsafeViewBackward0",
    "ReshapeAliasBackward0", "SelectBackward0", "SliceBackward0", "SplitBackward0",
    "UnbindBackward0", "ExpandBackward0", "UnsqueezeBackward0", "ToCopyBackward0",
}  # fmt: skip


def offload_activations(student: PreTrainedModel) -> None:
    """Let ``student``'s layers keep their activations in host memory while it trains.

    Call it after ``checkpoint_activations``. Raises ``ModelError`` for a model without a list of
    decoder layers.
    """
    layers = find_decoder_layers(student)
    if not layers:
        raise ModelError(
            f"train.activation_offload is true, but student.model, a {type(student).__name__}, has "
            "no list of decoder layers.",
            "Set train.activation_offload to false, or use another student.",
        )
    for layer in layers:
        layer.forward = _OffloadedForward(layer, layer.forward)  # type: ignore[method-assign]


@dataclass
class _OffloadedForward:
    """The ``forward`` of one layer. It is an object, so that a copy of the model has its own."""

    layer: nn.Module
    inner: Callable[..., Any]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not (self.layer.training and torch.is_grad_enabled()):
            return self.inner(*args, **kwargs)
        with _offloading():
            return self.inner(*args, **kwargs)


@contextmanager
def _offloading() -> Iterator[None]:
    """Copy to the host what autograd keeps in this context, which is the pass of one layer."""
    copies = _LayerCopies()
    with torch.autograd.graph.saved_tensors_hooks(copies.pack, unpack):
        yield
    copies.forget_originals()


# ---------------------------------------------------------------------- copies


@dataclass
class _HostCopy:
    """All bytes of a tensor's memory on the host, which ``users`` kept tensors are views of.

    The first of them that the backward pass asks for brings the bytes back, the last lets them go.
    """

    host: Tensor
    device: torch.device
    users: int = 0
    back: Tensor | None = None

    def fetch(self) -> Tensor:
        """Return the bytes on the device."""
        if self.back is None:
            self.back = self.host.to(self.device, non_blocking=True)
        found = self.back
        self.users -= 1
        if self.users == 0:
            self.back = None
        return found


@dataclass(frozen=True)
class _View:
    """The place of a kept tensor in the bytes of its memory."""

    copy: _HostCopy
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int


@dataclass
class _LayerCopies:
    """The copies that the pass of one layer has made, by the address of the memory.

    ``originals`` keeps that memory until the layer has ended, so that no address has two tensors.
    """

    by_address: dict[int, _HostCopy] = field(default_factory=dict)
    originals: list[Tensor] = field(default_factory=list)

    def pack(self, tensor: Tensor) -> Tensor | _View:
        """Return what autograd keeps in place of ``tensor``."""
        storage = tensor.untyped_storage()
        if storage.nbytes() < LEAST_BYTES or not is_activation(tensor):
            return tensor
        address = storage.data_ptr()
        if address not in self.by_address:
            flat = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage)
            self.originals.append(flat)
            self.by_address[address] = _HostCopy(copy_to_host(flat), tensor.device)
        copy = self.by_address[address]
        copy.users += 1
        offset = int(tensor.storage_offset())
        return _View(copy, tensor.dtype, tensor.size(), tensor.stride(), offset)

    def forget_originals(self) -> None:
        """Let the memory of the device go."""
        self.originals.clear()
        self.by_address.clear()


def unpack(kept: Tensor | _View) -> Tensor:
    """Return the tensor that was kept, on its device."""
    if isinstance(kept, Tensor):
        return kept
    flat = kept.copy.fetch().view(kept.dtype)
    return flat.as_strided(kept.size, kept.stride, kept.offset)


def copy_to_host(flat: Tensor) -> Tensor:
    """Copy bytes to the host, into pinned memory if they are on a GPU."""
    host = torch.empty(flat.shape, dtype=flat.dtype, pin_memory=flat.is_cuda)
    return host.copy_(flat, non_blocking=True)


def is_activation(tensor: Tensor) -> bool:
    """Whether ``tensor`` depends on more than one parameter: no weight, and no cast of one."""
    if tensor.is_leaf or not tensor.requires_grad:
        return False
    node = tensor.grad_fn
    while node is not None and type(node).__name__ in _WEIGHT_NODES:
        node = node.next_functions[0][0]
    return type(node).__name__ != "AccumulateGrad"
