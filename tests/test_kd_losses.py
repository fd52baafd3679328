"""The fused head against a dense float64 reference, in value and in every gradient."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor, nn

from kd.config.loss import Divergence, LossConfig
from kd.dense_loss import dense_loss as dense_loss_of
from kd.evaluate import score
from kd.losses import Objective, chunk_positions, distillation_loss
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


def dense_loss(x: Tensor, weight: Tensor, bias: Tensor | None, head: Head, targets: Targets, alpha: float) -> Tensor:
    """The same objective the plain way, in float64."""
    return dense_loss_of(x, replace(head, weight=weight, bias=bias), targets, Objective(alpha)).total


def relative(found: Tensor, expected: Tensor) -> float:
    return float((found.double() - expected).norm() / expected.norm())


def random_targets(seed: int, profile: str = "sparse", temperature: float = 1.0) -> Targets:
    generator = torch.Generator().manual_seed(seed)
    target = random_target(profile, generator, temperature)
    gold_N, entropy_N = torch.randint(0, V, (N,), generator=generator), 3 * torch.rand(N, generator=generator).double()
    entropy_N[4] = torch.nan  # nobody said
    return Targets(gold_N, target, temperature, entropy_N)


CHUNKS = pytest.mark.parametrize("chunk", [None, 3], ids=["one chunk", "many chunks"])  # 23 is not a multiple


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


def require_parity(
    targets: Targets,
    shape: Shape,
    objective: Objective,
    chunk: int | None = None,
    dtype: torch.dtype = torch.float32,
) -> None:
    """Value, parts and every gradient within 1e-5 of the dense float64 reference, or 1e-10 in float64."""
    tolerance = 1e-5 if dtype == torch.float32 else 1e-10
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(N, D, generator=generator).to(dtype).requires_grad_()
    weight = torch.randn(V + shape.padding, D, generator=generator).to(dtype).requires_grad_()
    bias = torch.randn(V + shape.padding, generator=generator).to(dtype).requires_grad_() if shape.bias else None
    head = Head(weight, bias, shape.scale, shape.softcap, V)

    terms = distillation_loss(x, head, targets, objective, chunk)
    (terms.total / 7).backward()

    wide = [None if each is None else each.detach().double().requires_grad_() for each in (x, weight, bias)]
    plain = replace(head, weight=wide[1], bias=wide[2])
    theirs = targets
    if isinstance(targets.temperature, Tensor):
        theirs = replace(targets, temperature=targets.temperature.detach().clone().requires_grad_())
    expected = dense_loss_of(wide[0], plain, theirs, objective)
    (expected.total / 7).backward()
    for name in ("total", "kd", "ce", "z", "entropy", "smoothing"):
        found, reference = (getattr(each, name).item() for each in (terms, expected))
        assert found == pytest.approx(reference, rel=tolerance, abs=1e-12), name
    parts = (1 - objective.alpha) * terms.kd + objective.alpha * (terms.ce + terms.smoothing) + terms.z
    assert float(parts) == pytest.approx(terms.total.item(), rel=1e-12)
    for ours, reference in zip((x, weight, bias), wide, strict=True):
        if ours is not None:
            assert relative(ours.grad, reference.grad) < tolerance
    if isinstance(targets.temperature, Tensor) and targets.temperature.requires_grad:
        slope = theirs.temperature.grad.item() if theirs.temperature.grad is not None else 0.0
        assert targets.temperature.grad.item() == pytest.approx(slope, rel=tolerance, abs=tolerance)
    if shape.padding:
        assert not weight.grad[V:].any(), "padding must not be trained"


@CHUNKS
@pytest.mark.parametrize("alpha", [0.0, 0.1, 0.7, 1.0])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("profile", PROFILES)
def test_value_and_gradients_equal_the_dense_reference(
    profile: str, shape: Shape, alpha: float, chunk: int | None
) -> None:
    require_parity(random_targets(1, profile), shape, Objective(alpha), chunk)


@CHUNKS
@pytest.mark.parametrize("alpha", [0.0, 0.1, 1.0])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("temperature", [0.5, 1.4, 2.0])
@pytest.mark.parametrize("profile", ["sparse", "dense", "hidden"])
def test_they_do_at_other_temperatures(
    profile: str, temperature: float, shape: Shape, alpha: float, chunk: int | None
) -> None:
    require_parity(random_targets(2, profile, temperature), shape, Objective(alpha), chunk)


# ---------------------------------------------------------------------- every lever, and the temperature's gradient

LEVERS = {
    "plain": Objective(0.2),
    "smoothing": Objective(0.3, label_smoothing=0.1),
    "z": Objective(0.0, z_loss=0.01),
    "weights": Objective(0.2, entropy_weighting=-1.5),
    "teacher only": Objective(0.2, teacher_only=True),
    "all": Objective(0.4, label_smoothing=0.2, z_loss=0.02, entropy_weighting=2.0),
    "all, teacher only": Objective(0.4, "forward_kl", 0.5, 0.2, 0.02, 2.0, True),
    "hard only": Objective(1.0, label_smoothing=0.2, z_loss=0.02),
}
DIVERGENCES = ("forward_kl", "reverse_kl", "jsd", "skew_kl", "total_variation")


def learned(targets: Targets, temperature: float) -> Targets:
    """The same with a temperature that wants a gradient."""
    return replace(targets, temperature=torch.tensor(temperature, dtype=torch.float64, requires_grad=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("lever", LEVERS)
@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.4, 2.0])
@pytest.mark.parametrize("profile", ["sparse", "dense", "hidden"])
def test_levers_and_the_temperature_s_gradient(
    profile: str, temperature: float, lever: str, dtype: torch.dtype
) -> None:
    targets = learned(random_targets(3, profile, temperature), temperature)
    require_parity(targets, SHAPES["all"], LEVERS[lever], 5, dtype)


@pytest.mark.parametrize("lever", LEVERS)
@pytest.mark.parametrize("profile", PROFILES)
def test_levers_without_a_learned_temperature(profile: str, lever: str) -> None:
    require_parity(random_targets(4, profile), SHAPES["bias"], LEVERS[lever], 5)
    require_parity(random_targets(4, profile), SHAPES["plain"], LEVERS[lever], 5, torch.float64)


@pytest.mark.parametrize("teacher_only", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.4, 2.0])
@pytest.mark.parametrize("divergence", DIVERGENCES)
@pytest.mark.parametrize("profile", ["dense", "hidden"])
def test_other_divergences_in_the_same_pass(
    profile: str, divergence: Divergence, temperature: float, dtype: torch.dtype, teacher_only: bool
) -> None:
    objective = Objective(0.3, divergence, 0.3, 0.1, 0.01, 1.0, teacher_only)
    for shape in ("plain", "all"):
        targets = random_targets(5, profile, temperature)
        require_parity(targets, SHAPES[shape], objective, 5, dtype)
        require_parity(learned(targets, temperature), SHAPES[shape], replace(objective, alpha=0.0), 5, dtype)


def loss_of(objective: Objective, profile: str = "dense", temperature: float = 1.4) -> float:
    generator = torch.Generator().manual_seed(6)
    x, weight = torch.randn(N, D, generator=generator), torch.randn(V, D, generator=generator)
    targets = random_targets(6, profile, temperature)
    return distillation_loss(x, Head(weight, None, 1.0, None, V), targets, objective).total.item()


def test_no_lever_is_without_effect() -> None:
    base = Objective(0.3, "jsd")
    changed = [
        replace(base, divergence="skew_kl"), replace(base, beta=0.2), replace(base, label_smoothing=0.1),
        replace(base, z_loss=0.1), replace(base, entropy_weighting=1.0), replace(base, teacher_only=True),
        base.at(0.4),
    ]  # fmt: skip
    assert len({round(loss_of(each), 6) for each in [base, *changed]}) == len(changed) + 1


def test_z_loss_and_smoothing_are_torch_s_own() -> None:
    generator = torch.Generator().manual_seed(7)
    x, weight = torch.randn(N, D, generator=generator), torch.randn(V, D, generator=generator)
    gold = torch.randint(0, V, (N,), generator=generator)
    terms = distillation_loss(
        x, Head(weight, None, 1.0, None, V), Targets(gold), Objective(1.0, label_smoothing=0.1, z_loss=0.5)
    )
    s = x.double() @ weight.double().T
    smooth = nn.functional.cross_entropy(s, gold, reduction="sum", label_smoothing=0.1)
    assert float(terms.ce + terms.smoothing) == pytest.approx(smooth.item(), rel=1e-6)
    assert float(terms.z) == pytest.approx(0.5 * float(torch.logsumexp(s, 1).square().sum()), rel=1e-6)


def test_token_weights_have_mean_1_and_unknown_entropies_weigh_1() -> None:
    """A divergence that is the same at every position is not changed by weights; one that grows with H is."""
    targets = random_targets(8, "sparse")
    alike = SparseTarget(
        torch.arange(N + 1), torch.zeros(N, dtype=torch.int64), torch.ones(N).double(),
        torch.zeros(N, dtype=torch.float64), torch.ones(N, dtype=torch.int64),
    )  # fmt: skip
    x, weight = torch.ones(N, D), torch.randn(V, D, generator=torch.Generator().manual_seed(8))
    head = Head(weight, None, 1.0, None, V)
    kd = [
        distillation_loss(x, head, replace(targets, teacher=alike), Objective(0.0, entropy_weighting=w)).kd.item()
        for w in (0.0, 2.0, -2.0)
    ]
    assert kd[1] == pytest.approx(kd[0], rel=1e-9) and kd[2] == pytest.approx(kd[0], rel=1e-9)
    with pytest.raises(ValueError, match="teacher's entropies"):
        distillation_loss(x, head, replace(targets, entropy_N=None), Objective(0.0, entropy_weighting=1.0))


def test_what_targets_cannot_serve_is_refused() -> None:
    x, head = torch.ones(N, D), Head(torch.ones(V, D), None, 1.0, None, V)
    for profile in ("sparse", "top"):
        with pytest.raises(ValueError, match="jsd needs all of p"):
            distillation_loss(x, head, random_targets(9, profile), Objective(0.0, "jsd"))
    with pytest.raises(ValueError, match="another temperature"):
        distillation_loss(x, head, learned(random_targets(9, "top"), 1.0), Objective(0.0))


def test_gradients_are_handed_over_once() -> None:
    x = torch.ones(N, D, requires_grad=True)
    total = distillation_loss(x, Head(torch.ones(V, D), None, 1.0, None, V), random_targets(9), Objective(0.1)).total
    total.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="handed over"):
        total.backward()


def test_a_chunk_holds_a_constant_of_logits_on_a_cpu() -> None:
    cpu = torch.device("cpu")
    sizes = [chunk_positions(vocabulary, cpu) * vocabulary for vocabulary in (12_288, 49_152, 262_144)]
    assert all(0.98 * max(sizes) < size <= 12 * 2**20 for size in sizes)
    assert chunk_positions(61, cpu) == chunk_positions(12_000, cpu) == 1024
    assert chunk_positions(10**9, torch.device("cpu")) == 1


def test_the_objective_of_a_job_is_its_configuration() -> None:
    levers = {"divergence": "jsd", "beta": 0.2, "label_smoothing": 0.1, "z_loss": 0.01, "entropy_weighting": 1.0}
    found = Objective.of(LossConfig(alpha=0.4, **levers))
    assert found == Objective(0.4, "jsd", 0.2, 0.1, 0.01, 1.0, False)
    ramp = LossConfig.model_validate({"alpha": {"schedule": "linear", "start": 0.6, "end": 0.0}})
    assert (Objective.of(ramp).alpha, Objective.of(ramp).at(0.2).alpha) == (0.6, 0.2)
    assert Objective.of(LossConfig.model_validate({"temperature": {"mode": "teacher_only"}})).teacher_only


@pytest.mark.parametrize(
    ("profile", "temperature"),
    [(profile, 1.0) for profile in PROFILES] + [(profile, 1.25) for profile in ("sparse", "dense", "hidden")],
)
def test_gradients_are_those_of_the_value(profile: str, temperature: float) -> None:
    """By finite differences in float64, with no formula but the loss's own."""
    targets = random_targets(3, profile, temperature)
    generator = torch.Generator().manual_seed(3)
    x, weight, dx, dw = (torch.randn(rows, 4, generator=generator, dtype=torch.float64) for rows in (N, V, N, V))
    step = 1e-5

    def value(x: Tensor, weight: Tensor) -> Tensor:
        return distillation_loss(x, Head(weight, None, 1.0, None, V), targets, Objective(0.3), 5).total

    quotient = (value(x + step * dx, weight + step * dw) - value(x - step * dx, weight - step * dw)) / (2 * step)
    x, weight = x.requires_grad_(), weight.requires_grad_()
    value(x, weight).backward()
    assert float((x.grad * dx).sum() + (weight.grad * dw).sum()) == pytest.approx(quotient.item(), rel=1e-6)


