"""The dashboard and the page of the API, which use the same API as every other client.

GET /                   the dashboard
GET /docs               the page of the API: its operations, each with a form that sends it
GET /dashboard/{file}   its scripts and styles

The files hold no data of any caller, so they need no key. The requests of the pages need one.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

from fastapi import FastAPI, Response
from fastapi.responses import FileResponse
from starlette.staticfiles import StaticFiles

FOLDER = Path(__file__).parents[2] / "dashboard"
#: The file of each page.
PAGES = {"/": "index.html", "/docs": "reference.html"}
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
    """Serve the pages of ``app`` and their files."""
    app.mount("/dashboard", _DashboardFiles(directory=FOLDER), name="dashboard")

    for path, name in PAGES.items():
        app.add_api_route(
            path, partial(_send_page, name), methods=["GET", "HEAD"], include_in_schema=False
        )


async def _send_page(name: str) -> Response:
    headers = {**NO_CACHE_HEADERS, "Content-Security-Policy": POLICY}
    return FileResponse(FOLDER / name, headers=headers)
