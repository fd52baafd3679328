"""Traces of a job, from its POST to its last training step, to an OpenTelemetry collector (OTLP over HTTP).

    POST /jobs --traceparent in the record--> attempt --TRACEPARENT--> stage --> phase ... --> steps ...
    (services.api)                            (services.worker)        (the child)

Off, and not even imported, where ``KD_OTLP_ENDPOINT`` is unset; needs the extra ``otel``. A collector that is away
costs spans and never a job: they are sent in the background, and an ending process waits for seconds at most.
Spans tell ids and numbers; of an error they tell its class and not its words, which may quote what is private.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from typing import TYPE_CHECKING, Any, Literal

from cache.errors import PotstillError
from kd.errors import Interrupted
from kd.progress import Event

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.trace import Span, Tracer

ENDPOINT, PARENT = "KD_OTLP_ENDPOINT", "TRACEPARENT"  #: in the environment of a child
SEND_SECONDS = 5.0
SAMPLE_SECONDS = 1.0  #: shortest span of training steps; reports that come faster share one
STAGE_EVENTS = frozenset({"evaluation", "checkpoint", "cache", "profile", "check"})

Listen = Callable[[Event], None]
Kind = Literal["INTERNAL", "SERVER", "CONSUMER"]

_provider: TracerProvider | None = None


class TelemetryError(PotstillError):
    """Traces were asked for, but cannot be made."""

    type = "telemetry_unavailable"


def configure(endpoint: str | None, part: str) -> None:
    """Send the spans of this process to ``endpoint``, under the name potstill-``part``; None = make none."""
    global _provider  # noqa: PLW0603  one process, one exporter, as with logging
    shutdown()
    _provider = _provider_for(endpoint, part) if endpoint else None


def shutdown() -> None:
    """Send what is left, for some seconds at most, and make no more spans."""
    global _provider  # noqa: PLW0603
    if _provider is not None:
        last = threading.Thread(target=_provider.shutdown, name="last-spans", daemon=True)
        last.start()
        last.join(SEND_SECONDS)
    _provider = None


@dataclass(frozen=True)
class Open:
    """The span around a block; nothing where no spans are made."""

    span: Span | None = None

    def tell(self, **attributes: Any) -> None:
        """Add attributes."""
        if self.span is not None:
            self.span.set_attributes(_named(attributes))

    def rename(self, name: str) -> None:
        """Give a name that was not known at the start."""
        if self.span is not None:
            self.span.update_name(name)


@contextmanager
def span(name: str, parent: str = "", kind: Kind = "INTERNAL", **attributes: Any) -> Iterator[Open]:
    """A span around the block, under ``parent`` (a traceparent) or, where that is empty, under the one in force."""
    if (tracer := _tracer()) is None:
        yield Open()
        return
    from opentelemetry.trace import SpanKind, use_span

    opened = tracer.start_span(name, _context(parent), SpanKind[kind], attributes=_named(attributes))
    with use_span(opened, end_on_exit=True, record_exception=False, set_status_on_exception=False):
        try:
            yield Open(opened)
        except BaseException as error:
            _mark(opened, error)
            raise


def traceparent() -> str:
    """The span in force, as W3C's Trace Context writes it; empty where there is none."""
    if _provider is None:
        return ""
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    carrier: dict[str, str] = {}
    TraceContextTextMapPropagator().inject(carrier)
    return carrier.get("traceparent", "")


def trace_environment(endpoint: str | None) -> dict[str, str]:
    """What a child needs to go on with the trace in force; nothing where no trace is made."""
    return {ENDPOINT: endpoint, PARENT: traceparent()} if endpoint else {}


@contextmanager
def traced_stage(stage: str, listen: Listen, environment: Mapping[str, str] = os.environ) -> Iterator[Listen]:
    """Trace one stage in a child; yields the listener to give to its monitor in place of ``listen``."""
    configure(environment.get(ENDPOINT), "child")
    try:
        with span(f"stage {stage}", environment.get(PARENT, ""), stage=stage):
            tracer = _tracer()
            if tracer is None:
                yield listen
            else:
                with StageTrace(tracer) as trace:
                    yield trace.tap(listen)
    finally:
        shutdown()