def test_float64_inputs_are_exact() -> None:
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(N, D, generator=generator, dtype=torch.float64).requires_grad_()
    weight = torch.randn(V, D, generator=generator, dtype=torch.float64)
    entries = random_entries(generator)
    targets = Targets(torch.randint(0, V, (N,), generator=generator), entries)
    distillation_loss(x, Head(weight, None, 1.0, None, V), targets, Objective(0.0)).total.backward()
    q = torch.softmax(x.detach() @ weight.T, -1)
    assert torch.allclose(x.grad, (q - dense_weights(entries, V)) @ weight, atol=1e-12)


def test_tied_embedding_gets_both_gradients() -> None:
    """The head's weight is also the embedding: its gradient is the sum of both paths."""
    generator = torch.Generator().manual_seed(3)
    table = torch.randn(V, D, generator=generator)
    tokens = torch.randint(0, V, (N,), generator=generator)
    targets = random_targets(3)

    tied = nn.Parameter(table.clone())
    distillation_loss(tied[tokens].tanh(), Head(tied, None, 1.0, None, V), targets, Objective(0.3)).total.backward()
    wide = table.double().requires_grad_()
    dense_loss(wide[tokens].tanh(), wide, None, Head(wide, None, 1.0, None, V), targets, 0.3).backward()
    assert relative(tied.grad, wide.grad) < 1e-5


