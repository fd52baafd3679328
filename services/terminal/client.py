"""The HTTP client of the command line: answers become Python values, refusals become errors."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping
from itertools import islice
from typing import Any, TypeVar
from urllib.parse import quote

import httpx

from cache.errors import PotstillError
from kd.client.wire.jobs import TERMINAL_STATUSES
from services.terminal.console import err

#: How long a server may be away while a job is followed.
PATIENCE_SECONDS = 120.0
#: The pause before a server that was away is asked again.
RETRY_SECONDS = 0.5
RANGE_NOT_SATISFIABLE = 416
SERVER_ERROR = 500
#: Characters of a whole job id; a shorter one is the beginning of an id.
ID_LENGTH = len("job_") + 26
Result = TypeVar("Result")


class Unreachable(PotstillError):
    """No server answers."""

    type = "unreachable"


class Refused(PotstillError):
    """The server refuses a request; ``status`` is the HTTP status."""

    type = "refused"

    def __init__(self, status: int, detail: str, remedy: str = "") -> None:
        super().__init__(detail, remedy)
        self.status = status


class Client:
    """Sends requests to one server, as the owner of ``key``."""

    def __init__(self, server: str, key: str | None = None) -> None:
        self._server = server
        self._warned = False
        # A proxy could not reach a server on this machine, so its variables are ignored then.
        local = any(host in server for host in ("127.0.0.1", "localhost"))
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
        """Return the JSON at ``path``; a query value of None is left out."""
        return self._call(
            "GET", path, params={name: value for name, value in query.items() if value is not None}
        )

    def post(self, path: str, body: Any = None) -> Any:
        """Post ``body`` as JSON; return the JSON of the answer."""
        return self._call("POST", path, json=body)

    def delete(self, path: str, **query: Any) -> None:
        """Send a DELETE of ``path``."""
        self._call("DELETE", path, params=query)

    def get_bytes(self, path: str, start: int) -> bytes:
        """Return the bytes from ``start`` on of a file that grows; empty if there are none yet."""
        answer = self._request("GET", path, headers={"Range": f"bytes={start}-"})
        return (
            b"" if answer.status_code == RANGE_NOT_SATISFIABLE else _require_success(answer).content
        )

    def get_text(self, path: str, **query: Any) -> str:
        """Return the text at ``path``."""
        return _require_success(self._request("GET", path, params=query)).text

    def _call(self, method: str, path: str, **options: Any) -> Any:
        answer = _require_success(self._request(method, path, **options))
        return answer.json() if answer.content else None

    def _request(self, method: str, path: str, **options: Any) -> httpx.Response:
        try:
            answer = self._http.request(method, path, **options)
            self._warn_of_expiry(answer.headers.get("Potstill-Key-Expires"))
            return answer
        except httpx.TransportError as error:
            raise self._make_unreachable(error) from None

    def _warn_of_expiry(self, end: str | None) -> None:
        """Say once that the key will soon be refused."""
        if end is not None and not self._warned:
            self._warned = True
            err.print(
                f"Your API key expires at {end}: ask the operator for a new one (`kd keys new`)."
            )

    def _make_unreachable(self, error: Exception) -> Unreachable:
        return Unreachable(
            f"No server answers at {self._server}: {error}.",
            "Start one with `kd up`, or name another with --server or KD_SERVER.",
        )

    def call_patiently(self, ask: Callable[[], Result]) -> Result:
        """Return what ``ask`` returns.

        If the server is away, ``ask`` is called again for up to ``PATIENCE_SECONDS``.
        """
        deadline = time.monotonic() + PATIENCE_SECONDS
        while True:
            try:
                return ask()
            except (Unreachable, Refused) as error:
                if time.monotonic() > deadline or not _is_transient(error):
                    raise
            time.sleep(RETRY_SECONDS)

    def find_job(self, name: str) -> dict[str, Any]:
        """Return the job whose id is ``name`` or begins with it; the newest one for ``last``.

        Raises ``Refused`` if no job or several jobs match.
        """
        full = name if name.startswith("job_") else f"job_{name}"
        if len(full) == ID_LENGTH:
            return dict(self.get("/jobs/" + quote(full, safe="")))
        every = self.list_jobs()
        found = (
            list(islice(every, 1))
            if name == "last"
            else [job for job in every if job["id"].startswith(full)]
        )
        if len(found) != 1:
            ids = ", ".join(job["id"] for job in found[:5])
            raise Refused(
                404,
                f"{name!r} names {len(found)} jobs" + (f": {ids}." if ids else "."),
                "See `kd jobs ls`.",
            )
        return found[0]

    def list_jobs(self, **filters: Any) -> Iterator[dict[str, Any]]:
        """Yield every job, newest first."""
        cursor = None
        while True:
            page = self.get("/jobs", limit=100, cursor=cursor, **filters)
            yield from page["data"]
            cursor = page["next_cursor"]
            if cursor is None:
                return

    def follow_events(self, job_id: str) -> Iterator[tuple[str, dict[str, Any]]]:
        """Yield the type and the data of a job's events until it ends.

        After a lost connection the stream continues after the last event.
        """
        last = None
        deadline = time.monotonic() + PATIENCE_SECONDS
        while True:
            try:
                for event in self._stream(job_id, last):
                    last = event["id"]
                    deadline = time.monotonic() + PATIENCE_SECONDS
                    data = json.loads(event["data"])
                    yield event["event"], data
                    if event["event"] == "status" and data["status"] in TERMINAL_STATUSES:
                        return
                # The stream of an old job has no events left, but the record has the status.
                job = self.get(f"/jobs/{job_id}")
                if job["status"] in TERMINAL_STATUSES:
                    yield "status", job
                    return
            except (httpx.TransportError, Unreachable, Refused) as error:
                if time.monotonic() > deadline or not _is_transient(error):
                    raise (
                        self._make_unreachable(error)
                        if isinstance(error, httpx.TransportError)
                        else error
                    ) from None
            time.sleep(RETRY_SECONDS)

    def _stream(self, job_id: str, last: str | None) -> Iterator[dict[str, str]]:
        headers = {"Accept": "text/event-stream"} | ({"Last-Event-ID": last} if last else {})
        with self._http.stream("GET", f"/jobs/{job_id}/events/stream", headers=headers) as answer:
            if not answer.is_success:
                answer.read()
                _require_success(answer)
            yield from _parse_events(answer.iter_lines())


def _parse_events(lines: Iterator[str]) -> Iterator[dict[str, str]]:
    """Parse server-sent events.

    Each line holds one field, an empty line ends an event, and a line that begins with a colon is
    a comment.
    """
    event: dict[str, str] = {}
    for line in lines:
        name, _, value = line.partition(":")
        if name:
            event[name] = value.removeprefix(" ")
        elif not line and "data" in event:
            yield event
            event = {}


def _is_transient(error: Exception) -> bool:
    """Whether the server may only be away: it restarts, or its Redis does not answer."""
    return not isinstance(error, Refused) or error.status >= SERVER_ERROR


def _require_success(answer: httpx.Response) -> httpx.Response:
    """Return ``answer`` if it is a success; otherwise raise ``Refused``."""
    if answer.is_success:
        return answer
    # A proxy on the way may answer with a document of another kind.
    document: Mapping[str, Any] = {}
    if answer.headers.get("content-type", "").startswith("application/problem+json"):
        document = answer.json()
    detail = (
        document.get("detail") or f"The server answers {answer.status_code} {answer.reason_phrase}."
    )
    raise Refused(answer.status_code, detail, document.get("remedy") or "")
