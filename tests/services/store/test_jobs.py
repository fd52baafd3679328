"""The job record on a real server: every transition and every key that jobs.lua describes."""

from __future__ import annotations

import socket
import time
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from redis.exceptions import RedisError

from bench.support.harness import Parts, make_config
from kd.client.wire.jobs import ACTIVE_STATUSES, TERMINAL_STATUSES
from kd.progress import Event
from services.store.connection import connect_redis
from services.store.jobs.leases import Claim, EventBatch
from services.store.jobs.listing import JobQuery
from services.store.jobs.loops import Delivery
from services.store.jobs.records import extract_fields, make_job_id
from services.store.jobs.store import JobStore
from services.store.jobs.streams import SERIES
from tests.support.records import (
    ANN,
    ERROR,
    HELD_OUT,
    HOUR,
    STATUSES,
    counted,
    everything,
    finished,
    job_of,
    let_pass,
    queued,
    running,
    status,
)

# ---------------------------------------------------------------------- a worker and its claim


def test_events_change_the_record_and_the_stream_together(jobs: JobStore, parts: Parts) -> None:
    claim = running(jobs)
    events = (
        Event("stage", {"stage": "train", "phase": "training"}),
        Event("metrics", {"step": 1, "loss": 2.5, "kd_loss": None}),
        Event("metrics", {"step": 2, "loss": 2.25}),
        Event("evaluation", {"step": 2, "validation_perplexity": 30.0}),
        Event("progress", {"done": 2, "total": 4, "unit": "steps", "fraction": 0.5}),
        Event("artifact", {"name": "student", "path": "/runs/student"}),
        Event("warning", {"message": "a quotation mark \" and a line\nbreak"}),
    )  # fmt: skip
    assert jobs.beat(claim, 5, EventBatch(1, events)) == "go"
    job = parts.job(claim.id)
    assert job.phase == "training"
    assert (job.metrics.step, job.metrics.loss, job.metrics.kd_loss) == (2, 2.25, None)
    assert job.metrics.validation_perplexity == 30.0
    assert (job.progress.done, job.progress.fraction) == (2, 0.5)
    assert job.artifacts == {"student": "/runs/student"}
    assert parts.events(claim.id)[2:] == [(event.type, event.data) for event in events]


def test_events_are_read_from_where_one_stopped(jobs: JobStore) -> None:
    claim = running(jobs)
    for number in range(1, 4):
        warnings = tuple(Event("warning", {"message": f"{number} {index}"}) for index in range(500))
        jobs.beat(claim, 5, EventBatch(number, warnings))
    events = jobs.read_events(claim.id)
    assert len(events) == 1502
    assert [event.id for event in events] == sorted(
        {event.id for event in events}, key=stream_order
    )
    assert jobs.read_events(claim.id, events[700].id) == events[701:]
    assert jobs.read_events(claim.id, events[700].id, 3) == events[701:704]
    assert jobs.read_events(claim.id, limit=1, types=["warning"]) == events[2:3]
    assert [event.data["status"] for event in jobs.read_events(claim.id, types={"status"})] == [
        "queued",
        "running",
    ]
    assert jobs.read_events(claim.id, events[-1].id) == jobs.read_events(make_job_id()) == []


def stream_order(event: str) -> tuple[int, ...]:
    return tuple(map(int, event.split("-")))


def test_a_batch_sent_twice_counts_once(jobs: JobStore, parts: Parts) -> None:
    claim = running(jobs)
    batch = EventBatch(1, (Event("warning", {"message": "once"}),))
    jobs.beat(claim, 5, batch)
    jobs.beat(claim, 5, batch)
    jobs.beat(claim, 5, EventBatch(2, ()))
    assert [data for kind, data in parts.events(claim.id) if kind == "warning"] == [
        {"message": "once"}
    ]


def test_an_event_that_is_not_json_is_refused_before_it_is_sent(jobs: JobStore) -> None:
    with pytest.raises(ValueError, match="JSON"):
        jobs.beat(running(jobs), 5, EventBatch(1, (Event("metrics", {"loss": float("nan")}),)))


