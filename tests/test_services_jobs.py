"""The job record, on a real server: what the head of jobs.lua promises, transition by transition and key by key."""

from __future__ import annotations

import re
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from itertools import pairwise
from typing import Any

import pytest
from redis.exceptions import RedisError

from services.jobs import (
    LOCAL,
    SCAN,
    SCRIPT,
    SERIES,
    Batch,
    Caller,
    Capacity,
    Claim,
    Delivery,
    JobPage,
    JobQuery,
    JobStore,
    Origin,
    connect,
    fields_of,
    new_id,
)
from services.schemas import ACTIVE, TERMINAL, TRANSITIONS, Device, Job, Status, WorkerState
from tests.harness import Parts, config

ERROR = {"type": "worker_lost", "detail": "It was killed.", "remedy": "Buy memory."}
STATUSES: tuple[str, ...] = Status.__args__  # type: ignore[attr-defined]
WAITS = ("waiting", "paused")  #: statuses in which the end of a dependency may matter
ANN, BOB = Caller("ann"), Caller("bob")
HOUR = 3600


@pytest.fixture
def jobs(parts: Parts) -> JobStore:
    return parts.jobs


def queued(jobs: JobStore, kind: str = "train", caller: Caller = LOCAL, **changes: Any) -> str:
    return jobs.create(config("quick", kind, **changes), caller).id


def running(jobs: JobStore, kind: str = "train", **changes: Any) -> Claim:
    job_id = queued(jobs, kind, **changes)
    claim = jobs.claim(job_id, jobs.get(job_id).stage, "w", 5)
    assert claim is not None
    return claim


def finished(jobs: JobStore, outcome: str = "succeeded", **changes: Any) -> str:
    claim = running(jobs, **changes)
    assert jobs.finish(claim, outcome, None if outcome == "succeeded" else ERROR) == outcome
    return claim.id


def status(jobs: JobStore, job_id: str) -> str:
    return job_of(jobs, job_id).status


def job_of(jobs: JobStore, job_id: str) -> Job:
    job = jobs.get(job_id)
    assert job is not None
    return job


def let_pass(jobs: JobStore, what: str, job_id: str) -> None:
    """The end of a lease, or a deadline, lies in the past; nothing happens where the job has none."""
    jobs.redis.zadd(f"kd:{what}", {job_id: 1}, xx=True)


# ---------------------------------------------------------------------- the table at the head of jobs.lua

Table = dict[str, dict[str, frozenset[str]]]
GONE = "(none)"


def table() -> Table:
    """Action -> status before -> statuses after, as the comment says it."""
    lines = iter(SCRIPT.splitlines())
    header = next(line for line in lines if line.startswith("--   action"))
    start, to, end = (header.index(word) for word in ("from", "to ", "asked"))
    found: Table = defaultdict(dict)
    action = ""
    for line in lines:
        if line == "--":
            return dict(found)
        action = line[5:start].strip() or action
        after = words(line[to:end])
        for before in words(line[start:to]):
            found[action][before] = frozenset({before} if after == ["the", "same"] else after)
    raise AssertionError("the table has no end")


def words(text: str) -> list[str]:
    return re.findall(r"\(none\)|\w+", text)


@dataclass(frozen=True)
class Placed:
    """A job in some status; whoever has it, and the claims of the jobs that it waits for."""

    id: str
    claim: Claim
    needs: tuple[Claim, ...] = ()


def place(jobs: JobStore, *steps: Callable[[Placed], object], needs: int = 0, **changes: Any) -> Placed:
    """A job that has a deadline, after some steps."""
    others = tuple(running(jobs) for _ in range(needs))
    job_id = queued(jobs, "distill", depends_on=[claim.id for claim in others], deadline_seconds=HOUR, **changes)
    placed = Placed(job_id, jobs.claim(job_id, "precompute", "w", 5) or Claim(job_id, 0, 0, {}), others)
    for step in steps:
        step(placed)
    return placed


def ways_into(jobs: JobStore) -> Iterator[tuple[str, Callable[[], Placed]]]:
    """Every status, and for each of them every history that makes a difference to what may follow."""

    def change(action: Any) -> Callable[[Placed], object]:
        return lambda placed: jobs.change(action, placed.id)

    def late(placed: Placed) -> None:
        let_pass(jobs, "deadlines", placed.id)
        jobs.due()

    def end(outcome: Any) -> Callable[[Placed], object]:
        return lambda placed: jobs.finish(placed.claim, outcome, ERROR)

    def fail_need(placed: Placed) -> None:
        jobs.finish(placed.needs[0], "failed", ERROR)

    def retry_need(placed: Placed) -> None:
        jobs.change("retry", placed.needs[0].id)

    def unclaimed(*steps: Callable[[Placed], object], **changes: Any) -> Callable[[], Placed]:
        return lambda: place(jobs, lambda placed: jobs.release(placed.claim), *steps, **changes)

    yield "waiting", lambda: place(jobs, needs=1)
    yield "waiting", lambda: place(jobs, needs=2)
    yield "queued", unclaimed()
    yield "running", lambda: place(jobs)
    yield "running", lambda: place(jobs, max_attempts=1)
    yield "cancelling", lambda: place(jobs, change("cancel"))
    yield "cancelling", lambda: place(jobs, late)
    yield "pausing", lambda: place(jobs, change("pause"))
    yield "pausing", lambda: place(jobs, change("pause"), max_attempts=1)
    yield "paused", unclaimed(change("pause"))
    yield "paused", lambda: place(jobs, change("pause"), needs=1)
    yield "succeeded", lambda: place(jobs, end("succeeded"))
    yield "failed", lambda: place(jobs, end("failed"))
    yield "failed", lambda: place(jobs, late, needs=1)
    yield "failed", lambda: place(jobs, late, fail_need, needs=1)
    yield "cancelled", unclaimed(change("cancel"))
    yield "cancelled", lambda: place(jobs, fail_need, needs=1)
    yield "cancelled", lambda: place(jobs, fail_need, retry_need, needs=1)


def actions(jobs: JobStore) -> Iterator[tuple[str, Callable[[Placed], bool]]]:
    """Every action but create; each says whether it was taken."""

    def client(action: Any) -> Callable[[Placed], bool]:
        return lambda placed: jobs.change(action, placed.id).outcome == "done"

    def worker(act: Callable[[Claim], str]) -> Callable[[Placed], bool]:
        return lambda placed: act(placed.claim) != "fenced"

    def expire(placed: Placed) -> bool:
        let_pass(jobs, "leases", placed.id)
        return placed.id in jobs.expire()

    def due(placed: Placed) -> bool:
        let_pass(jobs, "deadlines", placed.id)
        return placed.id in jobs.due()

    def settle(outcome: Any) -> Callable[[Placed], bool]:
        def end(placed: Placed) -> bool:
            before = status(jobs, placed.id)
            return bool(placed.needs) and jobs.finish(placed.needs[0], outcome, ERROR) == outcome and before in WAITS

        return end

    for action in TRANSITIONS:
        yield action, client(action)
    yield "claim", lambda placed: jobs.claim(placed.id, "precompute", "w", 5) is not None
    yield "beat", worker(lambda claim: jobs.beat(claim, 5, Batch(1, ())))
    yield "advance", worker(lambda claim: jobs.advance(claim, "train"))
    yield "release", worker(jobs.release)
    yield "die", worker(lambda claim: jobs.fail_attempt(claim, ERROR))
    yield "die", expire
    for outcome in ("succeeded", "failed"):
        yield "finish", worker(lambda claim, outcome=outcome: jobs.finish(claim, outcome, ERROR))
        yield "settle", settle(outcome)
    yield "due", due


