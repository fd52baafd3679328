"""A record is created once for each idempotency key, within quotas, and only its caller sees it."""

from __future__ import annotations

import time
from dataclasses import replace
from datetime import timedelta
from typing import Any

from bench.support.harness import make_config
from kd.progress import Event
from services.store.callers import LOCAL_CALLER, Caller
from services.store.jobs.leases import EventBatch
from services.store.jobs.listing import JobQuery
from services.store.jobs.records import build_fields, make_job_id
from services.store.jobs.store import JobStore
from tests.support.records import (
    ANN,
    BOB,
    HOUR,
    at_once,
    job_of,
    queued,
    running,
    status,
)

# ---------------------------------------------------------------------- made


def test_ids_sort_by_time_and_do_not_repeat() -> None:
    ids = [make_job_id()]
    time.sleep(0.002)
    ids += [make_job_id() for _ in range(1000)]
    assert min(ids) == ids[0]
    assert len(set(ids)) == 1001
    assert {len(job_id) for job_id in ids} == {30}


def test_a_new_job_is_queued_for_its_first_stage(jobs: JobStore) -> None:
    job = job_of(jobs, queued(jobs, "distill"))
    assert (job.status, job.stage, job.kind, job.name, job.attempt) == (
        "queued",
        "precompute",
        "distill",
        "quick",
        0,
    )
    assert job.created_at == job.queued_at
    assert (
        job.started_at
        is job.finished_at
        is job.heartbeat_at
        is job.error
        is job.cache
        is job.deadline_at
        is None
    )
    assert (job.worker, job.reason, job.request_id, job.queue_position) == (None, None, None, 0)
    assert (job.priority, job.max_attempts, job.labels, job.depends_on, job.waits_for) == (
        5,
        3,
        {},
        [],
        [],
    )
    assert job.config["train"]["learning_rate"] == 3e-4, "the record holds the defaults too"
    assert job.links.stream == f"/jobs/{job.id}/events/stream"


def test_what_a_job_asks_of_the_service_is_in_its_record(jobs: JobStore) -> None:
    placement = {
        "labels": {"team": "nlp", "run": "a.1"},
        "priority": 8,
        "deadline_seconds": 60,
        "max_attempts": 7,
        "resources": {"gpus": 2, "memory": "16GiB"},
    }
    made = jobs.create(make_config("quick", **placement), ANN, request_id="req-1")
    job = job_of(jobs, made.id)
    assert (job.owner, job.labels, job.priority, job.max_attempts) == (
        "ann",
        placement["labels"],
        8,
        7,
    )
    assert job.resources.model_dump() == {"gpus": 2, "memory": 16 << 30, "hosts": 1}
    assert job.deadline_at - job.created_at == timedelta(seconds=60)
    assert job.request_id == "req-1"
    assert "owner" not in job.model_dump()
    claim = jobs.claim(job.id, "train", "w", 5)
    assert (claim.owner, claim.request_id) == ("ann", "req-1")


def test_the_operators_limit_of_attempts_is_for_jobs_that_name_none(jobs: JobStore) -> None:
    store = JobStore(jobs.redis, max_attempts=9)
    assert job_of(jobs, queued(store)).max_attempts == 9
    assert job_of(jobs, queued(store, max_attempts=2)).max_attempts == 2


def test_an_idempotency_key_makes_one_job(jobs: JobStore) -> None:
    created = at_once(20, lambda: jobs.create(make_config("quick"), key="key"))
    assert sorted(answer.outcome for answer in created) == ["created"] + ["replayed"] * 19
    assert len({answer.id for answer in created}) == 1
    assert jobs.create(make_config("steps"), key="key").outcome == "conflict"
    assert jobs.create(make_config("quick", priority=6), key="key").outcome == "conflict"
    assert jobs.create(make_config("quick"), key="other").outcome == "created"
    assert len(jobs.read_page(JobQuery(), 100).jobs) == 2
    (name, *_) = jobs.redis.keys("kd:idempotency:*")
    assert 0 < jobs.redis.ttl(name) <= 24 * HOUR
    assert not [
        name for name in jobs.redis.keys("kd:idempotency:*") if "key" in name.split(":")[-1]
    ]


