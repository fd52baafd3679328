"""The HTTP door, put together: take jobs, tell how they go. It knows the record in Redis and nothing of training.

jobs.py        take a job, tell how it goes, cancel, pause, resume, retry, clone, delete
history.py     its events, metrics and log           files.py        its checkpoints and artifacts
caches.py      what was kept of teachers             operations.py   models, workers, health, numbers, version
dashboard.py   the page for people

Every path of the API is there twice, at / and at /v1. docs/api.md is made from the OpenAPI document of all this.

request -> Observer (id, log, numbers) -> Guard (host, origin) -> DepthLimit -> BodyLimit -> route: key, rate, scope
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from importlib.metadata import version
from types import FrameType
from typing import Any

import anyio.to_thread
import uvicorn
from fastapi import FastAPI
from fastapi.routing import APIRoute

from services.api import caches, dashboard, files, guard, history, jobs, operations, problems
from services.api.events import event_client
from services.api.keys import require_safe_bind
from services.api.observer import Observer
from services.api.openapi import describe
from services.api.service import Service
from services.jobs import JobStore, connect
from services.logs import literals
from services.queue import celery_app
from services.reconciler import Reconciler
from services.settings import Settings

#: Requests that may wait for Redis at a time; the next one waits for one of them, which takes 2 s where Redis is away.
THREADS = 200
ROUTERS = (jobs.router, history.router, files.router, caches.router, operations.router)


def create_app(settings: Settings) -> FastAPI:
    """The API; ``settings.redis_url`` must be set."""
    app = FastAPI(
        title="Potstill",
        summary="Knowledge distillation as a service.",
        version=version("potstill"),
        lifespan=_lifespan,
        redirect_slashes=False,
        **_pages(settings),
    )
    service = app.state.service = _service(settings)
    problems.install(app, [route for router in ROUTERS for route in router.routes if isinstance(route, APIRoute)])
    for router in ROUTERS:
        app.include_router(router)
        app.include_router(router, prefix="/v1", include_in_schema=False)
    dashboard.install(app)
    app.add_middleware(problems.BodyLimit, limit=problems.BODY_BYTES)
    app.add_middleware(history.StreamWhereAsked)
    guard.install(app, settings)
    app.add_middleware(Observer, tally=service.tally)
    describe(app, with_keys=settings.api_keys_file is not None)
    return app


def _pages(settings: Settings) -> dict[str, Any]:
    """Pages for people are shown where nobody else is: without keys the API answers to this host alone."""
    return {} if settings.api_keys_file is None else {"docs_url": None, "redoc_url": None}


def _service(settings: Settings) -> Service:
    url = settings.redis_url
    assert url is not None
    return Service(
        settings=settings,
        store=JobStore(connect(url), settings.max_attempts),
        queue=celery_app(url, socket_timeout=2.0),
        events=event_client(url),
        secrets=literals(settings),
    )


@contextlib.asynccontextmanager
async def _lifespan(app: FastAPI) -> AsyncIterator[None]:
    service: Service = app.state.service
    anyio.to_thread.current_default_thread_limiter().total_tokens = THREADS
    reconciler = asyncio.create_task(Reconciler(service.store, service.queue, service.settings).run())
    yield
    reconciler.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await reconciler
    service.queue.close()
    service.store.redis.close()
    app.state.limiter.close()
    await service.events.aclose()


class Server(uvicorn.Server):
    """Ends open event streams with the first signal; they would hold up the shutdown."""

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Called by uvicorn for SIGINT and SIGTERM."""
        app: Any = self.config.app
        app.state.service.stopping = True
        self.force_exit = self.should_exit  # the second one does not wait; uvicorn's own would end with the signal
        self.should_exit = True


def serve(settings: Settings) -> None:
    """Answer requests until SIGTERM or SIGINT; the log and the traces are the caller's to set up."""
    require_safe_bind(settings)
    config = uvicorn.Config(
        create_app(settings),
        host=settings.host,
        port=settings.port,
        timeout_graceful_shutdown=3,
        access_log=False,
        log_config=None,
        server_header=False,
    )
    Server(config).run()
