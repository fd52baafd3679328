"""The client for programs without an event loop; the command line uses it too."""

from __future__ import annotations

import copy
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
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


class Client:
    """A client of one service, as the owner of ``key``. Thread-safe; also a context manager.

    ``server`` defaults to ``KD_SERVER``, then to http://127.0.0.1:8000; ``key`` to ``KD_API_KEY``.
    While the server is away or busy, a request is sent again for ``patience`` seconds.
    ``on_expiry`` is called once with the end of a key that expires soon.

    Every method raises ``Refused`` if the server refuses the request, and ``Unreachable`` if it
    does not answer.
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
        self._http = httpx.Client(**self._connection.describe())
        self._operations = Operations(patience)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections."""
        self._http.close()

    @property
    def server(self) -> str:
        """The address of the server."""
        return self._connection.server

    def with_patience(self, seconds: float) -> Self:
        """Return a client that shares the connections, and has another patience."""
        other = copy.copy(self)
        other._operations = Operations(seconds)
        return other

    def submit(self, job: JobLike, *, idempotency_key: str | None = None) -> Job:
        """Create a job.

        ``job`` are its fields, a ``JobConfig``, or the path of a YAML or JSON file. Its relative
        paths start in the folder of the service. A request that is sent again makes no second job:
        for a day, the same ``idempotency_key`` and job return the same job. The default is a new
        key for each call.
        """
        return self._run(self._operations.submit(job, idempotency_key))

    def validate(self, job: JobLike, *, devices: str | None = None) -> JobPlan:
        """Return what a job would do and need; none is created. ``devices`` is like ``8xh100``."""
        return self._run(self._operations.validate(job, devices))

    def clone(
        self, job: JobRef, changes: Mapping[str, Any], *, idempotency_key: str | None = None
    ) -> Job:
        """Create the same job again, changed by a JSON merge patch (RFC 7386)."""
        return self._run(self._operations.clone(job, changes, idempotency_key))

    def job(self, job: JobRef) -> Job:
        """Return a job as it is now."""
        return self._run(self._operations.job(job))

    def jobs(
        self,
        *,
        status: Status | None = None,
        kind: Kind | None = None,
        label: str | None = None,
        parent: str | None = None,
    ) -> Iterator[Job]:
        """Iterate over the jobs, newest first; further pages are read as they are needed.

        ``label`` is ``name:value``; ``parent`` is the search whose trials are wanted.
        """
        return self._iterate(
            self._operations.jobs(
                {"status": status, "kind": kind, "label": label, "parent": parent}
            )
        )

    def wait(self, job: JobRef, timeout: float | None = None) -> Job:
        """Return the job once it has succeeded, failed or been cancelled.

        Raises ``TimedOut`` after ``timeout`` seconds; the job goes on. A job that is paused has not
        ended.
        """
        return self._run(self._operations.wait(job, timeout))

    def events(
        self, job: JobRef, *, after: str | None = None, types: Iterable[str] | None = None
    ) -> Iterator[JobEvent]:
        """Iterate over the events of a job until it has ended, from its start or after an id.

        Each event comes once and in order, also if the connection is cut or the server restarts.
        ``types`` are the types that are wanted, such as ``status`` and ``metrics``.
        """
        return self._iterate(self._operations.events(job, after, choose_types(types)))

    def past_events(
        self, job: JobRef, *, after: str | None = None, types: Iterable[str] | None = None
    ) -> Iterator[JobEvent]:
        """Iterate over the events that a job has so far."""
        return self._iterate(self._operations.past_events(job, after, choose_types(types)))

    def cancel(self, job: JobRef) -> Job:
        """Stop a job for good. A job that runs saves its state first."""
        return self._run(self._operations.act("cancel", job))

    def pause(self, job: JobRef) -> Job:
        """Stop a job for now. A job that runs saves its state first."""
        return self._run(self._operations.act("pause", job))

    def resume(self, job: JobRef) -> Job:
        """Queue a paused job again; it continues from its saved state."""
        return self._run(self._operations.act("resume", job))

    def retry(self, job: JobRef) -> Job:
        """Queue a failed or cancelled job again; it continues from its saved state."""
        return self._run(self._operations.act("retry", job))

    def delete(self, job: JobRef, *, artifacts: bool = False) -> None:
        """Delete a job that has ended; with ``artifacts`` also its files. Its cache stays."""
        return self._run(self._operations.delete(locate_job(job), {"artifacts": artifacts}))

    def metrics(
        self, job: JobRef, *, names: str | None = None, max_points: int = 1000
    ) -> MetricsHistory:
        """Return the metrics of a job over its steps; ``names`` are separated by commas."""
        return self._run(self._operations.metrics(job, names, max_points))

    def log(self, job: JobRef, *, start: int = 0, tail: int | None = None) -> bytes:
        """Return what a job printed, from byte ``start`` on, or its last ``tail`` lines."""
        return self._run(self._operations.log(job, start, tail))

    def checkpoints(self, job: JobRef) -> list[Checkpoint]:
        """Return the checkpoints of a job, oldest first."""
        return self._run(self._operations.checkpoints(job))

    def artifacts(self, job: JobRef) -> list[Artifact]:
        """Return the files that a job produced; a file in a folder is ``folder/file``."""
        return self._run(self._operations.artifacts(job))

    def download(self, job: JobRef, name: str, path: str | os.PathLike[str]) -> Path:
        """Download an artifact to the file ``path``, whose folder is made if it is missing.

        A cut download goes on where it was cut. The file is compared with its sha256, and appears
        whole or not at all.
        """
        return self._run(download(job, name, Path(path), self._operations.patience))

    def caches(self) -> list[CacheEntry]:
        """Return the caches, newest first."""
        return self._run(self._operations.caches())

    def cache(self, fingerprint: str) -> CacheDetail:
        """Return one cache, with its identity and its fidelity."""
        return self._run(self._operations.cache(fingerprint))

    def verify_cache(self, fingerprint: str, *, idempotency_key: str | None = None) -> Job:
        """Create a job that reads every byte of a cache, and fails if one differs."""
        return self._run(self._operations.verify_cache(fingerprint, idempotency_key))

    def measure_fidelity(self, fingerprint: str, *, idempotency_key: str | None = None) -> Job:
        """Create a job that compares some records with the teacher, and fails if they differ."""
        return self._run(self._operations.measure_fidelity(fingerprint, idempotency_key))

    def cache_statistics(self, fingerprint: str, *, seed: int = 0) -> CacheStatistics:
        """Return histograms of entropy, entries and kept mass, of a sample that ``seed`` draws."""
        return self._run(
            self._operations.view_cache(CacheStatistics, fingerprint, "statistics", seed=seed)
        )

    def cache_shards(self, fingerprint: str) -> ShardStates:
        """Return the state of each shard of a cache: sealed, in work, missing or corrupt."""
        return self._run(self._operations.view_cache(ShardStates, fingerprint, "shards"))

    def cache_records(
        self, fingerprint: str, *, sequence: int = 0, start: int = 0, limit: int = 50
    ) -> CacheRecords:
        """Return up to ``limit`` records of one sequence from number ``start`` on, with text."""
        return self._run(
            self._operations.view_cache(
                CacheRecords, fingerprint, "records", sequence=sequence, start=start, limit=limit
            )
        )

    def cache_usage(self, fingerprint: str) -> CacheUsage:
        """Return the jobs and students of a cache, its last checks, and why it is kept."""
        return self._run(self._operations.view_cache(CacheUsage, fingerprint, "usage"))

    def delete_cache(self, fingerprint: str) -> None:
        """Remove a cache that no unfinished job writes or reads."""
        return self._run(self._operations.delete(locate_cache(fingerprint)))

    def runs(self) -> list[RunEntry]:
        """Return the runs on the server's disk, the newest first, and what they have measured."""
        return self._run(self._operations.runs())

    def templates(self) -> list[Template]:
        """Return the templates of job files: YAML, in which models and texts are empty."""
        return self._run(self._operations.templates())

    def workers(self) -> list[Worker]:
        """Return the workers with a recent heartbeat."""
        return self._run(self._operations.workers())

    def quotas(self) -> list[TeamAccount]:
        """Return what the caller's team uses, and its quotas; for an admin those of all teams."""
        return self._run(self._operations.quotas())

    def health(self) -> Health:
        """Return the health of the server; needs no key."""
        return self._run(self._operations.health())

    def version(self) -> Version:
        """Return the version of the server."""
        return self._run(self._operations.version())

    def request(
        self, method: str, path: str, *, query: Mapping[str, Any] | None = None, body: Any = None
    ) -> Any:
        """Send a request of docs/api.md with a body of JSON; return the JSON of the answer."""
        return self._run(self._operations.request(method, path, query, body))

    def _run(self, steps: Steps[T]) -> T:
        with _Run(self._http, self._connection, steps) as run:
            end = run.advance()
        assert isinstance(end, Returned)
        result: T = end.value
        return result

    def _iterate(self, steps: Steps[None]) -> Iterator[Any]:
        with _Run(self._http, self._connection, steps) as run:
            while isinstance(step := run.advance(), Emit):
                yield step.item


