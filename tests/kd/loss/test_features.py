"""Feature matching against its definition in float64, and where it must not be computed."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kd.config.loss import FeatureConfig
from kd.loss.features import FeatureLoss
from kd.loss.targets import Targets
from kd.loss.whole_targets import DenseTarget, HiddenTarget
from kd.models.lm_head import LMHead

N = 13
V = 29


def make_targets(width: int) -> Targets:
    generator = torch.Generator().manual_seed(0)
    codes_NW = torch.randint(-127, 128, (N, width), generator=generator).to(torch.int8)
    head = LMHead(torch.randn(V, width, generator=generator), None, 1.0, None, V)
    scale_N = torch.rand(N, generator=generator) / 60
    return Targets(torch.zeros(N, dtype=torch.int64), HiddenTarget(codes_NW, scale_N, head, 1.0))


def make_states(width: int, seed: int = 1) -> Tensor:
    return torch.randn(N, width, generator=torch.Generator().manual_seed(seed)) * 3


def compute_expected(kind: str, weight: float, ours: Tensor, targets: Targets) -> Tensor:
    """The definition, one position at a time."""
    target = targets.teacher
    assert isinstance(target, HiddenTarget)
    total = torch.zeros((), dtype=torch.float64)
    for x, codes, scale in zip(ours, target.hidden_ND, target.scale_N, strict=True):
        h = codes.double() * scale.double()
        if kind == "cosine":
            total = total + 1 - (x @ h) / (x.norm() * h.norm())
        else:
            total = (
                total + ((x / (x @ x / len(x)).sqrt() - h / (h @ h / len(h)).sqrt()) ** 2).mean()
            )
    return weight * total


@pytest.mark.parametrize("teacher_width", [8, 12, 5])
@pytest.mark.parametrize("kind", ["mse", "cosine"])
def test_value_and_gradients_are_those_of_the_definition(kind: str, teacher_width: int) -> None:
    torch.manual_seed(0)
    features = FeatureLoss(FeatureConfig(kind=kind, weight=0.7), 8, teacher_width)
    targets = make_targets(teacher_width)
    x = make_states(8).requires_grad_()
    wide = make_states(8).double().requires_grad_()
    matrix = torch.eye(8, dtype=torch.float64)
    if features.projection is not None:
        matrix = features.projection.weight.detach().double()
    matrix.requires_grad_()
    found = features(x, targets)
    reference = compute_expected(kind, 0.7, wide @ matrix.T, targets)
    found.backward()
    reference.backward()
    assert found.item() == pytest.approx(reference.item(), rel=1e-5)
    torch.testing.assert_close(x.grad.double(), wide.grad, rtol=1e-4, atol=1e-6)
    if features.projection is not None:
        torch.testing.assert_close(
            features.projection.weight.grad.double(), matrix.grad, rtol=1e-4, atol=1e-6
        )


def test_a_projection_is_only_where_the_widths_differ() -> None:
    assert [*FeatureLoss(FeatureConfig(kind="mse", weight=1.0), 8, 8).parameters()] == []
    (weight,) = FeatureLoss(FeatureConfig(kind="mse", weight=1.0), 8, 5).parameters()
    assert weight.shape == (5, 8)
    torch.testing.assert_close(weight @ weight.T, torch.eye(5), rtol=0, atol=1e-5)


@pytest.mark.parametrize("kind", ["mse", "cosine"])
def test_a_student_that_is_the_teacher_times_any_number_has_nothing_to_learn(kind: str) -> None:
    targets = make_targets(8)
    assert isinstance(targets.teacher, HiddenTarget)
    x = (targets.teacher.decode_states(slice(0, N)) * 4.0).requires_grad_()
    total = FeatureLoss(FeatureConfig(kind=kind, weight=1.0), 8, 8)(x, targets)  # type: ignore[arg-type]
    total.backward()
    assert abs(total.item()) < 1e-5 and float(x.grad.abs().max()) < 1e-5


def test_a_few_steps_bring_the_student_to_the_teacher() -> None:
    """Both the states and the projection must move: a frozen projection could not come so far."""
    torch.manual_seed(0)
    features = FeatureLoss(FeatureConfig(kind="cosine", weight=1.0), 6, 9)
    targets = make_targets(9)
    x = make_states(6).requires_grad_()
    optimizer = torch.optim.Adam([x, *features.parameters()], lr=0.05)
    before = features(x, targets).item()
    weight = features.projection.weight.detach().clone()
    for _ in range(150):
        optimizer.zero_grad()
        features(x, targets).backward()
        optimizer.step()
    assert features(x, targets).item() < 0.25 * before
    assert float((features.projection.weight.detach() - weight).norm()) > 0.1


def test_states_in_bfloat16_are_compared_in_float32() -> None:
    x = make_states(8).bfloat16().requires_grad_()
    total = FeatureLoss(FeatureConfig(kind="mse", weight=1.0), 8, 8)(x, make_targets(8))
    total.backward()
    reference = compute_expected("mse", 1.0, x.detach().double(), make_targets(8))
    assert (
        total.item() == pytest.approx(reference.item(), rel=1e-5) and x.grad.dtype == torch.bfloat16
    )


def test_other_profiles_are_refused_by_name() -> None:
    plain = Targets(torch.zeros(N, dtype=torch.int64), DenseTarget(torch.zeros(N, V), 1.0))
    with pytest.raises(ValueError, match="profile hidden"):
        FeatureLoss(FeatureConfig(kind="mse", weight=1.0), 8, 8)(make_states(8), plain)
