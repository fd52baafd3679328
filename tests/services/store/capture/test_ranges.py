"""Ranges of shards on a real server: every transition that ranges.lua states, and what it keeps."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from typing import Any

import pytest

from bench.support.paths import ROOT
from services.store.jobs.leases import ANY_CAPACITY, Capacity, Claim
from services.store.jobs.store import JobStore
from services.store.ranges import (
    HelpOrder,
    Membership,
    RangeBoard,
    ReportedProgress,
    TakenRange,
    choose_range_size,
)
from tests.support.records import ANN, BOB, ERROR, at_once, queued, running

TERMS = {"fingerprint": "f" * 8, "knots": None, "version": "1.0", "place": "here"}
LONG = 60.0
LUA = (ROOT / "services" / "store" / "ranges.lua").read_text(encoding="utf-8")


@pytest.fixture
def board(jobs: JobStore) -> RangeBoard:
    return RangeBoard(jobs.redis)


@pytest.fixture(autouse=True)
def ranges_of_three(monkeypatch: pytest.MonkeyPatch) -> None:
    """The size of ranges is arithmetic that has a test of its own."""
    monkeypatch.setattr("services.store.ranges.choose_range_size", lambda *_: 3)


def opened(
    jobs: JobStore, board: RangeBoard, shards: int = 10, workers: int | None = None, **changes: Any
) -> tuple[Claim, Membership]:
    claim = running(jobs, "precompute", **changes)
    owner = board.open(claim, "owner", LONG, TERMS, shards, workers)
    assert owner is not None
    return claim, owner


def join(board: RangeBoard, worker: str = "w", stages: tuple[str, ...] = ()) -> Membership:
    found = board.help(worker, LONG, ANY_CAPACITY, list(stages))
    assert isinstance(found, HelpOrder), found
    return found.member


def take(board: RangeBoard, member: Membership) -> TakenRange:
    found = board.take(member)
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


def table() -> list[tuple[str, set[str], str]]:
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
    jobs: JobStore, board: RangeBoard
) -> None:
    _, owner = opened(jobs, board, shards=10)
    taken = [take(board, owner) for _ in range(4)]
    assert [(each.first, each.stop) for each in taken] == [(7, 10), (4, 7), (1, 4), (0, 1)]
    assert board.take(owner) == "wait"


@pytest.mark.parametrize("before", ["untouched", "free", "held", "done"])
@pytest.mark.parametrize("action", ["take", "finish", "leave", "expire"])
def test_each_action_does_what_the_table_states(
    jobs: JobStore, board: RangeBoard, before: str, action: str
) -> None:
    claim, owner = opened(jobs, board, shards=6)
    board.finish(owner, take(board, owner).number, 1)  # range 0; the test is about range 1
    member = join(board, "w")
    other = join(board, "other")
    if before != "untouched":
        take(board, member)
    if before == "free":
        board.leave(member)
        member = join(board, "w")
    if before == "done":
        assert board.finish(member, 1, 1) == "go"
    assert state(jobs, claim.id, 1) == before

    def expire() -> None:
        end_lease(jobs, member)
        board.beat(other, LONG, ReportedProgress(), [])

    act: dict[str, Callable[[], object]] = {
        "take": lambda: board.take(other),
        "finish": lambda: board.finish(member, 1, 1),
        "leave": lambda: board.leave(member),
        "expire": expire,
    }
    act[action]()
    after = {to for name, froms, to in table() if name == action and before in froms}
    assert state(jobs, claim.id, 1) in (after or {before})


def test_a_range_of_a_dead_worker_goes_to_another(jobs: JobStore, board: RangeBoard) -> None:
    _, owner = opened(jobs, board)
    dead = join(board, "dead")
    lost = take(board, dead)
    end_lease(jobs, dead)
    assert take(board, owner) == lost
    assert board.beat(dead, LONG, ReportedProgress(), []).reply == "fenced"
    assert board.finish(dead, lost.number, 3) == board.leave(dead) == "fenced"
    assert board.take(dead) == "stop"
    assert board.finish(owner, lost.number, 3) == "go"


def test_only_the_end_of_a_slow_range_is_captured_twice(jobs: JobStore, board: RangeBoard) -> None:
    _, slow = opened(jobs, board, shards=9)
    quick, third = join(board, "quick"), join(board, "third")
    first = take(board, slow)
    grow_old(jobs, slow, first.number)
    assert board.finish(quick, take(board, quick).number, 3) == "go"
    last = take(board, quick)
    assert last.number == 2, "an untouched range goes before one that is slow"
    assert board.take(slow) == "wait", "it has that range itself"
    assert take(board, third) == first
    assert board.take(quick) == "wait", "two have it already"
    assert board.finish(third, first.number, 3) == "go"
    assert board.beat(slow, LONG, ReportedProgress(), []).finished == {first.number}
    assert board.finish(slow, first.number, 3) == "done"
    assert board.finish(quick, last.number, 3) == "go"
    assert board.take(slow) == "done"
    view = board.view(slow.id)
    assert view is not None
    assert (view.done, view.count, view.sequences, view.untaken) == (3, 3, 9, 0)


def test_a_worker_that_has_a_slow_range_twice_dies_once(jobs: JobStore, board: RangeBoard) -> None:
    claim, slow = opened(jobs, board, shards=6)
    quick = join(board, "quick")
    first = take(board, slow)
    board.finish(quick, take(board, quick).number, 3)
    grow_old(jobs, slow, first.number)
    assert take(board, quick) == first
    board.leave(quick)
    assert state(jobs, claim.id, first.number) == "held"
    assert board.finish(slow, first.number, 3) == "go"


# ---------------------------------------------------------------------- the job


@pytest.mark.parametrize("action", ["pause", "cancel"])
def test_a_job_that_stops_hands_out_nothing(jobs: JobStore, board: RangeBoard, action: str) -> None:
    claim, owner = opened(jobs, board)
    helper = join(board)
    held = take(board, helper)
    jobs.change(action, claim.id)  # type: ignore[arg-type]
    assert board.beat(helper, LONG, ReportedProgress(), []).reply == "stop"
    assert board.take(helper) == board.take(owner) == "stop"
    assert board.help("late", LONG, ANY_CAPACITY, []) is None
    assert board.finish(helper, held.number, 3) == "go", "what is sealed counts"
    assert board.leave(helper) == "go"
    assert jobs.release(claim) in ("paused", "cancelled")
    assert not list(jobs.redis.scan_iter(f"kd:job:{claim.id}:ranges*"))
    assert jobs.redis.zcard("kd:boards") == 0


@pytest.mark.parametrize("end", ["advance", "fail_attempt", "finish", "release"])
def test_a_board_ends_with_the_claim_of_its_owner(
    jobs: JobStore, board: RangeBoard, end: str
) -> None:
    claim, _ = opened(jobs, board)
    helper = join(board)
    held = take(board, helper)
    ends = {
        "advance": lambda: jobs.advance(claim, "train"),
        "fail_attempt": lambda: jobs.fail_attempt(claim, ERROR),
        "finish": lambda: jobs.finish(claim, "succeeded"),
        "release": lambda: jobs.release(claim),
    }
    ends[end]()
    assert board.beat(helper, LONG, ReportedProgress(), []).reply == "fenced"
    assert board.finish(helper, held.number, 3) == "fenced"
    assert board.view(claim.id) is None
    assert board.open(claim, "owner", LONG, TERMS, 10, None) is None
    if end in ("fail_attempt", "release"):
        again = jobs.claim(claim.id, "precompute", "next", 5)
        assert again is not None
        owner = board.open(again, "next", LONG, TERMS, 10, None)
        assert owner is not None
        assert owner.token > helper.token
        assert board.leave(helper) == "fenced", "a token of the board before is nothing here"
        assert jobs.redis.hgetall("kd:devices:local") == {claim.id: "1"}


def test_a_job_that_trains_has_no_board(jobs: JobStore, board: RangeBoard) -> None:
    running(jobs, "train")
    assert board.help("w", LONG, ANY_CAPACITY, []) is None


# ---------------------------------------------------------------------- helpers


def test_helpers_come_up_to_the_number_that_the_job_wants(
    jobs: JobStore, board: RangeBoard
) -> None:
    opened(jobs, board, workers=3)
    join(board, "a")
    join(board, "b")
    assert board.help("c", LONG, ANY_CAPACITY, []) is None


def test_nobody_helps_where_no_range_is_left_to_take(jobs: JobStore, board: RangeBoard) -> None:
    _, owner = opened(jobs, board, shards=3)
    take(board, owner)
    assert board.help("late", LONG, ANY_CAPACITY, []) is None


def test_a_helper_needs_the_resources_of_the_job(jobs: JobStore, board: RangeBoard) -> None:
    opened(jobs, board, resources={"gpus": 1, "workers": "auto"})
    assert board.help("w", LONG, Capacity(0, 1 << 40), []) is None
    assert board.help("w", LONG, Capacity(1, 1 << 40), []) is not None


def test_a_helper_that_left_with_a_warning_is_not_asked_again(
    jobs: JobStore, board: RangeBoard
) -> None:
    claim, _ = opened(jobs, board)
    assert board.leave(join(board, "w"), "w cannot do it.") == "go"
    assert board.help("w", LONG, ANY_CAPACITY, []) is None
    assert board.help("other", LONG, ANY_CAPACITY, []) is not None
    events = jobs.redis.xrange(f"kd:job:{claim.id}:events")
    assert any("w cannot do it." in fields["data"] for _, fields in events)


def test_a_helper_leaves_for_a_queued_job_that_fits(jobs: JobStore, board: RangeBoard) -> None:
    _, owner = opened(jobs, board, shards=90)
    helper = join(board, "w", ("precompute", "train"))
    take(board, helper)
    queued(jobs, resources={"memory": 1 << 50})
    small = board.help("small", LONG, Capacity(1, 1 << 30), ["train"])
    assert small is not None
    assert isinstance(board.take(small.member), TakenRange), "it could not run that job"
    assert board.take(helper) == "leave"
    assert isinstance(board.take(owner), TakenRange), "the owner has the job, and stays"


def test_helpers_hold_devices_and_are_charged(jobs: JobStore, board: RangeBoard) -> None:
    claim, _ = opened(jobs, board)
    first, second = join(board, "a"), join(board, "b")
    assert jobs.redis.hgetall("kd:devices:local") == {claim.id: "3"}
    jobs.redis.hincrby(f"kd:job:{claim.id}", "charged_at", -10_000)
    board.leave(first)
    assert jobs.redis.hgetall("kd:devices:local") == {claim.id: "2"}
    spent = int(jobs.redis.hget(f"kd:job:{claim.id}", "device_ms") or 0)
    assert 30_000 <= spent < 40_000
    end_lease(jobs, second)
    board.help("c", LONG, ANY_CAPACITY, [])
    assert jobs.redis.hgetall("kd:devices:local") == {claim.id: "2"}
    jobs.finish(claim, "succeeded")
    assert jobs.redis.hgetall("kd:devices:local") == {}


def test_the_team_that_holds_the_fewest_devices_gets_the_helper(
    jobs: JobStore, board: RangeBoard
) -> None:
    boards = []
    for caller in (ANN, BOB):
        job_id = queued(jobs, "precompute", caller)
        claim = jobs.claim(job_id, "precompute", "w", 5)
        assert claim is not None
        assert board.open(claim, "owner", LONG, TERMS, 90, None) is not None
        boards.append(job_id)
    helped = [join(board, f"w{n}").id for n in range(4)]
    assert sorted(helped.count(job_id) for job_id in boards) == [2, 2]


def test_captures_that_want_helpers_are_announced(jobs: JobStore, board: RangeBoard) -> None:
    claim, _ = opened(jobs, board, workers=4)
    assert jobs.list_unannounced("precompute", 10) == [claim.id] * 3
    assert jobs.list_unannounced("precompute", 10) == [], "not again so soon"
    join(board, "a")
    assert jobs.list_unannounced("precompute", 0) == [claim.id] * 2
    assert jobs.list_unannounced("train", 0) == []


def test_an_outage_ends_no_lease(jobs: JobStore, board: RangeBoard) -> None:
    claim, owner = opened(jobs, board)
    helper = join(board)
    for member in (owner, helper):
        end_lease(jobs, member)
    jobs.redis.hincrby(f"kd:job:{claim.id}:ranges", "seen", -60_000)
    assert board.beat(owner, LONG, ReportedProgress(), []).reply == "go"
    assert board.beat(helper, LONG, ReportedProgress(), []).reply == "go"


# ---------------------------------------------------------------------- many workers


def test_the_view_tells_what_each_worker_did(jobs: JobStore, board: RangeBoard) -> None:
    _, owner = opened(jobs, board)
    assert board.finish(owner, take(board, owner).number, 9) == "go"
    helper = join(board, "b")
    take(board, helper)
    reported = ReportedProgress(7, 3.5, 700, 350.0)
    assert board.beat(helper, LONG, reported, ["a warning"]).reply == "go"
    view = board.view(owner.id)
    assert view is not None
    assert (view.count, view.done, view.sequences, view.untaken) == (4, 1, 9, 2)
    shown = {member.worker: member for member in view.members}
    assert (shown["b"].ranges, shown["b"].reported, shown["b"].unfinished) == (1, reported, 7)
    assert (shown["owner"].ranges, shown["owner"].unfinished) == (0, 0)


def test_workers_that_take_at_once_get_different_ranges(jobs: JobStore, board: RangeBoard) -> None:
    _, owner = opened(jobs, board, shards=120)
    taken = at_once(8, lambda: take(board, owner))
    assert len({each.number for each in taken}) == 8


def test_a_million_shards_take_little_memory(jobs: JobStore, board: RangeBoard) -> None:
    claim, owner = opened(jobs, board, shards=3_000_000)
    jobs.redis.hset(f"kd:job:{claim.id}:ranges", "next", 999_999)
    assert board.finish(owner, take(board, owner).number, 1) == "go"
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
    jobs: JobStore, board: RangeBoard, seed: int
) -> None:
    """Workers come, take, die, leave and finish at random; each range is done once."""
    chance = random.Random(seed)
    claim, owner = opened(jobs, board, shards=45)
    members: list[tuple[Membership, list[int]]] = [(owner, [])]
    finished: list[int] = []
    for turn in range(4000):
        if len(members) < 5:
            found = board.help(f"w{turn}", LONG, ANY_CAPACITY, [])
            members += [] if found is None else [(found.member, [])]
        place = chance.randrange(len(members))
        member, held = members[place]
        match chance.randrange(6):
            case 0 if member != owner:
                end_lease(jobs, member)
                members.pop(place)
            case 1 if member != owner:
                board.leave(member)
                members.pop(place)
            case 2 if held:
                number = held.pop()
                if board.finish(member, number, 3) == "go":
                    finished.append(number)
            case 3 if held:
                grow_old(jobs, member, held[0])
            case 4:
                board.beat(member, LONG, ReportedProgress(), [])
            case _:
                taken = board.take(member)
                if taken == "done":
                    break
                if isinstance(taken, TakenRange):
                    assert taken.number not in finished
                    held.append(taken.number)
        for number in range(15):
            state(jobs, claim.id, number)
    assert sorted(finished) == list(range(15))
    view = board.view(claim.id)
    assert view is not None
    assert (view.done, view.sequences) == (15, 45)


def test_the_script_names_every_key_of_a_board(jobs: JobStore, board: RangeBoard) -> None:
    claim, owner = opened(jobs, board)
    helper = join(board)
    take(board, helper)
    board.finish(owner, take(board, owner).number, 3)
    board.leave(join(board, "x"), "no.")
    board.leave(helper)
    head = LUA[: LUA.index("\nlocal ")]
    for name in jobs.redis.scan_iter(f"kd:job:{claim.id}:ranges*"):
        part = str(name).removeprefix(f"kd:job:{claim.id}:ranges").lstrip(":")
        assert f":{part}" in head, part
