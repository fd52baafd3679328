"""The fused loss against a dense float64 reference, in value and in every gradient."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from kd.config.loss import Divergence, LossConfig
from kd.loss.chunk_size import choose_chunk_positions
from kd.loss.fused import compute_distillation_loss
from kd.loss.objective import Objective
from kd.loss.sparse_targets import SparseTarget
from kd.loss.targets import Targets, TeacherTarget
from kd.loss.whole_targets import DenseTarget, TopTarget
from kd.models.lm_head import LMHead
from kd.training.evaluate import score_positions
from tests.support.kd.targets import (
    CHUNKS,
    LEVERS,
    PROFILES,
    SHAPES,
    D,
    N,
    Shape,
    V,
    dense_loss,
    learned,
    random_entries,
    random_targets,
    relative,
    require_parity,
)

# ---------------------------------------------------------------------- random targets


def compute_dense_weights(target: SparseTarget, vocabulary: int) -> Tensor:
    rows = torch.repeat_interleave(torch.arange(len(target.entropy_N)), target.offsets_N1.diff())
    dense = torch.zeros(len(target.entropy_N), vocabulary, dtype=torch.float64)
    return dense.index_put_((rows, target.ids_E), target.weights_E, accumulate=True)


# ---------------------------------------------------------------------- value and gradient


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


# ---------------------------------------------------------------------- options and T

DIVERGENCES = ("forward_kl", "reverse_kl", "jsd", "skew_kl", "total_variation")


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
        require_parity(
            learned(targets, temperature), SHAPES[shape], replace(objective, alpha=0.0), 5, dtype
        )


def compute_loss(objective: Objective, profile: str = "dense", temperature: float = 1.4) -> float:
    generator = torch.Generator().manual_seed(6)
    x = torch.randn(N, D, generator=generator)
    weight = torch.randn(V, D, generator=generator)
    targets = random_targets(6, profile, temperature)
    return compute_distillation_loss(
        x, LMHead(weight, None, 1.0, None, V), targets, objective
    ).total.item()


def test_no_lever_is_without_effect() -> None:
    base = Objective(0.3, "jsd")
    changed = [
        replace(base, divergence="skew_kl"),
        replace(base, beta=0.2),
        replace(base, label_smoothing=0.1),
        replace(base, z_loss=0.1),
        replace(base, entropy_weighting=1.0),
        replace(base, teacher_only=True),
        base.with_alpha(0.4),
    ]
    assert len({round(compute_loss(each), 6) for each in [base, *changed]}) == len(changed) + 1


def test_z_loss_and_smoothing_are_torch_s_own() -> None:
    generator = torch.Generator().manual_seed(7)
    x = torch.randn(N, D, generator=generator)
    weight = torch.randn(V, D, generator=generator)
    gold = torch.randint(0, V, (N,), generator=generator)
    terms = compute_distillation_loss(
        x,
        LMHead(weight, None, 1.0, None, V),
        Targets(gold),
        Objective(1.0, label_smoothing=0.1, z_loss=0.5),
    )
    s = x.double() @ weight.double().T
    smooth = nn.functional.cross_entropy(s, gold, reduction="sum", label_smoothing=0.1)
    assert float(terms.ce + terms.smoothing) == pytest.approx(smooth.item(), rel=1e-6)
    assert float(terms.z) == pytest.approx(
        0.5 * float(torch.logsumexp(s, 1).square().sum()), rel=1e-6
    )


def test_token_weights_have_mean_1_and_unknown_entropies_weigh_1() -> None:
    """Weights change no divergence that is equal at every position; one that grows with H they
    change.
    """
    targets = random_targets(8, "sparse")
    alike = SparseTarget(
        torch.arange(N + 1),
        torch.zeros(N, dtype=torch.int64),
        torch.ones(N).double(),
        torch.zeros(N, dtype=torch.float64),
        torch.ones(N, dtype=torch.int64),
    )
    x = torch.ones(N, D)
    weight = torch.randn(V, D, generator=torch.Generator().manual_seed(8))
    head = LMHead(weight, None, 1.0, None, V)
    kd = [
        compute_distillation_loss(
            x, head, replace(targets, teacher=alike), Objective(0.0, entropy_weighting=w)
        ).kd.item()
        for w in (0.0, 2.0, -2.0)
    ]
    assert kd[1] == pytest.approx(kd[0], rel=1e-9) and kd[2] == pytest.approx(kd[0], rel=1e-9)
    weighted = Objective(0.0, entropy_weighting=2.0)
    known_N = targets.entropy_N[~targets.entropy_N.isnan()]
    assert len(known_N) < N
    # With the mean of a whole step each position has the weight that it has there.
    half, unknown = (1.0 + known_N).square().mean().item() / 2.0, N - len(known_N)
    of_step = compute_distillation_loss(
        x, head, replace(targets, teacher=alike), weighted.with_mean_weight(half)
    ).kd.item()
    assert of_step == pytest.approx(kd[0] * (2 * len(known_N) + unknown) / N, rel=1e-9)
    with pytest.raises(ValueError, match="teacher's entropies"):
        compute_distillation_loss(
            x, head, replace(targets, entropy_N=None), Objective(0.0, entropy_weighting=1.0)
        )


def test_what_targets_cannot_serve_is_refused() -> None:
    x = torch.ones(N, D)
    head = LMHead(torch.ones(V, D), None, 1.0, None, V)
    for profile in ("sparse", "top"):
        with pytest.raises(ValueError, match="jsd needs all of p"):
            compute_distillation_loss(x, head, random_targets(9, profile), Objective(0.0, "jsd"))
    with pytest.raises(ValueError, match="another temperature"):
        compute_distillation_loss(x, head, learned(random_targets(9, "top"), 1.0), Objective(0.0))


def test_gradients_are_handed_over_once() -> None:
    x = torch.ones(N, D, requires_grad=True)
    total = compute_distillation_loss(
        x, LMHead(torch.ones(V, D), None, 1.0, None, V), random_targets(9), Objective(0.1)
    ).total
    total.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="compute the loss again"):
        total.backward()


def test_a_chunk_holds_a_constant_of_logits_on_a_cpu() -> None:
    cpu = torch.device("cpu")
    sizes = [
        choose_chunk_positions(vocabulary, cpu) * vocabulary
        for vocabulary in (12_288, 49_152, 262_144)
    ]
    assert all(0.98 * max(sizes) < size <= 12 * 2**20 for size in sizes)
    assert choose_chunk_positions(61, cpu) == choose_chunk_positions(12_000, cpu) == 1024
    assert choose_chunk_positions(10**9, torch.device("cpu")) == 1


def test_the_objective_of_a_job_is_its_configuration() -> None:
    levers = {
        "divergence": "jsd",
        "beta": 0.2,
        "label_smoothing": 0.1,
        "entropy_weighting": 1.0,
    }
    found = Objective.of(LossConfig(alpha=0.4, **levers))
    assert found == Objective(0.4, "jsd", 0.2, 0.1, 0.0, 1.0, False)
    ramp = LossConfig.model_validate({"alpha": {"schedule": "linear", "start": 0.6, "end": 0.0}})
    assert (Objective.of(ramp).alpha, Objective.of(ramp).with_alpha(0.2).alpha) == (0.6, 0.2)
    assert Objective.of(
        LossConfig.model_validate({"temperature": {"mode": "teacher_only"}})
    ).teacher_only


@pytest.mark.parametrize(
    ("profile", "temperature"),
    [(profile, 1.0) for profile in PROFILES]
    + [(profile, 1.25) for profile in ("sparse", "dense", "hidden")],
)
def test_gradients_are_those_of_the_value(profile: str, temperature: float) -> None:
    """By finite differences in float64; the only formula used is the loss's own."""
    targets = random_targets(3, profile, temperature)
    generator = torch.Generator().manual_seed(3)
    x, weight, dx, dw = (
        torch.randn(rows, 4, generator=generator, dtype=torch.float64) for rows in (N, V, N, V)
    )
    step = 1e-5

    def value(x: Tensor, weight: Tensor) -> Tensor:
        return compute_distillation_loss(
            x, LMHead(weight, None, 1.0, None, V), targets, Objective(0.3), 5
        ).total

    quotient = (
        value(x + step * dx, weight + step * dw) - value(x - step * dx, weight - step * dw)
    ) / (2 * step)
    x = x.requires_grad_()
    weight = weight.requires_grad_()
    value(x, weight).backward()
    assert float((x.grad * dx).sum() + (weight.grad * dw).sum()) == pytest.approx(
        quotient.item(), rel=1e-6
    )


