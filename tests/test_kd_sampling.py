"""Records against the distribution that they were drawn from: exact heads, unbiased tails, nothing lost."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cache.codec import Codec
from cache.records import Records
from kd.batches import _record_targets
from kd.errors import ModelError
from kd.losses import Targets, distillation_loss
from kd.models import Head
from kd.sampling import draws, sample_records


def sample(logits: torch.Tensor, threshold: float = 0.04, seed: int = 0, sequence: int = 0) -> Records:
    uniform, order = draws(seed, sequence, np.arange(len(logits)), logits.shape[1])
    gold = torch.zeros(len(logits), dtype=torch.int64)
    return sample_records(logits, gold, torch.from_numpy(uniform), torch.from_numpy(order), threshold)


def dense(records: Records, vocabulary: int) -> np.ndarray:
    target = np.zeros((len(records), vocabulary))
    np.add.at(target, (records.head_rows(), records.head_ids), records.head_weights())
    np.add.at(target, (records.tail_rows(), records.tail_ids), records.tail_weights())
    return target


@settings(deadline=None, max_examples=60)
@given(
    seed=st.integers(0, 10_000),
    vocabulary=st.sampled_from([2, 3, 63, 64, 65, 300, 2048]),
    spread=st.sampled_from([0.0, 0.5, 2.0, 8.0, 40.0]),
    threshold=st.sampled_from([0.004, 0.04, 0.125, 0.5]),
)
def test_records_are_what_the_scheme_says(seed: int, vocabulary: int, spread: float, threshold: float) -> None:
    logits = torch.randn(5, vocabulary, generator=torch.Generator().manual_seed(seed)) * spread
    records = sample(logits, threshold, seed)
    logp = torch.log_softmax(logits, -1)
    p = logp.exp().numpy()
    assert records.head_count.tolist() == (p > threshold).sum(1).tolist()
    np.testing.assert_allclose(records.head_logprobs, logp.numpy()[records.head_rows(), records.head_ids], rtol=1e-6)
    rest = np.where(p > threshold, 0, p.astype(np.float64)).sum(1)
    assert np.abs(records.tail_count - np.maximum(1, np.floor(rest / threshold))).max() <= 1  # floor at a rounding edge
    assert (records.head_count.astype(int) + records.tail_count).max() <= 1 / threshold + 1
    np.testing.assert_allclose(dense(records, vocabulary).sum(1), 1.0, atol=1e-6)
    np.testing.assert_allclose(records.entropy, -(p * logp.numpy()).sum(1), atol=1e-4)
    np.testing.assert_allclose(records.gold_logprob, logp[:, 0].numpy(), rtol=1e-6)
    for row in np.flatnonzero(rest > 1e-6):
        ids = records.tail_ids[records.tail_rows() == row]
        assert len(set(ids)) == len(ids), "no token twice"
        assert not set(ids) & set(records.head_ids[records.head_rows() == row]), "head and tail are disjoint"
        assert p[row, ids].min() > 0


def test_weights_are_unbiased_over_redraws() -> None:
    """Mean weight of every token over draws equals its probability; the spread is the binomial one."""
    logits = torch.randn(1, 200, generator=torch.Generator().manual_seed(0)) * 2
    p = torch.softmax(logits.double(), -1)[0].numpy()
    rounds, threshold = 4000, 0.1
    total = np.zeros(200)
    for seed in range(rounds):
        total += dense(sample(logits, threshold, seed), 200)[0]
    tail = p <= threshold
    weight = p[tail].sum() / max(1, np.floor(p[tail].sum() / threshold))
    inclusion = p[tail] / weight
    sigma = weight * np.sqrt(inclusion * (1 - inclusion) / rounds)
    z = (total[tail] / rounds - p[tail]) / np.maximum(sigma, 1e-9)
    assert np.abs(z).max() < 5 and np.abs(z).mean() < 1.2
    np.testing.assert_allclose(total[~tail] / rounds, p[~tail], rtol=1e-5)


def test_variance_is_the_optimum_of_the_scheme() -> None:
    """E ||w - p||² = tau' R - sum of p² over the tail: what no unbiased sample of that size can beat."""
    logits = torch.randn(1, 500, generator=torch.Generator().manual_seed(1)) * 2
    p = torch.softmax(logits.double(), -1)[0].numpy()
    threshold, rounds = 0.05, 3000
    tail = p[p <= threshold]
    weight = tail.sum() / max(1, np.floor(tail.sum() / threshold))
    found = np.mean([((dense(sample(logits, threshold, seed), 500)[0] - p) ** 2).sum() for seed in range(rounds)])
    assert found == pytest.approx(weight * tail.sum() - (tail**2).sum(), rel=0.05)


