"""``kd doctor``: what Potstill needs, and whether this machine has it."""

from __future__ import annotations

import importlib.util
import os
import platform
import shutil
import sys
from dataclasses import dataclass

from services.embedded import ServerError, find_binary
from services.settings import Settings
from services.terminal.client import Client, Refused, Unreachable

FREE_BYTES_WANTED = 2 * 2**30


@dataclass(frozen=True)
class Finding:
    """One answer; ``needed`` = nothing works without it."""

    what: str
    ok: bool
    detail: str
    needed: bool = True


def examine(settings: Settings) -> list[Finding]:
    """Every finding."""
    return [_python(), _torch(), _store(settings), _home(settings), _disk(settings), _server(settings)]


def _python() -> Finding:
    return Finding("python", sys.version_info >= (3, 11), f"{platform.python_version()} on {platform.platform()}")


def _torch() -> Finding:
    if importlib.util.find_spec("torch") is None:
        return Finding("torch", False, "is not installed")
    import torch

    gpus = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    return Finding("torch", True, f"{torch.__version__}, {', '.join(gpus) or f'{torch.get_num_threads()} CPU threads'}")


def _store(settings: Settings) -> Finding:
    if settings.redis_url is not None:
        from redis.exceptions import RedisError

        from services.jobs import connect

        try:
            connect(settings.redis_url).ping()
        except RedisError as error:
            return Finding("job store", False, f"KD_REDIS_URL does not answer: {error}")
        return Finding("job store", True, "KD_REDIS_URL answers")
    try:
        return Finding("job store", True, str(find_binary()))
    except ServerError as error:
        return Finding("job store", False, str(error))


def _home(settings: Settings) -> Finding:
    existing = next(folder for folder in (settings.home, *settings.home.parents) if folder.exists())
    return Finding("data folder", os.access(existing, os.W_OK | os.X_OK), f"{settings.home} (KD_HOME)")


def _disk(settings: Settings) -> Finding:
    existing = next(folder for folder in (settings.home, *settings.home.parents) if folder.exists())
    free = shutil.disk_usage(existing).free
    return Finding("disk", free > FREE_BYTES_WANTED, f"{free / 2**30:.1f} GiB free", needed=False)


def _server(settings: Settings) -> Finding:
    try:
        with Client(settings.server, settings.api_key) as client:
            client.get("/readyz")
            workers = client.get("/workers")["data"]
    except Unreachable:
        return Finding("service", False, f"none at {settings.server}; `kd up` starts one", needed=False)
    except Refused as error:
        return Finding("service", False, str(error), needed=False)
    return Finding("service", True, f"{settings.server}, {len(workers)} worker(s)", needed=False)
