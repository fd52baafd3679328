"""Routes of jobs of distillation, as OpenAI's clients call them. /jobs shows the same jobs.

POST /fine_tuning/jobs                    create a job
GET  /fine_tuning/jobs                    list jobs, newest first
GET  /fine_tuning/jobs/{id}               show a job
POST /fine_tuning/jobs/{id}/{action}      cancel, pause or resume
GET  /fine_tuning/jobs/{id}/events        its events, newest first
GET  /fine_tuning/jobs/{id}/checkpoints   its checkpoints, newest first
"""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Body, Depends, Query, Request, Response

from kd.errors import ConfigError
from services.api.answers.problems import ApiProblem, describe_problems
from services.api.guards.json_bodies import StrictRoute
from services.api.openai.jobs import (
    KIND,
    build_config,
    describe_checkpoint,
    describe_event,
    describe_job,
    translate_problems,
)
from services.api.openai.views import (
    FineTuningCheckpointList,
    FineTuningEventList,
    FineTuningJob,
    FineTuningJobList,
    FineTuningRequest,
)
from services.api.routes.access import READ, WRITE
from services.api.routes.files import read_checkpoints
from services.api.routes.history import STREAM_ID
from services.api.routes.jobs import IdempotencyKey, TheAdmission, act_on_job
from services.api.service import JOB_ID, KnownJob, Service, TheCaller, TheService
from services.store.callers import Caller
from services.store.jobs.listing import JobPage, JobQuery
from services.store.jobs.records import JobRecord

router = APIRouter(prefix="/fine_tuning", tags=["fine-tuning"], route_class=StrictRoute)

_EXAMPLE = {
    "model": "students/small",
    "training_file": "file-01k5w3v9q8x7z6y5t4s3r2p1n0",
    "method": {
        "type": "distillation",
        "distillation": {
            "teacher": "examples/austen/teacher",
            "hyperparameters": {"train": {"max_steps": 20}},
        },
    },
}


def _find_distillation(job: KnownJob) -> JobRecord:
    """Return the job that the path names; raise 404 for one of another kind."""
    if job.kind != KIND:
        raise ApiProblem(
            404,
            f"{job.id} is not a job of distillation, but of kind {job.kind}.",
            f"GET {job.links.self} shows it.",
        )
    return job


KnownDistillation = Annotated[JobRecord, Depends(_find_distillation)]
Limit = Annotated[int, Query(ge=1, le=100, description="The most entries of one page.")]


@router.post(
    "/jobs",
    dependencies=WRITE,
    responses=describe_problems(400, 404, 413, 415, 429, 503, 507),
)
def create_fine_tuning_job(
    wanted: Annotated[
        FineTuningRequest,
        Body(openapi_examples={"tiny": {"summary": "A short training", "value": _EXAMPLE}}),
    ],
    admission: TheAdmission,
    service: TheService,
    caller: TheCaller,
    idempotency_key: IdempotencyKey = None,
) -> FineTuningJob:
    """Create a job of distillation. It is checked and admitted as by POST /jobs."""
    config = build_config(wanted, service.files, caller.team)
    try:
        job, _ = admission.admit(config, idempotency_key)
    except ConfigError as error:
        raise translate_problems(error) from None
    return describe_job(job, service.files)


@router.get("/jobs", dependencies=READ, responses=describe_problems(400, 503))
def list_fine_tuning_jobs(
    request: Request,
    service: TheService,
    caller: TheCaller,
    limit: Limit = 20,
    after: Annotated[
        str | None, Query(max_length=64, description="The id of the last job of the page before.")
    ] = None,
) -> FineTuningJobList:
    """List jobs of distillation, newest first; ?metadata[name]=value names a label of theirs."""
    query = JobQuery(caller, kind=KIND, label=_read_label(request))
    cursor = None if after is None else _find_cursor(after, service, caller)
    page = service.store.read_page(query, limit, cursor)
    # A page of the store may be empty although more follow; a client would stop there.
    while not page.jobs and page.next_cursor is not None:
        page = service.store.read_page(query, limit, page.next_cursor)
    return _describe_page(page, service)


