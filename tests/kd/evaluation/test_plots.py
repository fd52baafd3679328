"""Plots exist and show the numbers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from matplotlib.figure import Figure
from matplotlib.image import imread

from kd.evaluation import plots
from kd.evaluation.plots import CONTEXT, CURVES, RELIABILITY, draw_curves, draw_plots

LINES = [
    {"type": "evaluation", "step": 0, "validation_loss": 7.0, "validation_kl": None},
    {"type": "metrics", "step": 1, "loss": 6.5, "kd_loss": 4.0, "ce_loss": 7.0},
    {"type": "metrics", "step": 2, "loss": 6.0, "kd_loss": None, "ce_loss": 6.8},
    {"type": "evaluation", "step": 2, "validation_loss": 6.6, "validation_kl": 3.5},
]
CURVE = [
    {"share": 0.25, "confidence": 0.1, "accuracy": 0.2},
    {"share": 0.75, "confidence": 0.8, "accuracy": 0.6},
]
SPANS = [
    {"first": 1, "last": 1, "tokens": 4, "kl": 2.0},
    {"first": 2, "last": 3, "tokens": 8, "kl": 1.0},
]
MODELS: dict[str, Any] = {
    "teacher": {"reliability": CURVE[:1]},
    "student": {"reliability": CURVE, "kl_by_context": SPANS},
}


def read_plot(paint: Any, *data: Any) -> dict[str, list[tuple[float, float]]]:
    """Every line of a plot, by its name in the legend."""
    figure = Figure()
    paint(figure, *data)
    (axes,) = figure.axes
    assert (
        axes.get_xlabel()
        and axes.get_ylabel()
        and axes.get_title()
        and axes.get_legend() is not None
    )
    return {
        str(line.get_label()): [tuple(point) for point in line.get_xydata().tolist()]
        for line in axes.lines
    }


def test_there_is_a_picture_of_everything_that_is_known(tmp_path: Path) -> None:
    assert draw_plots(tmp_path / "run", MODELS, LINES) == [CURVES, RELIABILITY, CONTEXT]
    for name in (CURVES, RELIABILITY, CONTEXT):
        assert (tmp_path / "run" / name).read_bytes().startswith(b"\x89PNG")
        pixels = imread(tmp_path / "run" / name)
        assert pixels.shape[:2] == (540, 840) and pixels.std() > 0.0
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == sorted(
        [CURVES, RELIABILITY, CONTEXT]
    )


@pytest.mark.parametrize(
    ("models", "lines", "names"),
    [
        ({}, [], []),
        ({}, LINES, [CURVES]),
        ({"teacher": MODELS["teacher"]}, LINES[:1], [RELIABILITY]),
    ],
)
def test_there_is_no_picture_of_nothing(
    tmp_path: Path, models: Any, lines: Any, names: list[str]
) -> None:
    assert draw_plots(tmp_path, models, lines) == names
    assert [path.name for path in tmp_path.iterdir()] == names


def test_curves_show_steps_and_evaluations() -> None:
    found = read_plot(lambda figure, lines: draw_curves(figure.subplots(), lines), LINES)
    assert found["loss"] == [(1, 6.5), (2, 6.0)]
    assert found["divergence from the teacher"] == [(1, 4.0)]
    assert found["held-out cross-entropy"] == [(0, 7.0), (2, 6.6)]
    assert found["held-out KL"] == [(2, 3.5)]


def test_reliability_shows_confidence_and_accuracy_of_every_model() -> None:
    found = read_plot(
        plots.draw_reliability, {name: each["reliability"] for name, each in MODELS.items()}
    )
    assert found == {
        "as sure as right": [(0, 0), (1, 1)],
        "teacher": [(0.1, 0.2)],
        "student": [(0.1, 0.2), (0.8, 0.6)],
    }


def test_context_shows_kl() -> None:
    assert read_plot(plots.draw_context, {"student": SPANS}) == {"student": [(1, 2.0), (2, 1.0)]}
