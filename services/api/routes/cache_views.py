"""Routes that show what a cache holds and who uses it, for people who look at it.

GET /caches/{fingerprint}/statistics   histograms of a sample of its records
GET /caches/{fingerprint}/shards       the state of each shard
GET /caches/{fingerprint}/records      some records of one sequence, with their text
GET /caches/{fingerprint}/usage        its jobs, its last checks, and why it is kept

The first three are read by a process of their own: ``services.api.reading``.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

from fastapi import APIRouter, Query

from cache.disk import is_lock_free
from cache.reading.usage import is_read, read_last_use
from cache.shards.names import MANIFEST
from kd.client.wire import caches as wire
from kd.client.wire.jobs import TERMINAL_STATUSES
from kd.config.kinds import CAPTURE, KINDS, Kind
from kd.files import read_json
from services.api.guards.json_bodies import StrictRoute
from services.api.routes.access import READ, guard
from services.api.routes.caches import KnownCache
from services.api.service import Service, TheCaller, TheService
from services.store.callers import Caller
from services.store.jobs.records import JobRecord
from services.store.retention.in_use import read_students

#: Jobs of a cache that are looked at, the newest first, and those that are shown.
READ_JOBS = 1000
SHOWN_JOBS = 100
#: Lines of a check that are shown.
SHOWN_PROBLEMS = 20
#: Records of one page at most.
PAGE_RECORDS = 256

router = APIRouter(tags=["caches"], route_class=StrictRoute)


@router.get("/caches/{fingerprint}/statistics", **guard(READ, 404, 409, 422))
def read_statistics(
    folder: KnownCache,
    service: TheService,
    seed: Annotated[int, Query(ge=0, lt=1 << 53, description="Chooses the records.")] = 0,
) -> wire.CacheStatistics:
    """Show histograms of entropy, entries and kept mass, of at most about 65,536 records."""
    found = service.reading.read("statistics", folder, seed=seed)
    return wire.CacheStatistics.model_validate(found)


@router.get("/caches/{fingerprint}/shards", **guard(READ, 404, 409, 422))
def read_shards(folder: KnownCache, service: TheService, caller: TheCaller) -> wire.ShardStates:
    """Show which shards of a cache are sealed, in work, missing or corrupt.

    Corrupt are the shards that the last job of kind verify has found damaged, and those whose files
    are missing or have another size.
    """
    jobs = _read_jobs(service, caller, folder)
    check = _find_check(service, folder, jobs, KINDS["verify"])
    if check is not None and (check.outdated or check.status not in TERMINAL_STATUSES):
        check = None
    damaged = [] if check is None else check.problems
    expected = _count_expected_shards(jobs)
    states = service.reading.read("shards", folder, damaged=damaged, expected=expected)
    return wire.ShardStates(**states, verified_at=None if check is None else check.at)


@router.get("/caches/{fingerprint}/records", **guard(READ, 404, 409, 422))
def read_records(
    folder: KnownCache,
    service: TheService,
    sequence: Annotated[int, Query(ge=0, description="Number of the sequence, from 0.")] = 0,
    start: Annotated[int, Query(ge=0, description="Number of the first record in it.")] = 0,
    limit: Annotated[int, Query(ge=1, le=PAGE_RECORDS, description="Records.")] = 50,
) -> wire.CacheRecords:
    """Show some records of one sequence: what the teacher expected, and what the text said."""
    found = service.reading.read("records", folder, sequence=sequence, start=start, limit=limit)
    return wire.CacheRecords.model_validate(found)


@router.get("/caches/{fingerprint}/usage", **guard(READ, 404, 422))
def read_usage(folder: KnownCache, service: TheService, caller: TheCaller) -> wire.CacheUsage:
    """Show the jobs and students of a cache, its last checks, and why it is kept."""
    jobs = _read_jobs(service, caller, folder)
    own = [job for job in jobs if job.parent is None]
    used = read_last_use(folder)
    checks = {
        kind.name: _find_check(service, folder, jobs, kind, SHOWN_PROBLEMS)
        for kind in KINDS.values()
        if kind.checks
    }
    return wire.CacheUsage(
        jobs=[
            wire.CacheUser(
                **job.model_dump(include={*wire.CacheUser.model_fields}),
                student="student" in job.artifacts,
            )
            for job in own[:SHOWN_JOBS]
        ],
        trials=len(jobs) - len(own),
        kept_by=list(_find_holders(service, caller, folder, jobs)),
        last_used=None if used is None else datetime.fromtimestamp(used, UTC),
        **checks,
    )


def _read_jobs(service: Service, caller: Caller, folder: Path) -> list[JobRecord]:
    """The newest jobs of a cache that the caller sees, newest first."""
    ids = service.store.find_cache_jobs(folder.name)[:READ_JOBS]
    return service.store.get_many(ids, caller)


# ---------------------------------------------------------------------- checks


def _find_check(
    service: Service, folder: Path, jobs: Iterable[JobRecord], kind: Kind, most: int | None = None
) -> wire.CacheCheck | None:
    """The last check of a kind, unless it was cancelled, with all or ``most`` of its problems."""
    found = next((job for job in jobs if job.kind == kind.name and job.status != "cancelled"), None)
    if found is None:
        return None
    written = read_json(service.settings.run_dir(found.id) / kind.last_file) or {}
    problems = list(map(str, written.get("problems", ())))
    if not problems and found.status == "failed" and found.error is not None:
        problems = [found.error.detail]
    at = found.finished_at or found.created_at
    sealed = 0.0
    with suppress(OSError):  # the cache may be removed at any time
        sealed = (folder / MANIFEST).stat().st_mtime
    return wire.CacheCheck(
        job=found.id,
        status=found.status,
        at=at,
        problems=problems[:most],
        outdated=found.finished_at is not None and sealed > at.timestamp(),
    )


def _count_expected_shards(jobs: Iterable[JobRecord]) -> int:
    """Shards that a capture under way will write, as far as its progress tells; else 0."""
    for job in jobs:
        if job.status == "running" and job.stage == CAPTURE.name and KINDS[job.kind].captures:
            size = job.config.get("cache", {}).get("shard_sequences")
            if job.progress.unit == "sequences" and job.progress.total and size:
                return -(-job.progress.total // int(size))
    return 0


# ---------------------------------------------------------------------- why it is kept


def _find_holders(
    service: Service, caller: Caller, folder: Path, jobs: list[JobRecord]
) -> Iterator[str]:
    """Say what keeps the rules of retention from removing a cache."""
    for job in jobs:
        if not job.ended and job.parent is None:
            yield f"the job {job.id}, which has not ended"
    students = [job for job in jobs if "student" in job.artifacts]
    for job in students[:SHOWN_JOBS]:
        yield f"the student of {job.id}"
    if caller.sees_all and not students:
        # Runs of `kd run` have no job, but their students hold a cache too.
        holder = read_students(service.settings.runs).get(folder.name)
        if holder is not None:
            yield holder
    if not is_lock_free(folder.with_name(f"{folder.name}.lock")):
        yield "a capture that is under way"
    if is_read(folder):
        yield "a process that reads it now"
