"""What a client can do with a service. Each operation is written once, for both clients.

See ``kd.client.steps`` for how an operation runs, and docs/api.md for the paths.
"""

from __future__ import annotations

import json
import os
import time
import uuid
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import quote

from pydantic import BaseModel, ValidationError

from kd.client.errors import Refused, TimedOut, Unreachable
from kd.client.event_decoder import EventDecoder
from kd.client.retrying import Backoff
from kd.client.steps import Answer, Emit, Open, Pause, Read, Request, Send, Steps
from kd.client.wire.accounts import TeamAccount, TeamList
from kd.client.wire.caches import CacheDetail, CacheEntry, CacheList
from kd.client.wire.files import Artifact, ArtifactList, Checkpoint, CheckpointList
from kd.client.wire.history import JobEvent, JobEvents, MetricsHistory, RunEntry, RunList
from kd.client.wire.jobs import TERMINAL_STATUSES, Action, Job, JobList
from kd.client.wire.plans import JobPlan, Template, TemplateList
from kd.client.wire.problems import ProblemDetails
from kd.client.wire.service import Health, Version, Worker, WorkerList
from kd.config.job import JobConfig
from kd.config.jobfile import load_config

#: How long the server may hold a request until a job changes, in seconds: the most that it allows.
HOLD_SECONDS = 30
#: The pause before a job that has not changed, or a stream that has ended, is asked for again.
AGAIN_SECONDS = 0.2
NOT_MODIFIED = 304
NOT_FOUND = 404
CONFLICT = 409
RANGE_NOT_SATISFIABLE = 416
#: Jobs and events of one page: the most that the server allows.
PAGE_JOBS = 100
PAGE_EVENTS = 1000

#: A job to submit: its fields, or the path of a YAML or JSON file.
JobLike = Mapping[str, Any] | JobConfig | str | os.PathLike[str]
#: A job of the service: its id, or what a call returned.
JobRef = str | Job
Model = TypeVar("Model", bound=BaseModel)


