"""What every route works with: the service behind the request, who asks, and the job that the path names."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Annotated

import redis.asyncio
from celery import Celery
from fastapi import Depends, Path, Request

from services.api.digests import Digests
from services.api.keys import authenticate
from services.api.observer import Tally
from services.api.problems import ApiProblem
from services.jobs import Caller, JobStore
from services.schemas import Job
from services.settings import Settings

JOB_ID = re.compile(r"job_[0-9a-z]{26}")


@dataclass
class Service:
    """The parts of one API process."""

    settings: Settings
    store: JobStore
    queue: Celery
    events: redis.asyncio.Redis
    secrets: tuple[str, ...] = field(default=(), repr=False)  #: words that no log may show
    digests: Digests = field(default_factory=Digests)
    tally: Tally = field(default_factory=Tally)
    stopping: bool = False


async def service_of(request: Request) -> Service:
    """The service behind this request."""
    service: Service = request.app.state.service
    return service


TheService = Annotated[Service, Depends(service_of)]
TheCaller = Annotated[Caller, Depends(authenticate)]


def known_job(
    job_id: Annotated[str, Path(description="Id of a job, as POST /jobs gave it.")],
    service: TheService,
    caller: TheCaller,
) -> Job:
    """The job that the path names, or 404: also for another key's."""
    job = service.store.get(job_id, caller) if JOB_ID.fullmatch(job_id) else None
    if job is None:
        raise ApiProblem(404, f"There is no job {job_id}.", "GET /jobs lists the jobs there are.")
    return job


KnownJob = Annotated[Job, Depends(known_job)]