def everything(jobs: JobStore, job_id: str) -> tuple[Any, ...]:
    return jobs.redis.hgetall(f"kd:job:{job_id}"), jobs.events(job_id)


def test_the_clients_part_of_the_table_is_what_the_api_is_told() -> None:
    assert {action: frozenset(rows) for action, rows in table().items() if action in TRANSITIONS} == TRANSITIONS
    assert {after for rows in table().values() for row in rows.values() for after in row} == {*STATUSES, GONE}


def test_every_action_from_every_status_does_what_the_table_says_and_nothing_else(jobs: JobStore) -> None:
    seen: Table = defaultdict(lambda: defaultdict(frozenset))
    for action, act in actions(jobs):
        for before, arrive in ways_into(jobs):
            placed = arrive()
            assert status(jobs, placed.id) == before
            untouched = everything(jobs, placed.id)
            taken = act(placed)
            after = status(jobs, placed.id) if jobs.redis.exists(f"kd:job:{placed.id}") else GONE
            if taken:
                seen[action][before] |= {after}
            elif action != "settle":
                assert everything(jobs, placed.id) == untouched, (action, before)
            else:  # it waits for fewer jobs, which is seen in its version and nowhere else
                assert everything(jobs, placed.id)[1] == untouched[1], before
            jobs.redis.flushall()
    seen["create"][GONE] = frozenset({"waiting", "queued"})
    assert {action: dict(rows) for action, rows in seen.items()} == table()


def test_a_transition_and_its_event_are_one(jobs: JobStore) -> None:
    for action, act in actions(jobs):
        for before, arrive in ways_into(jobs):
            placed = arrive()
            told = len(jobs.events(placed.id, types=["status"]))
            version = jobs.version(placed.id)
            act(placed)
            job = jobs.get(placed.id)
            if job is not None:
                events = jobs.events(placed.id, types=["status"])
                moved = job.status != before or job.stage != "precompute" or len(events) > told
                assert len(events) == told or moved
                assert events[-1][2]["status"] == job.status, (action, before)
                assert (events[-1][2]["stage"], events[-1][2]["attempt"]) == (job.stage, job.attempt)
                assert events[-1][2]["reason"] == job.reason
                assert (events[-1][2]["error"] or None) == (job.error and job.error.model_dump())
                assert job.version > version if moved and len(events) > told else job.version >= version
            jobs.redis.flushall()


def test_an_action_says_what_came_of_it(jobs: JobStore) -> None:
    job_id = queued(jobs)
    assert vars(jobs.change("pause", job_id)) == {"outcome": "done", "status": "paused"}
    assert vars(jobs.change("pause", job_id)) == {"outcome": "already", "status": "paused"}
    assert vars(jobs.change("retry", job_id)) == {"outcome": "illegal", "status": "paused"}
    assert vars(jobs.change("resume", job_id)) == {"outcome": "done", "status": "queued"}
    assert vars(jobs.change("resume", job_id)) == {"outcome": "already", "status": "queued"}
    assert vars(jobs.change("cancel", job_id)) == {"outcome": "done", "status": "cancelled"}
    assert vars(jobs.change("cancel", job_id)) == {"outcome": "already", "status": "cancelled"}
    assert vars(jobs.change("pause", job_id)) == {"outcome": "illegal", "status": "cancelled"}
    assert vars(jobs.change("delete", job_id)) == {"outcome": "done", "status": "deleted"}
    assert vars(jobs.change("delete", job_id)) == {"outcome": "unknown", "status": ""}


# ---------------------------------------------------------------------- made


def test_ids_sort_by_time_and_do_not_repeat() -> None:
    ids = [new_id()]
    time.sleep(0.002)
    ids += [new_id() for _ in range(1000)]
    assert min(ids) == ids[0]
    assert len(set(ids)) == 1001
    assert {len(job_id) for job_id in ids} == {30}


def test_a_new_job_is_queued_for_its_first_stage(jobs: JobStore) -> None:
    job = job_of(jobs, queued(jobs, "distill"))
    assert (job.status, job.stage, job.kind, job.name, job.attempt) == ("queued", "precompute", "distill", "quick", 0)
    assert job.created_at == job.queued_at
    assert job.started_at is job.finished_at is job.heartbeat_at is job.error is job.cache is job.deadline_at is None
    assert (job.worker, job.reason, job.request_id, job.queue_position) == (None, None, None, 0)
    assert (job.priority, job.max_attempts, job.labels, job.depends_on, job.waits_for) == (5, 3, {}, [], [])
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
    made = jobs.create(config("quick", **placement), ANN, origin=Origin("req-1", "00-aa-bb-01"))
    job = job_of(jobs, made.id)
    assert (job.owner, job.labels, job.priority, job.max_attempts) == ("ann", placement["labels"], 8, 7)
    assert job.resources.model_dump() == {"gpus": 2, "memory": 16 << 30}
    assert job.deadline_at - job.created_at == timedelta(seconds=60)
    assert job.request_id == "req-1"
    assert "owner" not in job.model_dump()
    claim = jobs.claim(job.id, "train", "w", 5)
    assert (claim.owner, claim.request_id, claim.traceparent) == ("ann", "req-1", "00-aa-bb-01")


def test_the_operators_limit_of_attempts_is_for_jobs_that_name_none(jobs: JobStore) -> None:
    store = JobStore(jobs.redis, max_attempts=9)
    assert job_of(jobs, queued(store)).max_attempts == 9
    assert job_of(jobs, queued(store, max_attempts=2)).max_attempts == 2


