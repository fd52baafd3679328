"""The dashboard: a page for people, which lives on the same API as every other client.

GET /                   the page
GET /dashboard/{file}   what it loads

The files are the same for everybody and tell nothing of anybody, so they need no key; what the page then asks for does.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fastapi import FastAPI, Response
from fastapi.responses import FileResponse
from starlette.staticfiles import StaticFiles

FOLDER = Path(__file__).parents[1] / "dashboard"
#: Nothing from elsewhere, nothing inline, and no form that leaves the page: what a name or a log says cannot run.
#: Pictures may be blobs, which the page has fetched with its key.
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' blob:; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
#: Asked for anew each time (and mostly not sent anew), so that a page never mixes the files of two versions.
FRESH = {"Cache-Control": "no-cache"}


class _Files(StaticFiles):
    def file_response(self, *args: Any, **kwargs: Any) -> Response:
        response = super().file_response(*args, **kwargs)
        response.headers.update(FRESH)
        return response


def install(app: FastAPI) -> None:
    """Show the dashboard at / of ``app``."""
    app.mount("/dashboard", _Files(directory=FOLDER), name="dashboard")

    @app.api_route("/", methods=["GET", "HEAD"], include_in_schema=False)
    async def page() -> Response:
        return FileResponse(FOLDER / "index.html", headers={**FRESH, "Content-Security-Policy": POLICY})
