"""Every action from every status does exactly what the table in jobs.lua states."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from bench.support.harness import make_config
from services.store.jobs.gangs import GangTable
from services.store.jobs.leases import Claim, EventBatch
from services.store.jobs.listing import JobQuery
from services.store.jobs.records import make_job_id
from services.store.jobs.script import SCRIPT
from services.store.jobs.store import JobStore
from services.store.run_folder import FoundRun
from tests.support.records import (
    ALLOWED_IN,
    ERROR,
    HELD_OUT,
    HOUR,
    STATUSES,
    WAITS,
    at_once,
    everything,
    job_of,
    let_pass,
    queued,
    running,
    status,
)

Table = dict[str, dict[str, frozenset[str]]]
GONE = "(none)"
SPACE = {"train.learning_rate": {"choices": [0.1]}}


def table() -> Table:
    """Action -> status before -> statuses after, from the comment in jobs.lua."""
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
    """A job in some status, its claim, and the claims of its dependencies."""

    id: str
    claim: Claim
    needs: tuple[Claim, ...] = ()


def place(
    jobs: JobStore, *steps: Callable[[Placed], object], needs: int = 0, **changes: Any
) -> Placed:
    """A job that has a deadline, after some steps."""
    others = tuple(running(jobs) for _ in range(needs))
    job_id = queued(
        jobs, "distill", depends_on=[claim.id for claim in others], deadline_seconds=HOUR, **changes
    )
    placed = Placed(
        job_id, jobs.claim(job_id, "precompute", "w", 5) or Claim(job_id, 0, 0, {}), others
    )
    for step in steps:
        step(placed)
    return placed


def ways_into(jobs: JobStore) -> Iterator[tuple[str, Callable[[], Placed]]]:
    """Every status, by every history that makes a difference for the next action."""

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


def make_run(job_id: str, error: dict[str, str] | None) -> FoundRun:
    return FoundRun(job_id, make_config("lost"), "train", 0, None, [], {}, error)


def actions(jobs: JobStore) -> Iterator[tuple[str, Callable[[Placed], bool]]]:
    """Every action except create. Each returns whether it took effect.

    Adopt meets jobs that have a record, and leaves them as they are.
    """

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
            return (
                bool(placed.needs)
                and jobs.finish(placed.needs[0], outcome, ERROR) == outcome
                and before in WAITS
            )

        return end

    for action in ALLOWED_IN:
        yield action, client(action)
    yield "claim", lambda placed: jobs.claim(placed.id, "precompute", "w", 5) is not None
    yield "beat", worker(lambda claim: jobs.beat(claim, 5, EventBatch(1, ())))
    yield "advance", worker(lambda claim: jobs.advance(claim, "train"))
    yield "release", worker(jobs.release)
    yield "rest", worker(GangTable(jobs.redis).give_up)
    yield "die", worker(lambda claim: jobs.fail_attempt(claim, ERROR))
    yield "die", expire
    for outcome in ("succeeded", "failed"):
        yield "finish", worker(lambda claim, outcome=outcome: jobs.finish(claim, outcome, ERROR))
        yield "settle", settle(outcome)
    yield "due", due
    yield "retire", lambda placed: jobs.retire(placed.id, 0.0)
    yield "adopt", lambda placed: jobs.adopt(make_run(placed.id, None), "ann")


def test_the_clients_part_of_the_table_is_what_the_api_is_told() -> None:
    assert {
        action: frozenset(rows) for action, rows in table().items() if action in ALLOWED_IN
    } == ALLOWED_IN
    assert {after for rows in table().values() for row in rows.values() for after in row} == {
        *STATUSES,
        GONE,
    }


def test_the_view_of_a_job_lists_exactly_the_actions_that_succeed(jobs: JobStore) -> None:
    seen = set()
    for before, arrive in ways_into(jobs):
        placed = arrive()
        listed = job_of(jobs, placed.id).actions
        assert set(listed) == {name for name, rows in ALLOWED_IN.items() if before in rows}
        assert len(set(listed)) == len(listed)
        assert jobs.read_page(JobQuery(), 100).jobs[0].actions == listed
        for action in ALLOWED_IN:
            if action not in listed:
                result = jobs.change(action, placed.id)
                assert result.outcome in ("already", "illegal")
                assert result.allowed == (() if result.outcome == "already" else tuple(listed))
        for action in listed:
            assert jobs.change(action, arrive().id).outcome == "done"
        seen.add(before)
        jobs.redis.flushall()
    assert seen == set(STATUSES)


def test_a_trial_of_an_open_search_cannot_be_deleted(jobs: JobStore) -> None:
    search = running(jobs, "search", search={"space": SPACE}, data=HELD_OUT)
    trial = jobs.create_trial(search, 0, make_config("trial"))
    jobs.change("cancel", trial)
    assert job_of(jobs, trial).actions == ["retry"]
    refused = jobs.change("delete", trial)
    assert (refused.outcome, refused.allowed) == ("illegal", ("retry",))
    jobs.finish(search, "succeeded")
    assert job_of(jobs, trial).actions == ["retry", "delete"]
    assert jobs.change("delete", trial).outcome == "done"


def test_every_action_from_every_status_does_what_the_table_says_and_nothing_else(
    jobs: JobStore,
) -> None:
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
            else:  # it waits for fewer jobs, which changes only its version
                assert everything(jobs, placed.id)[1] == untouched[1], before
            jobs.redis.flushall()
    seen["create"][GONE] = frozenset({"waiting", "queued"})
    for error in (None, ERROR):
        run = make_run(make_job_id(), error)
        assert jobs.adopt(run, "ann")
        seen["adopt"][GONE] |= {status(jobs, run.id)}
    assert {action: dict(rows) for action, rows in seen.items()} == table()


def test_a_transition_and_its_event_are_one(jobs: JobStore) -> None:
    for action, act in actions(jobs):
        for before, arrive in ways_into(jobs):
            placed = arrive()
            told = len(jobs.read_events(placed.id, types=["status"]))
            version = jobs.get(placed.id).version
            act(placed)
            job = jobs.get(placed.id)
            if job is not None:
                events = jobs.read_events(placed.id, types=["status"])
                moved = job.status != before or job.stage != "precompute" or len(events) > told
                assert len(events) == told or moved
                assert events[-1].data["status"] == job.status, (action, before)
                assert (events[-1].data["stage"], events[-1].data["attempt"]) == (
                    job.stage,
                    job.attempt,
                )
                assert events[-1].data["reason"] == job.reason
                shown = job.error and job.error.model_dump(exclude={"help"})
                assert (events[-1].data["error"] or None) == shown
                assert (
                    job.version > version
                    if moved and len(events) > told
                    else job.version >= version
                )
            jobs.redis.flushall()


def test_an_action_says_what_came_of_it(jobs: JobStore) -> None:
    job_id = queued(jobs)

    def result(action: Any) -> tuple[str, str]:
        changed = jobs.change(action, job_id)
        return changed.outcome, changed.status

    assert result("pause") == ("done", "paused")
    assert result("pause") == ("already", "paused")
    assert result("retry") == ("illegal", "paused")
    assert result("resume") == ("done", "queued")
    assert result("resume") == ("already", "queued")
    assert result("cancel") == ("done", "cancelled")
    assert result("cancel") == ("already", "cancelled")
    assert result("pause") == ("illegal", "cancelled")
    assert result("delete") == ("done", "deleted")
    assert result("delete") == ("unknown", "")


def test_many_transitions_at_once_leave_one_story(jobs: JobStore) -> None:
    """Twenty clients change one job at once while a worker runs it."""
    claim = running(jobs)
    wishes: list[Any] = ["cancel", "pause", "resume", "pause", "resume"] * 4
    at_once(20, lambda: [jobs.change(wish, claim.id) for wish in wishes])
    told = [event.data["status"] for event in jobs.read_events(claim.id, types=["status"])]
    assert told[-1] == status(jobs, claim.id) == "cancelling"
    rows = table()
    known = defaultdict[str, set[str]](set)
    for action in ("cancel", "pause", "resume"):
        for before, after in rows[action].items():
            known[before] |= after
    for before, after in pairwise(told[1:]):
        assert after in known[before]
