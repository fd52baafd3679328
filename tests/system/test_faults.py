"""Parts of the service are killed at random moments of a real distillation: nothing is lost."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from bench.support.harness import Parts
from bench.support.real_job import hash_outcome, submit_job
from bench.support.waiting import wait_until
from kd.client.wire.jobs import TERMINAL_STATUSES
from kd.config.job import JobConfig
from kd.config.jobfile import parse_config

pytestmark = pytest.mark.alone

FAULTS = 10
#: Seconds that a run may take, faults included.
PATIENCE = 120.0


@pytest.fixture
def job(tiny_teacher: Path, tiny_text: Path) -> JobConfig:
    return parse_config(
        {
            "name": "faults",
            "max_attempts": 100,
            "teacher": {"model": str(tiny_teacher), "batch_size": 2},
            "student": {"init": {"layers": 1, "hidden_size": 32}},
            "data": {"train": str(tiny_text), "sequence_length": 32, "max_eval_samples": 8},
            "cache": {"shard_sequences": 8},
            "train": {
                "max_steps": 150,
                "batch_size": 4,
                "save_steps": 10,
                "eval_steps": 50,
                "logging_steps": 25,
            },
        }
    )


class Saboteur:
    """Kills one part at a time with SIGKILL, and makes sure that it is restarted."""

    def __init__(self, parts: Parts) -> None:
        self.parts = parts
        self.worker = parts.start_worker()
        self.done: list[str] = []

    def strike(self, victim: str) -> None:
        getattr(self, f"_{victim}")()
        self.done.append(victim)

    def _child(self) -> None:
        for children in Path(f"/proc/{self.worker.pid}/task").glob("*/children"):
            for pid in children.read_text().split():
                os.kill(int(pid), signal.SIGKILL)

    def _worker(self) -> None:
        self.worker.kill()
        self.worker.wait()
        self.worker = self.parts.start_worker()

    def _valkey(self) -> None:
        os.kill(self.parts.server.pid, signal.SIGKILL)
        time.sleep(0.5)
        self.parts.server.ensure()


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_killed_at_random_moments_it_ends_in_the_same_student(
    new_parts: Callable[..., Parts], job: JobConfig
) -> None:
    parts = new_parts(child_module="services.worker.stage_child")
    parts.start_api()  # its reconciler returns the jobs of a killed worker to the queue
    saboteur = Saboteur(parts)
    began = time.monotonic()
    undisturbed = hash_outcome(
        parts, parts.wait_for(submit_job(parts, job), *TERMINAL_STATUSES, seconds=PATIENCE)
    )
    duration = time.monotonic() - began

    dice = random.Random(20)
    while len(saboteur.done) < FAULTS:
        job_id = submit_job(parts, job)
        for _ in range(4):
            time.sleep(dice.uniform(0, duration))
            if parts.job(job_id).status in TERMINAL_STATUSES:
                break
            saboteur.strike(dice.choice(["child", "worker", "valkey"]))
        ended = wait_until(
            lambda job_id=job_id: (
                (found := parts.job(job_id)).status in TERMINAL_STATUSES and found
            ),
            PATIENCE,
        )
        assert hash_outcome(parts, ended) == undisturbed, saboteur.done
        endings = [status for status in parts.statuses(job_id) if status in TERMINAL_STATUSES]
        assert endings == ["succeeded"], "exactly one ending"
    assert {"child", "worker", "valkey"} <= set(saboteur.done)
