"""The operator's view of the real service: one request in logs and metrics."""

from __future__ import annotations

import json
import re
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from bench.support.harness import Parts, make_body
from bench.support.waiting import wait_until
from services.api.answers.prometheus import METRICS

CELERY_S_FAREWELL = "worker: Warm shutdown (MainProcess)"


@pytest.fixture(scope="module")
def observed(_server_binary: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Parts]:
    """API and worker that log in JSON."""
    inputs = tmp_path_factory.mktemp("inputs")
    parts = Parts(
        tmp_path_factory.mktemp("observed"),
        log_format="json",
        data_roots=(inputs,),
    )
    try:
        parts.start_api()
        parts.start("services.worker")
        wait_until(parts.jobs.list_workers)
        yield parts
    finally:
        parts.close()


@pytest.fixture(scope="module")
def job(observed: Parts) -> dict[str, Any]:
    """An ended job, posted by a request with its own id."""
    (folder,) = observed.settings.data_roots
    (folder / "text.txt").write_text("It is a truth universally acknowledged.\n" * 50)
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(b"x")
    wanted = make_body("quick", data={"train": f"{folder}/text.txt"})
    wanted["student"]["init"]["tokenizer"] = str(folder)
    answer = observed.http.post("/jobs", json=wanted, headers={"X-Request-ID": "mine-1"})
    assert answer.status_code == 202, answer.text
    assert answer.headers["x-request-id"] == "mine-1"
    observed.wait_for(answer.json()["id"], "succeeded", "failed")
    posted: dict[str, Any] = answer.json()
    return posted


def lines(parts: Parts, part: str) -> list[dict[str, Any]]:
    """Every log line of a process, each of which must be JSON."""
    (file,) = parts.settings.home.joinpath("logs").glob(f"services.{part}-*.log")
    # Celery writes its farewell past all loggers.
    return [
        json.loads(line)
        for line in file.read_text().splitlines()
        if line not in ("", CELERY_S_FAREWELL)
    ]


def test_a_request_is_found_in_the_log_of_the_api_and_of_the_worker(
    observed: Parts, job: dict[str, Any]
) -> None:
    assert job["request_id"] == "mine-1"
    (posted,) = (
        line
        for line in lines(observed, "api")
        if line.get("request_id") == "mine-1" and "status" in line
    )
    assert (posted["logger"], posted["msg"], posted["status"]) == (
        "potstill.http",
        "POST /jobs",
        202,
    )
    of_the_job = [line for line in lines(observed, "worker") if line.get("job_id") == job["id"]]
    assert of_the_job, "the worker tells of the job"
    assert {(line["request_id"], line["attempt"]) for line in of_the_job} == {("mine-1", 1)}
    assert all(line["fence"] >= 1 for line in of_the_job)


def test_uvicorn_and_celery_speak_in_the_same_form(observed: Parts, job: dict[str, Any]) -> None:
    assert "uvicorn.error" in {line["logger"] for line in lines(observed, "api")}
    assert any(line["logger"].startswith("celery") for line in lines(observed, "worker"))


def test_a_problem_bears_the_id_of_its_request(observed: Parts) -> None:
    for path, status in (("/jobs/job_none", 404), ("/nothing", 404), ("/jobs?limit=0", 422)):
        answer = observed.http.get(path, headers={"X-Request-ID": "mine-2"})
        named = answer.json()["request_id"]
        assert (answer.status_code, named, answer.headers["x-request-id"]) == (
            status,
            "mine-2",
            "mine-2",
        )


