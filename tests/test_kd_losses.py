"""The fused head against a dense float64 reference, in value and in every gradient."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from kd import losses
from kd.losses import distillation_loss, score
from kd.models import Head
from kd.targets import DenseTarget, HiddenTarget, SparseTarget, Target, Targets, TopTarget

N, V, D = 23, 61, 12
PROFILES = ["sparse", "top", "dense", "hidden"]


# ---------------------------------------------------------------------- random targets, and what they mean


def random_entries(generator: torch.Generator, positions: int = N, vocabulary: int = V) -> SparseTarget:
    """Entries with weights that sum to 1, one of them slightly negative as rounding can make it; some rows have one."""
    counts = torch.randint(1, 9, (positions,), generator=generator)
    ids = torch.cat([torch.randperm(vocabulary, generator=generator)[:count] for count in counts.tolist()])
    parts = []
    for count in counts.tolist():
        weight = torch.rand(count, generator=generator, dtype=torch.float64) + 0.1
        weight = weight / weight.sum()
        if count > 2:
            weight[0] = -0.003
            weight[1:] *= 1.003 / weight[1:].sum()
        parts.append(weight)
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), counts.cumsum(0)])
    entropy = torch.rand(positions, generator=generator, dtype=torch.float64) * 3
    return SparseTarget(offsets, ids, torch.cat(parts), entropy, torch.where(counts > 4, 2, 0))


def random_target(profile: str, generator: torch.Generator, temperature: float) -> Target:
    logits_NV = torch.randn(N, V, generator=generator) * 3
    if profile == "sparse":
        return random_entries(generator)
    if profile == "top":
        top = torch.softmax(logits_NV.double(), 1).topk(7, 1)
        return TopTarget(top.indices, top.values, 1.0 - top.values.sum(1))
    if profile == "dense":
        return DenseTarget(torch.log_softmax(logits_NV, 1).half(), temperature)
    head = Head(torch.randn(V + 2, 5, generator=generator), torch.randn(V + 2, generator=generator), 1.5, 6.0, V)
    codes = torch.randint(-127, 128, (N, 5), generator=generator).to(torch.int8)
    return HiddenTarget(codes, torch.rand(N, generator=generator) / 60, head, temperature)


def dense_weights(target: SparseTarget, vocabulary: int) -> Tensor:
    rows = torch.repeat_interleave(torch.arange(len(target.entropy_N)), target.offsets_N1.diff())
    dense = torch.zeros(len(target.entropy_N), vocabulary, dtype=torch.float64)
    return dense.index_put_((rows, target.ids_E), target.weights_E, accumulate=True)


def dense_kl(logq_NV: Tensor, target: Any, temperature: float) -> Tensor:
    """KL(p || q) summed over positions, written out in float64 for each kind of target."""
    if isinstance(target, SparseTarget):
        return -(dense_weights(target, logq_NV.shape[1]) * logq_NV).sum() - target.entropy_N.sum()
    if isinstance(target, TopTarget):
        inside = torch.zeros_like(logq_NV, dtype=torch.bool).scatter(1, target.ids_Nk, True)
        outside_N = logq_NV.masked_fill(inside, -torch.inf).logsumexp(1)
        known_N = (target.p_Nk * (target.p_Nk.log() - logq_NV.gather(1, target.ids_Nk))).sum(1)
        return (known_N + target.rest_N * (target.rest_N.log() - outside_N)).sum()
    if isinstance(target, DenseTarget):
        z_NV = target.logprobs_NV.double()
    else:
        head, h_ND = target.head, target.hidden_ND.double() * target.scale_N.double()[:, None]
        z_NV = head.scale * (h_ND @ head.weight[: head.vocabulary].double().T + head.bias[: head.vocabulary].double())
        z_NV = head.softcap * torch.tanh(z_NV / head.softcap)
    logp_NV = torch.log_softmax(z_NV / temperature, 1)
    return (logp_NV.exp() * (logp_NV - logq_NV)).sum()


def dense_loss(x: Tensor, weight: Tensor, bias: Tensor | None, head: Head, targets: Targets, alpha: float) -> Tensor:
    """The same objective the plain way: all logits, log_softmax, float64."""
    z = x @ weight[: head.vocabulary].T
    z = z if bias is None else z + bias[: head.vocabulary]
    z = z * head.scale
    z = head.softcap * torch.tanh(z / head.softcap) if head.softcap else z
    ce = -torch.log_softmax(z, -1).gather(1, targets.gold_N[:, None]).sum()
    if targets.teacher is None:
        return ce
    t = targets.temperature
    return (1 - alpha) * t**2 * dense_kl(torch.log_softmax(z / t, -1), targets.teacher, t) + alpha * ce


def relative(found: Tensor, expected: Tensor) -> float:
    return float((found.double() - expected).norm() / expected.norm())


def random_targets(seed: int, profile: str = "sparse", temperature: float = 1.0) -> Targets:
    generator = torch.Generator().manual_seed(seed)
    target = random_target(profile, generator, temperature)
    return Targets(torch.randint(0, V, (N,), generator=generator), target, temperature)


@pytest.fixture(params=["one chunk", "many chunks"])
def chunks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "many chunks":
        monkeypatch.setattr(losses, "CHUNK_ELEMENTS", 3 * V)  # 3 rows at a time; 23 is not a multiple


# ---------------------------------------------------------------------- value and gradient


@dataclass(frozen=True)
class Shape:
    """How a student's head departs from a plain matrix."""

    bias: bool = False
    scale: float = 1.0
    softcap: float | None = None
    padding: int = 0


