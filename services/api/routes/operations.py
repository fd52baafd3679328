"""Routes of the service itself: models, workers, health, metrics and version.

GET /models     the models that jobs may name, and the caller's limits
GET /workers    the workers, their devices and their jobs
GET /healthz    the process is alive; needs no I/O and no key
GET /readyz     the service accepts jobs: the store can be written, the reconciler runs, and the
                disk has room; needs no key
GET /metrics    the metrics for Prometheus
GET /version    the version of the server
"""

from __future__ import annotations

from fastapi import APIRouter, Response

from kd.client.wire import service as wire
from kd.preflight.limits import read_allow_list
from kd.python.version import read_version
from services.api.answers.problems import (
    RETRY_SECONDS,
    Answers,
    ApiProblem,
    describe_problems,
    describe_text,
)
from services.api.answers.prometheus import CONTENT_TYPE, render_metrics
from services.api.guards.body_limits import BODY_BYTES
from services.api.guards.json_bodies import StrictRoute
from services.api.routes.access import READ, guard
from services.api.service import TheCaller, TheService
from services.process.file_view import identify_file_view
from services.store.connection import find_unsuitability

#: Must equal FORMAT of jobs.lua.
RECORD_FORMAT = 2
#: The age of the reconciler's last round, in seconds, above which the reconciler counts as dead.
READY_SECONDS = 60.0

router = APIRouter(tags=["service"], route_class=StrictRoute)


@router.get("/models", **guard(READ))
def list_models(service: TheService) -> wire.ModelList:
    """List the models that jobs may name, if they are restricted, and the caller's limits."""
    settings = service.settings
    listed = read_allow_list(settings.model_allow_list)
    return wire.ModelList(
        restricted=listed is not None,
        data=[wire.ModelEntry(model=entry.name, revision=entry.revision) for entry in listed or ()],
        limits=wire.Limits(
            open_jobs=settings.quota_open_jobs,
            record_bytes=settings.quota_record_bytes,
            posts_a_minute=settings.rate_post,
            gets_a_minute=settings.rate_get,
            validations_a_minute=settings.rate_validate,
            event_streams=settings.rate_sse,
            body_bytes=BODY_BYTES,
        ),
    )


@router.get("/workers", **guard(READ))
def list_workers(service: TheService, caller: TheCaller) -> wire.WorkerList:
    """List the workers with a heartbeat in the last 30 seconds.

    A worker's job is shown only if the caller may see that job.
    """
    states = service.store.list_workers()
    # The clock that the heartbeats have, too.
    now = service.store.read_clock()
    found = []
    for state in states:
        known = state.model_dump()
        if state.job is None or service.store.get(state.job, caller) is None:
            known |= {"job": None, "attempt": None}
        age = max(0.0, (now - state.beat_at).total_seconds()) if state.beat_at else None
        found.append(wire.Worker(**known, busy=state.job is not None, beat_age_seconds=age))
    return wire.WorkerList(data=found)


@router.get("/healthz")
async def healthz() -> wire.Health:
    """Answer that the process is alive."""
    return wire.Health()


@router.get("/readyz", responses=describe_problems(503))
def readyz(service: TheService) -> wire.Ready:
    """Check that the service accepts jobs.

    The job store can be written, the reconciler runs, and the disk has room.
    """
    redis = service.store.redis
    redis.ping()
    if unsuitable := find_unsuitability(redis):
        raise _make_unready_problem(str(unsuitable), "store-unsuitable")
    # A full or read-only Redis answers a ping, but refuses this write.
    redis.set("kd:ready", "1", ex=60)
    last = float(redis.get("kd:reconciler") or 0)
    if service.store.read_clock_ms() / 1000 - last > READY_SECONDS:
        detail = "The reconciler has not run for a minute."
        raise _make_unready_problem(detail, "reconciler-stopped")
    if full := service.settings.find_full_disk():
        raise _make_unready_problem(full, "disk-full")
    return wire.Ready(warnings=service.store.find_lost_records(service.settings.runs))


def _make_unready_problem(detail: str, slug: str) -> ApiProblem:
    remedy = "The server's log and GET /metrics show more."
    return ApiProblem(503, detail, remedy, slug, headers={"Retry-After": RETRY_SECONDS})


_METRICS_RESPONSES: Answers = {200: describe_text("Prometheus's text format.")}


@router.get("/metrics", dependencies=READ, response_class=Response, responses=_METRICS_RESPONSES)
def metrics(service: TheService) -> Response:
    """Show the service's metrics for Prometheus; no label holds an id."""
    page = render_metrics(service.settings, service.store, service.request_metrics)
    return Response(page, headers={"Content-Type": CONTENT_TYPE})


@router.get("/version", dependencies=READ)
def get_version(service: TheService) -> wire.Version:
    """Show the version of the server."""
    return wire.Version(
        version=read_version(), record_format=RECORD_FORMAT, file_view=identify_file_view()
    )
