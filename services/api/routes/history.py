"""Routes of the history of jobs: events as a page or a stream, metrics, logs, and the list of runs.

GET /jobs/{id}/events          a page of events; with Accept: text/event-stream, the stream
GET /jobs/{id}/events/stream   server-sent events; can be resumed, and ends with the job
GET /jobs/{id}/metrics         one series for each metric, thinned for a picture
GET /curves?jobs=A,B           a few points of the loss of several jobs
GET /runs                      what all runs on this disk have measured
GET /jobs/{id}/logs            the output of the job's processes, without secrets
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from fnmatch import fnmatchcase
from typing import Annotated

from fastapi import APIRouter, Depends, Header, Query, Request, Response
from starlette.types import ASGIApp, Receive, Scope, Send

from cache.json_object import Json
from kd.client.wire import history as wire
from kd.client.wire.jobs import Job
from kd.python.runs import sort_runs
from services.api.answers.byte_ranges import ByteSource, send_bytes
from services.api.answers.event_stream import EventStreamResponse, JobTail
from services.api.answers.masked_log import MaskedLog
from services.api.answers.metrics_file import read_metrics_file
from services.api.answers.problems import Answers, describe_text
from services.api.answers.thinning import Point, thin_points
from services.api.guards.authentication import hold_stream
from services.api.guards.json_bodies import StrictRoute
from services.api.guards.rate_limits import StreamLease
from services.api.routes.access import READ, STREAM, guard
from services.api.service import KnownJob, Service, TheCaller, TheService
from services.store.jobs.records import RENAMED
from services.store.run_folder import JOB_ID

#: The id of an event: milliseconds, and optionally a number.
STREAM_ID = r"^\d{1,18}(-\d{1,18})?$"
#: Characters of a list of names. Each name of a metric is compared with each of them.
NAMES_LENGTH = 4096
#: No proxy may keep or gather the events of a stream.
_STREAM_HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
LOG = "log.txt"

router = APIRouter(tags=["history"], route_class=StrictRoute)

#: An event of a stream, in the form of OpenAPI 3.2.
_EVENT_SCHEMA = {
    "type": "object",
    "properties": {name: {"type": "string"} for name in ("data", "event", "id")},
}
_STREAM_RESPONSES: Answers = {
    200: {"content": {"text/event-stream": {"itemSchema": _EVENT_SCHEMA}}}
}
_EVENTS_RESPONSES: Answers = {
    200: describe_text("A page of events, or the stream.", "text/event-stream")
}


@router.get("/jobs/{job_id}/events", **guard(READ, 404, 422, answers=_EVENTS_RESPONSES))
def job_events(
    job: KnownJob,
    service: TheService,
    after: Annotated[
        str, Query(pattern=STREAM_ID, description="Only events after this one.")
    ] = "0",
    limit: Annotated[int, Query(ge=1, le=1000, description="The most events of one page.")] = 100,
    types: Annotated[
        str | None,
        Query(
            max_length=NAMES_LENGTH, description="Only events of these types, separated by commas."
        ),
    ] = None,
) -> wire.JobEvents:
    """List a job's events, oldest first. With Accept: text/event-stream this is the stream."""
    wanted = [name for name in (types or "").split(",") if name]
    found = service.store.read_events(job.id, after, limit + 1, wanted, finds_step=True)
    data = found[:limit]
    newest = data[-1].id if data else after
    return wire.JobEvents(data=data, has_more=len(found) > limit, next_after=newest)


async def _join_tail(job: KnownJob, service: TheService) -> AsyncIterator[JobTail]:
    with service.event_hub.join_tail(job.id) as tail:
        yield tail


@router.get(
    "/jobs/{job_id}/events/stream",
    response_class=EventStreamResponse,
    **guard(STREAM, 404, 422, 429, answers=_STREAM_RESPONSES),
)
async def job_stream(
    service: TheService,
    lease: Annotated[StreamLease, Depends(hold_stream)],
    # After the lease: a caller with too many streams must not begin another one.
    tail: Annotated[JobTail, Depends(_join_tail)],
    last_event_id: Annotated[
        str | None,
        Header(alias="Last-Event-ID", pattern=STREAM_ID, description="Only events after this one."),
    ] = None,
    new_only: Annotated[
        bool, Query(description="Without Last-Event-ID: only events that are still to come.")
    ] = False,
) -> EventStreamResponse:
    """Stream a job's events, from its start or from after Last-Event-ID, until the job ends."""
    # Found before the answer begins, so that no event after that is missed.
    after = last_event_id or (await tail.find_newest() if new_only else "0")
    events = tail.follow(after, lambda: service.stopping or lease.lost)
    return EventStreamResponse(events, headers=_STREAM_HEADERS)


class EventStreamRouter:
    """Sends a GET of a job's events to the stream if the client accepts text/event-stream.

    Browsers and server-sent-event clients can therefore use either path.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Change the path of such a request."""
        is_get = scope["type"] == "http" and scope["method"] == "GET"
        if is_get and scope["path"].endswith("/events"):
            accept = dict(scope["headers"]).get(b"accept", b"")
            if b"text/event-stream" in accept.lower():
                raw_path = scope["raw_path"] + b"/stream"
                scope = {**scope, "path": f"{scope['path']}/stream", "raw_path": raw_path}
        await self._app(scope, receive, send)


