"""The job record in Redis, which is the truth about a job. States, keys and transitions: ``jobs.lua``."""

from __future__ import annotations

import hashlib
import json
import os
import re
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Literal, cast

from redis import Redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from kd.config.job import JobConfig
from services.schemas import Action, Job, JobResources, Status, WorkerState, links_of
from services.settings import SEARCH

SCRIPT = Path(__file__).with_name("jobs.lua").read_text(encoding="utf-8")
MENDED = 100  #: open jobs that one call of mend looks at
MOST_CONNECTIONS = 10_000  #: of one client; the library's own limit of 100 refuses the 101st request or stream
SCAN = 1000  #: records that one page of a listing looks at, at most

#: Which events change the record, and under which prefix their data goes there.
SECTION_OF_EVENT = {
    "progress": "progress",
    "metrics": "metrics",
    "evaluation": "metrics",
    "plan": "cache",
    "cache": "cache",
}
SERIES = ("metrics", "evaluation", "temperature")  #: events whose data is kept by step

LOST = {
    "type": "worker_lost",
    "detail": "The worker was not heard of for longer than its lease: it died, or lost its connection to Redis.",
    "remedy": "Look into the worker's log and the host's memory, then retry the job.",
}
LATE = {
    "type": "deadline_exceeded",
    "detail": "The job had not ended when its deadline passed.",
    "remedy": "Retry it with a longer deadline_seconds; it goes on from its last checkpoint.",
}

Reply = Literal["go", "cancel", "pause", "fenced"]
Outcome = Literal["succeeded", "failed"]

_SAMPLE = re.compile(r"(\w+)\{(.*)\}")
_LABEL = re.compile(r'(\w+)="([^"]*)"')


def connect(url: str, timeout: float = 2.0) -> Redis:
    """A client that fails within ``timeout`` seconds: the library's own retries would turn 2 s into 25 s."""
    return Redis.from_url(
        url,
        protocol=2,
        decode_responses=True,
        socket_timeout=timeout,
        socket_connect_timeout=timeout,
        socket_keepalive=True,
        max_connections=MOST_CONNECTIONS,
        retry=Retry(NoBackoff(), 0),
    )


@dataclass(frozen=True)
class Caller:
    """Who asks: the name of an API key, and whether it sees the jobs of every other one."""

    name: str
    sees_all: bool = False


LOCAL = Caller("local", sees_all=True)  #: everybody, where there are no keys


@dataclass(frozen=True)
class Origin:
    """What is known of the request that made a job; its traces and logs bear these names."""

    request_id: str = ""
    traceparent: str = ""


@dataclass(frozen=True)
class Created:
    """The answer to a create.

    ``replayed`` = this key made the job ``id`` earlier, ``conflict`` = from another body; ``quota`` = the caller has
    ``detail`` open jobs; ``record_quota`` = with it the caller's records would take ``detail`` bytes;
    ``bad_dependency`` = job ``id`` cannot be waited for, for it is ``detail``.
    """

    outcome: Literal["created", "replayed", "conflict", "quota", "record_quota", "bad_dependency"]
    id: str
    detail: str = ""


@dataclass(frozen=True)
class Change:
    """The answer to an action: ``already`` = it was so before, ``illegal`` = not from ``status``."""

    outcome: Literal["done", "already", "illegal", "unknown"]
    status: str


@dataclass(frozen=True)
class Capacity:
    """What a worker has: GPUs, and bytes of each (of the host, where it has none)."""

    gpus: int = 0
    memory: int = 1 << 62


ANY = Capacity(gpus=64)


@dataclass(frozen=True)
class Claim:
    """The right to run one stage of a job, as long as beats keep the lease alive."""

    id: str
    fence: int
    attempt: int
    config: dict[str, Any]
    owner: str = "local"
    request_id: str = ""
    traceparent: str = ""


@dataclass(frozen=True)
class Batch:
    """Events on their way to the record; ``number`` grows, so that a batch sent twice counts once."""

    number: int
    events: tuple[dict[str, Any], ...]

    def fields(self) -> dict[str, str]:
        """What the events change in the record: the last word on each field."""
        return {name: value for event in self.events for name, value in fields_of(event).items()}


