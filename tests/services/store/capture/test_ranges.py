"""Ranges of shards on a real server: every transition that ranges.lua states, and what it keeps."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from dataclasses import replace

import pytest

from services.store.jobs.leases import Claim
from services.store.jobs.store import JobStore
from services.store.ranges import (
    RANGES_SCRIPT,
    Party,
    RangeBoard,
    RangeLease,
    RangeRefusal,
)
from tests.support.records import ERROR, at_once, running

PARTY = Party("1.0", "home-a")
LONG = 60.0


@pytest.fixture
def board(jobs: JobStore) -> RangeBoard:
    return RangeBoard(jobs.redis)


def opened(jobs: JobStore, board: RangeBoard, shards: int = 10, size: int = 3) -> Claim:
    claim = running(jobs, "precompute")
    assert board.open(claim, "f" * 8, shards, size, PARTY) == "opened"
    return claim


def take(board: RangeBoard, claim: Claim, worker: str = "w") -> RangeLease:
    found = board.take(claim.id, worker, PARTY, LONG)
    assert isinstance(found, RangeLease), found
    return found


def end_lease(jobs: JobStore, lease: RangeLease) -> None:
    """Move the end of a lease into the past, as time does for a worker that has died."""
    jobs.redis.zadd(f"kd:job:{lease.job_id}:ranges:leases", {str(lease.token): 1}, xx=True)


def grow_old(jobs: JobStore, lease: RangeLease) -> None:
    """Move the begin of a lease into the past, as time does for a slow worker."""
    holders = f"kd:job:{lease.job_id}:ranges:holders"
    text = jobs.redis.hget(holders, str(lease.token))
    if text is not None:  # else the lease has ended
        jobs.redis.hset(holders, str(lease.token), re.sub(r'"since":\d+', '"since":1', text))


def state(jobs: JobStore, claim: Claim, number: int) -> str:
    """The state of a range, by the keys that the head of ranges.lua names."""
    name = f"kd:job:{claim.id}:ranges"
    holders = jobs.redis.hvals(f"{name}:holders")
    held = any(f'"number":{number},' in text or f'"number":{number}}}' in text for text in holders)
    if jobs.redis.getbit(f"{name}:done", number):
        return "done"
    if jobs.redis.zscore(f"{name}:free", number) is not None:
        assert not held
        return "free"
    if held:
        return "leased"
    assert number >= int(jobs.redis.hget(name, "next"))
    return "untouched"


def table() -> list[tuple[str, set[str], str]]:
    """(action, states before, state after) of each line of the table in ranges.lua."""
    lines = RANGES_SCRIPT.splitlines()
    start = next(n for n, line in enumerate(lines) if line.startswith("--   action"))
    found, action = [], ""
    for line in lines[start + 1 :]:
        if line == "--":
            return found
        action = line[5:16].strip() or action
        found.append((action, set(line[16:33].split()), line[33:].split()[0]))
    raise AssertionError("the table has no end")


# ---------------------------------------------------------------------- transitions


def test_ranges_cover_every_shard_once_by_arithmetic(jobs: JobStore, board: RangeBoard) -> None:
    claim = opened(jobs, board, shards=10, size=3)
    leases = [take(board, claim, f"w{n}") for n in range(4)]
    assert [(lease.first, lease.stop) for lease in leases] == [(0, 3), (3, 6), (6, 9), (9, 10)]
    assert board.take(claim.id, "late", PARTY, LONG) == "wait"


@pytest.mark.parametrize("before", ["untouched", "free", "leased", "done"])
@pytest.mark.parametrize("action", ["take", "beat", "finish", "give_back", "expire"])
def test_each_action_does_what_the_table_states(
    jobs: JobStore, board: RangeBoard, before: str, action: str
) -> None:
    claim = opened(jobs, board, shards=1, size=1)
    lease = RangeLease(claim.id, 0, 99, 0, 1)  # of nobody
    if before != "untouched":
        lease = take(board, claim)
    if before == "free":
        board.give_back(lease)
    if before == "done":
        board.finish(lease)
    assert state(jobs, claim, 0) == before

    act: dict[str, Callable[[], object]] = {
        "take": lambda: board.take(claim.id, "other", PARTY, LONG),
        "beat": lambda: board.beat(lease, LONG, 5),
        "finish": lambda: board.finish(lease),
        "give_back": lambda: board.give_back(lease),
        # An expired lease is found by the next take; the job that pauses keeps it from a new one.
        "expire": lambda: (end_lease(jobs, lease), board.take(claim.id, "w", PARTY, 0)),
    }
    act[action]()
    after = {to for name, froms, to in table() if name == action and before in froms}
    if action == "expire":  # it is taken again in the same call
        after = {"leased"} if before in ("untouched", "free", "leased") else set()
    if action == "take" and before == "leased":  # the first worker is not slow
        after = {"leased"}
    assert state(jobs, claim, 0) in (after or {before})


def test_a_range_of_a_dead_worker_goes_to_another(jobs: JobStore, board: RangeBoard) -> None:
    claim = opened(jobs, board)
    dead = take(board, claim, "dead")
    end_lease(jobs, dead)
    again = take(board, claim, "other")
    assert (again.number, again.first) == (dead.number, dead.first)
    assert again.token > dead.token
    assert board.beat(dead, LONG, 1) == board.finish(dead) == board.give_back(dead) == "fenced"
    assert board.finish(again) == "go"


def test_only_the_end_of_a_slow_range_is_captured_twice(jobs: JobStore, board: RangeBoard) -> None:
    claim = opened(jobs, board, shards=3, size=1)
    slow = take(board, claim, "slow")
    grow_old(jobs, slow)
    quick = take(board, claim, "quick")
    assert board.finish(quick) == "go"
    last = take(board, claim, "quick")
    assert last.number == 2, "an untouched range goes before one that is slow"
    assert board.take(claim.id, "slow", PARTY, LONG) == "wait", "it has that range itself"
    second = take(board, claim, "third")
    assert second.number == slow.number
    assert board.take(claim.id, "fourth", PARTY, LONG) == "wait", "two have it already"
    assert board.finish(second) == "go"
    assert board.beat(slow, LONG, 1) == "done"
    assert board.finish(last) == "go"
    assert board.take(claim.id, "slow", PARTY, LONG) == "done"


def test_two_workers_that_finish_one_range_count_once(jobs: JobStore, board: RangeBoard) -> None:
    claim = opened(jobs, board, shards=2, size=1)
    slow = take(board, claim, "slow")
    board.finish(take(board, claim, "quick"))
    grow_old(jobs, slow)
    second = take(board, claim, "quick")
    assert [board.finish(slow), board.finish(second)] == ["go", "done"]
    view = board.view(claim.id)
    assert view is not None
    assert (view.done, view.count, view.workers, view.eta_seconds) == (2, 2, (), 0.0)


# ---------------------------------------------------------------------- the job


@pytest.mark.parametrize("action", ["pause", "cancel"])
def test_a_job_that_stops_hands_out_nothing(jobs: JobStore, board: RangeBoard, action: str) -> None:
    claim = opened(jobs, board)
    lease = take(board, claim)
    jobs.change(action, claim.id)  # type: ignore[arg-type]
    assert board.beat(lease, LONG, 1) == "stop"
    assert board.take(claim.id, "w", PARTY, LONG) == "stop"
    assert board.give_back(lease) == "go"
    assert state(jobs, claim, lease.number) == "free"


def test_a_board_outlives_the_owner_that_opened_it(jobs: JobStore, board: RangeBoard) -> None:
    claim = opened(jobs, board)
    lease = take(board, claim, "helper")
    assert jobs.fail_attempt(claim, ERROR) == "queued"
    assert board.beat(lease, LONG, 1) == "stop"
    assert board.open(claim, "f" * 8, 10, 3, PARTY) == board.close(claim) == "fenced"
    owner = jobs.claim(claim.id, "precompute", "next", 5)
    assert owner is not None
    assert board.open(owner, "f" * 8, 10, 3, PARTY) == "kept"
    assert board.beat(lease, LONG, 2) == "go"
    assert board.open(owner, "another", 10, 3, PARTY) == "opened"
    assert board.beat(lease, LONG, 3) == "fenced"
    assert take(board, owner).token > lease.token
    assert board.close(owner) == "closed"
    assert board.view(claim.id) is None
    assert not list(jobs.redis.scan_iter(f"kd:job:{claim.id}:ranges*"))


def test_a_job_that_trains_has_no_board(jobs: JobStore, board: RangeBoard) -> None:
    claim = running(jobs, "train")
    assert board.open(claim, "f" * 8, 10, 3, PARTY) == "fenced"
    assert board.take(claim.id, "w", PARTY, LONG) == "stop"
    with pytest.raises(ValueError, match="must be at least 1"):
        board.open(claim, "f" * 8, 0, 3, PARTY)


@pytest.mark.parametrize(
    ("party", "names"),
    [
        (replace(PARTY, version="2.0"), ("2.0", "1.0", "Install the same version")),
        (replace(PARTY, home="home-b"), ("home-b", "home-a", "same KD_HOME")),
    ],
)
def test_a_stranger_is_refused_by_name(
    jobs: JobStore, board: RangeBoard, party: Party, names: tuple[str, ...]
) -> None:
    claim = opened(jobs, board)
    refusal = board.take(claim.id, "stranger", party, LONG)
    assert isinstance(refusal, RangeRefusal)
    assert all(name in refusal.message for name in ("stranger", claim.id, *names))
    assert take(board, claim).number == 0, "nothing was given to it"


# ---------------------------------------------------------------------- many workers


def test_the_view_names_workers_and_rates(jobs: JobStore, board: RangeBoard) -> None:
    claim = opened(jobs, board)
    assert board.finish(take(board, claim, "a")) == "go"
    lease = take(board, claim, "b")
    assert board.beat(lease, LONG, 7) == "go"
    view = board.view(claim.id)
    assert view is not None
    assert (view.count, view.done, view.waiting) == (4, 1, 2)
    (worker,) = view.workers
    assert (worker.worker, worker.number, worker.sequences) == ("b", 1, 7)
    assert view.eta_seconds == 3 * view.mean_seconds
    assert replace(worker, seconds=2.0).rate == 3.5
    assert replace(worker, sequences=0).rate is None


def test_workers_that_take_at_once_get_different_ranges(jobs: JobStore, board: RangeBoard) -> None:
    claim = opened(jobs, board, shards=40, size=1)
    leases = at_once(8, lambda: take(board, claim))
    assert len({lease.number for lease in leases}) == 8
    assert len({lease.token for lease in leases}) == 8


def test_a_million_shards_take_little_memory(jobs: JobStore, board: RangeBoard) -> None:
    claim = opened(jobs, board, shards=1_000_000, size=1)
    jobs.redis.hset(f"kd:job:{claim.id}:ranges", "next", 999_999)
    assert board.finish(take(board, claim)) == "go"
    for name in jobs.redis.scan_iter(f"kd:job:{claim.id}:ranges*"):
        assert jobs.redis.memory_usage(name) < 300_000
        assert jobs.redis.ttl(name) > 0, "the board of a job that is gone must expire"


@pytest.mark.parametrize("seed", range(4))
def test_random_workers_finish_every_range_once(
    jobs: JobStore, board: RangeBoard, seed: int
) -> None:
    """Workers take, beat, die, give back and finish at random; each range is done once."""
    chance = random.Random(seed)
    claim = opened(jobs, board, shards=23, size=2)
    held: list[RangeLease] = []
    finished: list[int] = []
    for _ in range(2000):
        found = board.take(claim.id, f"w{chance.randrange(5)}", PARTY, LONG)
        if found == "done":
            break
        if isinstance(found, RangeLease):
            assert found.number not in finished
            held.append(found)
        lease = held.pop(chance.randrange(len(held)))
        match chance.randrange(5):
            case 0:
                end_lease(jobs, lease)
            case 1:
                board.give_back(lease)
            case 2:
                if board.finish(lease) == "go":
                    finished.append(lease.number)
            case 3:
                grow_old(jobs, lease)
                held.append(lease)
            case _:
                board.beat(lease, LONG, 1)
                held.append(lease)
        numbers = [one.number for one in held if one.number not in finished]
        assert all(numbers.count(number) <= 2 for number in numbers)
    assert sorted(finished) == list(range(12))
    view = board.view(claim.id)
    assert view is not None
    assert (view.done, view.waiting, view.workers) == (12, 0, ())
