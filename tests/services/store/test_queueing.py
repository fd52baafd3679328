"""The queue: by priority, then by age, and to workers that have what a job needs."""

from __future__ import annotations

import time
from datetime import UTC, datetime
from typing import Any

import pytest

from bench.support.harness import Parts, make_config
from kd.client.wire.service import Device, WorkerState
from services.store.jobs.leases import Capacity
from services.store.jobs.listing import JobQuery
from services.store.jobs.records import build_fields, make_job_id
from services.store.jobs.store import JobStore
from tests.support.records import (
    HELD_OUT,
    at_once,
    counted,
    job_of,
    queued,
    running,
)


def test_the_queue_goes_by_priority_and_then_by_age(jobs: JobStore) -> None:
    priorities = [5, 9, 0, 5, 9, 0, 5]
    ids = [queued(jobs, priority=priority) for priority in priorities]
    order = [ids[index] for index in (1, 4, 0, 3, 6, 2, 5)]
    assert [job_of(jobs, job_id).queue_position for job_id in order] == list(range(7))
    assert [jobs.claim_next("train", "w", 5).id for _ in ids] == order
    assert jobs.claim_next("train", "w", 5) is None


def test_age_counts_to_the_microsecond(jobs: JobStore) -> None:
    """Jobs that are created in one millisecond, whose ids are random in it, keep their order."""
    pipeline = jobs.redis.pipeline()
    fields = [text for pair in build_fields(make_config("quick"), 3).items() for text in pair]
    ids = [make_job_id() for _ in range(300)]
    ids.sort(key=lambda job_id: job_id[-8:])
    for job_id in ids:
        jobs._script(args=["create", job_id, "local", 1, "", "", "", "", *fields], client=pipeline)
    pipeline.execute()
    assert [jobs.claim_next("train", "w", 5).id for _ in ids] == ids
    assert [job.id for job in jobs.read_page(JobQuery(), 300).jobs] == ids[::-1]


def test_no_age_makes_up_for_a_priority(jobs: JobStore) -> None:
    old = queued(jobs, priority=4)
    new = queued(jobs, priority=5)
    jobs.change("pause", old)
    year = 365 * 24 * 3600 * 1_000_000
    jobs.redis.hincrby(f"kd:job:{old}", "created_us", -20 * year)
    jobs.change("resume", old)
    assert jobs.claim_next("train", "w", 5).id == new


def test_who_comes_back_to_the_queue_has_the_age_of_the_job(jobs: JobStore) -> None:
    first = running(jobs)
    second = queued(jobs)
    jobs.release(first)
    assert [job_of(jobs, job_id).queue_position for job_id in (first.id, second)] == [0, 1]


def test_only_one_of_many_claims_succeeds(jobs: JobStore, parts: Parts) -> None:
    job_id = queued(jobs)
    claims = at_once(20, lambda: jobs.claim(job_id, "train", "w", 5))
    assert [claim.fence for claim in claims if claim] == [1]
    assert parts.statuses(job_id) == ["queued", "running"]


def test_a_hint_for_another_stage_or_an_unknown_job_claims_nothing(jobs: JobStore) -> None:
    assert jobs.claim(queued(jobs, "distill"), "train", "w", 5) is None
    assert jobs.claim(make_job_id(), "train", "w", 5) is None


def test_a_stale_hint_is_good_for_the_job_that_waited_longest(jobs: JobStore) -> None:
    other = queued(jobs, "distill")
    first = queued(jobs)
    _ = queued(jobs)
    claim = jobs.claim_next("train", "w", 5)
    assert claim is not None
    assert claim.id == first
    assert jobs.claim_next("precompute", "w", 5).id == other
    assert jobs.claim_next("precompute", "w", 5) is None