@dataclass(frozen=True)
class Operations:
    """The operations; ``patience`` is how long a server may be away, in seconds."""

    patience: float

    # ------------------------------------------------------------------ one request

    def call(
        self, request: Request, *accepted: int, after_loss: int | None = None
    ) -> Steps[Answer]:
        """Send a request until it succeeds, or has a status of ``accepted``.

        ``after_loss`` is a status that is accepted once the answer to an earlier attempt was lost:
        that attempt may have done what is asked for. Raises ``Refused`` or ``Unreachable`` if
        another attempt is of no use, or came too late.
        """
        backoff = Backoff(self.patience)
        lost = False
        while True:
            try:
                answer: Answer = yield Send(request)
                done_before = lost and answer.status == after_loss
                if answer.ok or answer.status in accepted or done_before:
                    return answer
                raise make_refused(answer)
            except (Refused, Unreachable) as error:
                lost = lost or isinstance(error, Unreachable)
                pause = backoff.next_pause(error)
            yield Pause(pause)

    def fetch(self, model: type[Model], request: Request) -> Steps[Model]:
        """Send a request; return the answer as a ``model``."""
        answer = yield from self.call(request)
        return parse_answer(model, answer)

    def request(
        self, method: str, path: str, query: Mapping[str, Any] | None, body: Any
    ) -> Steps[Any]:
        """Send any request; return the JSON of the answer, or None if it is empty."""
        headers = make_key(None) if method == "POST" else {}
        content = None if body is None else encode_json(body)
        answer = yield from self.call(Request(method, path, query or {}, content, headers))
        return json.loads(answer.content) if answer.content else None

    # ------------------------------------------------------------------ jobs

    def submit(self, job: JobLike, key: str | None) -> Steps[Job]:
        """Create a job. The key keeps a request that is sent again from making a second one."""
        body = encode_json(describe_job(job))
        return (yield from self.fetch(Job, Request("POST", "/jobs", {}, body, make_key(key))))

    def validate(self, job: JobLike, devices: str | None) -> Steps[JobPlan]:
        """Return the plan of a job; none is created."""
        query = {"devices": devices}
        body = encode_json(describe_job(job))
        request = Request("POST", "/jobs/validate", query, body, read_seconds=600.0)
        return (yield from self.fetch(JobPlan, request))

    def clone(self, job: JobRef, changes: Mapping[str, Any], key: str | None) -> Steps[Job]:
        """Create a job from the body of another one, changed by a JSON merge patch."""
        path = locate_job(job, "/clone")
        request = Request("POST", path, {}, encode_json(dict(changes)), make_key(key))
        return (yield from self.fetch(Job, request))

    def job(self, job: JobRef) -> Steps[Job]:
        """Return a job as it is now."""
        return (yield from self.fetch(Job, Request("GET", locate_job(job))))

    def jobs(self, filters: Mapping[str, Any]) -> Steps[None]:
        """Emit jobs, newest first, page by page."""
        cursor: str | None = None
        while True:
            query = {"limit": PAGE_JOBS, "cursor": cursor, **filters}
            page = yield from self.fetch(JobList, Request("GET", "/jobs", query))
            for job in page.data:
                yield Emit(job)
            cursor = page.next_cursor
            if cursor is None:
                return

    def act(self, action: Action, job: JobRef) -> Steps[Job]:
        """Cancel, pause, resume or retry a job. An action that is done already changes nothing.

        A retry is refused for a job that is open. If the answer to an earlier attempt was lost,
        that attempt has opened it.
        """
        request = Request("POST", locate_job(job, f"/{action}"))
        answer = yield from self.call(request, after_loss=CONFLICT if action == "retry" else None)
        if answer.ok:
            return parse_answer(Job, answer)
        found = yield from self.job(job)
        if found.ended:
            raise make_refused(answer)
        return found

    def delete(self, path: str, query: Mapping[str, Any] | None = None) -> Steps[None]:
        """Delete what is at ``path``.

        If it is gone after the answer to an earlier attempt was lost, that attempt has deleted it.
        """
        yield from self.call(Request("DELETE", path, query or {}), after_loss=NOT_FOUND)

    def wait(self, job: JobRef, timeout: float | None) -> Steps[Job]:
        """Return a job once it has ended. Raises ``TimedOut`` after ``timeout`` seconds."""
        path = locate_job(job)
        deadline = float("inf") if timeout is None else time.monotonic() + timeout
        headers: dict[str, str] = {}
        while True:
            left = max(deadline - time.monotonic(), 0.0)
            # The first answer comes at once; the next ones when the job changes.
            hold = int(min(HOLD_SECONDS, left)) if headers else 0
            request = Request("GET", path, {"wait": hold}, None, headers, hold + 15.0)
            patient = replace(self, patience=min(self.patience, left))
            answer = yield from patient.call(request, NOT_MODIFIED)
            if answer.status != NOT_MODIFIED:
                seen = parse_answer(Job, answer)
                if seen.ended:
                    return seen
                headers = {"If-None-Match": answer.headers.get("etag", "")}
            if time.monotonic() >= deadline:
                raise TimedOut(
                    f"{seen.id} has not ended after {timeout:g} s: it is {seen.status}.",
                    "Wait again, or cancel it.",
                )
            yield Pause(min(AGAIN_SECONDS, max(deadline - time.monotonic(), 0.0)))

    # ------------------------------------------------------------------ events

    def events(self, job: JobRef, after: str | None, types: frozenset[str] | None) -> Steps[None]:
        """Emit the events of a job until it has ended, each once and in order.

        After a lost connection the stream goes on after the last event.
        """
        place = after or "0"
        status: str | None = None
        backoff = Backoff(self.patience)
        while True:
            try:
                yield from self._open_stream(job, place)
                decoder = EventDecoder()
                while (piece := (yield Read())) is not None:
                    backoff.reset()
                    for event in decoder.feed(piece):
                        place, status = event.id, find_status(event, status)
                        yield from emit_wanted(event, types)
                # The server may have stopped while the job ended, so the rest is read in pages. The
                # record is read before them: no event follows the end.
                if (yield from self.job(job)).ended:
                    for event in (yield from self._list_events(job, place)):
                        place, status = event.id, find_status(event, status)
                        yield from emit_wanted(event, types)
                    # A retry may have queued the job again.
                    if status is None or status in TERMINAL_STATUSES:
                        return
                pause = AGAIN_SECONDS
            except (Refused, Unreachable) as error:
                pause = backoff.next_pause(error)
            yield Pause(pause)

    def _open_stream(self, job: JobRef, place: str) -> Steps[None]:
        headers = {"Accept": "text/event-stream", "Last-Event-ID": place}
        path = locate_job(job, "/events/stream")
        answer: Answer = yield Open(Request("GET", path, headers=headers))
        if not answer.ok:
            raise make_refused(answer)

    def _list_events(self, job: JobRef, after: str) -> Steps[list[JobEvent]]:
        found: list[JobEvent] = []
        more = True
        while more:
            query = {"after": after, "limit": PAGE_EVENTS}
            path = locate_job(job, "/events")
            page = yield from self.fetch(JobEvents, Request("GET", path, query))
            found += page.data
            after, more = page.next_after, page.has_more
        return found

    def past_events(
        self, job: JobRef, after: str | None, types: frozenset[str] | None
    ) -> Steps[None]:
        """Emit the events that a job has so far."""
        for event in (yield from self._list_events(job, after or "0")):
            yield from emit_wanted(event, types)

    # ------------------------------------------------------------------ history and files

    def metrics(self, job: JobRef, names: str | None, max_points: int) -> Steps[MetricsHistory]:
        """Return the metrics of a job over its steps."""
        query = {"names": names, "max_points": max_points}
        request = Request("GET", locate_job(job, "/metrics"), query)
        return (yield from self.fetch(MetricsHistory, request))

    def log(self, job: JobRef, start: int, tail: int | None) -> Steps[bytes]:
        """Return the output of a job's processes; empty if there is none after ``start``."""
        headers = {"Range": f"bytes={start}-"} if tail is None else {}
        request = Request("GET", locate_job(job, "/logs"), {"tail": tail}, None, headers)
        answer = yield from self.call(request, RANGE_NOT_SATISFIABLE)
        return answer.content if answer.ok else b""

    def checkpoints(self, job: JobRef) -> Steps[list[Checkpoint]]:
        """Return the checkpoints of a job."""
        request = Request("GET", locate_job(job, "/checkpoints"))
        return (yield from self.fetch(CheckpointList, request)).data

    def artifacts(self, job: JobRef) -> Steps[list[Artifact]]:
        """Return the files that a job produced."""
        request = Request("GET", locate_job(job, "/artifacts"))
        return (yield from self.fetch(ArtifactList, request)).data

    # ------------------------------------------------------------------ caches and the service

    def caches(self) -> Steps[list[CacheEntry]]:
        """Return the caches of the service."""
        return (yield from self.fetch(CacheList, Request("GET", "/caches"))).data

    def cache(self, fingerprint: str) -> Steps[CacheDetail]:
        """Return one cache, with its identity and its fidelity."""
        return (yield from self.fetch(CacheDetail, Request("GET", locate_cache(fingerprint))))

    def verify_cache(self, fingerprint: str, key: str | None) -> Steps[Job]:
        """Create a job that compares a cache with its digests."""
        path = locate_cache(fingerprint) + "/verify"
        return (yield from self.fetch(Job, Request("POST", path, headers=make_key(key))))

    def measure_fidelity(self, fingerprint: str, key: str | None) -> Steps[Job]:
        """Create a job that compares some records of a cache with its teacher."""
        path = locate_cache(fingerprint) + "/fidelity"
        return (yield from self.fetch(Job, Request("POST", path, headers=make_key(key))))

    def view_cache(
        self, model: type[Model], fingerprint: str, what: str, **query: int
    ) -> Steps[Model]:
        """Return one view of a cache: its statistics, shards, records or usage."""
        request = Request("GET", f"{locate_cache(fingerprint)}/{what}", query)
        return (yield from self.fetch(model, request))

    def runs(self) -> Steps[list[RunEntry]]:
        """Return the runs on the server's disk, and what they have measured."""
        return (yield from self.fetch(RunList, Request("GET", "/runs"))).data

    def templates(self) -> Steps[list[Template]]:
        """Return the job files to begin with."""
        return (yield from self.fetch(TemplateList, Request("GET", "/templates"))).data

    def workers(self) -> Steps[list[Worker]]:
        """Return the workers."""
        return (yield from self.fetch(WorkerList, Request("GET", "/workers"))).data

    def quotas(self) -> Steps[list[TeamAccount]]:
        """Return what the caller's team uses; for an admin all teams."""
        return (yield from self.fetch(TeamList, Request("GET", "/quota"))).data

    def health(self) -> Steps[Health]:
        """Return the sign of life of the server."""
        return (yield from self.fetch(Health, Request("GET", "/healthz")))

    def version(self) -> Steps[Version]:
        """Return the version of the server."""
        return (yield from self.fetch(Version, Request("GET", "/version")))


