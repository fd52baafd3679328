"""A training on two hosts, through the whole service: two workers, each with ranks of its own."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bench.support.harness import Parts, Started
from bench.support.waiting import wait_until
from kd.client.wire.jobs import TERMINAL_STATUSES, Job
from kd.tracking.metrics import read_metrics
from tests.support.kd.sharing.processes import find_ranks, list_processes
from tests.support.services.training import make_body, post, start_service

pytestmark = [pytest.mark.alone, pytest.mark.long, pytest.mark.timeout(1200)]

#: Seconds that a run may take, faults included.
PATIENCE = 300.0


@pytest.fixture
def body(tiny_teacher: Path, tiny_text: Path) -> dict[str, Any]:
    return make_body(tiny_teacher, tiny_text, "gang", {"hosts": 2})


@pytest.fixture
def parts(new_parts: Callable[..., Parts], tiny_teacher: Path) -> Parts:
    return start_service(new_parts, tiny_teacher)


def finish(parts: Parts, job_id: str) -> Job:
    job = parts.wait_for(job_id, *TERMINAL_STATUSES, seconds=PATIENCE)
    run = parts.settings.run_dir(job_id)
    assert job.status == "succeeded", (job.error, (run / "log.txt").read_text()[-3000:])
    return job


def curve(parts: Parts, job_id: str) -> list[float]:
    lines = read_metrics(parts.settings.run_dir(job_id) / "metrics.jsonl")
    return [each["loss"] for each in lines if each["type"] == "metrics"]


def wait_for_checkpoint(parts: Parts, job_id: str) -> None:
    folder = parts.settings.run_dir(job_id) / "checkpoints"
    wait_until(lambda: any(folder.glob("step-*")), PATIENCE)


def find_worker(parts: Parts, workers: list[Started], leads: bool) -> Started:
    leader = parts.job(parts.jobs.list_workers()[0].job or "").worker
    (found,) = [
        each
        for each in parts.jobs.list_workers()
        if (each.id == leader) == leads and each.pid in {worker.pid for worker in workers}
    ]
    return next(worker for worker in workers if worker.pid == found.pid)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
@pytest.mark.parametrize("fault", ["none", "a rank", "a worker", "the leader"])
def test_two_workers_train_one_student(
    parts: Parts, body: dict[str, Any], strategy: str, fault: str
) -> None:
    workers = [parts.start_worker()]
    body["train"]["strategy"] = strategy
    job_id = post(parts, body)
    wait_until(lambda: parts.job(job_id).stage == "train", PATIENCE)
    assert parts.job(job_id).resources.hosts == 2
    workers.append(parts.start_worker())
    if fault != "none":
        wait_for_checkpoint(parts, job_id)
    if fault == "a rank":
        os.kill(find_ranks(parts.settings.run_dir(job_id))[1], signal.SIGKILL)
    elif fault != "none":
        find_worker(parts, workers, fault == "the leader").send_signal(signal.SIGKILL)
        parts.start_worker()
    job = finish(parts, job_id)
    assert job.attempt == (1 if fault == "none" else 2)
    assert list_processes(parts.settings.run_dir(job_id)) == []
    alone = post(parts, body | {"name": "alone", "resources": {}})
    finish(parts, alone)
    assert curve(parts, job_id) == pytest.approx(curve(parts, alone), rel=1e-4)


def test_a_training_goes_on_with_one_host_and_comes_back_to_two(
    parts: Parts, body: dict[str, Any]
) -> None:
    body["train"] |= {"max_steps": 400, "save_steps": 50, "strategy": "fsdp"}
    workers = [parts.start_worker(), parts.start_worker()]
    job_id = post(parts, body | {"resources": {"hosts": {"min": 1, "max": 2}}})
    wait_for_checkpoint(parts, job_id)
    table = f"kd:job:{job_id}:ranges"

    def count_hosts() -> int:
        begun = parts.jobs.redis.hget(table, "key") is not None
        return int(parts.jobs.redis.zcard(f"{table}:ends")) if begun else 0

    assert count_hosts() == 2
    find_worker(parts, workers, leads=False).send_signal(signal.SIGKILL)
    wait_until(lambda: parts.job(job_id).attempt == 2 and count_hosts() == 1, PATIENCE)
    steps = parts.job(job_id).progress.done or 0
    wait_until(lambda: (parts.job(job_id).progress.done or 0) > steps, PATIENCE)
    parts.start_worker()
    parts.jobs.redis.hset(table, "began", 0)  # it has worked for more than a minute
    wait_until(lambda: count_hosts() == 2, PATIENCE)
    job = finish(parts, job_id)
    assert job.attempt == 2, "an attempt that begins anew with more hosts is the same one"
    alone = post(parts, body | {"name": "alone", "resources": {}})
    finish(parts, alone)
    assert curve(parts, job_id) == pytest.approx(curve(parts, alone), rel=1e-3)
