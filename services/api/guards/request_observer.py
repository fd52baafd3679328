"""The outermost middleware: it gives every request an id, a log line and metrics.

X-Request-ID    kept from the client if it is well-formed, otherwise made. It is in the answer, in
                every log line of the request, and in the job that the request creates.
metrics         kd_http_requests_total, kd_http_request_duration_seconds and kd_sse_clients. Their
                label is the route's template, never the path.
log             changes and refusals at level info; other reads at level debug, since clients poll
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass, field

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from services.api.guards.request_metrics import RequestMetrics
from services.process.logs import choose_request_id, request_id, shorten_path

METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})
#: The route label of a request that matches no route: a client can make up any number of paths.
UNROUTED = "(none)"
#: Paths that machines read every few seconds. They get no log line.
QUIET = frozenset({"/healthz", "/readyz", "/metrics"})

log = logging.getLogger("potstill.http")


@dataclass
class ActiveRequest:
    """One request while it is answered."""

    scope: Scope
    id: str
    began: float = field(default_factory=time.perf_counter)
    #: Status of the answer. It stays 500 if the application raises before it answers.
    status: int = 500
    streaming: bool = False
    #: Seconds until a stream began; None for any other answer.
    seconds: float | None = None

    @property
    def method(self) -> str:
        """The method, or OTHER: a client may send any word, and each would be a new label."""
        method: str = self.scope["method"]
        return method if method in METHODS else "OTHER"

    @property
    def route(self) -> str:
        """The template of the path without /v1, known once the request was routed.

        An operation has one label, no matter by which of its two paths it is called.
        """
        return str(getattr(self.scope.get("route"), "path_format", UNROUTED)).removeprefix("/v1")

    @property
    def quiet(self) -> bool:
        """Whether it asks for one of the paths in ``QUIET``."""
        return self.scope["path"].removeprefix("/v1") in QUIET

    def note_start(self, message: Message) -> None:
        """Note the status of the answer that begins with ``message``, and add the request id."""
        headers = MutableHeaders(scope=message)
        headers.setdefault("X-Request-ID", self.id)
        self.status = message["status"]
        self.streaming = headers.get("content-type", "").startswith("text/event-stream")
        if self.streaming:
            self.seconds = time.perf_counter() - self.began


class RequestObserver:
    """The outermost middleware: add it last."""

    def __init__(self, app: ASGIApp, request_metrics: RequestMetrics) -> None:
        self._app = app
        self._request_metrics = request_metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, and observe its answer."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        offered = Headers(scope=scope).get("x-request-id")
        active = ActiveRequest(scope, choose_request_id(offered))
        # The id is not reset: Starlette answers an unforeseen error after this call has returned.
        request_id.set(active.id)
        try:
            await self._app(scope, receive, self._watch_send(active, send))
        finally:
            self._conclude(active)

    def _watch_send(self, active: ActiveRequest, send: Send) -> Send:
        async def watched(message: Message) -> None:
            if message["type"] == "http.response.start":
                active.note_start(message)
                self._request_metrics.streams += active.streaming
            await send(message)

        return watched

    def _conclude(self, active: ActiveRequest) -> None:
        self._request_metrics.streams -= active.streaming
        seconds = time.perf_counter() - active.began if active.seconds is None else active.seconds
        self._request_metrics.add(active.method, active.route, active.status, seconds)
        if not active.quiet:
            important = active.method not in ("GET", "HEAD") or active.status >= 400
            extra = {"status": active.status, "seconds": round(seconds, 4)}
            level = logging.INFO if important else logging.DEBUG
            log.log(level, "%s %s", active.method, shorten_path(active.scope["path"]), extra=extra)