def test_the_numbers_tell_of_the_job_and_of_the_requests(
    observed: Parts, job: dict[str, Any]
) -> None:
    wait_until(lambda: 'kd_workers{state="idle"} 1.0' in observed.http.get("/metrics").text)
    answer = observed.http.get("/metrics")
    assert answer.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    samples = [
        one for family in text_string_to_metric_families(answer.text) for one in family.samples
    ]
    told = {(one.name, *sorted(one.labels.items())): one.value for one in samples}
    assert told["kd_jobs_total", ("kind", "train"), ("status", "succeeded")] == 1
    assert (
        told["kd_http_requests_total", ("method", "POST"), ("route", "/jobs"), ("status", "202")]
        == 1
    )
    assert told["kd_store_up",] == 1
    assert told["kd_reconciler_last_run_timestamp_seconds",] == pytest.approx(
        observed.jobs.read_clock_ms() / 1000, abs=30
    )
    assert job["id"] not in answer.text
    assert observed.http.get("/v1/metrics").status_code == 200


def test_routes_are_told_by_their_template(observed: Parts, job: dict[str, Any]) -> None:
    paths = httpx.get(f"{observed.settings.server}/openapi.json").json()["paths"]
    for path in paths:
        for prefix in ("", "/v1"):
            if not path.endswith("/stream"):
                observed.http.get(prefix + re.sub(r"\{\w+\}", job["id"], path))
    routes = set(
        re.findall(
            r'kd_http_requests_total\{[^}]*route="([^"]*)"', observed.http.get("/metrics").text
        )
    )
    assert routes <= {*paths, "(none)", "/openapi.json"}
    assert {"/jobs", "/jobs/{job_id}", "/healthz", "/metrics"} <= routes


def test_open_streams_are_counted(observed: Parts) -> None:
    job_id = observed.submit("endless")
    observed.wait_for(job_id, "running")
    with observed.http.stream("GET", f"/jobs/{job_id}/events/stream", timeout=10) as stream:
        assert stream.status_code == 200
        told = stream.iter_lines()  # kept: deleting it would close the stream
        assert next(told)
        assert "kd_sse_clients 1.0" in observed.http.get("/metrics").text
    observed.jobs.change("cancel", job_id)
    observed.wait_for(job_id, "cancelled")
    wait_until(lambda: "kd_sse_clients 0.0" in observed.http.get("/metrics").text)


def test_every_metric_of_the_page_is_described(observed: Parts, job: dict[str, Any]) -> None:
    families = text_string_to_metric_families(observed.http.get("/metrics").text)
    told = {family.name + ("_total" if family.type == "counter" else "") for family in families}
    assert told - METRICS.keys() == set()


def test_a_key_that_a_client_shows_or_mislays_is_in_no_log(observed: Parts) -> None:
    key = "kd_" + "canary" * 8
    wrong: list[dict[str, Any]] = [
        {"url": f"/jobs/{key}"},
        {"url": "/nothing", "params": {"key": key}},
    ]
    for request in wrong:
        answer = observed.http.get(
            **request, headers={"Authorization": f"Bearer {key}", "X-Request-ID": "mine-3"}
        )
        assert answer.status_code == 404

    def told() -> list[str]:
        return [
            line["msg"] for line in lines(observed, "api") if line.get("request_id") == "mine-3"
        ]

    wait_until(lambda: len(told()) == len(wrong))  # the answer leaves before its line is written
    assert told() == ["GET /jobs/kd_***", "GET /nothing"]
    logs = observed.settings.home / "logs"
    assert not [file for file in logs.iterdir() if "canary" in file.read_text()]


def test_the_password_of_redis_is_in_no_log(new_parts: Callable[..., Parts]) -> None:
    parts = new_parts(log_format="json")
    api = parts.start_api()
    worker = parts.start("services.worker")
    wait_until(parts.jobs.list_workers)
    parts.server.stop()
    log = parts.settings.home / "logs" / "services.api-0.log"
    wait_until(lambda: "job store" in log.read_text())
    assert parts.http.get("/jobs").status_code == 503
    for process in (worker, api):
        process.send_signal(signal.SIGTERM)
    password = (parts.settings.home / "redis" / "password").read_text()
    wait_until(lambda: api.poll() is not None)
    for part in ("api", "worker"):
        assert lines(parts, part)
        assert not [line for line in lines(parts, part) if password in str(line)]
