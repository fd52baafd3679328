"""The client of a service; the command line uses it too. It waits for each answer."""

from __future__ import annotations

import copy
import json
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

from kd.client.downloading import download
from kd.client.errors import TimedOut
from kd.client.following import follow_events, list_events
from kd.client.requests import (
    JobLike,
    JobRef,
    Request,
    describe_job,
    encode_json,
    locate_cache,
    locate_file,
    locate_job,
    make_key,
)
from kd.client.retrying import Retrier
from kd.client.transport import Model, Transport, make_refused, parse_answer, warn_of_expiry
from kd.client.wire.accounts import TeamAccount, TeamList
from kd.client.wire.caches import (
    CacheDetail,
    CacheEntry,
    CacheList,
    CacheRecords,
    CacheStatistics,
    CacheUsage,
    ShardStates,
)
from kd.client.wire.files import (
    Artifact,
    ArtifactList,
    Checkpoint,
    CheckpointList,
    UploadedFile,
    UploadedFileList,
)
from kd.client.wire.history import JobEvent, MetricsHistory, RunEntry, RunList
from kd.client.wire.jobs import Action, Job, JobList, Status
from kd.client.wire.plans import JobPlan, Template, TemplateList
from kd.client.wire.service import Health, Version, Worker, WorkerList
from kd.config.kinds import KindName

