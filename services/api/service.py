"""The dependencies of every route: the service, the caller, and the job that the path names."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated

import redis.asyncio
from celery import Celery
from fastapi import Depends, Path, Request

from services.api.answers.event_stream import EventHub
from services.api.answers.file_digests import FileDigests
from services.api.answers.problems import ApiProblem
from services.api.auditing import Audit
from services.api.guards.authentication import authenticate
from services.api.guards.request_metrics import RequestMetrics
from services.api.plan_process import PlanProcess
from services.api.reading.process import ReadingProcess
from services.settings import Settings
from services.store.callers import Caller
from services.store.jobs.records import JobRecord
from services.store.jobs.store import JobStore
from services.store.key_use import KeyUse
from services.store.run_folder import JOB_ID
from services.store.training_files import TrainingFiles


@dataclass
class Service:
    """The objects that all requests of one API process share."""

    settings: Settings
    store: JobStore
    queue: Celery
    events: redis.asyncio.Redis
    event_hub: EventHub
    plans: PlanProcess
    reading: ReadingProcess
    audit: Audit
    files: TrainingFiles
    key_use: KeyUse
    #: Words that no log may show.
    secrets: tuple[str, ...] = field(default=(), repr=False)
    digests: FileDigests = field(default_factory=FileDigests)
    request_metrics: RequestMetrics = field(default_factory=RequestMetrics)
    #: Set at the first signal to stop: streams and long polls then end.
    stopping: bool = False


# Async, because FastAPI runs a plain function in a thread, of which there are few.
async def find_service(request: Request) -> Service:
    """Return the service of the application that answers this request."""
    service: Service = request.app.state.service
    return service


TheService = Annotated[Service, Depends(find_service)]
TheCaller = Annotated[Caller, Depends(authenticate)]


def find_known_job(
    job_id: Annotated[str, Path(description="The job's id, from the answer of POST /jobs.")],
    service: TheService,
    caller: TheCaller,
) -> JobRecord:
    """Return the job that the path names; raise 404 if the caller sees no such job."""
    # Only a well-formed id becomes part of a Redis key.
    job = service.store.get(job_id, caller) if JOB_ID.fullmatch(job_id) else None
    if job is None:
        raise make_no_job_problem(job_id)
    return job


def make_no_job_problem(job_id: str) -> ApiProblem:
    """Return the 404 for a job that does not exist or that the caller may not see."""
    return ApiProblem(404, f"There is no job {job_id}.", "GET /jobs lists the jobs.")


KnownJob = Annotated[JobRecord, Depends(find_known_job)]
