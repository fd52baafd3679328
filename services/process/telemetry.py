"""Traces of a job, from its POST to its last step, for an OpenTelemetry collector (OTLP over HTTP).

    POST /jobs --traceparent in the record--> attempt --TRACEPARENT--> stage --> phase --> steps
    (services.api)                            (services.worker)        (the child)

Traces are off, and nothing is imported, if ``KD_OTLP_ENDPOINT`` is not set. They need the extra
``otel``. If the collector is away, spans are lost but no job is: they are sent in the background,
and an ending process waits a few seconds at most. Spans contain ids and numbers. Of an error they
contain the class only, because its message may quote private text.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from cache.errors import PotstillError
from kd.errors import Interrupted
from kd.progress import Event
from kd.python.version import read_version

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.trace import Span, Tracer

#: Variable of a child with the collector's address.
ENDPOINT = "KD_OTLP_ENDPOINT"
#: Variable of a child with the span around it.
PARENT = "TRACEPARENT"
#: The name of what makes the spans.
TRACER = "potstill"
#: Time that a request to the collector may take.
SEND_SECONDS = 5.0
#: The shortest span of training steps. Reports that come faster share a span.
SAMPLE_SECONDS = 1.0
#: Types of events that the stage's span contains.
STAGE_EVENTS = frozenset({"evaluation", "checkpoint", "cache", "profile", "check"})

Listen = Callable[[Event], None]
SpanKindName = Literal["INTERNAL", "SERVER", "CONSUMER"]

_provider: TracerProvider | None = None


class TelemetryError(PotstillError):
    """Traces are on, but cannot be made."""

    type = "telemetry_unavailable"


def configure(endpoint: str | None, part: str) -> None:
    """Send the spans of this process to ``endpoint`` as potstill-``part``; None = no spans."""
    global _provider  # noqa: PLW0603  one process, one exporter, as with logging
    shutdown()
    _provider = _make_provider(endpoint, part) if endpoint else None


def shutdown() -> None:
    """Send the remaining spans for ``SEND_SECONDS`` at most, and make no more."""
    global _provider  # noqa: PLW0603
    if _provider is not None:
        last = threading.Thread(target=_provider.shutdown, name="last-spans", daemon=True)
        last.start()
        last.join(SEND_SECONDS)
    _provider = None


@dataclass(frozen=True)
class OpenSpan:
    """The span around a block; None if traces are off."""

    span: Span | None = None

    def describe(self, name: str, **attributes: Any) -> None:
        """Set the name, and add attributes, that were not known at the start."""
        if self.span is not None:
            self.span.update_name(name)
            self.span.set_attributes(_name_attributes(attributes))


@contextmanager
def span(
    name: str, parent: str = "", kind: SpanKindName = "INTERNAL", **attributes: Any
) -> Iterator[OpenSpan]:
    """Make a span around the block, below the traceparent ``parent`` or below the current span."""
    if _provider is None:
        yield OpenSpan()
        return
    from opentelemetry.trace import SpanKind, use_span
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    context = None  # the current one
    if parent:  # a text that is not a traceparent begins a new trace
        context = TraceContextTextMapPropagator().extract({"traceparent": parent})
    opened = _provider.get_tracer(TRACER).start_span(
        name, context, SpanKind[kind], attributes=_name_attributes(attributes)
    )
    with use_span(opened, end_on_exit=True, record_exception=False, set_status_on_exception=False):
        try:
            yield OpenSpan(opened)
        except BaseException as error:
            _mark(opened, error)
            raise


def read_traceparent() -> str:
    """The current span in the form of W3C's Trace Context; empty if there is none."""
    if _provider is None:
        return ""
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    carrier: dict[str, str] = {}
    TraceContextTextMapPropagator().inject(carrier)
    return carrier.get("traceparent", "")


def build_trace_environment(endpoint: str | None) -> dict[str, str]:
    """Variables with which a child continues the current trace; empty if traces are off."""
    return {ENDPOINT: endpoint, PARENT: read_traceparent()} if endpoint else {}


