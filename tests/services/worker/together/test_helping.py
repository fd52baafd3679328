"""What keeps a worker from helping with a capture ends its help, and is a warning of the job."""

from __future__ import annotations

import threading
from dataclasses import replace

import pytest

from bench.support.harness import Parts, make_config
from kd.config.jobfile import parse_config
from kd.progress import SharedCapture
from kd.python.version import read_version
from services.store.jobs.leases import ANY_CAPACITY
from services.store.ranges import RangeTable, SharedTerms
from services.worker.devices import WorkerDevice
from services.worker.together.helping import CaptureHelp
from services.worker.together.range_server import find_place
from tests.support.records import running

#: A field that this version does not know.
FUTURE = {"a_field_of_another_version": 1}


@pytest.mark.parametrize(
    ("version", "expected"),
    [("0.9.9", "the worker that leads the capture 0.9.9"), (None, "a_field_of_another_version")],
    ids=["of another version", "of this version"],
)
def test_a_job_that_a_helper_cannot_read_is_named_and_not_asked_for_again(
    parts: Parts, version: str | None, expected: str
) -> None:
    claim = running(parts.jobs, "precompute", resources={"workers": 2})
    table = RangeTable(parts.jobs.redis)
    place = find_place(parts.settings, parse_config(claim.config))
    terms = SharedTerms(version or read_version(), place, SharedCapture("f" * 32))
    assert table.open(claim, "leader", 60, terms, 100, 2) is not None
    order = table.help("helper", 60, ANY_CAPACITY, ["precompute"])
    assert order is not None
    foreign = replace(order, claim=replace(order.claim, config=order.claim.config | FUTURE))
    device = WorkerDevice(hidden=True)
    CaptureHelp(parts.jobs, parts.settings, foreign, "helper", device, threading.Event()).run()
    warnings = [data["message"] for kind, data in parts.events(claim.id) if kind == "warning"]
    assert len(warnings) == 1
    assert warnings[0].startswith("Worker helper no longer helps with this capture:")
    assert expected in warnings[0]
    assert table.help("helper", 60, ANY_CAPACITY, ["precompute"]) is None
    view = table.view(claim.id)
    assert view is not None
    assert [member.worker for member in view.capture.workers] == ["leader"]


def test_a_helper_names_the_error_of_its_child_also_if_it_was_killed_after_that(
    parts: Parts,
) -> None:
    config = make_config("fails-and-dies", "precompute", resources={"workers": 2})
    claim = parts.jobs.claim(parts.jobs.create(config).id, "precompute", "leader", 60)
    assert claim is not None
    table = RangeTable(parts.jobs.redis)
    place = find_place(parts.settings, parse_config(claim.config))
    terms = SharedTerms(read_version(), place, SharedCapture("f" * 32))
    assert table.open(claim, "leader", 60, terms, 100, 2) is not None
    order = table.help("helper", 60, ANY_CAPACITY, ["precompute"])
    assert order is not None
    device = WorkerDevice(hidden=True)
    CaptureHelp(parts.jobs, parts.settings, order, "helper", device, threading.Event()).run()
    (warning,) = [data["message"] for kind, data in parts.events(claim.id) if kind == "warning"]
    assert "text.txt is empty." in warning
