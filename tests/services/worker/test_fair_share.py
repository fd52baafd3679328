"""Two teams before real workers: the first job of one does not wait for the crowd of the other."""

from __future__ import annotations

import pytest

from bench.support.harness import Parts, make_config
from bench.support.waiting import wait_until
from services.store.callers import Caller
from services.store.queue import publish_hint
from tests.support.services.runs import MakeParts

CROWD, ALONE = Caller("crowd"), Caller("alone")
JOBS = 100


def submit(parts: Parts, caller: Caller, name: str, **changes: object) -> str:
    config = make_config(name, "distill", **changes)
    job_id = parts.jobs.create(config, caller).id
    publish_hint(parts.queue, job_id, config.stages[0])
    return job_id


def starts(parts: Parts, job_id: str) -> list[int]:
    """The times at which the stages of a job began, in milliseconds of the store's clock."""
    entries = parts.jobs.redis.xrange(f"kd:job:{job_id}:events")
    return [
        int(event.partition("-")[0])
        for event, fields in entries
        if fields["type"] == "status" and '"status":"running"' in fields["data"]
    ]


@pytest.mark.long
@pytest.mark.parametrize("workers", [1, 2])
def test_a_hundred_jobs_do_not_hold_up_the_first_of_another_team(
    new_parts: MakeParts, workers: int
) -> None:
    """No job of the crowd begins between the creation of the other team's job and its start.

    So it waits at most for the end of what runs already: one job's length.
    """
    parts = new_parts(child_module="bench.support.light_child")
    crowd = [submit(parts, CROWD, f"light-{number}-1-150", priority=9) for number in range(JOBS)]
    for _ in range(workers):
        parts.start_worker()
    wait_until(lambda: sum(bool(starts(parts, job_id)) for job_id in crowd) > workers)
    mine = submit(parts, ALONE, "light-500-1-10", priority=0)
    created = int(parts.jobs.redis.hget(f"kd:job:{mine}", "created_at"))
    job = parts.wait_for(mine, "succeeded", "failed")
    assert job.status == "succeeded"
    waiting = sum(parts.job(job_id).status == "queued" for job_id in crowd)
    assert waiting > JOBS / 2, "the crowd still waits"
    capture, training = starts(parts, mine)
    others = [moment for job_id in crowd for moment in starts(parts, job_id)]
    assert not [moment for moment in others if created < moment < capture]
    queued = [
        int(event.partition("-")[0])
        for event, fields in parts.jobs.redis.xrange(f"kd:job:{mine}:events")
        if fields["type"] == "status" and '"status":"queued"' in fields["data"]
    ]
    between = [moment for moment in others if queued[1] < moment < training]
    assert len(between) <= workers, "nor does its second stage wait for more than one job each"
