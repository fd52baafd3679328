"""Jobs: take one, tell how it goes, and do with it what its status allows.

POST   /jobs                 take a job                202, Location; with ?dry_run=true an estimate, 200
POST   /jobs/validate        what it would be and need, or what is wrong with it
GET    /jobs                 newest first, by cursor
GET    /jobs/{id}            how it goes; ?wait=30 answers when that has changed
POST   /jobs/{id}/cancel     pause, resume, retry      202; 200 where it is so already; 409 where the status forbids it
POST   /jobs/{id}/clone      take the same once more, with changes
DELETE /jobs/{id}            forget one that has ended
"""

from __future__ import annotations

import asyncio
import base64
import re
import time
from collections.abc import Mapping
from typing import Annotated, Any

from fastapi import APIRouter, Body, Depends, Header, Query, Response
from fastapi.responses import JSONResponse
from pydantic import AwareDatetime, BeforeValidator

from cache.disk import remove, storage_errors
from kd.config.job import JobConfig
from kd.estimate import estimate_by_table
from kd.jobfile import parse_config
from services.api.access import READ, WRITE
from services.api.admission import Desk, announce
from services.api.planning import plan_job
from services.api.problems import Answers, ApiProblem, responses
from services.api.service import KnownJob, Service, TheCaller, TheService, known_job
from services.api.views import JobPlan
from services.jobs import Caller, JobQuery
from services.schemas import TRANSITIONS, Action, Job, JobEstimate, JobList, Kind, Status

POLL_SECONDS = 0.25
RETRY_AFTER = "2"  #: seconds until a look at a new job is worth it
_TAG = re.compile(r'(?:W/)?"(\d{1,18})"')

router = APIRouter(tags=["jobs"])


async def _desk(service: TheService, caller: TheCaller) -> Desk:
    return Desk(service, caller)


TheDesk = Annotated[Desk, Depends(_desk)]
IdempotencyKey = Annotated[
    str | None,
    Header(
        alias="Idempotency-Key",
        min_length=1,
        max_length=255,
        description="The same key and body give the same job for a day.",
    ),
]


def _header(text: str) -> dict[str, Any]:
    return {"description": text, "schema": {"type": "string"}}


TAKEN: Answers = {
    202: {
        "description": "The job is taken.",
        "headers": {
            "Location": _header("Path of the job."),
            "Retry-After": _header("Seconds until a look at it is worth it."),
            "Idempotent-Replayed": _header("true, where an earlier request with this key made the job."),
        },
    }
}
ESTIMATED: Answers = {200: {"model": JobEstimate, "description": "What a dry run found; no job is taken."}}
SHOWN: Answers = {
    200: {"description": "How it goes.", "headers": {"ETag": _header("The record's version.")}},
    304: {"description": "It is as it was, or still is when the time to wait is over."},
}
DONE: Answers = {
    200: {"model": Job, "description": "It was so already."},
    202: {"description": "It is done, or asked of the worker: status tells."},
}
FORGOTTEN: Answers = {204: {"description": "It is forgotten."}}


# ---------------------------------------------------------------------- taking a job

EXAMPLE = {
    "name": "tiny",
    "teacher": {"model": "examples/austen/teacher"},
    "student": {"init": {"layers": 1, "hidden_size": 64}},
    "data": {"train": "examples/austen/text/persuasion.txt", "max_train_samples": 64},
    "train": {"max_steps": 20},
}
JobBody = Annotated[
    JobConfig, Body(openapi_examples={"tiny": {"summary": "Of the example's teacher", "value": EXAMPLE}})
]


@router.post(
    "/jobs",
    status_code=202,
    response_model=Job,
    dependencies=WRITE,
    responses=ESTIMATED | TAKEN | responses(400, 404, 413, 415, 422, 429, 503, 507),
)
def create_job(
    config: JobBody,
    response: Response,
    desk: TheDesk,
    idempotency_key: IdempotencyKey = None,
    dry_run: Annotated[bool, Query(description="Only say what the job's capture will need; take no job.")] = False,
) -> Job | Response:
    """Take a job. The same Idempotency-Key with the same body gives the same job for a day."""
    if not dry_run:
        return taken(desk, config, idempotency_key, response)
    desk.require_admissible(config)
    settings = desk.service.settings
    estimate = estimate_by_table(config, settings.root, settings.home)
    return JSONResponse(JobEstimate(**estimate.to_json()).model_dump())


