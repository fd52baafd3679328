"""The state machine, on a real server: who may change what, and that record and events agree."""

from __future__ import annotations

import threading
import time

import pytest
from redis.exceptions import RedisError

from services.jobs import Batch, JobStore, connect, fields_of, new_id
from services.reconciler import Reconciler
from services.settings import Settings
from tests.harness import Parts, config, wait_until

ERROR = {"type": "worker_lost", "detail": "It was killed.", "remedy": "Buy memory."}


@pytest.fixture
def jobs(parts: Parts) -> JobStore:
    return parts.jobs


def queued(jobs: JobStore, kind: str = "train") -> str:
    return jobs.create(config("quick", kind)).id


def status(jobs: JobStore, job_id: str) -> str:
    job = jobs.get(job_id)
    assert job is not None
    return job.status


def test_ids_sort_by_time_and_do_not_repeat() -> None:
    ids = [new_id()]
    time.sleep(0.002)
    ids += [new_id() for _ in range(1000)]
    assert min(ids) == ids[0]
    assert len(set(ids)) == 1001
    assert {len(job_id) for job_id in ids} == {30}


def test_a_new_job_is_queued_for_its_first_stage(jobs: JobStore) -> None:
    job = jobs.get(queued(jobs, "distill"))
    assert job is not None
    assert (job.status, job.stage, job.kind, job.name, job.attempt) == ("queued", "precompute", "distill", "quick", 0)
    assert job.created_at == job.queued_at
    assert job.started_at is job.finished_at is job.heartbeat_at is job.error is job.cache is None
    assert job.config["train"]["learning_rate"] == 3e-4, "the record holds the defaults too"


