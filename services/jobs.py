"""The job record in Redis, which is the truth about a job. States, keys and transitions: ``jobs.lua``."""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Literal, cast

from redis import Redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from kd.config.job import JobConfig
from services.schemas import Job

SCRIPT = Path(__file__).with_name("jobs.lua").read_text(encoding="utf-8")
NULL = "null"

#: Which events change the record, and under which prefix their data goes there.
SECTION_OF_EVENT = {"progress": "progress", "metrics": "metrics", "evaluation": "metrics", "cache": "cache"}

LOST = {
    "type": "worker_lost",
    "detail": "The worker was not heard of for longer than its lease: it died, or lost its connection to Redis.",
    "remedy": "Look into the worker's log and the host's memory, then post the job again.",
}

Reply = Literal["go", "cancel", "fenced"]
Outcome = Literal["succeeded", "failed", "cancelled"]


def connect(url: str, timeout: float = 2.0) -> Redis:
    """A client that fails within ``timeout`` seconds: the library's own retries would turn 2 s into 25 s."""
    return Redis.from_url(
        url,
        protocol=2,
        decode_responses=True,
        socket_timeout=timeout,
        socket_connect_timeout=timeout,
        socket_keepalive=True,
        retry=Retry(NoBackoff(), 0),
    )


@dataclass(frozen=True)
class Created:
    """The answer to a create: ``replayed`` = this key made the job earlier, ``conflict`` = from another body."""

    outcome: Literal["created", "replayed", "conflict"]
    id: str


@dataclass(frozen=True)
class Claim:
    """The right to run one stage of a job, as long as beats keep the lease alive."""

    id: str
    fence: int
    attempt: int
    config: dict[str, Any]


@dataclass(frozen=True)
class Batch:
    """Events on their way to the record; ``number`` grows, so that a batch sent twice counts once."""

    number: int
    events: tuple[dict[str, Any], ...]

    def fields(self) -> dict[str, str]:
        """What the events change in the record: the last word on each field."""
        return {name: value for event in self.events for name, value in fields_of(event).items()}


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


def job_of(record: Mapping[str, str]) -> Job:
    """The job that a hash describes; dotted fields become nested values again."""
    nested: dict[str, dict[str, Any]] = {"progress": {}, "metrics": {}, "cache": {}, "artifacts": {}}
    for name, value in record.items():
        section, dot, inner = name.partition(".")
        if dot:
            nested.setdefault(section, {})[inner] = json.loads(value)
    plain = {name: value for name, value in record.items() if "." not in name}
    plain.pop("cancel", None)
    return Job.model_validate(
        {
            **plain,
            **nested,
            "cache": nested["cache"] or None,
            "config": json.loads(record["config"]),
            "error": json.loads(record["error"]),
            "cancel_requested": record.get("cancel") == "1",
        }
    )


