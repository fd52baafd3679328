"""Start runs of the scripted child, and read how far they are."""

from __future__ import annotations

from collections.abc import Callable

from bench.support.harness import Parts, make_config
from services.store.jobs.leases import Claim
from services.store.queue import publish_hint

MakeParts = Callable[..., Parts]


def started(parts: Parts, name: str, kind: str = "train") -> tuple[str, int]:
    """Submit a job and wait for its child; return the ids of the job and of the process."""
    job_id = parts.submit(name, kind)
    return job_id, parts.child_pid(job_id)


def steps_done(parts: Parts, job_id: str) -> list[int]:
    return [int(line) for line in (parts.settings.run_dir(job_id) / "steps").read_text().split()]


def resumed(parts: Parts, job_id: str) -> None:
    assert parts.jobs.change("resume", job_id).outcome == "done"
    publish_hint(parts.queue, job_id, parts.job(job_id).stage)


def attempted(parts: Parts, name: str, **changes: object) -> tuple[str, Claim]:
    """Create a job and claim it for this process; return its id and the claim."""
    job_id = parts.jobs.create(make_config(name, **changes)).id
    claim = parts.jobs.claim(job_id, "train", "here", parts.settings.lease_seconds)
    assert claim is not None
    return job_id, claim
