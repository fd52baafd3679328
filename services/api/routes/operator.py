"""Routes for the operator, which need the scope admin. They change nothing.

GET /keys      the API keys: owners, rights, times; never a key or its digest
GET /storage   what lies on the disk, by kind, and what `kd gc` would remove and why
GET /health    the job store, the workers, the queues, the clock, the disk, the versions
"""

from __future__ import annotations

import platform
import socket
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from datetime import datetime
from typing import cast

from fastapi import APIRouter, Request

from kd.client.wire import operator as wire
from kd.client.wire.service import WorkerState
from kd.config.kinds import list_stage_names
from kd.files import Disk
from kd.python.version import read_version
from services.api.guards.json_bodies import StrictRoute
from services.api.routes.access import ADMIN, guard
from services.api.routes.operations import READY_SECONDS, RECORD_FORMAT
from services.api.service import TheService
from services.settings import Settings
from services.store.connection import ask_server, find_unsuitability
from services.store.jobs.store import JobStore
from services.store.key_file import KeyFile
from services.store.retention.collector import survey

#: Seconds by which the clocks of Redis and the server may differ: leases and events take the first,
#: logs and files the second.
CLOCK_SECONDS = 5.0
#: Share of the memory of Redis from which on a warning is given.
MEMORY_SHARE = 0.9

router = APIRouter(tags=["service"], route_class=StrictRoute)


# ---------------------------------------------------------------------- keys


@router.get("/keys", **guard(ADMIN))
def list_keys(request: Request, service: TheService) -> wire.KeyEntries:
    """List the API keys that are not revoked, with the time of their last use."""
    file: KeyFile | None = request.app.state.keys
    if file is None:
        return wire.KeyEntries(required=False, data=[])
    used = service.key_use.read()
    entries = [
        wire.KeyEntry(
            id=key.id,
            name=key.name,
            team=key.team or key.name,
            scopes=list(key.scopes),
            created_at=datetime.fromisoformat(key.created_at) if key.created_at else None,
            last_used_at=used.get(key.id),
            expires_at=key.expires_at,
            expired=key.expired,
        )
        for key in file.list_keys()
    ]
    return wire.KeyEntries(required=True, data=entries)


# ---------------------------------------------------------------------- storage


@router.get("/storage", **guard(ADMIN))
def show_storage(service: TheService) -> wire.StorageReport:
    """Show what is on the disk, and what `kd gc` without options would remove now, and why."""
    return survey(service.settings, service.store, read_disks(service.settings))


def read_disks(settings: Settings) -> dict[str, wire.DiskSpace | None]:
    """The disk of the data folder, and that of the caches where KD_STORE names a folder."""
    disks = {
        name: wire.DiskSpace(**asdict(Disk.of(folder)), floor_bytes=settings.disk_floor_bytes)
        for name, folder in settings.places.items()
    }
    return {"disk": disks["KD_HOME"], "caches_disk": disks.get("KD_STORE")}


# ---------------------------------------------------------------------- health


@router.get("/health", **guard(ADMIN))
def show_health(service: TheService) -> wire.ServiceHealth:
    """Show the state of the service and of what it needs, and say what is wrong."""
    store = service.store
    workers = store.list_workers()
    redis = _ask_redis(store)
    last = cast(str | None, store.redis.get("kd:reconciler"))
    age = None if last is None else max(0.0, store.read_clock_ms() / 1000 - float(last))
    stages = list_stage_names("worker")
    serving = {stage: sum(stage in worker.stages for worker in workers) for stage in stages}
    queues = [
        wire.QueueHealth(stage=stage, waiting=waiting, workers=serving[stage])
        for stage, waiting in store.read_queue_depths(stages).items()
    ]
    full = service.settings.find_full_disk()
    unsuitable = find_unsuitability(store.redis)
    faults = [] if unsuitable is None else [str(unsuitable)]
    faults += store.find_lost_records(service.settings.runs)
    return wire.ServiceHealth(
        problems=[*faults, *_find_faults(redis, age, full, queues, workers)],
        version=read_version(),
        python=platform.python_version(),
        record_format=RECORD_FORMAT,
        host=socket.gethostname(),
        redis=redis,
        reconciler_age_seconds=age,
        **read_disks(service.settings),
        queues=queues,
        jobs=store.count_statuses(),
        worker_versions=dict(Counter(worker.version or "unknown" for worker in workers)),
    )


def _ask_redis(store: JobStore) -> wire.RedisHealth:
    began = time.monotonic()
    store.redis.ping()
    took = time.monotonic() - began
    ahead = store.read_clock_ms() / 1000 - time.time()
    found = ask_server(store.redis)
    return wire.RedisHealth(
        version=str(found.get("valkey_version") or found.get("redis_version", "")),
        answer_seconds=took,
        clock_ahead_seconds=ahead,
        uptime_seconds=int(found.get("uptime_in_seconds", 0)),
        clients=int(found.get("connected_clients", 0)),
        memory_bytes=int(found.get("used_memory", 0)),
        memory_limit_bytes=int(found.get("maxmemory", 0)),
        # A user who may not ask is told so as a fault of its own.
        persistent=bool(found.get("aof_enabled", not found)),
    )


def _find_faults(
    redis: wire.RedisHealth,
    reconciler_age: float | None,
    full: str | None,
    queues: Iterable[wire.QueueHealth],
    workers: Iterable[WorkerState],
) -> Iterator[str]:
    """Say what is wrong, a sentence for each."""
    if reconciler_age is None or reconciler_age > READY_SECONDS:
        yield "The reconciler has not run for a minute."
    if full is not None:
        yield f"{full} No job is accepted."
    if abs(redis.clock_ahead_seconds) > CLOCK_SECONDS:
        yield f"The clocks of Redis and the server differ by {redis.clock_ahead_seconds:.0f} s."
    if not redis.version:
        yield "This user of Redis may not call INFO: its memory and persistence are not known."
    if not redis.persistent:
        yield "Redis keeps no append-only file: a crash of it loses jobs."
    if redis.memory_limit_bytes and redis.memory_bytes > MEMORY_SHARE * redis.memory_limit_bytes:
        yield "The memory of Redis is nearly full: new jobs will be refused."
    for queue in queues:
        if queue.waiting and not queue.workers:
            yield f"{queue.waiting} jobs wait for stage {queue.stage}, which no worker serves."
    if others := {worker.version for worker in workers} - {read_version()}:
        yield f"Workers are of another version than the server: {', '.join(sorted(others))}."
