"""The dashboard, which uses the same API as every other client.

GET /                   the dashboard; so is every path of ``VIEWS`` for who accepts text/html
GET /dashboard/{file}   its scripts and styles

The files hold no data of any caller, so they need no key. The requests of the pages need one.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.responses import HTMLResponse
from starlette.datastructures import MutableHeaders
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp, Message, Receive, Scope, Send

#: The paths of the dashboard's views; main.js has the same. Some are paths of the API too, which
#: answers there with JSON to who does not ask for HTML, and below /v1 to all.
VIEWS = re.compile(
    r"/(?:jobs(?:/[\w-]+)?|caches(?:/\w+)?|compare|tokens|new|workers|keys|storage|health)?"
)
#: What stands in a page before a path from the root, which a proxy may have moved below a prefix.
_BASE = "BASE/"
FOLDER = Path(__file__).parents[2] / "dashboard"
PAGE = "index.html"
#: A page may load nothing from other sites, run no inline script, and send no form. The text of a
#: job's name or log can therefore never run. Pictures may be blobs: the page fetched them with its
#: key.
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' blob:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
#: A browser must ask each time whether a file changed, so that it never mixes two versions.
NO_CACHE_HEADERS = {"Cache-Control": "no-cache"}


class _DashboardFiles(StaticFiles):
    def file_response(self, *args: Any, **kwargs: Any) -> Response:
        response = super().file_response(*args, **kwargs)
        response.headers.update(NO_CACHE_HEADERS)
        return response


def mount_dashboard(app: FastAPI) -> None:
    """Serve the dashboard and its files."""
    app.mount("/dashboard", _DashboardFiles(directory=FOLDER), name="dashboard")
    app.add_api_route("/", _send_page, methods=["GET", "HEAD"], include_in_schema=False)


async def _send_page(request: Request) -> Response:
    headers = {**NO_CACHE_HEADERS, "Content-Security-Policy": POLICY}
    way = "../" * request.scope.get(_DEPTH, 0)
    text = (FOLDER / PAGE).read_text(encoding="utf-8").replace(_BASE, way)
    return HTMLResponse(text, headers=headers)


#: The key of a request's scope with the number of folders between its path and the root.
_DEPTH = "potstill.depth"


class ViewRouter:
    """Sends a GET of a view's path to the dashboard if the client accepts text/html."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Change the path of such a request, and say that the answer depends on Accept."""
        path = scope.get("path", "")
        is_read = scope["type"] == "http" and scope["method"] in ("GET", "HEAD")
        if not is_read or not VIEWS.fullmatch(path):
            await self._app(scope, receive, send)
            return
        accept = dict(scope["headers"]).get(b"accept", b"")
        if b"text/html" in accept.lower():
            scope = {**scope, "path": "/", "raw_path": b"/", _DEPTH: path.count("/") - 1}

        async def send_varied(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).add_vary_header("Accept")
            await send(message)

        await self._app(scope, receive, send_varied)
