"""The softmax of a student is over all rows of its LM head, and the teacher's p over the tokens.

Rows that no token has must lose their probability: nothing else would train them.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from kd.loss.dense import compute_dense_loss
from kd.loss.fused import compute_distillation_loss
from kd.loss.objective import Objective
from kd.loss.targets import Targets
from kd.loss.whole_targets import TopTarget
from kd.models.lm_head import LMHead
from tests.support.kd.targets import PROFILES, D, N, V, learned, random_targets

#: Rows beyond the vocabulary.
PADDING = 7


def make_targets(profile: str, temperature: float = 1.0) -> Targets:
    targets = random_targets(3, profile, temperature)
    if isinstance(targets.teacher, TopTarget):
        return replace(targets, teacher=replace(targets.teacher, vocabulary=V))
    return targets


def compute(
    targets: Targets, objective: Objective, fused: bool
) -> tuple[float, Tensor, Tensor, Tensor | None]:
    """The loss, and its gradients for hidden states, LM head and T."""
    generator = torch.Generator().manual_seed(1)
    x, weight = (
        torch.randn(rows, D, generator=generator).double().requires_grad_()
        for rows in (N, V + PADDING)
    )
    if isinstance(targets.temperature, Tensor):
        targets = learned(targets, float(targets.temperature.detach()))
    head = LMHead(weight, None, 1.0, None, V + PADDING)
    run = compute_distillation_loss if fused else compute_dense_loss
    total = run(x, head, targets, objective).total
    total.backward()
    slope = targets.temperature.grad if isinstance(targets.temperature, Tensor) else None
    return total.item(), x.grad, weight.grad, slope


@pytest.mark.parametrize(
    ("profile", "temperature", "divergence"),
    [
        *((profile, 1.0, "forward_kl") for profile in PROFILES),
        ("dense", 2.0, "forward_kl"),
        *(("dense", 1.5, name) for name in ("reverse_kl", "jsd", "skew_kl", "total_variation")),
        ("hidden", 1.5, "jsd"),
    ],
)
def test_value_and_gradients_are_those_of_the_dense_pass(
    profile: str, temperature: float, divergence: str
) -> None:
    objective = Objective(0.3, divergence)  # type: ignore[arg-type]
    targets = make_targets(profile, temperature)
    ours, theirs = (compute(targets, objective, fused) for fused in (True, False))
    assert ours[0] == pytest.approx(theirs[0], rel=1e-10)
    for found, expected in zip(ours[1:3], theirs[1:3], strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-8, atol=1e-10)


def test_the_slope_of_a_learned_temperature_is_that_of_the_dense_pass() -> None:
    targets = learned(make_targets("dense"), 1.3)
    teacher = replace(targets.teacher, temperature=1.3)  # type: ignore[type-var]
    found = compute(replace(targets, teacher=teacher), Objective(0.2), fused=True)
    expected = compute(replace(targets, teacher=teacher), Objective(0.2), fused=False)
    assert found[0] == pytest.approx(expected[0], rel=1e-10)
    torch.testing.assert_close(found[3], expected[3], rtol=1e-8, atol=1e-10)


def test_the_loss_of_whole_distributions_is_the_kl_over_all_rows() -> None:
    targets = make_targets("dense")
    generator = torch.Generator().manual_seed(1)
    x, weight = (torch.randn(rows, D, generator=generator).double() for rows in (N, V + PADDING))
    logp_NV = targets.teacher.take_chunk(slice(0, N), torch.float64).logp_NV  # type: ignore[union-attr]
    logq_NV = (x @ weight.T).log_softmax(1)
    expected = (logp_NV.exp() * (logp_NV - logq_NV[:, :V])).sum()
    found = compute_distillation_loss(
        x, LMHead(weight, None, 1.0, None, V + PADDING), targets, Objective(0.0)
    )
    assert found.kd.item() == pytest.approx(float(expected), rel=1e-10)
    ce = torch.nn.functional.cross_entropy(x @ weight.T, targets.gold_N, reduction="sum")
    assert found.ce.item() == pytest.approx(float(ce), rel=1e-12)


@pytest.mark.parametrize("profile", PROFILES)
def test_each_step_takes_probability_from_the_rows_without_a_token(profile: str) -> None:
    targets = make_targets(profile)
    torch.manual_seed(0)
    x = torch.randn(N, D)
    weight = (0.3 * torch.randn(V + PADDING, D)).requires_grad_()
    bias = torch.zeros(V + PADDING, requires_grad=True)
    head = LMHead(weight, bias, 1.0, None, V + PADDING)

    def weigh_rows() -> float:
        return head.compute_logits(x).softmax(1)[:, V:].sum(1).mean().item()

    before = weigh_rows()
    optimizer = torch.optim.Adam([weight, bias], lr=0.1)
    for _ in range(60):
        optimizer.zero_grad()
        compute_distillation_loss(x, head, targets, Objective(0.0)).total.backward()
        optimizer.step()
    assert before > 0.05 and weigh_rows() < 0.1 * before
