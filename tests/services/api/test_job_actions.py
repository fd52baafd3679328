"""Actions on jobs over real HTTP: what each status allows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import httpx
import pytest

from bench.support.harness import Parts, make_config
from tests.support.records import ALLOWED_IN
from tests.support.services.api import (
    problem,
    running,
)

MakeParts = Callable[..., Parts]
UNKNOWN = "job_" + "0" * 26


def job_that_is(api: Parts, status: str) -> str:
    """Bring a job to a status by the calls of a client and a worker."""
    if status == "waiting":
        return api.jobs.create(make_config("quick", depends_on=[api.submit("quick")])).id
    if status in ("queued", "paused"):
        job_id = api.submit("quick")
        if status == "paused":
            api.jobs.change("pause", job_id)
        return job_id
    claim = running(api)
    if status in ("cancelling", "pausing"):
        api.jobs.change("cancel" if status == "cancelling" else "pause", claim.id)
    if status in ("succeeded", "failed"):
        api.jobs.finish(
            claim,
            status,
            None if status == "succeeded" else {"type": "x", "detail": "x", "remedy": ""},
        )
    if status == "cancelled":
        api.jobs.change("cancel", claim.id)
        api.jobs.release(claim)
    return claim.id


STATUSES = [
    *(
        "waiting",
        "queued",
        "running",
        "cancelling",
        "pausing",
        "paused",
        "succeeded",
        "failed",
        "cancelled",
    ),
]
SO_ALREADY = {
    "cancel": {"cancelling", "cancelled"},
    "pause": {"pausing", "paused"},
    "resume": {"waiting", "queued", "running"},
    "retry": {"waiting", "queued", "running"},
}


@pytest.mark.parametrize("status", STATUSES)
@pytest.mark.parametrize("action", ["cancel", "pause", "resume", "retry"])
def test_an_action_does_what_the_table_says(
    api: Parts, http: httpx.Client, action: Any, status: str
) -> None:
    job_id = job_that_is(api, status)
    assert api.job(job_id).status == status
    shown = http.get(f"/jobs/{job_id}").json()["actions"]
    assert set(shown) == {name for name, allowed in ALLOWED_IN.items() if status in allowed}
    answer = http.post(f"/jobs/{job_id}/{action}")
    if status in ALLOWED_IN[action]:
        assert answer.status_code == 202, answer.text
        assert answer.json()["status"] != status
        again = http.post(f"/jobs/{job_id}/{action}")
        assert (
            again.status_code in (200, 409)
            if action in ("resume", "retry")
            else again.status_code == 200
        )
    elif answer.status_code == 200:
        assert status in SO_ALREADY[action]
        assert answer.json()["status"] == status
    else:
        document = problem(answer, 409, "invalid-transition")
        assert document.job_status == status
        assert document.allowed == sorted(
            name for name, allowed in ALLOWED_IN.items() if status in allowed
        )
        assert api.job(job_id).status == status


@pytest.mark.parametrize("status", STATUSES)
def test_only_what_has_ended_is_deleted(api: Parts, http: httpx.Client, status: str) -> None:
    job_id = job_that_is(api, status)
    folder = api.settings.run_dir(job_id)
    folder.mkdir(parents=True)
    answer = http.delete(f"/jobs/{job_id}")
    if status not in ALLOWED_IN["delete"]:
        problem(answer, 409, "invalid-transition")
        return
    assert (answer.status_code, answer.content) == (204, b"")
    problem(http.get(f"/jobs/{job_id}"), 404)
    problem(http.delete(f"/jobs/{job_id}"), 404)
    assert job_id not in {job["id"] for job in http.get("/jobs").json()["data"]}
    assert folder.exists(), "its files stay"


def test_files_go_where_that_is_asked_for(api: Parts, http: httpx.Client) -> None:
    job_id = job_that_is(api, "succeeded")
    folder = api.settings.run_dir(job_id)
    (folder / "checkpoints").mkdir(parents=True)
    (folder / "log.txt").write_text("x")
    assert http.delete(f"/jobs/{job_id}", params={"artifacts": True}).status_code == 204
    assert not folder.exists()


def test_a_resumed_and_a_retried_job_are_announced(api: Parts, http: httpx.Client) -> None:
    hints = "kd:celery:train"
    for status, action in (("paused", "resume"), ("failed", "retry")):
        job_id = job_that_is(api, status)
        api.jobs.redis.delete(hints)
        assert http.post(f"/jobs/{job_id}/{action}").json()["status"] == "queued"
        assert job_id in str(api.jobs.redis.lrange(hints, 0, -1)), (
            "no need to wait for the reconciler"
        )
