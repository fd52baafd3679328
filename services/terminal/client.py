"""The command line's view of a server: its answers as Python values, its refusals as errors."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping
from itertools import islice
from typing import Any, TypeVar
from urllib.parse import quote

import httpx

from cache.errors import PotstillError
from services.schemas import TERMINAL

#: How long a server may be away while a job is followed, and the pause before it is asked again.
PATIENCE_SECONDS, AGAIN_SECONDS = 120.0, 0.5
RANGE_NOT_SATISFIABLE, SERVER_ERROR = 416, 500
ID_LENGTH = len("job_") + 26
T = TypeVar("T")


class Unreachable(PotstillError):
    """No server answers."""

    type = "unreachable"


class Refused(PotstillError):
    """The server refuses a request; ``status`` is HTTP's."""

    type = "refused"

    def __init__(self, status: int, detail: str, remedy: str = "") -> None:
        super().__init__(detail, remedy)
        self.status = status


class Client:
    """Talks to one server, as the owner of ``key``."""

    def __init__(self, server: str, key: str | None = None) -> None:
        self._server = server
        local = any(host in server for host in ("127.0.0.1", "localhost"))  # never through a proxy
        self._http = httpx.Client(
            base_url=server,
            timeout=httpx.Timeout(10, read=30),
            trust_env=not local,
            headers={"Authorization": f"Bearer {key}"} if key else {},
        )

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self._http.close()

    def get(self, path: str, **query: Any) -> Any:
        """The JSON at ``path``."""
        return self._call("GET", path, params={name: value for name, value in query.items() if value is not None})

    def post(self, path: str, body: Any = None) -> Any:
        """The JSON that a POST answers with."""
        return self._call("POST", path, json=body)

    def delete(self, path: str, **query: Any) -> None:
        """Delete what is at ``path``."""
        self._call("DELETE", path, params=query)

    def bytes_from(self, path: str, start: int) -> bytes:
        """What follows byte ``start`` of a file that grows; empty where nothing does."""
        answer = self._answer("GET", path, headers={"Range": f"bytes={start}-"})
        return b"" if answer.status_code == RANGE_NOT_SATISFIABLE else _checked(answer).content

    def text(self, path: str, **query: Any) -> str:
        """The text at ``path``."""
        return _checked(self._answer("GET", path, params=query)).text

    def _call(self, method: str, path: str, **options: Any) -> Any:
        answer = _checked(self._answer(method, path, **options))
        return answer.json() if answer.content else None

    def _answer(self, method: str, path: str, **options: Any) -> httpx.Response:
        try:
            return self._http.request(method, path, **options)
        except httpx.TransportError as error:
            raise self._unreachable(error) from None

    def _unreachable(self, error: Exception) -> Unreachable:
        return Unreachable(
            f"No server answers at {self._server}: {error}.",
            "Start one with `kd up`, or name another with --server or KD_SERVER.",
        )

    def patiently(self, ask: Callable[[], T]) -> T:
        """What ``ask`` returns; a server that is away is asked again until it has been so for PATIENCE_SECONDS."""
        deadline = time.monotonic() + PATIENCE_SECONDS
        while True:
            try:
                return ask()
            except (Unreachable, Refused) as error:
                if time.monotonic() > deadline or not _passes(error):
                    raise
            time.sleep(AGAIN_SECONDS)

    def job(self, name: str) -> dict[str, Any]:
        """The job with that id, with the only id that begins so, or the newest one for ``last``."""
        full = name if name.startswith("job_") else f"job_{name}"
        if len(full) == ID_LENGTH:
            return dict(self.get("/jobs/" + quote(full, safe="")))
        every = self.jobs()
        found = list(islice(every, 1)) if name == "last" else [job for job in every if job["id"].startswith(full)]
        if len(found) != 1:
            ids = ", ".join(job["id"] for job in found[:5])
            raise Refused(404, f"{name!r} names {len(found)} jobs" + (f": {ids}." if ids else "."), "See `kd jobs ls`.")
        return found[0]

    def jobs(self, **filters: Any) -> Iterator[dict[str, Any]]:
        """Every job, newest first."""
        cursor = None
        while True:
            page = self.get("/jobs", limit=100, cursor=cursor, **filters)
            yield from page["data"]
            cursor = page["next_cursor"]
            if cursor is None:
                return

    def events(self, job_id: str) -> Iterator[tuple[str, dict[str, Any]]]:
        """Type and data of everything that happens to a job until it ends; goes on after a lost connection."""
        last, deadline = None, time.monotonic() + PATIENCE_SECONDS
        while True:
            try:
                for event in self._stream(job_id, last):
                    last, deadline = event["id"], time.monotonic() + PATIENCE_SECONDS
                    data = json.loads(event["data"])
                    yield event["event"], data
                    if event["event"] == "status" and data["status"] in TERMINAL:
                        return
                job = self.get(f"/jobs/{job_id}")  # the stream of an old job has no events left
                if job["status"] in TERMINAL:
                    yield "status", job
                    return
            except (httpx.TransportError, Unreachable, Refused) as error:
                if time.monotonic() > deadline or not _passes(error):
                    raise self._unreachable(error) if isinstance(error, httpx.TransportError) else error from None
            time.sleep(AGAIN_SECONDS)

    def _stream(self, job_id: str, last: str | None) -> Iterator[dict[str, str]]:
        headers = {"Accept": "text/event-stream"} | ({"Last-Event-ID": last} if last else {})
        with self._http.stream("GET", f"/jobs/{job_id}/events/stream", headers=headers) as answer:
            if not answer.is_success:
                answer.read()
                _checked(answer)
            yield from _parse(answer.iter_lines())


def _parse(lines: Iterator[str]) -> Iterator[dict[str, str]]:
    """Server-sent events: fields one a line, an empty line after each event, comments after a colon."""
    event: dict[str, str] = {}
    for line in lines:
        name, _, value = line.partition(":")
        if name:
            event[name] = value.removeprefix(" ")
        elif not line and "data" in event:
            yield event
            event = {}


def _passes(error: Exception) -> bool:
    """Whether the server may only be away: a restart, or a Redis that does not answer it."""
    return not isinstance(error, Refused) or error.status >= SERVER_ERROR


def _checked(answer: httpx.Response) -> httpx.Response:
    """The answer, where it is one; raises ``Refused``."""
    if answer.is_success:
        return answer
    document: Mapping[str, Any] = {}
    if answer.headers.get("content-type", "").startswith("application/problem+json"):
        document = answer.json()
    detail = document.get("detail") or f"The server answers {answer.status_code} {answer.reason_phrase}."
    raise Refused(answer.status_code, detail, document.get("remedy") or "")
