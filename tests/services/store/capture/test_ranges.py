"""Ranges of shards on a real server: every transition that ranges.lua states, and what it keeps."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from bench.support.harness import make_config
from bench.support.paths import ROOT
from kd.progress import SharedCapture
from services.store.jobs.leases import ANY_CAPACITY, Capacity, Claim
from services.store.jobs.store import JobStore
from services.store.ranges import (
    HelpOrder,
    Membership,
    RangeTable,
    ReportedProgress,
    SharedTerms,
    TakenRange,
    choose_range_size,
)
from services.worker.together.range_server import compute_progress
from tests.support.records import ANN, BOB, ERROR, at_once, queued, running

SHARED = SharedTerms("1.0", "here", SharedCapture("f" * 8))
LONG = 60.0
LUA = (ROOT / "services" / "store" / "ranges.lua").read_text(encoding="utf-8")


@pytest.fixture
def table(jobs: JobStore) -> RangeTable:
    return RangeTable(jobs.redis)


@pytest.fixture(autouse=True)
def ranges_of_three(monkeypatch: pytest.MonkeyPatch) -> None:
    """The size of ranges is arithmetic that has a test of its own."""
    monkeypatch.setattr("services.store.ranges.choose_range_size", lambda *_: 3)


def opened(
    jobs: JobStore, table: RangeTable, shards: int = 10, workers: int | None = None, **changes: Any
) -> tuple[Claim, Membership]:
    claim = running(jobs, "precompute", **changes)
    owner = table.open(claim, "owner", LONG, SHARED, shards, workers)
    assert owner is not None
    return claim, owner


def join(table: RangeTable, worker: str = "w", *stages: str) -> Membership:
    found = table.help(worker, LONG, ANY_CAPACITY, list(stages or ("precompute",)))
    assert isinstance(found, HelpOrder), found
    return found.member


def take(table: RangeTable, member: Membership) -> TakenRange:
    found = table.take(member)
    assert isinstance(found, TakenRange), found
    return found


def end_lease(jobs: JobStore, member: Membership) -> None:
    """Move the end of a lease into the past, as time does for a worker that has died."""
    jobs.redis.zadd(f"kd:job:{member.id}:ranges:ends", {str(member.token): 1}, xx=True)


def grow_old(jobs: JobStore, member: Membership, number: int) -> None:
    """Move the begin of a range into the past, as time does for a slow worker."""
    jobs.redis.zadd(f"kd:job:{member.id}:ranges:begun", {str(number): 1}, xx=True)


def state(jobs: JobStore, job_id: str, number: int) -> str:
    """The state of a range, by the keys that the head of ranges.lua names."""
    name = f"kd:job:{job_id}:ranges"
    held = jobs.redis.hget(f"{name}:held", str(number))
    members = [json.loads(each)["ranges"] for each in jobs.redis.hvals(f"{name}:members")]
    having = sum(str(number) in ranges for ranges in members)
    assert int(held or 0) == having
    assert (jobs.redis.zscore(f"{name}:begun", str(number)) is not None) == (having > 0)
    if jobs.redis.getbit(f"{name}:done", number):
        return "done"
    if jobs.redis.zscore(f"{name}:free", str(number)) is not None:
        assert not held
        return "free"
    if held:
        return "held"
    assert number >= int(jobs.redis.hget(name, "next") or 0)
    return "untouched"


def read_actions() -> list[tuple[str, set[str], str]]:
    """(action, states before, state after) of each line of the table in ranges.lua."""
    lines = LUA.splitlines()
    start = next(n for n, line in enumerate(lines) if line.startswith("--   action"))
    found, action = [], ""
    for line in lines[start + 1 :]:
        if line == "--":
            return found
        action = line[5:18].strip() or action
        found.append((action, set(line[18:35].split()), line[35:].split()[0]))
    raise AssertionError("the table has no end")


# ---------------------------------------------------------------------- transitions


def test_ranges_cover_every_shard_once_and_the_last_go_first(
    jobs: JobStore, table: RangeTable
) -> None:
    _, owner = opened(jobs, table, shards=10)
    taken = [take(table, owner) for _ in range(4)]
    assert [(each.first, each.stop) for each in taken] == [(7, 10), (4, 7), (1, 4), (0, 1)]
    assert table.take(owner) == "wait"


@pytest.mark.parametrize("before", ["untouched", "free", "held", "done"])
@pytest.mark.parametrize("action", ["take", "finish", "leave", "expire"])
def test_each_action_does_what_the_table_states(
    jobs: JobStore, table: RangeTable, before: str, action: str
) -> None:
    claim, owner = opened(jobs, table, shards=6)
    table.finish(owner, take(table, owner).number, 1)  # range 0; the test is about range 1
    member = join(table, "w")
    other = join(table, "other")
    if before != "untouched":
        take(table, member)
    if before == "free":
        table.leave(member)
        member = join(table, "w")
    if before == "done":
        assert table.finish(member, 1, 1) == "go"
    assert state(jobs, claim.id, 1) == before

    def expire() -> None:
        end_lease(jobs, member)
        table.beat(other, LONG, ReportedProgress(), [])

    act: dict[str, Callable[[], object]] = {
        "take": lambda: table.take(other),
        "finish": lambda: table.finish(member, 1, 1),
        "leave": lambda: table.leave(member),
        "expire": expire,
    }
    act[action]()
    after = {to for name, froms, to in read_actions() if name == action and before in froms}
    assert state(jobs, claim.id, 1) in (after or {before})


def test_a_range_of_a_dead_worker_goes_to_another(jobs: JobStore, table: RangeTable) -> None:
    _, owner = opened(jobs, table)
    dead = join(table, "dead")
    lost = take(table, dead)
    end_lease(jobs, dead)
    assert take(table, owner) == lost
    assert table.beat(dead, LONG, ReportedProgress(), []).reply == "fenced"
    assert table.finish(dead, lost.number, 3) == table.leave(dead) == "fenced"
    assert table.take(dead) == "stop"
    assert table.finish(owner, lost.number, 3) == "go"


def test_only_the_end_of_a_slow_range_is_captured_twice(jobs: JobStore, table: RangeTable) -> None:
    _, slow = opened(jobs, table, shards=9)
    quick, third = join(table, "quick"), join(table, "third")
    first = take(table, slow)
    grow_old(jobs, slow, first.number)
    assert table.finish(quick, take(table, quick).number, 3) == "go"
    last = take(table, quick)
    assert last.number == 2, "an untouched range goes before one that is slow"
    assert table.take(slow) == "wait", "it has that range itself"
    assert take(table, third) == first
    assert table.take(quick) == "wait", "two have it already"
    assert table.finish(third, first.number, 3) == "go"
    assert table.beat(slow, LONG, ReportedProgress(), []).finished == {first.number}
    assert table.finish(slow, first.number, 3) == "done"
    assert table.finish(quick, last.number, 3) == "go"
    assert table.take(slow) == "done"
    view = table.view(slow.id)
    assert view is not None
    assert (view.capture.ranges_done, view.capture.ranges, view.sequences) == (3, 3, 9)
    assert view.capture.ranges_untaken == 0


def test_a_worker_that_has_a_slow_range_twice_dies_once(jobs: JobStore, table: RangeTable) -> None:
    claim, slow = opened(jobs, table, shards=6)
    quick = join(table, "quick")
    first = take(table, slow)
    table.finish(quick, take(table, quick).number, 3)
    grow_old(jobs, slow, first.number)
    assert take(table, quick) == first
    table.leave(quick)
    assert state(jobs, claim.id, first.number) == "held"
    assert table.finish(slow, first.number, 3) == "go"


# ---------------------------------------------------------------------- the job


@pytest.mark.parametrize("action", ["pause", "cancel"])
def test_a_job_that_stops_hands_out_nothing(jobs: JobStore, table: RangeTable, action: str) -> None:
    claim, owner = opened(jobs, table)
    helper = join(table)
    held = take(table, helper)
    jobs.change(action, claim.id)  # type: ignore[arg-type]
    assert table.beat(helper, LONG, ReportedProgress(), []).reply == "stop"
    assert table.take(helper) == table.take(owner) == "stop"
    assert table.help("late", LONG, ANY_CAPACITY, ["precompute"]) is None
    assert table.finish(helper, held.number, 3) == "go", "what is sealed counts"
    assert table.leave(helper) == "go"
    assert jobs.release(claim) in ("paused", "cancelled")
    assert not list(jobs.redis.scan_iter(f"kd:job:{claim.id}:ranges*"))
    assert jobs.redis.zcard("kd:boards") == 0


@pytest.mark.parametrize("end", ["advance", "fail_attempt", "finish", "release"])
def test_a_table_of_ranges_ends_with_the_claim_of_its_owner(
    jobs: JobStore, table: RangeTable, end: str
) -> None:
    claim, _ = opened(jobs, table)
    helper = join(table)
    held = take(table, helper)
    ends = {
        "advance": lambda: jobs.advance(claim, "train"),
        "fail_attempt": lambda: jobs.fail_attempt(claim, ERROR),
        "finish": lambda: jobs.finish(claim, "succeeded"),
        "release": lambda: jobs.release(claim),
    }
    ends[end]()
    assert table.beat(helper, LONG, ReportedProgress(), []).reply == "fenced"
    assert table.finish(helper, held.number, 3) == "fenced"
    assert table.view(claim.id) is None
    assert table.open(claim, "owner", LONG, SHARED, 10, None) is None
    if end in ("fail_attempt", "release"):
        again = jobs.claim(claim.id, "precompute", "next", 5)
        assert again is not None
        owner = table.open(again, "next", LONG, SHARED, 10, None)
        assert owner is not None
        assert owner.token > helper.token
        assert table.leave(helper) == "fenced", "a token of the table before is nothing here"
        assert jobs.redis.hgetall("kd:devices:local") == {claim.id: "1"}


def test_a_job_that_trains_has_no_ranges(jobs: JobStore, table: RangeTable) -> None:
    running(jobs, "train")
    assert table.help("w", LONG, ANY_CAPACITY, ["precompute"]) is None


# ---------------------------------------------------------------------- helpers


def test_the_record_of_a_version_that_made_traces_is_claimed_and_helped(
    jobs: JobStore, table: RangeTable
) -> None:
    """Its field ``traceparent`` stands among those that a claim and a helper read."""
    made = jobs.create(make_config("quick", "precompute"), ANN, request_id="req-1")
    jobs.redis.hset(f"kd:job:{made.id}", "traceparent", "00-aa-bb-01")
    claim = jobs.claim(made.id, "precompute", "owner", LONG)
    assert claim is not None
    asked = (claim.owner, claim.request_id, claim.stage, claim.turn)
    assert asked == ("ann", "req-1", "precompute", 0)
    assert table.open(claim, "owner", LONG, SHARED, 10, None) is not None
    order = table.help("w", LONG, ANY_CAPACITY, ["precompute"])
    assert order is not None
    assert order.claim == replace(claim, fence=0)
    job = jobs.get(made.id)
    assert job is not None
    assert (job.status, job.error, job.request_id) == ("running", None, "req-1")


def test_helpers_come_up_to_the_number_that_the_job_wants(
    jobs: JobStore, table: RangeTable
) -> None:
    opened(jobs, table, workers=3)
    join(table, "a")
    join(table, "b")
    assert table.help("c", LONG, ANY_CAPACITY, ["precompute"]) is None


def test_nobody_helps_where_no_range_is_left_to_take(jobs: JobStore, table: RangeTable) -> None:
    _, owner = opened(jobs, table, shards=3)
    take(table, owner)
    assert table.help("late", LONG, ANY_CAPACITY, ["precompute"]) is None


def test_a_helper_needs_the_resources_of_the_job(jobs: JobStore, table: RangeTable) -> None:
    opened(jobs, table, resources={"gpus": 1, "workers": "auto"})
    assert table.help("w", LONG, Capacity(0, 1 << 40), ["precompute"]) is None
    assert table.help("w", LONG, Capacity(1, 1 << 40), ["precompute"]) is not None


def test_a_helper_that_left_with_a_warning_is_not_asked_again(
    jobs: JobStore, table: RangeTable
) -> None:
    claim, _ = opened(jobs, table)
    assert table.leave(join(table, "w"), "w cannot do it.") == "go"
    assert table.help("w", LONG, ANY_CAPACITY, ["precompute"]) is None
    assert table.help("other", LONG, ANY_CAPACITY, ["precompute"]) is not None
    events = jobs.redis.xrange(f"kd:job:{claim.id}:events")
    assert any("w cannot do it." in fields["data"] for _, fields in events)


def test_a_helper_leaves_for_a_queued_job_that_fits(jobs: JobStore, table: RangeTable) -> None:
    _, owner = opened(jobs, table, shards=90)
    helper = join(table, "w", "precompute", "train")
    take(table, helper)
    queued(jobs, resources={"memory": 1 << 50})
    small = table.help("small", LONG, Capacity(1, 1 << 30), ["precompute", "train"])
    assert small is not None
    assert isinstance(table.take(small.member), TakenRange), "it could not run that job"
    assert table.take(helper) == "leave"
    assert isinstance(table.take(owner), TakenRange), "the owner has the job, and stays"


def test_helpers_hold_devices_and_are_charged(jobs: JobStore, table: RangeTable) -> None:
    claim, _ = opened(jobs, table)
    first, second = join(table, "a"), join(table, "b")
    assert jobs.redis.hgetall("kd:devices:local") == {claim.id: "3"}
    jobs.redis.hincrby(f"kd:job:{claim.id}", "charged_at", -10_000)
    table.leave(first)
    assert jobs.redis.hgetall("kd:devices:local") == {claim.id: "2"}
    spent = int(jobs.redis.hget(f"kd:job:{claim.id}", "device_ms") or 0)
    assert 30_000 <= spent < 40_000
    end_lease(jobs, second)
    table.help("c", LONG, ANY_CAPACITY, ["precompute"])
    assert jobs.redis.hgetall("kd:devices:local") == {claim.id: "2"}
    jobs.finish(claim, "succeeded")
    assert jobs.redis.hgetall("kd:devices:local") == {}


def test_the_team_that_holds_the_fewest_devices_gets_the_helper(
    jobs: JobStore, table: RangeTable
) -> None:
    tables = []
    for caller in (ANN, BOB):
        job_id = queued(jobs, "precompute", caller)
        claim = jobs.claim(job_id, "precompute", "w", 5)
        assert claim is not None
        assert table.open(claim, "owner", LONG, SHARED, 90, None) is not None
        tables.append(job_id)
    helped = [join(table, f"w{n}").id for n in range(4)]
    assert sorted(helped.count(job_id) for job_id in tables) == [2, 2]


def test_captures_that_want_helpers_are_announced(jobs: JobStore, table: RangeTable) -> None:
    claim, _ = opened(jobs, table, workers=4)
    assert jobs.list_unannounced("precompute", 10) == [claim.id] * 3
    assert jobs.list_unannounced("precompute", 10) == [], "not again so soon"
    join(table, "a")
    assert jobs.list_unannounced("precompute", 0) == [claim.id] * 2
    assert jobs.list_unannounced("train", 0) == []


def test_an_outage_ends_no_lease(jobs: JobStore, table: RangeTable) -> None:
    claim, owner = opened(jobs, table)
    helper = join(table)
    for member in (owner, helper):
        end_lease(jobs, member)
    jobs.redis.hincrby(f"kd:job:{claim.id}:ranges", "seen", -60_000)
    assert table.beat(owner, LONG, ReportedProgress(), []).reply == "go"
    assert table.beat(helper, LONG, ReportedProgress(), []).reply == "go"


# ---------------------------------------------------------------------- many workers


def test_the_view_tells_what_each_worker_did(jobs: JobStore, table: RangeTable) -> None:
    _, owner = opened(jobs, table)
    assert table.finish(owner, take(table, owner).number, 9) == "go"
    helper = join(table, "b")
    take(table, helper)
    reported = ReportedProgress(7, 3.5, 700, 350.0)
    assert table.beat(helper, LONG, reported, ["a warning"]).reply == "go"
    view = table.view(owner.id)
    assert view is not None
    assert (view.capture.ranges, view.capture.ranges_done, view.sequences) == (4, 1, 9)
    assert view.capture.ranges_untaken == 2
    shown = {member.worker: member for member in view.capture.workers}
    helping = shown["b"]
    assert (helping.ranges, helping.sequences, helping.sequences_per_second) == (1, 7, 3.5)
    assert (helping.tokens_per_second, view.tokens, view.unfinished) == (350.0, 700, 7)
    assert (shown["owner"].ranges, shown["owner"].sequences) == (0, 0)


def test_a_slow_capture_too_tells_when_it_ends(jobs: JobStore, table: RangeTable) -> None:
    _, owner = opened(jobs, table)
    for member in (owner, join(table, "b")):
        table.beat(member, LONG, ReportedProgress(5, 0.0004, 500, 0.04), [])
    view = table.view(owner.id)
    assert view is not None
    data = compute_progress(view, 18).data
    assert (data["done"], data["per_second"], data["tokens_per_second"]) == (10, 0.001, 0.1)
    assert data["eta_seconds"] == pytest.approx(8 / 0.0008)


def test_workers_that_take_at_once_get_different_ranges(jobs: JobStore, table: RangeTable) -> None:
    _, owner = opened(jobs, table, shards=120)
    taken = at_once(8, lambda: take(table, owner))
    assert len({each.number for each in taken}) == 8


def test_a_million_shards_take_little_memory(jobs: JobStore, table: RangeTable) -> None:
    claim, owner = opened(jobs, table, shards=3_000_000)
    jobs.redis.hset(f"kd:job:{claim.id}:ranges", "next", 999_999)
    assert table.finish(owner, take(table, owner).number, 1) == "go"
    for name in jobs.redis.scan_iter(f"kd:job:{claim.id}:ranges*"):
        assert (jobs.redis.memory_usage(name) or 0) < 300_000


@pytest.mark.parametrize(
    ("shards", "workers", "size"),
    [(3, 2, 1), (1000, 2, 7), (1000, None, 1), (10**6, 4, 64), (10**6, 1024, 15)],
)
def test_ranges_are_small_enough_to_end_evenly(
    shards: int, workers: int | None, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()
    assert choose_range_size(shards, workers) == size


@pytest.mark.long
@pytest.mark.parametrize("seed", range(4))
def test_random_workers_finish_every_range_once(
    jobs: JobStore, table: RangeTable, seed: int
) -> None:
    """Workers come, take, die, leave and finish at random; each range is done once."""
    chance = random.Random(seed)
    claim, owner = opened(jobs, table, shards=45)
    members: list[tuple[Membership, list[int]]] = [(owner, [])]
    finished: list[int] = []
    for turn in range(4000):
        if len(members) < 5:
            found = table.help(f"w{turn}", LONG, ANY_CAPACITY, ["precompute"])
            members += [] if found is None else [(found.member, [])]
        place = chance.randrange(len(members))
        member, held = members[place]
        match chance.randrange(6):
            case 0 if member != owner:
                end_lease(jobs, member)
                members.pop(place)
            case 1 if member != owner:
                table.leave(member)
                members.pop(place)
            case 2 if held:
                number = held.pop()
                if table.finish(member, number, 3) == "go":
                    finished.append(number)
            case 3 if held:
                grow_old(jobs, member, held[0])
            case 4:
                table.beat(member, LONG, ReportedProgress(), [])
            case _:
                taken = table.take(member)
                if taken == "done":
                    break
                if isinstance(taken, TakenRange):
                    assert taken.number not in finished
                    held.append(taken.number)
        for number in range(15):
            state(jobs, claim.id, number)
    assert sorted(finished) == list(range(15))
    view = table.view(claim.id)
    assert view is not None
    assert (view.capture.ranges_done, view.sequences) == (15, 45)


def test_the_script_names_every_key_of_a_table(jobs: JobStore, table: RangeTable) -> None:
    claim, owner = opened(jobs, table)
    helper = join(table)
    take(table, helper)
    table.finish(owner, take(table, owner).number, 3)
    table.leave(join(table, "x"), "no.")
    table.leave(helper)
    head = LUA[: LUA.index("\nlocal ")]
    for name in jobs.redis.scan_iter(f"kd:job:{claim.id}:ranges*"):
        part = str(name).removeprefix(f"kd:job:{claim.id}:ranges").lstrip(":")
        assert f":{part}" in head, part
