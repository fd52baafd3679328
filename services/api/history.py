"""What happened to a job: its events as a page or a stream, its metrics over the steps, its log.

GET /jobs/{id}/events          a page of events; where Accept names text/event-stream, the stream
GET /jobs/{id}/events/stream   server-sent events, resumable; ends with the job
GET /jobs/{id}/metrics         one series a metric, thinned out for a picture
GET /jobs/{id}/logs            what its processes printed, without secrets
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from datetime import UTC, datetime
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Header, Query, Request, Response
from fastapi.sse import EventSourceResponse, ServerSentEvent
from starlette.types import ASGIApp, Receive, Scope, Send

from services.api.access import READ, STREAM
from services.api.events import follow
from services.api.keys import hold_stream
from services.api.limits import Hold
from services.api.logfile import LogFile
from services.api.problems import Answers, responses
from services.api.sending import Ranged, send
from services.api.service import KnownJob, TheService
from services.api.thinning import Point, thin
from services.api.views import JobEvent, JobEvents, MetricSeries, MetricsHistory

STREAM_ID = r"^\d{1,18}(-\d{1,18})?$"
LOG = "log.txt"

router = APIRouter(tags=["history"])

_SHOWN: Answers = {
    200: {"content": {"text/event-stream": {"schema": {"type": "string"}}}, "description": "A page, or the stream."}
}


@router.get("/jobs/{job_id}/events", dependencies=READ, responses=_SHOWN | responses(404, 422, 503))
def job_events(
    job: KnownJob,
    service: TheService,
    after: Annotated[str, Query(pattern=STREAM_ID, description="Only what followed this event.")] = "0",
    limit: Annotated[int, Query(ge=1, le=1000, description="Events of one page at most.")] = 100,
    types: Annotated[str | None, Query(description="Only these types, separated by commas.")] = None,
) -> JobEvents:
    """A page of what happened to a job, oldest first. Asked for text/event-stream, this is the stream."""
    wanted = [name for name in (types or "").split(",") if name]
    found = service.store.events(job.id, after, limit + 1, wanted)
    data = [JobEvent(id=place, ts=_time_of(place), type=kind, data=data) for place, kind, data in found[:limit]]
    return JobEvents(data=data, has_more=len(found) > limit, next_after=data[-1].id if data else after)


def _time_of(place: str) -> datetime:
    return datetime.fromtimestamp(int(place.partition("-")[0]) / 1000, UTC)


@router.get(
    "/jobs/{job_id}/events/stream",
    dependencies=STREAM,
    response_class=EventSourceResponse,
    responses=responses(404, 422, 429, 503),
)
async def job_stream(
    job: KnownJob,
    service: TheService,
    hold: Annotated[Hold, Depends(hold_stream)],
    last_event_id: Annotated[
        str | None,
        Header(alias="Last-Event-ID", pattern=STREAM_ID, description="Only what followed this event."),
    ] = None,
) -> AsyncIterator[ServerSentEvent]:
    """Everything that happens to a job, from its start or from after Last-Event-ID; ends with the job."""
    async for event in follow(service.events, job.id, last_event_id or "0", lambda: service.stopping or hold.lost):
        yield event


class StreamWhereAsked:
    """Sends a GET of a job's events that accepts text/event-stream on to the stream, where it always was."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Change the path of such a request."""
        if scope["type"] == "http" and scope["method"] == "GET" and scope["path"].endswith("/events"):
            accept = dict(scope["headers"]).get(b"accept", b"")
            if b"text/event-stream" in accept.lower():
                scope = {**scope, "path": f"{scope['path']}/stream", "raw_path": scope["raw_path"] + b"/stream"}
        await self._app(scope, receive, send)


# ---------------------------------------------------------------------- metrics


@router.get("/jobs/{job_id}/metrics", dependencies=READ, responses=responses(404, 422, 503))
def job_metrics(
    job: KnownJob,
    service: TheService,
    names: Annotated[str | None, Query(description="Only these metrics, separated by commas; default all.")] = None,
    after_step: Annotated[int, Query(ge=-1, le=1 << 53, description="Only steps after this one.")] = -1,
    max_points: Annotated[int, Query(ge=4, le=8192, description="Points of each metric at most.")] = 1000,
) -> MetricsHistory:
    """The history of a job's metrics, one series each: of equally wide spans of steps the lowest and highest point."""
    points = service.store.metrics(job.id, after_step)
    wanted = {name for name in (names or "").split(",") if name}
    found = {name: series for name, series in _series(points).items() if not wanted or name in wanted}
    return MetricsHistory(
        series=[_thinned(name, series, max_points) for name, series in sorted(found.items())],
        last_step=points[-1]["step"] if points else None,
    )


def _series(points: list[dict[str, Any]]) -> dict[str, list[Point]]:
    """Every number that the points hold, by name."""
    found: dict[str, list[Point]] = {}
    for point in points:
        for name, value in point.items():
            if name != "step" and isinstance(value, int | float) and not isinstance(value, bool):
                found.setdefault(name, []).append((point["step"], float(value)))
    return found


def _thinned(name: str, series: list[Point], limit: int) -> MetricSeries:
    kept = thin(series, limit)
    return MetricSeries(
        name=name, steps=[step for step, _ in kept], values=[value for _, value in kept], points=len(series)
    )


# ---------------------------------------------------------------------- log

_LOG: Answers = {
    200: {"content": {"text/plain": {"schema": {"type": "string"}}}, "description": "The log; empty before it runs."},
    206: {"content": {"text/plain": {"schema": {"type": "string"}}}, "description": "The bytes that Range names."},
}


@router.head("/jobs/{job_id}/logs", dependencies=READ, include_in_schema=False)
@router.get(
    "/jobs/{job_id}/logs", dependencies=READ, response_class=Response, responses=_LOG | responses(404, 416, 422, 503)
)
def job_logs(
    request: Request,
    job: KnownJob,
    service: TheService,
    tail: Annotated[int | None, Query(ge=1, le=10_000, description="Only so many lines of its end.")] = None,
) -> Response:
    """What the job's processes printed. Secrets are blotted out, byte for byte, and Range keeps its meaning."""
    log = LogFile(service.settings.run_dir(job.id) / LOG, service.secrets)
    content = Ranged(log.size, "text/plain; charset=utf-8", log.read, close=log.close)
    return send(request, content.after(log.tail(tail)) if tail else content)
