"""The device that this worker computes on, and that no other worker of the host computes on beside it.

    KD_DEVICES unset   the first GPU that is free, of those that CUDA_VISIBLE_DEVICES leaves; the CPU where none is
    KD_DEVICES 0,1     these GPUs, all for this worker: numbers as nvidia-smi has them, or UUIDs
    KD_DEVICES cpu     the CPU

    home/devices/{uuid}.lock    held for as long as the worker that has the GPU lives

Asks the driver (NVML) and imports no torch: a CUDA context here would hold memory that the child needs.
"""

from __future__ import annotations

import fcntl
import logging
import os
import platform
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, Literal

import pynvml

from cache.disk import make_folder, storage_errors
from cache.errors import PotstillError
from services.worker.memory import memory_bytes

CPU = "cpu"
POLL_SECONDS = 1.0
#: What the library says where there simply is no GPU; anything else it says is trouble.
NO_DRIVER = (pynvml.NVMLError_LibraryNotFound, pynvml.NVMLError_DriverNotLoaded)

log = logging.getLogger("potstill.worker")


class DeviceError(PotstillError):
    """The GPU that was asked for is not there, or has vanished."""

    type = "device_lost"


@dataclass(frozen=True)
class Gpu:
    """A GPU, or a part of one (MIG), as the driver shows it."""

    uuid: str
    index: int
    name: str
    memory_bytes: int


@dataclass(frozen=True)
class Device:
    """What a worker has taken; ``gpus`` is empty where it computes on the CPU, ``hidden`` where it was told to."""

    gpus: tuple[Gpu, ...] = ()
    hidden: bool = False
    _locks: tuple[IO[str], ...] = field(default=(), repr=False, compare=False)

    @property
    def kind(self) -> Literal["cpu", "cuda"]:
        """The word that torch has for it."""
        return "cuda" if self.gpus else "cpu"

    @property
    def name(self) -> str:
        """What it calls itself."""
        return self.gpus[0].name if self.gpus else cpu_name()

    @property
    def memory_bytes(self) -> int:
        """Of each GPU, the least; of the host or the container, where there is none."""
        return min((gpu.memory_bytes for gpu in self.gpus), default=0) or memory_bytes()

    def environment(self, wanted: int | None = None) -> dict[str, str]:
        """What makes a child see so many of these GPUs and no other; all of them where it does not matter."""
        if not (self.gpus or self.hidden or wanted == 0):
            return {}  # where no GPU is known of, nothing is hidden: it may be one that NVML does not know
        seen = self.gpus if wanted is None else self.gpus[:wanted]
        return {"CUDA_VISIBLE_DEVICES": ",".join(gpu.uuid for gpu in seen)}

    def require_alive(self) -> None:
        """Raise ``DeviceError`` where the driver does not know the GPUs any more; a container can lose them."""
        if not self.gpus:
            return
        known = {gpu.uuid for gpu in find_gpus()}
        if lost := [gpu.uuid for gpu in self.gpus if gpu.uuid not in known]:
            raise DeviceError(f"The GPU {', '.join(lost)} has vanished.", "Start the container anew; see nvidia-smi.")

    def give_back(self) -> None:
        """Let another worker have it."""
        for lock in self._locks:
            lock.close()


def take(wanted: str | None, home: Path) -> Device:
    """The device of this worker. Where all GPUs are with other workers it waits until one is free.

    Raises ``DeviceError`` where a GPU that was named does not exist, or the driver is in trouble.
    """
    gpus = _choose(wanted, find_gpus() if wanted != CPU else [])
    if not gpus:
        return Device(hidden=wanted == CPU)
    waits = False
    while not (device := _lock_named(gpus, home) if wanted else _lock_one(gpus, home)):
        if not waits:
            log.warning("every GPU that this worker may use is with another worker: it waits for one")
        waits = True
        time.sleep(POLL_SECONDS)
    return device


