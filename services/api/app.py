"""The HTTP door: take jobs, tell how they go. It knows the record in Redis and nothing of training.

POST /jobs                  take a job                202, Location; with ?dry_run=true an estimate, 200
GET  /jobs                  newest first, by cursor
GET  /jobs/{id}             how it goes
POST /jobs/{id}/cancel      ask it to stop
GET  /jobs/{id}/events      what happens to it        server-sent events, resumable
GET  /caches                what was kept of teachers
GET  /caches/{fingerprint}  one of them, and how close it is to its teacher
GET  /healthz, /readyz      alive; able to take jobs
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import contextlib
import re
from collections.abc import AsyncIterator
from dataclasses import asdict, dataclass
from types import FrameType
from typing import Annotated, Any

import redis.asyncio
import uvicorn
from celery import Celery
from fastapi import APIRouter, Depends, FastAPI, Header, Query, Request, Response
from fastapi.responses import JSONResponse
from fastapi.sse import EventSourceResponse, ServerSentEvent

from kd.config.job import JobConfig
from kd.errors import ConfigError
from kd.estimate import estimate_by_table
from kd.validate import check_inputs
from services.api import problems
from services.api.events import event_client, follow
from services.api.problems import ApiProblem, responses
from services.jobs import JobStore, connect
from services.queue import celery_app, publish
from services.reconciler import Reconciler
from services.schemas import (
    CacheDetail,
    CacheEntry,
    CacheList,
    Fidelity,
    Health,
    Job,
    JobEstimate,
    JobList,
    Kind,
    Readiness,
    Status,
)
from services.search import service_problems
from services.settings import Settings

BODY_LIMIT_BYTES = 1 << 20
JOB_ID = re.compile(r"job_[0-9a-z]{26}")
FINGERPRINT = re.compile(r"[0-9a-f]{32}")

router = APIRouter()


@dataclass
class Service:
    """What the routes work with."""

    settings: Settings
    store: JobStore
    queue: Celery
    events: redis.asyncio.Redis
    stopping: bool = False


def service_of(request: Request) -> Service:
    """The service behind this request."""
    service: Service = request.app.state.service
    return service


TheService = Annotated[Service, Depends(service_of)]


def known_job(job_id: str, service: TheService) -> Job:
    """The job that the path names, or 404."""
    job = service.store.get(job_id) if JOB_ID.fullmatch(job_id) else None
    if job is None:
        raise ApiProblem(404, f"There is no job {job_id}.", "GET /jobs lists the jobs there are.")
    return job


KnownJob = Annotated[Job, Depends(known_job)]


def create_app(settings: Settings) -> FastAPI:
    """The API; ``settings.redis_url`` must be set."""
    assert settings.redis_url is not None
    app = FastAPI(title="Potstill", summary="Knowledge distillation as a service.", version="1", lifespan=_lifespan)
    url = settings.redis_url
    app.state.service = Service(
        settings, JobStore(connect(url)), celery_app(url, socket_timeout=2.0), event_client(url)
    )
    app.add_middleware(problems.BodyLimit, limit=BODY_LIMIT_BYTES)
    problems.install(app)
    app.include_router(router)
    problems.describe(app)
    return app


@contextlib.asynccontextmanager
async def _lifespan(app: FastAPI) -> AsyncIterator[None]:
    service: Service = app.state.service
    reconciler = asyncio.create_task(Reconciler(service.store, service.queue, service.settings).run())
    yield
    reconciler.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await reconciler
    service.queue.close()
    service.store.redis.close()
    await service.events.aclose()


_ESTIMATED: dict[int | str, dict[str, Any]] = {200: {"model": JobEstimate, "description": "What a dry run found."}}


@router.post("/jobs", status_code=202, response_model=Job, responses=_ESTIMATED | responses(400, 413, 422, 503))
def create_job(
    config: JobConfig,
    response: Response,
    service: TheService,
    idempotency_key: Annotated[str | None, Header(min_length=1, max_length=255)] = None,
    dry_run: Annotated[bool, Query(description="Only say what the job's capture will need; take no job.")] = False,
) -> Job | Response:
    """Take a job. The same Idempotency-Key with the same body gives the same job for a day."""
    found = check_inputs(config, service.settings.root, service.settings.home)
    if found := [*found, *service_problems(config)]:
        raise ConfigError(found)
    if dry_run:
        estimate = estimate_by_table(config, service.settings.root, service.settings.home)
        return JSONResponse(JobEstimate(**estimate.to_json()).model_dump())
    created = service.store.create(config, idempotency_key)
    if created.outcome == "conflict":
        raise ApiProblem(
            422, f"This Idempotency-Key made {created.id} from another body.", "Use a new key.", "key-reused"
        )
    if created.outcome == "created":
        publish(service.queue, created.id, config.stages[0])
    else:
        response.headers["Idempotent-Replayed"] = "true"
    response.headers["Location"] = f"/jobs/{created.id}"
    return known_job(created.id, service)


@router.get("/jobs", responses=responses(422, 503))
def list_jobs(
    service: TheService,
    limit: Annotated[int, Query(ge=1, le=100)] = 20,
    cursor: Annotated[str | None, Query(description="next_cursor of the page before.")] = None,
    status: Status | None = None,
    kind: Kind | None = None,
) -> JobList:
    """Jobs, newest first."""
    try:
        jobs = service.store.page(limit + 1, _decode(cursor), status, kind)
    except KeyError:
        raise ApiProblem(
            422, f"{cursor!r} is not a cursor of this list.", "Begin again without one.", "bad-cursor"
        ) from None
    more = len(jobs) > limit
    return JobList(data=jobs[:limit], has_more=more, next_cursor=_encode(jobs[limit - 1].id) if more else None)


@router.get("/jobs/{job_id}", responses=responses(404, 422, 503))
def get_job(job: KnownJob) -> Job:
    """How a job goes."""
    return job


@router.post("/jobs/{job_id}/cancel", status_code=202, responses=responses(404, 422, 503))
def cancel_job(job: KnownJob, service: TheService) -> Job:
    """Ask a job to stop: a queued one stops at once, a running one saves first; an ended one stays as it is."""
    service.store.cancel(job.id)
    return known_job(job.id, service)


@router.get("/jobs/{job_id}/events", response_class=EventSourceResponse, responses=responses(404, 422, 503))
async def job_events(
    job: KnownJob,
    service: TheService,
    last_event_id: Annotated[str | None, Header(pattern=r"^\d{1,18}(-\d{1,18})?$")] = None,
) -> AsyncIterator[ServerSentEvent]:
    """Everything that happens to a job, from its start or from after Last-Event-ID; ends with the job."""
    async for event in follow(service.events, job.id, last_event_id or "0", lambda: service.stopping):
        yield event


@router.get("/caches", responses=responses(503))
def list_caches(service: TheService) -> CacheList:
    """What was kept of teachers, newest first."""
    from cache.store import list_caches as caches_in

    return CacheList(data=[CacheEntry(**summary.to_json()) for summary in caches_in(service.settings.caches)])


@router.get("/caches/{fingerprint}", responses=responses(404, 422, 503))
def get_cache(fingerprint: str, service: TheService) -> CacheDetail:
    """What one cache holds and was made from, and how close it is to its teacher."""
    from cache.store import read_manifest, summarise

    folder = service.settings.caches / fingerprint
    if not FINGERPRINT.fullmatch(fingerprint) or not folder.is_dir():
        raise ApiProblem(404, f"There is no cache {fingerprint}.", "GET /caches lists the caches there are.")
    summary = summarise(folder)
    if not summary.complete:
        return CacheDetail(**summary.to_json())
    manifest = read_manifest(folder)
    rows = [Fidelity(**asdict(row)) for row in manifest.fidelity]
    return CacheDetail(**summary.to_json(), identity=manifest.identity.to_json(), fidelity=rows)


@router.get("/healthz")
def healthz() -> Health:
    """The process is alive."""
    return Health()


@router.get("/readyz", responses=responses(503))
def readyz(service: TheService) -> Readiness:
    """The job store can be written to."""
    service.store.redis.set("kd:ready", "1", ex=60)
    return Readiness(workers=len(service.store.workers()))


def _encode(job_id: str) -> str:
    return base64.urlsafe_b64encode(job_id.encode()).decode().rstrip("=")


def _decode(cursor: str | None) -> str | None:
    if cursor is None:
        return None
    try:
        return base64.urlsafe_b64decode(cursor + "=" * (-len(cursor) % 4)).decode()
    except (binascii.Error, ValueError):
        raise KeyError(cursor) from None


class Server(uvicorn.Server):
    """Ends open event streams with the first signal; they would hold up the shutdown."""

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Called by uvicorn for SIGINT and SIGTERM."""
        app: Any = self.config.app
        app.state.service.stopping = True
        self.force_exit = self.should_exit  # the second one does not wait; uvicorn's own would end with the signal
        self.should_exit = True


def serve(settings: Settings) -> None:
    """Answer requests until SIGTERM or SIGINT."""
    app = create_app(settings)
    config = uvicorn.Config(app, host=settings.host, port=settings.port, timeout_graceful_shutdown=3, access_log=False)
    Server(config).run()
