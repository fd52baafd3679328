"""The operations of a rehearsal, and the time that a kind of device takes for them."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils import flop_counter
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from kd.memory.devices import LAUNCH_SECONDS, DeviceRates

#: Shares of the maker's rates that an operation is expected to reach.
_PRODUCT_SHARE = 0.6
_BANDWIDTH_SHARE = 0.8

_ATEN = torch.ops.aten
_BACKWARD = _ATEN._scaled_dot_product_flash_attention_for_cpu_backward
#: Attention on a CPU, which torch's own table of FLOP leaves out, and its inputs with a shape.
_CPU_ATTENTION: dict[Any, tuple[Callable[..., int], int]] = {
    _ATEN._scaled_dot_product_flash_attention_for_cpu: (flop_counter.sdpa_flop_count, 3),
    _BACKWARD: (flop_counter.sdpa_backward_flop_count, 4),
}


@dataclass(frozen=True)
class Operation:
    """One operation: FLOP of its products, bytes that it reads and writes, and its precision."""

    flops: float
    bytes: int
    is_half: bool


@dataclass(eq=False)
class OperationCounter(TorchDispatchMode):
    """Notes each operation of its block, and the most bytes that the block's own tensors take."""

    operations: list[Operation] = field(default_factory=list)
    peak_bytes: int = 0
    _held_bytes: int = 0
    _known: weakref.WeakSet[Any] = field(default_factory=weakref.WeakSet)

    def __post_init__(self) -> None:
        super().__init__()

    def estimate_seconds(self, rates: DeviceRates, tf32: bool = False, width: float = 1.0) -> float:
        """The time of the operations on a device of these ``rates``, one after the other.

        Of its products, of its bytes and of its launch the longest counts. ``width`` is the share
        of the bytes of a number that it has there; with less than 1 products are in half precision.
        """
        seconds = 0.0
        for each in self.operations:
            dtype = "bf16" if each.is_half or width < 1 else "fp32"
            products = each.flops / (_PRODUCT_SHARE * rates.find_rate(dtype, tf32))
            moved = width * each.bytes / (_BANDWIDTH_SHARE * rates.bandwidth)
            seconds += max(products, moved, LAUNCH_SECONDS)
        return seconds

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Run ``func``, and note it unless it only looks at a tensor in another way."""
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        if func.is_view or func._overloadpacket is _ATEN.detach:
            return out
        made = [each for each in tree_iter(out) if isinstance(each, Tensor)]
        read = [each for each in tree_iter((args, kwargs)) if isinstance(each, Tensor)]
        is_half = any(each.dtype in (torch.bfloat16, torch.float16) for each in made)
        moved = sum(each.nbytes for each in (*read, *made))
        self.operations.append(Operation(_count_flops(func, args, kwargs, out), moved, is_half))
        for tensor in made:
            self._hold(tensor)
        return out

    def _hold(self, tensor: Tensor) -> None:
        """Count the memory of ``tensor`` until nobody refers to it."""
        storage = tensor.untyped_storage()
        if storage in self._known:
            return
        self._known.add(storage)
        size = storage.nbytes()
        self._held_bytes += size
        self.peak_bytes = max(self.peak_bytes, self._held_bytes)
        weakref.finalize(storage, self._release, size)

    def _release(self, size: int) -> None:
        self._held_bytes -= size


def _count_flops(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], out: Any) -> float:
    packet = func._overloadpacket
    if packet in _CPU_ATTENTION:
        count, inputs = _CPU_ATTENTION[packet]
        return float(count(*(each.shape for each in args[:inputs])))
    known = flop_counter.flop_registry.get(packet)
    return 0.0 if known is None else float(known(*args, **kwargs, out_val=out))
