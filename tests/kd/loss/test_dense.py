"""The plain reference against torch's own functions, closed forms and difference quotients.

Nothing of the fused pass is used here.
"""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from cache.rounding import make_cosine_basis
from kd.loss.dense import compute_dense_loss
from kd.loss.objective import Objective
from kd.loss.sparse_targets import SparseTarget
from kd.loss.targets import Targets
from kd.loss.whole_targets import DenseTarget, HiddenTarget, TopTarget
from kd.models.lm_head import LMHead
from tests.support.kd.references import dense_terms

N = 11
V = 23
D = 6


def make_logits(seed: int = 0) -> Tensor:
    return torch.randn(N, V, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * 2


def make_gold() -> Tensor:
    return torch.randint(0, V, (N,), generator=torch.Generator().manual_seed(9))


@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.4, 2.0])
def test_forward_kl_and_cross_entropy_are_torch_s(temperature: float) -> None:
    s = make_logits()
    z = make_logits(1)
    gold = make_gold()
    found = dense_terms(s, z, gold, temperature, Objective(0.3, label_smoothing=0.1))
    kl = (
        F.kl_div((s / temperature).log_softmax(1), (z / temperature).softmax(1), reduction="sum")
        * temperature**2
    )
    smooth = F.cross_entropy(s, gold, reduction="sum", label_smoothing=0.1)
    assert found.kd.item() == pytest.approx(kl.item(), rel=1e-12)
    assert found.ce.item() == pytest.approx(
        F.cross_entropy(s, gold, reduction="sum").item(), rel=1e-12
    )
    assert found.total.item() == pytest.approx((0.7 * kl + 0.3 * smooth).item(), rel=1e-12)
    entropy = torch.distributions.Categorical(logits=z / temperature).entropy().sum()
    assert found.entropy.item() == pytest.approx(entropy.item(), rel=1e-12)


def test_the_student_stays_at_1_where_only_the_teacher_is_tempered() -> None:
    s = make_logits()
    z = make_logits(1)
    found = dense_terms(s, z, make_gold(), 2.0, Objective(teacher_only=True))
    expected = F.kl_div(s.log_softmax(1), (z / 2.0).softmax(1), reduction="sum")
    assert found.total.item() == pytest.approx(expected.item(), rel=1e-12)


@pytest.mark.parametrize("divergence", ["reverse_kl", "jsd", "skew_kl", "total_variation"])
def test_other_divergences_by_hand(divergence: str) -> None:
    """p = (3/4, 1/4), q = (1/4, 3/4): with beta = 1/2 the mixture is uniform."""
    p = torch.tensor([[0.75, 0.25]], dtype=torch.float64)
    objective = Objective(divergence=divergence)  # type: ignore[arg-type]
    found = dense_terms(p.flip(1).log(), p.log(), torch.tensor([0]), 1.0, objective).total.item()
    to_half = math.log(2) - (0.75 * math.log(4 / 3) + 0.25 * math.log(4))
    by_hand = {
        "total_variation": 0.5,
        "jsd": to_half,
        "skew_kl": to_half,
        "reverse_kl": 0.5 * math.log(3),
    }
    assert found == pytest.approx(by_hand[divergence], rel=1e-12)


@pytest.mark.parametrize("beta", [0.2, 0.7])
def test_beta_is_the_teacher_s_weight(beta: float) -> None:
    s = make_logits()
    z = make_logits(1)
    p = z.softmax(1)
    q = s.softmax(1)
    m = beta * p + (1 - beta) * q
    skew = F.kl_div(m.log(), p, reduction="sum")
    other = F.kl_div(m.log(), q, reduction="sum")
    objective = Objective(divergence="skew_kl", beta=beta)
    assert dense_terms(s, z, make_gold(), 1.0, objective).kd.item() == pytest.approx(
        skew.item(), rel=1e-12
    )
    found = dense_terms(s, z, make_gold(), 1.0, replace(objective, divergence="jsd")).kd.item()
    assert found == pytest.approx((beta * skew + (1 - beta) * other).item(), rel=1e-12)