def _describe_page(page: JobPage, service: Service) -> FineTuningJobList:
    data = [describe_job(job, service.files) for job in page.jobs]
    return FineTuningJobList(data=data, has_more=page.next_cursor is not None)


def _find_cursor(after: str, service: Service, caller: Caller) -> int:
    place = service.store.find_place(after, caller) if JOB_ID.fullmatch(after) else None
    if place is None:
        raise ApiProblem(400, f"after: there is no job {after}.", "Begin again without after.")
    return place


def _read_label(request: Request) -> tuple[str, str] | None:
    """Return the label that ?metadata[name]=value names; raise 400 for more than one."""
    found = [
        (name.removeprefix("metadata[").removesuffix("]"), value)
        for name, value in request.query_params.multi_items()
        if name.startswith("metadata[") and name.endswith("]")
    ]
    if len(found) > 1:
        raise ApiProblem(400, "metadata names more than one label.", "Name one of them.")
    return found[0] if found else None


@router.get("/jobs/{job_id}", dependencies=READ, responses=describe_problems(400, 404, 503))
def get_fine_tuning_job(job: KnownDistillation, service: TheService) -> FineTuningJob:
    """Show a job of distillation."""
    return describe_job(job, service.files)


_ACTION: dict[str, Any] = {
    "dependencies": WRITE,
    "responses": describe_problems(400, 404, 409, 429, 503),
}


@router.post("/jobs/{job_id}/cancel", **_ACTION)
def cancel_fine_tuning_job(
    job: KnownDistillation, service: TheService, caller: TheCaller, response: Response
) -> FineTuningJob:
    """Stop a job for good: at once if it does not run, otherwise after it saved its state."""
    return describe_job(act_on_job("cancel", job, service, caller, response), service.files)


@router.post("/jobs/{job_id}/pause", **_ACTION)
def pause_fine_tuning_job(
    job: KnownDistillation, service: TheService, caller: TheCaller, response: Response
) -> FineTuningJob:
    """Stop a job for now; a running job saves its state first, and then frees its worker."""
    return describe_job(act_on_job("pause", job, service, caller, response), service.files)


@router.post("/jobs/{job_id}/resume", **_ACTION)
def resume_fine_tuning_job(
    job: KnownDistillation, service: TheService, caller: TheCaller, response: Response
) -> FineTuningJob:
    """Queue a paused job again; it continues from its saved state."""
    return describe_job(act_on_job("resume", job, service, caller, response), service.files)


@router.get("/jobs/{job_id}/events", dependencies=READ, responses=describe_problems(400, 404, 503))
def list_fine_tuning_events(
    job: KnownDistillation,
    service: TheService,
    limit: Limit = 20,
    after: Annotated[
        str | None,
        Query(pattern=STREAM_ID, description="The id of the last event of the page before."),
    ] = None,
) -> FineTuningEventList:
    """List a job's events, newest first."""
    found = service.store.read_newest_events(job.id, after, limit + 1)
    data = [describe_event(*each) for each in found[:limit]]
    return FineTuningEventList(data=data, has_more=len(found) > limit)


@router.get(
    "/jobs/{job_id}/checkpoints", dependencies=READ, responses=describe_problems(400, 404, 503)
)
def list_fine_tuning_checkpoints(
    job: KnownDistillation,
    service: TheService,
    limit: Limit = 10,
    after: Annotated[
        str | None,
        Query(max_length=64, description="The id of the last checkpoint of the page before."),
    ] = None,
) -> FineTuningCheckpointList:
    """List the checkpoints of a job that still exist, newest first."""
    every = [describe_checkpoint(job, each) for each in reversed(read_checkpoints(job, service))]
    if after is not None:
        step = after.removeprefix(f"{job.id}-")
        if not step.isdecimal():
            raise ApiProblem(
                400,
                f"after: {after!r} is not a checkpoint of {job.id}.",
                "Give the id of a checkpoint of this list.",
            )
        every = [each for each in every if each.step_number < int(step)]
    data = every[:limit]
    return FineTuningCheckpointList(
        data=data,
        has_more=len(every) > limit,
        first_id=data[0].id if data else None,
        last_id=data[-1].id if data else None,
    )