@contextmanager
def traced_stage(
    stage: str, listen: Listen, environment: Mapping[str, str] = os.environ
) -> Iterator[Listen]:
    """Trace one stage in a child. Yields the listener for its monitor, which calls ``listen``."""
    configure(environment.get(ENDPOINT), "child")
    try:
        with span(f"stage {stage}", environment.get(PARENT, ""), stage=stage):
            if _provider is None:
                yield listen
            else:
                with StageTrace(_provider.get_tracer(TRACER)) as trace:
                    yield trace.tap(listen)
    finally:
        shutdown()


class StageTrace:
    """Turns events into spans: one for each phase, and below it one for some steps. Thread-safe."""

    def __init__(self, tracer: Tracer) -> None:
        from opentelemetry.context import get_current
        from opentelemetry.trace import get_current_span

        self._tracer = tracer
        self._stage = get_current_span()
        self._context = get_current()
        self._lock = threading.Lock()
        self._phase: Span | None = None
        self._began = time.time_ns()
        self._first: int | None = None
        self._latest: Event | None = None

    def __enter__(self) -> StageTrace:
        return self

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._end_phase()

    def tap(self, listen: Listen) -> Listen:
        """Return a listener that traces an event and then calls ``listen``."""

        def tapped(event: Event) -> None:
            with self._lock:
                if event.type == "stage":
                    self._begin_phase(str(event.data.get("phase", "")))
                elif event.type == "metrics" and isinstance(event.data.get("step"), int):
                    self._report(event)
                elif event.type in STAGE_EVENTS:
                    self._stage.add_event(event.type, _name_attributes(event.data))
            listen(event)

        return tapped

    def _begin_phase(self, phase: str) -> None:
        self._end_phase()
        self._phase = self._tracer.start_span(
            f"phase {phase}", self._context, attributes=_name_attributes({"phase": phase})
        )
        self._began = time.time_ns()

    def _end_phase(self) -> None:
        self._end_steps()
        if self._phase is not None:
            self._phase.end()
        self._phase = None

    def _report(self, event: Event) -> None:
        """Add the steps up to ``step`` to the span, and end the span if it is long enough."""
        self._first = event.data["step"] if self._first is None else self._first
        self._latest = event
        if time.time_ns() - self._began >= SAMPLE_SECONDS * 1e9:
            self._end_steps()

    def _end_steps(self) -> None:
        from opentelemetry.trace import set_span_in_context

        if self._latest is None:
            return
        context = set_span_in_context(self._phase or self._stage)
        attributes = _name_attributes({"first_step": self._first, **self._latest.data})
        self._tracer.start_span(
            "steps", context, attributes=attributes, start_time=self._began
        ).end()
        self._began = time.time_ns()
        self._first = None
        self._latest = None


def _make_provider(endpoint: str, part: str) -> TracerProvider:
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError as error:
        detail = f"KD_OTLP_ENDPOINT is set, but {error.name} is not installed."
        remedy = "`pip install 'potstill[otel]'`, or unset KD_OTLP_ENDPOINT."
        raise TelemetryError(detail, remedy) from None
    origin: dict[str, str | int] = {
        "service.name": f"potstill-{part}",
        "service.version": read_version(),
        "process.pid": os.getpid(),
    }
    provider = TracerProvider(resource=Resource.create(origin), shutdown_on_exit=False)
    exporter = OTLPSpanExporter(endpoint=f"{endpoint.rstrip('/')}/v1/traces", timeout=SEND_SECONDS)
    provider.add_span_processor(BatchSpanProcessor(exporter, schedule_delay_millis=1000))
    return provider


def _mark(opened: Span, error: BaseException) -> None:
    """Mark a span as failed, with the error's class only. A stop on request is not a failure."""
    from opentelemetry.trace import StatusCode

    if isinstance(error, Interrupted):
        opened.set_attribute("potstill.stopped", True)
    else:
        opened.set_attribute("error.type", type(error).__name__)
        opened.set_status(StatusCode.ERROR)


def _name_attributes(attributes: Mapping[str, Any]) -> dict[str, str | int | float]:
    """Attributes for OpenTelemetry: plain values only, names without a dot below ``potstill.``."""
    plain = {
        name: value
        for name, value in attributes.items()
        if isinstance(value, str | bool | int | float)
    }
    return {name if "." in name else f"potstill.{name}": value for name, value in plain.items()}
