"""A small collector of traces that decodes the bytes it receives."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest


@dataclass(frozen=True)
class Received:
    """A span that arrived; ``start`` and ``end`` are in nanoseconds since 1970."""

    service: str
    name: str
    trace: str
    id: str
    parent: str
    kind: int
    status: int
    start: int
    end: int
    attributes: dict[str, Any]
    events: list[str]


@dataclass
class Collector:
    """Accepts POST /v1/traces as a real collector does, and keeps the spans."""

    spans: list[Received] = field(default_factory=list)

    def __post_init__(self) -> None:
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                assert self.path == "/v1/traces"
                assert self.headers["Content-Type"] == "application/x-protobuf"
                collector.spans += spans_of(body)
                self.send_response(200)
                self.end_headers()

            def log_message(self, *_: Any) -> None:
                """Log nothing."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(0.02,), daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def named(self, name: str) -> list[Received]:
        return [one for one in self.spans if one.name == name]


def spans_of(body: bytes) -> Iterator[Received]:
    """Yield the spans of a request."""
    for group in ExportTraceServiceRequest.FromString(body).resource_spans:
        service = plain(group.resource.attributes)["service.name"]
        for one in (one for scope in group.scope_spans for one in scope.spans):
            yield Received(
                service=service,
                name=one.name,
                trace=one.trace_id.hex(),
                id=one.span_id.hex(),
                parent=one.parent_span_id.hex(),
                kind=one.kind,
                status=one.status.code,
                start=one.start_time_unix_nano,
                end=one.end_time_unix_nano,
                attributes=plain(one.attributes),
                events=[event.name for event in one.events],
            )


def plain(attributes: Any) -> dict[str, Any]:
    """Return protobuf attributes as a plain dictionary."""
    return {one.key: getattr(one.value, one.value.WhichOneof("value")) for one in attributes}
