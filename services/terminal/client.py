"""The client of the command line: the server and key of the settings, and names of jobs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import islice

from cache.json_object import Json
from kd.client.client import Client
from kd.client.errors import Refused
from kd.client.wire.jobs import Job
from kd.client.wire.view import View
from services.terminal.console import err, make_settings

#: How long a server may be away while a job is followed, in seconds; other commands do not wait.
FOLLOW_PATIENCE = 120.0
#: Characters of a whole job id; a shorter one is the beginning of an id.
ID_LENGTH = len("job_") + 26


def connect(server: str | None = None) -> Client:
    """Return a client of ``server``, or of the one in the settings."""
    settings = make_settings()
    return make_client(server or settings.server, settings.api_key)


def make_client(server: str, key: str | None) -> Client:
    """Return a client that does not wait for a server, and says that a key expires soon."""
    text = "Your API key expires at {}: ask the operator for a new one (`kd keys new`)."
    return Client(server, key, patience=0.0, on_expiry=lambda end: err.print(text.format(end)))


def find_job(client: Client, name: str) -> Job:
    """Return the job whose id is ``name`` or begins with it; the newest one for ``last``.

    Raises ``Refused`` if no job or several jobs match. An empty ``name``, as of a variable of a
    shell that is not set, matches none: else it would name the only job of a service.
    """
    if name in ("", "job_"):
        raise Refused(404, "The name of the job is empty.", "Give an id: see `kd jobs ls`.")
    full = name if name.startswith("job_") else f"job_{name}"
    if len(full) == ID_LENGTH:
        return client.job(full)
    if name == "last":
        found = list(islice(client.jobs(), 1))
    else:
        found = [job for job in client.jobs() if job.id.startswith(full)]
    if len(found) != 1:
        ids = ", ".join(job.id for job in found[:5])
        detail = f"{name!r} names {len(found)} jobs" + (f": {ids}." if ids else ".")
        raise Refused(404, detail, "See `kd jobs ls`.")
    return found[0]


def read_pages(client: Client, path: str, query: Mapping[str, str | int | None]) -> Iterator[Json]:
    """Yield what a list of the API holds, page by page, as the JSON that the server sent."""
    cursor = None
    while True:
        page = client.request("GET", path, query={**query, "cursor": cursor})
        yield from page["data"]
        cursor = page["next_cursor"]
        if cursor is None:
            return


def dump(view: View) -> Json:
    """Return a model of the wire as the JSON that the server sent."""
    return view.model_dump(mode="json")
