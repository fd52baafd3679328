"""A real distillation under the faults of ``faults.py``; its student must not change."""

from __future__ import annotations

import json
import random
import shutil
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.support.faults import Answer, Cluster, Fault, FaultInjector, Prober
from bench.support.harness import Parts
from bench.support.judge import (
    ENDS_A_PROCESS,
    check_answers,
    check_history,
    check_versions,
    measure_time_to_ready,
)
from bench.support.waiting import PATIENCE_SECONDS, wait_until
from cache.disk import hash_file, list_file_sizes
from kd.client.wire.jobs import TERMINAL_STATUSES, Job
from kd.config.job import JobConfig
from services.store.queue import publish_hint

#: Faults of a service with one worker; actions of clients are left out.
FAULTS = {
    kind: entry for kind, entry in FaultInjector.KINDS.items() if entry[1] in ("worker", "plane")
}
USEFUL = ("progress", "metrics", "checkpoint", "evaluation")


def submit_job(parts: Parts, config: JobConfig) -> str:
    """Submit the job after deleting all caches, so that it captures anew."""
    shutil.rmtree(parts.settings.caches, ignore_errors=True)
    job_id = parts.jobs.create(config).id
    publish_hint(parts.queue, job_id, config.stages[0])
    return job_id


def hash_outcome(parts: Parts, job: Job) -> dict[str, str]:
    """Hash the student's weights and every file of the cache."""
    assert job.status == "succeeded", job.error
    assert job.cache is not None and job.cache.fingerprint is not None
    student = parts.settings.run_dir(job.id) / "student" / "model.safetensors"
    folder = parts.settings.caches / job.cache.fingerprint
    return {"student": hash_file(student)} | {
        name: hash_file(folder / name) for name in list_file_sizes(folder)
    }


@dataclass
class DisturbedRuns:
    """Runs one job again and again under faults; each run must end as the undisturbed one did."""

    cluster: Cluster
    config: JobConfig
    seed: int
    violations: list[str] = field(default_factory=list)
    jobs: list[str] = field(default_factory=list)
    seconds: float = 0.0

    def __post_init__(self) -> None:
        self.config = self.config.model_copy(update={"max_attempts": 1000})
        self.parts = self.cluster.parts
        self.chaos = FaultInjector(self.cluster, self.seed, FAULTS)
        self.prober = Prober(self.parts.settings.server)

    def run_undisturbed(self) -> None:
        """Run the job without faults; keeps its outcome and its duration."""
        began = time.monotonic()
        job = self._ended(submit_job(self.parts, self.config))
        self.expected = hash_outcome(self.parts, job)
        self.seconds = time.monotonic() - began

    def run(self, faults: int, pace: tuple[float, float]) -> None:
        """Inject ``faults`` faults, with ``pace`` (least, most) seconds between two of them."""
        dice = random.Random(self.seed)
        while len(self.chaos.injuries) < faults:
            job_id = submit_job(self.parts, self.config)
            self.jobs.append(job_id)
            self.prober.jobs.append(job_id)
            while len(self.chaos.injuries) < faults and not self._is_over(job_id):
                time.sleep(dice.uniform(*pace))
                self.chaos.strike()
            self.chaos.settle()
            self._judge(self._ended(job_id))
        self.violations += [
            *check_versions(self.prober.answers),
            *check_answers(self.prober.answers),
        ]
        self.violations += [
            f"orphan: process {pid} of {job}" for pid, job in self.cluster.find_live_runs().items()
        ]

    def _is_over(self, job_id: str) -> bool:
        try:
            return self.parts.job(job_id).status in TERMINAL_STATUSES
        except Exception:  # Redis is away
            return False

    def _ended(self, job_id: str) -> Job:
        return wait_until(
            lambda: self._is_over(job_id) and self.parts.job(job_id), 4 * PATIENCE_SECONDS
        )

    def _judge(self, job: Job) -> None:
        self.violations += check_history(job.id, self.parts.statuses(job.id), 0)
        if job.status != "succeeded":
            self.violations.append(f"{job.id}: {job.status} {job.error}")
        elif (found := hash_outcome(self.parts, job)) != self.expected:
            differing = [name for name in found if found[name] != self.expected.get(name)]
            self.violations.append(f"{job.id}: {differing[:3]} differ from an undisturbed run")

    def close(self) -> None:
        """End the threads."""
        self.prober.close()
        self.chaos.close()

    # -- the table

    def rows(self) -> list[tuple[str, int, list[float]]]:
        """For each kind of fault: its name, how many there were, and the recoveries in seconds."""
        found = []
        for kind in FAULTS:
            injuries = [injury for injury in self.chaos.injuries if injury.kind == kind]
            times = [
                seconds for injury in injuries if (seconds := self._recovery(injury)) is not None
            ]
            found.append((kind, len(injuries), times))
        return found

    def _recovery(self, injury: Fault) -> float | None:
        if injury.victim == "plane":
            return measure_time_to_ready(injury, self.prober.answers)
        return self._until_useful(injury) if injury.job is not None else None

    def _until_useful(self, injury: Fault) -> float | None:
        """Seconds until the run's next event; if the fault ends the process, of a new process."""
        assert injury.job is not None
        hit = (injury.at + time.time() - time.monotonic()) * 1000
        begun = injury.kind not in ENDS_A_PROCESS
        for event_id, fields in self.parts.jobs.redis.xrange(
            f"kd:job:{injury.job}:events", int(hit)
        ):  # type: ignore[union-attr]
            begun = begun or (
                fields["type"] == "status" and json.loads(fields["data"])["status"] == "running"
            )
            if begun and fields["type"] in USEFUL:
                return (int(event_id.partition("-")[0]) - hit) / 1000
        return None

    def summary(self) -> Iterator[str]:
        """Return the lines of the summary."""
        heard = Counter(
            "none" if answer.status is None else str(answer.status)
            for answer in self.prober.answers
        )
        yield f"{len(self.chaos.injuries)} faults in {len(self.jobs)} runs of {self.config.name}"
        same = "every student and every file of every cache as undisturbed"
        yield f"undisturbed it takes {self.seconds:.0f} s; {same}"
        yield "API: " + ", ".join(f"{count} × {status}" for status, count in sorted(heard.items()))
        yield f"violations: {len(self.violations)}"