@router.post("/jobs/validate", dependencies=WRITE, responses=responses(400, 413, 415, 422, 429, 503, 507))
def validate_job(config: JobBody, desk: TheDesk) -> JobPlan:
    """Say what a job would be and need, or everything that is wrong with it; no job is taken."""
    desk.require_admissible(config)
    return plan_job(config, desk.service.settings, desk.service.store.workers())


@router.post(
    "/jobs/{job_id}/clone",
    status_code=202,
    response_model=Job,
    dependencies=WRITE,
    responses=TAKEN | responses(400, 404, 413, 415, 422, 429, 503, 507),
)
def clone_job(
    job: KnownJob,
    response: Response,
    desk: TheDesk,
    patch: Annotated[dict[str, Any] | None, Body(description="Changes, as a JSON merge patch (RFC 7386).")] = None,
    idempotency_key: IdempotencyKey = None,
) -> Job:
    """Take a new job with the body of an old one, changed by a JSON merge patch where one is sent."""
    return taken(desk, parse_config(merged(job.config, patch or {})), idempotency_key, response)


def merged(target: Any, patch: Any) -> Any:
    """``target`` changed by a JSON merge patch (RFC 7386): null takes a member away, a list replaces a list."""
    if not isinstance(patch, Mapping):
        return patch
    known = dict(target) if isinstance(target, Mapping) else {}
    for name, value in patch.items():
        if value is None:
            known.pop(name, None)
        else:
            known[name] = merged(known.get(name), value)
    return known


def taken(desk: Desk, config: JobConfig, key: str | None, response: Response) -> Job:
    """Take the job, and say so in the headers of the answer."""
    job, replayed = desk.take(config, key)
    response.headers["Location"] = job.links.self
    response.headers["Retry-After"] = RETRY_AFTER
    if replayed:
        response.headers["Idempotent-Replayed"] = "true"
    return job


# ---------------------------------------------------------------------- telling how it goes


def _rfc3339(value: object) -> object:
    if isinstance(value, str) and re.match(r"\d{4}-\d\d-\d\d[Tt ]\d\d:\d\d", value) is None:
        raise ValueError("must be a time as 2026-11-21T12:00:00Z")
    return value


Moment = Annotated[AwareDatetime, BeforeValidator(_rfc3339)]


async def _query(
    caller: TheCaller,
    status: Annotated[Status | None, Query(description="Only jobs of this status.")] = None,
    kind: Annotated[Kind | None, Query(description="Only jobs of this kind.")] = None,
    label: Annotated[
        str | None, Query(pattern=r"^[^:]{1,63}:[^:]{1,63}$", description="A label that the jobs have, as name:value.")
    ] = None,
    parent: Annotated[str | None, Query(description="The search whose trials are wanted.")] = None,
    created_after: Annotated[Moment | None, Query(description="Only jobs made after this time.")] = None,
) -> JobQuery:
    name, _, value = (label or "").partition(":")
    return JobQuery(caller, status, kind, (name, value) if label else None, parent, created_after)


@router.get("/jobs", dependencies=READ, responses=responses(422, 503))
def list_jobs(
    service: TheService,
    query: Annotated[JobQuery, Depends(_query)],
    limit: Annotated[int, Query(ge=1, le=100, description="Jobs of one page at most.")] = 20,
    cursor: Annotated[str | None, Query(description="next_cursor of the page before.")] = None,
) -> JobList:
    """Jobs, newest first. A page may be short, or empty, and have others after it: next_cursor tells."""
    page = service.store.page(query, limit, _decode(cursor))
    following = None if page.next_cursor is None else _encode(page.next_cursor)
    return JobList(data=page.jobs, has_more=following is not None, next_cursor=following)


def _encode(cursor: int) -> str:
    return base64.urlsafe_b64encode(str(cursor).encode()).decode().rstrip("=")


def _decode(cursor: str | None) -> int | None:
    if cursor is None:
        return None
    try:
        text = base64.urlsafe_b64decode(cursor + "=" * (-len(cursor) % 4)).decode("ascii")
        if re.fullmatch(r"\d{1,18}", text) and _encode(int(text)) == cursor:
            return int(text)
    except ValueError:  # of base64, of ASCII
        pass
    raise ApiProblem(422, f"cursor {cursor!r} is none of this list.", "Begin again without one.", "bad-cursor")


