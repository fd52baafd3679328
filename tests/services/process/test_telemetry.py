"""Traces as a collector receives them. The collector here decodes the real messages."""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from itertools import pairwise

import pytest

from bench.support.paths import ROOT
from bench.support.waiting import PATIENCE_SECONDS
from kd.errors import Interrupted
from kd.progress import Event, Monitor
from services.process import telemetry
from services.process.telemetry import (
    build_trace_environment,
    configure,
    read_traceparent,
    shutdown,
    span,
    traced_stage,
)
from tests.support.collector import Collector


@pytest.fixture
def collector() -> Iterator[Collector]:
    made = Collector()
    yield made
    made.close()


@pytest.fixture
def on(collector: Collector) -> Iterator[Collector]:
    """The collector, with this process sending to it."""
    configure(collector.url, "test")
    yield collector
    shutdown()


def test_spans_nest_and_bear_what_they_are_told(on: Collector) -> None:
    with span("outer", kind="SERVER", job_id="job_1", nothing=None) as outer:
        with span("inner"):
            assert read_traceparent().startswith("00-")
        outer.describe("renamed", status="queued", attempt=2)
    shutdown()
    (inner,) = on.named("inner")
    (renamed,) = on.named("renamed")
    assert renamed.service == "potstill-test"
    assert renamed.attributes == {
        "potstill.job_id": "job_1",
        "potstill.status": "queued",
        "potstill.attempt": 2,
    }
    assert (renamed.kind, inner.kind) == (2, 1)
    assert inner.parent == renamed.id
    assert inner.trace == renamed.trace
    assert renamed.parent == ""
    assert renamed.start <= inner.start <= inner.end <= renamed.end


def test_a_trace_goes_on_under_a_traceparent(on: Collector) -> None:
    with span("first"):
        parent = read_traceparent()
    with span("second", parent):
        assert read_traceparent().split("-")[1] == parent.split("-")[1]
    shutdown()
    assert on.named("second")[0].parent == on.named("first")[0].id


@pytest.mark.parametrize("parent", ["nonsense", "00-" + "0" * 32 + "-" + "0" * 16 + "-01", "00-ff"])
def test_what_is_no_traceparent_begins_a_trace(on: Collector, parent: str) -> None:
    with span("only", parent):
        pass
    shutdown()
    assert on.named("only")[0].parent == ""


def test_an_error_is_told_by_its_class_and_a_stop_is_none(on: Collector) -> None:
    with pytest.raises(ValueError, match="private"), span("failed"):
        raise ValueError("private words")
    with pytest.raises(Interrupted), span("stopped"):
        raise Interrupted("on request")
    shutdown()
    (failed,) = on.named("failed")
    (stopped,) = on.named("stopped")
    assert (failed.status, failed.attributes["error.type"], failed.events) == (2, "ValueError", [])
    assert "private" not in str(failed)
    assert (stopped.status, stopped.attributes) == (0, {"potstill.stopped": True})


def run_of(monitor: Monitor, steps: int) -> None:
    monitor.emit("stage", stage="train", phase="loading")
    monitor.emit("stage", stage="train", phase="training")
    for step in range(1, steps + 1):
        monitor.emit("metrics", step=step, loss=1.0 / step, kd_loss=None)
        if step == 2:
            monitor.emit("evaluation", step=step, validation_perplexity=20.5)
    monitor.emit("stage", stage="train", phase="saving")


