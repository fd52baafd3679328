"""The events that a run emits, and how often it emits them."""

from __future__ import annotations

from pathlib import Path

import pytest

from kd.errors import Interrupted
from kd.progress import (
    ALIVE_SECONDS,
    WAITING_SECONDS,
    Event,
    Monitor,
    Notice,
    ProgressMeter,
    WorkHeldByAnother,
    keep_notices,
)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [1000.0]
    monkeypatch.setattr("kd.progress.time.monotonic", lambda: now[0])
    return now


def test_a_loop_that_turns_says_so_every_few_seconds(clock: list[float]) -> None:
    heard: list[Event] = []
    monitor = Monitor(heard.append)
    for _ in range(1000):
        clock[0] += ALIVE_SECONDS / 100
        monitor.report_alive()
    assert [event.data for event in heard] == [{"stepping": True}] * 10


def test_what_may_take_long_is_said_at_once(clock: list[float]) -> None:
    heard: list[Event] = []
    monitor = Monitor(heard.append)
    for stepping in (True, True, False, False, True):
        monitor.report_alive(stepping)
    assert [event.data["stepping"] for event in heard] == [True, False, True]


def test_a_check_tells_that_a_run_goes_on_and_makes_no_loop_of_what_was_none(
    clock: list[float],
) -> None:
    heard: list[Event] = []
    monitor = Monitor(heard.append)
    monitor.check("anywhere")
    monitor.check("anywhere")
    monitor.report_alive()
    clock[0] += ALIVE_SECONDS
    monitor.check("in the loop")
    assert [event.data["stepping"] for event in heard] == [True, True]
    with pytest.raises(Interrupted, match="Stopped on request here"):
        Monitor(should_stop=lambda: True).check("here")


def test_whoever_waits_says_so_now_and_then(clock: list[float]) -> None:
    heard: list[Event] = []
    monitor = Monitor(heard.append)
    for _ in range(101):
        monitor.wait_for("a capture", Path("x.lock"), "precompute")
        clock[0] += WAITING_SECONDS / 50
    assert [event.data["phase"] for event in heard] == ["waiting for a capture"] * 2
    with pytest.raises(WorkHeldByAnother) as caught:
        Monitor(patient=False).wait_for("a capture", Path("x.lock"), "precompute")
    assert caught.value.lock == Path("x.lock")


def test_a_meter_tells_what_was_done_and_at_what_pace(clock: list[float]) -> None:
    meter = ProgressMeter(10, "steps", done=4, _began=clock[0])
    clock[0] += 2
    assert meter.advance(2, 300) == {
        "done": 6,
        "total": 10,
        "unit": "steps",
        "fraction": 0.6,
        "eta_seconds": 4.0,
        "per_second": 1.0,
        "tokens": 300,
        "tokens_per_second": 150.0,
    }


def test_units_that_were_done_before_say_nothing_of_the_pace(clock: list[float]) -> None:
    meter = ProgressMeter(10, "sequences", _began=clock[0])
    meter.skip(6)
    clock[0] += 2
    told = meter.advance(1, 100)
    assert (told["done"], told["per_second"], told["eta_seconds"]) == (7, 0.5, 6.0)


def test_a_notice_is_sent_once_and_kept_once_over_a_resume(tmp_path: Path) -> None:
    file = tmp_path / "notices.json"
    notice = Notice("rows without text, left out", 1200, "a.jsonl: row 2", "Remove them.")
    for _attempt in range(2):
        heard: list[Event] = []
        monitor = Monitor(heard.append)
        monitor.note(notice)
        monitor.note(notice)
        assert [event.data["message"] for event in heard] == [
            "Rows without text, left out: 1,200, for example a.jsonl: row 2. Remove them."
        ]
        assert keep_notices(file, monitor) == [notice]
    assert keep_notices(file, Monitor()) == [notice]


def test_notices_of_one_kind_in_two_texts_are_both_kept(tmp_path: Path) -> None:
    monitor = Monitor()
    found = [Notice("rows without text, left out", 9, f"{name}: row 2") for name in ("a", "b")]
    for notice in found:
        monitor.note(notice)
    assert keep_notices(tmp_path / "notices.json", monitor) == found


def test_a_run_that_found_nothing_writes_no_file(tmp_path: Path) -> None:
    assert keep_notices(tmp_path / "notices.json", Monitor()) == []
    assert not list(tmp_path.iterdir())
