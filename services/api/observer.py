"""Every request, seen from outside all routes: its id, its line in the log, its numbers and its span.

X-Request-ID    taken over where it is sane, else made; in the answer, in every log line, in the job it makes
numbers         kd_http_requests_total, kd_http_request_duration_seconds and kd_sse_clients, by the route's template
span            "POST /jobs", under the traceparent that the client sent
log             what changes something or is refused; the polling of clients is told at the level debug only
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from services.logs import request_id, request_id_of, shown
from services.telemetry import span

METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})
UNROUTED = "(none)"  #: the route of a request that no route takes: its path is whatever a client made up
QUIET = frozenset({"/healthz", "/readyz", "/metrics"})  #: asked every few seconds by machines: no span, no log line
BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 35.0)  #: seconds; a long poll takes 30

log = logging.getLogger("potstill.http")

Labels = tuple[str, str, str]  #: method, route template, status


@dataclass
class Duration:
    """A histogram of seconds: how many fell into each bucket (not cumulative), and their sum."""

    counts: list[int] = field(default_factory=lambda: [0] * (len(BUCKETS) + 1))
    total: float = 0.0

    def add(self, seconds: float) -> None:
        """Count one."""
        self.counts[sum(seconds > bound for bound in BUCKETS)] += 1
        self.total += seconds

    def cumulative(self) -> Iterator[tuple[str, float]]:
        """Upper bound and count of all up to it, as Prometheus wants them."""
        count = 0
        for bound, more in zip((*map(str, BUCKETS), "+Inf"), self.counts, strict=True):
            count += more
            yield bound, float(count)


class Tally:
    """The numbers of this process's requests. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._requests: Counter[Labels] = Counter()
        self._durations: dict[tuple[str, str], Duration] = {}
        self.streams = 0

    def add(self, method: str, route: str, status: int, seconds: float) -> None:
        """Count an answered request; ``seconds`` until its answer was complete, of a stream until it began."""
        with self._lock:
            self._requests[method, route, str(status)] += 1
            self._durations.setdefault((method, route), Duration()).add(seconds)

    def requests(self) -> dict[Labels, int]:
        """How many requests there were of each kind."""
        with self._lock:
            return dict(self._requests)

    def durations(self) -> dict[tuple[str, str], tuple[list[tuple[str, float]], float]]:
        """Buckets and sum of the seconds, by method and route."""
        with self._lock:
            return {labels: (list(one.cumulative()), one.total) for labels, one in self._durations.items()}


@dataclass
class Exchange:
    """One request under way."""

    scope: Scope
    id: str
    began: float = field(default_factory=time.perf_counter)
    status: int = 500  #: what it is where the application raises before it answers
    streaming: bool = False
    seconds: float | None = None

    @property
    def method(self) -> str:
        """The method, or OTHER: clients may send any word."""
        method: str = self.scope["method"]
        return method if method in METHODS else "OTHER"

    @property
    def route(self) -> str:
        """The template of the path without /v1: an operation is one, by either name. Known once it was routed."""
        return str(getattr(self.scope.get("route"), "path_format", UNROUTED)).removeprefix("/v1")

    @property
    def quiet(self) -> bool:
        """Whether it is one of those that machines ask every few seconds."""
        return self.scope["path"].removeprefix("/v1") in QUIET

    def see_start(self, message: Message) -> None:
        """The answer begins: take its status, and give it the id."""
        headers = MutableHeaders(scope=message)
        headers.setdefault("X-Request-ID", self.id)
        self.status = message["status"]
        self.streaming = headers.get("content-type", "").startswith("text/event-stream")
        if self.streaming:
            self.seconds = time.perf_counter() - self.began

    def end(self) -> float:
        """Seconds until the answer was complete, or until a stream began."""
        return time.perf_counter() - self.began if self.seconds is None else self.seconds


class Observer:
    """The outermost middleware: add it last."""

    def __init__(self, app: ASGIApp, tally: Tally) -> None:
        self._app, self._tally = app, tally

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, and watch its answer."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        exchange = Exchange(scope, request_id_of(headers.get("x-request-id")))
        request_id.set(exchange.id)  # not reset: the answer to an unforeseen error is made outside of this call
        try:
            if exchange.quiet:
                await self._app(scope, receive, self._watched(exchange, send))
            else:
                await self._traced(exchange, receive, send, headers.get("traceparent", ""))
        finally:
            self._conclude(exchange)

    async def _traced(self, exchange: Exchange, receive: Receive, send: Send, parent: str) -> None:
        with span(exchange.method, parent, "SERVER", request_id=exchange.id) as opened:
            try:
                await self._app(exchange.scope, receive, self._watched(exchange, send))
            finally:
                opened.rename(f"{exchange.method} {exchange.route}")
                opened.tell(**_described(exchange))

    def _watched(self, exchange: Exchange, send: Send) -> Send:
        async def watched(message: Message) -> None:
            if message["type"] == "http.response.start":
                exchange.see_start(message)
                self._tally.streams += exchange.streaming
            await send(message)

        return watched

    def _conclude(self, exchange: Exchange) -> None:
        self._tally.streams -= exchange.streaming
        seconds = exchange.end()
        self._tally.add(exchange.method, exchange.route, exchange.status, seconds)
        if not exchange.quiet:
            telling = exchange.method not in ("GET", "HEAD") or exchange.status >= 400
            extra = {"status": exchange.status, "seconds": round(seconds, 4)}
            level = logging.INFO if telling else logging.DEBUG
            log.log(level, "%s %s", exchange.method, shown(exchange.scope["path"]), extra=extra)


def _described(exchange: Exchange) -> dict[str, Any]:
    """The attributes that OpenTelemetry's conventions name; ids in the path go into a span, never into a label."""
    return {
        "http.request.method": exchange.method,
        "http.route": exchange.route,
        "url.path": shown(exchange.scope["path"]),
        "http.response.status_code": exchange.status,
    }