def test_the_second_stage_of_a_distillation_follows_the_first(jobs: JobStore, parts: Parts) -> None:
    first = running(jobs, "distill")
    jobs.beat(first, 5, EventBatch(1, (Event("progress", {"done": 1, "total": 1}),)))
    assert jobs.advance(first, "train") == "queued"
    job = parts.job(first.id)
    assert (job.status, job.stage, job.progress.done) == ("queued", "train", None)
    second = jobs.claim(first.id, "train", "w", 5)
    assert (second.fence, second.attempt) == (2, 1), "a new fence, but the same attempt"
    assert jobs.finish(second, "succeeded") == "succeeded"
    assert parts.statuses(first.id) == ["queued", "running", "queued", "running", "succeeded"]


def test_an_old_fence_changes_nothing(jobs: JobStore, parts: Parts) -> None:
    old = running(jobs)
    jobs.release(old)
    new = jobs.claim(old.id, "train", "w2", 5)
    before = everything(jobs, old.id)
    assert jobs.beat(old, 5, EventBatch(9, (Event("metrics", {"loss": 0.0}),))) == "fenced"
    assert jobs.finish(old, "failed", ERROR) == "fenced"
    assert (
        jobs.release(old) == jobs.fail_attempt(old, ERROR) == jobs.advance(old, "train") == "fenced"
    )
    assert everything(jobs, old.id) == before
    assert jobs.finish(new, "succeeded") == "succeeded"
    assert jobs.finish(new, "failed", ERROR) == "fenced", "an end is final"
    assert counted(jobs)["kd_fenced_writes_total"] == 6


def test_a_clean_stop_costs_no_attempt_and_a_death_does(jobs: JobStore, parts: Parts) -> None:
    job_id = queued(jobs)
    attempts = []
    for end in (jobs.release, jobs.release, lambda claim: jobs.fail_attempt(claim, ERROR)) * 2:
        claim = jobs.claim(job_id, "train", "w", 5)
        attempts.append(claim.attempt)
        end(claim)
    assert attempts == [1, 1, 1, 2, 2, 2]
    last = jobs.claim(job_id, "train", "w", 5)
    assert jobs.fail_attempt(last, ERROR) == "failed"
    job = parts.job(job_id)
    assert job.error is not None
    assert job.error.model_dump(exclude={"help"}) == ERROR
    assert job.attempt == 3
    assert [data["message"] for kind, data in parts.events(job_id) if kind == "warning"] == [
        "It was killed."
    ] * 2


def test_a_clock_that_is_set_back_holds_no_job_of_a_dead_worker_and_no_hint(jobs: JobStore) -> None:
    claim = jobs.claim(queued(jobs), "train", "w", 5)
    waiting = queued(jobs)
    assert jobs.repair(0, 5) == (0, [])
    tomorrow = jobs.read_clock_ms() + 24 * HOUR * 1000
    jobs.redis.zadd("kd:leases", {claim.id: tomorrow})
    jobs.redis.hset(f"kd:job:{waiting}", "dispatched_at", tomorrow)
    assert jobs.repair(0, 5) == (0, [claim.id])
    assert jobs.redis.zscore("kd:leases", claim.id) <= jobs.read_clock_ms() + 5000
    assert jobs.list_unannounced("train", HOUR) == [waiting]
    assert jobs.list_unannounced("train", HOUR) == []