# ---------------------------------------------------------------------- requests


def describe_job(job: JobLike) -> dict[str, Any]:
    """Return the body of a job. Raises ``ConfigError`` for a file that is wrong."""
    if isinstance(job, Mapping):
        return dict(job)
    config = job if isinstance(job, JobConfig) else load_config(Path(job))
    return config.model_dump(mode="json")


def encode_json(body: Any) -> bytes:
    """Encode a body. Paths become text; NaN raises ``ValueError``, because JSON has none."""
    return json.dumps(body, default=os.fspath, allow_nan=False).encode()


def make_key(key: str | None) -> dict[str, str]:
    """Return the header that makes a POST safe to send again, with a new key by default."""
    return {"Idempotency-Key": key or uuid.uuid4().hex}


def locate_job(job: JobRef, below: str = "") -> str:
    """Return the path of a job, or one below it."""
    job_id = job.id if isinstance(job, Job) else job
    return f"/jobs/{quote(job_id, safe='')}{below}"


def locate_cache(fingerprint: str) -> str:
    """Return the path of a cache."""
    return f"/caches/{quote(fingerprint, safe='')}"


# ---------------------------------------------------------------------- answers


def parse_answer(model: type[Model], answer: Answer) -> Model:
    """Return the answer as a ``model``. Raises ``Refused`` if it is something else."""
    try:
        return model.model_validate_json(answer.content)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"])) or "the body"
        raise Refused(
            answer.status,
            f"The response is not a {model.__name__} of Potstill's API: {place}: {first['msg']}.",
            "Check the address of the server, and that client and server have one version.",
        ) from None