def at_once(times: int, act: Callable[[], Any]) -> list[Any]:
    """The answers to as many calls, each from a thread of its own."""
    answers, barrier = [], threading.Barrier(times)

    def call() -> None:
        barrier.wait()
        answers.append(act())

    threads = [threading.Thread(target=call) for _ in range(times)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return answers


def test_an_idempotency_key_makes_one_job(jobs: JobStore) -> None:
    created = at_once(20, lambda: jobs.create(config("quick"), key="key"))
    assert sorted(answer.outcome for answer in created) == ["created"] + ["replayed"] * 19
    assert len({answer.id for answer in created}) == 1
    assert jobs.create(config("steps"), key="key").outcome == "conflict"
    assert jobs.create(config("quick", priority=6), key="key").outcome == "conflict"
    assert jobs.create(config("quick"), key="other").outcome == "created"
    assert len(jobs.page(JobQuery(), 100).jobs) == 2
    (name, *_) = jobs.redis.keys("kd:idempotency:*")
    assert 0 < jobs.redis.ttl(name) <= 24 * HOUR
    assert not [name for name in jobs.redis.keys("kd:idempotency:*") if "key" in name.split(":")[-1]]


def test_an_idempotency_key_is_the_callers_own(jobs: JobStore) -> None:
    mine, theirs = (jobs.create(config("quick"), caller, key="key") for caller in (ANN, BOB))
    assert (mine.outcome, theirs.outcome) == ("created", "created")
    assert jobs.create(config("steps"), BOB, key="key").id == theirs.id
    assert jobs.create(config("quick"), ANN, key="key") == replace(mine, outcome="replayed")
    tricky = Caller("ann\nkey")
    assert jobs.create(config("quick"), tricky, key="x").outcome == "created"
    assert jobs.create(config("quick"), Caller("ann"), key="key\nx").outcome == "created"


def test_an_idempotency_key_of_a_deleted_job_is_free_again(jobs: JobStore) -> None:
    first = jobs.create(config("quick"), key="key").id
    jobs.change("cancel", first)
    assert jobs.create(config("quick"), key="key").outcome == "replayed", "it has ended, but it is there"
    jobs.change("delete", first)
    again = jobs.create(config("quick"), key="key")
    assert again.outcome == "created"
    assert again.id != first


def test_a_caller_has_so_many_open_jobs_and_no_more(jobs: JobStore) -> None:
    def create(caller: Caller, key: str | None = None) -> Any:
        return jobs.create(config("quick"), caller, key, max_open=3)

    first = create(ANN, "key").id
    blocked = jobs.create(config("quick", depends_on=[first]), ANN, max_open=3).id
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


def test_a_caller_has_so_many_bytes_of_records_and_no_more_however_many_have_ended(jobs: JobStore) -> None:
    def create(caller: Caller, key: str | None = None) -> Any:
        return jobs.create(config("quick"), caller, key, max_bytes=10_000)

    made = []
    while (answer := create(ANN)).outcome == "created":
        made.append(answer.id)
        jobs.change("cancel", answer.id)
    assert answer.outcome == "record_quota"
    assert answer.id == ""
    assert int(answer.detail) > 10_000
    assert 1 < len(made) < 10
    size = int(jobs.redis.hget("kd:records", "ann")) // len(made)
    assert abs(size - sum(len(name) + len(value) for name, value in jobs._new(config("quick")).items())) < 100
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
    old, new = (jobs.create(config("quick"), ANN, max_bytes=1_000_000).id for _ in range(2))
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
    assert jobs.create(config("quick"), ANN, "key", max_open=1).outcome == "quota"
    assert jobs.create(config("quick"), ANN, "key", max_bytes=4000).outcome == "record_quota"
    assert jobs.create(config("quick", depends_on=[new_id()]), ANN, "key").outcome == "bad_dependency"
    assert sorted(jobs.redis.keys("*")) == before


# ---------------------------------------------------------------------- callers


def test_another_callers_job_does_not_exist(jobs: JobStore) -> None:
    mine = queued(jobs, caller=ANN)
    assert job_of(jobs, mine).owner == "ann"
    assert jobs.get(mine, ANN) == jobs.get(mine, LOCAL)
    assert jobs.get(mine, BOB) is None
    assert jobs.get(mine, Caller("root", sees_all=True)) is not None
    theirs = queued(jobs, caller=BOB)
    for caller, seen in ((ANN, [mine]), (BOB, [theirs]), (LOCAL, [theirs, mine]), (Caller("eve"), [])):
        assert [job.id for job in jobs.page(JobQuery(caller), 10).jobs] == seen
        assert [job.id for job in jobs.page(JobQuery(caller, status="queued"), 10).jobs] == seen


def test_another_callers_job_cannot_be_waited_for(jobs: JobStore) -> None:
    theirs, nobodys = queued(jobs, caller=BOB), new_id()
    foreign = jobs.create(config("quick", depends_on=[theirs]), ANN)
    unknown = jobs.create(config("quick", depends_on=[nobodys]), ANN)
    assert (foreign.outcome, foreign.id, foreign.detail) == ("bad_dependency", theirs, "unknown")
    assert (unknown.outcome, unknown.id, unknown.detail) == ("bad_dependency", nobodys, "unknown")
    assert jobs.create(config("quick", depends_on=[theirs]), BOB).outcome == "created"
    assert jobs.create(config("quick", depends_on=[theirs]), LOCAL).outcome == "created"


def test_caches_are_their_owners(jobs: JobStore) -> None:
    made, read = "a" * 32, "b" * 32
    claim = running(jobs, "distill", caller=ANN)
    jobs.beat(claim, 5, Batch(1, ({"type": "cache", "data": {"fingerprint": made}},)))
    reader = queued(jobs, caller=BOB, loss={"alpha": 0.1}, cache={"fingerprint": read})
    assert jobs.caches_of(ANN) == {made}
    assert jobs.caches_of(BOB) == {read}
    assert jobs.caches_of(LOCAL) is None
    assert (jobs.cache_users(made), jobs.cache_users(read), jobs.cache_users("c" * 32)) == ([claim.id], [reader], [])
    assert job_of(jobs, reader).cache.fingerprint == read
    jobs.finish(claim, "succeeded")
    assert jobs.cache_users(made) == []
    shared = queued(jobs, caller=ANN, loss={"alpha": 0.1}, cache={"fingerprint": read})
    assert jobs.cache_users(read) == sorted([reader, shared])
    assert jobs.forget_cache(ANN, read), "another key has it in its list"
    assert not jobs.forget_cache(BOB, read)
    assert (jobs.caches_of(ANN), jobs.caches_of(BOB)) == ({made}, set())


def test_a_job_that_takes_another_cache_lets_go_of_the_first(jobs: JobStore) -> None:
    claim = running(jobs, "distill")
    for number, name in enumerate(("a" * 32, "b" * 32, None), 1):
        jobs.beat(claim, 5, Batch(number, ({"type": "cache", "data": {"fingerprint": name}},)))
    assert job_of(jobs, claim.id).cache.fingerprint == "b" * 32
    assert (jobs.cache_users("a" * 32), jobs.cache_users("b" * 32)) == ([], [claim.id])


# ---------------------------------------------------------------------- the queue


def test_the_queue_goes_by_priority_and_then_by_age(jobs: JobStore) -> None:
    priorities = [5, 9, 0, 5, 9, 0, 5]
    ids = [queued(jobs, priority=priority) for priority in priorities]
    order = [ids[index] for index in (1, 4, 0, 3, 6, 2, 5)]
    assert [job_of(jobs, job_id).queue_position for job_id in order] == list(range(7))
    assert [jobs.claim_next("train", "w", 5).id for _ in ids] == order
    assert jobs.claim_next("train", "w", 5) is None


def test_age_counts_to_the_microsecond(jobs: JobStore) -> None:
    """Many jobs are made within a millisecond; their ids are random there."""
    pipeline = jobs.redis.pipeline()
    fields = [text for pair in jobs._new(config("quick")).items() for text in pair]
    ids = [new_id() for _ in range(300)]
    ids.sort(key=lambda job_id: job_id[-8:])
    for job_id in ids:
        jobs._script(args=["create", job_id, "local", 1, "", "", "", "", *fields], client=pipeline)
    pipeline.execute()
    assert [jobs.claim_next("train", "w", 5).id for _ in ids] == ids
    assert [job.id for job in jobs.page(JobQuery(), 300).jobs] == ids[::-1]


def test_no_age_makes_up_for_a_priority(jobs: JobStore) -> None:
    old, new = queued(jobs, priority=4), queued(jobs, priority=5)
    jobs.change("pause", old)
    year = 365 * 24 * 3600 * 1_000_000
    jobs.redis.hincrby(f"kd:job:{old}", "created_us", -20 * year)
    jobs.change("resume", old)
    assert jobs.claim_next("train", "w", 5).id == new


def test_who_comes_back_to_the_queue_has_the_age_of_the_job(jobs: JobStore) -> None:
    first, second = running(jobs), queued(jobs)
    jobs.release(first)
    assert [job_of(jobs, job_id).queue_position for job_id in (first.id, second)] == [0, 1]


def test_only_one_of_many_claims_succeeds(jobs: JobStore, parts: Parts) -> None:
    job_id = queued(jobs)
    claims = at_once(20, lambda: jobs.claim(job_id, "train", "w", 5))
    assert [claim.fence for claim in claims if claim] == [1]
    assert parts.statuses(job_id) == ["queued", "running"]


def test_a_hint_for_another_stage_or_an_unknown_job_claims_nothing(jobs: JobStore) -> None:
    assert jobs.claim(queued(jobs, "distill"), "train", "w", 5) is None
    assert jobs.claim(new_id(), "train", "w", 5) is None


def test_a_stale_hint_is_good_for_the_job_that_waited_longest(jobs: JobStore) -> None:
    other, first, _ = queued(jobs, "distill"), queued(jobs), queued(jobs)
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
        for take in (jobs.claim_next("train", name, 5, capacity), jobs.claim(wanted, "train", name, 5, capacity)):
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
    jobs.count("kd_job_duration_seconds_sum", 100, kind="train", status="succeeded")
    jobs.count("kd_job_duration_seconds_count", 1, kind="train", status="succeeded")
    job_id, plain = queued(jobs, resources=resources), queued(jobs, resources={"gpus": 0})
    show(jobs, "other:1", Device(kind="cuda", count=8, memory_bytes=1 << 40), "precompute")
    nobody = f"No worker of stage train is at work; the job waits until one comes that has {asked}."
    assert (job_of(jobs, job_id).reason, job_of(jobs, plain).reason) == (nobody, None)
    show(jobs, "cpu:1", CPU)
    show(jobs, "gpu:1", GPU)
    job = job_of(jobs, job_id)
    assert job.reason == f"No worker at work on stage train has {asked}; the job waits until one comes that has."
    assert (job.estimated_start_at, job.queue_position) == (None, 0)
    assert [each.reason for each in jobs.page(JobQuery(), 2).jobs] == [None, job.reason]
    assert (job_of(jobs, plain).reason, job_of(jobs, plain).estimated_start_at is None) == (None, False)
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


def test_an_estimate_of_the_start_needs_a_worker_and_a_job_that_has_ended(jobs: JobStore) -> None:
    first, second = queued(jobs), queued(jobs)
    assert job_of(jobs, second).estimated_start_at is None
    device = Device(kind="cuda", name="T", index="0", count=1, memory_bytes=16 << 30)
    jobs.show_worker(WorkerState(id="w:1", stages=["train"], device=device), 30)
    jobs.show_worker(WorkerState(id="w:2", stages=["train", "precompute"]), 30)
    assert job_of(jobs, second).estimated_start_at is None
    jobs.count("kd_job_duration_seconds_sum", 400, kind="train", status="succeeded")
    jobs.count("kd_job_duration_seconds_count", 4, kind="train", status="succeeded")
    jobs.count("kd_job_duration_seconds_sum", 9999, kind="train", status="failed")
    jobs.count("kd_job_duration_seconds_count", 1, kind="train", status="failed")
    now = datetime.now(UTC)
    starts = [(job_of(jobs, job_id).estimated_start_at - now).total_seconds() for job_id in (first, second)]
    assert starts == pytest.approx([50, 100], abs=5), "a place becomes free each 100 s / 2 workers"
    assert [job.estimated_start_at is None for job in jobs.page(JobQuery(), 2).jobs] == [False, False]
    jobs.claim(first, "train", "w:1", 5)
    assert (job_of(jobs, first).estimated_start_at, job_of(jobs, first).queue_position) == (None, None)
    assert (job_of(jobs, second).queue_position, job_of(jobs, first).worker) == (0, "w:1")


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


# ---------------------------------------------------------------------- a worker and its claim


def test_events_change_the_record_and_the_stream_together(jobs: JobStore, parts: Parts) -> None:
    claim = running(jobs)
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


def test_events_are_read_from_where_one_stopped(jobs: JobStore) -> None:
    claim = running(jobs)
    for number in range(1, 4):
        warnings = tuple({"type": "warning", "data": {"message": f"{number} {index}"}} for index in range(500))
        jobs.beat(claim, 5, Batch(number, warnings))
    events = jobs.events(claim.id)
    assert len(events) == 1502
    assert [event for event, _, _ in events] == sorted({event for event, _, _ in events}, key=stream_order)
    assert jobs.events(claim.id, events[700][0]) == events[701:]
    assert jobs.events(claim.id, events[700][0], 3) == events[701:704]
    assert jobs.events(claim.id, limit=1, types=["warning"]) == events[2:3]
    assert [data["status"] for _, _, data in jobs.events(claim.id, types={"status"})] == ["queued", "running"]
    assert jobs.events(claim.id, events[-1][0]) == jobs.events(new_id()) == []


def stream_order(event: str) -> tuple[int, ...]:
    return tuple(map(int, event.split("-")))


def test_a_batch_sent_twice_counts_once(jobs: JobStore, parts: Parts) -> None:
    claim = running(jobs)
    batch = Batch(1, ({"type": "warning", "data": {"message": "once"}},))
    jobs.beat(claim, 5, batch)
    jobs.beat(claim, 5, batch)
    jobs.beat(claim, 5, Batch(2, ()))
    assert [data for kind, data in parts.events(claim.id) if kind == "warning"] == [{"message": "once"}]


def test_an_event_that_is_not_json_is_refused_before_it_is_sent(jobs: JobStore) -> None:
    with pytest.raises(ValueError, match="JSON"):
        jobs.beat(running(jobs), 5, Batch(1, ({"type": "metrics", "data": {"loss": float("nan")}},)))


def test_the_second_stage_of_a_distillation_follows_the_first(jobs: JobStore, parts: Parts) -> None:
    first = running(jobs, "distill")
    jobs.beat(first, 5, Batch(1, ({"type": "progress", "data": {"done": 1, "total": 1}},)))
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
    assert jobs.beat(old, 5, Batch(9, ({"type": "metrics", "data": {"loss": 0.0}},))) == "fenced"
    assert jobs.finish(old, "failed", ERROR) == "fenced"
    assert jobs.release(old) == jobs.fail_attempt(old, ERROR) == jobs.advance(old, "train") == "fenced"
    assert everything(jobs, old.id) == before
    assert jobs.finish(new, "succeeded") == "succeeded"
    assert jobs.finish(new, "failed", ERROR) == "fenced", "an end is final"
    assert counted(jobs)["kd_fenced_writes_total"] == 6


def test_a_clean_stop_costs_no_attempt_and_a_death_does(jobs: JobStore, parts: Parts) -> None:
    job_id, attempts = queued(jobs), []
    for end in (jobs.release, jobs.release, lambda claim: jobs.fail_attempt(claim, ERROR)) * 2:
        claim = jobs.claim(job_id, "train", "w", 5)
        attempts.append(claim.attempt)
        end(claim)
    assert attempts == [1, 1, 1, 2, 2, 2]
    last = jobs.claim(job_id, "train", "w", 5)
    assert jobs.fail_attempt(last, ERROR) == "failed"
    job = parts.job(job_id)
    assert job.error is not None
    assert job.error.model_dump() == ERROR
    assert job.attempt == 3
    assert [data["message"] for kind, data in parts.events(job_id) if kind == "warning"] == ["It was killed."] * 2


def test_a_lease_that_runs_out_costs_an_attempt_and_fences_the_worker(jobs: JobStore, parts: Parts) -> None:
    claim = jobs.claim(queued(jobs, max_attempts=2), "train", "w", 5)
    assert jobs.expire() == []
    let_pass(jobs, "leases", claim.id)
    assert jobs.expire() == [claim.id]
    assert jobs.expire() == []
    assert (status(jobs, claim.id), parts.job(claim.id).worker) == ("queued", None)
    assert jobs.unannounced("train", HOUR) == [claim.id], "nobody was told of it since"
    assert jobs.beat(claim, 5, Batch(1, ())) == "fenced"
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
    assert jobs.beat(claim, 5, Batch(1, ())) == "go"
    assert jobs.expire() == []


def test_the_lease_of_who_drives_a_search_costs_no_attempt(jobs: JobStore) -> None:
    first = running(jobs, "search", search={"space": {"train.learning_rate": {"choices": [0.1, 0.2]}}}, data=HELD_OUT)
    jobs.advance(first, "search")
    for _ in range(5):
        claim = jobs.claim_next("search", "api", 5)
        assert claim.attempt == 1
        let_pass(jobs, "leases", claim.id)
        assert jobs.expire() == [claim.id]


HELD_OUT = {"train": "text.txt", "validation_fraction": 0.1}


# ---------------------------------------------------------------------- cancel, pause, resume


def test_cancel_of_a_queued_job_is_at_once(jobs: JobStore, parts: Parts) -> None:
    job_id = queued(jobs)
    jobs.change("cancel", job_id)
    assert jobs.claim(job_id, "train", "w", 5) is jobs.claim_next("train", "w", 5) is None
    assert parts.statuses(job_id) == ["queued", "cancelled"]


def test_a_wish_travels_with_the_beat_and_the_release_grants_it(jobs: JobStore, parts: Parts) -> None:
    claim = running(jobs)
    assert jobs.beat(claim, 5, Batch(1, ())) == "go"
    jobs.change("pause", claim.id)
    assert (parts.job(claim.id).status, parts.job(claim.id).worker) == ("pausing", "w")
    assert jobs.beat(claim, 5, Batch(2, ())) == "pause"
    jobs.change("resume", claim.id)
    assert jobs.beat(claim, 5, Batch(3, ())) == "go"
    jobs.change("pause", claim.id)
    jobs.change("cancel", claim.id)
    assert jobs.beat(claim, 5, Batch(4, ())) == "cancel"
    assert jobs.change("resume", claim.id).outcome == jobs.change("pause", claim.id).outcome == "illegal"
    assert jobs.release(claim) == "cancelled"
    wishes = ["pausing", "running", "pausing", "cancelling"]
    assert parts.statuses(claim.id) == ["queued", "running", *wishes, "cancelled"]


@pytest.mark.parametrize(("wish", "end"), [("cancel", "cancelled"), ("pause", "paused")])
@pytest.mark.parametrize("ending", ["release", "advance", "die", "expire"])
def test_a_wish_wins_over_every_way_back_to_the_queue(jobs: JobStore, wish: Any, end: str, ending: str) -> None:
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
        assert (job.status, job.stage) == ("queued", "train" if ending == "advance" else "precompute")
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
    """The worker has stopped the run already when the client changes its mind."""
    claim = running(jobs)
    jobs.change("pause", claim.id)
    assert jobs.beat(claim, 5, Batch(1, ())) == "pause"
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
        assert vars(jobs.change("retry", job_id)) == {"outcome": "done", "status": "queued"}
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
    points = tuple({"type": kind, "data": {"step": 1, "loss": 1.0}} for kind in SERIES)
    jobs.beat(claim, 5, Batch(1, points))
    waiting = queued(jobs, caller=ANN, depends_on=[claim.id, first])
    jobs.due_webhooks(0, 100)
    for delivery in jobs.due_webhooks(0, 100):
        jobs.webhook_failed(delivery, 0)
    jobs.finish(claim, "failed", ERROR)
    assert jobs.change("delete", waiting).outcome == jobs.change("delete", claim.id).outcome == "done"
    assert jobs.due_webhooks(0, 100) == []
    left = set(jobs.redis.keys("*")) - set(before)
    assert left == {"kd:caches:ann"}
    assert jobs.get(claim.id) is jobs.version(claim.id) is None
    assert jobs.events(claim.id) == jobs.metrics(claim.id) == []
    assert [job.id for job in jobs.page(JobQuery(ANN), 10).jobs] == [first]
    assert sum(jobs.statuses().values()) == 1


def test_a_deleted_jobs_worker_is_fenced(jobs: JobStore) -> None:
    claim = running(jobs)
    jobs.finish(claim, "succeeded")
    jobs.change("delete", claim.id)
    keys = sorted(jobs.redis.keys("kd:job:*"))
    assert jobs.beat(claim, 5, Batch(1, ({"type": "warning", "data": {"message": "x"}},))) == "fenced"
    assert jobs.release(claim) == "fenced"
    assert sorted(jobs.redis.keys("kd:job:*")) == keys == []


def test_an_ended_job_is_closed(jobs: JobStore) -> None:
    job_id = finished(jobs, deadline_seconds=HOUR)
    assert jobs.redis.zcard("kd:open") == jobs.redis.zcard("kd:leases") == jobs.redis.zcard("kd:deadlines") == 0
    assert jobs.redis.ttl(f"kd:job:{job_id}:events") > 29 * 86400
    assert jobs.redis.ttl(f"kd:job:{job_id}") == -1
    assert job_of(jobs, job_id).deadline_at is None


def test_the_trial_of_a_search_that_goes_on_cannot_be_deleted(jobs: JobStore) -> None:
    search = searching(jobs)
    trial = jobs.create_trial(search, 0, config("trial"))
    assert jobs.create_trial(search, 0, config("trial")) == trial, "made once"
    jobs.finish(jobs.claim(trial, "train", "w", 5), "succeeded")
    assert jobs.change("delete", trial).outcome == "illegal"
    jobs.finish(search, "succeeded")
    assert jobs.change("delete", trial).outcome == "done"


# ---------------------------------------------------------------------- searches


def searching(jobs: JobStore) -> Claim:
    """A search that is driven."""
    first = running(jobs, "search", search={"space": {"train.learning_rate": {"choices": [0.1, 0.2]}}}, data=HELD_OUT)
    jobs.advance(first, "search")
    return jobs.claim_next("search", "api", 5)


def test_trials_end_with_their_search_and_pause_with_it(jobs: JobStore) -> None:
    search = searching(jobs)
    done, busy, idle = (jobs.create_trial(search, number, config("trial")) for number in range(3))
    jobs.finish(jobs.claim(done, "train", "w", 5), "succeeded")
    jobs.claim(busy, "train", "w", 5)

    def states() -> list[str]:
        return [status(jobs, job_id) for job_id in (search.id, done, busy, idle)]

    jobs.change("pause", search.id)
    assert states() == ["pausing", "succeeded", "pausing", "paused"]
    late = jobs.create_trial(search, 3, config("trial"))
    assert status(jobs, late) == "paused", "who drives the search has not heard of the pause yet"
    jobs.change("resume", search.id)
    assert [*states(), status(jobs, late)] == ["running", "succeeded", "running", "queued", "queued"]
    jobs.change("pause", idle)
    assert jobs.change("resume", search.id).outcome == "already"
    assert status(jobs, idle) == "paused", "what changes nothing does not change a trial either"
    jobs.change("cancel", search.id)
    assert jobs.change("resume", search.id).outcome == "illegal"
    assert [*states(), status(jobs, late)] == ["cancelling", "succeeded", "running", "paused", "queued"]
    jobs.release(search)
    assert [*states(), status(jobs, late)] == ["cancelled", "succeeded", "cancelling", "cancelled", "cancelled"]
    assert {jobs.get(trial).parent for trial in jobs.trials(search.id).values()} == {search.id}
    assert [job.id for job in jobs.page(JobQuery(parent=search.id), 10).jobs] == [late, idle, busy, done]


def test_the_study_is_written_by_who_drives_it(jobs: JobStore) -> None:
    old = searching(jobs)
    assert jobs.add_to_journal(old, [{"a": 1}, {"b": 2}]) == "go"
    jobs.release(old)
    new = jobs.claim(old.id, "search", "api", 5)
    assert jobs.add_to_journal(old, [{"c": 3}]) == jobs.create_trial(old, 0, config("trial")) == "fenced"
    assert jobs.add_to_journal(new, [{"d": 4}]) == "go"
    assert jobs.journal(new.id, 1) == [{"b": 2}, {"d": 4}]
    assert jobs.trials(new.id) == {}


# ---------------------------------------------------------------------- jobs that wait for jobs


def test_a_chain_runs_one_after_the_other(jobs: JobStore) -> None:
    first = queued(jobs)
    second = queued(jobs, depends_on=[first])
    third = queued(jobs, depends_on=[second, first, second])
    assert (status(jobs, second), status(jobs, third)) == ("waiting", "waiting")
    job = job_of(jobs, third)
    assert (job.reason, job.waits_for, job.depends_on) == ("dependencies", sorted([first, second]), [second, first])
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
    version = jobs.version(bottom)
    jobs.finish(sides[0], "succeeded")
    job = job_of(jobs, bottom)
    assert (job.status, job.waits_for) == ("waiting", [right])
    assert job.version > version, "who asks with an ETag hears of it"
    jobs.finish(sides[1], "succeeded")
    assert (status(jobs, bottom), job_of(jobs, bottom).reason) == ("queued", None)


@pytest.mark.parametrize("end", ["failed", "cancelled"])
def test_all_that_hangs_on_a_job_that_does_not_succeed_is_cancelled(jobs: JobStore, end: str) -> None:
    top, other = running(jobs), running(jobs)
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
        assert (job.status, job.reason, job.error.type) == ("cancelled", "dependency_failed", "dependency_failed")
        statuses = [data["status"] for _, _, data in jobs.events(job_id, types=["status"])]
        assert statuses.count("cancelled") == 1, "told once, however many ways lead to it"
    what = "failed" if end == "failed" else "was cancelled"
    assert job_of(jobs, left).error.detail == f"{top.id}, which this job depends on, {what}."
    assert status(jobs, apart) == "waiting"
    jobs.finish(other, "succeeded")
    assert (status(jobs, apart), status(jobs, right)) == ("queued", "cancelled")


def test_a_long_chain_is_cancelled_whole(parts: Parts) -> None:
    """Longer than Lua's stack is deep."""
    jobs = JobStore(connect(parts.server.url, timeout=60))
    fields = jobs._new(config("quick"))
    ids = [new_id() for _ in range(9000)]
    pipeline = jobs.redis.pipeline(transaction=False)
    for before, job_id in zip([None, *ids[:-1]], ids, strict=True):
        fields["depends_on"] = f'["{before}"]' if before else "[]"
        flat = [text for pair in fields.items() for text in pair]
        jobs._script(args=["create", job_id, "local", 1, "", "", "", "", *flat], client=pipeline)
    pipeline.execute()
    assert jobs.statuses()["waiting"] == 8999
    jobs.change("cancel", ids[0])
    assert {name: number for name, number in jobs.statuses().items() if number} == {"cancelled": 9000}


@pytest.mark.parametrize("end", ["succeeded", "failed", "cancelled", "deleted"])
def test_a_job_that_has_ended_is_not_waited_for(jobs: JobStore, end: str) -> None:
    other = finished(jobs, "succeeded" if end in ("succeeded", "deleted") else "failed")
    if end == "cancelled":
        jobs.change("retry", other)
        jobs.change("cancel", other)
    if end == "deleted":
        jobs.change("delete", other)
    made = jobs.create(config("quick", depends_on=[other]))
    if end == "succeeded":
        assert status(jobs, made.id) == "queued"
    else:
        assert (made.outcome, made.id, made.detail) == ("bad_dependency", other, "unknown" if end == "deleted" else end)


def test_a_job_whose_dependency_failed_goes_on_when_both_are_retried(jobs: JobStore) -> None:
    first = running(jobs)
    second = queued(jobs, depends_on=[first.id])
    jobs.finish(first, "failed", ERROR)
    assert vars(jobs.change("retry", second)) == {"outcome": "done", "status": "cancelled"}
    assert job_of(jobs, second).error.type == "dependency_failed", "for the job that it needs has still failed"
    jobs.change("retry", first.id)
    assert vars(jobs.change("retry", second)) == {"outcome": "done", "status": "waiting"}
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
    assert vars(jobs.change("retry", second)) == {"outcome": "done", "status": "queued"}


def test_a_dependency_that_never_succeeded_and_was_deleted_is_missed(jobs: JobStore) -> None:
    first = running(jobs)
    second, third = queued(jobs, depends_on=[first.id]), queued(jobs, depends_on=[first.id])
    jobs.change("cancel", third)
    jobs.finish(first, "failed", ERROR)
    jobs.change("delete", first.id)
    for job_id in (second, third):
        assert vars(jobs.change("retry", job_id)) == {"outcome": "done", "status": "cancelled"}
        assert "was deleted" in job_of(jobs, job_id).error.detail
        assert jobs.change("delete", job_id).outcome == "done"
    assert jobs.redis.keys("kd:job:*") == []


def test_a_paused_job_waits_on_when_it_is_resumed(jobs: JobStore) -> None:
    first = running(jobs)
    early, late = queued(jobs, depends_on=[first.id]), queued(jobs, depends_on=[first.id])
    for job_id in (early, late):
        jobs.change("pause", job_id)
        assert job_of(jobs, job_id).reason is None
    assert vars(jobs.change("resume", early)) == {"outcome": "done", "status": "waiting"}
    jobs.finish(first, "succeeded")
    assert (status(jobs, early), status(jobs, late)) == ("queued", "paused"), "a pause is ended by a resume only"
    assert vars(jobs.change("resume", late)) == {"outcome": "done", "status": "queued"}


# ---------------------------------------------------------------------- deadlines


def run_out(jobs: JobStore, job_id: str) -> Job:
    """The job, after its deadline."""
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
    assert (job.status, job.reason, job.error.type) == ("failed", "deadline_exceeded", "deadline_exceeded")
    assert (job.deadline_at, job.queue_position) == (None, None)
    assert status(jobs, after) == "cancelled"


@pytest.mark.parametrize("ending", ["release", "advance", "die", "expire"])
@pytest.mark.parametrize("pausing", [False, True])
def test_a_run_is_stopped_at_its_deadline_and_then_the_job_fails(jobs: JobStore, ending: str, pausing: bool) -> None:
    claim = running(jobs, "distill", deadline_seconds=HOUR)
    if pausing:
        jobs.change("pause", claim.id)
    job = run_out(jobs, claim.id)
    assert (job.status, job.reason) == ("cancelling", "deadline_exceeded")
    assert jobs.beat(claim, 5, Batch(1, ())) == "cancel"
    assert jobs.due() == []
    {
        "release": lambda: jobs.release(claim),
        "advance": lambda: jobs.advance(claim, "train"),
        "die": lambda: jobs.fail_attempt(claim, ERROR),
        "expire": lambda: let_pass(jobs, "leases", claim.id) or jobs.expire(),
    }[ending]()
    job = job_of(jobs, claim.id)
    assert (job.status, job.reason, job.error.type) == ("failed", "deadline_exceeded", "deadline_exceeded")


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


# ---------------------------------------------------------------------- metrics


def tell(jobs: JobStore, claim: Claim, points: list[dict[str, Any]]) -> None:
    for number, start in enumerate(range(0, len(points), 1000), 1):
        events = tuple({"type": "metrics", "data": point} for point in points[start : start + 1000])
        jobs.beat(claim, 5, Batch(number, events))


def test_metrics_are_known_by_step(jobs: JobStore) -> None:
    claim = running(jobs)
    events = (
        {"type": "metrics", "data": {"step": 2, "loss": 2.0}},
        {"type": "metrics", "data": {"step": 1, "loss": 3.0}},
        {"type": "evaluation", "data": {"step": 2, "validation_loss": 2.5}},
        {"type": "temperature", "data": {"step": 3, "temperature": 1.5}},
        {"type": "metrics", "data": {"note": "has no step"}},
        {"type": "progress", "data": {"step": 9}},
    )
    jobs.beat(claim, 5, Batch(1, events))
    second = {"step": 2, "loss": 2.0, "validation_loss": 2.5}
    assert jobs.metrics(claim.id) == [{"step": 1, "loss": 3.0}, second, {"step": 3, "temperature": 1.5}]
    assert jobs.metrics(claim.id, after_step=1) == [second, {"step": 3, "temperature": 1.5}]
    assert jobs.metrics(claim.id, series=["evaluation"]) == [{"step": 2, "validation_loss": 2.5}]


def test_a_step_that_is_run_again_takes_its_old_place(jobs: JobStore) -> None:
    first = running(jobs)
    tell(jobs, first, [{"step": step, "loss": float(step)} for step in range(1, 7)])
    jobs.fail_attempt(first, ERROR)
    second = jobs.claim(first.id, "train", "w", 5)
    tell(jobs, second, [{"step": step, "loss": step + 0.5} for step in range(4, 6)])
    losses = [point["loss"] for point in jobs.metrics(first.id)]
    assert losses == [1.0, 2.0, 3.0, 4.5, 5.5, 6.0]
    assert [point["step"] for point in jobs.metrics(first.id)] == [1, 2, 3, 4, 5, 6]


def test_a_long_history_is_thinned_out_evenly(jobs: JobStore) -> None:
    """At the end of 100,000 steps the first thousands are known as well as the last."""
    claim, total = running(jobs), 100_000
    tell(jobs, claim, [{"step": step, "loss": 1.0} for step in range(1, total + 1)])
    steps = [point["step"] for point in jobs.metrics(claim.id)]
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
    due = jobs.due_webhooks(60, 10)
    events = [event for event, _, _ in jobs.events(job_id, types=["status"])]
    assert due == [Delivery(job_id, event, "https://example.org/hook", 0) for event in events]
    assert jobs.due_webhooks(60, 10) == [], "somebody has them"
    jobs.webhook_done(due[0])
    jobs.webhook_failed(due[1], 0)
    jobs.webhook_failed(due[2], 60)
    assert jobs.due_webhooks(0.01, 10) == [replace(due[1], tries=1)]
    time.sleep(0.02)
    assert jobs.due_webhooks(0, 10) == [replace(due[1], tries=1)], "whoever had it died"
    jobs.webhook_done(due[1], "It was given up.")
    assert jobs.events(job_id)[-1][1:] == ("warning", {"message": "It was given up."})
    assert jobs.redis.hgetall("kd:webhooks:tries") == {f"{job_id} {events[2]}": "1"}
    jobs.webhook_done(due[2])
    assert jobs.redis.exists("kd:webhooks", "kd:webhooks:tries") == 0


def test_so_many_webhooks_are_handed_out_and_no_more(jobs: JobStore) -> None:
    for _ in range(5):
        queued(jobs, webhook="https://example.org/hook")
    assert [len(jobs.due_webhooks(60, 2)) for _ in range(4)] == [2, 2, 1, 0]


def test_the_webhook_of_a_deleted_job_is_forgotten_by_whoever_has_it(jobs: JobStore) -> None:
    job_id = queued(jobs, webhook="https://example.org/hook")
    jobs.change("cancel", job_id)
    (first, second) = jobs.due_webhooks(0, 10)
    jobs.change("delete", job_id)
    assert jobs.due_webhooks(0, 10) == []
    jobs.webhook_failed(first, 0)
    jobs.webhook_done(second, "It was given up.")
    assert jobs.redis.exists("kd:webhooks", "kd:webhooks:tries", f"kd:job:{job_id}:events") == 0


# ---------------------------------------------------------------------- listing


def test_listing_is_newest_first_and_filters(jobs: JobStore) -> None:
    ids = [queued(jobs, "distill" if index % 2 else "train", labels={"n": str(index % 3)}) for index in range(250)]
    jobs.change("cancel", ids[10])

    def found(limit: int = 1000, cursor: int | None = None, **query: Any) -> list[str]:
        return [job.id for job in jobs.page(JobQuery(**query), limit, cursor).jobs]

    assert found() == ids[::-1]
    assert found(status="cancelled") == [ids[10]]
    assert found(status="queued", kind="train", label=("n", "0")) == ids[0::6][::-1]
    assert found(kind="distill") == ids[1::2][::-1]
    assert found(label=("n", "9")) == found(label=("m", "0")) == found(kind="search") == []
    assert found(parent="job_x") == []
    moment = job_of(jobs, ids[100]).created_at
    assert all(job_of(jobs, job_id).created_at > moment for job_id in found(created_after=moment))
    assert len(found(created_after=moment)) == sum(job_of(jobs, job_id).created_at > moment for job_id in ids)
    assert found(created_after=moment, limit=3) == ids[:-4:-1]
    assert found(created_after=datetime.now(UTC) + timedelta(hours=1)) == []
    assert len(found(created_after=datetime(2020, 1, 1, tzinfo=UTC))) == 250


@pytest.mark.parametrize("limit", [1, 7, 50, 250])
def test_pages_are_the_listing_in_parts(jobs: JobStore, limit: int) -> None:
    ids = [queued(jobs, "distill" if index % 5 else "train") for index in range(120)]
    wanted: dict[str | None, list[str]] = {None: ids[::-1], "train": ids[0::5][::-1]}
    cursor = 1 + int(jobs.redis.zscore("kd:open", ids[-1]))  # before what is made below
    for kind in wanted:
        found, page = list[str](), JobPage([], cursor)
        while page.next_cursor is not None:
            page = jobs.page(JobQuery(kind=kind), limit, page.next_cursor)
            assert len(page.jobs) <= limit
            found += [job.id for job in page.jobs]
            queued(jobs)  # what is made meanwhile is not seen, and moves nothing
        assert found == wanted[kind]


def test_a_cursor_survives_the_job_that_it_stands_at(jobs: JobStore) -> None:
    ids = [queued(jobs) for _ in range(6)]
    first = jobs.page(JobQuery(), 3)
    jobs.change("cancel", ids[3])
    jobs.change("delete", ids[3])
    assert [job.id for job in jobs.page(JobQuery(), 3, first.next_cursor).jobs] == ids[2::-1]


def commands(jobs: JobStore, act: Callable[[], Any]) -> tuple[Any, dict[str, int]]:
    """The answer, and how often the server ran which command for it."""
    jobs.redis.config_resetstat()
    answer = act()
    found = jobs.redis.info("commandstats")
    skip = ("config|resetstat", "info", "eval", "evalsha")
    counts = {name.removeprefix("cmdstat_"): stats["calls"] for name, stats in found.items()}
    return answer, {name: calls for name, calls in counts.items() if name not in skip}


@pytest.fixture(scope="module")
def crowd(_shared: Parts) -> Iterator[tuple[JobStore, list[str]]]:
    """A store of 100,000 jobs, of which the fifty oldest are cancelled."""
    jobs = _shared.jobs
    jobs.redis.flushall()
    fields = jobs._new(config("quick"))
    fields["config"] = '{"kind":"train"}'  # the size of a configuration is not what is counted here
    flat = [text for pair in fields.items() for text in pair]
    ids = [new_id() for _ in range(100_000)]
    jobs.redis.script_load(SCRIPT)
    for start in range(0, len(ids), 5000):
        pipeline = jobs.redis.pipeline(transaction=False)
        for job_id in ids[start : start + 5000]:
            pipeline.evalsha(jobs._script.sha, 0, "create", job_id, "ann", 0, "", "", "", "", *flat)
        pipeline.execute()
    for job_id in ids[:50]:
        jobs.change("cancel", job_id)
    yield jobs, ids
    jobs.redis.flushall()


def test_a_page_of_a_hundred_thousand_jobs_costs_a_page(crowd: tuple[JobStore, list[str]]) -> None:
    jobs, ids = crowd
    cursor = int(jobs.redis.zscore("kd:open", ids[50_000]))
    queries: list[tuple[JobQuery, int | None, list[str]]] = [
        (JobQuery(), None, ids[:-21:-1]),
        (JobQuery(ANN), cursor, ids[49_999:49_979:-1]),
        (JobQuery(status="queued"), cursor, ids[49_999:49_979:-1]),
        (JobQuery(status="cancelled"), None, ids[49:29:-1]),
        (JobQuery(BOB), None, []),
        (JobQuery(status="running"), None, []),
        (JobQuery(created_after=jobs.get(ids[-1]).created_at + timedelta(hours=1)), None, []),
    ]
    for query, start, wanted in queries:
        page, counts = commands(jobs, lambda query=query, start=start: jobs.page(query, 20, start))
        assert [job.id for job in page.jobs] == wanted
        assert counts.pop("zrevrangebyscore") == 1
        assert counts.get("hgetall", 0) <= 21 + 1
        assert sum(counts.values()) <= 3 * 21 + 3, counts


def test_a_filter_that_nothing_passes_looks_at_so_many_records_and_gives_a_cursor(
    crowd: tuple[JobStore, list[str]],
) -> None:
    jobs, ids = crowd
    page, counts = commands(jobs, lambda: jobs.page(JobQuery(label=("no", "such")), 20))
    assert page.jobs == []
    assert page.next_cursor is not None
    assert counts["hgetall"] <= SCAN + 10
    assert counts["zrevrangebyscore"] <= SCAN // 100
    passed = ids.index(jobs.redis.zrangebyscore("kd:open", page.next_cursor, page.next_cursor)[0])
    assert len(ids) - passed == SCAN, "and the next page goes on there"


def test_a_claim_and_a_beat_cost_the_same_among_a_hundred_thousand_jobs(crowd: tuple[JobStore, list[str]]) -> None:
    jobs, ids = crowd
    claim, counts = commands(jobs, lambda: jobs.claim_next("train", "w", 5))
    assert claim.id == ids[50]
    assert sum(counts.values()) < 80, counts
    _, counts = commands(jobs, lambda: jobs.beat(claim, 5, Batch(1, ())))
    assert sum(counts.values()) < 15, counts
    _, counts = commands(jobs, lambda: (jobs.release(claim), jobs.expire(), jobs.due(), jobs.statuses()))
    assert sum(counts.values()) < 80, counts
    made, counts = commands(jobs, lambda: jobs.create(config("quick"), ANN, "key", max_open=1_000_000))
    assert made.outcome == "created"
    assert sum(counts.values()) < 60, counts
    _, counts = commands(jobs, lambda: jobs.unannounced("train", 0))
    assert sum(counts.values()) < 500, counts


# ---------------------------------------------------------------------- counted


def counted(jobs: JobStore) -> dict[str, float]:
    """Every counter, summed over its labels."""
    found: dict[str, float] = defaultdict(float)
    for name, _, value in jobs.counters():
        found[name] += value
    return found


def test_the_script_counts_what_it_does(jobs: JobStore) -> None:
    first = running(jobs)
    jobs.fail_attempt(first, ERROR)
    jobs.finish(jobs.claim(first.id, "train", "w", 5), "succeeded")
    found = {(name, *sorted(labels.items())): value for name, labels, value in jobs.counters()}
    kind = ("kind", "train")
    assert {entry[2][1]: value for entry, value in found.items() if entry[0] == "kd_jobs_total" and kind in entry} == {
        "queued": 2,
        "running": 2,
        "succeeded": 1,
    }
    assert found["kd_job_attempts_total", ("reason", "worker_lost")] == 1
    assert found["kd_job_queue_wait_seconds_count", ("stage", "train")] == 2
    assert found["kd_job_duration_seconds_count", kind, ("status", "succeeded")] == 1
    buckets = {
        dict(entry[1:])["le"]: value for entry, value in found.items() if entry[0] == "kd_job_duration_seconds_bucket"
    }
    assert buckets["+Inf"] == buckets["1"] == 1
    assert sorted(buckets.values()) == list(buckets.values()), "a bucket holds those below it"


def test_a_job_that_never_ran_has_no_duration(jobs: JobStore) -> None:
    jobs.change("cancel", queued(jobs))
    assert "kd_job_duration_seconds_count" not in counted(jobs)


def test_counts_from_elsewhere_add_up(jobs: JobStore) -> None:
    jobs.count("kd_train_tokens_total", 2.5)
    jobs.count("kd_train_tokens_total", 1.5)
    jobs.count("kd_gpu_memory_bytes", 7, device="0", worker="w")
    assert sorted(jobs.counters()) == [
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
    assert jobs.statuses() == {**dict.fromkeys(STATUSES, 0), "succeeded": 1, "queued": 2, "paused": 1, "waiting": 1}
    assert jobs.queue_depths(["precompute", "train"]) == {"precompute": 2, "train": 0}


def test_a_worker_is_seen_as_long_as_it_shows_itself(jobs: JobStore) -> None:
    state = WorkerState(id="host:1", host="host", pid=1, stages=["train"], job="job_x", attempt=2)
    jobs.show_worker(state, 1)
    jobs.show_worker(WorkerState(id="host:2", stages=["train", "precompute"]), 30)
    assert jobs.workers()[0] == state
    assert (jobs.workers_of("train"), jobs.workers_of("precompute"), jobs.workers_of("search")) == (2, 1, 0)
    jobs.redis.delete("kd:worker:host:1")
    assert [worker.id for worker in jobs.workers()] == ["host:2"]
    assert jobs.redis.smembers("kd:workers") == {"host:2"}
    jobs.hide_worker("host:2")
    assert jobs.workers() == []
    assert jobs.redis.exists("kd:workers", "kd:worker:host:2") == 0


# ---------------------------------------------------------------------- the rest


def test_the_stream_is_trimmed(jobs: JobStore) -> None:
    claim = running(jobs)
    for number in range(1, 32):
        jobs.beat(claim, 5, Batch(number, tuple({"type": "warning", "data": {"message": "x"}} for _ in range(500))))
    assert 10_000 <= jobs.redis.xlen(f"kd:job:{claim.id}:events") < 11_000


def test_every_event_type_has_its_place() -> None:
    assert fields_of({"type": "checkpoint", "data": {"step": 1, "path": "p"}}) == {}
    assert fields_of({"type": "cache", "data": {"fingerprint": "f"}}) == {"cache.fingerprint": '"f"'}


def test_a_request_client_gives_up_within_its_time() -> None:
    began = time.monotonic()
    with pytest.raises(RedisError):
        connect("redis://127.0.0.1:1/0", timeout=0.5).ping()
    assert time.monotonic() - began < 2


def test_open_and_ended_statuses_are_all_there_are() -> None:
    assert TERMINAL | ACTIVE | {"waiting", "queued", "paused"} == set(STATUSES)


def test_many_transitions_at_once_leave_one_story(jobs: JobStore) -> None:
    """Twenty clients pull at one job in every direction while a worker runs it."""
    claim = running(jobs)
    wishes: list[Any] = ["cancel", "pause", "resume", "pause", "resume"] * 4
    at_once(20, lambda: [jobs.change(wish, claim.id) for wish in wishes])
    told = [data["status"] for _, _, data in jobs.events(claim.id, types=["status"])]
    assert told[-1] == status(jobs, claim.id) == "cancelling"
    rows, known = table(), defaultdict[str, set[str]](set)
    for action in ("cancel", "pause", "resume"):
        for before, after in rows[action].items():
            known[before] |= after
    for before, after in pairwise(told[1:]):
        assert after in known[before]
