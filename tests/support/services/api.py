"""The API over real HTTP: a real uvicorn and a real store; a test plays the worker."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

from bench.support.harness import Parts, make_body, make_config
from kd.client.wire.problems import ProblemDetails
from kd.progress import Event
from services.store.callers import Caller
from services.store.jobs.leases import Claim, EventBatch
from services.store.key_file import create_key

UNLIMITED: dict[str, Any] = {
    "rate_post": 10**6,
    "rate_get": 10**6,
    "rate_validate": 10**6,
    "rate_sse": 1000,
    "quota_open_jobs": 10**6,
    "disk_floor_bytes": 0,
}


def inputs(folder: Path) -> str:
    """Make a folder with a text and a model that pass the checks of a POST; return its path."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "text.txt").write_text("It is a truth universally acknowledged.\n" * 50)
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(b"x")
    return str(folder)


def valid(name: str, text: str, kind: str = "train", **changes: Any) -> dict[str, Any]:
    """Return a job that the API accepts; ``text`` is the folder that ``inputs`` made."""
    job = make_body(name, kind, data={"train": f"{text}/text.txt"}, **changes)
    job["student"]["init"]["tokenizer"] = text
    if kind != "train":
        job["teacher"]["model"] = text
    return job


def problem(response: httpx.Response, status: int, slug: str | None = None) -> ProblemDetails:
    """Check that the response is a problem document with this status, and return the document.

    It and each wrong field say what to do.
    """
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/problem+json"
    document = ProblemDetails.model_validate(response.json())
    assert document.status == status
    assert document.instance == response.request.url.path
    assert document.request_id == response.headers["x-request-id"]
    assert slug is None or document.type == f"urn:potstill:problem:{slug}"
    assert document.remedy and all(each.remedy for each in document.errors), document
    return document


def sse(response: httpx.Response) -> Iterator[dict[str, str]]:
    """Yield the events of a stream."""
    event: dict[str, str] = {}
    for line in response.iter_lines():
        name, _, value = line.partition(": ")
        if line:
            event[name] = value
        elif event:
            yield event
            event = {}


def running(parts: Parts, owner: Caller | None = None, **changes: Any) -> Claim:
    """Create a job and claim it as its worker; return the claim."""
    created = parts.jobs.create(make_config("quick", **changes), *([owner] if owner else []))
    claim = parts.jobs.claim(created.id, "train", "test", 600)
    assert claim is not None
    return claim


def tell(parts: Parts, claim: Claim, *events: tuple[str, dict[str, Any]]) -> None:
    """Deliver events of a run as its worker does."""
    number = int(parts.jobs.redis.hget(f"kd:job:{claim.id}", "batch") or 0) + 1
    batch = EventBatch(number, tuple(Event(kind, data) for kind, data in events))
    assert parts.jobs.beat(claim, 600, batch) == "go"


def with_keys(folder: Path, **scopes: str) -> tuple[Path, dict[str, str]]:
    """Write a file with one key for each name and scope; return its path and the keys."""
    file = folder / "keys.jsonl"
    return file, {name: create_key(file, name, [scope])[0] for name, scope in scopes.items()}


def client(parts: Parts, key: str) -> httpx.Client:
    """Return a client that sends this key."""
    headers = {"Authorization": f"Bearer {key}"}
    return httpx.Client(
        base_url=parts.settings.server, timeout=60, trust_env=False, headers=headers
    )


def statuses(events: list[dict[str, str]]) -> list[str]:
    """Return the statuses that the events of a stream report."""
    return [json.loads(event["data"])["status"] for event in events if event["event"] == "status"]


@contextmanager
def serving(folder: Path, **settings: Any) -> Iterator[Parts]:
    """Start an API without limits on requests; every caller may read ``folder``/inputs."""
    inputs(folder / "inputs")
    parts = Parts(folder, **{**UNLIMITED, "data_roots": (folder / "inputs",), **settings})
    try:
        parts.start_api()
        yield parts
    finally:
        parts.close()
