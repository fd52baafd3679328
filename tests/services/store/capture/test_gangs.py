"""Gangs on a real server: workers gather for a stage, give way to each other, and are lost."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Literal

import pytest

from kd.client.wire.service import Device, WorkerState
from services.store.jobs.gangs import GangBeat, GangTable
from services.store.jobs.leases import ANY_CAPACITY, Claim, EventBatch
from services.store.jobs.store import JobStore
from services.store.jobs.workers import explain_missing_worker
from services.store.ranges import HelpOrder, Membership, SharedTerms
from tests.support.records import ERROR, queued

LONG = 60.0
TERMS = SharedTerms("1.0", "/here")
TRAINING = ["train"]


@pytest.fixture
def table(jobs: JobStore) -> GangTable:
    return GangTable(jobs.redis)


def show_workers(jobs: JobStore, count: int, stages: tuple[str, ...] = ("train",)) -> None:
    for number in range(count):
        now = datetime.now(UTC)
        state = WorkerState(
            id=f"w{number}", host="h", pid=number + 1, stages=list(stages),
            device=Device(kind="cpu", name="CPU", index="", count=0, memory_bytes=1 << 34),
            job=None, attempt=None, helping=False, stopping=False, version="1.0",
            started_at=now, beat_at=now,
        )  # fmt: skip
        jobs.show_worker(state, 60)


def lead(
    jobs: JobStore, table: GangTable, job_id: str, worker: str = "w0", hosts: int = 2
) -> tuple[Claim, Membership]:
    claim = jobs.claim(job_id, "train", worker, LONG)
    assert claim is not None
    member = table.open_gang(claim, worker, LONG, TERMS, hosts)
    assert member is not None
    return claim, member


def join(table: GangTable, worker: str) -> HelpOrder:
    order = table.help(worker, LONG, ANY_CAPACITY, TRAINING)
    assert order is not None
    return order


def gang_of(jobs: JobStore, hosts: int | dict[str, int] = 2) -> str:
    return queued(jobs, "train", resources={"hosts": hosts})


def begin(
    table: GangTable, leader: Membership, key: str = "k", enough: int = 2
) -> int | Literal["wait", "yield", "fenced"]:
    return table.begin(leader, LONG, ANY_CAPACITY, key, enough)


def end_lease(jobs: JobStore, member: Membership) -> None:
    jobs.redis.zadd(f"kd:job:{member.id}:ranges:ends", {str(member.token): 0})


def test_a_gang_begins_when_all_members_are_there(jobs: JobStore, table: GangTable) -> None:
    _, leader = lead(jobs, table, gang_of(jobs, 3), hosts=3)
    assert begin(table, leader) == "wait"
    first = join(table, "a")
    assert (first.claim.stage, first.terms) == ("train", TERMS)
    assert table.beat_gang(first.member, LONG) == GangBeat("wait")
    assert begin(table, leader, enough=3) == "wait"
    second = join(table, "b").member
    assert table.help("late", LONG, ANY_CAPACITY, TRAINING) is None
    assert begin(table, leader, "secret", enough=3) == 3
    beats = [table.beat_gang(each, LONG) for each in (leader, first.member, second)]
    assert beats == [GangBeat("go", number, "secret", 3) for number in range(3)]
    assert jobs.redis.hgetall("kd:devices:local") == {leader.id: "3"}
    assert table.view(leader.id) is None, "a job shows no capture"


def test_a_worker_of_other_stages_is_not_asked(jobs: JobStore, table: GangTable) -> None:
    lead(jobs, table, gang_of(jobs))
    assert table.help("w", LONG, ANY_CAPACITY, ["precompute"]) is None


def test_no_worker_begins_a_job_for_which_there_are_too_few(
    jobs: JobStore, table: GangTable
) -> None:
    show_workers(jobs, 5, ("precompute",))
    show_workers(jobs, 2)
    three, two = gang_of(jobs, 3), gang_of(jobs, 2)
    claim = jobs.claim_next("train", "w0", LONG)
    assert claim is not None and claim.id == two
    job = jobs.get(three)
    assert job is not None and job.status == "queued"
    reason = explain_missing_worker(job, jobs.list_workers())
    assert reason is not None and "needs 3 workers of stage train, and 2 fit" in reason


@pytest.mark.parametrize("how", ["its lease ends", "it leaves with a warning"])
def test_a_lost_member_ends_the_attempt(jobs: JobStore, table: GangTable, how: str) -> None:
    claim, leader = lead(jobs, table, gang_of(jobs))
    member = join(table, "other").member
    assert begin(table, leader) == 2
    if how == "its lease ends":
        end_lease(jobs, member)
    else:
        table.leave(member, "Its disk is full.")
    beat = table.beat_gang(leader, LONG)
    assert beat.reply == "lost" and "Worker other" in beat.detail
    assert table.beat_gang(member, LONG).reply == "fenced"
    assert jobs.fail_attempt(claim, ERROR) == "queued"
    assert table.beat_gang(leader, LONG).reply == "fenced"


def test_a_member_that_ends_as_it_should_is_not_lost(jobs: JobStore, table: GangTable) -> None:
    _, leader = lead(jobs, table, gang_of(jobs))
    member = join(table, "other").member
    assert begin(table, leader) == 2
    table.leave(member)
    assert table.beat_gang(leader, LONG).reply == "go"


def test_a_member_that_is_lost_before_the_begin_is_replaced(
    jobs: JobStore, table: GangTable
) -> None:
    _, leader = lead(jobs, table, gang_of(jobs))
    end_lease(jobs, join(table, "gone").member)
    assert begin(table, leader) == "wait"
    member = join(table, "next").member
    assert begin(table, leader) == 2
    assert table.beat_gang(member, LONG).number == 1


def test_a_gang_with_fewer_hosts_than_it_wants_grows_once_a_worker_idles(
    jobs: JobStore, table: GangTable
) -> None:
    show_workers(jobs, 1)
    job_id = gang_of(jobs, {"min": 1, "max": 2})
    assert jobs.claim_next("train", "none", LONG) is not None, "one worker is enough"
    jobs.redis.zadd("kd:leases", {job_id: 0})
    jobs.expire()
    claim, leader = lead(jobs, table, job_id)
    assert begin(table, leader) == "wait"
    assert begin(table, leader, enough=1) == 1
    assert table.help("idle", LONG, ANY_CAPACITY, TRAINING) is None
    assert table.beat_gang(leader, LONG) == GangBeat("go", 0, "k", 1), "it has just begun"
    jobs.redis.hset(f"kd:job:{job_id}:ranges", "began", 0)
    jobs.redis.sadd(f"kd:job:{job_id}:ranges:refused", "unfit")
    assert table.help("unfit", LONG, ANY_CAPACITY, TRAINING) is None
    assert table.beat_gang(leader, LONG).reply == "go", "that worker cannot take part"
    assert table.help("idle", LONG, ANY_CAPACITY, TRAINING) is None
    assert table.beat_gang(leader, LONG).reply == "grow"
    assert jobs.release(claim) == "queued"
    again, leader = lead(jobs, table, job_id)
    assert again.attempt == claim.attempt
    member = join(table, "idle").member
    assert begin(table, leader) == 2
    assert table.beat_gang(member, LONG).number == 1
    assert table.help("late", LONG, ANY_CAPACITY, TRAINING) is None
    assert table.beat_gang(leader, LONG).reply == "go", "it has all hosts that it wants"


def test_a_lost_leader_fences_all_members(jobs: JobStore, table: GangTable) -> None:
    _, leader = lead(jobs, table, gang_of(jobs))
    member = join(table, "other").member
    assert begin(table, leader) == 2
    jobs.redis.zadd("kd:leases", {leader.id: 0})
    assert jobs.expire() == [leader.id]
    assert table.beat_gang(member, LONG).reply == "fenced"


def test_a_gang_that_does_not_fill_rests_and_costs_no_attempt(
    jobs: JobStore, table: GangTable
) -> None:
    show_workers(jobs, 3)
    claim, leader = lead(jobs, table, gang_of(jobs, 3), hosts=3)
    member = join(table, "a").member
    assert begin(table, leader, enough=3) == "wait"
    assert table.give_up(claim) == "queued"
    assert table.beat_gang(member, LONG).reply == "fenced"
    assert jobs.claim_next("train", "w0", LONG) is None, "it rests"
    single = queued(jobs, "train")
    found = jobs.claim_next("train", "w0", LONG)
    assert found is not None and found.id == single
    jobs.redis.hset(f"kd:job:{claim.id}", "rests_until", 0)
    again = jobs.claim_next("train", "w0", LONG)
    assert again is not None and (again.id, again.attempt) == (claim.id, claim.attempt)
    warnings = [
        fields["data"]
        for _, fields in jobs.redis.xrange(f"kd:job:{claim.id}:events")
        if fields["type"] == "warning"
    ]
    assert any("2 of 3 hosts came" in each for each in warnings)


def test_of_two_gangs_that_wait_for_each_other_the_younger_gives_way(
    jobs: JobStore, table: GangTable
) -> None:
    older, younger = gang_of(jobs), gang_of(jobs)
    _, first = lead(jobs, table, older, "w0")
    claim, second = lead(jobs, table, younger, "w1")
    assert begin(table, first) == "wait"
    assert begin(table, second) == "yield"
    assert table.give_up(claim) == "queued"
    assert join(table, "w1").member.id == older
    assert begin(table, first) == 2


def test_a_cancelled_job_calls_nobody(jobs: JobStore, table: GangTable) -> None:
    claim, leader = lead(jobs, table, gang_of(jobs))
    jobs.change("cancel", claim.id)
    assert table.help("w", LONG, ANY_CAPACITY, TRAINING) is None
    assert jobs.beat(claim, LONG, EventBatch(0, ())) == "cancel"
    assert table.give_up(claim) == "cancelled"
    assert begin(table, leader) == "fenced"