def test_a_row_depends_on_itself_alone() -> None:
    logits = torch.randn(40, 3000, generator=torch.Generator().manual_seed(2)) * 3
    uniform, order = draws(0, 5, np.arange(40), 3000)
    uniform, order, gold = torch.from_numpy(uniform), torch.from_numpy(order), torch.zeros(40, dtype=torch.int64)
    whole = sample_records(logits, gold, uniform, order, 0.04)
    for size in (1, 7, 13):
        parts = [
            sample_records(logits[rows], gold[rows], uniform[rows], order, 0.04)
            for rows in (slice(start, start + size) for start in range(0, 40, size))
        ]
        joined = Records.concatenate(parts)
        for name in ("head_count", "head_ids", "head_logprobs", "tail_count", "tail_ids", "entropy", "gold_logprob"):
            assert np.array_equal(getattr(joined, name), getattr(whole, name)), name


def test_the_largest_vocabulary() -> None:
    logits = torch.randn(3, 262_144, generator=torch.Generator().manual_seed(3)) * 2
    logits[0, 262_143] = 30.0
    records = sample(logits)
    assert records.head_ids[0] == 262_143
    np.testing.assert_allclose(records.head_weights().sum() + records.tail_weights().sum(), 3.0, rtol=1e-5)


@pytest.mark.parametrize("kind", ["one token has everything", "two tokens share everything", "masked tokens"])
def test_extreme_distributions(kind: str) -> None:
    logits = torch.zeros(1, 100)
    if kind == "one token has everything":
        logits[0, 7] = 500.0
    elif kind == "two tokens share everything":
        logits[0, 7], logits[0, 8] = 500.0, 499.0
    else:
        logits[0, 10:] = -torch.inf
    records = sample(logits)
    target = dense(records, 100)
    np.testing.assert_allclose(target, torch.softmax(logits, -1).numpy(), atol=1e-6)
    assert np.isfinite(records.entropy).all()


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_broken_logits_are_refused(bad: float) -> None:
    logits = torch.zeros(2, 50)
    logits[1, 3] = bad
    with pytest.raises(ModelError, match="NaN or infinite"):
        sample(logits)


def test_loss_over_redraws_is_full_distillation() -> None:
    """Records drawn, quantised and decoded as a cache does: value and gradient average to the dense KL's."""
    generator = torch.Generator().manual_seed(4)
    vocabulary, width, positions, rounds = 120, 8, 6, 600
    p = torch.softmax(torch.randn(positions, vocabulary, generator=generator, dtype=torch.float64) * 2, -1)
    x = torch.randn(positions, width, generator=generator)
    weight = torch.randn(vocabulary, width, generator=generator)
    head = Head(weight, None, 1.0, None, vocabulary)
    values, gradients = [], []
    for seed in range(rounds):
        raw = sample(p.log().float(), 0.1, seed)
        codec = Codec(0.1, seed, vocabulary)
        records = codec.decode(codec.encode(raw, np.zeros(positions, np.int64), np.arange(positions)))
        targets = Targets(torch.zeros(positions, dtype=torch.int64), _record_targets(records))
        hidden = x.clone().requires_grad_()
        terms = distillation_loss(hidden, head, targets, 0.0)
        terms.total.backward()
        values.append(terms.total.item())
        gradients.append(hidden.grad.double())
    logq = torch.log_softmax(x.double() @ weight.double().T, -1)
    expected = float((p * (p.log() - logq)).sum())
    z = (np.mean(values) - expected) / (np.std(values) / np.sqrt(rounds))
    assert abs(z) < 5
    stacked = torch.stack(gradients)
    z = (stacked.mean(0) - (logq.exp() - p) @ weight.double()) / (stacked.std(0) / rounds**0.5)
    assert float(z.abs().max()) < 5 and float(z.abs().mean()) < 1.3
