"""A training on two hosts, each a network namespace, of which one is cut off in the middle."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.support.hosts import WORKERS, HostedService, Net
from bench.support.paths import AUSTEN
from bench.support.waiting import wait_until
from kd.client.wire.jobs import TERMINAL_STATUSES
from kd.tracking.metrics import read_metrics

#: Seconds that a run may take.
PATIENCE = 900.0


@dataclass(frozen=True)
class GangTimes:
    """Seconds, and the largest relative difference of the loss to that of one host.

    gather   from the end of the capture to the first rank that tells its step, imports included
    restart  from the cut of a cable to the next step of the next attempt
    """

    gather: float
    restart: float
    attempts: int
    difference: float


def make_body(hosts: int, steps: int, strategy: str) -> dict[str, Any]:
    """Make the job: the example's teacher and a tiny student."""
    return {
        "name": f"hosts-{hosts}-{strategy}",
        "kind": "distill",
        "max_attempts": 100,
        "resources": {"hosts": hosts},
        "teacher": {"model": str(AUSTEN / "teacher")},
        "student": {"init": {"layers": 1, "hidden_size": 32}},
        "data": {
            "train": str(AUSTEN / "text" / "persuasion.txt"),
            "sequence_length": 64,
            "max_train_samples": 256,
            "max_eval_samples": 16,
        },
        "train": {
            "max_steps": steps,
            "batch_size": 4,
            "save_steps": 10,
            "eval_steps": steps,
            "logging_steps": 1,
            "strategy": strategy,
        },
    }


def run_gang(folder: Path, steps: int, strategy: str, say: Callable[[str], None]) -> GangTimes:
    """Train on two of three hosts, cut the one that does not lead off, and wait for the end.

    Raises ``RuntimeError`` if a job fails.
    """
    net = Net()
    try:
        with net.inside("store"):
            return _run_inside(net, folder, steps, strategy, say)
    finally:
        net.close()


def _run_inside(
    net: Net, folder: Path, steps: int, strategy: str, say: Callable[[str], None]
) -> GangTimes:
    roots = (AUSTEN,)
    service = HostedService(net, folder, 1, "services.worker.stage_child", roots)
    parts = service.parts

    def submit(hosts: int) -> str:
        return parts.submit(**make_body(hosts, steps, strategy))

    def count_steps(job_id: str) -> int:
        job = parts.job(job_id)
        return (job.progress.done or 0) if job.stage == "train" else 0

    def finish(job_id: str) -> list[float]:
        job = parts.wait_for(job_id, *TERMINAL_STATUSES, seconds=PATIENCE)
        if job.status != "succeeded":
            raise RuntimeError(f"The job has {job.status}: {job.error}")
        lines = read_metrics(parts.settings.run_dir(job_id) / "metrics.jsonl")
        return [each["loss"] for each in lines if each["type"] == "metrics"]

    try:
        one = finish(submit(1))
        say("one host is done")
        job_id = submit(2)
        wait_until(lambda: parts.job(job_id).stage == "train", PATIENCE)
        begin = time.monotonic()
        wait_until(lambda: count_steps(job_id) > 0, PATIENCE)
        gather = time.monotonic() - begin
        wait_until(lambda: count_steps(job_id) > steps // 3, PATIENCE)
        busy = {each.pid: each.id for each in parts.jobs.list_workers() if each.job == job_id}
        leader = parts.job(job_id).worker
        (host,) = [
            name
            for name in WORKERS
            if (worker := busy.get(service.processes[name].pid)) and worker != leader
        ]
        say(f"two hosts train; {host} is cut off")
        net.cut(host)
        begin = time.monotonic()
        before = parts.job(job_id).attempt
        wait_until(lambda: parts.job(job_id).attempt > before, PATIENCE)
        wait_until(lambda: parts.job(job_id).status == "running" and count_steps(job_id), PATIENCE)
        at = count_steps(job_id)
        wait_until(lambda: count_steps(job_id) > at, PATIENCE)
        restart = time.monotonic() - begin
        net.mend(host)
        two = finish(job_id)
        worst = max(abs(a / b - 1.0) for a, b in zip(one, two, strict=True))
        return GangTimes(gather, restart, parts.job(job_id).attempt, worst)
    finally:
        parts.close()