class StageTrace:
    """Turns the events of a run into spans: one a phase, and under it one a stretch of steps. Thread-safe."""

    def __init__(self, tracer: Tracer) -> None:
        from opentelemetry.context import get_current
        from opentelemetry.trace import get_current_span

        self._tracer, self._stage, self._context = tracer, get_current_span(), get_current()
        self._lock = threading.Lock()
        self._phase: Span | None = None
        self._began = time.time_ns()
        self._first: int | None = None
        self._latest: dict[str, Any] | None = None

    def __enter__(self) -> StageTrace:
        return self

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._end_phase()

    def tap(self, listen: Listen) -> Listen:
        """``listen``, after the event was put into the trace."""

        def tapped(event: Event) -> None:
            with self._lock:
                self._see(event)
            listen(event)

        return tapped

    def _see(self, event: Event) -> None:
        if event.type == "stage":
            self._begin_phase(str(event.data.get("phase", "")))
        elif event.type == "metrics" and isinstance(event.data.get("step"), int):
            self._report(event.data)
        elif event.type in STAGE_EVENTS:
            self._stage.add_event(event.type, _named(event.data))

    def _begin_phase(self, phase: str) -> None:
        self._end_phase()
        self._phase = self._tracer.start_span(f"phase {phase}", self._context, attributes=_named({"phase": phase}))
        self._began = time.time_ns()

    def _end_phase(self) -> None:
        self._end_steps()
        if self._phase is not None:
            self._phase.end()
        self._phase = None

    def _report(self, data: dict[str, Any]) -> None:
        """Take note of the steps up to ``step``; the span ends here where it is long enough."""
        self._first = data["step"] if self._first is None else self._first
        self._latest = data
        if time.time_ns() - self._began >= SAMPLE_SECONDS * 1e9:
            self._end_steps()

    def _end_steps(self) -> None:
        from opentelemetry.trace import set_span_in_context

        if self._latest is None:
            return
        context = set_span_in_context(self._phase or self._stage)
        told = _named({"first_step": self._first, **self._latest})
        self._tracer.start_span("steps", context, attributes=told, start_time=self._began).end()
        self._began, self._first, self._latest = time.time_ns(), None, None


def _tracer() -> Tracer | None:
    return _provider.get_tracer("potstill") if _provider is not None else None


def _provider_for(endpoint: str, part: str) -> TracerProvider:
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError as error:
        raise TelemetryError(
            f"KD_OTLP_ENDPOINT is set, but {error.name} is not installed.",
            "`pip install 'potstill[otel]'`, or unset KD_OTLP_ENDPOINT.",
        ) from None
    origin: dict[str, Any] = {
        "service.name": f"potstill-{part}",
        "service.version": version("potstill"),
        "process.pid": os.getpid(),
    }
    provider = TracerProvider(resource=Resource.create(origin), shutdown_on_exit=False)
    exporter = OTLPSpanExporter(endpoint=f"{endpoint.rstrip('/')}/v1/traces", timeout=SEND_SECONDS)
    provider.add_span_processor(BatchSpanProcessor(exporter, schedule_delay_millis=1000))
    return provider


def _context(parent: str) -> Any:
    """The context under ``parent``, which begins a trace where it is no traceparent; None = the one in force."""
    if not parent:
        return None
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    return TraceContextTextMapPropagator().extract({"traceparent": parent})


def _mark(opened: Span, error: BaseException) -> None:
    """Say of a span that it failed, with the error's class alone; a stop on request is no failure."""
    from opentelemetry.trace import StatusCode

    if isinstance(error, Interrupted):
        opened.set_attribute("potstill.stopped", True)
    else:
        opened.set_attribute("error.type", type(error).__name__)
        opened.set_status(StatusCode.ERROR)


def _named(attributes: Mapping[str, Any]) -> dict[str, Any]:
    """Attributes as OpenTelemetry takes them: plain values, ours under ``potstill.``, nothing for None."""
    plain = {name: value for name, value in attributes.items() if isinstance(value, str | bool | int | float)}
    return {name if "." in name else f"potstill.{name}": value for name, value in plain.items()}
