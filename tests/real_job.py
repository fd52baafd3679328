"""A real distillation that is hurt: the same faults as in ``tests/chaos.py``, and the same student as undisturbed."""

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

from cache.disk import file_sha256, files_below
from kd.config.job import JobConfig
from services.queue import publish
from services.schemas import TERMINAL, Job
from tests.chaos import PATIENCE, Answer, Chaos, Cluster, Injury, Prober
from tests.harness import Parts, wait_until
from tests.judge import ENDS_A_PROCESS, history, promised_answers, until_ready, versions

#: What may come over a service with one worker; what its clients do is not among it.
FAULTS = {kind: entry for kind, entry in Chaos.KINDS.items() if entry[1] in ("worker", "plane")}
USEFUL = ("progress", "metrics", "checkpoint", "evaluation")


def submit(parts: Parts, config: JobConfig) -> str:
    """The job, which captures anew whatever was captured before."""
    shutil.rmtree(parts.settings.caches, ignore_errors=True)
    job_id = parts.jobs.create(config).id
    publish(parts.queue, job_id, config.stages[0])
    return job_id


def outcome(parts: Parts, job: Job) -> dict[str, str]:
    """Hashes of what the job made: the student's weights and every file of the cache."""
    assert job.status == "succeeded", job.error
    assert job.cache is not None and job.cache.fingerprint is not None
    student = parts.settings.run_dir(job.id) / "student" / "model.safetensors"
    folder = parts.settings.caches / job.cache.fingerprint
    return {"student": file_sha256(student)} | {name: file_sha256(folder / name) for name in files_below(folder)}


@dataclass
class Ordeal:
    """One job after the other, hurt until there were enough faults; each must end as the undisturbed one did."""

    cluster: Cluster
    config: JobConfig
    seed: int
    violations: list[str] = field(default_factory=list)
    jobs: list[str] = field(default_factory=list)
    seconds: float = 0.0

    def __post_init__(self) -> None:
        self.config = self.config.model_copy(update={"max_attempts": 1000})
        self.parts = self.cluster.parts
        self.chaos = Chaos(self.cluster, self.seed, FAULTS)
        self.prober = Prober(self.parts.settings.server)

    def undisturbed(self) -> None:
        """How it ends, and how long it takes, when nothing happens."""
        began = time.monotonic()
        job = self._ended(submit(self.parts, self.config))
        self.expected, self.seconds = outcome(self.parts, job), time.monotonic() - began

    def run(self, faults: int, pace: tuple[float, float]) -> None:
        """Hurt until there were so many faults, one every ``pace`` seconds (least, most)."""
        dice = random.Random(self.seed)
        while len(self.chaos.injuries) < faults:
            job_id = submit(self.parts, self.config)
            self.jobs.append(job_id)
            self.prober.jobs.append(job_id)
            while len(self.chaos.injuries) < faults and not self._is_over(job_id):
                time.sleep(dice.uniform(*pace))
                self.chaos.strike()
            self.chaos.settle()
            self._judge(self._ended(job_id))
        self.violations += [*versions(self.prober.answers), *promised_answers(self.prober.answers)]
        self.violations += [f"orphan: process {pid} of {job}" for pid, job in self.cluster.runs_alive().items()]

    def _is_over(self, job_id: str) -> bool:
        try:
            return self.parts.job(job_id).status in TERMINAL
        except Exception:  # Redis is away
            return False

    def _ended(self, job_id: str) -> Job:
        return wait_until(lambda: self._is_over(job_id) and self.parts.job(job_id), 4 * PATIENCE)

    def _judge(self, job: Job) -> None:
        self.violations += history(job.id, self.parts.statuses(job.id), 0)
        if job.status != "succeeded":
            self.violations.append(f"{job.id}: {job.status} {job.error}")
        elif (found := outcome(self.parts, job)) != self.expected:
            differing = [name for name in found if found[name] != self.expected.get(name)]
            self.violations.append(f"{job.id}: {differing[:3]} differ from an undisturbed run")

    def close(self) -> None:
        """End the threads."""
        self.prober.close()
        self.chaos.close()

    # -- the table

    def rows(self) -> list[tuple[str, int, list[float]]]:
        """Kind of fault, how many there were, and the seconds that it took to get over those that can be measured."""
        found = []
        for kind in FAULTS:
            injuries = [injury for injury in self.chaos.injuries if injury.kind == kind]
            times = [seconds for injury in injuries if (seconds := self._recovery(injury)) is not None]
            found.append((kind, len(injuries), times))
        return found

    def _recovery(self, injury: Injury) -> float | None:
        if injury.victim == "plane":
            return until_ready(injury, self.prober.answers)
        return self._until_useful(injury) if injury.job is not None else None

    def _until_useful(self, injury: Injury) -> float | None:
        """Until the next news of the run, which comes from a new process where the old one has ended."""
        assert injury.job is not None
        hit = (injury.at + time.time() - time.monotonic()) * 1000
        begun = injury.kind not in ENDS_A_PROCESS
        for event_id, fields in self.parts.jobs.redis.xrange(f"kd:job:{injury.job}:events", int(hit)):  # type: ignore[union-attr]
            begun = begun or (fields["type"] == "status" and json.loads(fields["data"])["status"] == "running")
            if begun and fields["type"] in USEFUL:
                return (int(event_id.partition("-")[0]) - hit) / 1000
        return None

    def summary(self) -> Iterator[str]:
        """What it all came to."""
        heard = Counter("none" if answer.status is None else str(answer.status) for answer in self.prober.answers)
        yield f"{len(self.chaos.injuries)} faults in {len(self.jobs)} runs of {self.config.name}"
        yield f"undisturbed it takes {self.seconds:.0f} s; every student and every file of every cache as undisturbed"
        yield "API: " + ", ".join(f"{count} × {status}" for status, count in sorted(heard.items()))
        yield f"violations: {len(self.violations)}"


