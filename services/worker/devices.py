"""The device of a worker. No two workers of a host share a GPU.

    KD_DEVICES unset   the first free GPU that CUDA_VISIBLE_DEVICES shows; the CPU if there is none
    KD_DEVICES 0,1     these GPUs, by their numbers in nvidia-smi or by UUID
    KD_DEVICES cpu     the CPU
    KD_DEVICES cpu,cpu the CPU as two devices, for tests of several

    home/devices/{uuid}.lock    locked while the worker that has the GPU lives

The driver (NVML) answers. torch is not imported, because a CUDA context would take memory that the
child needs.
"""

from __future__ import annotations

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

from cache.disk import make_folder, storage_errors, try_lock
from cache.errors import PotstillError
from kd.memory.host import read_memory_bytes
from kd.parallel.variables import CPU, DEVICES_VARIABLE, split_names

#: Time between two looks for a free GPU.
POLL_SECONDS = 1.0
#: Errors of a host without a GPU. Any other error of the driver is a failure.
NO_DRIVER = (pynvml.NVMLError_LibraryNotFound, pynvml.NVMLError_DriverNotLoaded)

log = logging.getLogger("potstill.worker")


class DeviceError(PotstillError):
    """The requested GPU does not exist, or has vanished."""

    type = "device_lost"


@dataclass(frozen=True)
class Gpu:
    """A GPU, or a part of one (MIG), as the driver shows it."""

    uuid: str
    index: int
    name: str
    memory_bytes: int


@dataclass(frozen=True)
class NvidiaDriver:
    """The version of the driver, and the newest CUDA that it serves."""

    version: str
    cuda: str


@dataclass(frozen=True)
class WorkerDevice:
    """The device of a worker. ``gpus`` is empty on the CPU.

    ``hidden`` means that KD_DEVICES names the CPU, ``cpus`` as how many devices.
    """

    gpus: tuple[Gpu, ...] = ()
    hidden: bool = False
    cpus: int = 1
    _locks: tuple[IO[str], ...] = field(default=(), repr=False, compare=False)

    @property
    def kind(self) -> Literal["cpu", "cuda"]:
        """The device type as torch names it."""
        return "cuda" if self.gpus else "cpu"

    @property
    def name(self) -> str:
        """The name that the hardware reports."""
        return self.gpus[0].name if self.gpus else find_cpu_name()

    @property
    def count(self) -> int:
        """The number of devices that a job may ask for. One CPU is no such device."""
        return len(self.gpus) or (self.cpus if self.cpus > 1 else 0)

    @property
    def memory_bytes(self) -> int:
        """Memory of the smallest GPU, or of the host or container if there is no GPU."""
        return min((gpu.memory_bytes for gpu in self.gpus), default=0) or read_memory_bytes()

    def build_environment(self, wanted: int | None = None) -> dict[str, str]:
        """Variables with which a child sees ``wanted`` of these devices; None = all GPUs."""
        # Without a known GPU nothing is hidden: there may be a GPU that NVML does not know.
        if not (self.gpus or self.hidden or wanted == 0):
            return {}
        shown = {"CUDA_VISIBLE_DEVICES": ",".join(gpu.uuid for gpu in self.give(wanted))}
        if self.hidden:
            shown[DEVICES_VARIABLE] = ",".join([CPU] * min(self.cpus, wanted or 1))
        return shown

    def give(self, wanted: int | None) -> tuple[Gpu, ...]:
        """The GPUs for a job that asks for ``wanted`` of them; None = all."""
        return self.gpus if wanted is None else self.gpus[:wanted]

    def list_names(self) -> list[str]:
        """The names of its devices: UUIDs of GPUs, or ``cpu`` once for each device."""
        return [gpu.uuid for gpu in self.gpus] or [CPU] * self.cpus

    def require_alive(self) -> None:
        """Raise ``DeviceError`` if the driver no longer lists a GPU. A container can lose it."""
        if not self.gpus:
            return
        known = {gpu.uuid for gpu in find_gpus()}
        if lost := [gpu.uuid for gpu in self.gpus if gpu.uuid not in known]:
            remedy = "Start the container again; see nvidia-smi."
            raise DeviceError(f"The GPU {', '.join(lost)} has vanished.", remedy)

    def give_back(self) -> None:
        """Unlock the GPUs for other workers."""
        for lock in self._locks:
            lock.close()


def take_device(wanted: str | None, home: Path) -> WorkerDevice:
    """Take a device for this worker. If other workers have all GPUs, wait until one is free.

    Raises ``DeviceError`` if a named GPU does not exist, if the driver fails, or if ``wanted``
    mixes the CPU with GPUs.
    """
    if cpus := count_cpus(wanted):
        return WorkerDevice(hidden=True, cpus=cpus)
    gpus = choose_gpus(wanted, find_gpus())
    if not gpus:
        return WorkerDevice()
    waits = False
    choices = [gpus] if wanted else [[gpu] for gpu in gpus]
    while True:
        for some in choices:
            if (device := _lock(some, home)) is not None:
                return device
        if not waits:
            log.warning("other workers have every GPU that this worker may use: it waits for one")
        waits = True
        time.sleep(POLL_SECONDS)


