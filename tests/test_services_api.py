"""The API over real HTTP: a real uvicorn, a real server behind it, and what a client gets to see."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import httpx
import pytest

from cache.manifest import FidelityRow
from cache.store import replace_fidelity
from cache.testing import make_cache
from services.jobs import Batch
from services.schemas import Job, ProblemDocument
from tests.harness import ROOT, Parts, body, wait_until

MakeParts = Callable[..., Parts]


@pytest.fixture(scope="module")
def http(service: Parts) -> httpx.Client:
    return service.http


@pytest.fixture(scope="module")
def text(service: Parts) -> str:
    """A text and a model that the checks at POST are content with."""
    folder = service.settings.home / "inputs"
    folder.mkdir()
    (folder / "text.txt").write_text("It is a truth universally acknowledged.\n" * 50)
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(b"x")
    return str(folder)


def valid(name: str, text: str, kind: str = "train", **changes: Any) -> dict[str, Any]:
    job = body(name, kind, data={"train": f"{text}/text.txt"}, **changes)
    job["student"]["init"]["tokenizer"] = text
    if kind != "train":
        job["teacher"]["model"] = text
    return job


def problem(response: httpx.Response, status: int) -> ProblemDocument:
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/problem+json"
    document = ProblemDocument.model_validate(response.json())
    assert document.status == status
    assert document.instance == response.request.url.path
    return document


def sse(response: httpx.Response) -> Iterator[dict[str, str]]:
    event: dict[str, str] = {}
    for line in response.iter_lines():
        name, _, value = line.partition(": ")
        if line:
            event[name] = value
        elif event:
            yield event
            event = {}


def test_post_takes_a_job_and_get_tells_how_it_went(service: Parts, http: httpx.Client, text: str) -> None:
    answer = http.post("/jobs", json=valid("quick", text, "distill"))
    assert answer.status_code == 202
    job = Job.model_validate(answer.json())
    assert answer.headers["location"] == f"/jobs/{job.id}"
    assert (job.status, job.kind, job.name) == ("queued", "distill", "quick")
    service.wait_for(job.id, "succeeded", "failed")
    document = http.get(f"/jobs/{job.id}").json()
    assert document["status"] == "succeeded"
    assert set(document) >= {
        *("id", "kind", "name", "status", "stage", "progress", "metrics", "cache", "error", "attempt", "artifacts"),
        *("config", "created_at", "queued_at", "started_at", "finished_at", "heartbeat_at"),
    }
    assert set(document["progress"]) == {"done", "total", "unit", "fraction", "eta_seconds", "tokens_per_second"}
    assert set(document["metrics"]) >= {
        *("loss", "kd_loss", "ce_loss", "perplexity", "validation_perplexity"),
        *("temperature", "learning_rate", "grad_norm", "step"),
    }
    assert document["metrics"]["kd_loss"] is None, "not a number is null"
    assert document["created_at"].endswith("Z")
    assert document["config"]["train"]["max_steps"] == 1


def test_an_idempotency_key_gives_the_same_job_again(http: httpx.Client, text: str) -> None:
    headers = {"Idempotency-Key": "a key of mine"}
    first = http.post("/jobs", json=valid("quick", text), headers=headers)
    again = http.post("/jobs", json=valid("quick", text), headers=headers)
    assert first.status_code == again.status_code == 202
    assert first.json()["id"] == again.json()["id"]
    assert "idempotent-replayed" not in first.headers
    assert again.headers["idempotent-replayed"] == "true"
    other = problem(http.post("/jobs", json=valid("fails", text), headers=headers), 422)
    assert other.type == "urn:potstill:problem:key-reused"


@pytest.mark.parametrize(
    "change, pointer, words",
    [
        ({"lose": {}}, "/lose", "Did you mean loss?"),
        ({"train": {"max_steps": 0}}, "/train/max_steps", "greater than or equal to 1"),
        ({"train": {"max_steps": 1, "learning_rat": 1}}, "/train/learning_rat", "Did you mean learning_rate?"),
        ({"train": {"max_steps": "many"}}, "/train/max_steps", "valid integer"),
        ({"name": "Not A Name"}, "/name", "pattern"),
        ({"data": {"train": "no-such-file.txt"}}, "/data/train/0", "no-such-file.txt"),
        ({"kind": "distil"}, "/kind", "'distill'"),
        ({"loss": {"alpha": {"schedule": "linear", "strat": 1}}}, "/loss/alpha/strat", "Did you mean start?"),
        ({"loss": {"temperature": {"mode": "entropy", "schedule": "step"}}}, "/loss/temperature", "not both"),
        ({"body": {}}, "/body", "unknown key 'body'"),
        ({"loss": {"alpha": 0.5}}, "", "teacher is required"),
    ],
)
def test_a_bad_job_is_refused_with_a_pointer(
    http: httpx.Client, text: str, change: dict[str, Any], pointer: str, words: str
) -> None:
    document = problem(http.post("/jobs", json=valid("quick", text) | change), 422)
    found = {error.pointer: f"{error.detail} {error.remedy}" for error in document.errors}
    assert words in found[pointer]
    assert words in document.detail


def test_every_problem_is_listed(http: httpx.Client, text: str) -> None:
    wrong = valid("quick", text) | {"name": "?", "x": 1, "data": {"train": "a.txt", "sequence_length": 1}}
    document = problem(http.post("/jobs", json=wrong), 422)
    assert {error.pointer for error in document.errors} == {"/name", "/x", "/data/sequence_length"}


def test_a_value_that_is_of_no_form_is_one_problem(http: httpx.Client, text: str) -> None:
    wrong = valid("quick", text) | {"train": {"max_steps": 1, "gradient_checkpointing": "ful"}}
    (found,) = problem(http.post("/jobs", json=wrong), 422).errors
    assert (found.pointer, found.remedy) == ("/train/gradient_checkpointing", "Did you mean full?")
    assert "'none', 'full' or 'sqrt', or a valid integer" in found.detail


@pytest.mark.parametrize(
    "content, headers, status, words",
    [
        (b'{"kind": ', {"content-type": "application/json"}, 400, "not JSON"),
        (b"[]", {"content-type": "application/json"}, 422, "dictionary"),
        (b"", {"content-type": "application/json"}, 422, "no body"),
        (b"kind: distill", {"content-type": "application/yaml"}, 422, "Content-Type: application/json"),
        (b'{"train": {"learning_rate": NaN}}', {"content-type": "application/json"}, 422, "finite"),
        (b"\xff\xfe", {"content-type": "application/json"}, 400, ""),
        (b"[" * 100_000, {"content-type": "application/json"}, 400, ""),
    ],
)
def test_a_body_that_is_no_job_is_refused(
    http: httpx.Client, content: bytes, headers: dict[str, str], status: int, words: str
) -> None:
    document = problem(http.post("/jobs", content=content, headers=headers), status)
    assert words in f"{document.detail} {document.remedy}"


def test_a_body_of_more_than_a_mebibyte_is_refused(http: httpx.Client) -> None:
    big = b'{"name": "' + b"x" * (1 << 20) + b'"}'
    headers = {"content-type": "application/json"}
    assert "1048576 bytes" in problem(http.post("/jobs", content=big, headers=headers), 413).detail
    pieces = (big[start : start + 65536] for start in range(0, len(big), 65536))
    problem(http.post("/jobs", content=pieces, headers=headers), 413)
    problem(http.post("/jobs", content=big[: (1 << 20) - 100], headers=headers), 400)


def test_unknown_things_are_404(http: httpx.Client) -> None:
    unknown = "job_" + "0" * 26
    for method, path in (("GET", ""), ("POST", "/cancel"), ("GET", "/events")):
        document = problem(http.request(method, f"/jobs/{unknown}{path}"), 404)
        assert unknown in document.detail
        assert document.remedy
    problem(http.get("/jobs/job_1:events"), 404)
    problem(http.get("/nothing"), 404)


def test_405_names_every_method_that_is_allowed(http: httpx.Client) -> None:
    for method, path, allowed in (("DELETE", "/jobs", "GET, POST"), ("PUT", "/jobs/x/cancel", "POST")):
        response = http.request(method, path)
        problem(response, 405)
        assert response.headers["allow"] == allowed


def test_jobs_are_listed_newest_first_by_cursor(service: Parts, http: httpx.Client) -> None:
    ids = [service.submit("quick") for _ in range(7)]
    seen, cursor, pages = [], None, 0
    while True:
        page = http.get("/jobs", params={"limit": 3, **({"cursor": cursor} if cursor else {})}).json()
        if pages == 1:
            service.submit("quick")  # a newcomer does not shift the pages that follow
        seen += [job["id"] for job in page["data"]]
        pages, cursor = pages + 1, page["next_cursor"]
        assert page["has_more"] == (cursor is not None)
        if cursor is None or len(seen) >= 7:
            break
    assert seen[:7] == ids[::-1]
    for job_id in ids:
        service.wait_for(job_id, "succeeded")
    succeeded = http.get("/jobs", params={"status": "succeeded", "kind": "train", "limit": 100}).json()["data"]
    assert {job["status"] for job in succeeded} == {"succeeded"}
    assert set(ids) <= {job["id"] for job in succeeded}
    assert http.get("/jobs", params={"status": "running", "kind": "precompute"}).json() == {
        "data": [],
        "has_more": False,
        "next_cursor": None,
    }


@pytest.mark.parametrize(
    "query", ["limit=0", "limit=101", "limit=x", "status=lost", "cursor=zzz", "cursor=%21", "cursor=%C3%A9"]
)
def test_a_bad_query_is_refused(http: httpx.Client, query: str) -> None:
    document = problem(http.get(f"/jobs?{query}"), 422)
    assert query.split("=")[0] in document.detail


def test_cancel_is_idempotent(service: Parts, http: httpx.Client) -> None:
    job_id = service.submit("endless")
    service.child_pid(job_id)
    answers = [http.post(f"/jobs/{job_id}/cancel") for _ in range(3)]
    assert {answer.status_code for answer in answers} == {202}
    assert answers[0].json()["cancel_requested"] is True
    service.wait_for(job_id, "cancelled")
    assert http.post(f"/jobs/{job_id}/cancel").json()["status"] == "cancelled"
    assert service.statuses(job_id).count("cancelled") == 1


def test_events_stream_to_the_end_and_resume_anywhere(service: Parts, http: httpx.Client) -> None:
    job_id = service.submit("steps")
    with http.stream("GET", f"/jobs/{job_id}/events") as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        assert response.headers["cache-control"] == "no-cache"
        live = list(sse(response))
    assert [json.loads(event["data"])["status"] for event in live if event["event"] == "status"] == [
        "queued",
        "running",
        "succeeded",
    ]
    assert [(event["event"], json.loads(event["data"])) for event in live] == service.events(job_id)
    for place in (0, len(live) // 2, len(live) - 2, len(live) - 1):
        with http.stream("GET", f"/jobs/{job_id}/events", headers={"Last-Event-ID": live[place]["id"]}) as response:
            assert list(sse(response)) == live[place + 1 :]
    problem(http.get(f"/jobs/{job_id}/events", headers={"Last-Event-ID": "yesterday"}), 422)


def test_a_long_history_comes_whole(service: Parts, http: httpx.Client) -> None:
    claim = service.jobs.claim(service.jobs.create(_config()).id, "precompute", "test", 60)
    assert claim is not None
    for number in range(1, 5):
        events = tuple({"type": "warning", "data": {"message": f"{number} {index}"}} for index in range(500))
        service.jobs.beat(claim, 60, Batch(number, events))
    service.jobs.finish(claim, "succeeded")
    with http.stream("GET", f"/jobs/{claim.id}/events") as response:
        assert len(list(sse(response))) == 2003


def _config() -> Any:
    from tests.harness import config

    return config("quick", "precompute")


def test_caches_are_listed(service: Parts, http: httpx.Client) -> None:
    assert http.get("/caches").json() == {"data": []}
    (service.settings.caches / ("a" * 32)).mkdir(parents=True)
    (entry,) = http.get("/caches").json()["data"]
    assert (entry["fingerprint"], entry["complete"], entry["tokens"]) == ("a" * 32, False, None)


def test_a_cache_is_shown_with_its_identity_and_fidelity(service: Parts, http: httpx.Client) -> None:
    folder = make_cache(service.settings.caches)
    row = FidelityRow(1.0, 32, 0.5, 0.001, None, 2.0, 2.5, 0.001, None, 0.01)
    manifest = replace_fidelity(folder, (row,))
    detail = http.get(f"/caches/{folder.name}").json()
    assert (detail["fingerprint"], detail["complete"], detail["tokens"]) == (folder.name, True, manifest.positions)
    assert detail["identity"] == json.loads(json.dumps(manifest.identity.to_json()))
    assert detail["fidelity"] == [asdict(row)]
    (service.settings.caches / ("c" * 32)).mkdir()
    unfinished = http.get(f"/caches/{'c' * 32}").json()
    assert (unfinished["complete"], unfinished["identity"], unfinished["fidelity"]) == (False, None, [])
    assert folder.name not in problem(http.get(f"/caches/{'b' * 32}"), 404).detail
    assert "b" * 31 in problem(http.get(f"/caches/{'b' * 31}"), 404).detail
    assert problem(http.get("/caches/..%2fruns"), 404).status == 404


def test_health_and_readiness(http: httpx.Client) -> None:
    assert http.get("/healthz").json() == {"status": "ok"}
    assert http.get("/readyz").json() == {"status": "ready", "workers": 1}


def test_the_openapi_document_describes_every_answer(http: httpx.Client) -> None:
    document = http.get("/openapi.json").json()
    schemas = document["components"]["schemas"]
    assert {"JobConfig", "Job", "JobList", "CacheList", "ProblemDocument"} <= set(schemas)
    text = json.dumps(document)
    assert "HTTPValidationError" not in text
    for reference in {part.split('"')[0] for part in text.split("#/components/schemas/")[1:]}:
        assert reference in schemas
    for path in document["paths"].values():
        for operation in path.values():
            for status, answer in operation["responses"].items():
                assert answer["content"], (operation["operationId"], status)
    assert all(field.get("description") for field in schemas["TrainConfig"]["properties"].values())


def test_the_api_process_never_imports_torch(tmp_path: Path, text: str) -> None:
    """Not on import, and not while it answers either."""
    code = f"""