class _Run:
    """An operation under way, and the answer that it reads."""

    def __init__(self, http: httpx.Client, connection: Connection, steps: Steps[Any]) -> None:
        self._http = http
        self._connection = connection
        self._steps = steps
        self._response: httpx.Response | None = None
        self._pieces: Iterator[bytes] = iter(())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._steps.close()
        self._close_response()

    def advance(self) -> Emit | Returned:
        """Carry steps out until the operation hands an item over, or ends."""
        try:
            step = next(self._steps)
            while not isinstance(step, Emit):
                try:
                    result = self._carry_out(step)
                except Exception as error:
                    step = self._steps.throw(self._connection.translate(error))
                else:
                    step = self._steps.send(result)
        except StopIteration as end:
            return Returned(end.value)
        return step

    def _carry_out(self, step: Step) -> Any:
        match step:
            case Send(request):
                return self._send(request)
            case Open(request):
                return self._open(request)
            case Read():
                return next(self._pieces, None)
            case Pause(seconds):
                return time.sleep(seconds)
            case Invoke(call):
                return call()

    def _send(self, request: Request) -> Answer:
        response = self._http.send(
            self._http.build_request(**self._connection.describe_request(request))
        )
        return self._connection.make_answer(response, response.content)

    def _open(self, request: Request) -> Answer:
        self._close_response()
        described = self._connection.describe_request(request)
        response = self._http.send(self._http.build_request(**described), stream=True)
        self._response = response
        if not response.is_success:
            return self._connection.make_answer(response, response.read())
        self._pieces = response.iter_bytes()
        return self._connection.make_answer(response)

    def _close_response(self) -> None:
        if self._response is not None:
            self._response.close()
            self._response = None