SHAPES = {
    "plain": Shape(),
    "bias": Shape(bias=True),
    "scale+padding": Shape(scale=0.0625, padding=3),
    "softcap": Shape(softcap=2.5),
    "all": Shape(True, 1.7, 4.0, 3),
}


def require_parity(targets: Targets, shape: Shape, alpha: float) -> None:
    """Value and every gradient within 1e-5 of the dense float64 reference."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(N, D, generator=generator).requires_grad_()
    weight = torch.randn(V + shape.padding, D, generator=generator).requires_grad_()
    bias = torch.randn(V + shape.padding, generator=generator).requires_grad_() if shape.bias else None
    head = Head(weight, bias, shape.scale, shape.softcap, V)

    terms = distillation_loss(x, head, targets, alpha)
    (terms.total / 7).backward()

    wide = [None if each is None else each.detach().double().requires_grad_() for each in (x, weight, bias)]
    expected = dense_loss(*wide, head, targets, alpha)
    (expected / 7).backward()
    assert terms.total.item() == pytest.approx(expected.item(), rel=1e-5)
    assert float((1 - alpha) * terms.kd + alpha * terms.ce) == pytest.approx(terms.total.item(), rel=1e-12)
    for ours, reference in zip((x, weight, bias), wide, strict=True):
        if ours is not None:
            assert relative(ours.grad, reference.grad) < 1e-5
    if shape.padding:
        assert not weight.grad[V:].any(), "padding must not be trained"


@pytest.mark.usefixtures("chunks")
@pytest.mark.parametrize("alpha", [0.0, 0.1, 0.7, 1.0])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("profile", PROFILES)
def test_value_and_gradients_equal_the_dense_reference(profile: str, shape: Shape, alpha: float) -> None:
    require_parity(random_targets(1, profile), shape, alpha)


@pytest.mark.usefixtures("chunks")
@pytest.mark.parametrize("alpha", [0.0, 0.1, 1.0])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("temperature", [0.5, 1.25, 2.0])
@pytest.mark.parametrize("profile", ["sparse", "dense", "hidden"])
def test_they_do_at_other_temperatures(profile: str, temperature: float, shape: Shape, alpha: float) -> None:
    require_parity(random_targets(2, profile, temperature), shape, alpha)


@pytest.mark.parametrize(
    ("profile", "temperature"),
    [(profile, 1.0) for profile in PROFILES] + [(profile, 1.25) for profile in ("sparse", "dense", "hidden")],
)
def test_gradients_are_those_of_the_value(profile: str, temperature: float) -> None:
    """By finite differences in float64, with no formula but the loss's own."""
    targets = random_targets(3, profile, temperature)
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(N, 4, generator=generator, dtype=torch.float64).requires_grad_()
    weight = torch.randn(V, 4, generator=generator, dtype=torch.float64).requires_grad_()

    def value(x: Tensor, weight: Tensor) -> Tensor:
        return distillation_loss(x, Head(weight, None, 1.0, None, V), targets, 0.3).total

    tolerance = 1e-6 if profile in ("sparse", "top") else 1e-4  # the others' probabilities are float32
    assert torch.autograd.gradcheck(value, (x, weight), atol=tolerance, fast_mode=True)