class JobStore:
    """Jobs in Redis. Every change is one call of ``jobs.lua``; every method may raise ``RedisError``."""

    def __init__(self, client: Redis) -> None:
        self.redis = client
        self._script = client.register_script(SCRIPT)

    def _transition(self, name: str, *arguments: str | int | float) -> Any:
        return self._script(args=[name, *arguments])

    # -- from outside

    def create(self, config: JobConfig, idempotency_key: str | None = None) -> Created:
        """Accept a job and queue its first stage; the same key with the same body gives the same job."""
        body = _body(config)
        key_sha = _sha256(idempotency_key) if idempotency_key else ""
        outcome, job_id = self._transition("create", new_id(), key_sha, _sha256(body), *_flat(_new(config)))
        return Created(outcome, job_id)

    def cancel(self, job_id: str) -> bool:
        """Cancel a queued job at once and ask a running one to stop; False for an unknown job."""
        return self._transition("cancel", job_id) is not None

    def get(self, job_id: str) -> Job | None:
        """The job, or None."""
        record = cast(dict[str, str], self.redis.hgetall(f"kd:job:{job_id}"))
        return job_of(record) if record else None

    def newest(self, after: str | None = None) -> Iterator[Job]:
        """Jobs from the newest to the oldest, or from the one that follows job ``after``; ``KeyError`` if unknown."""
        start = 0
        if after is not None:
            rank = cast(int | None, self.redis.zrevrank("kd:jobs", after))
            if rank is None:
                raise KeyError(after)
            start = rank + 1
        while ids := cast(list[str], self.redis.zrevrange("kd:jobs", start, start + 99)):
            yield from self._read(ids)
            start += len(ids)

    def _read(self, ids: Sequence[str]) -> Iterator[Job]:
        pipeline = self.redis.pipeline(transaction=False)
        for job_id in ids:
            pipeline.hgetall(f"kd:job:{job_id}")
        yield from (job_of(record) for record in pipeline.execute())

    def page(self, limit: int, after: str | None, status: str | None, kind: str | None) -> list[Job]:
        """Up to ``limit`` jobs, newest first, of the given status and kind."""
        wanted = (job for job in self.newest(after) if status in (None, job.status) and kind in (None, job.kind))
        return list(islice(wanted, limit))

    # -- from the worker

    def claim(self, job_id: str, stage: str, owner: str, lease_seconds: float) -> Claim | None:
        """Take a queued stage, or None where it is not queued: a hint came twice, or too late."""
        return _claim(self._transition("claim", job_id, stage, owner, _ms(lease_seconds)))

    def claim_oldest(self, stage: str, owner: str, lease_seconds: float) -> Claim | None:
        """Take the job that has waited for ``stage`` the longest, if there is one."""
        return _claim(self._transition("claim_oldest", stage, owner, _ms(lease_seconds)))

    def beat(self, claim: Claim, lease_seconds: float, batch: Batch) -> Reply:
        """Renew the lease and deliver events; the reply says whether to go on."""
        fields = batch.fields()
        events = [
            text for event in batch.events for text in (event["type"], json.dumps(event["data"], allow_nan=False))
        ]
        head = (claim.id, claim.fence, _ms(lease_seconds), batch.number, len(fields))
        return cast(Reply, self._transition("beat", *head, *_flat(fields), *events))

    def advance(self, claim: Claim, stage: str) -> str:
        """Queue the next stage."""
        return cast(str, self._transition("advance", claim.id, claim.fence, stage))

    def finish(self, claim: Claim, outcome: Outcome, error: Mapping[str, str] | None = None) -> str:
        """End the job."""
        return cast(str, self._transition("finish", claim.id, claim.fence, outcome, json.dumps(error)))

    def release(self, claim: Claim) -> str:
        """Put the stage back: it was stopped cleanly, and the attempt does not count."""
        return cast(str, self._transition("release", claim.id, claim.fence))

    def fail_attempt(self, claim: Claim, error: Mapping[str, str], max_attempts: int) -> str:
        """Put the stage back because its process died; the job fails with ``error`` at ``max_attempts``."""
        return cast(str, self._transition("fail_attempt", claim.id, claim.fence, json.dumps(error), max_attempts))

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
        return cast(str, self._transition("trial", *head, *_flat(_new(config))))

    def trials(self, job_id: str) -> dict[int, str]:
        """The jobs of a search's trials, by number."""
        found = cast(dict[str, str], self.redis.hgetall(f"kd:job:{job_id}:trials"))
        return {int(number): trial for number, trial in found.items()}

    def events(self, job_id: str, kind: str, after: str = "-") -> tuple[str, list[dict[str, Any]]]:
        """The events of a kind since stream id ``after``, and the id to ask for next."""
        entries: Any = self.redis.xrange(f"kd:job:{job_id}:events", after if after == "-" else f"({after}")
        found = [json.loads(fields["data"]) for _, fields in entries if fields["type"] == kind]
        return entries[-1][0] if entries else after, found

    # -- from the reconciler

    def now_ms(self) -> int:
        """The server's clock in milliseconds."""
        seconds, microseconds = self.redis.time()
        return seconds * 1000 + microseconds // 1000

    def expire(self, max_attempts: int) -> list[str]:
        """Take back the jobs whose lease has run out; returns their ids."""
        return cast(list[str], self._transition("expire", json.dumps(LOST), max_attempts))

    def unannounced(self, stage: str, age_seconds: float) -> list[str]:
        """Queued jobs that no worker was told of for ``age_seconds``; the caller publishes them now."""
        return cast(list[str], self._transition("hints", stage, _ms(age_seconds)))

    def workers(self) -> list[str]:
        """Ids of the workers that have shown a sign of life."""
        return [key.removeprefix("kd:worker:") for key in self.redis.scan_iter("kd:worker:*", count=1000)]

    def workers_of(self, stage: str) -> int:
        """How many of them work on a stage."""
        states = [self.redis.get(f"kd:worker:{worker}") for worker in self.workers()]
        return sum(stage in json.loads(cast(str, state))["queues"] for state in states if state)


def _body(config: JobConfig) -> str:
    return json.dumps(config.model_dump(mode="json"), sort_keys=True)


def _new(config: JobConfig) -> dict[str, str]:
    return {"kind": config.kind, "name": config.name, "stage": config.stages[0], "config": _body(config)}


def _claim(reply: list[Any] | None) -> Claim | None:
    return Claim(reply[0], int(reply[1]), int(reply[2]), json.loads(reply[3])) if reply else None


def _flat(fields: Mapping[str, str]) -> Iterable[str]:
    return (text for pair in fields.items() for text in pair)


def _ms(seconds: float) -> int:
    return int(seconds * 1000)


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