@pytest.mark.parametrize(
    ("resources", "fitting"),
    [
        ({}, {"cpu", "small", "large", "pair"}),
        ({"gpus": 0}, {"cpu", "small", "large", "pair"}),
        ({"gpus": 1}, {"small", "large", "pair"}),
        ({"gpus": 2}, {"pair"}),
        ({"gpus": 1, "memory": "40GiB"}, {"large", "pair"}),
        ({"memory": "40GiB"}, {"cpu", "large", "pair"}),
        ({"memory": 64 << 30}, {"cpu", "large"}),
        ({"memory": (64 << 30) + 1}, {"cpu"}),
        ({"gpus": 3}, set()),
    ],
)
def test_a_job_waits_for_a_worker_that_has_what_it_needs(
    jobs: JobStore, resources: dict[str, Any], fitting: set[str]
) -> None:
    workers = {
        "cpu": Capacity(0, 128 << 30),
        "small": Capacity(1, 16 << 30),
        "large": Capacity(1, 64 << 30),
        "pair": Capacity(2, 48 << 30),
    }
    for name, capacity in workers.items():
        wanted = queued(jobs, resources=resources)
        for take in (
            jobs.claim_next("train", name, 5, capacity),
            jobs.claim(wanted, "train", name, 5, capacity),
        ):
            if take is not None:
                assert name in fitting
                break
        else:
            assert name not in fitting
        jobs.redis.flushall()


def test_who_does_not_fit_blocks_nobody(jobs: JobStore) -> None:
    large = [queued(jobs, priority=9, resources={"gpus": 8}) for _ in range(250)]
    small = queued(jobs, priority=0)
    assert jobs.claim_next("train", "w", 5, Capacity(1, 1 << 40)).id == small
    assert jobs.claim_next("train", "w", 5, Capacity(1, 1 << 40)) is None
    assert jobs.claim_next("train", "w", 5, Capacity(8, 1 << 40)).id == large[0]


CPU = Device(memory_bytes=8 << 30)
GPU = Device(kind="cuda", name="T", index="0", count=1, memory_bytes=16 << 30)


def show(jobs: JobStore, worker: str, device: Device, stage: str = "train", **more: Any) -> None:
    jobs.show_worker(WorkerState(id=worker, stages=[stage], device=device, **more), 30)


@pytest.mark.parametrize(
    ("resources", "asked"),
    [
        ({"gpus": 2}, "2 GPUs"),
        ({"gpus": 1, "memory": "24GiB"}, "1 GPU with 24 GiB"),
        ({"gpus": 2, "memory": "1.5GiB"}, "2 GPUs with 1.5 GiB each"),
        ({"memory": "24GiB"}, "24 GiB of memory"),
    ],
)
def test_a_job_that_no_worker_could_run_says_so_and_is_promised_no_start(
    jobs: JobStore, resources: dict[str, Any], asked: str
) -> None:
    jobs.count("kd_job_worker_seconds_sum", 100, kind="train")
    jobs.count("kd_job_worker_seconds_count", 1, kind="train")
    job_id = queued(jobs, resources=resources)
    plain = queued(jobs, resources={"gpus": 0})
    show(jobs, "other:1", Device(kind="cuda", count=8, memory_bytes=1 << 40), "precompute")
    nobody = f"No worker serves stage train; the job waits until one starts that has {asked}."
    assert (job_of(jobs, job_id).reason, job_of(jobs, plain).reason) == (nobody, None)
    show(jobs, "cpu:1", CPU)
    show(jobs, "gpu:1", GPU)
    job = job_of(jobs, job_id)
    assert (
        job.reason
        == f"No worker of stage train has {asked}; the job waits until one starts that has."
    )
    assert (job.estimated_start_at, job.queue_position) == (None, 0)
    assert [each.reason for each in jobs.read_page(JobQuery(), 2).jobs] == [None, job.reason]
    assert (job_of(jobs, plain).reason, job_of(jobs, plain).estimated_start_at is None) == (
        None,
        False,
    )
    show(jobs, "big:1", Device(kind="cuda", count=2, memory_bytes=1 << 36), job=plain)
    job = job_of(jobs, job_id)
    assert (job.reason, job.estimated_start_at is None) == (None, False), "a busy one will do"
    jobs.hide_worker("big:1")
    jobs.change("pause", job_id)
    assert job_of(jobs, job_id).reason is None, "it waits for nobody"