def test_a_lease_that_runs_out_costs_an_attempt_and_fences_the_worker(
    jobs: JobStore, parts: Parts
) -> None:
    claim = jobs.claim(queued(jobs, max_attempts=2), "train", "w", 5)
    assert jobs.expire() == []
    let_pass(jobs, "leases", claim.id)
    assert jobs.expire() == [claim.id]
    assert jobs.expire() == []
    assert (status(jobs, claim.id), parts.job(claim.id).worker) == ("queued", None)
    assert jobs.list_unannounced("train", HOUR) == [claim.id], "nobody was told of it since"
    assert jobs.beat(claim, 5, EventBatch(1, ())) == "fenced"
    again = jobs.claim(claim.id, "train", "w", 5)
    assert again.attempt == 2
    let_pass(jobs, "leases", claim.id)
    jobs.expire()
    job = parts.job(claim.id)
    assert (job.status, job.error and job.error.type) == ("failed", "worker_lost")
    assert counted(jobs)["kd_lease_expirations_total"] == 2


def test_a_beat_renews_even_a_lease_that_ran_out(jobs: JobStore) -> None:
    claim = jobs.claim(queued(jobs), "train", "w", 0.05)
    time.sleep(0.06)
    assert jobs.beat(claim, 5, EventBatch(1, ())) == "go"
    assert jobs.expire() == []


def test_the_lease_of_who_drives_a_search_costs_no_attempt(jobs: JobStore) -> None:
    first = running(
        jobs,
        "search",
        search={"space": {"train.learning_rate": {"choices": [0.1, 0.2]}}},
        data=HELD_OUT,
    )
    jobs.advance(first, "search")
    for _ in range(5):
        claim = jobs.claim_next("search", "api", 5)
        assert claim.attempt == 1
        let_pass(jobs, "leases", claim.id)
        assert jobs.expire() == [claim.id]


# ---------------------------------------------------------------------- cancel, pause, resume


def test_cancel_of_a_queued_job_is_at_once(jobs: JobStore, parts: Parts) -> None:
    job_id = queued(jobs)
    jobs.change("cancel", job_id)
    assert jobs.claim(job_id, "train", "w", 5) is jobs.claim_next("train", "w", 5) is None
    assert parts.statuses(job_id) == ["queued", "cancelled"]


def test_a_wish_travels_with_the_beat_and_the_release_grants_it(
    jobs: JobStore, parts: Parts
) -> None:
    claim = running(jobs)
    assert jobs.beat(claim, 5, EventBatch(1, ())) == "go"
    jobs.change("pause", claim.id)
    assert (parts.job(claim.id).status, parts.job(claim.id).worker) == ("pausing", "w")
    assert jobs.beat(claim, 5, EventBatch(2, ())) == "pause"
    jobs.change("resume", claim.id)
    assert jobs.beat(claim, 5, EventBatch(3, ())) == "go"
    jobs.change("pause", claim.id)
    jobs.change("cancel", claim.id)
    assert jobs.beat(claim, 5, EventBatch(4, ())) == "cancel"
    assert (
        jobs.change("resume", claim.id).outcome
        == jobs.change("pause", claim.id).outcome
        == "illegal"
    )
    assert jobs.release(claim) == "cancelled"
    wishes = ["pausing", "running", "pausing", "cancelling"]
    assert parts.statuses(claim.id) == ["queued", "running", *wishes, "cancelled"]


@pytest.mark.parametrize(("wish", "end"), [("cancel", "cancelled"), ("pause", "paused")])
@pytest.mark.parametrize("ending", ["release", "advance", "die", "expire"])
def test_a_wish_wins_over_every_way_back_to_the_queue(
    jobs: JobStore, wish: Any, end: str, ending: str
) -> None:
    claim = running(jobs, "distill")
    jobs.change(wish, claim.id)
    {
        "release": lambda: jobs.release(claim),
        "advance": lambda: jobs.advance(claim, "train"),
        "die": lambda: jobs.fail_attempt(claim, ERROR),
        "expire": lambda: let_pass(jobs, "leases", claim.id) or jobs.expire(),
    }[ending]()
    assert status(jobs, claim.id) == end
    if end == "paused":
        jobs.change("resume", claim.id)
        job = job_of(jobs, claim.id)
        assert (job.status, job.stage) == (
            "queued",
            "train" if ending == "advance" else "precompute",
        )
        again = jobs.claim(claim.id, job.stage, "w", 5)
        assert again.attempt == (2 if ending in ("die", "expire") else 1)