def test_float64_inputs_are_exact() -> None:
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(N, D, generator=generator, dtype=torch.float64).requires_grad_()
    weight = torch.randn(V, D, generator=generator, dtype=torch.float64)
    entries = random_entries(generator)
    targets = Targets(torch.randint(0, V, (N,), generator=generator), entries)
    distillation_loss(x, Head(weight, None, 1.0, None, V), targets, 0.0).total.backward()
    q = torch.softmax(x.detach() @ weight.T, -1)
    assert torch.allclose(x.grad, (q - dense_weights(entries, V)) @ weight, atol=1e-12)


def test_tied_embedding_gets_both_gradients() -> None:
    """The head's weight is also the embedding: its gradient is the sum of both paths."""
    generator = torch.Generator().manual_seed(3)
    table = torch.randn(V, D, generator=generator)
    tokens = torch.randint(0, V, (N,), generator=generator)
    targets = random_targets(3)

    tied = nn.Parameter(table.clone())
    distillation_loss(tied[tokens].tanh(), Head(tied, None, 1.0, None, V), targets, 0.3).total.backward()
    wide = table.double().requires_grad_()
    dense_loss(wide[tokens].tanh(), wide, None, Head(wide, None, 1.0, None, V), targets, 0.3).backward()
    assert relative(tied.grad, wide.grad) < 1e-5


def test_without_records_it_is_cross_entropy() -> None:
    generator = torch.Generator().manual_seed(4)
    x, weight = torch.randn(N, D, generator=generator).requires_grad_(), torch.randn(V, D, generator=generator)
    gold = torch.randint(0, V, (N,), generator=generator)
    terms = distillation_loss(x, Head(weight, None, 1.0, None, V), Targets(gold), 1.0)
    expected = nn.functional.cross_entropy(x.detach().double() @ weight.double().T, gold, reduction="sum")
    assert terms.total.item() == pytest.approx(expected.item(), rel=1e-6)
    assert float(terms.kd) == 0.0
    with pytest.raises(ValueError, match="alpha must be 1"):
        distillation_loss(x, Head(weight, None, 1.0, None, V), Targets(gold), 0.5)


@pytest.mark.parametrize(
    ("profile", "temperature"),
    [("top", 1.0)] + [(profile, t) for profile in ("sparse", "dense") for t in (0.5, 1.0, 2.0)],
)
def test_a_student_that_is_the_teacher_has_nothing_to_learn(profile: str, temperature: float) -> None:
    """Value and gradient are 0 at q = p, with every token an entry, a few and a bucket, or all as they are."""
    generator = torch.Generator().manual_seed(5)
    x, weight = torch.randn(N, D, generator=generator), torch.randn(V, D, generator=generator)
    logits_NV = (x @ weight.T).double()
    p_NV = torch.softmax(logits_NV / temperature, -1)
    everything = torch.arange(N + 1) * V, torch.arange(V).repeat(N), p_NV.reshape(-1), torch.special.entr(p_NV).sum(-1)
    top = p_NV.topk(5, 1)
    targets: dict[str, Target] = {
        "sparse": SparseTarget(*everything, torch.zeros(N, dtype=torch.int64)),
        "top": TopTarget(top.indices, top.values, 1 - top.values.sum(1)),
        "dense": DenseTarget(torch.log_softmax(logits_NV, -1).float(), temperature),
    }
    x = x.requires_grad_()
    gold = torch.zeros(N, dtype=torch.int64)
    terms = distillation_loss(
        x, Head(weight, None, 1.0, None, V), Targets(gold, targets[profile], temperature), alpha=0.0
    )
    terms.total.backward()
    assert abs(terms.total.item()) < 1e-3
    assert float(x.grad.abs().max()) < 1e-4


