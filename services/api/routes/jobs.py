"""Routes that create, show and change jobs.

POST   /jobs                 create a job: 202 and Location; with ?dry_run=true an estimate: 200
POST   /jobs/validate        show the plan of a job, or its problems
GET    /jobs                 list jobs, newest first, by cursor
GET    /jobs/{id}            show a job; with ?wait=30 as soon as it changes
GET    /jobs/{id}/settings   show the settings that are not the defaults
POST   /jobs/{id}/{action}   cancel, pause, resume or retry: 202; 200 if the job is in that state
                             already; 409 if its status forbids the action
POST   /jobs/{id}/clone      create the same job again, with changes
DELETE /jobs/{id}            delete a job that has ended
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Mapping
from contextlib import ExitStack
from typing import Annotated, Any

from fastapi import APIRouter, Body, Depends, Header, Query, Request, Response
from fastapi.responses import JSONResponse
from pydantic import AwareDatetime, BeforeValidator

from cache.json_object import Json
from cache.reading.usage import held
from kd.client.wire.jobs import Action, Job, JobList, JobSettings, Setting, Status
from kd.client.wire.plans import JobEstimate, JobPlan
from kd.config.job import JobConfig
from kd.config.jobfile import parse_config
from kd.config.kinds import KindName
from kd.config.section import find_differences
from services.api.admission import Admission, announce_job, make_open_jobs_problem
from services.api.answers.cursors import decode_cursor, encode_cursor
from services.api.answers.problems import Answers, ApiProblem, describe_header
from services.api.guards.authentication import count_validation
from services.api.guards.json_bodies import StrictRoute
from services.api.routes.access import READ, VALIDATE, WRITE, guard
from services.api.service import (
    KnownJob,
    Service,
    TheCaller,
    TheService,
    find_known_job,
    make_no_job_problem,
)
from services.store.callers import Caller
from services.store.jobs.listing import JobQuery
from services.store.jobs.records import JobRecord
from services.store.run_folder import remove_run_files

#: The time between two looks at a record, while a client waits for its change.
POLL_SECONDS = 0.25
#: The Retry-After header of a new job, in seconds: it seldom changes sooner.
RETRY_AFTER = "2"
#: One ETag of an If-None-Match header: the record's version in quotes.
_TAG = re.compile(r'(?:W/)?"(\d{1,18})"')

router = APIRouter(tags=["jobs"], route_class=StrictRoute)


# Async, because FastAPI runs a plain function in a thread, of which there are few.
async def _make_admission(service: TheService, caller: TheCaller) -> Admission:
    return Admission(service, caller)


TheAdmission = Annotated[Admission, Depends(_make_admission)]
IdempotencyKey = Annotated[
    str | None,
    Header(
        alias="Idempotency-Key",
        min_length=1,
        max_length=255,
        description="For a day, the same key and body return the same job.",
    ),
]


ACCEPTED_RESPONSES: Answers = {
    202: {
        "description": "The job is accepted.",
        "headers": {
            "Location": describe_header("The path of the job."),
            "Retry-After": describe_header("Seconds until the job is worth another look."),
            "Idempotent-Replayed": describe_header(
                "true if an earlier request with this key created the job."
            ),
        },
    }
}
ESTIMATE_RESPONSES: Answers = {
    200: {"model": JobEstimate, "description": "The estimate of a dry run; no job is created."}
}
JOB_RESPONSES: Answers = {
    200: {
        "description": "The job.",
        "headers": {"ETag": describe_header("The version of the record.")},
    },
    304: {"description": "The job has not changed, or not within the time to wait."},
}
ACTION_RESPONSES: Answers = {
    200: {"model": Job, "description": "The job was in that state already."},
    202: {"description": "The action is done, or the worker was asked to do it; see status."},
}
DELETE_RESPONSES: Answers = {204: {"description": "The job is deleted."}}


def guard_change(*statuses: int, answers: Answers = ACCEPTED_RESPONSES) -> dict[str, Any]:
    """Return the arguments of a route that answers 202 with a job, and asks for scope write."""
    return {"status_code": 202, "response_model": Job, **guard(WRITE, *statuses, answers=answers)}


# ---------------------------------------------------------------------- creating jobs

EXAMPLE: Any = {
    "summary": "A small student of the example's teacher",
    "value": {
        "name": "tiny",
        "teacher": {"model": "examples/austen/teacher"},
        "student": {"init": {"layers": 1, "hidden_size": 64}},
        "data": {"train": "examples/austen/text/persuasion.txt", "max_train_samples": 64},
        "train": {"max_steps": 20},
    },
}
JobBody = Annotated[JobConfig, Body(openapi_examples={"tiny": EXAMPLE})]


@router.post(
    "/jobs",
    **guard_change(
        400, 404, 413, 415, 422, 429, 507, answers=ESTIMATE_RESPONSES | ACCEPTED_RESPONSES
    ),
)
def create_job(
    request: Request,
    config: JobBody,
    response: Response,
    admission: TheAdmission,
    idempotency_key: IdempotencyKey = None,
    dry_run: Annotated[
        bool, Query(description="Only estimate what the capture needs; create no job.")
    ] = False,
) -> Job | Response:
    """Create a job. For a day, the same Idempotency-Key and body return the same job."""
    if not dry_run:
        return accept_job(admission, config, idempotency_key, response)
    count_validation(request, admission.caller)
    return JSONResponse(admission.estimate(config).model_dump(mode="json"))


@router.post("/jobs/validate", **guard(VALIDATE, 400, 413, 415, 422, 429, 507))
def validate_job(config: JobBody, admission: TheAdmission) -> JobPlan:
    """Show the plan of a job, or all of its problems; no job is created."""
    return admission.plan(config)


@router.post("/jobs/{job_id}/clone", **guard_change(400, 404, 413, 415, 422, 429, 507))
def clone_job(
    job: KnownJob,
    response: Response,
    admission: TheAdmission,
    patch: Annotated[
        Json | None, Body(description="The changes, as a JSON merge patch (RFC 7386).")
    ] = None,
    idempotency_key: IdempotencyKey = None,
) -> Job:
    """Create a job from the body of another one, changed by a JSON merge patch if one is sent."""
    config = parse_config(apply_merge_patch(job.config, patch or {}))
    return accept_job(admission, config, idempotency_key, response)


def apply_merge_patch(target: Any, patch: Any) -> Any:
    """Return ``target`` changed by a JSON merge patch (RFC 7386).

    A null removes a member, and a list replaces a list.
    """
    if not isinstance(patch, Mapping):
        return patch
    known = dict(target) if isinstance(target, Mapping) else {}
    for name, value in patch.items():
        if value is None:
            known.pop(name, None)
        else:
            known[name] = apply_merge_patch(known.get(name), value)
    return known


def accept_job(admission: Admission, config: JobConfig, key: str | None, response: Response) -> Job:
    """Create the job, and set the headers of the answer."""
    job, replayed = admission.admit(config, key)
    response.headers["Location"] = job.links.self
    response.headers["Retry-After"] = RETRY_AFTER
    if replayed:
        response.headers["Idempotent-Replayed"] = "true"
    return job


# ---------------------------------------------------------------------- showing jobs


def _require_rfc3339(value: object) -> object:
    if isinstance(value, str) and re.match(r"\d{4}-\d\d-\d\d[Tt ]\d\d:\d\d", value) is None:
        raise ValueError("must be a time like 2026-11-21T12:00:00Z")
    return value


Moment = Annotated[AwareDatetime, BeforeValidator(_require_rfc3339)]


async def _build_query(
    caller: TheCaller,
    status: Annotated[Status | None, Query(description="Only jobs with this status.")] = None,
    kind: Annotated[KindName | None, Query(description="Only jobs of this kind.")] = None,
    label: Annotated[
        str | None,
        Query(
            pattern=r"^[^:]{1,63}:[^:]{1,63}$",
            description="Only jobs with this label, as name:value.",
        ),
    ] = None,
    parent: Annotated[str | None, Query(description="Only trials of this search.")] = None,
    created_after: Annotated[
        Moment | None, Query(description="Only jobs created after this time.")
    ] = None,
    q: Annotated[
        str | None,
        Query(
            min_length=1,
            max_length=200,
            description="Only jobs with this text in their id, name, labels or models.",
        ),
    ] = None,
    trials: Annotated[
        bool, Query(description="false = without the trials of searches; parent lists them.")
    ] = True,
) -> JobQuery:
    name, _, value = (label or "").partition(":")
    wanted = (name, value) if label else None
    return JobQuery(caller, status, kind, wanted, parent, created_after, q, trials)


@router.get("/jobs", **guard(READ, 422))
def list_jobs(
    service: TheService,
    query: Annotated[JobQuery, Depends(_build_query)],
    limit: Annotated[int, Query(ge=1, le=100, description="The most jobs of one page.")] = 20,
    cursor: Annotated[str | None, Query(description="The next_cursor of the page before.")] = None,
) -> JobList:
    """List jobs, newest first.

    A page may be short or even empty although more follow: read on until next_cursor is null.
    """
    page = service.store.read_page(query, limit, decode_cursor(cursor))
    following = encode_cursor(page.next_cursor)
    return JobList(data=page.jobs, has_more=following is not None, next_cursor=following)


@router.get("/jobs/{job_id}", response_model=Job, **guard(READ, 404, 422, answers=JOB_RESPONSES))
async def get_job(
    job: KnownJob,
    service: TheService,
    caller: TheCaller,
    response: Response,
    wait: Annotated[
        int, Query(ge=0, le=30, description="The seconds to wait for a change before the response.")
    ] = 0,
    if_none_match: Annotated[
        str | None, Header(alias="If-None-Match", description="The ETag of an earlier answer.")
    ] = None,
) -> Job | Response:
    """Show a job: at once, or with ?wait= as soon as it changes.

    The record has changed if its version differs from the version in If-None-Match, or without this
    header from the present version.
    """
    seen = {int(version) for version in _TAG.findall(if_none_match or "")}
    # A client that has seen another version gets the present one at once.
    if wait and not job.ended and (job.version in seen or not seen):
        deadline = time.monotonic() + wait
        key = f"kd:job:{job.id}"
        while time.monotonic() < deadline and not service.stopping:
            if await service.events.hget(key, "version") != str(job.version):
                break
            await asyncio.sleep(POLL_SECONDS)
        # The client of the store blocks, so the read runs in a thread.
        job = await asyncio.to_thread(find_known_job, job.id, service, caller)
    tag = f'W/"{job.version}"'  # weak, because the place in the queue may change without the record
    if job.version in seen:
        return Response(status_code=304, headers={"ETag": tag})
    response.headers["ETag"] = tag
    return job


@router.get("/jobs/{job_id}/settings", **guard(READ, 404, 422))
def job_settings(job: KnownJob) -> JobSettings:
    """Show the settings of a job that are not the defaults, in the order of the sections."""
    found = find_differences(parse_config(job.config))
    return JobSettings(data=[Setting.model_validate(each, from_attributes=True) for each in found])


# ---------------------------------------------------------------------- changing jobs


_ACTION = guard_change(404, 409, 422, 429, answers=ACTION_RESPONSES)


@router.post("/jobs/{job_id}/cancel", **_ACTION)
def cancel_job(job: KnownJob, service: TheService, caller: TheCaller, response: Response) -> Job:
    """Stop a job for good: at once if it does not run, otherwise after it saved its state."""
    return act_on_job("cancel", job, service, caller, response)


@router.post("/jobs/{job_id}/pause", **_ACTION)
def pause_job(job: KnownJob, service: TheService, caller: TheCaller, response: Response) -> Job:
    """Stop a job for now; a running job saves its state first, and then frees its worker."""
    return act_on_job("pause", job, service, caller, response)


@router.post("/jobs/{job_id}/resume", **_ACTION)
def resume_job(job: KnownJob, service: TheService, caller: TheCaller, response: Response) -> Job:
    """Queue a paused job again; it continues from its saved state."""
    return act_on_job("resume", job, service, caller, response)


@router.post("/jobs/{job_id}/retry", **_ACTION)
def retry_job(job: KnownJob, service: TheService, caller: TheCaller, response: Response) -> Job:
    """Queue a failed or cancelled job again; it continues from its saved state.

    Its attempts and its deadline are counted again from the start.
    """
    return act_on_job("retry", job, service, caller, response)


def act_on_job(
    action: Action, job: JobRecord, service: Service, caller: Caller, response: Response
) -> Job:
    """Apply the action, and return the job after it; the status is 200 if it was done already."""
    names = job.cache.names if job.cache is not None else []
    # A rule of retention removes the caches before the action, and finds them needed after it.
    with ExitStack() as holding:
        for name in names:
            holding.enter_context(held(service.settings.caches / name))
        outcome = _apply_action(action, job, service)
    if outcome == "already":
        response.status_code = 200
    else:
        service.audit.record(caller, f"job.{action}", job.id, owner=job.owner)
    job = find_known_job(job.id, service, caller)
    if action in ("resume", "retry"):
        announce_job(service, job)
    return job


def _apply_action(action: Action, job: Job, service: Service) -> str:
    """Apply the action and return its outcome; raise 409 if the job's status forbids it.

    Redis checks the status, because it may have changed since ``job`` was read. Raises 429 if a
    retry would give the job's owner more open jobs than it may have.
    """
    change = service.store.change(action, job.id, service.settings.quota_open_jobs)
    if change.outcome == "unknown":
        raise make_no_job_problem(job.id)
    if change.outcome == "quota":
        raise make_open_jobs_problem(change.open_jobs, service.settings)
    if change.outcome != "illegal":
        return change.outcome
    allowed = sorted(change.allowed)
    detail = f"{action} is not possible while the job is {change.status}."
    remedy = f"This status allows: {', '.join(allowed) or 'nothing'}."
    members = {"job_status": change.status, "allowed": allowed}
    raise ApiProblem(409, detail, remedy, "invalid-transition", members=members)


@router.delete(
    "/jobs/{job_id}", status_code=204, **guard(WRITE, 404, 409, 422, 429, answers=DELETE_RESPONSES)
)
def delete_job(
    job: KnownJob,
    service: TheService,
    caller: TheCaller,
    artifacts: Annotated[
        bool, Query(description="Also delete its checkpoints, logs and artifacts.")
    ] = False,
) -> Response:
    """Delete a job that has ended; its cache stays, and so do its files unless ?artifacts=true."""
    # The record first: a job that has not ended is refused here, before its files are touched.
    _apply_action("delete", job, service)
    service.audit.record(caller, "job.delete", job.id, owner=job.owner, artifacts=artifacts)
    if artifacts:
        remove_run_files(service.settings, job.id)
    return Response(status_code=204)