@pytest.mark.parametrize("wish", ["cancel", "pause"])
def test_a_wish_that_comes_too_late_leaves_a_success(jobs: JobStore, wish: Any) -> None:
    claim = running(jobs)
    jobs.change(wish, claim.id)
    assert jobs.finish(claim, "succeeded") == "succeeded"
    assert jobs.change(wish, claim.id).outcome == "illegal"
    job = job_of(jobs, claim.id)
    assert (job.status, job.error, job.reason) == ("succeeded", None, None)


def test_a_resume_that_crosses_a_pause_on_its_way_puts_the_job_back(jobs: JobStore) -> None:
    """The client resumes a job whose worker has already stopped the run."""
    claim = running(jobs)
    jobs.change("pause", claim.id)
    assert jobs.beat(claim, 5, EventBatch(1, ())) == "pause"
    jobs.change("resume", claim.id)
    assert jobs.release(claim) == "queued"
    assert jobs.claim(claim.id, "train", "w", 5).attempt == 1


# ---------------------------------------------------------------------- retry, delete


def test_a_retry_begins_to_count_anew(jobs: JobStore, parts: Parts) -> None:
    job_id = queued(jobs, max_attempts=2)
    for life in (1, 2):
        for death in (1, 2):
            claim = jobs.claim(job_id, "train", "w", 5)
            assert claim.attempt == 2 * (life - 1) + death
            end = jobs.fail_attempt(claim, ERROR)
        assert end == "failed"
        assert jobs.redis.ttl(f"kd:job:{job_id}:events") > 29 * 86400
        assert vars(jobs.change("retry", job_id)) == {
            "outcome": "done",
            "status": "queued",
            "allowed": (),
            "open_jobs": 0,
        }
        job = parts.job(job_id)
        assert job.error is job.finished_at is job.started_at is job.reason is None
        assert jobs.redis.ttl(f"kd:job:{job_id}:events") == -1, "a job that lives keeps its history"
    claim = jobs.claim(job_id, "train", "w", 5)
    jobs.finish(claim, "succeeded")
    assert counted(jobs)["kd_job_duration_seconds_count"] == 3, "each life ended once"
    assert parts.statuses(job_id).count("failed") == 2


def test_a_retry_goes_on_at_the_stage_that_failed(jobs: JobStore) -> None:
    claim = running(jobs, "distill")
    jobs.advance(claim, "train")
    jobs.finish(jobs.claim(claim.id, "train", "w", 5), "failed", ERROR)
    jobs.change("retry", claim.id)
    assert jobs.claim(claim.id, "train", "w", 5) is not None


@pytest.mark.parametrize("error", ["cache_missing", "cache_incomplete", "cache_corrupt"])
@pytest.mark.parametrize(
    "kind, stage", [("distill", "precompute"), ("train", "train")], ids=["captures", "reads"]
)
def test_a_retry_captures_again_the_cache_that_was_the_failure(
    jobs: JobStore, kind: str, stage: str, error: str
) -> None:
    claim = running(jobs, kind)
    if kind == "distill":
        jobs.advance(claim, "train")
        claim = jobs.claim(claim.id, "train", "w", 5)
    jobs.finish(claim, "failed", {"type": error, "detail": "", "remedy": ""})
    jobs.change("retry", claim.id)
    assert jobs.get(claim.id).stage == stage
    assert jobs.claim(claim.id, stage, "w", 5) is not None