import sys, services.api.app
from fastapi.testclient import TestClient
from services.settings import Settings
client = TestClient(services.api.app.create_app(Settings(redis_url="redis://127.0.0.1:1/0", home={str(tmp_path)!r})))
assert client.post("/jobs", json={valid("quick", text)!r}).status_code == 503
assert client.get("/caches").status_code == 200
print([name for name in ("torch", "transformers", "datasets") if name in sys.modules])
"""
    run = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert run.stdout.strip() == "[]", run.stderr


def test_without_redis_the_api_answers_quickly_and_says_so(new_parts: MakeParts, text: str) -> None:
    parts = new_parts()
    parts.start_api()
    job_id = parts.submit("quick")
    os.kill(parts.server.pid, signal.SIGSTOP)  # silent, which is worse than gone
    for method, path, sent in (
        ("GET", "/jobs", None),
        ("GET", f"/jobs/{job_id}", None),
        ("POST", "/jobs", valid("quick", text)),
        ("GET", "/readyz", None),
    ):
        began = time.monotonic()
        response = parts.http.request(method, path, json=sent)
        assert time.monotonic() - began < 3
        assert problem(response, 503).type == "urn:potstill:problem:store-unavailable"
        assert response.headers["retry-after"] == "2"
    assert parts.answers("/healthz"), "the process itself is well"
    _resume(parts)
    assert wait_until(lambda: parts.answers("/readyz"))
    assert parts.http.get(f"/jobs/{job_id}").json()["status"] == "queued"


def _resume(parts: Parts) -> None:
    process = parts.server._process
    assert process is not None
    process.send_signal(signal.SIGCONT)


def test_a_stream_outlives_a_restart_of_redis(new_parts: MakeParts) -> None:
    parts = new_parts()
    parts.start_api()
    job_id = parts.submit("quick")
    received: list[dict[str, str]] = []

    def listen() -> None:
        with httpx.stream("GET", f"{parts.settings.server}/jobs/{job_id}/events", timeout=30) as response:
            received.extend(sse(response))

    listener = threading.Thread(target=listen)
    listener.start()
    time.sleep(0.5)
    os.kill(parts.server.pid, signal.SIGKILL)
    time.sleep(1.0)
    parts.server.ensure()
    parts.jobs.cancel(job_id)
    listener.join(20)
    assert [json.loads(event["data"])["status"] for event in received] == ["queued", "cancelled"]


def test_open_streams_do_not_hold_up_the_shutdown(new_parts: MakeParts) -> None:
    parts = new_parts()
    api = parts.start_api()
    job_id = parts.submit("quick")
    with parts.http.stream("GET", f"/jobs/{job_id}/events") as response:
        next(response.iter_bytes())
        began = time.monotonic()
        api.terminate()
        assert api.wait(10) == 0
        assert time.monotonic() - began < 3


def test_a_job_whose_hint_was_lost_runs_all_the_same(new_parts: MakeParts) -> None:
    parts = new_parts()
    from tests.harness import config

    job_id = parts.jobs.create(config("quick")).id  # and no hint: as if the API had died in between
    parts.jobs.redis.hset(f"kd:job:{job_id}", "dispatched_at", 0)
    parts.start_worker()
    parts.start_api()
    assert parts.wait_for(job_id, "succeeded", "failed").status == "succeeded"