def make_refused(answer: Answer) -> Refused:
    """Return the error of an answer that is no success."""
    problem: ProblemDetails | None = None
    # A proxy on the way may answer with a document of another kind.
    if answer.headers.get("content-type", "").startswith("application/problem+json"):
        problem = parse_answer(ProblemDetails, answer)
    detail = (problem.detail if problem is not None else "") or (
        f"The server answers {answer.status} {answer.reason}."
    )
    remedy = problem.remedy if problem is not None else ""
    return Refused(answer.status, detail, remedy, problem, read_retry_after(answer))


def read_retry_after(answer: Answer) -> float:
    """Return the seconds of the header Retry-After; 0 without one, and for a date."""
    text = answer.headers.get("retry-after", "")
    return float(text) if text.isdecimal() else 0.0


def choose_types(types: Iterable[str] | None) -> frozenset[str] | None:
    """Return the types of events that are wanted; None = all."""
    return None if types is None else frozenset(types)


def find_status(event: JobEvent, before: str | None) -> str | None:
    """Return the status that the job has after ``event``."""
    return str(event.data["status"]) if event.type == "status" else before


def emit_wanted(event: JobEvent, types: frozenset[str] | None) -> Steps[None]:
    """Emit the event if its type is one of ``types``; None = all."""
    if types is None or event.type in types:
        yield Emit(event)