def test_an_idempotency_key_is_the_callers_own(jobs: JobStore) -> None:
    mine, theirs = (jobs.create(make_config("quick"), caller, key="key") for caller in (ANN, BOB))
    assert (mine.outcome, theirs.outcome) == ("created", "created")
    assert jobs.create(make_config("steps"), BOB, key="key").id == theirs.id
    assert jobs.create(make_config("quick"), ANN, key="key") == replace(mine, outcome="replayed")
    tricky = Caller("ann\nkey")
    assert jobs.create(make_config("quick"), tricky, key="x").outcome == "created"
    assert jobs.create(make_config("quick"), Caller("ann"), key="key\nx").outcome == "created"


def test_an_idempotency_key_of_a_deleted_job_is_free_again(jobs: JobStore) -> None:
    first = jobs.create(make_config("quick"), key="key").id
    jobs.change("cancel", first)
    assert jobs.create(make_config("quick"), key="key").outcome == "replayed", (
        "it has ended, but it is there"
    )
    jobs.change("delete", first)
    again = jobs.create(make_config("quick"), key="key")
    assert again.outcome == "created"
    assert again.id != first


def test_a_caller_has_so_many_open_jobs_and_no_more(jobs: JobStore) -> None:
    def create(caller: Caller, key: str | None = None) -> Any:
        return jobs.create(make_config("quick"), caller, key, max_open=3)

    first = create(ANN, "key").id
    blocked = jobs.create(make_config("quick", depends_on=[first]), ANN, max_open=3).id
    paused = create(ANN).id
    jobs.change("pause", paused)
    assert vars(create(ANN)) == {"outcome": "quota", "id": "", "detail": "3"}
    assert create(BOB).outcome == "created"
    assert create(ANN, "key").outcome == "replayed", "no new job"
    assert status(jobs, blocked) == "waiting"
    jobs.change("cancel", paused)
    assert create(ANN).outcome == "created"
    answers = at_once(10, lambda: create(BOB))
    assert sorted(answer.outcome for answer in answers) == ["created"] * 2 + ["quota"] * 8


def test_a_caller_has_so_many_bytes_of_records_and_no_more_however_many_have_ended(
    jobs: JobStore,
) -> None:
    def create(caller: Caller, key: str | None = None) -> Any:
        return jobs.create(make_config("quick"), caller, key, max_bytes=10_000)

    made = []
    while (answer := create(ANN)).outcome == "created":
        made.append(answer.id)
        jobs.change("cancel", answer.id)
    assert answer.outcome == "record_quota"
    assert answer.id == ""
    assert int(answer.detail) > 10_000
    assert 1 < len(made) < 10
    size = int(jobs.redis.hget("kd:records", "ann")) // len(made)
    assert (
        abs(
            size
            - sum(
                len(name) + len(value)
                for name, value in build_fields(make_config("quick"), 3).items()
            )
        )
        < 100
    )
    assert create(BOB, "key").outcome == "created"
    assert create(BOB, "key").outcome == "replayed", "no new record"
    jobs.change("delete", made[0])
    again = create(ANN)
    assert again.outcome == "created"
    jobs.change("cancel", again.id)
    for job_id in (*made[1:], again.id):
        jobs.change("delete", job_id)
    assert list(jobs.redis.hgetall("kd:records")) == ["bob"]


def test_records_that_were_made_before_bytes_were_counted_weigh_nothing(jobs: JobStore) -> None:
    old, new = (jobs.create(make_config("quick"), ANN, max_bytes=1_000_000).id for _ in range(2))
    counted = int(jobs.redis.hget("kd:records", "ann")) // 2
    jobs.redis.hdel(f"kd:job:{old}", "record_bytes")
    jobs.redis.hset("kd:records", "ann", counted)
    for job_id, left in ((old, str(counted)), (new, None)):
        jobs.change("cancel", job_id)
        jobs.change("delete", job_id)
        assert jobs.redis.hget("kd:records", "ann") == left


def test_a_job_that_is_refused_leaves_nothing(jobs: JobStore) -> None:
    queued(jobs, caller=ANN)
    before = sorted(jobs.redis.keys("*"))
    assert jobs.create(make_config("quick"), ANN, "key", max_open=1).outcome == "quota"
    assert jobs.create(make_config("quick"), ANN, "key", max_bytes=4000).outcome == "record_quota"
    assert (
        jobs.create(make_config("quick", depends_on=[make_job_id()]), ANN, "key").outcome
        == "bad_dependency"
    )
    assert sorted(jobs.redis.keys("*")) == before


# ---------------------------------------------------------------------- callers


