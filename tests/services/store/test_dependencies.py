"""Jobs that wait for jobs, and jobs that have a deadline."""

from __future__ import annotations

import time
from datetime import UTC, datetime, timedelta

import pytest

from bench.support.harness import Parts, make_config
from kd.client.wire.jobs import Job
from services.store.connection import connect_redis
from services.store.jobs.leases import EventBatch
from services.store.jobs.records import build_fields, make_job_id
from services.store.jobs.store import JobStore
from tests.support.records import (
    ERROR,
    HOUR,
    finished,
    job_of,
    let_pass,
    queued,
    running,
    status,
)

# ---------------------------------------------------------------------- jobs that wait for jobs


def test_a_chain_runs_one_after_the_other(jobs: JobStore) -> None:
    first = queued(jobs)
    second = queued(jobs, depends_on=[first])
    third = queued(jobs, depends_on=[second, first, second])
    assert (status(jobs, second), status(jobs, third)) == ("waiting", "waiting")
    job = job_of(jobs, third)
    assert (job.reason, job.waits_for, job.depends_on) == (
        "dependencies",
        sorted([first, second]),
        [second, first],
    )
    assert (job.queue_position, job.queued_at) == (None, None)
    for ready, blocked in ((first, [second, third]), (second, [third]), (third, [])):
        assert [status(jobs, job_id) for job_id in blocked] == ["waiting"] * len(blocked)
        claim = jobs.claim_next("train", "w", 5)
        assert claim.id == ready
        assert jobs.claim_next("train", "w", 5) is None
        jobs.finish(claim, "succeeded")
    assert jobs.redis.keys("kd:job:*:waits") == jobs.redis.keys("kd:job:*:dependents") == []


def test_a_diamond_waits_for_both_sides(jobs: JobStore) -> None:
    top = queued(jobs)
    left, right = (queued(jobs, depends_on=[top]) for _ in range(2))
    bottom = queued(jobs, depends_on=[left, right])
    jobs.finish(jobs.claim_next("train", "w", 5), "succeeded")
    sides = [jobs.claim_next("train", "w", 5) for _ in range(2)]
    assert [claim.id for claim in sides] == [left, right]
    version = jobs.get(bottom).version
    jobs.finish(sides[0], "succeeded")
    job = job_of(jobs, bottom)
    assert (job.status, job.waits_for) == ("waiting", [right])
    assert job.version > version, "who asks with an ETag hears of it"
    jobs.finish(sides[1], "succeeded")
    assert (status(jobs, bottom), job_of(jobs, bottom).reason) == ("queued", None)


@pytest.mark.parametrize("end", ["failed", "cancelled"])
def test_all_that_hangs_on_a_job_that_does_not_succeed_is_cancelled(
    jobs: JobStore, end: str
) -> None:
    top = running(jobs)
    other = running(jobs)
    left = queued(jobs, depends_on=[top.id])
    right = queued(jobs, depends_on=[top.id, other.id])
    bottom = queued(jobs, depends_on=[left, right])
    apart = queued(jobs, depends_on=[other.id])
    jobs.change("pause", right)
    if end == "failed":
        jobs.finish(top, "failed", ERROR)
    else:
        jobs.change("cancel", top.id)
        jobs.release(top)
    for job_id in (left, right, bottom):
        job = job_of(jobs, job_id)
        assert (job.status, job.reason, job.error.type) == (
            "cancelled",
            "dependency_failed",
            "dependency_failed",
        )
        statuses = [event.data["status"] for event in jobs.read_events(job_id, types=["status"])]
        assert statuses.count("cancelled") == 1, "told once, however many ways lead to it"
    what = "failed" if end == "failed" else "was cancelled"
    assert job_of(jobs, left).error.detail == f"{top.id}, which this job depends on, {what}."
    assert status(jobs, apart) == "waiting"
    jobs.finish(other, "succeeded")
    assert (status(jobs, apart), status(jobs, right)) == ("queued", "cancelled")


@pytest.mark.long
def test_a_long_chain_is_cancelled_whole(parts: Parts) -> None:
    """The chain is longer than Lua's stack is deep."""
    jobs = JobStore(connect_redis(parts.server.url, timeout=60))
    fields = build_fields(make_config("quick"), 3)
    ids = [make_job_id() for _ in range(9000)]
    pipeline = jobs.redis.pipeline(transaction=False)
    for before, job_id in zip([None, *ids[:-1]], ids, strict=True):
        fields["depends_on"] = f'["{before}"]' if before else "[]"
        flat = [text for pair in fields.items() for text in pair]
        jobs._script(args=["create", job_id, "local", 1, "", "", "", "", *flat], client=pipeline)
    pipeline.execute()
    assert jobs.count_statuses()["waiting"] == 8999
    jobs.change("cancel", ids[0])
    assert {name: number for name, number in jobs.count_statuses().items() if number} == {
        "cancelled": 9000
    }