def test_nothing_is_left_of_a_deleted_job(jobs: JobStore) -> None:
    jobs.redis.set("kd:format", "2")
    first = queued(jobs, caller=ANN)
    before = sorted(jobs.redis.keys("*"))
    claim = running(
        jobs,
        caller=ANN,
        loss={"alpha": 0.1},
        cache={"fingerprint": "a" * 32},
        webhook="https://example.org/hook",
        deadline_seconds=HOUR,
        labels={"a": "b"},
    )
    points = tuple(Event(kind, {"step": 1, "loss": 1.0}) for kind in SERIES)
    jobs.beat(claim, 5, EventBatch(1, points))
    waiting = queued(jobs, caller=ANN, depends_on=[claim.id, first])
    jobs.lease_webhooks(0, 100)
    for delivery in jobs.lease_webhooks(0, 100):
        jobs.retry_webhook(delivery, 0)
    jobs.finish(claim, "failed", ERROR)
    assert (
        jobs.change("delete", waiting).outcome == jobs.change("delete", claim.id).outcome == "done"
    )
    assert jobs.lease_webhooks(0, 100) == []
    left = set(jobs.redis.keys("*")) - set(before)
    # What a team has used of its quota outlives its jobs.
    assert left == {"kd:caches:ann", "kd:team:ann"}
    assert jobs.get(claim.id) is None
    assert jobs.read_events(claim.id) == jobs.read_metrics(claim.id) == []
    assert [job.id for job in jobs.read_page(JobQuery(ANN), 10).jobs] == [first]
    assert sum(jobs.count_statuses().values()) == 1


def test_a_deleted_jobs_worker_is_fenced(jobs: JobStore) -> None:
    claim = running(jobs)
    jobs.finish(claim, "succeeded")
    jobs.change("delete", claim.id)
    keys = sorted(jobs.redis.keys("kd:job:*"))
    assert jobs.beat(claim, 5, EventBatch(1, (Event("warning", {"message": "x"}),))) == "fenced"
    assert jobs.release(claim) == "fenced"
    assert sorted(jobs.redis.keys("kd:job:*")) == keys == []


def test_an_ended_job_is_closed(jobs: JobStore) -> None:
    job_id = finished(jobs, deadline_seconds=HOUR)
    assert (
        jobs.redis.zcard("kd:open")
        == jobs.redis.zcard("kd:leases")
        == jobs.redis.zcard("kd:deadlines")
        == 0
    )
    assert jobs.redis.ttl(f"kd:job:{job_id}:events") > 29 * 86400
    assert jobs.redis.ttl(f"kd:job:{job_id}") == -1
    assert job_of(jobs, job_id).deadline_at is None


def test_the_trial_of_a_search_that_goes_on_cannot_be_deleted(jobs: JobStore) -> None:
    search = searching(jobs)
    trial = jobs.create_trial(search, 0, make_config("trial"))
    assert jobs.create_trial(search, 0, make_config("trial")) == trial, "made once"
    jobs.finish(jobs.claim(trial, "train", "w", 5), "succeeded")
    assert jobs.change("delete", trial).outcome == "illegal"
    jobs.finish(search, "succeeded")
    assert jobs.change("delete", trial).outcome == "done"


# ---------------------------------------------------------------------- searches


def searching(jobs: JobStore) -> Claim:
    """A search with a driver."""
    first = running(
        jobs,
        "search",
        search={"space": {"train.learning_rate": {"choices": [0.1, 0.2]}}},
        data=HELD_OUT,
    )
    jobs.advance(first, "search")
    return jobs.claim_next("search", "api", 5)


