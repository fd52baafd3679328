"""Listing and counting by indexes, at a cost that does not grow with the number of jobs."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from bench.support.harness import Parts, make_config
from kd.client.wire.service import WorkerState
from services.store.jobs.leases import EventBatch
from services.store.jobs.listing import MAX_SCANNED, JobPage, JobQuery
from services.store.jobs.records import build_fields, make_job_id
from services.store.jobs.script import SCRIPT
from services.store.jobs.store import JobStore
from tests.support.records import (
    ANN,
    BOB,
    ERROR,
    STATUSES,
    counted,
    finished,
    job_of,
    queued,
    running,
)

# ---------------------------------------------------------------------- listing


def test_listing_is_newest_first_and_filters(jobs: JobStore) -> None:
    ids = [
        queued(jobs, "distill" if index % 2 else "train", labels={"n": str(index % 3)})
        for index in range(250)
    ]
    jobs.change("cancel", ids[10])

    def found(limit: int = 1000, cursor: int | None = None, **query: Any) -> list[str]:
        return [job.id for job in jobs.read_page(JobQuery(**query), limit, cursor).jobs]

    assert found() == ids[::-1]
    assert found(status="cancelled") == [ids[10]]
    assert found(status="queued", kind="train", label=("n", "0")) == ids[0::6][::-1]
    assert found(kind="distill") == ids[1::2][::-1]
    assert found(label=("n", "9")) == found(label=("m", "0")) == found(kind="search") == []
    assert found(parent="job_x") == []
    assert found(text=ids[7].upper()) == [ids[7]]
    assert found(text="N:2") == found(label=("n", "2"))
    assert found(text=job_of(jobs, ids[0]).name[1:]) == ids[::-1]
    assert found(text="no such text") == []
    teacher = job_of(jobs, ids[1]).config["teacher"]["model"]
    assert found(text=teacher, kind="distill") == ids[1::2][::-1]
    moment = job_of(jobs, ids[100]).created_at
    assert all(job_of(jobs, job_id).created_at > moment for job_id in found(created_after=moment))
    assert len(found(created_after=moment)) == sum(
        job_of(jobs, job_id).created_at > moment for job_id in ids
    )
    assert found(created_after=moment, limit=3) == ids[:-4:-1]
    assert found(created_after=datetime.now(UTC) + timedelta(hours=1)) == []
    assert len(found(created_after=datetime(2020, 1, 1, tzinfo=UTC))) == 250


@pytest.mark.parametrize("limit", [1, 7, 50, 250])
def test_pages_are_the_listing_in_parts(jobs: JobStore, limit: int) -> None:
    ids = [queued(jobs, "distill" if index % 5 else "train") for index in range(120)]
    wanted: dict[str | None, list[str]] = {None: ids[::-1], "train": ids[0::5][::-1]}
    cursor = 1 + int(jobs.redis.zscore("kd:open", ids[-1]))  # before what is made below
    for kind in wanted:
        found = list[str]()
        page = JobPage([], cursor)
        while page.next_cursor is not None:
            page = jobs.read_page(JobQuery(kind=kind), limit, page.next_cursor)
            assert len(page.jobs) <= limit
            found += [job.id for job in page.jobs]
            queued(jobs)  # a job that is created meanwhile changes no page
        assert found == wanted[kind]


def test_a_cursor_survives_the_job_that_it_stands_at(jobs: JobStore) -> None:
    ids = [queued(jobs) for _ in range(6)]
    first = jobs.read_page(JobQuery(), 3)
    jobs.change("cancel", ids[3])
    jobs.change("delete", ids[3])
    assert [job.id for job in jobs.read_page(JobQuery(), 3, first.next_cursor).jobs] == ids[2::-1]


def commands(jobs: JobStore, act: Callable[[], Any]) -> tuple[Any, dict[str, int]]:
    """The answer, and the number of calls of each server command."""
    jobs.redis.config_resetstat()
    answer = act()
    found = jobs.redis.info("commandstats")
    skip = ("config|resetstat", "info", "eval", "evalsha")
    counts = {name.removeprefix("cmdstat_"): stats["calls"] for name, stats in found.items()}
    return answer, {name: calls for name, calls in counts.items() if name not in skip}


def test_a_job_is_read_in_one_round_trip(jobs: JobStore) -> None:
    ids = [queued(jobs) for _ in range(5)]
    jobs.show_worker(WorkerState(id="host:1", stages=["train"]), 60)

    def count_round_trips() -> int:
        return int(jobs.redis.info("stats")["total_reads_processed"])

    jobs.get(ids[0])
    before = count_round_trips()
    for job_id in ids:
        assert jobs.get(job_id) is not None
    assert count_round_trips() - before == len(ids) + 1, "one more for the second look"


@pytest.fixture(scope="module")
def crowd(_shared: Parts) -> Iterator[tuple[JobStore, list[str]]]:
    """A store of 20,000 jobs, of which the fifty oldest are cancelled."""
    jobs = _shared.jobs
    jobs.redis.flushall()
    fields = build_fields(make_config("quick"), 3)
    fields["config"] = '{"kind":"train"}'  # a short one: its size does not matter here
    flat = [text for pair in fields.items() for text in pair]
    ids = [make_job_id() for _ in range(20_000)]
    jobs.redis.script_load(SCRIPT)
    for start in range(0, len(ids), 5000):
        pipeline = jobs.redis.pipeline(transaction=False)
        for job_id in ids[start : start + 5000]:
            pipeline.evalsha(jobs._script.sha, 0, "create", job_id, "ann", 0, "", "", "", "", *flat)
        pipeline.execute()
    # Two jobs of one microsecond are listed by their ids.
    created = dict(jobs.redis.zrange("kd:open", 0, -1, withscores=True))
    ids.sort(key=lambda job_id: (created[job_id], job_id))
    for job_id in ids[:50]:
        jobs.change("cancel", job_id)
    yield jobs, ids
    jobs.redis.flushall()


def test_a_page_of_a_twenty_thousand_jobs_costs_a_page(crowd: tuple[JobStore, list[str]]) -> None:
    jobs, ids = crowd
    cursor = int(jobs.redis.zscore("kd:open", ids[10_000]))
    queries: list[tuple[JobQuery, int | None, list[str]]] = [
        (JobQuery(), None, ids[:-21:-1]),
        (JobQuery(ANN), cursor, ids[9_999:9_979:-1]),
        (JobQuery(status="queued"), cursor, ids[9_999:9_979:-1]),
        (JobQuery(status="cancelled"), None, ids[49:29:-1]),
        (JobQuery(BOB), None, []),
        (JobQuery(status="running"), None, []),
        (JobQuery(created_after=jobs.get(ids[-1]).created_at + timedelta(hours=1)), None, []),
    ]
    for query, start, wanted in queries:
        page, counts = commands(
            jobs, lambda query=query, start=start: jobs.read_page(query, 20, start)
        )
        assert [job.id for job in page.jobs] == wanted
        assert counts.pop("zrevrangebyscore") == 1
        assert counts.get("hgetall", 0) <= 21 + 1
        # Three a record, three for the workers, the script's two (its format and the time), and for
        # the one team whose jobs wait: its account twice, its devices, its queue and its first job.
        assert sum(counts.values()) <= 3 * 21 + 3 + 2 + 9, counts


def test_a_filter_that_nothing_passes_looks_at_so_many_records_and_gives_a_cursor(
    crowd: tuple[JobStore, list[str]],
) -> None:
    jobs, ids = crowd
    page, counts = commands(jobs, lambda: jobs.read_page(JobQuery(label=("no", "such")), 20))
    assert page.jobs == []
    assert page.next_cursor is not None
    assert counts["hgetall"] <= MAX_SCANNED + 10
    assert counts["zrevrangebyscore"] <= MAX_SCANNED // 100
    passed = ids.index(jobs.redis.zrangebyscore("kd:open", page.next_cursor, page.next_cursor)[0])
    assert len(ids) - passed == MAX_SCANNED, "and the next page goes on there"


def test_a_claim_and_a_beat_cost_the_same_among_a_twenty_thousand_jobs(
    crowd: tuple[JobStore, list[str]],
) -> None:
    jobs, ids = crowd
    claim, counts = commands(jobs, lambda: jobs.claim_next("train", "w", 5))
    assert claim.id == ids[50]
    assert sum(counts.values()) < 80, counts
    _, counts = commands(jobs, lambda: jobs.beat(claim, 5, EventBatch(1, ())))
    assert sum(counts.values()) < 15, counts
    _, counts = commands(
        jobs, lambda: (jobs.release(claim), jobs.expire(), jobs.due(), jobs.count_statuses())
    )
    assert sum(counts.values()) < 80, counts
    made, counts = commands(
        jobs, lambda: jobs.create(make_config("quick"), ANN, "key", max_open=1_000_000)
    )
    assert made.outcome == "created"
    assert sum(counts.values()) < 60, counts
    _, counts = commands(jobs, lambda: jobs.list_unannounced("train", 0))
    assert sum(counts.values()) < 500, counts


# ---------------------------------------------------------------------- counted


def test_the_script_counts_what_it_does(jobs: JobStore) -> None:
    first = running(jobs)
    jobs.fail_attempt(first, ERROR)
    jobs.finish(jobs.claim(first.id, "train", "w", 5), "succeeded")
    found = {(name, *sorted(labels.items())): value for name, labels, value in jobs.read_counters()}
    kind = ("kind", "train")
    assert {
        entry[2][1]: value
        for entry, value in found.items()
        if entry[0] == "kd_jobs_total" and kind in entry
    } == {
        "queued": 2,
        "running": 2,
        "succeeded": 1,
    }
    assert found["kd_job_attempts_total", ("reason", "worker_lost")] == 1
    assert found["kd_job_queue_wait_seconds_count", ("stage", "train")] == 2
    assert found["kd_job_duration_seconds_count", kind, ("status", "succeeded")] == 1
    buckets = {
        dict(entry[1:])["le"]: value
        for entry, value in found.items()
        if entry[0] == "kd_job_duration_seconds_bucket"
    }
    assert buckets["+Inf"] == buckets["1"] == 1
    assert sorted(buckets.values()) == list(buckets.values()), "a bucket holds those below it"


def test_a_clock_that_is_set_back_lessens_no_sum(jobs: JobStore) -> None:
    job_id = queued(jobs)
    tomorrow = int((time.time() + 86_400) * 1000)
    jobs.redis.hset(f"kd:job:{job_id}", "queued_at", tomorrow)
    claim = jobs.claim(job_id, "train", "w", 5)
    jobs.redis.hset(f"kd:job:{job_id}", "started_at", tomorrow)
    jobs.finish(claim, "succeeded")
    found = counted(jobs)
    assert found["kd_job_queue_wait_seconds_sum"] == found["kd_job_duration_seconds_sum"] == 0
    assert found["kd_job_duration_seconds_count"] == 1


def test_a_job_that_never_ran_has_no_duration(jobs: JobStore) -> None:
    jobs.change("cancel", queued(jobs))
    assert "kd_job_duration_seconds_count" not in counted(jobs)


def test_counts_from_elsewhere_add_up(jobs: JobStore) -> None:
    jobs.count("kd_train_tokens_total", 2.5)
    jobs.count("kd_train_tokens_total", 1.5)
    jobs.count("kd_gpu_memory_bytes", 7, device="0", worker="w")
    assert sorted(jobs.read_counters()) == [
        ("kd_gpu_memory_bytes", {"device": "0", "worker": "w"}, 7.0),
        ("kd_train_tokens_total", {}, 4.0),
    ]


def test_statuses_and_depths_are_counted_by_the_indexes(jobs: JobStore) -> None:
    finished(jobs)
    queued(jobs, "distill")
    queued(jobs, "distill")
    waits = queued(jobs)
    queued(jobs, depends_on=[waits])
    jobs.change("pause", waits)
    assert jobs.count_statuses() == {
        **dict.fromkeys(STATUSES, 0),
        "succeeded": 1,
        "queued": 2,
        "paused": 1,
        "waiting": 1,
    }
    assert jobs.read_queue_depths(["precompute", "train"]) == {"precompute": 2, "train": 0}


def test_a_worker_is_seen_as_long_as_it_shows_itself(jobs: JobStore) -> None:
    state = WorkerState(id="host:1", host="host", pid=1, stages=["train"], job="job_x", attempt=2)
    jobs.show_worker(state, 1)
    jobs.show_worker(WorkerState(id="host:2", stages=["train", "precompute"]), 30)
    assert jobs.list_workers()[0] == state
    assert (
        jobs.count_workers("train"),
        jobs.count_workers("precompute"),
        jobs.count_workers("search"),
    ) == (
        2,
        1,
        0,
    )
    jobs.redis.delete("kd:worker:host:1")
    assert [worker.id for worker in jobs.list_workers()] == ["host:2"]
    assert jobs.redis.smembers("kd:workers") == {"host:2"}
    jobs.hide_worker("host:2")
    assert jobs.list_workers() == []
    assert jobs.redis.exists("kd:workers", "kd:worker:host:2") == 0
