"""``kd doctor``: check whether this machine has what Potstill needs."""

from __future__ import annotations

import importlib.util
import os
import platform
import sys
from dataclasses import dataclass

from kd.capture.estimate import measure_free_bytes
from services.settings import Settings
from services.store.embedded import StoreUnavailable, find_binary
from services.terminal.client import Client, Refused, Unreachable

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
    return [
        _check_python(),
        _check_torch(),
        _check_store(settings),
        _check_home(settings),
        _check_disk(settings),
        _check_server(settings),
    ]


def _check_python() -> Finding:
    return Finding(
        "python",
        sys.version_info >= (3, 11),
        f"{platform.python_version()} on {platform.platform()}",
    )


def _check_torch() -> Finding:
    if importlib.util.find_spec("torch") is None:
        return Finding("torch", False, "is not installed")
    import torch

    gpus = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    return Finding(
        "torch",
        True,
        f"{torch.__version__}, {', '.join(gpus) or f'{torch.get_num_threads()} CPU threads'}",
    )


def _check_store(settings: Settings) -> Finding:
    if settings.redis_url is not None:
        from redis.exceptions import RedisError

        from services.store.connection import connect_redis

        try:
            connect_redis(settings.redis_url).ping()
        except RedisError as error:
            return Finding("job store", False, f"KD_REDIS_URL does not answer: {error}")
        return Finding("job store", True, "KD_REDIS_URL answers")
    try:
        return Finding("job store", True, str(find_binary()))
    except StoreUnavailable as error:
        return Finding("job store", False, str(error))


def _check_home(settings: Settings) -> Finding:
    # The first job creates the data folder, so the nearest existing folder above it counts.
    existing = next(folder for folder in (settings.home, *settings.home.parents) if folder.exists())
    return Finding(
        "data folder", os.access(existing, os.W_OK | os.X_OK), f"{settings.home} (KD_HOME)"
    )


def _check_disk(settings: Settings) -> Finding:
    free = measure_free_bytes(settings.home)
    return Finding("disk", free > FREE_BYTES_WANTED, f"{free / 2**30:.1f} GiB free", needed=False)


def _check_server(settings: Settings) -> Finding:
    try:
        with Client(settings.server, settings.api_key) as client:
            client.get("/readyz")
            workers = client.get("/workers")["data"]
    except Unreachable:
        return Finding(
            "service", False, f"none at {settings.server}; `kd up` starts one", needed=False
        )
    except Refused as error:
        return Finding("service", False, str(error), needed=False)
    return Finding("service", True, f"{settings.server}, {len(workers)} worker(s)", needed=False)