@dataclass(frozen=True)
class JobQuery:
    """Which jobs a listing shows; None = any."""

    caller: Caller = LOCAL
    status: Status | None = None
    kind: str | None = None
    label: tuple[str, str] | None = None
    parent: str | None = None
    created_after: datetime | None = None

    def wants(self, job: Job) -> bool:
        """Whether the job is of the kind, label and parent asked for; owner, status and time are the index's."""
        return (
            self.kind in (None, job.kind)
            and self.parent in (None, job.parent)
            and (self.label is None or job.labels.get(self.label[0]) == self.label[1])
        )


@dataclass(frozen=True)
class JobPage:
    """A part of a listing; a short one, even an empty one, may have others after it."""

    jobs: list[Job]
    next_cursor: int | None


@dataclass(frozen=True)
class Delivery:
    """A webhook that is due: event ``event_id`` of a job, after so many failed tries."""

    job_id: str
    event_id: str
    url: str
    tries: int


def new_id() -> str:
    """A job id that sorts by time: 48 bits of milliseconds and 80 random bits, as in a ULID."""
    number = int(time.time() * 1000) << 80 | int.from_bytes(os.urandom(10), "big")
    alphabet = "0123456789abcdefghjkmnpqrstvwxyz"
    return "job_" + "".join(alphabet[number >> shift & 31] for shift in range(125, -5, -5))


def fields_of(event: Mapping[str, Any]) -> dict[str, str]:
    """The fields of the record that an event of a run sets, as ``{"metrics.loss": "2.5"}``."""
    kind, data = event["type"], event["data"]
    if kind == "stage":
        return {"phase": str(data.get("phase", ""))}
    if kind == "artifact":
        return {f"artifacts.{data['name']}": json.dumps(data["path"])}
    if kind not in SECTION_OF_EVENT:
        return {}
    return {f"{SECTION_OF_EVENT[kind]}.{name}": json.dumps(value) for name, value in data.items()}


def job_of(record: Mapping[str, str], **more: Any) -> Job:
    """The job that a hash describes, with ``more`` that is kept elsewhere; dotted fields become nested values again."""
    nested: dict[str, dict[str, Any]] = {"progress": {}, "metrics": {}, "cache": {}, "artifacts": {}}
    for name, value in record.items():
        section, dot, inner = name.partition(".")
        if dot:
            nested.setdefault(section, {})[inner] = json.loads(value)
    return Job.model_validate(
        {
            **{name: value for name, value in record.items() if "." not in name},
            **nested,
            "cache": nested["cache"] or None,
            **{
                name: json.loads(record[name]) for name in ("config", "error", "labels", "depends_on") if name in record
            },
            "resources": {name: record[name] for name in ("gpus", "memory") if name in record},
            "request_id": record.get("request_id") or None,
            "links": links_of(record["id"]),
            **more,
        }
    )


def nobody_for(job: Job, workers: Iterable[WorkerState]) -> str | None:
    """Why none of these workers could run a queued job, idle or busy; None where one could.

    None too of a job that asks for nothing, which any worker will do that comes, and of a search, which an API drives.
    """
    needs = job.resources
    if job.stage == SEARCH or not (needs.gpus or needs.memory):
        return None
    serving = [worker for worker in workers if job.stage in worker.stages]
    if any(worker.device.covers(needs.gpus, needs.memory) for worker in serving):
        return None
    if not serving:
        return f"No worker of stage {job.stage} is at work; the job waits until one comes that has {_in_words(needs)}."
    return f"No worker at work on stage {job.stage} has {_in_words(needs)}; the job waits until one comes that has."


def _in_words(needs: JobResources) -> str:
    """What a job asks for, where it asks for something: 2 GPUs with 24 GiB each."""
    memory = f"{needs.memory / 2**30:.4g} GiB" if needs.memory else ""
    if not needs.gpus:
        return f"{memory} of memory"
    gpus = "1 GPU" if needs.gpus == 1 else f"{needs.gpus} GPUs"
    each = " each" if needs.gpus > 1 else ""
    return f"{gpus} with {memory}{each}" if memory else gpus