def find_gpus() -> list[Gpu]:
    """Every GPU of this host or container. Raises ``DeviceError`` if the driver fails."""
    try:
        with _nvml():
            return [
                _describe(part, index)
                for index in range(pynvml.nvmlDeviceGetCount())
                for part in _list_parts(pynvml.nvmlDeviceGetHandleByIndex(index))
            ]
    except NO_DRIVER:
        return []
    except pynvml.NVMLError as error:
        raise DeviceError(
            f"The NVIDIA driver does not answer: {error}.",
            "See nvidia-smi. Start a container that has lost its GPUs again. "
            "KD_DEVICES=cpu uses no GPU.",
        ) from None


def read_driver() -> NvidiaDriver | None:
    """The versions of the NVIDIA driver; None if there is no driver, or if it does not answer."""
    with suppress(pynvml.NVMLError), _nvml():
        cuda = pynvml.nvmlSystemGetCudaDriverVersion()
        return NvidiaDriver(
            pynvml.nvmlSystemGetDriverVersion(), f"{cuda // 1000}.{cuda % 1000 // 10}"
        )
    return None


@contextmanager
def _nvml() -> Iterator[None]:
    """Open the driver's library. An older handle would not notice that a GPU has vanished."""
    pynvml.nvmlInit()
    try:
        yield
    finally:
        with suppress(pynvml.NVMLError):
            pynvml.nvmlShutdown()


def _list_parts(handle: Any) -> list[Any]:
    """List the instances of a divided GPU (MIG); of any other GPU only the GPU itself."""
    try:
        if pynvml.nvmlDeviceGetMigMode(handle)[0] != pynvml.NVML_DEVICE_MIG_ENABLE:
            return [handle]
    except pynvml.NVMLError_NotSupported:
        return [handle]
    parts = []
    for number in range(pynvml.nvmlDeviceGetMaxMigDeviceCount(handle)):
        with suppress(pynvml.NVMLError_NotFound):
            parts.append(pynvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, number))
    return parts or [handle]


def _describe(handle: Any, index: int) -> Gpu:
    uuid = pynvml.nvmlDeviceGetUUID(handle)
    name = pynvml.nvmlDeviceGetName(handle)
    return Gpu(uuid, index, name, int(pynvml.nvmlDeviceGetMemoryInfo(handle).total))


# ---------------------------------------------------------------------- choosing and locking


def count_cpus(wanted: str | None) -> int:
    """The number of CPU devices that KD_DEVICES names; 0 if it names GPUs or nothing.

    Raises ``DeviceError`` if it names both.
    """
    names = split_names(wanted or "")
    cpus = names.count(CPU)
    if cpus not in (0, len(names)):
        remedy = "Name GPUs only, such as 0, or the CPU only. Start one worker for each kind."
        raise DeviceError(f"KD_DEVICES is {wanted!r}, which mixes the CPU with GPUs.", remedy)
    return cpus


def choose_gpus(
    wanted: str | None, gpus: list[Gpu], environment: Mapping[str, str] = os.environ
) -> list[Gpu]:
    """The GPUs that KD_DEVICES names, all of which must exist; else those that CUDA would show."""
    if wanted:
        return [_require_gpu(name, gpus) for name in split_names(wanted)]
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return gpus
    shown = []
    for name in split_names(visible):
        if (gpu := _find(name, gpus)) is None:
            break  # CUDA too ignores an unknown name and all names after it
        shown.append(gpu)
    return shown


def _require_gpu(name: str, gpus: list[Gpu]) -> Gpu:
    if (gpu := _find(name, gpus)) is None:
        known = ", ".join(f"{each.index} ({each.uuid})" for each in gpus) or "none"
        remedy = f"GPUs here: {known}."
        raise DeviceError(f"KD_DEVICES names the GPU {name!r}, which does not exist.", remedy)
    return gpu


def _find(name: str, gpus: list[Gpu]) -> Gpu | None:
    """Find a GPU by its number, or by the start of its UUID."""
    if name.isdecimal():
        return next((gpu for gpu in gpus if gpu.index == int(name)), None)
    return next(
        (gpu for gpu in gpus if name.startswith(("GPU-", "MIG-")) and gpu.uuid.startswith(name)),
        None,
    )


def _lock(gpus: list[Gpu], home: Path) -> WorkerDevice | None:
    """Lock all of the GPUs or none of them."""
    folder = home / "devices"
    with storage_errors(folder):
        make_folder(folder)
        names = [gpu.uuid.replace("/", "_") for gpu in gpus]
        locks = tuple((folder / f"{name}.lock").open("w") for name in names)
    device = WorkerDevice(tuple(gpus), _locks=locks)
    if all(map(try_lock, locks)):
        return device
    device.give_back()
    return None


def find_cpu_name() -> str:
    """The name of the processor."""
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
