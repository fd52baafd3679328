"""Expected calibration error against bins counted by hand."""

from __future__ import annotations

import pytest
import torch

from kd.loss.targets import Targets
from kd.models.lm_head import LMHead
from kd.training.calibration import BINS, Calibration
from kd.training.evaluate import score_positions
from tests.support.kd.references import by_hand


@pytest.mark.parametrize("bins", [2, 15, 100])
def test_the_error_is_that_of_bins_counted_by_hand(bins: int) -> None:
    torch.manual_seed(0)
    confidence_N = torch.rand(500, dtype=torch.float64) ** 2
    confidence_N[:4] = torch.tensor([0.0, 1.0, 0.5, 1 / 15])
    right_N = torch.rand(500) < 0.4
    found = Calibration.of(confidence_N, right_N, bins)
    error, curve = by_hand(confidence_N.tolist(), right_N.tolist(), bins)
    assert found.error == pytest.approx(error, rel=1e-12)
    assert [pytest.approx(point, rel=1e-12) for point in curve] == found.curve()


def test_two_thirds_sure_and_right_half_of_the_time() -> None:
    confidence_N = torch.full((10,), 2 / 3)
    assert Calibration.of(confidence_N, torch.arange(10) < 5).error == pytest.approx(
        1 / 6, rel=1e-6
    )
    assert Calibration.of(torch.ones(4), torch.ones(4)).error == 0.0
    assert Calibration.of(torch.ones(4), torch.zeros(4)).error == 1.0


def test_parts_add_up_to_the_whole() -> None:
    """The error of a sum is not the mean of errors: two opposite halves of a bin cancel."""
    torch.manual_seed(1)
    confidence_N = torch.rand(90)
    right_N = torch.rand(90) < 0.5
    parts = [
        Calibration.of(confidence_N[at : at + 40], right_N[at : at + 40]) for at in (0, 40, 80)
    ]
    assert sum(parts, Calibration.none(15, torch.device("cpu"))).error == pytest.approx(
        Calibration.of(confidence_N, right_N).error, rel=1e-12
    )


def test_nothing_has_no_error() -> None:
    nothing = Calibration.none(15, torch.device("cpu"))
    assert nothing.error is None and nothing.curve() == []


@pytest.mark.parametrize("chunk", [1, 7, 10_000])
def test_a_head_is_calibrated_by_its_best_token_a_chunk_at_a_time(chunk: int) -> None:
    torch.manual_seed(2)
    weight = torch.randn(40, 8) * 2
    hidden_ND = torch.randn(33, 8)
    head = LMHead(weight, torch.randn(40), 0.5, 3.0, 37)  # three padded rows, a scale and a cap
    gold_N = torch.randint(0, 37, (33,))
    gold_N[::2] = head.compute_logits(hidden_ND)[::2].argmax(1)
    found = score_positions(hidden_ND, head, Targets(gold_N), chunk).calibration

    z_NV = (hidden_ND.double() @ weight.double().T + head.bias.double())[:, :37] * 0.5
    p_NV = (3.0 * torch.tanh(z_NV / 3.0)).softmax(1)
    confidence_N, place_N = p_NV.max(1)
    error, curve = by_hand(confidence_N.tolist(), (place_N == gold_N).tolist(), BINS)
    assert found.error == pytest.approx(error, rel=1e-5)
    assert [pytest.approx(point, rel=1e-5) for point in curve] == found.curve()
