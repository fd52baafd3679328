"""The service itself: what jobs may name, who works, whether it lives, what it counts.

GET /models     the models that jobs may name, and the caller's limits
GET /workers    who works, on what device, and at what
GET /healthz    this process lives: no I/O, no key
GET /readyz     jobs are taken: the store can be written, the reconciler runs, the disk has room; no key
GET /metrics    for Prometheus
GET /version    what answers
"""

from __future__ import annotations

from datetime import UTC, datetime
from importlib.metadata import version

from fastapi import APIRouter, Response

from kd.confinement import read_allow_list
from kd.estimate import free_bytes
from services.api.access import READ
from services.api.exposition import CONTENT_TYPE, exposition
from services.api.problems import BODY_BYTES, RETRY_SECONDS, Answers, ApiProblem, responses
from services.api.service import Service, TheCaller, TheService
from services.api.views import Limits, ModelEntry, ModelList, Ready, Version, Worker, WorkerList
from services.jobs import Caller
from services.schemas import Health, WorkerState

RECORD_FORMAT = 2  #: FORMAT of jobs.lua
READY_SECONDS = 60.0  #: age of the reconciler's last round at which it counts as dead

router = APIRouter(tags=["service"])


@router.get("/models", dependencies=READ, responses=responses(503))
def list_models(service: TheService) -> ModelList:
    """The models that jobs may name, where the operator keeps a list, and what the caller may do at most."""
    settings = service.settings
    listed = read_allow_list(settings.model_allow_list)
    return ModelList(
        restricted=listed is not None,
        data=[ModelEntry(model=entry.name, revision=entry.revision) for entry in listed or ()],
        limits=Limits(
            open_jobs=settings.quota_open_jobs,
            record_bytes=settings.quota_record_bytes,
            posts_a_minute=settings.rate_post,
            gets_a_minute=settings.rate_get,
            event_streams=settings.rate_sse,
            body_bytes=BODY_BYTES,
        ),
    )


@router.get("/workers", dependencies=READ, responses=responses(503))
def list_workers(service: TheService, caller: TheCaller) -> WorkerList:
    """The workers heard of within the last half minute; of what they work on, the caller's own jobs are named."""
    return WorkerList(data=[_worker(state, service, caller) for state in service.store.workers()])


def _worker(state: WorkerState, service: Service, caller: Caller) -> Worker:
    own = state.job is not None and service.store.get(state.job, caller) is not None
    age = max(0.0, (datetime.now(UTC) - state.beat_at).total_seconds()) if state.beat_at else None
    known = state.model_dump() | {"job": state.job if own else None, "attempt": state.attempt if own else None}
    return Worker(**known, busy=state.job is not None, beat_age_seconds=age)


@router.get("/healthz")
async def healthz() -> Health:
    """The process is alive."""
    return Health()


@router.get("/readyz", responses=responses(503))
def readyz(service: TheService) -> Ready:
    """Jobs are taken: the store can be written to, the reconciler does its rounds, and the disk has room."""
    redis, settings = service.store.redis, service.settings
    redis.ping()
    redis.set("kd:ready", "1", ex=60)
    last = float(redis.get("kd:reconciler") or 0)
    if service.store.now_ms() / 1000 - last > READY_SECONDS:
        raise _unready("The reconciler has done no round for a minute.", "reconciler-stopped")
    if free_bytes(settings.home) < settings.disk_floor_bytes:
        raise _unready("The disk of the data folder is nearly full.", "disk-full")
    return Ready()


def _unready(detail: str, slug: str) -> ApiProblem:
    headers = {"Retry-After": RETRY_SECONDS}
    return ApiProblem(503, detail, "The server's log and GET /metrics tell more.", slug, headers=headers)


_PAGE: Answers = {
    200: {"content": {"text/plain": {"schema": {"type": "string"}}}, "description": "Prometheus's text format."}
}


@router.get("/metrics", dependencies=READ, response_class=Response, responses=_PAGE)
def metrics(service: TheService) -> Response:
    """What the service counts, for Prometheus; no label holds an id."""
    return Response(exposition(service), headers={"Content-Type": CONTENT_TYPE})


@router.get("/version", dependencies=READ)
def get_version(service: TheService) -> Version:
    """What answers."""
    return Version(version=version("potstill"), record_format=RECORD_FORMAT)