#: How long the server may hold a request until a job changes, in seconds: the most that it allows.
HOLD_SECONDS = 30
#: How long the server may check an uploaded file, in seconds.
UPLOAD_SECONDS = 600.0
#: The pause before a job that has not changed is asked for again, in seconds.
AGAIN_SECONDS = 0.2
NOT_MODIFIED = 304
NOT_FOUND = 404
CONFLICT = 409
RANGE_NOT_SATISFIABLE = 416
#: Jobs of one page: the most that the server allows.
PAGE_JOBS = 100


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
        self._retrier = Retrier(Transport(server, key, on_expiry), patience)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections."""
        self._retrier.transport.close()

    @property
    def server(self) -> str:
        """The address of the server."""
        return self._retrier.transport.server

    def with_patience(self, seconds: float) -> Self:
        """Return a client that shares the connections, and has another patience."""
        other = copy.copy(self)
        other._retrier = replace(self._retrier, patience=seconds)
        return other

    def submit(self, job: JobLike, *, idempotency_key: str | None = None) -> Job:
        """Create a job.

        ``job`` are its fields, a ``JobConfig``, or the path of a YAML or JSON file. Its relative
        paths start in the folder of the service. A request that is sent again makes no second job:
        for a day, the same ``idempotency_key`` and job return the same job. The default is a new
        key for each call.
        """
        return self._create_job("/jobs", idempotency_key, encode_json(describe_job(job)))

    def validate(self, job: JobLike) -> JobPlan:
        """Return what a job would do and need; none is created."""
        body = encode_json(describe_job(job))
        request = Request("POST", "/jobs/validate", body=body, read_seconds=600.0)
        return self._retrier.fetch(JobPlan, request)

    def clone(
        self, job: JobRef, changes: Mapping[str, Any], *, idempotency_key: str | None = None
    ) -> Job:
        """Create the same job again, changed by a JSON merge patch (RFC 7386)."""
        body = encode_json(dict(changes))
        return self._create_job(locate_job(job, "/clone"), idempotency_key, body)

    def job(self, job: JobRef) -> Job:
        """Return a job as it is now."""
        return self._get(Job, locate_job(job))

    def jobs(
        self,
        *,
        status: Status | None = None,
        kind: KindName | None = None,
        label: str | None = None,
        parent: str | None = None,
    ) -> Iterator[Job]:
        """Iterate over the jobs, newest first; further pages are read as they are needed.

        ``label`` is ``name:value``; ``parent`` is the search whose trials are wanted.
        """
        filters = {"status": status, "kind": kind, "label": label, "parent": parent}
        cursor: str | None = None
        while True:
            page = self._get(JobList, "/jobs", {"limit": PAGE_JOBS, "cursor": cursor, **filters})
            yield from page.data
            cursor = page.next_cursor
            if cursor is None:
                return

    def wait(self, job: JobRef, timeout: float | None = None) -> Job:
        """Return the job once it has succeeded, failed or been cancelled.

        Raises ``TimedOut`` after ``timeout`` seconds; the job goes on. A job that is paused has not
        ended.
        """
        path = locate_job(job)
        deadline = float("inf") if timeout is None else time.monotonic() + timeout
        headers: dict[str, str] = {}
        while True:
            left = max(deadline - time.monotonic(), 0.0)
            # The first answer comes at once; the next ones when the job changes.
            hold = int(min(HOLD_SECONDS, left)) if headers else 0
            request = Request("GET", path, {"wait": hold}, None, headers, hold + 15.0)
            patient = replace(self._retrier, patience=min(self._retrier.patience, left))
            answer = patient.call(request, NOT_MODIFIED)
            if answer.status_code != NOT_MODIFIED:
                seen = parse_answer(Job, answer)
                if seen.ended:
                    return seen
                headers = {"If-None-Match": answer.headers.get("etag", "")}
            if time.monotonic() >= deadline:
                detail = f"{seen.id} has not ended after {timeout:g} s: it is {seen.status}."
                raise TimedOut(detail, "Wait again, or cancel it.")
            time.sleep(min(AGAIN_SECONDS, max(deadline - time.monotonic(), 0.0)))

    def events(
        self, job: JobRef, *, after: str | None = None, types: Iterable[str] | None = None
    ) -> Iterator[JobEvent]:
        """Iterate over the events of a job until it has ended, from its start or after an id.

        Each event comes once and in order, also if the connection is cut or the server restarts.
        ``types`` are the types that are wanted, such as ``status`` and ``metrics``.
        """
        return _choose(follow_events(self._retrier, job, after or "0"), types)

    def past_events(
        self, job: JobRef, *, after: str | None = None, types: Iterable[str] | None = None
    ) -> Iterator[JobEvent]:
        """Iterate over the events that a job has so far."""
        return _choose(list_events(self._retrier, job, after or "0"), types)

    def cancel(self, job: JobRef) -> Job:
        """Stop a job for good. A job that runs saves its state first."""
        return self._act("cancel", job)

    def pause(self, job: JobRef) -> Job:
        """Stop a job for now. A job that runs saves its state first."""
        return self._act("pause", job)

    def resume(self, job: JobRef) -> Job:
        """Queue a paused job again; it continues from its saved state."""
        return self._act("resume", job)

    def retry(self, job: JobRef) -> Job:
        """Queue a failed or cancelled job again; it continues from its saved state."""
        return self._act("retry", job)

    def delete(self, job: JobRef, *, artifacts: bool = False) -> None:
        """Delete a job that has ended; with ``artifacts`` also its files. Its cache stays."""
        self._delete(locate_job(job), {"artifacts": artifacts})

    def metrics(
        self, job: JobRef, *, names: str | None = None, max_points: int = 1000
    ) -> MetricsHistory:
        """Return the metrics of a job over its steps; ``names`` are separated by commas."""
        query = {"names": names, "max_points": max_points}
        return self._get(MetricsHistory, locate_job(job, "/metrics"), query)

    def log(self, job: JobRef, *, start: int = 0, tail: int | None = None) -> bytes:
        """Return what a job printed, from byte ``start`` on, or its last ``tail`` lines."""
        headers = {"Range": f"bytes={start}-"} if tail is None else {}
        request = Request("GET", locate_job(job, "/logs"), {"tail": tail}, None, headers)
        answer = self._retrier.call(request, RANGE_NOT_SATISFIABLE)
        return answer.content if answer.is_success else b""

    def checkpoints(self, job: JobRef) -> list[Checkpoint]:
        """Return the checkpoints of a job, oldest first."""
        return self._get(CheckpointList, locate_job(job, "/checkpoints")).data

    def artifacts(self, job: JobRef) -> list[Artifact]:
        """Return the files that a job produced; a file in a folder is ``folder/file``."""
        return self._get(ArtifactList, locate_job(job, "/artifacts")).data

    def download(self, job: JobRef, name: str, path: str | os.PathLike[str]) -> Path:
        """Download an artifact to the file ``path``, whose folder is made if it is missing.

        A cut download goes on where it was cut. The file is compared with its sha256, and appears
        whole or not at all.
        """
        return download(self._retrier, job, name, Path(path))

    def upload_file(self, path: str | os.PathLike[str], name: str | None = None) -> UploadedFile:
        """Upload a file of JSON lines to train on, for the caller's team.

        ``name`` defaults to the file's own. A job names the ``path`` of the result in
        ``data.train``. A file never changes: another one of this name is refused, and the same one
        is returned.
        """
        path = Path(path)
        headers = {"Content-Type": "application/jsonl", "Content-Length": str(path.stat().st_size)}
        where = locate_file(name or path.name)
        request = Request("PUT", where, {}, path, headers, read_seconds=UPLOAD_SECONDS)
        return self._retrier.fetch(UploadedFile, request)

    def files(self) -> list[UploadedFile]:
        """Return the files that the caller's team has uploaded, newest first."""
        return self._get(UploadedFileList, "/files").data

    def delete_file(self, name: str) -> None:
        """Delete an uploaded file that no unfinished job needs."""
        self._delete(locate_file(name))

    def caches(self) -> list[CacheEntry]:
        """Return the caches, newest first."""
        return self._get(CacheList, "/caches").data

    def cache(self, fingerprint: str) -> CacheDetail:
        """Return one cache, with its identity and its fidelity."""
        return self._get(CacheDetail, locate_cache(fingerprint))

    def verify_cache(self, fingerprint: str, *, idempotency_key: str | None = None) -> Job:
        """Create a job that reads every byte of a cache, and fails if one differs."""
        return self._create_job(locate_cache(fingerprint, "/verify"), idempotency_key)

    def measure_fidelity(self, fingerprint: str, *, idempotency_key: str | None = None) -> Job:
        """Create a job that compares some records with the teacher, and fails if they differ."""
        return self._create_job(locate_cache(fingerprint, "/fidelity"), idempotency_key)

    def cache_statistics(self, fingerprint: str, *, seed: int = 0) -> CacheStatistics:
        """Return histograms of entropy, entries and kept mass, of a sample that ``seed`` draws."""
        path = locate_cache(fingerprint, "/statistics")
        return self._get(CacheStatistics, path, {"seed": seed})

    def cache_shards(self, fingerprint: str) -> ShardStates:
        """Return the state of each shard of a cache: sealed, in work, missing or corrupt."""
        return self._get(ShardStates, locate_cache(fingerprint, "/shards"))

    def cache_records(
        self, fingerprint: str, *, sequence: int = 0, start: int = 0, limit: int = 50
    ) -> CacheRecords:
        """Return up to ``limit`` records of one sequence from number ``start`` on, with text."""
        query = {"sequence": sequence, "start": start, "limit": limit}
        return self._get(CacheRecords, locate_cache(fingerprint, "/records"), query)

    def cache_usage(self, fingerprint: str) -> CacheUsage:
        """Return the jobs and students of a cache, its last checks, and why it is kept."""
        return self._get(CacheUsage, locate_cache(fingerprint, "/usage"))

    def delete_cache(self, fingerprint: str) -> None:
        """Remove a cache that no unfinished job writes or reads."""
        self._delete(locate_cache(fingerprint))

    def runs(self) -> list[RunEntry]:
        """Return the runs on the server's disk, the newest first, and what they have measured."""
        return self._get(RunList, "/runs").data

    def templates(self) -> list[Template]:
        """Return the templates of job files: YAML, in which models and texts are empty."""
        return self._get(TemplateList, "/templates").data

    def workers(self) -> list[Worker]:
        """Return the workers with a recent heartbeat."""
        return self._get(WorkerList, "/workers").data

    def quotas(self) -> list[TeamAccount]:
        """Return what the caller's team uses, and its quotas; for an admin those of all teams."""
        return self._get(TeamList, "/quota").data

    def health(self) -> Health:
        """Return the health of the server; needs no key."""
        return self._get(Health, "/healthz")

    def version(self) -> Version:
        """Return the version of the server."""
        return self._get(Version, "/version")

    def request(
        self, method: str, path: str, *, query: Mapping[str, Any] | None = None, body: Any = None
    ) -> Any:
        """Send a request of docs/api.md with a body of JSON; return the JSON of the answer."""
        headers = make_key(None) if method == "POST" else {}
        content = None if body is None else encode_json(body)
        answer = self._retrier.call(Request(method, path, query or {}, content, headers))
        return json.loads(answer.content) if answer.content else None

    def _get(self, model: type[Model], path: str, query: Mapping[str, Any] | None = None) -> Model:
        return self._retrier.fetch(model, Request("GET", path, query or {}))

    def _create_job(self, path: str, key: str | None, body: bytes | None = None) -> Job:
        """Create a job. The key keeps a request that is sent again from making a second one."""
        return self._retrier.fetch(Job, Request("POST", path, {}, body, make_key(key)))

    def _act(self, action: Action, job: JobRef) -> Job:
        """Cancel, pause, resume or retry a job. An action that is done already changes nothing.

        A retry is refused for a job that is open. If the answer to an earlier attempt was lost,
        that attempt has opened it.
        """
        request = Request("POST", locate_job(job, f"/{action}"))
        after_loss = CONFLICT if action == "retry" else None
        answer = self._retrier.call(request, after_loss=after_loss)
        if answer.is_success:
            return parse_answer(Job, answer)
        found = self.job(job)
        if found.ended:
            raise make_refused(answer)
        return found

    def _delete(self, path: str, query: Mapping[str, Any] | None = None) -> None:
        """Delete what is at ``path``.

        If it is gone after the answer to an earlier attempt was lost, that attempt has deleted it.
        """
        self._retrier.call(Request("DELETE", path, query or {}), after_loss=NOT_FOUND)


def _choose(events: Iterator[JobEvent], types: Iterable[str] | None) -> Iterator[JobEvent]:
    """Leave out events of other types than ``types``; None = keep all."""
    wanted = None if types is None else {*types}
    return (event for event in events if wanted is None or event.type in wanted)