def test_trials_end_with_their_search_and_pause_with_it(jobs: JobStore) -> None:
    search = searching(jobs)
    done, busy, idle = (
        jobs.create_trial(search, number, make_config("trial")) for number in range(3)
    )
    jobs.finish(jobs.claim(done, "train", "w", 5), "succeeded")
    jobs.claim(busy, "train", "w", 5)

    def states() -> list[str]:
        return [status(jobs, job_id) for job_id in (search.id, done, busy, idle)]

    jobs.change("pause", search.id)
    assert states() == ["pausing", "succeeded", "pausing", "paused"]
    late = jobs.create_trial(search, 3, make_config("trial"))
    assert status(jobs, late) == "paused", "who drives the search has not heard of the pause yet"
    jobs.change("resume", search.id)
    assert [*states(), status(jobs, late)] == [
        "running",
        "succeeded",
        "running",
        "queued",
        "queued",
    ]
    jobs.change("pause", idle)
    assert jobs.change("resume", search.id).outcome == "already"
    assert status(jobs, idle) == "paused", "what changes nothing does not change a trial either"
    jobs.change("cancel", search.id)
    assert jobs.change("resume", search.id).outcome == "illegal"
    assert [*states(), status(jobs, late)] == [
        "cancelling",
        "succeeded",
        "running",
        "paused",
        "queued",
    ]
    jobs.release(search)
    assert [*states(), status(jobs, late)] == [
        "cancelled",
        "succeeded",
        "cancelling",
        "cancelled",
        "cancelled",
    ]
    assert {jobs.get(trial).parent for trial in jobs.list_trials(search.id).values()} == {search.id}
    assert [job.id for job in jobs.read_page(JobQuery(parent=search.id), 10).jobs] == [
        late,
        idle,
        busy,
        done,
    ]


def test_the_study_is_written_by_who_drives_it(jobs: JobStore) -> None:
    old = searching(jobs)
    assert jobs.add_to_journal(old, [{"a": 1}, {"b": 2}]) == "go"
    jobs.release(old)
    new = jobs.claim(old.id, "search", "api", 5)
    assert (
        jobs.add_to_journal(old, [{"c": 3}])
        == jobs.create_trial(old, 0, make_config("trial"))
        == "fenced"
    )
    assert jobs.add_to_journal(new, [{"d": 4}]) == "go"
    assert jobs.read_journal(new.id, 1) == [{"b": 2}, {"d": 4}]
    assert jobs.list_trials(new.id) == {}


# ---------------------------------------------------------------------- metrics


def tell(jobs: JobStore, claim: Claim, points: list[dict[str, Any]]) -> None:
    for number, start in enumerate(range(0, len(points), 1000), 1):
        events = tuple(Event("metrics", point) for point in points[start : start + 1000])
        jobs.beat(claim, 5, EventBatch(number, events))


def test_metrics_are_known_by_step(jobs: JobStore) -> None:
    claim = running(jobs)
    events = (
        Event("metrics", {"step": 2, "loss": 2.0}),
        Event("metrics", {"step": 1, "loss": 3.0}),
        Event("evaluation", {"step": 2, "validation_loss": 2.5}),
        Event("temperature", {"step": 3, "temperature": 1.5}),
        Event("metrics", {"note": "has no step"}),
        Event("progress", {"step": 9}),
    )
    jobs.beat(claim, 5, EventBatch(1, events))
    second = {"step": 2, "loss": 2.0, "validation_loss": 2.5}
    assert jobs.read_metrics(claim.id) == [
        {"step": 1, "loss": 3.0},
        second,
        {"step": 3, "temperature": 1.5},
    ]
    assert jobs.read_metrics(claim.id, after_step=1) == [second, {"step": 3, "temperature": 1.5}]
    assert jobs.read_metrics(claim.id, series=["evaluation"]) == [
        {"step": 2, "validation_loss": 2.5}
    ]


def test_a_step_that_is_run_again_takes_its_old_place(jobs: JobStore) -> None:
    first = running(jobs)
    tell(jobs, first, [{"step": step, "loss": float(step)} for step in range(1, 7)])
    jobs.fail_attempt(first, ERROR)
    second = jobs.claim(first.id, "train", "w", 5)
    tell(jobs, second, [{"step": step, "loss": step + 0.5} for step in range(4, 6)])
    losses = [point["loss"] for point in jobs.read_metrics(first.id)]
    assert losses == [1.0, 2.0, 3.0, 4.5, 5.5, 6.0]
    assert [point["step"] for point in jobs.read_metrics(first.id)] == [1, 2, 3, 4, 5, 6]


