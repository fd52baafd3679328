"""A small API behind the real keys, limits and guards, served by uvicorn on a free port."""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from typing import Annotated, Any, Literal

import anyio
import httpx
import uvicorn
from fastapi import Body, Depends, FastAPI
from fastapi.responses import HTMLResponse
from fastapi.sse import EventSourceResponse, ServerSentEvent

from bench.support.waiting import wait_until
from services.api.answers import problems
from services.api.auditing import Audit
from services.api.guards.authentication import authenticate, hold_stream, require_scope
from services.api.guards.body_limits import BodyLimit
from services.api.guards.install import add_guards
from services.api.guards.rate_limits import StreamLease
from services.settings import Settings
from services.store.callers import Caller
from services.store.connection import connect_redis
from services.store.embedded import find_free_port
from services.store.key_use import KeyUse

TheCaller = Annotated[Caller, Depends(authenticate)]
TheLease = Annotated[StreamLease, Depends(hold_stream)]
Anything = Annotated[Any, Body()]


def make_door(settings: Settings) -> FastAPI:
    """Return the app; it has the ``state.limiter`` and ``state.keys`` of the real one."""
    app = FastAPI()

    @app.get("/whoami")
    def whoami(caller: TheCaller) -> dict[str, Any]:
        return {"name": caller.name, "sees_all": caller.sees_all}

    @app.post("/things", dependencies=[Depends(require_scope("write"))])
    def make(thing: Anything) -> Any:
        return thing

    @app.get("/workers", dependencies=[Depends(require_scope("admin"))])
    def workers() -> list[str]:
        return []

    @app.get("/healthz")
    def healthz() -> dict[str, str]:
        return {"status": "ok"}

    @app.get("/page")
    def page() -> HTMLResponse:
        return HTMLResponse("<p>hello</p>")

    @app.get("/stream", response_class=EventSourceResponse)
    async def stream(lease: TheLease) -> AsyncIterator[ServerSentEvent]:
        while not lease.lost:
            yield ServerSentEvent(event="tick", data={})
            await anyio.sleep(0.05)

    problems.add_error_handlers(app, [])
    app.add_middleware(BodyLimit)
    add_guards(app, settings, Audit(settings), KeyUse(connect_redis(str(settings.redis_url))))
    return app


@contextmanager
def serving(app: FastAPI, lifespan: Literal["on", "off"] = "off") -> Iterator[httpx.Client]:
    """Serve the app in a thread until the block ends; yield a client for it."""
    port = find_free_port()
    config = uvicorn.Config(
        app, port=port, log_config=None, timeout_graceful_shutdown=1, lifespan=lifespan
    )
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, name="door")
    thread.start()
    try:
        wait_until(lambda: server.started)
        with httpx.Client(
            base_url=f"http://127.0.0.1:{port}", timeout=60, trust_env=False
        ) as client:
            yield client
    finally:
        server.should_exit = True
        thread.join()
        app.state.limiter.close()


def bearer(key: str) -> dict[str, str]:
    """Return the header that carries the key."""
    return {"Authorization": f"Bearer {key}"}


def problem(answer: httpx.Response, status: int) -> dict[str, Any]:
    """Check that ``answer`` is a problem document with this status, and return the document."""
    assert answer.status_code == status, answer.text
    assert answer.headers["content-type"] == "application/problem+json"
    document: dict[str, Any] = answer.json()
    assert document["status"] == status
    assert document["detail"] and document["remedy"]
    return document