class JobStore:
    """Jobs in Redis. Every change is one call of ``jobs.lua``; every method may raise ``RedisError``."""

    def __init__(self, client: Redis, max_attempts: int = 3) -> None:
        """``max_attempts`` is for jobs that do not name their own number."""
        self.redis = client
        self._max_attempts = max_attempts
        self._script = client.register_script(SCRIPT)

    def _transition(self, name: str, *arguments: str | int | float) -> Any:
        return self._script(args=[name, *arguments])

    # -- from a client

    def create(
        self,
        config: JobConfig,
        caller: Caller = LOCAL,
        key: str | None = None,
        max_open: int | None = None,
        max_bytes: int | None = None,
        origin: Origin = Origin(),
    ) -> Created:
        """Accept a job and queue its first stage; the same ``key`` of the same caller gives the same job for a day."""
        head = _as_caller(caller)
        sha = _key_sha(caller, key) if key else ""
        fields = self._new(config) | {"request_id": origin.request_id, "traceparent": origin.traceparent}
        limits = ("" if limit is None else limit for limit in (max_open, max_bytes))
        outcome, *rest = self._transition(
            "create", new_id(), *head, sha, _sha256(fields["config"]), *limits, *_flat(fields)
        )
        if outcome in ("quota", "record_quota"):
            return Created(outcome, "", rest[0])
        return Created(outcome, *rest)

    def earlier(self, config: JobConfig, caller: Caller, key: str) -> Created | None:
        """What ``create`` answers where this key of the caller's has made a job already; None where it has not."""
        entry = cast(str | None, self.redis.get(f"kd:idempotency:{_key_sha(caller, key)}"))
        job_id, _, body = (entry or "").partition(" ")
        if entry is None or not self.redis.exists(f"kd:job:{job_id}"):
            return None
        return Created("replayed" if body == _sha256(_body(config)) else "conflict", job_id)

    def _new(self, config: JobConfig) -> dict[str, str]:
        """The fields of a new record that its configuration decides."""
        needs = config.resources
        fields = {
            "kind": config.kind,
            "name": config.name,
            "stage": config.stages[0],
            "config": _body(config),
            "labels": json.dumps(config.labels),
            "priority": config.priority,
            "depends_on": json.dumps(list(dict.fromkeys(config.depends_on))),
            "max_attempts": config.max_attempts or self._max_attempts,
            "deadline_seconds": config.deadline_seconds,
            "gpus": needs.gpus,
            "memory": needs.memory,
            "webhook": config.webhook,
            "cache.fingerprint": config.cache.fingerprint and json.dumps(config.cache.fingerprint),
        }
        return {name: str(value) for name, value in fields.items() if value is not None}

    def change(self, action: Action, job_id: str) -> Change:
        """Cancel, pause, resume, retry or delete a job; a run under way hears of it with its next beat."""
        return Change(*self._transition("change", action, job_id))

    def get(self, job_id: str, caller: Caller = LOCAL) -> Job | None:
        """The job, or None where there is none that the caller may see."""
        found = list(self._read([job_id]))
        return found[0] if found and (caller.sees_all or found[0].owner == caller.name) else None

    def version(self, job_id: str) -> int | None:
        """The version of the record: it grows with every change."""
        version = cast(str | None, self.redis.hget(f"kd:job:{job_id}", "version"))
        return int(version) if version else None

    def _read(self, ids: Sequence[str]) -> Iterator[Job]:
        pipeline = self.redis.pipeline(transaction=False)
        for job_id in ids:
            pipeline.hgetall(f"kd:job:{job_id}")
        records = [record for record in pipeline.execute() if record]
        for record in records:  # answered in this order below
            pipeline.smembers(f"kd:job:{record['id']}:waits")
            pipeline.zrank(f"kd:queue:{record['stage']}", record["id"])
        around = pipeline.execute() if records else []
        workers = self.workers() if any(position is not None for position in around[1::2]) else []
        pace: dict[str, float | None] = {}
        for record, waits_for, position in zip(records, around[::2], around[1::2], strict=True):
            job = job_of(record, waits_for=sorted(waits_for), queue_position=position)
            if position is None:
                yield job
            elif why := nobody_for(job, workers):
                yield job.model_copy(update={"reason": why})
            else:
                if job.stage not in pace:
                    pace[job.stage] = self._seconds_per_job(sum(job.stage in worker.stages for worker in workers))
                seconds = pace[job.stage]
                start = _in_seconds((position + 1) * seconds) if seconds else None
                yield job.model_copy(update={"estimated_start_at": start})

    def _seconds_per_job(self, workers: int) -> float | None:
        """How often one of so many workers becomes free, by the mean duration of earlier jobs; None if unknown."""
        seconds, runs = 0.0, 0.0
        for name, labels, value in self.counters():
            if labels.get("status") == "succeeded":
                seconds += value if name == "kd_job_duration_seconds_sum" else 0
                runs += value if name == "kd_job_duration_seconds_count" else 0
        return seconds / runs / workers if workers and runs else None

    def page(self, query: JobQuery, limit: int, cursor: int | None = None) -> JobPage:
        """Up to ``limit`` jobs, newest first, from the one after ``cursor``; looks at no more than ``SCAN`` records."""
        who = "*" if query.caller.sees_all else query.caller.name
        index, found, looked = f"kd:index:{who}:{query.status or '*'}", list[Job](), 0
        oldest = _after(query.created_after) if query.created_after else "-inf"
        sieved = (query.kind, query.label, query.parent) != (None, None, None)
        size = 1 + (max(limit, 99) if sieved else limit)
        while looked < SCAN:
            newest = "+inf" if cursor is None else f"({cursor}"
            entries: Any = self.redis.zrevrangebyscore(index, newest, oldest, start=0, num=size, withscores=True)
            jobs = {job.id: job for job in self._read([job_id for job_id, _ in entries])}
            for job_id, score in entries:
                if len(found) == limit:
                    return JobPage(found, cursor)
                cursor = int(score)
                if job_id in jobs and query.wants(jobs[job_id]):
                    found.append(jobs[job_id])
            if len(entries) < size:
                return JobPage(found, None)
            looked += len(entries)
        return JobPage(found, cursor)

    def events(
        self, job_id: str, after: str = "0", limit: int | None = None, types: Iterable[str] | None = None
    ) -> list[tuple[str, str, dict[str, Any]]]:
        """Stream id, type and data of what happened after stream id ``after``, oldest first."""
        wanted, found = set(types or ()), list[tuple[str, str, dict[str, Any]]]()
        while True:
            entries: Any = self.redis.xrange(f"kd:job:{job_id}:events", f"({after}", count=1000)
            for after, fields in entries:
                if not wanted or fields["type"] in wanted:
                    found.append((after, fields["type"], json.loads(fields["data"])))
                if limit is not None and len(found) == limit:
                    return found
            if len(entries) < 1000:
                return found

    def metrics(self, job_id: str, after_step: int = -1, series: Sequence[str] = SERIES) -> list[dict[str, Any]]:
        """What is known of each step after ``after_step``, in their order; long histories are thinned out evenly."""
        points: dict[int, dict[str, Any]] = {}
        for name in series:
            for text in cast(list[str], self.redis.zrangebyscore(f"kd:job:{job_id}:{name}", f"({after_step}", "+inf")):
                point = json.loads(text)
                points.setdefault(point["step"], {}).update(point)
        return [points[step] for step in sorted(points)]

    # -- caches

    def caches_of(self, caller: Caller) -> set[str] | None:
        """Fingerprints that the caller's jobs made or read; None = it may see every cache."""
        return None if caller.sees_all else cast(set[str], self.redis.smembers(f"kd:caches:{caller.name}"))

    def cache_users(self, fingerprint: str) -> list[str]:
        """Open jobs that make or read a cache."""
        jobs = sorted(cast(set[str], self.redis.smembers(f"kd:cache:{fingerprint}:jobs")))
        return [job_id for job_id in jobs if self.redis.zscore("kd:open", job_id) is not None]

    def forget_cache(self, caller: Caller, fingerprint: str) -> bool:
        """Take a cache from the lists that the caller may see; returns whether some other key has it in its own."""
        self.redis.srem(f"kd:caches:{caller.name}", fingerprint)
        owners = self.redis.scan_iter("kd:caches:*", count=1000)
        if not caller.sees_all:
            return any(self.redis.sismember(owner, fingerprint) for owner in owners)
        for owner in owners:
            self.redis.srem(owner, fingerprint)
        return False

    # -- from a worker

    def claim(
        self, job_id: str, stage: str, worker: str, lease_seconds: float, capacity: Capacity = ANY
    ) -> Claim | None:
        """Take a queued stage, or None where it is not queued (a hint came twice, or too late) or does not fit."""
        tail = (stage, worker, _ms(lease_seconds), capacity.gpus, capacity.memory)
        return _claim(self._transition("claim", job_id, *tail))

    def claim_next(self, stage: str, worker: str, lease_seconds: float, capacity: Capacity = ANY) -> Claim | None:
        """Take the first job in the queue of ``stage`` that fits: by priority, then age."""
        tail = (stage, worker, _ms(lease_seconds), capacity.gpus, capacity.memory)
        return _claim(self._transition("claim_next", *tail))

    def beat(self, claim: Claim, lease_seconds: float, batch: Batch) -> Reply:
        """Renew the lease and deliver events; the reply says whether to go on."""
        fields = batch.fields()
        events = [
            text for event in batch.events for text in (event["type"], json.dumps(event["data"], allow_nan=False))
        ]
        head = (claim.id, claim.fence, _ms(lease_seconds), batch.number, len(fields))
        return cast(Reply, self._transition("beat", *head, *_flat(fields), *events))

    def advance(self, claim: Claim, stage: str) -> str:
        """Queue the next stage; returns the status now, or "fenced"."""
        return cast(str, self._transition("advance", claim.id, claim.fence, stage))

    def finish(self, claim: Claim, outcome: Outcome, error: Mapping[str, str] | None = None) -> str:
        """End the job; returns the status now, or "fenced"."""
        return cast(str, self._transition("finish", claim.id, claim.fence, outcome, json.dumps(error)))

    def release(self, claim: Claim) -> str:
        """Let go of a run that was stopped cleanly; the attempt does not count. Returns the status now, or "fenced".

        The status decides what it means: queued again, or paused, cancelled, or failed for its deadline.
        """
        return cast(str, self._transition("release", claim.id, claim.fence))

    def fail_attempt(self, claim: Claim, error: Mapping[str, str]) -> str:
        """Put the stage back because its process died; the job fails with ``error`` once its attempts are spent."""
        return cast(str, self._transition("fail_attempt", claim.id, claim.fence, json.dumps(error)))

    def show_worker(self, state: WorkerState, ttl_seconds: int) -> None:
        """A worker's sign of life."""
        pipeline = self.redis.pipeline()
        pipeline.set(f"kd:worker:{state.id}", state.model_dump_json(), ex=ttl_seconds)
        pipeline.sadd("kd:workers", state.id)
        pipeline.execute()

    def hide_worker(self, worker: str) -> None:
        """It has ended."""
        self.redis.delete(f"kd:worker:{worker}")
        self.redis.srem("kd:workers", worker)

    def workers(self) -> list[WorkerState]:
        """The workers that have shown a sign of life of late."""
        ids = sorted(cast(set[str], self.redis.smembers("kd:workers")))
        states = cast(list[str | None], self.redis.mget([f"kd:worker:{name}" for name in ids])) if ids else []
        if gone := [name for name, state in zip(ids, states, strict=True) if state is None]:
            self.redis.srem("kd:workers", *gone)
        return [WorkerState.model_validate_json(state) for state in states if state]

    def workers_of(self, stage: str) -> int:
        """How many of them serve a stage."""
        return sum(stage in worker.stages for worker in self.workers())

    # -- from who drives a search

    def journal(self, job_id: str, start: int) -> list[dict[str, Any]]:
        """The lines of a search's study from number ``start`` on."""
        lines = cast(list[str], self.redis.lrange(f"kd:job:{job_id}:study", start, -1))
        return [json.loads(line) for line in lines]

    def add_to_journal(self, claim: Claim, lines: Iterable[Mapping[str, Any]]) -> str:
        """Add lines to the study of a search, all or none."""
        return cast(str, self._transition("journal", claim.id, claim.fence, *map(json.dumps, lines)))

    def create_trial(self, claim: Claim, number: int, config: JobConfig) -> str:
        """Accept the job of a trial, once, however often it is asked for; returns its id, or "fenced"."""
        head = (claim.id, claim.fence, number, new_id())
        return cast(str, self._transition("trial", *head, *_flat(self._new(config))))

    def trials(self, job_id: str) -> dict[int, str]:
        """The jobs of a search's trials, by number."""
        found = cast(dict[str, str], self.redis.hgetall(f"kd:job:{job_id}:trials"))
        return {int(number): trial for number, trial in found.items()}

    # -- from the reconciler

    def now_ms(self) -> int:
        """The server's clock in milliseconds."""
        seconds, microseconds = self.redis.time()
        return seconds * 1000 + microseconds // 1000

    def expire(self) -> list[str]:
        """Take back the jobs whose lease has run out; returns their ids."""
        return cast(list[str], self._transition("expire", json.dumps(LOST)))

    def due(self) -> list[str]:
        """Fail the jobs whose deadline has passed, or stop their runs for it; returns their ids."""
        return cast(list[str], self._transition("due", json.dumps(LATE)))

    def mend(self, start: int, lease_seconds: float) -> tuple[int, list[str]]:
        """Put back what open jobs have lost, from place ``start`` on; returns where to go on, and their ids."""
        following, *ids = self._transition("mend", start, MENDED, _ms(lease_seconds))
        return int(following), ids

    def unannounced(self, stage: str, age_seconds: float) -> list[str]:
        """Queued jobs that no worker was told of for ``age_seconds``; the caller publishes them now."""
        return cast(list[str], self._transition("hints", stage, _ms(age_seconds)))

    def due_webhooks(self, lease_seconds: float, limit: int) -> list[Delivery]:
        """Webhooks to send now, which nobody else is given for ``lease_seconds``."""
        flat: list[str] = self._transition("webhooks", _ms(lease_seconds), limit)
        rows = zip(*[iter(flat)] * 4, strict=True)
        return [Delivery(job_id, event_id, url, int(tries)) for job_id, event_id, url, tries in rows]

    def webhook_done(self, delivery: Delivery, warning: str = "") -> None:
        """It has arrived; or it is given up, with a ``warning`` among the job's events."""
        self._transition("webhook", delivery.job_id, delivery.event_id, "", warning)

    def webhook_failed(self, delivery: Delivery, delay_seconds: float) -> None:
        """Try it again later."""
        self._transition("webhook", delivery.job_id, delivery.event_id, _ms(delay_seconds), "")

    # -- counted

    def count(self, name: str, amount: float = 1.0, **labels: str) -> None:
        """Add to a counter that GET /metrics shows."""
        text = ",".join(f'{label}="{value}"' for label, value in sorted(labels.items()))
        self.redis.hincrbyfloat("kd:counters", f"{name}{{{text}}}", amount)

    def counters(self) -> list[tuple[str, dict[str, str], float]]:
        """Every counter: name, labels and value."""
        found = []
        for field, value in cast(dict[str, str], self.redis.hgetall("kd:counters")).items():
            match = _SAMPLE.fullmatch(field)
            assert match is not None, field
            found.append((match[1], dict(_LABEL.findall(match[2])), float(value)))
        return found

    def statuses(self) -> dict[str, int]:
        """How many jobs have each status."""
        names = cast(tuple[str, ...], Status.__args__)  # type: ignore[attr-defined]
        pipeline = self.redis.pipeline(transaction=False)
        for status in names:
            pipeline.zcard(f"kd:index:*:{status}")
        return dict(zip(names, pipeline.execute(), strict=True))

    def queue_depths(self, stages: Iterable[str]) -> dict[str, int]:
        """How many jobs wait for each stage."""
        return {stage: self.redis.zcard(f"kd:queue:{stage}") for stage in stages}


def _body(config: JobConfig) -> str:
    return json.dumps(config.model_dump(mode="json"), sort_keys=True)


def _in_seconds(seconds: float) -> datetime:
    return datetime.now(UTC) + timedelta(seconds=seconds)


def _after(moment: datetime) -> int:
    """The first microsecond whose job is shown with a later time: records tell it in milliseconds."""
    return ((moment - datetime(1970, 1, 1, tzinfo=UTC)) // timedelta(milliseconds=1) + 1) * 1000


def _as_caller(caller: Caller) -> tuple[str, int]:
    return caller.name, int(caller.sees_all)


def _claim(reply: list[Any] | None) -> Claim | None:
    if not reply:
        return None
    job_id, fence, attempt, config, *rest = reply
    return Claim(job_id, int(fence), int(attempt), json.loads(config), *rest)


def _flat(fields: Mapping[str, str]) -> Iterable[str]:
    return (text for pair in fields.items() for text in pair)


def _ms(seconds: float) -> int:
    return int(seconds * 1000)


def _key_sha(caller: Caller, key: str) -> str:
    return _sha256(json.dumps([caller.name, key]))


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