@pytest.mark.parametrize("gap", [0.0, 8.0, 16.0, 30.0])
def test_the_bucket_is_exact_where_the_student_leaves_almost_nothing_to_it(gap: float) -> None:
    """1 - Q down to e^-30: a difference from 1 would have no digit left in float32."""
    generator = torch.Generator().manual_seed(6)
    logits = torch.randn(N, V, generator=generator)
    top = torch.softmax(logits.double(), 1).topk(7, 1)
    logits = logits.scatter_add(1, top.indices, torch.full((N, 7), gap))
    targets = Targets(top.indices[:, 0], TopTarget(top.indices, top.values, 1 - top.values.sum(1)))
    identity = torch.eye(V)
    x, wide = logits.clone().requires_grad_(), logits.double().requires_grad_()
    found = distillation_loss(x, Head(identity, None, 1.0, None, V), targets, 0.1).total
    expected = dense_loss(wide, identity.double(), None, Head(identity, None, 1.0, None, V), targets, 0.1)
    found.backward()
    expected.backward()
    assert found.item() == pytest.approx(expected.item(), rel=1e-5)
    assert relative(x.grad, wide.grad) < 1e-5


def test_no_positions_is_zero_loss_and_zero_gradient() -> None:
    x, weight = torch.zeros(0, D, requires_grad=True), torch.randn(V, D, requires_grad=True)
    terms = distillation_loss(x, Head(weight, None, 1.0, None, V), Targets(torch.zeros(0, dtype=torch.int64)), 1.0)
    terms.total.backward()
    assert terms.total.item() == 0.0 and not weight.grad.any()


@pytest.mark.parametrize("temperature", [1.0, 2.0])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_hidden_states_keep_the_direction(dtype: torch.dtype, temperature: float) -> None:
    generator = torch.Generator().manual_seed(6)
    x = torch.randn(N, D, generator=generator)
    weight = torch.randn(V, D, generator=generator).requires_grad_()
    targets = random_targets(6, "sparse", temperature)
    half = x.to(dtype).requires_grad_()
    distillation_loss(half, Head(weight, None, 1.0, None, V), targets, 0.2).total.backward()
    wide, wide_weight = x.double().requires_grad_(), weight.detach().double().requires_grad_()
    dense_loss(wide, wide_weight, None, Head(wide_weight, None, 1.0, None, V), targets, 0.2).backward()
    assert half.grad.dtype == dtype and weight.grad.dtype == torch.float32
    assert relative(half.grad, wide.grad) < 2e-2 and relative(weight.grad, wide_weight.grad) < 2e-2


# ---------------------------------------------------------------------- evaluation


@pytest.mark.usefixtures("chunks")
@pytest.mark.parametrize(
    ("profile", "temperature"),
    [(profile, 1.0) for profile in PROFILES] + [(profile, 2.0) for profile in ("sparse", "dense", "hidden")],
)
def test_score_agrees_with_the_loss_and_counts_agreement(profile: str, temperature: float) -> None:
    generator = torch.Generator().manual_seed(7)
    x, weight = torch.randn(N, D, generator=generator), torch.randn(V, D, generator=generator)
    head, targets = Head(weight, None, 1.0, None, V), random_targets(7, profile, temperature)
    found, terms = score(x, head, targets), distillation_loss(x, head, targets, 0.5)
    assert targets.teacher is not None
    assert found.ce == pytest.approx(float(terms.ce), rel=1e-6)
    assert found.kd == pytest.approx(float(terms.kd) / temperature**2, rel=1e-6)
    best = targets.teacher.chunk(slice(0, N)).best_N()
    assert found.comparable == int((best >= 0).sum()) and (found.comparable == N) == (profile != "sparse")
    assert found.agreed == int(((x @ weight.T).argmax(-1) == best).sum())


def test_score_of_the_teacher_itself_agrees_everywhere() -> None:
    generator = torch.Generator().manual_seed(8)
    x, weight = torch.randn(N, D, generator=generator), torch.randn(V, D, generator=generator)
    target = DenseTarget(torch.log_softmax(x @ weight.T, -1), 1.0)
    found = score(x, Head(weight, None, 1.0, None, V), Targets(torch.zeros(N, dtype=torch.int64), target))
    assert (found.agreed, found.comparable) == (N, N) and found.kd == pytest.approx(0.0, abs=1e-4)


def test_score_without_a_teacher() -> None:
    x, weight = torch.zeros(N, D), torch.ones(V, D)
    found = score(x, Head(weight, None, 1.0, None, V), Targets(torch.zeros(N, dtype=torch.int64)))
    assert (found.kd, found.agreed, found.comparable) == (None, 0, 0) and found.ce > 0
