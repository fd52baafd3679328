"""Caches, workers, models, health and metrics over HTTP."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from threading import Thread

import pytest

from bench.support.harness import Parts, make_config
from bench.support.small.caches import make_cache
from bench.support.waiting import wait_until
from cache.manifest import FidelityRow
from cache.reading.usage import exclude_readers, held, locate_use
from cache.store import replace_fidelity
from cache.writing.writer import open_writer
from kd.client.wire.service import Device, WorkerState
from services.store.jobs.records import make_job_id
from tests.support.services.api import UNLIMITED, problem, running, tell

MakeParts = Callable[..., Parts]


@pytest.fixture
def api(serving_parts: Parts) -> Parts:
    serving_parts.jobs.redis.flushall()
    return serving_parts


# ---------------------------------------------------------------------- caches


def test_a_cache_is_listed_and_shown_with_its_identity_and_fidelity(api: Parts) -> None:
    folder = make_cache(api.settings.caches)
    row = FidelityRow(1.0, 32, 0.5, 0.001, None, 2.0, 2.5, 0.001, None, 0.01)
    manifest = replace_fidelity(folder, (row,))
    assert folder.name in {entry["fingerprint"] for entry in api.http.get("/caches").json()["data"]}
    detail = api.http.get(f"/caches/{folder.name}").json()
    assert (detail["fingerprint"], detail["complete"], detail["tokens"]) == (
        folder.name,
        True,
        manifest.positions,
    )
    assert detail["identity"] == json.loads(json.dumps(manifest.identity.to_json()))
    assert detail["fidelity"] == [asdict(row)]
    (api.settings.caches / ("c" * 32)).mkdir()
    unfinished = api.http.get(f"/caches/{'c' * 32}").json()
    assert (unfinished["complete"], unfinished["identity"], unfinished["fidelity"]) == (
        False,
        None,
        [],
    )
    assert folder.name not in problem(api.http.get(f"/caches/{'b' * 32}"), 404).detail
    assert "b" * 31 in problem(api.http.get(f"/caches/{'b' * 31}"), 404).detail
    problem(api.http.get("/caches/..%2fruns"), 404)


def test_a_cache_is_deleted(api: Parts) -> None:
    folder = make_cache(api.settings.caches)
    answer = api.http.delete(f"/caches/{folder.name}")
    assert (answer.status_code, answer.content) == (204, b"")
    assert not folder.exists()
    problem(api.http.delete(f"/caches/{folder.name}"), 404)
    problem(api.http.delete(f"/caches/{'b' * 31}"), 404)


@pytest.mark.parametrize("how", ["names it", "made it", "plans it"])
def test_a_cache_that_an_open_job_uses_stays(api: Parts, how: str) -> None:
    folder = make_cache(api.settings.caches)
    if how == "names it":
        job_id = api.jobs.create(
            make_config("quick", loss={"alpha": 0.5}, cache={"fingerprint": folder.name})
        ).id
    else:
        claim = running(api)
        events = {"made it": ("cache", {"fingerprint": folder.name, "bytes_per_token": 1.0})}
        tell(api, claim, events.get(how, ("plan", {"fingerprint": folder.name})))
        job_id = claim.id
    assert job_id in problem(api.http.delete(f"/caches/{folder.name}"), 409, "in-use").detail
    assert folder.exists()
    if how == "names it":
        api.jobs.change("cancel", job_id)
    else:
        api.jobs.finish(claim, "succeeded")
    assert api.http.delete(f"/caches/{folder.name}").status_code == 204


def test_a_cache_that_is_being_captured_stays(api: Parts) -> None:
    from cache.store import read_manifest

    folder = make_cache(api.settings.caches)
    with open_writer(api.settings.caches, read_manifest(folder).identity):
        problem(api.http.delete(f"/caches/{folder.name}"), 409, "in-use")
    assert api.http.delete(f"/caches/{folder.name}").status_code == 204


def test_a_job_is_refused_where_its_cache_is_removed_while_it_is_submitted(api: Parts) -> None:
    """The removal holds off the check of the job, as a record holds off the removal."""
    folder = make_cache(api.settings.caches)
    body = {"kind": "verify", "cache": {"fingerprint": folder.name}}
    answers = []
    with exclude_readers(folder):
        sender = Thread(target=lambda: answers.append(api.http.post("/jobs", json=body)))
        sender.start()
        sender.join(0.5)
        assert answers == [], "it waits for the removal"
        folder.rename(folder.with_name(".tmp-" + folder.name))
        locate_use(folder).unlink(missing_ok=True)
    sender.join()
    assert f"there is no cache {folder.name}" in problem(answers[0], 422).model_dump_json()
    assert api.jobs.count_statuses()["queued"] == 0


def test_a_cache_that_a_run_reads_stays(api: Parts) -> None:
    folder = make_cache(api.settings.caches)
    with held(folder):
        assert "read" in problem(api.http.delete(f"/caches/{folder.name}"), 409, "in-use").detail
    assert api.http.delete(f"/caches/{folder.name}").status_code == 204
    assert not locate_use(folder).exists()


def test_verifying_is_a_job(api: Parts) -> None:
    folder = make_cache(api.settings.caches)
    answer = api.http.post(f"/caches/{folder.name}/verify", headers={"Idempotency-Key": "once"})
    job = answer.json()
    assert (answer.status_code, job["kind"], job["stage"]) == (202, "verify", "precompute")
    assert answer.headers["location"] == f"/jobs/{job['id']}"
    assert (
        api.http.post(f"/caches/{folder.name}/verify", headers={"Idempotency-Key": "once"}).json()[
            "id"
        ]
        == job["id"]
    )
    problem(api.http.delete(f"/caches/{folder.name}"), 409, "in-use")
    (api.settings.caches / ("d" * 32)).mkdir()
    problem(api.http.post(f"/caches/{'d' * 32}/verify"), 409, "not-sealed")
    problem(api.http.post(f"/caches/{'e' * 32}/verify"), 404)


# ---------------------------------------------------------------------- the service


def test_workers_are_listed_with_their_devices(api: Parts) -> None:
    assert api.http.get("/workers").json() == {"data": []}
    claim = running(api)
    device = Device(kind="cuda", name="H200", index="0", count=1, memory_bytes=1 << 37)
    now = datetime.now(UTC)
    api.jobs.show_worker(
        WorkerState(id="a:1", stages=["train"], device=device, job=claim.id, beat_at=now), 30
    )
    api.jobs.show_worker(WorkerState(id="b:2", stages=["precompute"]), 30)
    busy, idle = api.http.get("/workers").json()["data"]
    assert (busy["id"], busy["busy"], busy["job"], busy["device"]["name"]) == (
        "a:1",
        True,
        claim.id,
        "H200",
    )
    assert 0 <= busy["beat_age_seconds"] < 10
    assert (idle["id"], idle["busy"], idle["job"], idle["beat_age_seconds"]) == (
        "b:2",
        False,
        None,
        None,
    )


def test_a_plan_warns_if_no_worker_fits(api: Parts) -> None:
    job = {
        "kind": "verify",
        "cache": {"fingerprint": make_cache(api.settings.caches).name},
        "resources": {"gpus": 1},
    }
    assert "there is none" in api.http.post("/jobs/validate", json=job).json()["warnings"][0]
    api.jobs.show_worker(WorkerState(id="a:1", stages=["precompute"]), 30)
    assert (
        "has the resources that it asks for"
        in api.http.post("/jobs/validate", json=job).json()["warnings"][0]
    )
    device = Device(kind="cuda", count=1, memory_bytes=1 << 37)
    api.jobs.show_worker(WorkerState(id="b:1", stages=["precompute"], device=device), 30)
    assert api.http.post("/jobs/validate", json=job).json()["warnings"] == []


def test_health_and_version_say_little(api: Parts) -> None:
    for prefix in ("", "/v1"):
        assert api.http.get(f"{prefix}/healthz").json() == {"status": "ok"}
        wait_until(
            lambda prefix=prefix: api.answers(f"{prefix}/readyz"), 10
        )  # the reconciler's key was flushed
        assert api.http.get(f"{prefix}/readyz").json() == {"status": "ready", "warnings": []}
        assert api.http.get(f"{prefix}/version").json()["name"] == "potstill"


def test_a_store_that_has_lost_its_jobs_is_told_by_the_run_folders(
    new_parts: Callable[..., Parts],
) -> None:
    parts = new_parts()
    parts.start_api()
    wait_until(lambda: parts.answers("/readyz"))
    for _ in range(2):
        (parts.settings.runs / make_job_id()).mkdir(parents=True)
    (told,) = parts.http.get("/readyz").json()["warnings"]
    assert "2 run folders of jobs" in told and "kd jobs adopt" in told
    assert told in parts.http.get("/health").json()["problems"]
    parts.jobs.create(make_config("quick"))
    assert parts.http.get("/readyz").json()["warnings"] == []


def test_a_service_without_a_running_reconciler_is_not_ready(api: Parts) -> None:
    wait_until(lambda: api.answers("/readyz"))
    api.jobs.redis.config_set("slowlog-max-len", "128")
    api.jobs.redis.client_pause(0)
    deadline = time.monotonic() + 10
    while (
        time.monotonic() < deadline
    ):  # retried, because a round of the reconciler may write the key again
        api.jobs.redis.set("kd:reconciler", api.jobs.read_clock_ms() / 1000 - 61)
        answer = api.http.get("/readyz")
        if answer.status_code == 503:
            break
    document = problem(answer, 503, "reconciler-stopped")
    assert answer.headers["retry-after"]
    assert "/" not in document.detail, "a caller without a key sees no path"


def test_the_record_format_is_that_of_the_script() -> None:
    import re

    from services.api.routes.operations import RECORD_FORMAT
    from services.store.jobs.script import SCRIPT

    found = re.search(r"local FORMAT = '(\d+)'", SCRIPT)
    assert found is not None
    assert int(found[1]) == RECORD_FORMAT


def test_models_are_the_operator_s_list(new_parts: MakeParts, tmp_path: Path) -> None:
    listed = tmp_path / "models.txt"
    listed.write_text("# ours\nHuggingFaceTB/SmolLM2-135M@abc123\n/models/own\n")
    parts = new_parts(
        **UNLIMITED | {"model_allow_list": listed, "quota_open_jobs": 7, "quota_record_bytes": 8000}
    )
    parts.start_api()
    found = parts.http.get("/models").json()
    assert found["restricted"] is True
    assert found["data"] == [
        {"model": "HuggingFaceTB/SmolLM2-135M", "revision": "abc123"},
        {"model": "/models/own", "revision": None},
    ]
    assert (found["limits"]["open_jobs"], found["limits"]["record_bytes"]) == (7, 8000)


def test_any_model_may_be_named_without_a_list(api: Parts) -> None:
    found = api.http.get("/models").json()
    assert (found["restricted"], found["data"]) == (False, [])


def test_numbers_are_served_for_prometheus(api: Parts) -> None:
    api.http.get("/jobs/job_x")
    answer = api.http.get("/metrics")
    assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
    assert 'kd_http_requests_total{method="GET",route="/jobs/{job_id}",status="404"}' in answer.text
    assert "kd_store_up 1.0" in answer.text
