"""The client for programs with an event loop of asyncio; its methods are those of ``Client``."""

from __future__ import annotations

import asyncio
import copy
import os
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Self, TypeVar

import httpx

from kd.client.downloading import download
from kd.client.operations import JobLike, JobRef, Operations, choose_types, locate_cache, locate_job
from kd.client.steps import (
    Answer,
    Emit,
    Invoke,
    Open,
    Pause,
    Read,
    Request,
    Returned,
    Send,
    Step,
    Steps,
)
from kd.client.transport import Connection, warn_of_expiry
from kd.client.wire.accounts import TeamAccount
from kd.client.wire.caches import (
    CacheDetail,
    CacheEntry,
    CacheRecords,
    CacheStatistics,
    CacheUsage,
    ShardStates,
)
from kd.client.wire.files import Artifact, Checkpoint
from kd.client.wire.history import JobEvent, MetricsHistory, RunEntry
from kd.client.wire.jobs import Job, Kind, Status
from kd.client.wire.plans import JobPlan, Template
from kd.client.wire.service import Health, Version, Worker

T = TypeVar("T")


class AsyncClient:
    """A client of one service, as ``kd.Client``, whose methods are coroutines.

    ``jobs``, ``events`` and ``past_events`` return asynchronous iterators. Also an asynchronous
    context manager.
    """

    def __init__(
        self,
        server: str | None = None,
        key: str | None = None,
        *,
        patience: float = 60.0,
        on_expiry: Callable[[str], None] = warn_of_expiry,
    ) -> None:
        self._connection = Connection(server, key, on_expiry)
        self._http = httpx.AsyncClient(**self._connection.describe())
        self._operations = Operations(patience)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connections."""
        await self._http.aclose()

    @property
    def server(self) -> str:
        """The address of the server."""
        return self._connection.server

    def with_patience(self, seconds: float) -> Self:
        """Return a client that shares the connections, and has another patience."""
        other = copy.copy(self)
        other._operations = Operations(seconds)
        return other

    async def submit(self, job: JobLike, *, idempotency_key: str | None = None) -> Job:
        """Create a job.

        ``job`` are its fields, a ``JobConfig``, or the path of a YAML or JSON file. Its relative
        paths start in the folder of the service. A request that is sent again makes no second job:
        for a day, the same ``idempotency_key`` and job return the same job. The default is a new
        key for each call.
        """
        return await self._run(self._operations.submit(job, idempotency_key))

    async def validate(self, job: JobLike, *, devices: str | None = None) -> JobPlan:
        """Return what a job would do and need; none is created. ``devices`` is like ``8xh100``."""
        return await self._run(self._operations.validate(job, devices))

    async def clone(
        self, job: JobRef, changes: Mapping[str, Any], *, idempotency_key: str | None = None
    ) -> Job:
        """Create the same job again, changed by a JSON merge patch (RFC 7386)."""
        return await self._run(self._operations.clone(job, changes, idempotency_key))

    async def job(self, job: JobRef) -> Job:
        """Return a job as it is now."""
        return await self._run(self._operations.job(job))

    def jobs(
        self,
        *,
        status: Status | None = None,
        kind: Kind | None = None,
        label: str | None = None,
        parent: str | None = None,
    ) -> AsyncIterator[Job]:
        """Iterate over the jobs, newest first; further pages are read as they are needed.

        ``label`` is ``name:value``; ``parent`` is the search whose trials are wanted.
        """
        return self._iterate(
            self._operations.jobs(
                {"status": status, "kind": kind, "label": label, "parent": parent}
            )
        )

    async def wait(
        self,
        job: JobRef,
        timeout: float | None = None,  # noqa: ASYNC109 -- not of one await
    ) -> Job:
        """Return the job once it has succeeded, failed or been cancelled.

        Raises ``TimedOut`` after ``timeout`` seconds; the job goes on. A job that is paused has not
        ended.
        """
        return await self._run(self._operations.wait(job, timeout))

    def events(
        self, job: JobRef, *, after: str | None = None, types: Iterable[str] | None = None
    ) -> AsyncIterator[JobEvent]:
        """Iterate over the events of a job until it has ended, from its start or after an id.

        Each event comes once and in order, also if the connection is cut or the server restarts.
        ``types`` are the types that are wanted, such as ``status`` and ``metrics``.
        """
        return self._iterate(self._operations.events(job, after, choose_types(types)))

    def past_events(
        self, job: JobRef, *, after: str | None = None, types: Iterable[str] | None = None
    ) -> AsyncIterator[JobEvent]:
        """Iterate over the events that a job has so far."""
        return self._iterate(self._operations.past_events(job, after, choose_types(types)))

    async def cancel(self, job: JobRef) -> Job:
        """Stop a job for good. A job that runs saves its state first."""
        return await self._run(self._operations.act("cancel", job))

    async def pause(self, job: JobRef) -> Job:
        """Stop a job for now. A job that runs saves its state first."""
        return await self._run(self._operations.act("pause", job))

    async def resume(self, job: JobRef) -> Job:
        """Queue a paused job again; it continues from its saved state."""
        return await self._run(self._operations.act("resume", job))

    async def retry(self, job: JobRef) -> Job:
        """Queue a failed or cancelled job again; it continues from its saved state."""
        return await self._run(self._operations.act("retry", job))

    async def delete(self, job: JobRef, *, artifacts: bool = False) -> None:
        """Delete a job that has ended; with ``artifacts`` also its files. Its cache stays."""
        return await self._run(self._operations.delete(locate_job(job), {"artifacts": artifacts}))

    async def metrics(
        self, job: JobRef, *, names: str | None = None, max_points: int = 1000
    ) -> MetricsHistory:
        """Return the metrics of a job over its steps; ``names`` are separated by commas."""
        return await self._run(self._operations.metrics(job, names, max_points))

    async def log(self, job: JobRef, *, start: int = 0, tail: int | None = None) -> bytes:
        """Return what a job printed, from byte ``start`` on, or its last ``tail`` lines."""
        return await self._run(self._operations.log(job, start, tail))

    async def checkpoints(self, job: JobRef) -> list[Checkpoint]:
        """Return the checkpoints of a job, oldest first."""
        return await self._run(self._operations.checkpoints(job))

    async def artifacts(self, job: JobRef) -> list[Artifact]:
        """Return the files that a job produced; a file in a folder is ``folder/file``."""
        return await self._run(self._operations.artifacts(job))

    async def download(self, job: JobRef, name: str, path: str | os.PathLike[str]) -> Path:
        """Download an artifact to the file ``path``, whose folder is made if it is missing.

        A cut download goes on where it was cut. The file is compared with its sha256, and appears
        whole or not at all.
        """
        return await self._run(download(job, name, Path(path), self._operations.patience))

    async def caches(self) -> list[CacheEntry]:
        """Return the caches, newest first."""
        return await self._run(self._operations.caches())

    async def cache(self, fingerprint: str) -> CacheDetail:
        """Return one cache, with its identity and its fidelity."""
        return await self._run(self._operations.cache(fingerprint))

    async def verify_cache(self, fingerprint: str, *, idempotency_key: str | None = None) -> Job:
        """Create a job that reads every byte of a cache, and fails if one differs."""
        return await self._run(self._operations.verify_cache(fingerprint, idempotency_key))

    async def measure_fidelity(
        self, fingerprint: str, *, idempotency_key: str | None = None
    ) -> Job:
        """Create a job that compares some records with the teacher, and fails if they differ."""
        return await self._run(self._operations.measure_fidelity(fingerprint, idempotency_key))

    async def cache_statistics(self, fingerprint: str, *, seed: int = 0) -> CacheStatistics:
        """Return histograms of entropy, entries and kept mass, of a sample that ``seed`` draws."""
        return await self._run(
            self._operations.view_cache(CacheStatistics, fingerprint, "statistics", seed=seed)
        )

    async def cache_shards(self, fingerprint: str) -> ShardStates:
        """Return the state of each shard of a cache: sealed, in work, missing or corrupt."""
        return await self._run(self._operations.view_cache(ShardStates, fingerprint, "shards"))

    async def cache_records(
        self, fingerprint: str, *, sequence: int = 0, start: int = 0, limit: int = 50
    ) -> CacheRecords:
        """Return up to ``limit`` records of one sequence from number ``start`` on, with text."""
        return await self._run(
            self._operations.view_cache(
                CacheRecords, fingerprint, "records", sequence=sequence, start=start, limit=limit
            )
        )

    async def cache_usage(self, fingerprint: str) -> CacheUsage:
        """Return the jobs and students of a cache, its last checks, and why it is kept."""
        return await self._run(self._operations.view_cache(CacheUsage, fingerprint, "usage"))

    async def delete_cache(self, fingerprint: str) -> None:
        """Remove a cache that no unfinished job writes or reads."""
        return await self._run(self._operations.delete(locate_cache(fingerprint)))

    async def runs(self) -> list[RunEntry]:
        """Return the runs on the server's disk, the newest first, and what they have measured."""
        return await self._run(self._operations.runs())

    async def templates(self) -> list[Template]:
        """Return the templates of job files: YAML, in which models and texts are empty."""
        return await self._run(self._operations.templates())

    async def workers(self) -> list[Worker]:
        """Return the workers with a recent heartbeat."""
        return await self._run(self._operations.workers())

    async def quotas(self) -> list[TeamAccount]:
        """Return what the caller's team uses, and its quotas; for an admin those of all teams."""
        return await self._run(self._operations.quotas())

    async def health(self) -> Health:
        """Return the health of the server; needs no key."""
        return await self._run(self._operations.health())

    async def version(self) -> Version:
        """Return the version of the server."""
        return await self._run(self._operations.version())

    async def request(
        self, method: str, path: str, *, query: Mapping[str, Any] | None = None, body: Any = None
    ) -> Any:
        """Send a request of docs/api.md with a body of JSON; return the JSON of the answer."""
        return await self._run(self._operations.request(method, path, query, body))

    async def _run(self, steps: Steps[T]) -> T:
        async with _AsyncRun(self._http, self._connection, steps) as run:
            end = await run.advance()
        assert isinstance(end, Returned)
        result: T = end.value
        return result

    async def _iterate(self, steps: Steps[None]) -> AsyncIterator[Any]:
        async with _AsyncRun(self._http, self._connection, steps) as run:
            while isinstance(step := await run.advance(), Emit):
                yield step.item