@pytest.mark.parametrize("end", ["succeeded", "failed", "cancelled", "deleted"])
def test_a_job_that_has_ended_is_not_waited_for(jobs: JobStore, end: str) -> None:
    other = finished(jobs, "succeeded" if end in ("succeeded", "deleted") else "failed")
    if end == "cancelled":
        jobs.change("retry", other)
        jobs.change("cancel", other)
    if end == "deleted":
        jobs.change("delete", other)
    made = jobs.create(make_config("quick", depends_on=[other]))
    if end == "succeeded":
        assert status(jobs, made.id) == "queued"
    else:
        assert (made.outcome, made.id, made.detail) == (
            "bad_dependency",
            other,
            "unknown" if end == "deleted" else end,
        )


def test_a_job_whose_dependency_failed_goes_on_when_both_are_retried(jobs: JobStore) -> None:
    first = running(jobs)
    second = queued(jobs, depends_on=[first.id])
    jobs.finish(first, "failed", ERROR)
    assert vars(jobs.change("retry", second)) == {
        "outcome": "done",
        "status": "cancelled",
        "allowed": (),
        "open_jobs": 0,
    }
    assert job_of(jobs, second).error.type == "dependency_failed", (
        "for the job that it needs has still failed"
    )
    jobs.change("retry", first.id)
    assert vars(jobs.change("retry", second)) == {
        "outcome": "done",
        "status": "waiting",
        "allowed": (),
        "open_jobs": 0,
    }
    assert job_of(jobs, second).error is None
    jobs.finish(jobs.claim(first.id, "train", "w", 5), "succeeded")
    assert status(jobs, second) == "queued"


def test_a_dependency_that_succeeded_after_all_is_no_obstacle(jobs: JobStore) -> None:
    first = running(jobs)
    second = queued(jobs, depends_on=[first.id])
    jobs.finish(first, "failed", ERROR)
    jobs.change("retry", first.id)
    jobs.finish(jobs.claim(first.id, "train", "w", 5), "succeeded")
    jobs.change("delete", first.id)
    assert vars(jobs.change("retry", second)) == {
        "outcome": "done",
        "status": "queued",
        "allowed": (),
        "open_jobs": 0,
    }


def test_a_dependency_that_never_succeeded_and_was_deleted_is_missed(jobs: JobStore) -> None:
    first = running(jobs)
    second = queued(jobs, depends_on=[first.id])
    third = queued(jobs, depends_on=[first.id])
    jobs.change("cancel", third)
    jobs.finish(first, "failed", ERROR)
    jobs.change("delete", first.id)
    for job_id in (second, third):
        assert vars(jobs.change("retry", job_id)) == {
            "outcome": "done",
            "status": "cancelled",
            "allowed": (),
            "open_jobs": 0,
        }
        assert "was deleted" in job_of(jobs, job_id).error.detail
        assert jobs.change("delete", job_id).outcome == "done"
    assert jobs.redis.keys("kd:job:*") == []


def test_a_paused_job_waits_on_when_it_is_resumed(jobs: JobStore) -> None:
    first = running(jobs)
    early = queued(jobs, depends_on=[first.id])
    late = queued(jobs, depends_on=[first.id])
    for job_id in (early, late):
        jobs.change("pause", job_id)
        assert job_of(jobs, job_id).reason is None
    assert vars(jobs.change("resume", early)) == {
        "outcome": "done",
        "status": "waiting",
        "allowed": (),
        "open_jobs": 0,
    }
    jobs.finish(first, "succeeded")
    assert (status(jobs, early), status(jobs, late)) == ("queued", "paused"), (
        "a pause is ended by a resume only"
    )
    assert vars(jobs.change("resume", late)) == {
        "outcome": "done",
        "status": "queued",
        "allowed": (),
        "open_jobs": 0,
    }


# ---------------------------------------------------------------------- deadlines


def run_out(jobs: JobStore, job_id: str) -> Job:
    """The job after its deadline."""
    let_pass(jobs, "deadlines", job_id)
    jobs.due()
    return job_of(jobs, job_id)