@pytest.mark.parametrize("size", [1.0, 30.0, 1e4])
def test_losses_of_large_logits_are_no_less_exact(size: float) -> None:
    """Rows that are sure of the label, sure of another token, and undecided; logits are given as they are."""
    logits_NV = torch.randn(N, V, generator=torch.Generator().manual_seed(2)) * size
    logits_NV[:8, 3] += 30.0
    gold_N = torch.tensor([3] * 4 + [5] * 4 + [7] * (N - 8))
    terms = distillation_loss(
        logits_NV, Head(torch.eye(V), None, 1.0, None, V), Targets(gold_N), Objective(alpha=1.0, z_loss=1.0)
    )
    exact = logits_NV.double()
    lse_N = exact.logsumexp(1)
    for found, expected in (
        (terms.ce, nn.functional.cross_entropy(exact, gold_N, reduction="sum")),
        (terms.z, lse_N.square().sum()),
    ):
        assert float(found) == pytest.approx(float(expected), rel=1e-6, abs=1e-5)


def test_without_records_it_is_cross_entropy() -> None:
    generator = torch.Generator().manual_seed(4)
    x, weight = torch.randn(N, D, generator=generator).requires_grad_(), torch.randn(V, D, generator=generator)
    gold = torch.randint(0, V, (N,), generator=generator)
    terms = distillation_loss(x, Head(weight, None, 1.0, None, V), Targets(gold), Objective(1.0))
    expected = nn.functional.cross_entropy(x.detach().double() @ weight.double().T, gold, reduction="sum")
    assert terms.total.item() == pytest.approx(expected.item(), rel=1e-6)
    assert float(terms.kd) == 0.0
    with pytest.raises(ValueError, match="alpha must be 1"):
        distillation_loss(x, Head(weight, None, 1.0, None, V), Targets(gold), Objective(0.5))


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
        x, Head(weight, None, 1.0, None, V), Targets(gold, targets[profile], temperature), Objective(0.0)
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
    found = distillation_loss(x, Head(identity, None, 1.0, None, V), targets, Objective(0.1)).total
    expected = dense_loss(wide, identity.double(), None, Head(identity, None, 1.0, None, V), targets, 0.1)
    found.backward()
    expected.backward()
    assert found.item() == pytest.approx(expected.item(), rel=1e-5)
    assert relative(x.grad, wide.grad) < 1e-5


