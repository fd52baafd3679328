"""What a request must be before any route sees it, and what every answer says to a browser.

    Host      one of KD_ALLOWED_HOSTS, or the address that the API listens on: a page cannot rebind its own name to us;
              of a sign of life alone it does not matter, for a probe calls by whatever address it has
    Origin    of a request that changes something: this very site, or one of KD_ALLOWED_ORIGINS
    body      JSON that is not nested deeper than any job is

Other sites can read nothing: CORS is off but for KD_ALLOWED_ORIGINS.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Mapping
from itertools import accumulate
from urllib.parse import urlsplit

from fastapi import FastAPI, Request
from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from services.api.limits import SAFE_METHODS, Limiter
from services.api.problems import respond
from services.keys import KeyFile
from services.settings import Settings

JSON_DEPTH = 32
PROBES = {f"{prefix}/{name}" for prefix in ("", "/v1") for name in ("healthz", "readyz")}
#: What a browser must not do with an answer, whatever it holds.
SAFE_HEADERS = {
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
}
#: Of answers that are no pages: nothing in them may run or load anything.
INERT = "default-src 'none'; frame-ancestors 'none'"
PAGE = "frame-ancestors 'none'; base-uri 'none'; object-src 'none'"

_ASKED = ["Authorization", "Content-Type", "Idempotency-Key", "If-None-Match", "Last-Event-ID", "Range", "X-Request-ID"]
_TOLD = ["ETag", "Idempotent-Replayed", "Location", "RateLimit", "RateLimit-Policy", "Retry-After", "X-Request-ID"]


def install(app: FastAPI, settings: Settings) -> None:
    """Give ``app`` its keys, limits and guard; called after every other middleware was added."""
    app.state.keys = KeyFile(settings.api_keys_file) if settings.api_keys_file is not None else None
    app.state.limiter = Limiter(settings)
    app.add_middleware(DepthLimit)
    if settings.allowed_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=list(settings.allowed_origins),
            allow_methods=["GET", "POST", "DELETE"],
            allow_headers=_ASKED,
            expose_headers=_TOLD,
        )
    app.add_middleware(Guard, settings=settings)


class Guard:
    """Refuses what a browser was talked into, and marks every answer."""

    def __init__(self, app: ASGIApp, settings: Settings) -> None:
        self._app = app
        self._hosts = frozenset(host.lower() for host in (*settings.allowed_hosts, *_names_of(settings.host)))
        self._origins = frozenset(settings.allowed_origins)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, or answer 400 or 403."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        state, headers = scope.setdefault("state", {}), Headers(scope=scope)

        async def marked(message: Message) -> None:
            if message["type"] == "http.response.start":
                _mark(MutableHeaders(scope=message), state.get("headers", {}))
            await send(message)

        refusal = self._refusal(scope["method"], headers) if scope["path"] not in PROBES else None
        if refusal is None:
            await self._app(scope, receive, marked)
        else:
            status, detail, remedy, slug = refusal
            await respond(Request(scope), status, detail, remedy, slug)(scope, receive, marked)

    def _refusal(self, method: str, headers: Headers) -> tuple[int, str, str, str] | None:
        host, origin = headers.get("host", ""), headers.get("origin")
        if not self._knows(host):
            detail = f"This server does not answer to the name {_name(host)!r}."
            return 400, detail, "Call it by a name in KD_ALLOWED_HOSTS, or have the operator add this one.", "bad-host"
        if method in SAFE_METHODS or origin is None or origin in self._origins or _is_same_site(origin, host):
            return None
        detail = f"A page of {origin} may not change anything here."
        return 403, detail, "An operator who means it adds that origin to KD_ALLOWED_ORIGINS.", "foreign-origin"

    def _knows(self, host: str) -> bool:
        name = _name(host)
        known = {name, "*", *(f"*.{tail}" for tail in _tails(name))}
        return bool(name) and not known.isdisjoint(self._hosts)


def _names_of(bound: str) -> tuple[str, ...]:
    """How the address that the API listens on is written in a Host header; none for "every address"."""
    try:
        address = ipaddress.ip_address(bound)
    except ValueError:
        return (bound,)
    if address.is_unspecified:
        return ()
    return (f"[{address}]" if address.version == 6 else str(address),)


def _name(host: str) -> str:
    """The name in a Host header, without its port, in lower case."""
    return re.sub(r":\d*$", "", host).lower()


def _tails(name: str) -> list[str]:
    labels = name.split(".")
    return [".".join(labels[start:]) for start in range(1, len(labels))]


def _is_same_site(origin: str, host: str) -> bool:
    """Whether a page came from this very host and port."""
    try:
        parts = urlsplit(origin)
    except ValueError:
        return False
    return parts.scheme in ("http", "https") and parts.netloc.lower() == host.lower()


def _mark(headers: MutableHeaders, more: Mapping[str, str]) -> None:
    for name, value in {**SAFE_HEADERS, **more}.items():
        headers.setdefault(name, value)
    is_page = headers.get("content-type", "").startswith("text/html")
    headers.setdefault("Content-Security-Policy", PAGE if is_page else INERT)


class DepthLimit:
    """Refuses a body that opens more than ``JSON_DEPTH`` brackets within each other, as soon as that is known."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on with a body that is looked at as it is read."""
        depth = Depth()

        async def limited() -> Message:
            message = await receive()
            if depth.after(message.get("body", b"")) > JSON_DEPTH:
                raise HTTPException(400, f"The body is nested deeper than {JSON_DEPTH} levels.")
            return message

        await self._app(scope, limited if scope["type"] == "http" else receive, send)


