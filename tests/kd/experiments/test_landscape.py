"""The landscape of a small run: its ends are the run's own, and its directions have its scale."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from torch import nn

from kd.config.jobfile import parse_config
from kd.errors import Interrupted, ModelError
from kd.experiments.landscape import (
    LandscapeOptions,
    copy_weights,
    draw_direction,
    find_barrier,
    measure_rise,
    set_weights,
    survey,
)
from kd.experiments.landscape_page import Landscape
from kd.files import read_json
from kd.pipeline import run_stages
from kd.progress import Event, Monitor

pytestmark = pytest.mark.usefixtures("one_thread")
OPTIONS = LandscapeOptions(points=3, line_points=7, radius=0.5, sequences=64)


@pytest.fixture(scope="module")
def home(tiny_teacher: Path, tiny_text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A home with one finished run, which tests do not change."""
    home = tmp_path_factory.mktemp("home")
    job = {
        "teacher": {"model": str(tiny_teacher), "batch_size": 4},
        "student": {"init": {"layers": 1, "hidden_size": 16}},
        "data": {
            "train": str(tiny_text), "sequence_length": 32, "max_train_samples": 8,
            "validation_fraction": 0.2, "max_eval_samples": 3,
        },
        "loss": {"alpha": 0.25},
        "train": {"max_steps": 6, "batch_size": 4, "learning_rate": 0.01, "save_steps": 6},
    }  # fmt: skip
    run_stages(parse_config(job), home, home / "runs" / "job")
    return home


@pytest.fixture(scope="module")
def found(home: Path, tmp_path_factory: pytest.TempPathFactory) -> Landscape:
    folder = tmp_path_factory.mktemp("landscape")
    found = survey(home / "runs" / "job", home, folder, OPTIONS)
    page = (folder / "index.html").read_text(encoding="utf-8")
    assert page.count("<svg") == 3 and "<script" not in page
    assert read_json(folder / "landscape.json") == found.to_json()
    return found


@pytest.mark.long
def test_the_ends_of_the_line_are_the_student_before_and_after(
    found: Landscape, home: Path
) -> None:
    """All held-out sequences are measured, so that the loss is that of the run's own report."""
    from kd.tracking.metrics import read_metrics

    lines = read_metrics(home / "runs" / "job" / "metrics.jsonl")
    evaluations = [line for line in lines if line["type"] == "evaluation"]
    report = read_json(home / "runs" / "job" / "report.json")
    first, last = (
        0.25 * evaluations[place]["validation_loss"] + 0.75 * evaluations[place]["validation_kl"]
        for place in (0, -1)
    )
    line = found.line
    assert line.places == pytest.approx([-0.25, 0.0, 0.25, 0.5, 0.75, 1.0, 1.25])
    assert line.losses["held_out"][1] == pytest.approx(first, rel=1e-5)
    assert line.losses["held_out"][5] == pytest.approx(last, rel=1e-5)
    assert found.plane.centre["held_out"] == pytest.approx(last, rel=1e-5)
    assert found.tokens["held_out"] == report["held_out_tokens"]


def test_the_centre_of_the_plane_is_the_student_itself(found: Landscape) -> None:
    plane = found.plane
    for split in ("train", "held_out"):
        assert plane.losses[split][1][1] == pytest.approx(plane.centre[split], rel=1e-6)
        assert len(plane.losses[split]) == 3 and all(len(row) == 3 for row in plane.losses[split])
        assert plane.losses[split][0][0] != plane.losses[split][2][2]


def test_it_stops_between_two_points_and_needs_a_student(home: Path, tmp_path: Path) -> None:
    seen: list[Event] = []
    monitor = Monitor(seen.append, lambda: len(seen) >= 3)
    with pytest.raises(Interrupted):
        survey(home / "runs" / "job", home, tmp_path, OPTIONS, monitor)
    assert not list(tmp_path.iterdir())
    with pytest.raises(ModelError, match="has no student"):
        survey(tmp_path, home, tmp_path, OPTIONS)


def test_a_direction_has_the_lengths_of_the_rows_and_leaves_vectors_alone() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 3), nn.LayerNorm(3))
    weights = copy_weights(model)
    weights["0.weight"][1] = 0.0
    direction = draw_direction(weights, 7)
    expected = weights["0.weight"].norm(dim=1)
    assert torch.allclose(direction["0.weight"].norm(dim=1), expected) and expected[1] == 0
    assert all(not direction[name].any() for name in ("0.bias", "1.weight", "1.bias"))
    assert torch.equal(draw_direction(weights, 7)["0.weight"], direction["0.weight"])
    assert not torch.equal(draw_direction(weights, 8)["0.weight"], direction["0.weight"])
    set_weights(model, weights, (0.5, direction), (-0.25, direction))
    moved = weights["0.weight"] + 0.25 * direction["0.weight"]
    assert torch.allclose(model[0].weight.detach(), moved)


def test_a_barrier_is_the_largest_rise_on_the_way() -> None:
    places = [-0.5, 0.0, 0.25, 0.5, 0.75, 1.0, 1.5]
    assert find_barrier(places, [9, 5, 4, 3, 2, 1, 9]) == 0
    assert find_barrier(places, [0, 5, 3, 4, 4.5, 1, 0]) == 1.5
    assert find_barrier(places, [0, 5, math.inf, 4, 4.5, 1, 0]) is None
    grid = [[3.0, 2.0, 3.0], [2.0, 1.0, math.nan], [3.0, 2.0, 3.0]]
    assert measure_rise([-1.0, 0.0, 1.0], grid, 1.0) is None
    assert measure_rise([-1.0, -0.5, 0.0, 0.5, 1.0], [[2.0] * 5] * 5, 0.5) == 1.5
