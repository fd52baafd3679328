"""A job on two devices, through the whole service; processes are killed, and nothing is lost."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from bench.support.harness import Parts
from bench.support.real_job import hash_outcome
from bench.support.waiting import wait_until
from kd.client.wire.jobs import TERMINAL_STATUSES, Job
from tests.support.kd.sharing.processes import find_parent, find_ranks, list_processes
from tests.support.services.training import make_body, post, start_service

pytestmark = [pytest.mark.alone, pytest.mark.long, pytest.mark.timeout(1200)]

#: Seconds that a run may take, faults included.
PATIENCE = 300.0
#: Seconds within which all processes of a job have ended after one was killed.
END_SECONDS = 20.0


@pytest.fixture
def body(tiny_teacher: Path, tiny_text: Path) -> dict[str, Any]:
    return make_body(tiny_teacher, tiny_text, "two", {"gpus": 2})


@pytest.fixture
def parts(new_parts: Callable[..., Parts], tiny_teacher: Path) -> Parts:
    return start_service(new_parts, tiny_teacher)


def start_worker(parts: Parts) -> Any:
    worker = parts.start("services.worker", KD_DEVICES="cpu,cpu")
    wait_until(lambda: any(each.pid == worker.pid for each in parts.jobs.list_workers()))
    return worker


def kill(pid: int) -> None:
    """Kill a process, unless it has just ended."""
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def wait_for_steps(parts: Parts, job_id: str, more: int) -> None:
    """Wait until the job has taken so many more steps, or has ended."""
    before = parts.job(job_id).progress.done or 0

    def went_on() -> bool:
        job = parts.job(job_id)
        done = (job.progress.done or 0) if job.stage == "train" else 0
        return job.status in TERMINAL_STATUSES or done >= before + more

    wait_until(went_on, PATIENCE)


def wait_for_end(parts: Parts, job_id: str) -> Job:
    return parts.wait_for(job_id, *TERMINAL_STATUSES, seconds=PATIENCE)


def test_a_job_on_two_devices_runs_and_outlives_the_death_of_a_rank(
    parts: Parts, body: dict[str, Any]
) -> None:
    start_worker(parts)
    (device,) = [worker.device for worker in parts.jobs.list_workers()]
    assert device.count == 2
    job_id = post(parts, body)
    wait_until(lambda: parts.job(job_id).stage == "train", PATIENCE)
    wait_for_steps(parts, job_id, 15)
    ranks = find_ranks(parts.settings.run_dir(job_id))
    assert ranks.keys() == {0, 1}
    kill(ranks[1])
    gone = [Path(f"/proc/{pid}") for pid in ranks.values()]
    wait_until(lambda: not any(each.exists() for each in gone), END_SECONDS)
    job = wait_for_end(parts, job_id)
    assert (job.status, job.attempt) == ("succeeded", 2)
    assert hash_outcome(parts, job)
    assert list_processes(parts.settings.run_dir(job_id)) == []


@pytest.mark.slow
def test_a_cancelled_job_leaves_no_rank(parts: Parts, body: dict[str, Any]) -> None:
    start_worker(parts)
    job_id = post(parts, body | {"train": body["train"] | {"max_steps": 100_000}})
    wait_until(lambda: len(find_ranks(parts.settings.run_dir(job_id))) == 2, PATIENCE)
    wait_for_steps(parts, job_id, 2)
    parts.jobs.change("cancel", job_id)
    assert wait_for_end(parts, job_id).status == "cancelled"
    assert list_processes(parts.settings.run_dir(job_id)) == []


@pytest.mark.slow
def test_any_process_killed_at_random_moments_ends_in_the_same_student(
    parts: Parts, body: dict[str, Any]
) -> None:
    worker = start_worker(parts)
    undisturbed = hash_outcome(parts, wait_for_end(parts, post(parts, body)))
    dice = random.Random(20)
    struck: list[str] = []
    while len(struck) < 10:
        job_id = post(parts, body)
        for _ in range(3):
            wait_until(
                lambda job_id=job_id: (
                    parts.job(job_id).status in TERMINAL_STATUSES
                    or find_ranks(parts.settings.run_dir(job_id))
                ),
                PATIENCE,
            )
            time.sleep(dice.uniform(0, 20))
            victim = dice.choice(["rank", "rank", "torchrun", "child", "worker"])
            ranks = find_ranks(parts.settings.run_dir(job_id))
            if not ranks:
                break
            launchers = set(list_processes(parts.settings.run_dir(job_id))) - set(ranks.values())
            if victim == "rank":
                kill(dice.choice(list(ranks.values())))
            elif victim == "torchrun":
                for pid in launchers:
                    kill(pid)
            elif victim == "child":
                for pid in launchers:
                    kill(find_parent(pid))
            else:
                worker.kill()
                worker.wait()
                worker = start_worker(parts)
            struck.append(victim)
        job = wait_for_end(parts, job_id)
        assert hash_outcome(parts, job)["student"] == undisturbed["student"], struck
        endings = [status for status in parts.statuses(job_id) if status in TERMINAL_STATUSES]
        assert endings == ["succeeded"], "exactly one ending"
        wait_until(
            lambda job_id=job_id: list_processes(parts.settings.run_dir(job_id)) == [], END_SECONDS
        )
