"""Count, on a CPU, the launches and waits that the same code would cost a GPU.

    launch   an operation of torch that computes on the device, or a Triton kernel. Views, metadata
             and new memory launch nothing. One operation may be several kernels on a GPU (a sort, a
             cumulative sum), so this is the least number of launches.
    wait     an operation whose result the host must know before it goes on: a number read from a
             tensor, a shape that depends on values, or a list of numbers copied to the device
             (from memory that is not pinned, torch waits for such a copy)

Inside ``as_on_a_gpu`` tensors say that they are on a GPU, so that the code takes its GPU path;
Triton's interpreter runs the kernels. Copies between host and device that only move a tensor are
not seen here. The environment must have ``TRITON_INTERPRET=1`` before triton is imported.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from kd.capture.host_copy import HostCopy, pack_tensors
from kd.kernels.available import describe_kernel_failure

#: Operations that launch nothing although they return new tensors.
_FREE = {
    "empty", "new_empty", "empty_like", "empty_strided", "new_empty_strided", "resize_", "set_",
    "scalar_tensor", "_unsafe_view", "promote_types", "is_same_size", "lift_fresh",
    "_local_scalar_dense", "_record_function_enter_new", "_record_function_exit",
}  # fmt: skip
#: Operations with a result whose shape depends on values, or that is a number of the host.
_WAITING = {
    "_local_scalar_dense", "nonzero", "masked_select", "unique2", "_unique2", "unique_dim",
    "unique_consecutive", "bincount", "equal",
}  # fmt: skip
#: Functions that copy a tensor to the host, or numbers of the host to the device.
_WAITING_FUNCTIONS = {"tolist", "cpu", "new_tensor", "tensor", "as_tensor"}


@dataclass(frozen=True)
class DeviceWork:
    """Launches and waits by name; their differences and sums are counted name by name."""

    launches: Counter[str]
    waits: Counter[str]

    def __sub__(self, other: DeviceWork) -> DeviceWork:
        return DeviceWork(self.launches - other.launches, self.waits - other.waits)


class _Operations(TorchDispatchMode):
    """Counts operations below autograd, where composed ones are taken apart."""

    def __init__(self, work: DeviceWork) -> None:
        super().__init__()
        self.work = work

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        name = func._schema.name.partition("::")[2]
        known = (kwargs or {}).get("output_size") is not None
        unknown = name == "repeat_interleave" and not known
        if name in _WAITING or unknown or _has_mask(name, args):
            self.work.waits[name] += 1
        if name not in _FREE and not _is_view(func):
            self.work.launches[name] += 1
        return func(*args, **(kwargs or {}))


class _Functions(TorchFunctionMode):
    """Counts the waits that no operation shows on a CPU."""

    def __init__(self, work: DeviceWork) -> None:
        super().__init__()
        self.work = work

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        name = getattr(func, "__name__", "")
        # Nothing is copied where there is no number.
        empty = isinstance(result, torch.Tensor) and not result.numel()
        if name in _WAITING_FUNCTIONS and not empty:
            self.work.waits[name] += 1
        return result


def _is_view(func: Any) -> bool:
    aliases = [each.alias_info for each in func._schema.returns]
    return any(alias is not None and not alias.is_write for alias in aliases)


def _has_mask(name: str, args: tuple[Any, ...]) -> bool:
    """Return whether a tensor of booleans is an index, whose places the host must then count."""
    if name not in ("index", "index_put", "index_put_", "_index_put_impl_"):
        return False
    return any(each is not None and each.dtype in (torch.bool, torch.uint8) for each in args[1])


@contextmanager
def as_on_a_gpu() -> Iterator[None]:
    """Let the code take its GPU path, on a CPU."""
    # The kernels are tried once in a process, which is no part of what is counted.
    if failure := describe_kernel_failure(torch.device("cpu"), torch.float32):
        raise RuntimeError(f"{failure} Set TRITON_INTERPRET=1 before triton is imported.")
    start = HostCopy.start

    def pack_first(tensors: dict[str, torch.Tensor]) -> HostCopy:
        pack_tensors(tensors)[0].clone()  # the clone stands for the copy to the host
        return start(tensors)

    devices = "torch.utils._foreach_utils._get_foreach_kernels_supported_devices"
    with (
        patch.object(torch.Tensor, "is_cuda", True, create=True),
        patch.object(HostCopy, "start", pack_first),
        patch(devices, lambda: ["cpu", "cuda"]),
    ):
        yield


def count_device_work(run: Callable[[], object]) -> DeviceWork:
    """Count the launches and waits of ``run``, which may call kernels of Triton."""
    from triton.runtime.interpreter import GridExecutor

    work = DeviceWork(Counter(), Counter())
    interpret = GridExecutor.__call__

    def launch(self: GridExecutor, *args: Any, **options: Any) -> Any:
        work.launches[self.fn.__name__] += 1
        with _disable_current_modes(), torch._C.DisableTorchFunction():
            return interpret(self, *args, **options)

    with patch.object(GridExecutor, "__call__", launch), _Operations(work), _Functions(work):
        run()
    return work