@pytest.mark.parametrize("place_", ["waiting", "queued"])
def test_a_job_that_does_not_run_fails_at_its_deadline(jobs: JobStore, place_: str) -> None:
    needs = [running(jobs).id] if place_ == "waiting" else []
    job_id = queued(jobs, deadline_seconds=HOUR, depends_on=needs)
    after = queued(jobs, depends_on=[job_id])
    assert (jobs.due(), status(jobs, job_id)) == ([], place_)
    job = run_out(jobs, job_id)
    assert (job.status, job.reason, job.error.type) == (
        "failed",
        "deadline_exceeded",
        "deadline_exceeded",
    )
    assert (job.deadline_at, job.queue_position) == (None, None)
    assert status(jobs, after) == "cancelled"


@pytest.mark.parametrize("ending", ["release", "advance", "die", "expire"])
@pytest.mark.parametrize("pausing", [False, True])
def test_a_run_is_stopped_at_its_deadline_and_then_the_job_fails(
    jobs: JobStore, ending: str, pausing: bool
) -> None:
    claim = running(jobs, "distill", deadline_seconds=HOUR)
    if pausing:
        jobs.change("pause", claim.id)
    job = run_out(jobs, claim.id)
    assert (job.status, job.reason) == ("cancelling", "deadline_exceeded")
    assert jobs.beat(claim, 5, EventBatch(1, ())) == "cancel"
    assert jobs.due() == []
    {
        "release": lambda: jobs.release(claim),
        "advance": lambda: jobs.advance(claim, "train"),
        "die": lambda: jobs.fail_attempt(claim, ERROR),
        "expire": lambda: let_pass(jobs, "leases", claim.id) or jobs.expire(),
    }[ending]()
    job = job_of(jobs, claim.id)
    assert (job.status, job.reason, job.error.type) == (
        "failed",
        "deadline_exceeded",
        "deadline_exceeded",
    )


def test_a_run_that_ends_before_it_is_stopped_is_what_it_is(jobs: JobStore) -> None:
    claim = running(jobs, deadline_seconds=HOUR)
    run_out(jobs, claim.id)
    jobs.finish(claim, "succeeded")
    job = job_of(jobs, claim.id)
    assert (job.status, job.reason, job.error) == ("succeeded", None, None)


def test_a_cancel_before_the_deadline_stays_a_cancel(jobs: JobStore) -> None:
    claim = running(jobs, deadline_seconds=HOUR)
    jobs.change("cancel", claim.id)
    assert run_out(jobs, claim.id).status == "cancelling"
    assert jobs.release(claim) == "cancelled"
    assert (job_of(jobs, claim.id).reason, job_of(jobs, claim.id).error) == (None, None)


def test_a_paused_job_has_no_deadline_and_a_resume_gives_it_a_new_one(jobs: JobStore) -> None:
    job_id = queued(jobs, deadline_seconds=HOUR)
    first = job_of(jobs, job_id).deadline_at
    time.sleep(0.01)
    jobs.change("pause", job_id)
    job = run_out(jobs, job_id)
    assert (job.status, job.deadline_at) == ("paused", None)
    jobs.change("resume", job_id)
    second = job_of(jobs, job_id).deadline_at
    assert timedelta(milliseconds=10) <= second - first < timedelta(minutes=1)
    assert jobs.redis.zscore("kd:deadlines", job_id) == second.timestamp() * 1000
    claim = jobs.claim(job_id, "train", "w", 5)
    jobs.change("pause", job_id)
    assert job_of(jobs, job_id).deadline_at == second, "until the run has stopped it counts"
    time.sleep(0.01)
    jobs.change("resume", job_id)
    assert job_of(jobs, job_id).deadline_at > second
    jobs.change("pause", job_id)
    jobs.release(claim)
    assert (job_of(jobs, job_id).deadline_at, jobs.redis.zcard("kd:deadlines")) == (None, 0)


def test_a_retry_gives_a_new_deadline_and_forgets_the_old_verdict(jobs: JobStore) -> None:
    claim = running(jobs, deadline_seconds=HOUR)
    run_out(jobs, claim.id)
    jobs.release(claim)
    jobs.change("retry", claim.id)
    job = job_of(jobs, claim.id)
    assert (job.status, job.reason, job.error) == ("queued", None, None)
    assert job.deadline_at > datetime.now(UTC)
    again = jobs.claim(claim.id, "train", "w", 5)
    jobs.change("cancel", claim.id)
    assert jobs.release(again) == "cancelled", "this time a client asked for it"


def test_a_clean_stop_keeps_the_deadline(jobs: JobStore) -> None:
    claim = running(jobs, "distill", deadline_seconds=HOUR)
    deadline = job_of(jobs, claim.id).deadline_at
    jobs.release(claim)
    jobs.advance(jobs.claim(claim.id, "precompute", "w", 5), "train")
    assert job_of(jobs, claim.id).deadline_at == deadline
    assert job_of(jobs, queued(jobs)).deadline_at is None