@router.get(
    "/jobs/{job_id}",
    dependencies=READ,
    response_model=Job,
    responses=SHOWN | responses(404, 422, 503),
)
async def get_job(
    job: KnownJob,
    service: TheService,
    caller: TheCaller,
    response: Response,
    wait: Annotated[int, Query(ge=0, le=30, description="Seconds to wait for a change before the answer.")] = 0,
    if_none_match: Annotated[
        str | None, Header(alias="If-None-Match", description="ETag of the answer before.")
    ] = None,
) -> Job | Response:
    """How a job goes: at once, or with ?wait= as soon as that is other than what If-None-Match names."""
    seen = {int(version) for version in _TAG.findall(if_none_match or "")}
    if wait and not job.ended and (job.version in seen or not seen):
        await _changed(service, job, time.monotonic() + wait)
        job = await asyncio.to_thread(known_job, job.id, service, caller)
    tag = f'W/"{job.version}"'  # weak: the place in the queue changes without the record
    if job.version in seen:
        return Response(status_code=304, headers={"ETag": tag})
    response.headers["ETag"] = tag
    return job


async def _changed(service: Service, job: Job, deadline: float) -> None:
    """Wait until the record has another version, or the time is over."""
    while time.monotonic() < deadline and not service.stopping:
        if await service.events.hget(f"kd:job:{job.id}", "version") != str(job.version):
            return
        await asyncio.sleep(POLL_SECONDS)


# ---------------------------------------------------------------------- doing something with it


_ACTION: dict[str, Any] = {
    "status_code": 202,
    "response_model": Job,
    "dependencies": WRITE,
    "responses": DONE | responses(404, 409, 422, 429, 503),
}


@router.post("/jobs/{job_id}/cancel", **_ACTION)
def cancel_job(job: KnownJob, service: TheService, caller: TheCaller, response: Response) -> Job:
    """Ask a job to stop for good: one that does not run stops at once, a running one saves first."""
    return _act("cancel", job, service, caller, response)


@router.post("/jobs/{job_id}/pause", **_ACTION)
def pause_job(job: KnownJob, service: TheService, caller: TheCaller, response: Response) -> Job:
    """Ask a job to stop for now: a running one saves first; its worker is free for others then."""
    return _act("pause", job, service, caller, response)


@router.post("/jobs/{job_id}/resume", **_ACTION)
def resume_job(job: KnownJob, service: TheService, caller: TheCaller, response: Response) -> Job:
    """Queue a paused job again; it goes on from what it saved."""
    return _act("resume", job, service, caller, response)


@router.post("/jobs/{job_id}/retry", **_ACTION)
def retry_job(job: KnownJob, service: TheService, caller: TheCaller, response: Response) -> Job:
    """Queue a failed or cancelled job again, with attempts and deadline anew; it goes on from what it saved."""
    return _act("retry", job, service, caller, response)


def _act(action: Action, job: Job, service: Service, caller: Caller, response: Response) -> Job:
    if _changes(action, job, service) == "already":
        response.status_code = 200
    job = known_job(job.id, service, caller)
    if action in ("resume", "retry"):
        announce(service, job)
    return job


def _changes(action: Action, job: Job, service: Service) -> str:
    """Do it; raises 409 where the status, which may have changed since ``job`` was read, forbids it."""
    change = service.store.change(action, job.id)
    if change.outcome == "unknown":
        raise ApiProblem(404, f"There is no job {job.id}.", "GET /jobs lists the jobs there are.")
    if change.outcome != "illegal":
        return change.outcome
    allowed = sorted(name for name, statuses in TRANSITIONS.items() if change.status in statuses)
    raise ApiProblem(
        409,
        f"{action} is not possible while the job is {change.status}.",
        f"What it allows: {', '.join(allowed) or 'nothing'}.",
        "invalid-transition",
        members={"job_status": change.status, "allowed": allowed},
    )


@router.delete(
    "/jobs/{job_id}",
    status_code=204,
    dependencies=WRITE,
    responses=FORGOTTEN | responses(404, 409, 422, 429, 503),
)
def delete_job(
    job: KnownJob,
    service: TheService,
    artifacts: Annotated[bool, Query(description="Delete its checkpoints, logs and artifacts too.")] = False,
) -> Response:
    """Forget a job that has ended; its cache stays, and so do its files unless ?artifacts=true."""
    _changes("delete", job, service)
    if artifacts:
        folder = service.settings.run_dir(job.id)
        with storage_errors(folder):
            remove(folder)
    return Response(status_code=204)
