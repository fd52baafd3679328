"""Tensors of the simulated GPU: a CPU computes their values, and a GPU's rules hold.

A ``SimulatedTensor`` says that it is on ``cuda:0``. Each operation on it is done with the CPU
tensor in it, once the rules are checked:

    all tensors of an operation are on the device, but for numbers and for indices
    a tensor of the device has no numpy array
    host memory is written when somebody waits for it (``streams``)
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from tests.support.simulated_gpu import streams, varlen
from tests.support.simulated_gpu.streams import DEVICE, WAITS

aten = torch.ops.aten
_CPU = torch.device("cpu")
#: What torch asks of a tensor whose shape only its subclass knows.
_METADATA = {
    "dim", "is_contiguous", "is_non_overlapping_and_dense", "is_strides_like_format", "numel",
    "size", "storage_offset", "stride", "sym_is_contiguous", "sym_numel", "sym_size",
    "sym_storage_offset", "sym_stride",
}  # fmt: skip
#: Operations whose results the host must know before it can go on.
_WAITING = {
    "_local_scalar_dense", "_unique2", "bincount", "equal", "is_nonzero", "masked_select",
    "nonzero", "unique_consecutive", "unique_dim",
}  # fmt: skip
_INDEXING = {
    "_index_put_impl_", "_unsafe_index", "_unsafe_index_put", "index", "index_put", "index_put_",
}  # fmt: skip
#: Products that are summed in another dtype; a CPU has none.
_WIDE = {"addmm", "baddbmm", "bmm", "mm"}
#: What makes tensors without one to start from.
_FACTORIES = [
    "arange", "arange.start", "arange.start_step", "empty.memory_format", "empty_strided", "eye",
    "eye.m", "full", "linspace", "ones", "rand", "rand.generator", "randint", "randint.generator",
    "randint.low", "randint.low_generator", "randn", "randn.generator", "randperm",
    "randperm.generator", "scalar_tensor", "zeros",
]  # fmt: skip


class DevicesMixed(RuntimeError):
    """Tensors of one operation are on two devices."""


class SimulatedTensor(Tensor):
    """A tensor on ``cuda:0`` whose values are those of the CPU tensor ``cpu_tensor``."""

    cpu_tensor: Tensor

    @staticmethod
    def __new__(cls, cpu_tensor: Tensor) -> SimulatedTensor:
        made: SimulatedTensor = Tensor._make_wrapper_subclass(
            cls,
            cpu_tensor.size(),
            strides=cpu_tensor.stride(),
            storage_offset=cpu_tensor.storage_offset(),
            dtype=cpu_tensor.dtype,
            device=DEVICE,
            layout=cpu_tensor.layout,
            requires_grad=False,
            dispatch_sizes_strides_policy="sizes",
        )
        made.cpu_tensor = cpu_tensor
        return made

    def __repr__(self, **_: Any) -> str:
        return f"SimulatedTensor({self.cpu_tensor})"

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        made: Tensor = SimulatedTensor(self.cpu_tensor.detach().clone())
        if isinstance(self, nn.Parameter):
            made = nn.Parameter(made, self.requires_grad)
        memo[id(self)] = made.requires_grad_(self.requires_grad)
        return made

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return compute(func, args, kwargs or {})

    def tolist(self) -> Any:
        WAITS["tolist"] += 1
        return self.cpu_tensor.tolist()

    def numpy(self, **_: Any) -> Any:
        raise TypeError("can't convert cuda:0 device type tensor to numpy; use Tensor.cpu() first")

    def __array__(self, *_: Any, **__: Any) -> Any:
        return self.numpy()

    def pin_memory(self, *_: Any) -> Tensor:
        raise RuntimeError("only CPU tensors can be pinned")

    def record_stream(self, stream: Any) -> None:
        streams.record(self.cpu_tensor)

    def storage(self) -> Any:
        return self.cpu_tensor.storage()

    def untyped_storage(self) -> Any:
        return self.cpu_tensor.untyped_storage()

    @property
    def data(self) -> Tensor:
        return _data.__get__(self)

    @data.setter
    def data(self, values: SimulatedTensor) -> None:
        _data.__set__(self, values)
        self.cpu_tensor = values.cpu_tensor


_data: Any = Tensor.data


def compute(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Do the operation ``func`` as the device would."""
    namespace, name, is_metadata = _describe(func)
    if is_metadata:
        return func(args[0].cpu_tensor, *args[1:], **kwargs)
    if namespace == "torch_attn":
        return varlen.compute(func, args, kwargs, SimulatedTensor)
    special = _SPECIAL.get(name)
    if special is not None:
        return special(func, *args, **kwargs)
    if name in _WIDE and "dtype" in func._overloadname:
        return _multiply_wide(name, *args, **kwargs)
    _require_one_device(func, name, args, kwargs)
    if name in _WAITING:
        WAITS[name] += 1
    return _compute_inside(func, args, kwargs)


@functools.cache
def _describe(func: Any) -> tuple[str, str, bool]:
    """Return the namespace and the name of an operation, and whether it asks for a shape."""
    namespace, name = func._schema.name.split("::")
    return namespace, name, name in _METADATA


