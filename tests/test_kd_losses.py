"""The fused head against a dense float64 reference, in value and in every gradient."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from kd import losses
from kd.losses import RecordTargets, Targets, distillation_loss, score
from kd.models import Head

N, V, D = 23, 61, 12


def random_record(generator: torch.Generator, positions: int = N, vocabulary: int = V) -> RecordTargets:
    """Entries with weights that sum to 1, one of them slightly negative as rounding can make it; some rows have one."""
    counts = torch.randint(1, 9, (positions,), generator=generator)
    ids = torch.cat([torch.randperm(vocabulary, generator=generator)[:count] for count in counts.tolist()])
    parts = []
    for count in counts.tolist():
        weight = torch.rand(count, generator=generator) + 0.1
        weight = weight / weight.sum()
        if count > 2:
            weight[0] = -0.003
            weight[1:] *= 1.003 / weight[1:].sum()
        parts.append(weight)
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), counts.cumsum(0)])
    entropy = torch.rand(positions, generator=generator) * 3
    return RecordTargets(offsets, ids, torch.cat(parts), entropy)


def dense_weights(record: RecordTargets, vocabulary: int) -> Tensor:
    rows = torch.repeat_interleave(torch.arange(len(record.entropy_N)), record.offsets_N1.diff())
    dense = torch.zeros(len(record.entropy_N), vocabulary, dtype=torch.float64)
    return dense.index_put_((rows, record.ids_E), record.weights_E.double(), accumulate=True)


def dense_loss(x: Tensor, weight: Tensor, bias: Tensor | None, head: Head, targets: Targets, alpha: float) -> Tensor:
    """The same objective the plain way: all logits, log_softmax, float64."""
    z = x @ weight[: head.vocabulary].T
    z = z if bias is None else z + bias[: head.vocabulary]
    z = z * head.scale
    z = head.softcap * torch.tanh(z / head.softcap) if head.softcap else z
    logq = torch.log_softmax(z, -1)
    ce = -logq.gather(1, targets.gold_N[:, None]).sum()
    if targets.record is None:
        return ce
    kd = -(dense_weights(targets.record, head.vocabulary) * logq).sum() - targets.record.entropy_N.double().sum()
    return (1 - alpha) * kd + alpha * ce


def relative(found: Tensor, expected: Tensor) -> float:
    return float((found.double() - expected).norm() / expected.norm())


@pytest.fixture(params=["one chunk", "many chunks"])
def chunks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "many chunks":
        monkeypatch.setattr(losses, "CHUNK_ELEMENTS", 3 * V)  # 3 rows at a time; 23 is not a multiple


@pytest.mark.usefixtures("chunks")
@pytest.mark.parametrize("alpha", [0.0, 0.1, 0.7, 1.0])
@pytest.mark.parametrize(
    ("bias", "scale", "softcap", "padding"),
    [(False, 1.0, None, 0), (True, 1.0, None, 0), (False, 0.0625, None, 3), (False, 1.0, 2.5, 0), (True, 1.7, 4.0, 3)],
    ids=["plain", "bias", "scale+padding", "softcap", "all"],
)
def test_value_and_gradients_equal_the_dense_reference(
    alpha: float, bias: bool, scale: float, softcap: float | None, padding: int
) -> None:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(N, D, generator=generator).requires_grad_()
    weight = torch.randn(V + padding, D, generator=generator).requires_grad_()
    offset = torch.randn(V + padding, generator=generator).requires_grad_() if bias else None
    targets = Targets(torch.randint(0, V, (N,), generator=generator), random_record(generator))
    head = Head(weight, offset, scale, softcap, V)

    terms = distillation_loss(x, head, targets, alpha)
    (terms.total / 7).backward()

    wide = [None if each is None else each.detach().double().requires_grad_() for each in (x, weight, offset)]
    expected = dense_loss(*wide, head, targets, alpha)
    (expected / 7).backward()
    assert terms.total.item() == pytest.approx(expected.item(), rel=1e-5)
    assert float((1 - alpha) * terms.kd + alpha * terms.ce) == pytest.approx(terms.total.item(), rel=1e-12)
    for ours, reference in zip((x, weight, offset), wide, strict=True):
        if ours is not None:
            assert relative(ours.grad, reference.grad) < 1e-5
    if padding:
        assert not weight.grad[V:].any(), "padding must not be trained"


def test_float64_inputs_are_exact() -> None:
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(N, D, generator=generator, dtype=torch.float64).requires_grad_()
    weight = torch.randn(V, D, generator=generator, dtype=torch.float64)
    record = random_record(generator)
    record = RecordTargets(record.offsets_N1, record.ids_E, record.weights_E.double(), record.entropy_N)
    dense = dense_weights(record, V)
    record_sum = dense.sum(1)  # float32 weights sum to 1 only to 1e-7; the reference's softmax needs the same sum
    targets = Targets(torch.randint(0, V, (N,), generator=generator), record)
    distillation_loss(x, Head(weight, None, 1.0, None, V), targets, 0.0).total.backward()
    q = torch.softmax(x.detach() @ weight.T, -1)
    assert torch.allclose(x.grad, (q - dense) @ weight, atol=1e-12)
    assert torch.allclose(record_sum, torch.ones(N, dtype=torch.float64), atol=1e-6)


def test_tied_embedding_gets_both_gradients() -> None:
    """The head's weight is also the embedding: its gradient is the sum of both paths."""
    generator = torch.Generator().manual_seed(3)
    table = torch.randn(V, D, generator=generator)
    tokens = torch.randint(0, V, (N,), generator=generator)
    targets = Targets(torch.randint(0, V, (N,), generator=generator), random_record(generator))

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