def test_a_long_history_is_thinned_out_evenly(jobs: JobStore) -> None:
    """After 100,000 steps the first thousands have as many points as the last."""
    claim = running(jobs)
    total = 100_000
    tell(jobs, claim, [{"step": step, "loss": 1.0} for step in range(1, total + 1)])
    steps = [point["step"] for point in jobs.read_metrics(claim.id)]
    assert len(steps) <= 8192
    assert (steps[0], steps[-1]) == (1, total)
    assert steps == sorted(set(steps))
    widest = max(after - before for before, after in pairwise(steps))
    assert widest <= 2 * 2 * total / 8192 + 1
    assert sum(step <= total / 2 for step in steps) >= 8192 / 8


# ---------------------------------------------------------------------- webhooks


def test_every_change_of_status_is_told_to_the_webhook(jobs: JobStore) -> None:
    queued(jobs)
    job_id = queued(jobs, webhook="https://example.org/hook")
    jobs.finish(jobs.claim(job_id, "train", "w", 5), "succeeded")
    due = jobs.lease_webhooks(60, 10)
    events = [event.id for event in jobs.read_events(job_id, types=["status"])]
    assert due == [Delivery(job_id, event, "https://example.org/hook", 0) for event in events]
    assert jobs.lease_webhooks(60, 10) == [], "somebody has them"
    jobs.finish_webhook(due[0])
    jobs.retry_webhook(due[1], 0)
    jobs.retry_webhook(due[2], 60)
    assert jobs.lease_webhooks(0.01, 10) == [replace(due[1], tries=1)]
    time.sleep(0.02)
    assert jobs.lease_webhooks(0, 10) == [replace(due[1], tries=1)], "whoever had it died"
    jobs.finish_webhook(due[1], "It was given up.")
    told = jobs.read_events(job_id)[-1]
    assert (told.type, told.data) == ("warning", {"message": "It was given up."})
    assert jobs.redis.hgetall("kd:webhooks:tries") == {f"{job_id} {events[2]}": "1"}
    jobs.finish_webhook(due[2])
    assert jobs.redis.exists("kd:webhooks", "kd:webhooks:tries") == 0


def test_so_many_webhooks_are_handed_out_and_no_more(jobs: JobStore) -> None:
    for _ in range(5):
        queued(jobs, webhook="https://example.org/hook")
    assert [len(jobs.lease_webhooks(60, 2)) for _ in range(4)] == [2, 2, 1, 0]


def test_the_webhook_of_a_deleted_job_is_forgotten_by_whoever_has_it(jobs: JobStore) -> None:
    job_id = queued(jobs, webhook="https://example.org/hook")
    jobs.change("cancel", job_id)
    (first, second) = jobs.lease_webhooks(0, 10)
    jobs.change("delete", job_id)
    assert jobs.lease_webhooks(0, 10) == []
    jobs.retry_webhook(first, 0)
    jobs.finish_webhook(second, "It was given up.")
    assert jobs.redis.exists("kd:webhooks", "kd:webhooks:tries", f"kd:job:{job_id}:events") == 0


# ---------------------------------------------------------------------- the rest


def test_the_stream_is_trimmed(jobs: JobStore) -> None:
    claim = running(jobs)
    for number in range(1, 32):
        jobs.beat(
            claim,
            5,
            EventBatch(number, tuple(Event("warning", {"message": "x"}) for _ in range(500))),
        )
    assert 10_000 <= jobs.redis.xlen(f"kd:job:{claim.id}:events") < 11_000


def test_every_event_type_has_its_place() -> None:
    assert extract_fields(Event("checkpoint", {"step": 1, "path": "p"})) == {}
    assert extract_fields(Event("cache", {"fingerprint": "f"})) == {"cache.fingerprint": '"f"'}


def test_a_request_client_gives_up() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:  # accepts and never answers
        url = f"redis://127.0.0.1:{silent.getsockname()[1]}/0"
        with pytest.raises(RedisError):
            connect_redis(url, timeout=0.5).ping()


def test_open_and_ended_statuses_are_all_there_are() -> None:
    assert TERMINAL_STATUSES | ACTIVE_STATUSES | {"waiting", "queued", "paused"} == set(STATUSES)