# ---------------------------------------------------------------------- one long outage


def run_outage(cluster: Cluster, config: JobConfig, seconds: float) -> Iterator[str]:
    """Stop Redis for ``seconds`` in the middle of the training; yields every broken promise."""
    parts = cluster.parts
    job_id = submit_job(parts, config)
    wait_until(lambda: find_newest_step(parts, job_id), PATIENCE_SECONDS)
    prober = Prober(parts.settings.server)
    prober.jobs.append(job_id)
    try:
        began = time.monotonic()
        before = find_newest_step(parts, job_id)
        cluster.stop_store()
        while time.monotonic() < began + seconds:
            time.sleep(min(30.0, seconds / 4))
            now = find_newest_step(parts, job_id)
            # On a machine that is faster by now it may have come to its end.
            if now <= before and now < config.require_train().max_steps:
                yield f"the training stands still at step {now}"
            before = now
        cluster.down.discard("store")
        job = wait_until(
            lambda: _get_job(parts, job_id) and parts.job(job_id).ended and parts.job(job_id),
            4 * PATIENCE_SECONDS,
        )
    finally:
        prober.close()
    yield from _check_promises(
        parts, job, [answer for answer in prober.answers if answer.at < began + seconds]
    )


def _check_promises(parts: Parts, job: Job, answers: list[Answer]) -> Iterator[str]:
    if (job.status, job.attempt) != ("succeeded", 1):
        yield f"{job.status} in attempt {job.attempt}: {job.error}"
    yield from check_answers(answers)
    if not any(answer.status == 503 for answer in answers):
        yield "the API never said 503"
    if (slowest := max(answer.seconds for answer in answers)) >= 3:
        yield f"an answer took {slowest:.1f} s"
    told = {point["step"] for point in parts.jobs.read_metrics(job.id)}
    if missing := {point["step"] for point in _read_points(parts, job.id)} - told:
        yield f"the history lacks {len(missing)} steps: {sorted(missing)[:5]}"


def _get_job(parts: Parts, job_id: str) -> Any:
    try:
        return parts.jobs.get(job_id)
    except Exception:  # Redis is away
        return None


def _read_points(parts: Parts, job_id: str) -> list[dict[str, Any]]:
    file = parts.settings.run_dir(job_id) / "metrics.jsonl"
    return (
        [json.loads(line) for line in Path(file).read_text().splitlines()] if file.exists() else []
    )


def find_newest_step(parts: Parts, job_id: str) -> int:
    """Find the newest step in the run's own metrics.jsonl; 0 before the first."""
    return max(
        (point["step"] for point in _read_points(parts, job_id) if "step" in point), default=0
    )