def test_another_callers_job_does_not_exist(jobs: JobStore) -> None:
    mine = queued(jobs, caller=ANN)
    assert job_of(jobs, mine).owner == "ann"
    assert jobs.get(mine, ANN) == jobs.get(mine, LOCAL_CALLER)
    assert jobs.get(mine, BOB) is None
    assert jobs.get(mine, Caller("root", sees_all=True)) is not None
    theirs = queued(jobs, caller=BOB)
    for caller, seen in (
        (ANN, [mine]),
        (BOB, [theirs]),
        (LOCAL_CALLER, [theirs, mine]),
        (Caller("eve"), []),
    ):
        assert [job.id for job in jobs.read_page(JobQuery(caller), 10).jobs] == seen
        assert [
            job.id for job in jobs.read_page(JobQuery(caller, status="queued"), 10).jobs
        ] == seen


def test_another_callers_job_cannot_be_waited_for(jobs: JobStore) -> None:
    theirs = queued(jobs, caller=BOB)
    nobodys = make_job_id()
    foreign = jobs.create(make_config("quick", depends_on=[theirs]), ANN)
    unknown = jobs.create(make_config("quick", depends_on=[nobodys]), ANN)
    assert (foreign.outcome, foreign.id, foreign.detail) == ("bad_dependency", theirs, "unknown")
    assert (unknown.outcome, unknown.id, unknown.detail) == ("bad_dependency", nobodys, "unknown")
    assert jobs.create(make_config("quick", depends_on=[theirs]), BOB).outcome == "created"
    assert jobs.create(make_config("quick", depends_on=[theirs]), LOCAL_CALLER).outcome == "created"


def test_caches_are_their_owners(jobs: JobStore) -> None:
    made = "a" * 32
    read = "b" * 32
    claim = running(jobs, "distill", caller=ANN)
    jobs.beat(claim, 5, EventBatch(1, (Event("cache", {"fingerprint": made}),)))
    reader = queued(jobs, caller=BOB, loss={"alpha": 0.1}, cache={"fingerprint": read})
    assert jobs.find_caches(ANN) == {made}
    assert jobs.find_caches(BOB) == {read}
    assert jobs.find_caches(LOCAL_CALLER) is None
    assert (
        jobs.find_cache_users(made),
        jobs.find_cache_users(read),
        jobs.find_cache_users("c" * 32),
    ) == (
        [claim.id],
        [reader],
        [],
    )
    assert job_of(jobs, reader).cache.fingerprint == read
    jobs.finish(claim, "succeeded")
    assert jobs.find_cache_users(made) == []
    shared = queued(jobs, caller=ANN, loss={"alpha": 0.1}, cache={"fingerprint": read})
    assert jobs.find_cache_users(read) == sorted([reader, shared])
    assert jobs.forget_cache(ANN, read), "another key has it in its list"
    assert not jobs.forget_cache(BOB, read)
    assert (jobs.find_caches(ANN), jobs.find_caches(BOB)) == ({made}, set())


def test_a_job_of_several_caches_uses_all_of_them(jobs: JobStore) -> None:
    """Each capture names its own cache besides, and none of the others is let go."""
    names = ["a" * 32, "b" * 32]
    claim = running(jobs, "distill", caller=ANN)
    plan = Event("plan", {"fingerprint": names[0], "fingerprints": names})
    jobs.beat(claim, 5, EventBatch(1, (plan,)))
    for number, name in enumerate(names, 2):
        jobs.beat(claim, 5, EventBatch(number, (Event("cache", {"fingerprint": name}),)))
        assert [jobs.find_cache_users(each) for each in names] == [[claim.id], [claim.id]]
        assert [jobs.find_open_users(each) for each in names] == [[claim.id], [claim.id]]
    assert jobs.find_caches(ANN) == set(names)
    (naming,) = jobs.read_naming_jobs()
    assert all(name in naming.text for name in names)
    assert job_of(jobs, claim.id).cache.names == names[::-1]
    jobs.finish(claim, "succeeded")
    assert jobs.change("delete", claim.id).outcome == "done"
    assert [jobs.find_cache_jobs(each) for each in names] == [[], []]


def test_a_job_that_takes_another_cache_lets_go_of_the_first(jobs: JobStore) -> None:
    claim = running(jobs, "distill")
    for number, name in enumerate(("a" * 32, "b" * 32, None), 1):
        jobs.beat(claim, 5, EventBatch(number, (Event("cache", {"fingerprint": name}),)))
    assert job_of(jobs, claim.id).cache.fingerprint == "b" * 32
    assert (jobs.find_cache_users("a" * 32), jobs.find_cache_users("b" * 32)) == ([], [claim.id])
