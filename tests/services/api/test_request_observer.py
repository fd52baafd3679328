"""The outermost middleware, around a small application: request ids, log lines and metrics."""

from __future__ import annotations

import json
import logging
import re
import time
from collections.abc import Iterator
from typing import Any

import pytest
from fastapi import APIRouter, FastAPI
from fastapi.responses import StreamingResponse
from fastapi.testclient import TestClient

from services.api.guards.request_metrics import BUCKETS, RequestMetrics
from services.api.guards.request_observer import RequestObserver
from services.process.logs import make_formatter, request_id

UNFORESEEN = "unforeseen"


def make_app(request_metrics: RequestMetrics) -> FastAPI:
    app = FastAPI()
    router = APIRouter()

    @router.get("/jobs/{job_id}")
    def job(job_id: str) -> dict[str, str]:
        logging.getLogger("potstill.inside").warning("asked for")
        return {"id": job_id, "request_id": request_id.get()}

    @router.delete("/jobs/{job_id}", status_code=204)
    def delete(job_id: str) -> None:
        if job_id == UNFORESEEN:
            raise RuntimeError(job_id)

    @router.get("/stream")
    def stream() -> StreamingResponse:
        def events() -> Iterator[bytes]:
            yield f"data: {request_metrics.streams}\n\n".encode()

        return StreamingResponse(events(), media_type="text/event-stream")

    @router.get("/healthz")
    def healthz() -> None: ...

    app.include_router(router)
    app.include_router(router, prefix="/v1")
    app.add_middleware(RequestObserver, request_metrics=request_metrics)
    return app


@pytest.fixture
def request_metrics() -> RequestMetrics:
    return RequestMetrics()


@pytest.fixture
def client(request_metrics: RequestMetrics) -> Iterator[TestClient]:
    with TestClient(make_app(request_metrics), raise_server_exceptions=False) as made:
        yield made


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture) -> Iterator[list[dict[str, Any]]]:
    """The log lines of the requests, parsed from JSON."""
    written: list[dict[str, Any]] = []

    class Writer(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            written.append(json.loads(self.format(record)))

    writer = Writer()
    writer.setFormatter(make_formatter("json", (), {}))
    logger = logging.getLogger("potstill")
    logger.addHandler(writer)
    caplog.set_level(logging.DEBUG, "potstill")
    yield written
    logger.removeHandler(writer)


def test_a_request_has_one_id_in_the_answer_in_the_log_and_in_the_code(
    client: TestClient, lines: list[dict[str, Any]]
) -> None:
    answer = client.get("/jobs/job_1", headers={"X-Request-ID": "mine-1"})
    assert answer.headers["x-request-id"] == "mine-1"
    assert answer.json()["request_id"] == "mine-1"
    assert [(line["logger"], line["request_id"]) for line in lines] == [
        ("potstill.inside", "mine-1"),
        ("potstill.http", "mine-1"),
    ]


def test_an_endless_path_costs_little_time_and_makes_a_short_line(
    client: TestClient, lines: list[dict[str, Any]]
) -> None:
    before = time.process_time()
    assert client.get("/" + "a." * 30_000).status_code == 404
    assert time.process_time() - before < 5
    assert lines[-1]["msg"].startswith("GET /a.a.") and len(lines[-1]["msg"]) < 2100


def test_a_request_without_a_well_formed_id_gets_a_new_one(client: TestClient) -> None:
    answers = [
        client.get("/jobs/job_1", headers={"X-Request-ID": bad} if bad else {})
        for bad in ("", "a b", "{}")
    ]
    ids = [answer.headers["x-request-id"] for answer in answers]
    assert len(set(ids)) == 3
    assert all(re.fullmatch("req_[0-9a-f]{32}", one) for one in ids)


def test_requests_are_counted_by_template_and_never_by_path(
    client: TestClient, request_metrics: RequestMetrics
) -> None:
    for number in range(5):
        client.get(f"/jobs/job_{number}")
        client.get(f"/nothing/{number}")
    client.delete("/v1/jobs/job_1")
    client.post("/jobs/job_1")
    client.request("BREW", "/jobs/job_1")
    client.delete(f"/jobs/{UNFORESEEN}")
    samples = list(request_metrics.read_samples())
    counts = {
        tuple(labels.values()): value
        for name, labels, value in samples
        if name == "kd_http_requests_total"
    }
    assert counts == {
        ("GET", "/jobs/{job_id}", "200"): 5,
        ("GET", "(none)", "404"): 5,
        ("DELETE", "/jobs/{job_id}", "204"): 1,
        ("POST", "/jobs/{job_id}", "405"): 1,
        ("OTHER", "/jobs/{job_id}", "405"): 1,
        ("DELETE", "/jobs/{job_id}", "500"): 1,
    }
    route = {"method": "GET", "route": "/jobs/{job_id}"}
    name = "kd_http_request_duration_seconds"
    assert (f"{name}_bucket", route | {"le": "+Inf"}, 5) in samples
    (total,) = (value for *of, value in samples if of == [f"{name}_sum", route])
    assert total > 0


def test_an_open_stream_is_counted_while_it_is_open(
    client: TestClient, request_metrics: RequestMetrics
) -> None:
    assert client.get("/stream").text == "data: 1\n\n"
    assert request_metrics.streams == 0


def test_changes_and_refusals_are_logged_polling_only_for_debugging_and_health_not_at_all(
    client: TestClient, lines: list[dict[str, Any]]
) -> None:
    client.get("/v1/healthz")
    client.get("/healthz")
    client.get("/stream")
    client.get("/nothing")
    client.delete("/jobs/job_1")
    client.delete(f"/jobs/{UNFORESEEN}")
    logged = [(line["level"], line["msg"], line["status"]) for line in lines]
    assert logged == [
        ("debug", "GET /stream", 200),
        ("info", "GET /nothing", 404),
        ("info", "DELETE /jobs/job_1", 204),
        ("info", f"DELETE /jobs/{UNFORESEEN}", 500),
    ]
    assert all(0 < line["seconds"] < 10 for line in lines)


def test_a_duration_falls_into_the_first_bucket_that_holds_it() -> None:
    requests = RequestMetrics()
    for seconds in (0.0, BUCKETS[0], BUCKETS[0] + 1e-9, BUCKETS[-1] + 1):
        requests.add("GET", "/jobs", 200, seconds)
    counts = {labels["le"]: value for _, labels, value in requests.read_samples() if "le" in labels}
    assert counts[str(BUCKETS[0])] == 2
    assert counts[str(BUCKETS[1])] == counts[str(BUCKETS[-1])] == 3
    assert counts["+Inf"] == 4
