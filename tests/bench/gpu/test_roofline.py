"""Expected rates are arithmetic that a reader can repeat; measured ones are of the same stages."""

from __future__ import annotations

import math

import pytest
import torch

from bench.gpu.stage_work import REAL, SMALL, ModelShape, Stage, list_stages
from bench.roofline import Expected, expect_on_gpu, find_rates, render_expected, render_measured
from bench.support.paths import ROOT
from kd.memory.devices import DEVICE_KINDS
from kd.models.precision import pick_device
from tests.support.stages import TINY

PAGE = ROOT / "docs/benchmarks/gpu.md"
#: Positions with a target are one fewer than tokens in each document.
TOLERANCE = 2 / REAL.document


@pytest.fixture(scope="module")
def stages() -> dict[str, Stage]:
    return {stage.name: stage for stage in list_stages(REAL)}


def find_rate(stage: Stage, device: str) -> Expected:
    found = expect_on_gpu(stage, DEVICE_KINDS[device])
    assert isinstance(found, Expected)
    return found


def count_layers(shape: ModelShape) -> int:
    """The weights of the matrices of all layers of a Llama."""
    attention = 2 * shape.width**2 * (1 + shape.pairs / shape.heads)
    return shape.layers * round(attention + 3 * shape.width * shape.inner)


@pytest.mark.long
def test_the_page_holds_what_the_command_prints() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert render_expected() in page


@pytest.mark.long
@pytest.mark.parametrize("model", ["1B", "8B"])
def test_a_capture_s_formulas_give_its_numbers(stages: dict[str, Stage], model: str) -> None:
    shape = REAL.teachers[model]
    layers = count_layers(shape)
    head = shape.width * REAL.vocabulary
    found = find_rate(stages[f"capture, {model}, 1k"], "h100")
    flops = 2 * layers + 2 * shape.layers * shape.width * REAL.document + 2 * head
    assert found.flops == pytest.approx(flops, rel=TOLERANCE)
    assert found.rate == pytest.approx(0.4 * DEVICE_KINDS["h100"].half / flops, rel=TOLERANCE)


@pytest.mark.long
def test_a_step_costs_three_forward_passes(stages: dict[str, Stage]) -> None:
    step = find_rate(stages["step, 1B, 1k"], "h100")
    capture = find_rate(stages["capture, 1B, 1k"], "h100")
    assert step.flops == pytest.approx(3 * capture.flops)


@pytest.mark.long
def test_what_does_not_fit_has_no_rate(stages: dict[str, Stage]) -> None:
    found = expect_on_gpu(stages["capture, 8B, 1k"], DEVICE_KINDS["t4"])
    assert isinstance(found, str) and found.startswith("does not fit: ")
    # A step that fits with fewer activations is slower.
    step = stages["step, 1B, 1k"]
    small, large = find_rate(step, "rtx4090"), find_rate(step, "h100")
    assert (small.setting, large.setting) == ("checkpointing full", "checkpointing none")
    assert small.flops > 1.2 * large.flops


@pytest.mark.long
def test_every_stage_is_measured_beside_its_expected_rate() -> None:
    lines = render_measured(TINY, 1).splitlines()
    rows = [line.strip("| ").split(" | ") for line in lines if line.startswith("| ")][1:]
    assert [row[0] for row in rows] == [*(stage.name for stage in list_stages(TINY)), "reader"]
    for row in rows:
        expected, measured, ratio = (float(cell.replace(",", "")) for cell in row[3:])
        assert expected > 0 and measured > 0 and math.isfinite(ratio), row
    assert lines[0].startswith("Machine: ") and ", load " in lines[0]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_every_stage_runs_on_a_gpu() -> None:
    text = render_measured(SMALL, 2)
    assert "does not fit" not in text
    assert text.count("\n| ") == len(list_stages(SMALL)) + 2, "the heading, the stages, the reader"
    assert find_rates(pick_device()).half > 0
