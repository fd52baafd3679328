"""Child and supervisor killed, stopped and terminated, for real: rows 1 to 4, 13 and 15 of the table of faults."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from services.schemas import TERMINAL
from services.worker.wire import PARTS_OF_LEASE
from tests.chaos import LEASE_SECONDS, Client, Cluster, Order, light_body
from tests.harness import Parts, wait_until
from tests.judge import Line, allowed_ends, history, job_violations, ledger, promised_answers, wrote

pytestmark = pytest.mark.alone

MakeParts = Callable[..., Parts]

WISHES, STEP_MS = 200, 60
SLACK_SECONDS = 0.5  # a turn of the supervisor's loop, and what two busy cores take to schedule four processes
EXIT_SECONDS = 1.0  # a Python process, to end


@pytest.fixture
def spare(tmp_path: Path) -> Path:
    """Where undisturbed captures are made, to compare with."""
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


def writes(parts: Parts, job_id: str) -> list[Line]:
    return [line for line in ledger(parts.settings.run_dir(job_id)) if line.what == "wrote"]


def next_write(parts: Parts, job_id: str, after: float, not_by: set[str]) -> float:
    """Seconds from ``after`` to the first write of another process."""

    def found() -> Line | None:
        fresh = (line for line in writes(parts, job_id) if line.at > after and line.writer not in not_by)
        return next(fresh, None)

    try:
        return wait_until(found).at - after
    except AssertionError as error:
        history = [(kind, data.get("status", data)) for kind, data in parts.events(job_id)][-8:]
        raise AssertionError(f"no write of {job_id}: {parts.job(job_id).status}, {history}") from error


def pids_of_workers(some: Cluster) -> set[int]:
    return {worker.pid for worker in some.parts.jobs.workers()}


def wait_for_a_write(parts: Parts, job_id: str) -> None:
    before = len(writes(parts, job_id))
    wait_until(lambda: len(writes(parts, job_id)) > before)


def holder(cluster: Cluster, job_id: str) -> tuple[str, int]:
    """The worker that runs the job, and its child."""

    def found() -> tuple[str, int] | None:
        pairs = ((name, pid) for name in cluster.workers for pid, job in cluster.children_of(name) if job == job_id)
        return next(pairs, None)

    return wait_until(found)


@pytest.mark.slow
def test_row_1_a_killed_child_goes_on_within_five_seconds(cluster: Callable[..., Cluster], spare: Path) -> None:
    one = cluster(workers=1)
    name = "light-1-30-50"
    job_id, times = one.parts.submit(name, "distill", max_attempts=99), []
    dice = random.Random(1)
    for _ in range(20):
        wait_for_a_write(one.parts, job_id)
        time.sleep(dice.uniform(0, 0.06))
        _, pid = holder(one, job_id)
        known = {line.writer for line in writes(one.parts, job_id)}
        struck = time.monotonic()
        os.kill(pid, signal.SIGKILL)
        times.append(next_write(one.parts, job_id, struck, known))
    assert max(times) <= 5.0, times
    job = one.parts.wait_for(job_id, *TERMINAL)
    assert job.attempt == 21
    assert job_violations(one.parts, job_id, name, spare) == []
    begun = sum(line.what == "write" for line in ledger(one.parts.settings.run_dir(job_id)))
    assert begun <= len(wrote(one.parts.settings.run_dir(job_id))) + 20, "at most the one in flight is done again"


@pytest.mark.slow
def test_row_2_a_killed_supervisor_costs_a_lease_and_leaves_no_orphan(
    cluster: Callable[..., Cluster], spare: Path
) -> None:
    some = cluster(workers=4)
    names = ["light-2-20-60", "light-3-20-60"]
    jobs, times = [some.parts.submit(name, "distill", max_attempts=99) for name in names], []
    for _ in range(10):
        wait_until(lambda: len({process.pid for process in some.processes.values()} & pids_of_workers(some)) == 4)
        struck: dict[str, tuple[float, set[str], int]] = {}
        for job_id in jobs:
            wait_for_a_write(some.parts, job_id)
            worker, pid = holder(some, job_id)
            known = {line.writer for line in writes(some.parts, job_id)}
            some.down.add(worker)  # its restart, which takes a second of a core, is not what is measured
            some.processes[worker].kill()
            struck[job_id] = time.monotonic(), known, pid
        for at, _, pid in struck.values():
            wait_until(lambda pid=pid: pid not in some.runs_alive(), 2.0 - (time.monotonic() - at))
        times += [next_write(some.parts, job_id, at, known) for job_id, (at, known, _) in struck.items()]
        some.down.clear()
    assert max(times) <= LEASE_SECONDS + 2.0, times
    for job_id, name in zip(jobs, names, strict=True):
        some.parts.wait_for(job_id, *TERMINAL)
        assert job_violations(some.parts, job_id, name, spare) == []
    assert some.runs_alive() == {}


def test_row_3_a_terminated_supervisor_saves_and_loses_nothing(cluster: Callable[..., Cluster], spare: Path) -> None:
    one = cluster(workers=1)
    one.down.add("worker-1")  # started again by hand
    name = "light-4-12-50"
    job_id, dice = one.parts.submit(name, "distill"), random.Random(3)
    for _ in range(5):
        wait_for_a_write(one.parts, job_id)
        time.sleep(dice.uniform(0, 0.05))
        began = time.monotonic()
        one.processes["worker-1"].terminate()
        assert one.processes["worker-1"].wait(10) == 0
        assert time.monotonic() - began <= one.parts.settings.stop_grace_seconds
        assert one.runs_alive() == {}
        assert one.parts.job(job_id).status == "queued"
        one.processes["worker-1"] = one.parts.start_worker()
    job = one.parts.wait_for(job_id, *TERMINAL)
    assert job.attempt == 1, "a clean stop is no attempt"
    assert job_violations(one.parts, job_id, name, spare) == []
    assert all(
        line.what != "write" or line.number in wrote(one.parts.settings.run_dir(job_id), line.of)
        for line in ledger(one.parts.settings.run_dir(job_id))
    ), "nothing was in flight"


def test_row_4_a_host_that_sleeps_past_its_lease_writes_no_more(cluster: Callable[..., Cluster], spare: Path) -> None:
    two = cluster(workers=2)
    name = "light-5-12-60"
    job_id = two.parts.submit(name, "distill")
    wait_for_a_write(two.parts, job_id)
    worker, child = holder(two, job_id)
    supervisor = two.processes[worker].pid
    writer = writes(two.parts, job_id)[-1].writer
    for pid in (supervisor, child):
        os.kill(pid, signal.SIGSTOP)
    stopped = time.monotonic()
    heir = wait_until(lambda: next((name for name in two.workers if name != worker and two.children_of(name)), None))
    assert time.monotonic() - stopped >= LEASE_SECONDS - 0.5, "not before the lease ran out"
    time.sleep(0.5)
    for pid in (child, supervisor):
        os.kill(pid, signal.SIGCONT)
    wait_until(lambda: child not in two.runs_alive(), 5)
    job = two.parts.wait_for(job_id, *TERMINAL)
    assert job.status == "succeeded", job.error
    assert heir in two.workers
    assert two.processes[worker].poll() is None, "the worker itself is well, and may take other jobs"
    assert {line.writer for line in writes(two.parts, job_id)} > {writer}
    assert job_violations(two.parts, job_id, name, spare) == []
    fenced = {name: value for name, _, value in two.parts.jobs.counters()}
    assert fenced.get("kd_fenced_writes_total", 0) >= 1


def test_row_4_a_child_that_stays_stopped_is_killed_and_replaced(cluster: Callable[..., Cluster], spare: Path) -> None:
    one = cluster(workers=1, silence_seconds=3.0)
    name = "light-6-8-60"
    job_id = one.parts.submit(name, "distill")
    wait_for_a_write(one.parts, job_id)
    _, pid = holder(one, job_id)
    os.kill(pid, signal.SIGSTOP)
    stopped = time.monotonic()
    wait_until(lambda: pid not in one.runs_alive(), 5)
    assert time.monotonic() - stopped >= 2.0, "a run may be silent for a while"
    job = one.parts.wait_for(job_id, *TERMINAL)
    assert (job.status, job.attempt) == ("succeeded", 2), job.error
    assert job_violations(one.parts, job_id, name, spare) == []


def test_row_13_poison_is_tried_as_often_as_allowed_and_others_go_on(new_parts: MakeParts) -> None:
    parts = new_parts(child_module="tests.light_child", max_attempts=1000)
    parts.start_worker()
    poison = parts.submit("poison", "distill", max_attempts=4)
    others = [parts.submit(f"light-{number}-1-20", "distill") for number in (6, 7)]
    job = parts.wait_for(poison, *TERMINAL)
    assert (job.status, job.attempt) == ("failed", 4)
    assert job.error is not None and job.error.type == "worker_lost"
    assert [parts.wait_for(other, *TERMINAL).status for other in others] == ["succeeded"] * 2
    assert [line.what for line in ledger(parts.settings.run_dir(poison))] == ["begin"] * 4, "and not once more"
    assert [status for status in parts.statuses(poison) if status in TERMINAL] == ["failed"]


@pytest.mark.slow
def test_row_15_pauses_and_cancels_at_any_instant_are_heard_at_once(
    cluster: Callable[..., Cluster], spare: Path
) -> None:
    """Running jobs stop within a beat and a step; none is lost, none ends twice."""
    some, dice = cluster(workers=3), random.Random(15)
    client = Client(some.parts.settings.server)
    orders, late = list[Order](), list[str]()
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
            late += stops_late(some, order)
        client.wish(order, "resume")
    for order in orders:
        if client.insist("GET", f"/jobs/{order.id}").json()["status"] in ("paused", "pausing"):
            client.insist("POST", f"/jobs/{order.id}/resume")
    assert late == []
    for order in orders:
        job = some.parts.wait_for(order.id, *TERMINAL, seconds=60)
        assert job.status in allowed_ends(order, {}), order
        assert list(history(job.id, some.parts.statuses(job.id), 0)) == []
        if job.status == "succeeded":
            assert job_violations(some.parts, job.id, order.body["name"], spare) == []
    assert list(promised_answers(client.answers)) == []
    client.close()


def post_light(client: Client, some: Cluster, number: int) -> Order:
    order = Order(f"fifteen {number}", light_body(some.inputs, f"light-{100 + number}-4-{STEP_MS}"))
    client.post(order)
    return order


def stops_late(some: Cluster, order: Order) -> list[str]:
    """Wait until it is paused, or has ended; says so where it took longer than a beat and a step, and its exit."""
    began = time.monotonic()
    wait_until(lambda: some.parts.job(order.id).status not in ("running", "pausing"))
    paused = time.monotonic()
    lines = [line for line in ledger(some.parts.settings.run_dir(order.id)) if line.what == "write"]
    limit = began + some.parts.settings.lease_seconds / PARTS_OF_LEASE + STEP_MS / 1000 + SLACK_SECONDS
    found = [f"{line.of}: {line.number} written {line.at - began:.2f} s after" for line in lines if line.at > limit]
    return [*found, *([f"{order.id}: paused after {paused - began:.2f} s"] if paused > limit + EXIT_SECONDS else [])]