def test_no_positions_is_zero_loss_and_zero_gradient() -> None:
    x, weight = torch.zeros(0, D, requires_grad=True), torch.randn(V, D, requires_grad=True)
    terms = distillation_loss(
        x, Head(weight, None, 1.0, None, V), Targets(torch.zeros(0, dtype=torch.int64)), Objective(1.0)
    )
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
    distillation_loss(half, Head(weight, None, 1.0, None, V), targets, Objective(0.2)).total.backward()
    wide, wide_weight = x.double().requires_grad_(), weight.detach().double().requires_grad_()
    dense_loss(wide, wide_weight, None, Head(wide_weight, None, 1.0, None, V), targets, 0.2).backward()
    assert half.grad.dtype == dtype and weight.grad.dtype == torch.float32
    assert relative(half.grad, wide.grad) < 2e-2 and relative(weight.grad, wide_weight.grad) < 2e-2


# ---------------------------------------------------------------------- evaluation


@CHUNKS
@pytest.mark.parametrize(
    ("profile", "temperature"),
    [(profile, 1.0) for profile in PROFILES] + [(profile, 2.0) for profile in ("sparse", "dense", "hidden")],
)
def test_score_agrees_with_the_loss_and_counts_agreement(profile: str, temperature: float, chunk: int | None) -> None:
    generator = torch.Generator().manual_seed(7)
    x, weight = torch.randn(N, D, generator=generator), torch.randn(V, D, generator=generator)
    head, targets = Head(weight, None, 1.0, None, V), random_targets(7, profile, temperature)
    found, terms = score(x, head, targets, chunk), distillation_loss(x, head, targets, Objective(0.5))
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