def find_gpus() -> list[Gpu]:
    """Every GPU of this host or container; none where there is no driver. Raises ``DeviceError`` where that fails."""
    try:
        with _nvml():
            return [_describe(handle, index) for index, handle in _handles()]
    except NO_DRIVER:
        return []
    except pynvml.NVMLError as error:
        raise DeviceError(
            f"The NVIDIA driver does not answer: {error}.",
            "See nvidia-smi. A container that has lost its GPUs must be started anew. KD_DEVICES=cpu does without.",
        ) from None


@contextmanager
def _nvml() -> Iterator[None]:
    """The driver's library, opened anew each time: one that was opened before a GPU vanished would not notice."""
    pynvml.nvmlInit()
    try:
        yield
    finally:
        with suppress(pynvml.NVMLError):
            pynvml.nvmlShutdown()


def _handles() -> Iterator[tuple[int, Any]]:
    """What can be computed on, each with the number of its GPU."""
    for index in range(pynvml.nvmlDeviceGetCount()):
        handle = pynvml.nvmlDeviceGetHandleByIndex(index)
        for part in _parts(handle) or [handle]:
            yield index, part


def _parts(handle: Any) -> list[Any]:
    """The instances of a GPU that is divided, which is then of no use as a whole."""
    try:
        if pynvml.nvmlDeviceGetMigMode(handle)[0] != pynvml.NVML_DEVICE_MIG_ENABLE:
            return []
    except pynvml.NVMLError_NotSupported:
        return []
    parts = []
    for number in range(pynvml.nvmlDeviceGetMaxMigDeviceCount(handle)):
        with suppress(pynvml.NVMLError_NotFound):
            parts.append(pynvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, number))
    return parts


def _describe(handle: Any, index: int) -> Gpu:
    uuid, name = pynvml.nvmlDeviceGetUUID(handle), pynvml.nvmlDeviceGetName(handle)
    return Gpu(uuid, index, name, int(pynvml.nvmlDeviceGetMemoryInfo(handle).total))


# ---------------------------------------------------------------------- which of them, and whose


def _choose(wanted: str | None, gpus: list[Gpu], environment: Mapping[str, str] = os.environ) -> list[Gpu]:
    """The GPUs that KD_DEVICES names, each of which must be there; else those that CUDA would show."""
    if wanted:
        return [_named(name, gpus) for name in _words(wanted)] if wanted != CPU else []
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return gpus
    shown = []
    for name in _words(visible):
        if (gpu := _find(name, gpus)) is None:
            break  # as CUDA does: what comes after a name that it does not know is not shown either
        shown.append(gpu)
    return shown


def _named(name: str, gpus: list[Gpu]) -> Gpu:
    if (gpu := _find(name, gpus)) is None:
        known = ", ".join(f"{each.index} ({each.uuid})" for each in gpus) or "there is none"
        raise DeviceError(f"KD_DEVICES names the GPU {name!r}, which does not exist.", f"GPUs here: {known}.")
    return gpu


def _find(name: str, gpus: list[Gpu]) -> Gpu | None:
    """By number, or by the beginning of the UUID."""
    if name.isdecimal():
        return next((gpu for gpu in gpus if gpu.index == int(name)), None)
    return next((gpu for gpu in gpus if name.startswith(("GPU-", "MIG-")) and gpu.uuid.startswith(name)), None)


def _words(text: str) -> list[str]:
    return [word.strip() for word in text.split(",") if word.strip()]


def _lock_one(gpus: list[Gpu], home: Path) -> Device | None:
    for gpu in gpus:
        if (lock := _try_lock(gpu, home)) is not None:
            return Device((gpu,), _locks=(lock,))
    return None


def _lock_named(gpus: list[Gpu], home: Path) -> Device | None:
    """All or none of them."""
    locks = [_try_lock(gpu, home) for gpu in gpus]
    held = tuple(lock for lock in locks if lock is not None)
    device = Device(tuple(gpus), _locks=held)
    if len(held) == len(gpus):
        return device
    device.give_back()
    return None


def _try_lock(gpu: Gpu, home: Path) -> IO[str] | None:
    folder = home / "devices"
    with storage_errors(folder):
        make_folder(folder)
        file = (folder / f"{gpu.uuid.replace('/', '_')}.lock").open("w")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        return None
    return file


def cpu_name() -> str:
    """What the processor calls itself."""
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