_INSIDE = rb'(?:[^"\\]++|\\.)*+'  # of a string, up to its end or as far as the piece goes
_REST_OF_STRING = re.compile(_INSIDE, re.DOTALL)
_STRINGS = re.compile(b'"' + _INSIDE + b'"', re.DOTALL)
_CLOSED = re.compile(b'(?:[^"]++|"' + _INSIDE + b'")*+', re.DOTALL)
_OTHERS = bytes(set(range(256)) - set(b"[]{}"))
_STEPS = {ord("["): 1, ord("{"): 1, ord("]"): -1, ord("}"): -1}


class Depth:
    """How deep JSON is nested at most, read piece by piece; brackets inside strings do not count.

    Each piece is read once whatever is in it, at the speed of the standard library's scanners: anybody may send one.
    """

    def __init__(self) -> None:
        self._now = self._most = 0
        self._in_string = self._escaped = False

    def after(self, piece: bytes) -> int:
        """The greatest depth so far, with ``piece`` read."""
        start = self._end_of_string(piece, 0) if self._in_string else 0
        if not self._in_string:
            end = self._end_of_closed(piece, start)
            brackets = _STRINGS.sub(b"", piece[start:end]).translate(None, _OTHERS)
            depths = list(accumulate(map(_STEPS.__getitem__, brackets), initial=self._now))
            self._now, deepest = depths[-1], max(depths)
            self._most = max(self._most, deepest)
            if end < len(piece):
                self._in_string = True
                self._end_of_string(piece, end + 1)
        return self._most

    def _end_of_closed(self, piece: bytes, start: int) -> int:
        """Where a string begins that does not end in this piece; else the piece's own end."""
        match = _CLOSED.match(piece, start)
        return match.end() if match else start

    def _end_of_string(self, piece: bytes, start: int) -> int:
        """The place after the string that is open, if it ends in this piece."""
        if self._escaped and piece:
            self._escaped, start = False, start + 1
        match = _REST_OF_STRING.match(piece, start)
        end = match.end() if match else start
        self._in_string = piece[end : end + 1] != b'"'
        self._escaped = self._escaped or piece[end : end + 1] == b"\\"  # the last byte; the next piece has what follows
        return end + 1