def test_only_one_of_many_claims_succeeds(jobs: JobStore, parts: Parts) -> None:
    job_id, claims = queued(jobs), []
    threads = [threading.Thread(target=lambda: claims.append(jobs.claim(job_id, "train", "w", 5))) for _ in range(20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [claim.fence for claim in claims if claim] == [1]
    assert parts.statuses(job_id) == ["queued", "running"]


def test_a_hint_for_another_stage_or_an_unknown_job_claims_nothing(jobs: JobStore) -> None:
    assert jobs.claim(queued(jobs, "distill"), "train", "w", 5) is None
    assert jobs.claim(new_id(), "train", "w", 5) is None


def test_a_stale_hint_is_good_for_the_job_that_waited_longest(jobs: JobStore) -> None:
    other, first, _ = queued(jobs, "distill"), queued(jobs), queued(jobs)
    claim = jobs.claim_oldest("train", "w", 5)
    assert claim is not None
    assert claim.id == first
    assert jobs.claim_oldest("precompute", "w", 5).id == other
    assert jobs.claim_oldest("precompute", "w", 5) is None


def test_events_change_the_record_and_the_stream_together(jobs: JobStore, parts: Parts) -> None:
    claim = jobs.claim(queued(jobs), "train", "w", 5)
    events = (
        {"type": "stage", "data": {"stage": "train", "phase": "training"}},
        {"type": "metrics", "data": {"step": 1, "loss": 2.5, "kd_loss": None}},
        {"type": "metrics", "data": {"step": 2, "loss": 2.25}},
        {"type": "evaluation", "data": {"step": 2, "validation_perplexity": 30.0}},
        {"type": "progress", "data": {"done": 2, "total": 4, "unit": "steps", "fraction": 0.5}},
        {"type": "artifact", "data": {"name": "student", "path": "/runs/student"}},
        {"type": "warning", "data": {"message": "a quotation mark \" and a line\nbreak"}},
    )  # fmt: skip
    assert jobs.beat(claim, 5, Batch(1, events)) == "go"
    job = parts.job(claim.id)
    assert job.phase == "training"
    assert (job.metrics.step, job.metrics.loss, job.metrics.kd_loss) == (2, 2.25, None)
    assert job.metrics.validation_perplexity == 30.0
    assert (job.progress.done, job.progress.fraction) == (2, 0.5)
    assert job.artifacts == {"student": "/runs/student"}
    assert parts.events(claim.id)[2:] == [(event["type"], event["data"]) for event in events]


def test_a_batch_sent_twice_counts_once(jobs: JobStore, parts: Parts) -> None:
    claim = jobs.claim(queued(jobs), "train", "w", 5)
    batch = Batch(1, ({"type": "warning", "data": {"message": "once"}},))
    jobs.beat(claim, 5, batch)
    jobs.beat(claim, 5, batch)
    jobs.beat(claim, 5, Batch(2, ()))
    assert [data for kind, data in parts.events(claim.id) if kind == "warning"] == [{"message": "once"}]


def test_an_event_that_is_not_json_is_refused_before_it_is_sent(jobs: JobStore) -> None:
    claim = jobs.claim(queued(jobs), "train", "w", 5)
    with pytest.raises(ValueError, match="JSON"):
        jobs.beat(claim, 5, Batch(1, ({"type": "metrics", "data": {"loss": float("nan")}},)))


def test_the_second_stage_of_a_distillation_follows_the_first(jobs: JobStore, parts: Parts) -> None:
    job_id = queued(jobs, "distill")
    first = jobs.claim(job_id, "precompute", "w", 5)
    jobs.beat(first, 5, Batch(1, ({"type": "progress", "data": {"done": 1, "total": 1}},)))
    assert jobs.advance(first, "train") == "queued"
    job = parts.job(job_id)
    assert (job.status, job.stage, job.progress.done) == ("queued", "train", None)
    second = jobs.claim(job_id, "train", "w", 5)
    assert (second.fence, second.attempt) == (2, 1), "a new fence, but the same attempt"
    assert jobs.finish(second, "succeeded") == "succeeded"
    assert parts.statuses(job_id) == ["queued", "running", "queued", "running", "succeeded"]


def test_an_old_fence_changes_nothing(jobs: JobStore, parts: Parts) -> None:
    job_id = queued(jobs)
    old = jobs.claim(job_id, "train", "w1", 5)
    jobs.release(old)
    new = jobs.claim(job_id, "train", "w2", 5)
    before = parts.job(job_id), parts.events(job_id)
    assert jobs.beat(old, 5, Batch(9, ({"type": "metrics", "data": {"loss": 0.0}},))) == "fenced"
    assert jobs.finish(old, "failed", ERROR) == "fenced"
    assert jobs.release(old) == jobs.fail_attempt(old, ERROR, 3) == jobs.advance(old, "train") == "fenced"
    assert (parts.job(job_id), parts.events(job_id)) == before
    assert jobs.finish(new, "succeeded") == "succeeded"
    assert jobs.finish(new, "failed", ERROR) == "fenced", "an end is final"


def test_a_clean_stop_costs_no_attempt_and_a_death_does(jobs: JobStore, parts: Parts) -> None:
    job_id, attempts = queued(jobs), []
    for end in (jobs.release, jobs.release, lambda claim: jobs.fail_attempt(claim, ERROR, 3)) * 2:
        claim = jobs.claim(job_id, "train", "w", 5)
        attempts.append(claim.attempt)
        end(claim)
    assert attempts == [1, 1, 1, 2, 2, 2]
    last = jobs.claim(job_id, "train", "w", 5)
    assert jobs.fail_attempt(last, ERROR, 3) == "failed"
    job = parts.job(job_id)
    assert job.error is not None
    assert job.error.model_dump() == ERROR
    assert job.attempt == 3
    assert [data["message"] for kind, data in parts.events(job_id) if kind == "warning"] == ["It was killed."] * 2


def test_cancel_of_a_queued_job_is_at_once(jobs: JobStore, parts: Parts) -> None:
    job_id = queued(jobs)
    assert jobs.cancel(job_id)
    assert status(jobs, job_id) == "cancelled"
    assert jobs.claim(job_id, "train", "w", 5) is None
    assert jobs.cancel(job_id), "a second time is fine"
    assert parts.statuses(job_id) == ["queued", "cancelled"]
    assert not jobs.cancel(new_id())


def test_cancel_of_a_running_job_travels_with_the_beat(jobs: JobStore, parts: Parts) -> None:
    claim = jobs.claim(queued(jobs), "train", "w", 5)
    jobs.cancel(claim.id)
    jobs.cancel(claim.id)
    job = parts.job(claim.id)
    assert (job.status, job.cancel_requested) == ("running", True)
    assert jobs.beat(claim, 5, Batch(1, ())) == "cancel"
    assert jobs.finish(claim, "cancelled") == "cancelled"
    assert [kind for kind, _ in parts.events(claim.id)].count("cancel") == 1


@pytest.mark.parametrize("ending", ["release", "advance", "fail_attempt", "last_attempt", "expire"])
def test_a_waiting_cancel_wins_over_every_way_back_to_the_queue(jobs: JobStore, ending: str) -> None:
    claim = jobs.claim(queued(jobs, "distill"), "precompute", "w", 0.05)
    jobs.cancel(claim.id)
    endings = {
        "release": lambda: jobs.release(claim),
        "advance": lambda: jobs.advance(claim, "train"),
        "fail_attempt": lambda: jobs.fail_attempt(claim, ERROR, 3),
        "last_attempt": lambda: jobs.fail_attempt(claim, ERROR, 1),
        "expire": lambda: time.sleep(0.06) or jobs.expire(3),
    }
    endings[ending]()
    assert status(jobs, claim.id) == "cancelled"


def test_a_cancel_that_comes_too_late_leaves_a_success(jobs: JobStore) -> None:
    claim = jobs.claim(queued(jobs), "train", "w", 5)
    jobs.cancel(claim.id)
    assert jobs.finish(claim, "succeeded") == "succeeded"
    jobs.cancel(claim.id)
    assert status(jobs, claim.id) == "succeeded"


def test_a_lease_that_runs_out_costs_an_attempt_and_fences_the_worker(jobs: JobStore, parts: Parts) -> None:
    claim = jobs.claim(queued(jobs), "train", "w", 0.1)
    assert jobs.expire(3) == []
    time.sleep(0.12)
    assert jobs.expire(3) == [claim.id]
    assert jobs.expire(3) == []
    assert status(jobs, claim.id) == "queued"
    assert jobs.beat(claim, 5, Batch(1, ())) == "fenced"
    again = jobs.claim(claim.id, "train", "w", 0.1)
    assert again.attempt == 2
    time.sleep(0.12)
    jobs.expire(2)
    job = parts.job(claim.id)
    assert (job.status, job.error and job.error.type) == ("failed", "worker_lost")


def test_a_beat_renews_even_a_lease_that_ran_out(jobs: JobStore) -> None:
    claim = jobs.claim(queued(jobs), "train", "w", 0.05)
    time.sleep(0.06)
    assert jobs.beat(claim, 5, Batch(1, ())) == "go"
    assert jobs.expire(3) == []


def test_an_idempotency_key_makes_one_job(jobs: JobStore) -> None:
    created, barrier = [], threading.Barrier(20)

    def create() -> None:
        barrier.wait()
        created.append(jobs.create(config("quick"), "key"))

    threads = [threading.Thread(target=create) for _ in range(20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(answer.outcome for answer in created) == ["created"] + ["replayed"] * 19
    assert len({answer.id for answer in created}) == 1
    assert jobs.create(config("steps"), "key").outcome == "conflict"
    assert jobs.create(config("quick"), "other").outcome == "created"
    assert len(list(jobs.newest())) == 2


def test_listing_is_newest_first_and_filters(jobs: JobStore) -> None:
    ids = [queued(jobs, "distill" if index % 2 else "train") for index in range(250)]
    jobs.cancel(ids[10])
    assert [job.id for job in jobs.page(1000, None, None, None)] == ids[::-1]
    assert [job.id for job in jobs.page(3, ids[100], None, None)] == [ids[99], ids[98], ids[97]]
    assert [job.id for job in jobs.page(10, None, "cancelled", None)] == [ids[10]]
    assert len(jobs.page(1000, None, None, "distill")) == 125
    with pytest.raises(KeyError):
        jobs.page(1, new_id(), None, None)


def test_only_jobs_that_nobody_was_told_of_are_announced_again(jobs: JobStore, parts: Parts) -> None:
    job_id = queued(jobs)
    assert jobs.unannounced("train", 10) == []
    time.sleep(0.02)
    assert jobs.unannounced("precompute", 0.01) == []
    assert jobs.unannounced("train", 0.01) == [job_id]
    assert jobs.unannounced("train", 10) == [], "they count as told of now"
    time.sleep(0.02)
    parts.queue.send_task("kd.run_stage", args=["x", "train"], queue="train")
    assert jobs.unannounced("train", 0.01) == [], "hints are waiting already: this key is where Celery keeps them"


def test_an_ended_job_is_closed(jobs: JobStore) -> None:
    claim = jobs.claim(queued(jobs), "train", "w", 5)
    jobs.finish(claim, "succeeded")
    assert jobs.redis.zcard("kd:open") == jobs.redis.zcard("kd:leases") == 0
    assert jobs.redis.ttl(f"kd:job:{claim.id}:events") > 29 * 86400
    assert jobs.redis.ttl(f"kd:job:{claim.id}") == -1


def test_the_stream_is_trimmed(jobs: JobStore) -> None:
    claim = jobs.claim(queued(jobs), "train", "w", 5)
    for number in range(1, 32):
        jobs.beat(claim, 5, Batch(number, tuple({"type": "warning", "data": {"message": "x"}} for _ in range(500))))
    assert 10_000 <= jobs.redis.xlen(f"kd:job:{claim.id}:events") < 11_000


def test_every_event_type_has_its_place() -> None:
    assert fields_of({"type": "checkpoint", "data": {"step": 1, "path": "p"}}) == {}
    assert fields_of({"type": "cache", "data": {"fingerprint": "f"}}) == {"cache.fingerprint": '"f"'}


def test_a_request_client_gives_up_within_its_time(parts: Parts) -> None:
    began = time.monotonic()
    with pytest.raises(RedisError):
        connect("redis://127.0.0.1:1/0", timeout=0.5).ping()
    assert time.monotonic() - began < 2


def test_the_reconciler_lets_a_whole_lease_pass_before_it_takes_jobs_away(jobs: JobStore, parts: Parts) -> None:
    claim = jobs.claim(queued(jobs), "train", "w", 0.01)
    reconciler = Reconciler(jobs, parts.queue, Settings(lease_seconds=0.5))
    began = time.monotonic()
    time.sleep(0.02)
    reconciler.step()
    assert status(jobs, claim.id) == "running"
    wait_until(lambda: reconciler.step() or status(jobs, claim.id) == "queued")
    assert time.monotonic() - began >= 0.5