# ---------------------------------------------------------------------- metrics


@router.get("/jobs/{job_id}/metrics", **guard(READ, 404, 422))
def job_metrics(
    job: KnownJob,
    service: TheService,
    names: Annotated[
        str | None,
        Query(
            max_length=NAMES_LENGTH,
            description="Only these metrics, separated by commas; by default all. grad_norm/* "
            "means all whose names begin with grad_norm/.",
        ),
    ] = None,
    after_step: Annotated[
        int, Query(ge=-1, le=1 << 53, description="Only points after this step.")
    ] = -1,
    before_step: Annotated[
        int | None, Query(ge=0, le=1 << 53, description="Only points before this step.")
    ] = None,
    max_points: Annotated[
        int, Query(ge=4, le=8192, description="The most points of each metric.")
    ] = 1000,
) -> wire.MetricsHistory:
    """Show a job's metrics over its steps, one series for each metric.

    A long series is thinned: equal spans of steps each keep their lowest and highest point. With
    before_step the points come from the run's file, which has every step, if this server sees it.
    """
    points = _read_points(service, job, after_step, before_step)
    wanted = [name for name in (names or "").split(",") if name]
    series = []
    for name, found in sorted(_group_series(points).items()):
        if not wanted or any(fnmatchcase(name, each) for each in wanted):
            steps, values = zip(*thin_points(found, max_points), strict=True)
            series.append(
                wire.MetricSeries(name=name, steps=[*steps], values=[*values], points=len(found))
            )
    last_step = points[-1]["step"] if points else None
    return wire.MetricsHistory(series=series, last_step=last_step)


def _read_points(service: Service, job: Job, after: int, before: int | None) -> list[Json]:
    """Read the points of a range from the run's file, else from the store, which thins them."""
    if before is None:
        return service.store.read_metrics(job.id, after)
    settings = service.settings
    found = read_metrics_file(settings.runs, settings.run_dir(job.id), after, before)
    if found is not None:
        return found
    return [each for each in service.store.read_metrics(job.id, after) if each["step"] < before]


def _group_series(points: list[Json]) -> dict[str, list[Point]]:
    """Return every number of the points, by the name of its metric."""
    found: dict[str, list[Point]] = {}
    for point in points:
        for name, value in point.items():
            if name != "step" and isinstance(value, int | float) and not isinstance(value, bool):
                name = RENAMED.get(f"metrics.{name}", name).removeprefix("metrics.")
                found.setdefault(name, []).append((point["step"], float(value)))
    return found


#: Jobs of one answer at most, and the points of each.
MOST_CURVES = 100
CURVE_POINTS = 24


@router.get("/curves", **guard(READ, 422))
def job_curves(
    service: TheService,
    caller: TheCaller,
    jobs: Annotated[
        str,
        Query(
            min_length=1,
            max_length=MOST_CURVES * 31,
            description=f"Ids of jobs, separated by commas; {MOST_CURVES} at most.",
        ),
    ],
) -> wire.JobCurves:
    """Show a few points of the loss of several jobs: the first, the last, and some between them.

    It costs the same for long runs as for short ones, so that a list can show a curve in each row.
    """
    ids = list(dict.fromkeys(each for each in jobs.split(",") if JOB_ID.fullmatch(each)))
    found = service.store.sample_metrics(ids[:MOST_CURVES], caller, CURVE_POINTS)
    curves = []
    for job_id, points in found.items():
        if known := [each for each in points if each.get("loss") is not None]:
            steps, values = ([each[name] for each in known] for name in ("step", "loss"))
            curves.append(wire.JobCurve(job=job_id, steps=steps, values=values))
    return wire.JobCurves(data=curves)


@router.get("/runs", **guard(READ))
def list_runs(service: TheService, caller: TheCaller) -> wire.RunList:
    """List the runs on this server's disk and what they have measured, the newest first.

    Runs of `kd run` belong to no key: an admin alone sees them, or everyone where no key is
    needed.
    """
    found = sort_runs(service.settings.runs, service.store.find_jobs(caller))
    return wire.RunList(data=[wire.RunEntry.model_validate(run.to_json()) for run in found])


# ---------------------------------------------------------------------- log

_LOG: Answers = {
    200: describe_text("The log; empty before the job runs."),
    206: describe_text("The bytes that Range names."),
}


@router.head("/jobs/{job_id}/logs", dependencies=READ, include_in_schema=False)
@router.get(
    "/jobs/{job_id}/logs", response_class=Response, **guard(READ, 404, 416, 422, answers=_LOG)
)
def job_logs(
    request: Request,
    job: KnownJob,
    service: TheService,
    tail: Annotated[
        int | None, Query(ge=1, le=10_000, description="Only this many lines from the end.")
    ] = None,
) -> Response:
    """Download the output of the job's processes.

    Each byte of a secret is replaced by a star, so a Range always names the same bytes.
    """
    log = MaskedLog(service.settings.runs, service.settings.run_dir(job.id) / LOG, service.secrets)
    content = ByteSource(log.size, "text/plain; charset=utf-8", log.read, close=log.close)
    return send_bytes(request, content.skip_to(log.find_tail(tail)) if tail else content)
