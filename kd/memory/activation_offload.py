"""Activation offload: what the decoder layers keep for the backward pass waits in host memory.

Autograd hands over each tensor that a layer keeps. Activations of some size are copied to pinned
memory of the host, each once for all who keep it, and come back when the backward pass asks for
them. Weights stay, and so do their copies in the precision of the products. All gradients stay the
same, bit for bit.

On a GPU the copies have a stream of their own, beside the device's work. A layer's memory is given
back at the layer's end, when the device has waited for its copies. In the backward pass the copies
of the layer below come back while a layer is computed, so that two layers are on the device. No
layer changes a tensor that it keeps while the copy runs: without the offload autograd refuses that.

A layer that activation checkpointing recomputes keeps only the hidden states that enter it: then
only these are copied.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from kd.errors import ModelError
from kd.models.layers import find_decoder_layers
from kd.text.steps.pinned import beside_work, copy_from_pieces, copy_to_pieces, find_copy_stream

#: Bytes below which a tensor stays on the device: most tensors are that small, and all of them
#: together are little.
LEAST_BYTES = 2**16
#: The copies in both directions have one stream; only one direction is in use at a time.
STREAM = "activations"
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
    passing = _Passing()
    for place, layer in enumerate(layers):
        forward = _OffloadedForward(layer, layer.forward, passing, place == 0)
        layer.forward = forward  # type: ignore[method-assign]


@dataclass
class _Passing:
    """The layer that made the latest copies of the present forward pass; None before the first."""

    below: _LayerCopies | None = None


@dataclass
class _OffloadedForward:
    """The ``forward`` of one layer. It is an object, so that a copy of the model has its own."""

    layer: nn.Module
    inner: Callable[..., Any]
    passing: _Passing
    first: bool

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not (self.layer.training and torch.is_grad_enabled()):
            return self.inner(*args, **kwargs)
        if self.first:
            self.passing.below = None
        copies = _LayerCopies(self.passing.below)
        try:
            with torch.autograd.graph.saved_tensors_hooks(copies.pack, unpack):
                return self.inner(*args, **kwargs)
        finally:
            copies.forget_originals()
            # Of layers that are one checkpoint only the last keeps something.
            if copies.copies:
                self.passing.below = copies


# ---------------------------------------------------------------------- copies


@dataclass(eq=False)
class _HostCopy:
    """All bytes of a tensor's memory on the host, which ``users`` kept tensors are views of.

    ``pieces`` are these bytes in order. ``back`` are the bytes on the device, from when the copy
    back begins until the last user has asked for them; they may be read after ``arrived``.
    """

    pieces: list[Tensor]
    device: torch.device
    layer: _LayerCopies
    users: int = 0
    back: Tensor | None = None
    arrived: torch.cuda.Event | None = None

    def begin(self) -> Tensor:
        """Begin to copy the bytes back, unless that was done; returns the memory they come into."""
        if self.back is None:
            size = sum(len(each) for each in self.pieces)
            self.back = torch.empty(size, dtype=torch.uint8, device=self.device)
            with beside_work(self.device, STREAM) as stream:
                copy_from_pieces(self.pieces, self.back)
                self.arrived = None if stream is None else stream.record_event()
        return self.back

    def fetch(self) -> Tensor:
        """Return the bytes on the device, and begin with those of the layer below."""
        found = self.begin()
        self._wait()
        self.layer.begin_below()
        self.users -= 1
        if self.users == 0:
            self.back = None
        return found

    def _wait(self) -> None:
        """Let the device do nothing more before the bytes have arrived."""
        if self.arrived is not None:
            torch.cuda.current_stream(self.device).wait_event(self.arrived)
            self.arrived = None

    def __del__(self) -> None:
        # A backward pass that broke off leaves a copy on its way into memory that is free now.
        self._wait()


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
    """The copies that the pass of one layer has made; ``below`` is the layer before it.

    They are found by the address of the memory. ``originals`` keeps that memory until the layer has
    ended, so that no address has two tensors. ``copies`` keeps none: only autograd does.
    """

    below: _LayerCopies | None
    by_address: dict[int, _HostCopy] = field(default_factory=dict)
    originals: list[Tensor] = field(default_factory=list)
    copies: list[weakref.ref[_HostCopy]] = field(default_factory=list)

    def pack(self, tensor: Tensor) -> Tensor | _View:
        """Return what autograd keeps in place of ``tensor``."""
        storage = tensor.untyped_storage()
        if storage.nbytes() < LEAST_BYTES or not is_activation(tensor):
            return tensor
        address = storage.data_ptr()
        if address not in self.by_address:
            flat = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage)
            self.originals.append(flat)
            with beside_work(tensor.device, STREAM):
                copy = _HostCopy(copy_to_pieces(flat), tensor.device, self)
            self.by_address[address] = copy
            self.copies.append(weakref.ref(copy))
        copy = self.by_address[address]
        copy.users += 1
        offset = int(tensor.storage_offset())
        return _View(copy, tensor.dtype, tensor.size(), tensor.stride(), offset)

    def forget_originals(self) -> None:
        """Let the memory of the device go, once the device has waited for the copies of it."""
        if self.originals and self.originals[0].is_cuda:
            device = self.originals[0].device
            torch.cuda.current_stream(device).wait_stream(find_copy_stream(device, STREAM))
        self.originals.clear()
        self.by_address.clear()

    def begin_below(self) -> None:
        """Begin to copy back what the layer below has kept, once."""
        below, self.below = self.below, None
        # They are needed in the reverse of the order in which they were kept.
        for each in [] if below is None else reversed(below.copies):
            if (copy := each()) is not None:
                copy.begin()


def unpack(kept: Tensor | _View) -> Tensor:
    """Return the tensor that was kept, on its device."""
    if isinstance(kept, Tensor):
        return kept
    return kept.copy.fetch().view(kept.dtype).as_strided(kept.size, kept.stride, kept.offset)


def is_activation(tensor: Tensor) -> bool:
    """Whether ``tensor`` depends on more than one parameter: no weight, and no cast of one."""
    if tensor.is_leaf or not tensor.requires_grad:
        return False
    node = tensor.grad_fn
    while node is not None and type(node).__name__ in _WEIGHT_NODES:
        node = node.next_functions[0][0]
    return type(node).__name__ != "AccumulateGrad"