@pytest.mark.parametrize("divergence", ["jsd", "skew_kl"])
def test_a_mixture_of_tokens_of_probability_0_is_no_nan(divergence: str) -> None:
    """At T = 0.05 a gap of 50 nats becomes 1000, and p, q and their mixture are 0 in float64."""
    s = torch.tensor([[2.0, 1.0, -50.0]], dtype=torch.float64, requires_grad=True)
    z = torch.tensor([[1.0, 1.2, -48.0]], dtype=torch.float64)
    objective = Objective(divergence=divergence)  # type: ignore[arg-type]
    found = dense_terms(s, z, torch.tensor([0]), 0.05, objective).total
    without = dense_terms(s[:, :2], z[:, :2], torch.tensor([0]), 0.05, objective).total
    (slope,) = torch.autograd.grad(found, s)
    assert found.item() == pytest.approx(without.item(), rel=1e-12)
    assert bool(slope.isfinite().all()) and slope[0, 2].item() == 0.0


@pytest.mark.parametrize("teacher_only", [False, True])
@pytest.mark.parametrize(
    "divergence", ["forward_kl", "reverse_kl", "jsd", "skew_kl", "total_variation"]
)
def test_the_temperature_s_gradient_is_the_difference_quotient_s(
    divergence: str, teacher_only: bool
) -> None:
    s = make_logits()
    z = make_logits(1)
    gold = make_gold()
    step = 1e-6
    objective = Objective(0.2, divergence, 0.3, 0.1, 0.01, 1.0, teacher_only)  # type: ignore[arg-type]
    temperature = torch.tensor(1.4, dtype=torch.float64, requires_grad=True)
    dense_terms(s, z, gold, temperature, objective).total.backward()
    up, down = (
        dense_terms(s, z, gold, each, objective).total.item() for each in (1.4 + step, 1.4 - step)
    )
    assert temperature.grad is not None
    assert temperature.grad.item() == pytest.approx((up - down) / (2 * step), rel=1e-6)


def test_z_loss_and_entropy_weights() -> None:
    s = make_logits()
    z = make_logits(1)
    found = dense_terms(s, z, make_gold(), 1.0, Objective(z_loss=0.3, entropy_weighting=2.0))
    assert found.z.item() == pytest.approx(
        0.3 * float(s.exp().sum(1).log().square().sum()), rel=1e-12
    )
    weight = (1 + torch.distributions.Categorical(logits=z).entropy()) ** 2
    kl = F.kl_div(s.log_softmax(1), z.softmax(1), reduction="none").sum(1)
    assert found.kd.item() == pytest.approx(float((weight / weight.mean() * kl).sum()), rel=1e-12)


def test_every_form_of_one_teacher_gives_one_loss() -> None:
    """All tokens as entries, K tokens with a bucket of one, log-probabilities, hidden states."""
    generator = torch.Generator().manual_seed(3)
    codes = torch.randint(-127, 128, (N, D), generator=generator).to(torch.int8)
    scale = torch.rand(N, generator=generator) / 60
    theirs = LMHead(torch.randn(V, D, generator=generator), None, 1.0, None, V)
    cosines = torch.from_numpy(make_cosine_basis(D))
    rotated = replace(theirs, weight=theirs.weight.double() @ cosines)
    z = (codes.double() * scale.double()[:, None]) @ theirs.weight.double().T
    p = z.softmax(1)
    top = p.topk(V - 1, 1)
    forms = [
        HiddenTarget(codes, scale, theirs, 1.0),
        HiddenTarget(codes, scale, rotated, 1.0, cosines=True),
        DenseTarget(z.log_softmax(1), 1.0),
        TopTarget(top.indices, top.values, 1 - top.values.sum(1)),
        SparseTarget(
            torch.arange(N + 1) * V, torch.arange(V).repeat(N), p.reshape(-1),
            torch.special.entr(p).sum(1), torch.zeros(N, dtype=torch.int64),
        ),
    ]  # fmt: skip
    hidden = torch.randn(N, D, generator=generator, dtype=torch.float64)
    head = LMHead(
        torch.randn(V + 2, D, generator=generator),
        torch.randn(V + 2, generator=generator),
        1.5,
        4.0,
        V,
    )
    s = 4.0 * torch.tanh(1.5 * (hidden @ head.weight[:V].double().T + head.bias[:V].double()) / 4.0)
    expected = dense_terms(s, z, make_gold(), 1.0, Objective(0.2)).total.item()
    for form in forms:
        found = compute_dense_loss(
            hidden, head, Targets(make_gold(), form), Objective(0.2)
        ).total.item()
        assert found == pytest.approx(expected, rel=1e-9), type(form).__name__
    plain = compute_dense_loss(hidden, head, Targets(make_gold()), Objective(1.0))
    assert plain.total.item() == pytest.approx(
        F.cross_entropy(s, make_gold(), reduction="sum").item(), rel=1e-12
    )
    assert (plain.kd.item(), plain.entropy.item()) == (0.0, 0.0)
