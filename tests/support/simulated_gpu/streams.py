"""Streams, events and copies of the simulated GPU, each as late as CUDA allows.

The device computes at once, but a copy that CUDA may postpone is postponed until somebody waits for
its stream: ``Event.synchronize``, ``Stream.synchronize``, ``torch.cuda.synchronize``, another
stream that waits, or a copy that CUDA makes at once. Host memory that is read before holds neither
zeros nor the right values.

What a second stream copies to the device arrives as late.

Three rules of CUDA are checked when a copy is made: memory that a second stream reads or writes
must have been recorded on that stream, or still be in use; memory that it writes must have been
taken before it waited for the device's own stream; and a pinned source must still hold what it
held.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor

DEVICE = torch.device("cuda:0")
#: What the host waited for, and how often.
WAITS: Counter[str] = Counter()
#: Counts what is taken of the device's memory.
TAKEN = itertools.count()
_NOT_WRITTEN = 0xAB


class CudaMisused(RuntimeError):
    """Code broke a rule that a real GPU does not check."""


class SimulatedStream:
    """One order of copies; stands in for ``torch.cuda.Stream``."""

    device = DEVICE
    _every: ClassVar[list[SimulatedStream]] = []
    _lock = threading.RLock()

    def __init__(self, *_: Any, **__: Any) -> None:
        self._postponed: list[Callable[[], None]] = []
        self._outer: list[SimulatedStream] = []
        self._waited_at = -1
        self._every.append(self)

    def postpone(self, work: Callable[[], None]) -> None:
        """Do ``work`` when somebody waits for this stream."""
        with self._lock:
            self._postponed.append(work)

    def catch_up(self) -> None:
        """Do all that was postponed, in order."""
        with self._lock:
            work, self._postponed = self._postponed, []
            for each in work:
                each()

    def synchronize(self) -> None:
        WAITS["stream"] += 1
        self.catch_up()

    def wait_stream(self, other: SimulatedStream) -> None:
        self._waited_at = next(TAKEN)
        other.catch_up()

    def may_write(self, target: Tensor) -> bool:
        """Whether no work of the device's own stream can still use the memory of ``target``."""
        return self is DEFAULT or self._waited_at > getattr(target.untyped_storage(), "taken", -1)

    def wait_event(self, event: SimulatedEvent) -> None:
        event.catch_up()

    def record_event(self, event: SimulatedEvent | None = None) -> SimulatedEvent:
        event = event or SimulatedEvent()
        event.record(self)
        return event

    def query(self) -> bool:
        return not self._postponed

    def __enter__(self) -> SimulatedStream:
        self._outer.append(current_stream())
        _CURRENT.stream = self
        return self

    def __exit__(self, *_: object) -> None:
        _CURRENT.stream = self._outer.pop()


class SimulatedEvent:
    """A point in a stream; stands in for ``torch.cuda.Event``."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self._stream: SimulatedStream | None = None
        self._time = 0.0

    def record(self, stream: SimulatedStream | None = None) -> None:
        self._stream = stream or current_stream()
        self._time = time.perf_counter()

    def catch_up(self) -> None:
        if self._stream is not None:
            self._stream.catch_up()

    def synchronize(self) -> None:
        WAITS["event"] += 1
        self.catch_up()

    def wait(self, stream: SimulatedStream | None = None) -> None:
        self.catch_up()

    def query(self) -> bool:
        return self._stream is None or self._stream.query()

    def elapsed_time(self, later: SimulatedEvent) -> float:
        return (later._time - self._time) * 1e3


DEFAULT = SimulatedStream()


class _Current(threading.local):
    stream = DEFAULT


_CURRENT = _Current()


def current_stream(*_: Any) -> SimulatedStream:
    """Return the stream of this thread."""
    return _CURRENT.stream


def synchronize(*_: Any) -> None:
    """Wait for all streams, as ``torch.cuda.synchronize`` does."""
    WAITS["synchronize"] += 1
    for stream in list(SimulatedStream._every):
        stream.catch_up()


# ---------------------------------------------------------------------- copies


def record(tensor: Tensor) -> None:
    """Note that a second stream uses the memory of ``tensor``, for as long as it exists."""
    tensor.untyped_storage().recorded = True  # type: ignore[attr-defined]


def send_to_device(source: Tensor, non_blocking: bool, target: Tensor | None = None) -> None:
    """Account for a copy of ``source`` to the device, and make it if there is a ``target``.

    From pinned memory a GPU may read ``source`` as late as the stream is waited for: until then it
    must not change. The device's own stream sees the values in its own order, which is at once.
    """
    stream = current_stream()
    if target is not None and not stream.may_write(target):
        raise CudaMisused("memory was written on a second stream that had not waited for it")
    later = target is not None and non_blocking and stream is not DEFAULT
    if target is not None and not later:
        target.copy_(source)
    storage: Any = None
    if later:
        target.view(-1).view(torch.uint8).fill_(_NOT_WRITTEN)
        storage = target.untyped_storage()
        storage.coming = getattr(storage, "coming", 0) + 1
    stream.catch_up()
    if not (non_blocking and source.is_pinned()):
        WAITS["copy to the device"] += 1
        return
    sent = source.detach().clone()

    def check() -> None:
        if not torch.equal(_read_bytes(source), _read_bytes(sent)):
            raise CudaMisused(
                f"pinned memory {tuple(source.shape)} was written before its copy had ended"
            )
        if later:
            # Where ``storage`` and the copies alone refer to the memory, it was given back.
            unused = torch._C._storage_Use_Count(storage._cdata) <= storage.coming + 1
            storage.coming -= 1
            if unused and not hasattr(storage, "recorded"):
                raise CudaMisused("memory was written on a second stream without record_stream")
            torch.ops.aten.copy_.default(target, sent)

    stream.postpone(check)


def _read_bytes(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().view(-1).view(torch.uint8)


def bring_to_host(target: Tensor, inner: Tensor, non_blocking: bool) -> None:
    """Copy ``inner``, which is on the device, into ``target``."""
    stream = current_stream()
    if not non_blocking:
        WAITS["copy to the host"] += 1
        stream.catch_up()
        target.copy_(inner)
        return
    if not target.is_pinned():
        raise CudaMisused("a copy that does not block went to memory that is not pinned")
    # In its own order the stream reads what was there; another one reads what it finds.
    other = stream is not DEFAULT
    values = inner.detach() if other else inner.clone()
    storage = values.untyped_storage()

    def copy() -> None:
        # Where ``values`` and ``storage`` alone refer to the memory, it was given back.
        unused = torch._C._storage_Use_Count(storage._cdata) <= 2
        if other and unused and not hasattr(storage, "recorded"):
            raise CudaMisused("memory was read on a second stream without record_stream")
        torch.ops.aten.copy_.default(target, values)

    stream.postpone(copy)
