"""Each divergence against a closed form, torch's own functions, and finite differences."""

from __future__ import annotations

import math
from typing import get_args

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from kd.config.loss import Divergence
from kd.loss.divergences import compute_divergence, compute_logit_gradient, compute_slope

N = 9
V = 31
BETA = 0.3
NAMES = get_args(Divergence)


def make_pair(seed: int = 0, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    """The logits of a teacher and of a student."""
    generator = torch.Generator().manual_seed(seed)
    return tuple(
        2 * torch.randn(N, V, generator=generator, dtype=torch.float64).to(dtype) for _ in range(2)
    )  # type: ignore[return-value]


def compute_value(name: str, z: Tensor, s: Tensor) -> Tensor:
    """torch's KL of probabilities, with m as a distribution of its own."""
    p = z.softmax(1)
    q = s.softmax(1)
    m = BETA * p + (1 - BETA) * q

    def kl(a: Tensor, b: Tensor) -> Tensor:
        return F.kl_div(b.log(), a, reduction="none").sum(1)

    return {
        "forward_kl": lambda: kl(p, q),
        "reverse_kl": lambda: kl(q, p),
        "jsd": lambda: BETA * kl(p, m) + (1 - BETA) * kl(q, m),
        "skew_kl": lambda: kl(p, m),
        "total_variation": lambda: 0.5 * (p - q).abs().sum(1),
    }[name]()


@pytest.mark.parametrize("name", NAMES)
def test_values_are_those_of_torch(name: Divergence) -> None:
    z, s = make_pair()
    found = compute_divergence(name, BETA, z.log_softmax(1), s.log_softmax(1)).value_N
    torch.testing.assert_close(found, compute_value(name, z, s), rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("name", NAMES)
def test_gradients_are_those_of_finite_differences(name: Divergence) -> None:
    """Along random directions of both logits; the only derivative is a difference quotient."""
    z, s = make_pair(1)
    found = compute_divergence(name, BETA, z.log_softmax(1), s.log_softmax(1))
    step = 1e-5
    d_s = compute_logit_gradient(found.a_NV, s.softmax(1))
    d_z = compute_logit_gradient(found.b_NV, z.softmax(1))
    along_z, along_s = make_pair(2)
    by_s = (
        compute_value(name, z, s + step * along_s) - compute_value(name, z, s - step * along_s)
    ) / (2 * step)
    by_z = (
        compute_value(name, z + step * along_z, s) - compute_value(name, z - step * along_z, s)
    ) / (2 * step)
    torch.testing.assert_close((d_s * along_s).sum(1), by_s, rtol=1e-6, atol=1e-8)
    torch.testing.assert_close((d_z * along_z).sum(1), by_z, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("name", NAMES)
def test_slopes_are_the_derivative_by_the_temperature(name: Divergence) -> None:
    z, s = make_pair(3)
    t = 1.4
    step = 1e-5
    found = compute_divergence(name, BETA, (z / t).log_softmax(1), (s / t).log_softmax(1))
    slope = (
        -(
            compute_slope(found.a_NV, (s / t).log_softmax(1))
            + compute_slope(found.b_NV, (z / t).log_softmax(1))
        )
        / t
    )
    up, down = (compute_value(name, z / each, s / each) for each in (t + step, t - step))
    torch.testing.assert_close(slope, (up - down) / (2 * step), rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("name", NAMES)
def test_two_tokens_by_hand(name: Divergence) -> None:
    """p = (3/4, 1/4), q = (1/4, 3/4), and beta = 1/2: m is uniform."""
    p = torch.tensor([[0.75, 0.25]], dtype=torch.float64)
    found = compute_divergence(name, 0.5, p.log(), p.flip(1).log()).value_N.item()
    to_half = math.log(2) - (0.75 * math.log(4 / 3) + 0.25 * math.log(4))
    by_hand = {"total_variation": 0.5, "jsd": to_half, "skew_kl": to_half}.get(
        name, 0.5 * math.log(3)
    )
    assert found == pytest.approx(by_hand, rel=1e-12)


@pytest.mark.parametrize("name", NAMES)
def test_tokens_that_one_of_the_two_forbids_leave_everything_finite(name: Divergence) -> None:
    z, s = make_pair(4, torch.float32)
    z[:, 0] = -1e4
    s[:, 1] = -1e4
    found = compute_divergence(name, BETA, z.log_softmax(1), s.log_softmax(1))
    assert all(torch.isfinite(each).all() for each in (found.value_N, found.a_NV, found.b_NV))