def test_float64_inputs_are_exact() -> None:
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(N, D, generator=generator, dtype=torch.float64).requires_grad_()
    weight = torch.randn(V, D, generator=generator, dtype=torch.float64)
    entries = random_entries(generator)
    targets = Targets(torch.randint(0, V, (N,), generator=generator), entries)
    compute_distillation_loss(
        x, LMHead(weight, None, 1.0, None, V), targets, Objective(0.0)
    ).total.backward()
    q = torch.softmax(x.detach() @ weight.T, -1)
    w = compute_dense_weights(entries, V)
    assert torch.allclose(x.grad, (q * w.sum(1, keepdim=True) - w) @ weight, atol=1e-12)


def test_tied_embedding_gets_both_gradients() -> None:
    """The LM head's weight is also the embedding: its gradient is the sum of both paths."""
    generator = torch.Generator().manual_seed(3)
    table = torch.randn(V, D, generator=generator)
    tokens = torch.randint(0, V, (N,), generator=generator)
    targets = random_targets(3)

    tied = nn.Parameter(table.clone())
    compute_distillation_loss(
        tied[tokens].tanh(), LMHead(tied, None, 1.0, None, V), targets, Objective(0.3)
    ).total.backward()
    wide = table.double().requires_grad_()
    dense_loss(
        wide[tokens].tanh(), wide, None, LMHead(wide, None, 1.0, None, V), targets, 0.3
    ).backward()
    assert relative(tied.grad, wide.grad) < 1e-5