def test_records_of_all_probabilities_give_the_kl_divergence() -> None:
    """With every token an entry of its own probability, the value is KL(p || q), which is 0 at q = p."""
    generator = torch.Generator().manual_seed(5)
    x, weight = torch.randn(N, D, generator=generator), torch.randn(V, D, generator=generator)
    p = torch.softmax(x @ weight.T, -1)
    record = RecordTargets(
        torch.arange(N + 1) * V, torch.arange(V).repeat(N), p.reshape(-1), torch.special.entr(p).sum(-1)
    )
    targets = Targets(torch.zeros(N, dtype=torch.int64), record)
    x = x.requires_grad_()
    terms = distillation_loss(x, Head(weight, None, 1.0, None, V), targets, 0.0)
    terms.total.backward()
    assert abs(terms.total.item()) < 1e-4
    assert float(x.grad.abs().max()) < 1e-5


def test_no_positions_is_zero_loss_and_zero_gradient() -> None:
    x, weight = torch.zeros(0, D, requires_grad=True), torch.randn(V, D, requires_grad=True)
    terms = distillation_loss(x, Head(weight, None, 1.0, None, V), Targets(torch.zeros(0, dtype=torch.int64)), 1.0)
    terms.total.backward()
    assert terms.total.item() == 0.0 and not weight.grad.any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_hidden_states_keep_the_direction(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(6)
    x = torch.randn(N, D, generator=generator)
    weight = torch.randn(V, D, generator=generator).requires_grad_()
    targets = Targets(torch.randint(0, V, (N,), generator=generator), random_record(generator))
    half = x.to(dtype).requires_grad_()
    distillation_loss(half, Head(weight, None, 1.0, None, V), targets, 0.2).total.backward()
    wide, wide_weight = x.double().requires_grad_(), weight.detach().double().requires_grad_()
    dense_loss(wide, wide_weight, None, Head(wide_weight, None, 1.0, None, V), targets, 0.2).backward()
    assert half.grad.dtype == dtype and weight.grad.dtype == torch.float32
    assert relative(half.grad, wide.grad) < 2e-2 and relative(weight.grad, wide_weight.grad) < 2e-2


def test_score_agrees_with_the_loss_and_counts_agreement(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(losses, "CHUNK_ELEMENTS", 5 * V)
    generator = torch.Generator().manual_seed(7)
    x, weight = torch.randn(N, D, generator=generator), torch.randn(V, D, generator=generator)
    head = Head(weight, None, 1.0, None, V)
    targets = Targets(torch.randint(0, V, (N,), generator=generator), random_record(generator))
    best = (x @ weight.T).argmax(-1)
    best[:4] = -1
    best[4] = (best[4] + 1) % V
    found = score(x, head, targets, best)
    terms = distillation_loss(x, head, targets, 0.5)
    assert found.ce == pytest.approx(float(terms.ce), rel=1e-6) and found.kd == pytest.approx(float(terms.kd), rel=1e-6)
    assert (found.agreed, found.comparable) == (N - 5, N - 4)
