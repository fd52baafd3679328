"""Schedules of a value: their ends, their shape in between, and that a number stays constant."""

from __future__ import annotations

import math
from typing import Any

import pytest

from kd.config.loss import Ramp
from kd.loss.ramps import evaluate_ramp


def make_ramp(
    schedule: Any, start: float = 2.0, end: float = 0.3, steps: int | None = None
) -> Ramp:
    return Ramp(schedule=schedule, start=start, end=end, steps=steps)


def test_a_number_is_itself_at_every_step() -> None:
    assert [evaluate_ramp(0.25, step, 10) for step in (0, 5, 9, 99)] == [0.25] * 4


@pytest.mark.parametrize("schedule", ["linear", "cosine", "step"])
@pytest.mark.parametrize(("steps", "way"), [(11, None), (100, 11), (5, 11)])
def test_both_ends_are_met_to_the_bit_and_the_end_is_kept(
    schedule: str, steps: int, way: int | None
) -> None:
    value = make_ramp(schedule, steps=way)
    assert evaluate_ramp(value, 0, steps) == 2.0
    assert [evaluate_ramp(value, step, steps) for step in (10, 11, 1000)] == [0.3] * 3


def test_the_way_between_has_its_form() -> None:
    shares = [step / 10 for step in range(11)]
    expected = {
        "linear": [2.0 - 1.7 * share for share in shares],
        "cosine": [0.3 + 1.7 * math.cos(math.pi * share / 2) ** 2 for share in shares],
        "step": [2.0] * 5 + [0.3] * 6,
    }
    for schedule, values in expected.items():
        found = [evaluate_ramp(make_ramp(schedule), step, 11) for step in range(11)]
        assert found == pytest.approx(values, rel=1e-12), schedule


def test_a_way_of_one_step_is_its_end_from_the_second_step_on() -> None:
    assert [evaluate_ramp(make_ramp("linear", steps=1), step, 9) for step in range(3)] == [
        2.0,
        0.3,
        0.3,
    ]


@pytest.mark.parametrize("schedule", ["linear", "cosine", "step"])
@pytest.mark.parametrize("end", [0.3, 1.2, 1.5, 1.7, 2.0])
def test_no_value_lies_past_an_end(schedule: str, end: float) -> None:
    """Rounding must not pass an end either: the records do not cover a temperature beyond it."""
    for start in (end, 2.0):
        found = [evaluate_ramp(make_ramp(schedule, start, end), step, 97) for step in range(97)]
        assert min(found) >= min(start, end) and max(found) <= max(start, end)