def test_a_search_waits_for_no_worker(jobs: JobStore) -> None:
    space = {"train.learning_rate": {"choices": [0.1, 0.2]}}
    claim = running(jobs, "search", search={"space": space}, data=HELD_OUT, resources={"gpus": 1})
    jobs.advance(claim, "search")
    assert (job_of(jobs, claim.id).status, job_of(jobs, claim.id).reason) == ("queued", None)


def test_pauses_searches_and_failed_jobs_do_not_put_off_the_estimated_start(jobs: JobStore) -> None:
    jobs.show_worker(WorkerState(id="w:1", stages=["train"]), 30)
    claim = running(jobs, resources={"gpus": 2})
    record = f"kd:job:{claim.id}"
    jobs.redis.hincrby(record, "charged_at", -30_000)
    jobs.change("pause", claim.id)
    jobs.release(claim)
    jobs.redis.hincrby(record, "started_at", -90_000_000)  # it is paused for a day
    jobs.change("resume", claim.id)
    again = jobs.claim(claim.id, "train", "w:1", 5)
    assert again is not None
    jobs.redis.hincrby(record, "charged_at", -70_000)
    assert jobs.finish(again, "succeeded") == "succeeded"
    failing = running(jobs)
    jobs.redis.hincrby(f"kd:job:{failing.id}", "charged_at", -90_000_000)
    jobs.finish(failing, "failed", {"type": "x", "detail": "x", "remedy": ""})
    waiting = queued(jobs)
    start = job_of(jobs, waiting).estimated_start_at
    assert start is not None
    assert (start - datetime.now(UTC)).total_seconds() == pytest.approx(100, abs=5)
    space = {"train.learning_rate": {"choices": [0.1, 0.2]}}
    search = running(jobs, "search", search={"space": space}, data=HELD_OUT)
    jobs.advance(search, "search")
    driven = jobs.claim(search.id, "search", "an API", 5)
    assert driven is not None
    jobs.redis.hincrby(f"kd:job:{search.id}", "charged_at", -90_000_000)
    jobs.finish(driven, "succeeded")
    assert counted(jobs)["kd_job_worker_seconds_sum"] == pytest.approx(100, abs=5)


def test_an_estimate_of_the_start_needs_a_worker_and_a_job_that_has_ended(jobs: JobStore) -> None:
    first = queued(jobs)
    second = queued(jobs)
    assert job_of(jobs, second).estimated_start_at is None
    device = Device(kind="cuda", name="T", index="0", count=1, memory_bytes=16 << 30)
    jobs.show_worker(WorkerState(id="w:1", stages=["train"], device=device), 30)
    jobs.show_worker(WorkerState(id="w:2", stages=["train", "precompute"]), 30)
    assert job_of(jobs, second).estimated_start_at is None
    jobs.count("kd_job_worker_seconds_sum", 400, kind="train")
    jobs.count("kd_job_worker_seconds_count", 4, kind="train")
    now = datetime.now(UTC)
    starts = [
        (job_of(jobs, job_id).estimated_start_at - now).total_seconds()
        for job_id in (first, second)
    ]
    assert starts == pytest.approx([50, 100], abs=5), "a place becomes free each 100 s / 2 workers"
    assert [job.estimated_start_at is None for job in jobs.read_page(JobQuery(), 2).jobs] == [
        False,
        False,
    ]
    jobs.claim(first, "train", "w:1", 5)
    assert (job_of(jobs, first).estimated_start_at, job_of(jobs, first).queue_position) == (
        None,
        None,
    )
    assert (job_of(jobs, second).queue_position, job_of(jobs, first).worker) == (0, "w:1")


def test_only_jobs_that_nobody_was_told_of_are_announced_again(
    jobs: JobStore, parts: Parts
) -> None:
    job_id = queued(jobs)
    assert jobs.list_unannounced("train", 10) == []
    time.sleep(0.02)
    assert jobs.list_unannounced("precompute", 0.01) == []
    assert jobs.list_unannounced("train", 0.01) == [job_id]
    assert jobs.list_unannounced("train", 10) == [], "they count as told of now"
    time.sleep(0.02)
    parts.queue.send_task("kd.run_stage", args=["x", "train"], queue="train")
    assert jobs.list_unannounced("train", 0.01) == [], (
        "hints are waiting already: this key is where Celery keeps them"
    )
