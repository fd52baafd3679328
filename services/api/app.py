"""The FastAPI application. It reads and writes job records in Redis and knows nothing of training.

The routes, in ``services/api/routes``:

    jobs.py         create, show, list, cancel, pause, resume, retry, clone and delete jobs
    history.py      the events, metrics and log of a job
    files.py        the checkpoints and artifacts of a job
    caches.py       the caches of teachers
    cache_views.py  what a cache holds: histograms, shards, records, and who uses it
    training_files.py  files to train on, which users upload
    accounts.py     what teams use of their quotas, and the audit log
    templates.py    job files to begin with
    operations.py   models, workers, health, Prometheus metrics, version
    dashboard.py    the web pages: the dashboard

Every path of the API exists twice, at / and at /v1. docs/api.md is made from its OpenAPI document.

The way of a request:

    RequestObserver     request id, log line, metrics
    HostOriginGuard     Host and Origin
    ViewRouter          Accept: text/html
    EventStreamRouter   Accept: text/event-stream
    BodyLimit           size of the body, and nesting of its JSON
    route               API key, rate, scope
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator
from types import FrameType
from typing import Any

import anyio.to_thread
import uvicorn
from fastapi import FastAPI
from fastapi.routing import APIRoute

from kd.python.version import read_version
from services.api.answers import problems
from services.api.answers.event_stream import EventHub
from services.api.auditing import Audit
from services.api.guards.authentication import require_safe_bind
from services.api.guards.body_limits import BodyLimit
from services.api.guards.install import add_guards
from services.api.guards.request_observer import RequestObserver
from services.api.openapi import complete_openapi
from services.api.plan_process import PlanProcess
from services.api.reading.process import ReadingProcess
from services.api.routes import (
    accounts,
    cache_views,
    caches,
    dashboard,
    files,
    history,
    jobs,
    operations,
    operator,
    templates,
    training_files,
)
from services.api.service import Service
from services.loops.reconciler import Reconciler
from services.process.descriptors import hush, raise_limit
from services.process.logs import find_secrets
from services.settings import Settings
from services.store.connection import connect_events, connect_redis
from services.store.jobs.store import JobStore
from services.store.key_use import KeyUse
from services.store.queue import make_celery_app
from services.store.training_files import TrainingFiles

#: Requests that may wait for Redis at one time. The next request waits until one of them is done;
#: that takes 2 s if Redis is away.
THREADS = 200
ROUTERS = (
    jobs.router,
    history.router,
    files.router,
    caches.router,
    cache_views.router,
    training_files.router,
    accounts.router,
    templates.router,
    operations.router,
    operator.router,
)


def create_app(settings: Settings) -> FastAPI:
    """Build the application; ``settings.redis_url`` must be set."""
    app = FastAPI(
        title="Potstill",
        summary="Knowledge distillation as a service.",
        version=read_version(),
        lifespan=_lifespan,
        redirect_slashes=False,
        # FastAPI's pages load scripts from other hosts.
        docs_url=None,
        redoc_url=None,
    )
    service = app.state.service = _make_service(settings)
    routes = [route for router in ROUTERS for route in router.routes]
    problems.add_error_handlers(app, (each for each in routes if isinstance(each, APIRoute)))
    for router in ROUTERS:
        app.include_router(router)
        # The same paths once more; in the document they would only double every operation.
        app.include_router(router, prefix="/v1", include_in_schema=False)
    dashboard.mount_dashboard(app)
    # The middleware that is added last runs first.
    app.add_middleware(BodyLimit)
    app.add_middleware(history.EventStreamRouter)
    app.add_middleware(dashboard.ViewRouter)
    add_guards(app, settings, service.audit, service.key_use)
    app.add_middleware(RequestObserver, request_metrics=service.request_metrics)
    complete_openapi(app, with_keys=settings.api_keys_file is not None)
    return app


def _make_service(settings: Settings) -> Service:
    url = settings.redis_url
    assert url is not None
    events = connect_events(url)
    client = connect_redis(url)
    return Service(
        settings=settings,
        store=JobStore(client, settings.max_attempts, settings.home),
        key_use=KeyUse(client),
        queue=make_celery_app(url, socket_timeout=2.0),
        events=events,
        event_hub=EventHub(events),
        plans=PlanProcess(settings),
        reading=ReadingProcess(settings),
        audit=Audit(settings),
        files=TrainingFiles(settings.files),
        secrets=find_secrets(settings),
    )


@contextlib.asynccontextmanager
async def _lifespan(app: FastAPI) -> AsyncIterator[None]:
    service: Service = app.state.service
    anyio.to_thread.current_default_thread_limiter().total_tokens = THREADS
    # Every copy of the API runs a reconciler; they do not disturb each other.
    loop = Reconciler(service.store, service.queue, service.settings)
    reconciler = asyncio.create_task(loop.run())
    yield
    reconciler.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await reconciler
    service.plans.close()
    service.reading.close()
    service.queue.close()
    service.store.redis.close()
    app.state.limiter.close()
    await service.events.aclose()


class Server(uvicorn.Server):
    """Ends open event streams at the first signal, because they would delay the shutdown."""

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Stop; uvicorn calls this for SIGINT and SIGTERM."""
        app: Any = self.config.app
        app.state.service.stopping = True
        # The second signal does not wait. Uvicorn's own handler would re-raise the signal at the
        # end, and the process would not exit with code 0.
        self.force_exit = self.should_exit
        self.should_exit = True


def serve_api(settings: Settings) -> None:
    """Serve requests until SIGTERM or SIGINT; the caller sets up the log."""
    require_safe_bind(settings)
    raise_limit()
    for handler in logging.getLogger().handlers:
        handler.addFilter(hush)
    config = uvicorn.Config(
        create_app(settings),
        host=settings.host,
        port=settings.port,
        # Longer than clients (5 s) and proxies (60 s) keep an idle connection: if the server closed
        # first, a request on its way would be lost.
        timeout_keep_alive=75,
        timeout_graceful_shutdown=3,
        # So often the loop tries to accept at once, also where no descriptor is left.
        backlog=128,
        # RequestObserver writes the log of requests, and services.process.logs formats it.
        access_log=False,
        log_config=None,
        server_header=False,
    )
    Server(config).run()