def test_a_stage_is_told_by_its_phases_and_its_steps(
    collector: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(telemetry, "SAMPLE_SECONDS", 0.0)
    heard: list[Event] = []
    parent = f"00-{'a' * 32}-{'b' * 16}-01"
    environment = {"KD_OTLP_ENDPOINT": collector.url, "TRACEPARENT": parent}
    with traced_stage("train", heard.append, environment) as listen:
        thread = threading.Thread(
            target=run_of, args=(Monitor(listen), 3)
        )  # events come from any thread
        thread.start()
        thread.join()
    assert [event.type for event in heard].count("metrics") == 3, "what is traced is still told"
    (stage,) = collector.named("stage train")
    assert (stage.trace, stage.parent, stage.service) == ("a" * 32, "b" * 16, "potstill-child")
    assert stage.events == ["evaluation"]
    phases = {one.name: one for one in collector.spans if one.name.startswith("phase")}
    assert list(phases) == ["phase loading", "phase training", "phase saving"]
    assert {one.parent for one in phases.values()} == {stage.id}
    steps = collector.named("steps")
    assert {one.parent for one in steps} == {phases["phase training"].id}
    assert [
        (one.attributes["potstill.first_step"], one.attributes["potstill.step"]) for one in steps
    ] == [
        (1, 1),
        (2, 2),
        (3, 3),
    ]
    assert steps[-1].attributes["potstill.loss"] == pytest.approx(1 / 3)
    assert all(before.end <= after.start for before, after in pairwise(steps))


def test_steps_are_sampled_and_the_last_one_is_always_told(collector: Collector) -> None:
    with traced_stage("train", lambda _: None, {"KD_OTLP_ENDPOINT": collector.url}) as listen:
        run_of(Monitor(listen), 500)
    (steps,) = collector.named("steps")
    assert (steps.attributes["potstill.first_step"], steps.attributes["potstill.step"]) == (1, 500)


def test_a_stage_that_fails_tells_what_it_had_done(collector: Collector) -> None:
    def fail() -> None:
        with traced_stage("train", lambda _: None, {"KD_OTLP_ENDPOINT": collector.url}) as listen:
            Monitor(listen).emit("stage", phase="training")
            Monitor(listen).emit("metrics", step=7, loss=1.0)
            raise MemoryError

    with pytest.raises(MemoryError):
        fail()
    assert collector.named("steps")[0].attributes["potstill.step"] == 7
    assert collector.named("phase training")
    assert collector.named("stage train")[0].attributes["error.type"] == "MemoryError"


def test_without_an_endpoint_nothing_is_made_nor_imported() -> None:
    program = """
import sys
from services.process.telemetry import *
from services.process import telemetry
telemetry.configure(None, "test")
with telemetry.span("name", "00-x", job_id="job_1") as opened:
    opened.describe("other", a=1)
    assert telemetry.read_traceparent() == ""
def listen(event): pass
with telemetry.traced_stage("train", listen, {}) as given:
    assert given is listen
telemetry.shutdown()
print(sorted(name for name in sys.modules if name.startswith("opentelemetry")))
"""
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=PATIENCE_SECONDS,
    )
    assert (done.stdout, done.stderr) == ("[]\n", "")
    assert build_trace_environment(None) == {}


def test_a_missing_extra_is_named_with_its_remedy() -> None:
    program = """
import sys
sys.modules["opentelemetry.exporter"] = None
from services.process import telemetry
try:
    telemetry.configure("http://127.0.0.1:4318", "api")
except telemetry.TelemetryError as error:
    print(error)
"""
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=PATIENCE_SECONDS,
    )
    assert "KD_OTLP_ENDPOINT is set, but opentelemetry.exporter" in done.stdout
    assert "pip install 'potstill[otel]'" in done.stdout


@pytest.mark.parametrize("hanging", [False, True], ids=["away", "hanging"])
def test_a_collector_that_does_not_answer_costs_seconds_and_no_job(
    hanging: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(telemetry, "SEND_SECONDS", 1.0)
    with socket.create_server(("127.0.0.1", 0)) as server:  # accepts connections and never answers
        url = f"http://127.0.0.1:{server.getsockname()[1]}"
        if not hanging:
            server.close()
        began = time.monotonic()
        # The exporter's own limit is ten seconds for each of several tries.
        with traced_stage("train", lambda _: None, {"KD_OTLP_ENDPOINT": url}) as listen:
            run_of(Monitor(listen), 5)
        assert time.monotonic() - began < PATIENCE_SECONDS / 10