@pytest.mark.parametrize("size", [1.0, 30.0, 1e4])
def test_losses_of_large_logits_are_no_less_exact(size: float) -> None:
    """Rows sure of the label, sure of another token, and undecided, given as logits."""
    logits_NV = torch.randn(N, V, generator=torch.Generator().manual_seed(2)) * size
    logits_NV[:8, 3] += 30.0
    gold_N = torch.tensor([3] * 4 + [5] * 4 + [7] * (N - 8))
    terms = compute_distillation_loss(
        logits_NV,
        LMHead(torch.eye(V), None, 1.0, None, V),
        Targets(gold_N),
        Objective(alpha=1.0, z_loss=1.0),
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
    x = torch.randn(N, D, generator=generator).requires_grad_()
    weight = torch.randn(V, D, generator=generator)
    gold = torch.randint(0, V, (N,), generator=generator)
    terms = compute_distillation_loss(
        x, LMHead(weight, None, 1.0, None, V), Targets(gold), Objective(1.0)
    )
    expected = nn.functional.cross_entropy(
        x.detach().double() @ weight.double().T, gold, reduction="sum"
    )
    assert terms.total.item() == pytest.approx(expected.item(), rel=1e-6)
    assert float(terms.kd) == 0.0
    with pytest.raises(ValueError, match="alpha must be 1"):
        compute_distillation_loss(
            x, LMHead(weight, None, 1.0, None, V), Targets(gold), Objective(0.5)
        )


@pytest.mark.parametrize(
    ("profile", "temperature"),
    [("top", 1.0)] + [(profile, t) for profile in ("sparse", "dense") for t in (0.5, 1.0, 2.0)],
)
def test_a_student_that_is_the_teacher_has_nothing_to_learn(
    profile: str, temperature: float
) -> None:
    """Value and gradient are 0 at q = p, for entries of every token, a few and a bucket, and whole
    p.
    """
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(N, D, generator=generator)
    weight = torch.randn(V, D, generator=generator)
    logits_NV = (x @ weight.T).double()
    p_NV = torch.softmax(logits_NV / temperature, -1)
    everything = (
        torch.arange(N + 1) * V,
        torch.arange(V).repeat(N),
        p_NV.reshape(-1),
        torch.special.entr(p_NV).sum(-1),
    )
    top = p_NV.topk(5, 1)
    targets: dict[str, TeacherTarget] = {
        "sparse": SparseTarget(*everything, torch.zeros(N, dtype=torch.int64)),
        "top": TopTarget(top.indices, top.values, 1 - top.values.sum(1)),
        "dense": DenseTarget(torch.log_softmax(logits_NV, -1).float(), temperature),
    }
    x = x.requires_grad_()
    gold = torch.zeros(N, dtype=torch.int64)
    terms = compute_distillation_loss(
        x,
        LMHead(weight, None, 1.0, None, V),
        Targets(gold, targets[profile], temperature),
        Objective(0.0),
    )
    terms.total.backward()
    assert abs(terms.total.item()) < 1e-3
    assert float(x.grad.abs().max()) < 1e-4


@pytest.mark.parametrize("gap", [0.0, 8.0, 16.0, 30.0])
def test_the_bucket_is_exact_where_the_student_leaves_almost_nothing_to_it(gap: float) -> None:
    """1 - Q goes down to e^-30: a difference from 1 would have no digit left in float32."""
    generator = torch.Generator().manual_seed(6)
    logits = torch.randn(N, V, generator=generator)
    top = torch.softmax(logits.double(), 1).topk(7, 1)
    logits = logits.scatter_add(1, top.indices, torch.full((N, 7), gap))
    targets = Targets(top.indices[:, 0], TopTarget(top.indices, top.values, 1 - top.values.sum(1)))
    identity = torch.eye(V)
    x = logits.clone().requires_grad_()
    wide = logits.double().requires_grad_()
    found = compute_distillation_loss(
        x, LMHead(identity, None, 1.0, None, V), targets, Objective(0.1)
    ).total
    expected = dense_loss(
        wide, identity.double(), None, LMHead(identity, None, 1.0, None, V), targets, 0.1
    )
    found.backward()
    expected.backward()
    assert found.item() == pytest.approx(expected.item(), rel=1e-5)
    assert relative(x.grad, wide.grad) < 1e-5


def test_no_positions_is_zero_loss_and_zero_gradient() -> None:
    x = torch.zeros(0, D, requires_grad=True)
    weight = torch.randn(V, D, requires_grad=True)
    terms = compute_distillation_loss(
        x,
        LMHead(weight, None, 1.0, None, V),
        Targets(torch.zeros(0, dtype=torch.int64)),
        Objective(1.0),
    )
    terms.total.backward()
    assert terms.total.item() == 0.0 and not weight.grad.any()


@pytest.mark.parametrize("temperature", [1.0, 2.0])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_hidden_states_keep_the_direction(
    dtype: torch.dtype, temperature: float
) -> None:
    generator = torch.Generator().manual_seed(6)
    x = torch.randn(N, D, generator=generator)
    weight = torch.randn(V, D, generator=generator).requires_grad_()
    targets = random_targets(6, "sparse", temperature)
    half = x.to(dtype).requires_grad_()
    compute_distillation_loss(
        half, LMHead(weight, None, 1.0, None, V), targets, Objective(0.2)
    ).total.backward()
    wide = x.double().requires_grad_()
    wide_weight = weight.detach().double().requires_grad_()
    dense_loss(
        wide, wide_weight, None, LMHead(wide_weight, None, 1.0, None, V), targets, 0.2
    ).backward()
    assert half.grad.dtype == dtype and weight.grad.dtype == torch.float32
    assert relative(half.grad, wide.grad) < 2e-2 and relative(weight.grad, wide_weight.grad) < 2e-2


# ---------------------------------------------------------------------- evaluation


@CHUNKS
@pytest.mark.parametrize(
    ("profile", "temperature"),
    [(profile, 1.0) for profile in PROFILES]
    + [(profile, 2.0) for profile in ("sparse", "dense", "hidden")],
)
def test_score_agrees_with_the_loss_and_counts_agreement(
    profile: str, temperature: float, chunk: int | None
) -> None:
    generator = torch.Generator().manual_seed(7)
    x = torch.randn(N, D, generator=generator)
    weight = torch.randn(V, D, generator=generator)
    head = LMHead(weight, None, 1.0, None, V)
    targets = random_targets(7, profile, temperature)
    found = score_positions(x, head, targets, chunk)
    terms = compute_distillation_loss(x, head, targets, Objective(0.5))
    assert targets.teacher is not None
    assert found.ce == pytest.approx(float(terms.ce), rel=1e-6)
    assert found.kd == pytest.approx(float(terms.kd) / temperature**2, rel=1e-6)
    best = targets.teacher.take_chunk(slice(0, N)).find_best_N()
    assert found.comparable == int((best >= 0).sum()) and (found.comparable == N) == (
        profile != "sparse"
    )
    assert found.agreed == int(((x @ weight.T).argmax(-1) == best).sum())


def test_score_of_the_teacher_itself_agrees_everywhere() -> None:
    generator = torch.Generator().manual_seed(8)
    x = torch.randn(N, D, generator=generator)
    weight = torch.randn(V, D, generator=generator)
    target = DenseTarget(torch.log_softmax(x @ weight.T, -1), 1.0)
    found = score_positions(
        x, LMHead(weight, None, 1.0, None, V), Targets(torch.zeros(N, dtype=torch.int64), target)
    )
    assert (found.agreed, found.comparable) == (N, N) and found.kd == pytest.approx(0.0, abs=1e-4)


def test_score_without_a_teacher() -> None:
    x = torch.zeros(N, D)
    weight = torch.ones(V, D)
    found = score_positions(
        x, LMHead(weight, None, 1.0, None, V), Targets(torch.zeros(N, dtype=torch.int64))
    )
    assert (found.kd, found.agreed, found.comparable) == (None, 0, 0) and found.ce > 0
