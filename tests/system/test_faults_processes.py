"""Child and supervisor are killed, stopped and terminated; jobs are paused and cancelled."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from bench.support.faults import (
    LEASE_SECONDS,
    Cluster,
    RequestedJob,
    RetryingClient,
    make_light_body,
)
from bench.support.harness import Parts
from bench.support.judge import (
    LedgerLine,
    check_answers,
    check_history,
    find_allowed_ends,
    find_job_violations,
    list_written,
    read_ledger,
)
from bench.support.waiting import wait_until
from kd.client.wire.jobs import TERMINAL_STATUSES
from services.worker.heartbeat import BEATS_PER_LEASE

MakeParts = Callable[..., Parts]

#: Pauses, resumes and cancels that the clients ask for in one test.
WISHES = 200
#: Milliseconds of a step of the light child.
STEP_MS = 60
#: A turn of the supervisor's loop, and the time that two busy cores need to schedule four
#: processes.
SLACK_SECONDS = 0.5
#: The time that a Python process needs to end.
EXIT_SECONDS = 1.0


@pytest.fixture
def spare(tmp_path: Path) -> Path:
    """A folder for undisturbed captures, to compare with."""
    return tmp_path / "spare"


@pytest.fixture
def cluster(_server_binary: Path, tmp_path: Path) -> Iterator[Callable[..., Cluster]]:
    made: list[Cluster] = []

    def make(workers: int, **settings: object) -> Cluster:
        made.append(Cluster(tmp_path / "cluster", workers, **settings))
        return made[-1]

    yield make
    for one in made:
        one.close()


def writes(parts: Parts, job_id: str) -> list[LedgerLine]:
    return [line for line in read_ledger(parts.settings.run_dir(job_id)) if line.what == "wrote"]


def next_write(parts: Parts, job_id: str, after: float, not_by: set[str]) -> float:
    """Seconds from ``after`` to the first write of a new process."""

    def found() -> LedgerLine | None:
        fresh = (
            line for line in writes(parts, job_id) if line.at > after and line.writer not in not_by
        )
        return next(fresh, None)

    try:
        return wait_until(found).at - after
    except AssertionError as error:
        history = [(kind, data.get("status", data)) for kind, data in parts.events(job_id)][-8:]
        raise AssertionError(
            f"no write of {job_id}: {parts.job(job_id).status}, {history}"
        ) from error


def pids_of_workers(some: Cluster) -> set[int]:
    return {worker.pid for worker in some.parts.jobs.list_workers()}


def wait_for_a_write(parts: Parts, job_id: str) -> None:
    before = len(writes(parts, job_id))
    wait_until(lambda: len(writes(parts, job_id)) > before)


def find_holder(cluster: Cluster, job_id: str) -> tuple[str, int]:
    """The worker that runs the job, and its child."""

    def found() -> tuple[str, int] | None:
        pairs = (
            (name, pid)
            for name in cluster.workers
            for pid, job in cluster.find_children(name)
            if job == job_id
        )
        return next(pairs, None)

    return wait_until(found)


@pytest.mark.alone
@pytest.mark.slow
def test_the_run_of_a_killed_child_continues_within_five_seconds(
    cluster: Callable[..., Cluster], spare: Path
) -> None:
    one = cluster(workers=1)
    name = "light-1-30-50"
    job_id = one.parts.submit(name, "distill", max_attempts=99)
    times = []
    dice = random.Random(1)
    for _ in range(20):
        wait_for_a_write(one.parts, job_id)
        time.sleep(dice.uniform(0, 0.06))
        _, pid = find_holder(one, job_id)
        known = {line.writer for line in writes(one.parts, job_id)}
        struck = time.monotonic()
        os.kill(pid, signal.SIGKILL)
        times.append(next_write(one.parts, job_id, struck, known))
    assert max(times) <= 5.0, times
    job = one.parts.wait_for(job_id, *TERMINAL_STATUSES)
    assert job.attempt == 21
    assert find_job_violations(one.parts, job_id, name, spare) == []
    begun = sum(line.what == "write" for line in read_ledger(one.parts.settings.run_dir(job_id)))
    assert begun <= len(list_written(one.parts.settings.run_dir(job_id))) + 20, (
        "at most the write in flight is repeated"
    )


@pytest.mark.alone
@pytest.mark.slow
def test_the_job_of_a_killed_supervisor_continues_after_a_lease_without_an_orphan(
    cluster: Callable[..., Cluster], spare: Path
) -> None:
    some = cluster(workers=4)
    names = ["light-2-20-60", "light-3-20-60"]
    jobs = [some.parts.submit(name, "distill", max_attempts=99) for name in names]
    times = []
    for _ in range(10):
        wait_until(
            lambda: (
                len({process.pid for process in some.processes.values()} & pids_of_workers(some))
                == 4
            )
        )
        struck: dict[str, tuple[float, set[str], int]] = {}
        for job_id in jobs:
            wait_for_a_write(some.parts, job_id)
            worker, pid = find_holder(some, job_id)
            known = {line.writer for line in writes(some.parts, job_id)}
            # Its restart takes a second of a core, which the measured times must not include.
            some.down.add(worker)
            some.processes[worker].kill()
            struck[job_id] = time.monotonic(), known, pid
        for at, _, pid in struck.values():
            wait_until(
                lambda pid=pid: pid not in some.find_live_runs(), 2.0 - (time.monotonic() - at)
            )
        times += [
            next_write(some.parts, job_id, at, known) for job_id, (at, known, _) in struck.items()
        ]
        some.down.clear()
    assert max(times) <= LEASE_SECONDS + 2.0, times
    for job_id, name in zip(jobs, names, strict=True):
        some.parts.wait_for(job_id, *TERMINAL_STATUSES)
        assert find_job_violations(some.parts, job_id, name, spare) == []
    assert some.find_live_runs() == {}


@pytest.mark.alone
@pytest.mark.long
def test_a_terminated_supervisor_saves_and_loses_nothing(
    cluster: Callable[..., Cluster], spare: Path
) -> None:
    one = cluster(workers=1)
    one.down.add("worker-1")  # the test restarts it
    name = "light-4-12-50"
    job_id = one.parts.submit(name, "distill")
    dice = random.Random(3)
    for _ in range(5):
        wait_for_a_write(one.parts, job_id)
        time.sleep(dice.uniform(0, 0.05))
        began = time.monotonic()
        one.processes["worker-1"].terminate()
        assert one.processes["worker-1"].wait(10) == 0
        assert time.monotonic() - began <= one.parts.settings.stop_grace_seconds
        assert one.find_live_runs() == {}
        assert one.parts.job(job_id).status == "queued"
        one.processes["worker-1"] = one.parts.start_worker()
    job = one.parts.wait_for(job_id, *TERMINAL_STATUSES)
    assert job.attempt == 1, "a clean stop does not count as an attempt"
    assert find_job_violations(one.parts, job_id, name, spare) == []
    assert all(
        line.what != "write"
        or line.number in list_written(one.parts.settings.run_dir(job_id), line.of)
        for line in read_ledger(one.parts.settings.run_dir(job_id))
    ), "nothing was in flight"


@pytest.mark.long
def test_a_host_that_sleeps_past_its_lease_writes_nothing_more(
    cluster: Callable[..., Cluster], spare: Path
) -> None:
    two = cluster(workers=2)
    name = "light-5-12-60"
    job_id = two.parts.submit(name, "distill")
    wait_for_a_write(two.parts, job_id)
    worker, child = find_holder(two, job_id)
    supervisor = two.processes[worker].pid
    writer = writes(two.parts, job_id)[-1].writer
    for pid in (supervisor, child):
        os.kill(pid, signal.SIGSTOP)
    stopped = time.monotonic()
    heir = wait_until(
        lambda: next(
            (name for name in two.workers if name != worker and two.find_children(name)), None
        )
    )
    assert time.monotonic() - stopped >= LEASE_SECONDS - 0.5, "not before the lease ran out"
    time.sleep(0.5)
    for pid in (child, supervisor):
        os.kill(pid, signal.SIGCONT)
    wait_until(lambda: child not in two.find_live_runs())
    job = two.parts.wait_for(job_id, *TERMINAL_STATUSES)
    assert job.status == "succeeded", job.error
    assert heir in two.workers
    assert two.processes[worker].poll() is None, "the worker itself lives, and may claim other jobs"
    assert {line.writer for line in writes(two.parts, job_id)} > {writer}
    assert find_job_violations(two.parts, job_id, name, spare) == []
    fenced = {name: value for name, _, value in two.parts.jobs.read_counters()}
    assert fenced.get("kd_fenced_writes_total", 0) >= 1


@pytest.mark.alone
@pytest.mark.long
def test_a_child_that_stays_stopped_is_killed_and_replaced(
    cluster: Callable[..., Cluster], spare: Path
) -> None:
    one = cluster(workers=1, silence_seconds=3.0)
    name = "light-6-8-60"
    job_id = one.parts.submit(name, "distill")
    wait_for_a_write(one.parts, job_id)
    _, pid = find_holder(one, job_id)
    os.kill(pid, signal.SIGSTOP)
    stopped = time.monotonic()
    wait_until(lambda: pid not in one.find_live_runs())
    assert time.monotonic() - stopped >= 2.0, "a run may be silent for a while"
    job = one.parts.wait_for(job_id, *TERMINAL_STATUSES)
    assert (job.status, job.attempt) == ("succeeded", 2), job.error
    assert find_job_violations(one.parts, job_id, name, spare) == []


@pytest.mark.long
def test_a_job_that_always_dies_has_its_attempts_and_other_jobs_run(new_parts: MakeParts) -> None:
    parts = new_parts(child_module="bench.support.light_child", max_attempts=1000)
    parts.start_worker()
    poison = parts.submit("poison", "distill", max_attempts=4)
    others = [parts.submit(f"light-{number}-1-20", "distill") for number in (6, 7)]
    job = parts.wait_for(poison, *TERMINAL_STATUSES)
    assert (job.status, job.attempt) == ("failed", 4)
    assert job.error is not None and job.error.type == "worker_lost"
    assert [parts.wait_for(other, *TERMINAL_STATUSES).status for other in others] == [
        "succeeded"
    ] * 2
    assert [line.what for line in read_ledger(parts.settings.run_dir(poison))] == ["begin"] * 4, (
        "and no more attempts"
    )
    assert [status for status in parts.statuses(poison) if status in TERMINAL_STATUSES] == [
        "failed"
    ]


@pytest.mark.alone
@pytest.mark.slow
def test_pauses_and_cancels_take_effect_at_once_at_any_moment(
    cluster: Callable[..., Cluster], spare: Path
) -> None:
    """Running jobs stop within a beat and a step; none is lost, none ends twice."""
    some = cluster(workers=3)
    dice = random.Random(15)
    client = RetryingClient(some.parts.settings.server)
    orders = list[RequestedJob]()
    late = list[str]()
    while sum(len(order.wishes) for order in orders) < WISHES:
        opened = [order for order in orders if not some.parts.job(order.id).ended]
        if len(opened) < 4:
            opened.append(post_light(client, some, len(orders)))
            orders.append(opened[-1])
        time.sleep(dice.uniform(0, 0.4))
        order = dice.choice(opened)
        if dice.random() < 0.15:
            client.wish(order, "cancel")
            continue
        before = some.parts.job(order.id).status
        client.wish(order, "pause")
        if before == "running":
            late += find_late_stops(some, order)
        client.wish(order, "resume")
    for order in orders:
        if client.insist("GET", f"/jobs/{order.id}").json()["status"] in ("paused", "pausing"):
            client.insist("POST", f"/jobs/{order.id}/resume")
    assert late == []
    for order in orders:
        job = some.parts.wait_for(order.id, *TERMINAL_STATUSES)
        assert job.status in find_allowed_ends(order, {}), order
        assert list(check_history(job.id, some.parts.statuses(job.id), 0)) == []
        if job.status == "succeeded":
            assert find_job_violations(some.parts, job.id, order.body["name"], spare) == []
    assert list(check_answers(client.answers)) == []
    client.close()


def post_light(client: RetryingClient, some: Cluster, number: int) -> RequestedJob:
    order = RequestedJob(
        f"fifteen {number}", make_light_body(some.inputs, f"light-{100 + number}-4-{STEP_MS}")
    )
    client.post(order)
    return order


def find_late_stops(some: Cluster, order: RequestedJob) -> list[str]:
    """Wait until the job is paused or has ended; reports if that took too long.

    The limit is a beat and a step, and for the pause also the exit of the process.
    """
    began = time.monotonic()
    wait_until(lambda: some.parts.job(order.id).status not in ("running", "pausing"))
    paused = time.monotonic()
    lines = [
        line for line in read_ledger(some.parts.settings.run_dir(order.id)) if line.what == "write"
    ]
    limit = (
        began + some.parts.settings.lease_seconds / BEATS_PER_LEASE + STEP_MS / 1000 + SLACK_SECONDS
    )
    found = [
        f"{line.of}: {line.number} written {line.at - began:.2f} s after"
        for line in lines
        if line.at > limit
    ]
    return [
        *found,
        *(
            [f"{order.id}: paused after {paused - began:.2f} s"]
            if paused > limit + EXIT_SECONDS
            else []
        ),
    ]
