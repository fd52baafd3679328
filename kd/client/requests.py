"""The requests of a client: their paths, which docs/api.md describes, their bodies and headers."""

from __future__ import annotations

import json
import os
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import quote

from kd.client.wire.jobs import Job
from kd.config.job import JobConfig
from kd.config.jobfile import load_config

#: Seconds within which the server must send something.
READ_SECONDS = 30.0

#: A job to submit: its fields, or the path of a YAML or JSON file.
JobLike = Mapping[str, Any] | JobConfig | str | os.PathLike[str]
#: A job of the service: its id, or what a call returned.
JobRef = str | Job


@dataclass(frozen=True)
class Request:
    """One HTTP request. A value of None in ``query`` is left out.

    ``body`` is JSON, or the path of a file to send, whose length and type ``headers`` must name.
    """

    method: str
    path: str
    query: Mapping[str, Any] = field(default_factory=dict)
    body: bytes | Path | None = None
    headers: Mapping[str, str] = field(default_factory=dict)
    read_seconds: float = READ_SECONDS


def describe_job(job: JobLike) -> Mapping[str, Any]:
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


def locate_cache(fingerprint: str, below: str = "") -> str:
    """Return the path of a cache, or one below it."""
    return f"/caches/{quote(fingerprint, safe='')}{below}"


def locate_file(name: str) -> str:
    """Return the path of an uploaded file."""
    return f"/files/{quote(name, safe='')}"