# ---------------------------------------------------------------------- one long outage


def outage(cluster: Cluster, config: JobConfig, seconds: float) -> Iterator[str]:
    """Stop Redis for so long in the middle of the training; yields what was not as promised."""
    parts = cluster.parts
    job_id = submit(parts, config)
    wait_until(lambda: steps_on_disk(parts, job_id), PATIENCE)
    prober = Prober(parts.settings.server)
    prober.jobs.append(job_id)
    try:
        began, before = time.monotonic(), steps_on_disk(parts, job_id)
        cluster.stop_store()
        while time.monotonic() < began + seconds:
            time.sleep(min(30.0, seconds / 4))
            if (now := steps_on_disk(parts, job_id)) <= before:
                yield f"the training stands still at step {now}"
            before = now
        cluster.down.discard("store")
        job = wait_until(lambda: _of(parts, job_id) and parts.job(job_id).ended and parts.job(job_id), 4 * PATIENCE)
    finally:
        prober.close()
    yield from _as_promised(parts, job, [answer for answer in prober.answers if answer.at < began + seconds])


def _as_promised(parts: Parts, job: Job, answers: list[Answer]) -> Iterator[str]:
    if (job.status, job.attempt) != ("succeeded", 1):
        yield f"{job.status} in attempt {job.attempt}: {job.error}"
    yield from promised_answers(answers)
    if not any(answer.status == 503 for answer in answers):
        yield "the API never said 503"
    if (slowest := max(answer.seconds for answer in answers)) >= 3:
        yield f"an answer took {slowest:.1f} s"
    told = {point["step"] for point in parts.jobs.metrics(job.id)}
    if missing := {point["step"] for point in _points(parts, job.id)} - told:
        yield f"the history lacks {len(missing)} steps: {sorted(missing)[:5]}"


def _of(parts: Parts, job_id: str) -> Any:
    try:
        return parts.jobs.get(job_id)
    except Exception:  # Redis is away
        return None


def _points(parts: Parts, job_id: str) -> list[dict[str, Any]]:
    file = parts.settings.run_dir(job_id) / "metrics.jsonl"
    return [json.loads(line) for line in Path(file).read_text().splitlines()] if file.exists() else []


def steps_on_disk(parts: Parts, job_id: str) -> int:
    """The newest step that the run itself has written down."""
    return max((point["step"] for point in _points(parts, job_id) if "step" in point), default=0)
