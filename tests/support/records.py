"""Job records on a real server, brought into the state that a test needs."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable
from typing import Any

from bench.support.harness import make_config
from kd.client.wire.jobs import Action, Job, Status
from services.store.callers import LOCAL_CALLER, Caller
from services.store.jobs.leases import Claim
from services.store.jobs.store import JobStore

ERROR = {"type": "worker_lost", "detail": "It was killed.", "remedy": "Buy memory."}
STATUSES: tuple[str, ...] = Status.__args__  # type: ignore[attr-defined]
#: Actions of a client -> the statuses that allow them. Written by hand: tests compare the server's
#: script with this table.
ALLOWED_IN: dict[Action, frozenset[str]] = {
    "cancel": frozenset({"waiting", "queued", "paused", "running", "pausing"}),
    "pause": frozenset({"waiting", "queued", "running"}),
    "resume": frozenset({"paused", "pausing"}),
    "retry": frozenset({"failed", "cancelled"}),
    "delete": frozenset({"succeeded", "failed", "cancelled"}),
}
#: The statuses in which the end of a dependency may change a job.
WAITS = ("waiting", "paused")
ANN = Caller("ann")
BOB = Caller("bob")
HOUR = 3600
HELD_OUT = {"train": "text.txt", "validation_fraction": 0.1}


def queued(
    jobs: JobStore, kind: str = "train", caller: Caller = LOCAL_CALLER, **changes: Any
) -> str:
    """Create a job that waits for a worker; return its id."""
    return jobs.create(make_config("quick", kind, **changes), caller).id


def running(jobs: JobStore, kind: str = "train", **changes: Any) -> Claim:
    """Create a job and claim it, so that it runs; return the claim."""
    job_id = queued(jobs, kind, **changes)
    claim = jobs.claim(job_id, jobs.get(job_id).stage, "w", 5)
    assert claim is not None
    return claim


def finished(jobs: JobStore, outcome: str = "succeeded", **changes: Any) -> str:
    """Create a job, run it and finish it with ``outcome``; return its id."""
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
    """Move the deadline ``what`` of a job into the past, if the job has such a deadline."""
    jobs.redis.zadd(f"kd:{what}", {job_id: 1}, xx=True)


def everything(jobs: JobStore, job_id: str) -> tuple[Any, ...]:
    """Return all stored data of a job: its record and its events."""
    return jobs.redis.hgetall(f"kd:job:{job_id}"), jobs.read_events(job_id)


def at_once(times: int, act: Callable[[], Any]) -> list[Any]:
    """Call ``act`` in ``times`` threads at the same moment; return the results as they arrive."""
    answers: list[Any] = []
    barrier = threading.Barrier(times)

    def call() -> None:
        barrier.wait()
        answers.append(act())

    threads = [threading.Thread(target=call) for _ in range(times)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return answers


def counted(jobs: JobStore) -> dict[str, float]:
    """Return the value of each counter, summed over its labels."""
    found: dict[str, float] = defaultdict(float)
    for name, _, value in jobs.read_counters():
        found[name] += value
    return found