def _compute_inside(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    to = kwargs.get("device")
    inner = {**kwargs, "device": _CPU} if to is not None else kwargs
    found = func(*_change(args, _take_cpu_tensor), **_change(inner, _take_cpu_tensor))
    if to is not None and torch.device(to).type == "cpu":
        return found
    if not func._schema.is_mutable:
        return _change(found, SimulatedTensor)
    # An operation in place returns the tensor that it was given.
    given = {id(_take_cpu_tensor(each)): each for each in _list_tensors((args, kwargs))}
    return _change(
        found, lambda each: given[id(each)] if id(each) in given else SimulatedTensor(each)
    )


def _change(values: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """Return ``values`` with each tensor changed."""
    if isinstance(values, Tensor):
        return change(values)
    if isinstance(values, (tuple, list)):
        return type(values)([_change(each, change) for each in values])
    if isinstance(values, dict):
        return {name: _change(each, change) for name, each in values.items()}
    return values


def _list_tensors(values: Any) -> list[Tensor]:
    found: list[Tensor] = []

    def note(tensor: Tensor) -> Tensor:
        found.append(tensor)
        return tensor

    _change(values, note)
    return found


def _take_cpu_tensor(tensor: Tensor) -> Tensor:
    return tensor.cpu_tensor if isinstance(tensor, SimulatedTensor) else tensor


def _require_one_device(func: Any, name: str, args: Any, kwargs: dict[str, Any]) -> None:
    tensors = _list_tensors((args, kwargs))
    there = [each for each in tensors if isinstance(each, SimulatedTensor)]
    # CUDA takes a number of the host with any tensor.
    here = [each for each in tensors if not isinstance(each, SimulatedTensor) and each.dim() > 0]
    if not (there and here):
        return
    if name in _INDEXING and isinstance(args[0], SimulatedTensor):
        indices = _list_tensors(args[1])
        from_host = [each for each in here if any(each is index for index in indices)]
        if len(from_host) == len(here):
            WAITS["indices of the host"] += 1
            return
    shapes = ", ".join(f"{tuple(each.shape)} on {each.device}" for each in tensors)
    raise DevicesMixed(f"{func} takes tensors of two devices: {shapes}")


# ---------------------------------------------------------------------- special operations


def _to_copy(
    func: Any, source: Tensor, *, device: Any = None, non_blocking: bool = False, **options: Any
) -> Tensor:
    options.pop("pin_memory", None)
    there = isinstance(source, SimulatedTensor)
    to = torch.device(device) if device is not None else source.device
    if to.type == "cuda":
        if there:
            return SimulatedTensor(func(source.cpu_tensor, **options))
        streams.send_to_device(source, non_blocking)
        return SimulatedTensor(func(source, **options))
    if not there:
        return func(source, **options)
    if non_blocking:
        raise streams.CudaMisused("a copy that does not block went to memory that is not pinned")
    found = func(source.cpu_tensor, **options)
    made = torch.empty_like(found)
    streams.bring_to_host(made, found, non_blocking=False)
    return made


def _copy_(func: Any, target: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
    if not isinstance(target, SimulatedTensor):
        assert isinstance(source, SimulatedTensor)
        streams.bring_to_host(target, source.cpu_tensor, non_blocking)
    elif isinstance(source, SimulatedTensor):
        target.cpu_tensor.copy_(source.cpu_tensor)
    else:
        streams.send_to_device(source, non_blocking, target.cpu_tensor)
    return target


def _detach(func: Any, tensor: SimulatedTensor) -> Tensor:
    return SimulatedTensor(func(tensor.cpu_tensor))


def _record_stream(func: Any, tensor: SimulatedTensor, stream: Any) -> None:
    tensor.record_stream(stream)


def _set_storage(func: Any, tensor: SimulatedTensor, storage: Any) -> Tensor:
    tensor.cpu_tensor = torch.empty(0, dtype=tensor.cpu_tensor.dtype).set_(storage)
    return tensor


def _choose_attention(func: Any, *_: Any, **__: Any) -> int:
    """Let torch's attention be computed by plain operations."""
    return 0


def _count_whole_numbers(func: Any, tensor: SimulatedTensor, *args: Any, **options: Any) -> Tensor:
    """Compute a histogram; that of whole numbers exists on a GPU alone."""
    counts = func(tensor.cpu_tensor.double(), *args, **options)
    return SimulatedTensor(counts.to(tensor.dtype))


def _multiply_wide(name: str, *args: Any, **options: Any) -> Tensor:
    out = options.pop("out", None)
    dtype = options.pop("out_dtype", None) or next(
        each for each in args if isinstance(each, torch.dtype)
    )
    factors = [each.cpu_tensor.to(dtype) for each in args if isinstance(each, Tensor)]
    product = getattr(aten, name).default(*factors, **options)
    if out is None:
        return SimulatedTensor(product)
    out.cpu_tensor.copy_(product)
    return out


_SPECIAL: dict[str, Callable[..., Any]] = {
    "_to_copy": _to_copy,
    "copy_": _copy_,
    "detach": _detach,
    "alias": _detach,
    "record_stream": _record_stream,
    "set_": _set_storage,
    "_fused_sdp_choice": _choose_attention,
    "histc": _count_whole_numbers,
}


# ---------------------------------------------------------------------- new tensors


def register_factories() -> torch.library.Library:
    """Let ``device="cuda"`` make simulated tensors, for as long as the result lives."""
    library = torch.library.Library("aten", "IMPL")
    for name in _FACTORIES:
        library.impl(name, _make_factory(name), "CUDA")
    # What torch.tensor makes is copied below the level of subclasses.
    library.impl("copy_", lambda *args, **options: _copy_(None, *args, **options), "CUDA")
    return library


def _make_factory(name: str) -> Callable[..., Tensor]:
    operation, _, overload = name.partition(".")
    func = getattr(getattr(aten, operation), overload or "default")

    def make(*args: Any, **options: Any) -> Tensor:
        options.pop("pin_memory", None)
        made = func(*args, **{**options, "device": _CPU})
        made.untyped_storage().taken = next(streams.TAKEN)
        return SimulatedTensor(made)

    return make
