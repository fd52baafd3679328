"""``kd doctor``: check whether this machine has what Potstill needs.

The GPU kernels are compiled and run here. Without a GPU, Triton's interpreter runs them on the CPU,
which shows that they compute what they should, but not that they compile.
"""

from __future__ import annotations

import importlib.util
import os
import platform
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain, starmap
from pathlib import Path
from typing import TYPE_CHECKING

from cache.disk import find_existing, require_locks
from cache.errors import PotstillError, StorageError
from kd.client.errors import Refused, Unreachable
from kd.files import Disk
from services.settings import Settings
from services.store.embedded import StoreUnavailable, find_binary
from services.terminal.client import make_client

if TYPE_CHECKING:
    from kd.preflight.devices import TorchGpus

#: Free disk space below which the disk counts as too full.
FREE_BYTES_WANTED = 2 * 2**30


@dataclass(frozen=True)
class Finding:
    """The result of one check; ``needed`` means that nothing works without it."""

    what: str
    ok: bool
    detail: str
    needed: bool = True


def examine_machine(settings: Settings) -> list[Finding]:
    """Run every check."""
    python = f"{platform.python_version()} on {platform.platform()}"
    return [
        Finding("python", sys.version_info >= (3, 11), python),
        *_check_computing(settings),
        _check_store(settings),
        *chain.from_iterable(starmap(_check_folder, settings.places.items())),
        _check_server(settings),
    ]


def _check_computing(settings: Settings) -> Iterator[Finding]:
    """Check torch, the GPU and the kernels; without torch there is nothing to compute with."""
    if importlib.util.find_spec("torch") is None:
        yield Finding("torch", False, "is not installed")
        return
    import torch

    from kd.preflight.devices import ask_torch

    seen = ask_torch()
    gpus = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    devices = ", ".join(gpus) or f"{torch.get_num_threads()} CPU threads"
    yield Finding("torch", True, f"{torch.__version__}, {devices}")
    yield _check_gpu(settings, seen)
    yield _check_kernels(seen)


def _check_gpu(settings: Settings, seen: TorchGpus) -> Finding:
    """Check that torch can use the GPUs that a worker here would take."""
    from kd.preflight.devices import find_remedy, require_known_architecture

    try:
        driver, listed = _ask_driver(settings)
        require_known_architecture(seen)
    except PotstillError as error:
        return Finding("gpu", False, str(error))
    if listed and not seen.gpus:
        problem = f"{driver} lists {', '.join(listed)}, but torch sees none: {seen.failure}."
        return Finding("gpu", False, f"{problem} {find_remedy(seen)}")
    gpus = [f"{each.name} (sm_{each.capability[0]}{each.capability[1]})" for each in seen.gpus]
    detail = ", ".join(gpus) or "none, so jobs run on the CPU"
    return Finding("gpu", True, f"{detail}; {driver}; {seen.build}")


def _ask_driver(settings: Settings) -> tuple[str, list[str]]:
    """The driver in words, and the names of the GPUs that a worker here would use."""
    # The package that asks the driver is one of the worker's.
    if importlib.util.find_spec("pynvml") is None:
        return "the driver is unknown without the extra `worker`", []
    from services.worker.devices import choose_gpus, count_cpus, find_gpus, read_driver

    driver = read_driver()
    words = f"driver {driver.version} for CUDA {driver.cuda}" if driver else "no NVIDIA driver"
    if count_cpus(settings.devices):
        return words, []
    return words, [gpu.name for gpu in choose_gpus(settings.devices, find_gpus())]


def _check_kernels(seen: TorchGpus) -> Finding:
    """Compile and run each kernel. A job runs without a kernel that fails, but more slowly."""
    import torch

    dtypes = [torch.float32]
    if seen.gpus:
        device = torch.device("cuda", 0)
        how = f"compiled and run on {seen.gpus[0].name}"
        dtypes += [torch.bfloat16, torch.float16]
    else:
        if importlib.util.find_spec("triton") is None:
            return Finding("kernels", True, "not needed without a GPU; triton is not installed")
        device = torch.device("cpu")
        how = "run by Triton's interpreter, not compiled: no GPU here"
        # Triton reads the variable when the kernels are defined, which is below.
        os.environ["TRITON_INTERPRET"] = "1"
    from kd.kernels.available import try_kernels

    trials = [trial for dtype in dtypes for trial in try_kernels(device, dtype).items()]
    failed = {f"{name}: {error}": None for name, error in trials if error}
    if failed:
        return Finding("kernels", False, f"{'; '.join(failed)} ({how})", needed=False)
    names = dict.fromkeys(name for name, _ in trials)
    return Finding("kernels", True, f"{', '.join(names)}: {how}", needed=False)


def _check_store(settings: Settings) -> Finding:
    from redis.exceptions import RedisError

    from services.store import connection

    try:
        if settings.redis_url is None:
            return Finding("job store", True, str(find_binary()))
        with connection.connect_redis(settings.redis_url) as client:
            client.ping()
            connection.require_suitable_store(client)
            warning = connection.find_volatility(client)
    except RedisError as error:
        failure = connection.describe_failure(error)
        return Finding("job store", False, f"the server of KD_REDIS_URL {failure}")
    except (StoreUnavailable, connection.StoreUnsuitable) as error:
        return Finding("job store", False, str(error))
    return Finding("job store", not warning, warning or "KD_REDIS_URL answers", not warning)


def _check_folder(name: str, folder: Path) -> Iterator[Finding]:
    """Check a folder that everything is written to: its permissions, its locks and its disk."""
    # The first job creates it, so the nearest existing folder above it counts.
    existing = find_existing(folder)
    what = "data folder" if name == "KD_HOME" else "caches"
    may_write = os.access(existing, os.W_OK | os.X_OK)
    yield Finding(what, may_write, f"{folder} ({name})")
    if may_write:
        try:
            require_locks(existing)
            yield Finding("locks", True, f"a lock in {existing} stops another process")
        except StorageError as error:
            yield Finding("locks", False, str(error))
    disk = Disk.of(folder)
    lacking = disk.find_shortage(FREE_BYTES_WANTED)
    detail = lacking or f"{disk.free_bytes / 2**30:.1f} GiB free"
    yield Finding("disk", lacking is None, f"{detail}, for {what} ({name})", needed=False)


def _check_server(settings: Settings) -> Finding:
    try:
        with make_client(settings.server, settings.api_key) as client:
            client.request("GET", "/readyz")
            workers = client.workers()
    except Unreachable:
        detail = f"none at {settings.server}; `kd up` starts one"
        return Finding("service", False, detail, needed=False)
    except Refused as error:
        return Finding("service", False, str(error), needed=False)
    return Finding("service", True, f"{settings.server}, {len(workers)} worker(s)", needed=False)
