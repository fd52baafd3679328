"""An API of a few routes behind the real keys, limits and guard, served by uvicorn on a port of its own."""

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

from services.api import guard, problems
from services.api.keys import authenticate, hold_stream, require
from services.api.limits import Hold
from services.embedded import free_port
from services.jobs import Caller
from services.settings import Settings
from tests.harness import wait_until

TheCaller = Annotated[Caller, Depends(authenticate)]
TheHold = Annotated[Hold, Depends(hold_stream)]
Anything = Annotated[Any, Body()]


def make_door(settings: Settings) -> FastAPI:
    """The app; ``app.state.limiter`` and ``app.state.keys`` are those of the real one."""
    app = FastAPI()

    @app.get("/whoami")
    def whoami(caller: TheCaller) -> dict[str, Any]:
        return {"name": caller.name, "sees_all": caller.sees_all}

    @app.post("/things", dependencies=[Depends(require("write"))])
    def make(thing: Anything) -> Any:
        return thing

    @app.get("/workers", dependencies=[Depends(require("admin"))])
    def workers() -> list[str]:
        return []

    @app.get("/healthz")
    def healthz() -> dict[str, str]:
        return {"status": "ok"}

    @app.get("/page")
    def page() -> HTMLResponse:
        return HTMLResponse("<p>hello</p>")

    @app.get("/stream", response_class=EventSourceResponse)
    async def stream(hold: TheHold) -> AsyncIterator[ServerSentEvent]:
        while not hold.lost:
            yield ServerSentEvent(event="tick", data={})
            await anyio.sleep(0.05)

    problems.install(app, [])
    app.add_middleware(problems.BodyLimit, limit=1 << 20)
    guard.install(app, settings)
    return app


@contextmanager
def serving(app: FastAPI, lifespan: Literal["on", "off"] = "off") -> Iterator[httpx.Client]:
    """A client of the app, which uvicorn serves in a thread until the block ends."""
    port = free_port()
    config = uvicorn.Config(app, port=port, log_config=None, timeout_graceful_shutdown=1, lifespan=lifespan)
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, name="door")
    thread.start()
    try:
        wait_until(lambda: server.started)
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=10, trust_env=False) as client:
            yield client
    finally:
        server.should_exit = True
        thread.join()
        app.state.limiter.close()


def bearer(key: str) -> dict[str, str]:
    """The header that shows a key."""
    return {"Authorization": f"Bearer {key}"}


def problem(answer: httpx.Response, status: int) -> dict[str, Any]:
    """The problem document that ``answer`` must be."""
    assert answer.status_code == status, answer.text
    assert answer.headers["content-type"] == "application/problem+json"
    document: dict[str, Any] = answer.json()
    assert document["status"] == status
    assert document["detail"] and document["remedy"]
    return document