class _AsyncRun:
    """An operation under way, and the answer that it reads."""

    def __init__(self, http: httpx.AsyncClient, connection: Connection, steps: Steps[Any]) -> None:
        self._http = http
        self._connection = connection
        self._steps = steps
        self._response: httpx.Response | None = None
        self._pieces: AsyncIterator[bytes] | None = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        self._steps.close()
        await self._close_response()

    async def advance(self) -> Emit | Returned:
        """Carry steps out until the operation hands an item over, or ends."""
        try:
            step = next(self._steps)
            while not isinstance(step, Emit):
                try:
                    result = await self._carry_out(step)
                except Exception as error:
                    step = self._steps.throw(self._connection.translate(error))
                else:
                    step = self._steps.send(result)
        except StopIteration as end:
            return Returned(end.value)
        return step

    async def _carry_out(self, step: Step) -> Any:
        match step:
            case Send(request):
                return await self._send(request)
            case Open(request):
                return await self._open(request)
            case Read():
                return await self._read()
            case Pause(seconds):
                return await asyncio.sleep(seconds)
            case Invoke(call):
                return await asyncio.to_thread(call)

    async def _send(self, request: Request) -> Answer:
        response = await self._http.send(
            self._http.build_request(**self._connection.describe_request(request))
        )
        return self._connection.make_answer(response, response.content)

    async def _open(self, request: Request) -> Answer:
        await self._close_response()
        described = self._connection.describe_request(request)
        response = await self._http.send(self._http.build_request(**described), stream=True)
        self._response = response
        if not response.is_success:
            return self._connection.make_answer(response, await response.aread())
        self._pieces = response.aiter_bytes()
        return self._connection.make_answer(response)

    async def _read(self) -> bytes | None:
        assert self._pieces is not None
        return await anext(self._pieces, None)

    async def _close_response(self) -> None:
        if self._response is not None:
            await self._response.aclose()
            self._response = None
