"""The fields of a job's record: from a configuration and from events, and back to a view."""

from __future__ import annotations

import json
import os
import re
import time
import typing
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from pydantic import Field

from cache.json_object import Json
from kd.client.wire import jobs as wire
from kd.config.job import JobConfig
from kd.config.jobfile import fill_record, find_unusable_text
from kd.config.kinds import KINDS
from kd.progress import Event

_ALPHABET = "0123456789abcdefghjkmnpqrstvwxyz"
#: The escape of a surrogate in JSON. Most are halves of a whole pair, which is sound text.
_ESCAPED_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")

#: Types of events that change the record -> the prefix of the fields that their data sets.
SECTION_OF_EVENT = {
    "progress": "progress",
    "metrics": "metrics",
    "evaluation": "metrics",
    "report": "metrics",
    "plan": "cache",
    "cache": "cache",
}
#: Fields of records that earlier versions wrote under another name.
RENAMED = {"metrics.perplexity": "metrics.train_perplexity"}


class JobRecord(wire.Job):
    """A job as the store knows it: with the owner of the key that created it.

    ``stopped_with`` is the search whose end cancelled this trial; empty for any other job. ``turn``
    is that of the present stage (``kd.config.kinds``).
    """

    owner: str = Field("local", exclude=True)
    stopped_with: str = Field("", exclude=True)
    turn: int = Field(0, exclude=True)


def build_links(job_id: str) -> wire.JobLinks:
    """Build the paths below a job."""
    own = f"/jobs/{job_id}"
    parts = ("events", "metrics", "logs", "checkpoints", "artifacts")
    below = {part: f"{own}/{part}" for part in parts}
    return wire.JobLinks.model_validate({"self": own, "stream": f"{own}/events/stream", **below})


def make_job_id() -> str:
    """A job id that sorts by time."""
    return make_id("job_")


def make_id(prefix: str) -> str:
    """An id that sorts by time: 48 bits of milliseconds and 80 random bits, as in a ULID."""
    number = int(time.time() * 1000) << 80 | int.from_bytes(os.urandom(10), "big")
    return prefix + "".join(_ALPHABET[number >> shift & 31] for shift in range(125, -5, -5))


def serialise_config(config: JobConfig) -> str:
    """The configuration as it stands in the record. Equal configurations give equal text."""
    return json.dumps(config.model_dump(mode="json"), sort_keys=True)


def build_fields(config: JobConfig, max_attempts: int) -> dict[str, str]:
    """The fields of a new record that its configuration decides.

    ``max_attempts`` counts if the configuration sets no number.
    """
    needs = config.resources
    fields = {
        "kind": config.kind,
        "name": config.name,
        "stage": config.stages[0],
        "config": serialise_config(config),
        "labels": json.dumps(config.labels),
        "priority": config.priority,
        "depends_on": json.dumps(list(dict.fromkeys(config.depends_on))),
        "max_attempts": config.max_attempts or max_attempts,
        "deadline_seconds": config.deadline_seconds,
        "gpus": needs.gpus,
        "memory": needs.memory,
        "hosts": needs.host_counts[0] if needs.host_counts[-1] > 1 else None,
        "webhook": config.webhook,
        "cache.fingerprint": config.cache.fingerprint and json.dumps(config.cache.fingerprint),
    }
    return {name: str(value) for name, value in fields.items() if value is not None}


def extract_fields(event: Event) -> dict[str, str]:
    """The fields of the record that an event of a run sets, as ``{"metrics.loss": "2.5"}``."""
    kind, data = event.type, event.data
    if kind == "stage":
        return {"phase": str(data.get("phase", ""))}
    if kind == "artifact":
        return {f"artifacts.{data['name']}": json.dumps(data["path"])}
    if kind not in SECTION_OF_EVENT:
        return {}
    return {f"{SECTION_OF_EVENT[kind]}.{name}": json.dumps(value) for name, value in data.items()}


def parse_job(record: Mapping[str, str], **more: Any) -> JobRecord:
    """The job that a record describes. Dotted names of fields become nested values again.

    ``more`` are fields of the job that the record does not hold.
    """
    sections = ("progress", "metrics", "cache", "artifacts")
    nested: dict[str, Json] = {name: {} for name in sections}
    for name, value in record.items():
        section, dot, inner = RENAMED.get(name, name).partition(".")
        if dot:
            nested.setdefault(section, {})[inner] = json.loads(value)
    cost = None  # no device had a price
    if "cost" in record:
        is_final = record.get("status") in wire.TERMINAL_STATUSES
        cost = wire.Cost(amount=float(record["cost"]), final=is_final)
    return JobRecord.model_validate(
        {
            **{name: value for name, value in record.items() if "." not in name},
            **nested,
            "cache": nested["cache"] or None,
            **{
                name: json.loads(record[name])
                for name in ("error", "labels", "depends_on")
                if name in record
            },
            **({"config": fill_record(json.loads(record["config"]))} if "config" in record else {}),
            "resources": {
                name: record[name] for name in ("gpus", "memory", "hosts") if name in record
            },
            "team": record.get("team") or record.get("owner") or "local",
            "device_seconds": int(record.get("device_ms", 0)) / 1000,
            "cost": cost,
            "request_id": record.get("request_id") or None,
            "links": build_links(record["id"]),
            **more,
        }
    )


def read_job(record: Mapping[str, str], **more: Any) -> JobRecord:
    """Return the job that a record describes, as ``parse_job`` does.

    A record that cannot be read gives a job whose error says so: one bad record must not hide the
    others of a list, and its owner must be able to cancel and delete it.
    """
    try:
        job = parse_job(record, **more)
        if any(_ESCAPED_SURROGATE.search(text) for text in record.values()):
            for problem in find_unusable_text(job.model_dump()):  # it could not be sent to a client
                raise ValueError(f"{problem.pointer} {problem.detail}")
    except (ValueError, TypeError, LookupError) as error:
        return _describe_unreadable(record, error, more)
    return job


def _describe_unreadable(
    record: Mapping[str, str], error: Exception, more: Mapping[str, Any]
) -> JobRecord:
    job_id = record["id"]
    version = record.get("version", "")
    reason = ascii(" ".join(str(error).split()))[:300]
    return JobRecord(
        id=job_id,
        kind=_choose(record.get("kind"), tuple(KINDS), "distill"),
        name="unreadable",
        owner=record.get("owner", "local"),
        status=_choose(record.get("status"), typing.get_args(wire.Status), "failed"),
        actions=more.get("actions", []),
        stage=ascii(record.get("stage", ""))[1:-1],
        progress=wire.Progress(),
        metrics=wire.Metrics(),
        error=wire.JobError(
            type="unreadable_record",
            detail=f"The record of this job cannot be read: {type(error).__name__}: {reason}",
            remedy="Cancel it if it runs, and delete it: DELETE /jobs/{id} or `kd jobs rm`.",
        ),
        attempt=0,
        version=int(version) if version.isdecimal() else 0,
        created_at=read_creation_time(job_id),
        links=build_links(job_id),
        artifacts={},
        config={},
    )


def _choose(value: Any, known: tuple[Any, ...], default: Any) -> Any:
    return value if value in known else default


def read_creation_time(job_id: str) -> datetime:
    """Return the time that is a part of a job's id."""
    number = 0
    for letter in job_id.removeprefix("job_")[:10]:
        number = number << 5 | max(_ALPHABET.find(letter), 0)
    return datetime.fromtimestamp(min(number, 1 << 42) / 1000, UTC)
