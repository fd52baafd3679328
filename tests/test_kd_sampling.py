"""Samples against the distribution that they were drawn from: exact heads, unbiased tails, nothing lost, same bits."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from cache.codec import Codec, Places, Sample
from cache.records import Records
from kd import sampling
from kd.block_sizes import BLOCK, LOWEST
from kd.errors import ModelError
from kd.losses import Objective, distillation_loss
from kd.models import Head
from kd.sampling import Chance, Sampler, mean_tempered_, partition
from kd.targets import Columns, SparseTarget, TargetDecoder

NODES = 5
SPAN = (0.5, 2.0)
TEMPERATURES = (0.5, 0.77, 1.0, 1.6, 2.0)
REDRAWS = 10_000
CPU = torch.device("cpu")

pytestmark = pytest.mark.usefixtures("one_thread")


def make_codec(profile: str, vocabulary: int, threshold: float = 0.04, **options: Any) -> Codec:
    options |= {"temperatures": SPAN} if profile == "tempered" else {}
    return Codec(profile, vocabulary, threshold=threshold, **options)


def sample(codec: Codec, logits_NV: Tensor, gold_N: Tensor | None = None, sequence: int = 0) -> Sample:
    gold_N = torch.zeros(len(logits_NV), dtype=torch.int64) if gold_N is None else gold_N
    chance = Chance.of(codec, sequence, np.arange(len(logits_NV)), CPU)
    return Sampler(codec, NODES if codec.profile == "tempered" else 0).sample(logits_NV, gold_N, chance)


def encode(codec: Codec, found: Sample, sequence: int = 0) -> Records:
    count = len(found.entropy)
    return codec.encode_sample(found, Places(np.full(count, sequence), np.arange(count)))


def columns_of(records: Records, draw: int = 0) -> Columns:
    """What a batch carries: tensors, with the tails of one draw."""
    columns = {name: torch.from_numpy(column) for name, column in records.columns.items()}
    return columns | {name: columns[name][:, draw] for name in {"tail_ids", "tail_logprobs"} & columns.keys()}


def dense(target: SparseTarget, vocabulary: int) -> np.ndarray:
    """The weights as a distribution, (N, V)."""
    rows = np.repeat(np.arange(len(target.leaders_N)), target.offsets_N1.diff().numpy())
    weights = np.zeros((len(target.leaders_N), vocabulary))
    np.add.at(weights, (rows, target.ids_E.numpy()), target.weights_E.numpy())
    return weights


def decoded(codec: Codec, records: Records, gold_N: Tensor, temperature: float = 1.0, draw: int = 0) -> np.ndarray:
    target = TargetDecoder(codec).targets(gold_N, columns_of(records, draw), temperature).teacher
    assert isinstance(target, SparseTarget)
    return dense(target, codec.vocabulary_size)


# ---------------------------------------------------------------------- arbitrary distributions

KINDS = ("normal", "ties", "masked", "one-hot", "uniform", "cauchy", "two", "huge")


def make_logits(kind: str, rows: int, vocabulary: int, spread: float, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(rows, vocabulary, generator=generator) * spread
    if kind == "ties":
        logits = logits.round()
    elif kind == "masked":
        logits[:, 1:][torch.rand(rows, vocabulary - 1, generator=generator) < 0.7] = -torch.inf
    elif kind == "one-hot":
        logits[:, seed % vocabulary] += 500.0
    elif kind == "uniform":
        logits = torch.full((rows, vocabulary), -3.0)
    elif kind == "cauchy":
        logits = torch.distributions.Cauchy(0.0, 1.0).icdf(torch.rand(rows, vocabulary, generator=generator)) * spread
        logits.clamp_(-1e3, 1e3)
    elif kind == "two":
        logits[:] = -torch.inf
        logits[:, [0, vocabulary - 1]] = torch.tensor([500.0, 499.0])
    elif kind == "huge":
        logits += 800.0
    return logits


@dataclass(frozen=True)
class Case:
    codec: Codec
    logits_NV: Tensor
    gold_N: Tensor

    @property
    def p_NV(self) -> np.ndarray:
        return torch.softmax(self.logits_NV.double(), 1).numpy()

    @property
    def size_NV(self) -> np.ndarray:
        """What tokens are sampled in proportion to."""
        betas = self.codec.proposal_betas if self.codec.profile == "tempered" else (1.0,)
        return np.mean([torch.softmax(self.logits_NV.double() * beta, 1).numpy() for beta in betas], axis=0)

    @property
    def known_NV(self) -> np.ndarray:
        known = np.zeros(self.logits_NV.shape, bool)
        known[np.arange(len(known)), self.gold_N.numpy()] = True
        known[:, list(self.codec.always_keep)] = True
        return known


@st.composite
def cases(
    draw: Any,
    vocabularies: tuple[int, ...] = (2, 3, 63, 64, 65, 300, 2048),
    rows: int = 5,
    profiles: tuple[str, ...] = ("threshold", "tempered"),
) -> Case:
    vocabulary, seed = draw(st.sampled_from(vocabularies)), draw(st.integers(0, 10_000))
    kept = tuple(draw(st.lists(st.integers(0, vocabulary - 1), max_size=3, unique=True)))
    codec = make_codec(
        draw(st.sampled_from(profiles)),
        vocabulary,
        draw(st.sampled_from([0.001, 1 / 255, 0.0155, 0.04, 0.125, 0.5])),
        always_keep=kept,
        draws=draw(st.integers(1, 3)),
        seed=seed,
    )
    logits = make_logits(
        draw(st.sampled_from(KINDS)), rows, vocabulary, draw(st.sampled_from([0.3, 2.0, 8.0, 40.0])), seed
    )
    gold = torch.randint(0, vocabulary, (rows,), generator=torch.Generator().manual_seed(seed))
    if kept:
        gold[0] = kept[0]
    return Case(codec, logits, gold)


@settings(deadline=None, max_examples=150)
@given(case=cases())
def test_samples_are_what_the_scheme_says(case: Case) -> None:
    codec, found = case.codec, sample(case.codec, case.logits_NV, case.gold_N)
    size, known, p = case.size_NV, case.known_NV, case.p_NV
    threshold, rows = codec.threshold, len(size)
    ids = np.concatenate([case.gold_N.numpy()[:, None], np.tile(codec.always_keep, (rows, 1)).astype(int)], 1)
    with np.errstate(divide="ignore"):
        logp = np.log(p)
    exact = np.maximum(np.take_along_axis(logp, ids, 1), -300)
    np.testing.assert_allclose(np.maximum(found.known_logprobs, -300), exact, rtol=1e-6, atol=2e-4)
    np.testing.assert_allclose(found.entropy, -(p * np.maximum(logp, -1e4)).sum(1), atol=2e-3)

    head_rows = np.repeat(np.arange(rows), found.head_count)
    head = np.zeros(size.shape, bool)
    head[head_rows, found.head_ids] = True
    edge = np.abs(size / threshold - 1) < 1e-4  # float32 may see it on either side
    assert not (head & known).any()
    assert ((head == (size > threshold)) | edge | known).all()
    np.testing.assert_allclose(found.head_logprobs, logp[head_rows, found.head_ids], atol=2e-4)

    rest = np.where(known | head, 0, size).sum(1)
    count = np.where(rest > 1e-38, np.maximum(np.floor(rest / threshold), 1), 0)
    near = (np.abs(rest / threshold - np.round(rest / threshold)) < 1e-3) | (rest < 1e-30)
    assert ((found.tail_count == count) | near & (np.abs(found.tail_count - count) <= 1)).all()
    assert (found.head_count + found.tail_count).max() <= 1 / threshold + 1
    assert found.tail_ids.shape == (found.tail_count.sum(), codec.draws)
    for row, draw_ids in enumerate(np.split(found.tail_ids, np.cumsum(found.tail_count)[:-1])):
        for tail in draw_ids.T:
            assert len(set(tail)) == len(tail), "no token twice"
            assert not (known | head)[row, tail].any(), "an entry is an entry once"
            assert (size[row, tail] > 0).all(), "a token that cannot come is never drawn"


@settings(deadline=None, max_examples=100)
@given(case=cases())
def test_the_weights_of_every_record_sum_to_one_at_every_temperature_served(case: Case) -> None:
    records = encode(case.codec, sample(case.codec, case.logits_NV, case.gold_N))
    for temperature in TEMPERATURES if case.codec.profile == "tempered" else (1.0,):
        for draw in range(case.codec.draws):
            weights = decoded(case.codec, records, case.gold_N, temperature, draw)
            np.testing.assert_allclose(weights.sum(1), 1.0, atol=1e-6)
            assert np.isfinite(weights).all()


@settings(deadline=None, max_examples=8)
@given(case=cases(vocabularies=(262_143, 262_144), rows=2))
def test_the_largest_vocabularies(case: Case) -> None:
    case.logits_NV[1, -1] = 5e3  # the last token has all of the second row
    found = sample(case.codec, case.logits_NV, case.gold_N)
    last = case.codec.vocabulary_size - 1
    assert last in found.head_ids or last in (int(case.gold_N[1]), *case.codec.always_keep)
    assert (found.head_count + found.tail_count).max() <= 1 / case.codec.threshold + 1
    rows = np.repeat(np.arange(2), found.tail_count)
    assert (case.size_NV[rows[:, None], found.tail_ids] > 0).all()
    records = encode(case.codec, found)
    for temperature in (0.5, 1.0, 2.0) if case.codec.profile == "tempered" else (1.0,):
        weights = decoded(case.codec, records, case.gold_N, temperature)
        np.testing.assert_allclose(weights.sum(1), 1.0, atol=1e-6)


# ---------------------------------------------------------------------- unbiased


def z_of_means(weights_RV: np.ndarray, p_V: np.ndarray, largest: float, slack: float = 0.0) -> np.ndarray:
    """z of the mean weight of each token, and of all rare ones together, over R redraws.

    Bernstein's inequality: a mean of values that jump by up to ``largest`` is normal only up to L M / 3R, L = z² / 2 at
    z = 5. Without that term a token that comes once in 10,000 draws would look like bias. ``slack`` is relative.
    """
    rare = (weights_RV != 0).sum(0) < 50
    values = np.concatenate([weights_RV, weights_RV[:, rare].sum(1, keepdims=True)], 1)
    exact = np.append(p_V, p_V[rare].sum())
    error = np.abs(values.mean(0) - exact) - 12.5 / 3 * largest / len(values) - slack * exact
    return np.maximum(error, 0) / np.maximum(values.std(0) / math.sqrt(len(values)), 1e-9)


def largest_jump(codec: Codec) -> float:
    """A tail weighs at most twice the threshold, and no rounding moves a probability by more than a head's step."""
    return max(2 * codec.threshold, 1 - math.exp(-codec.head_step))


def redraws(case: Case, draws: int = 1) -> list[np.ndarray]:
    """Weights (R, V) of one distribution at R positions, as they are after storing, for each draw."""
    logits, gold = case.logits_NV[:1].expand(REDRAWS, -1), case.gold_N[:1].expand(REDRAWS)
    records = encode(case.codec, sample(case.codec, logits, gold))
    return [decoded(case.codec, records, gold, 1.0, draw) for draw in range(draws)]


@settings(deadline=None, max_examples=12)
@given(case=cases(vocabularies=(2, 3, 64, 65, 130), rows=1))
def test_ten_thousand_redraws_average_to_the_distribution(case: Case) -> None:
    """Threshold profile, T = 1, every source of chance at once: samples, and the rounding of known and head."""
    codec = make_codec(
        "threshold", case.codec.vocabulary_size, case.codec.threshold, always_keep=case.codec.always_keep
    )
    case = Case(codec, case.logits_NV, case.gold_N)
    (weights,) = redraws(case)
    assert z_of_means(weights, case.p_NV[0], largest_jump(codec)).max() < 5


@pytest.mark.parametrize("profile", ["threshold", "tempered"])
def test_ten_thousand_redraws_of_every_draw_average_to_the_distribution(profile: str) -> None:
    """A tempered tail is normalised by itself, which biases single tokens by the order of 1/m, but not its mass."""
    codec = make_codec(profile, 200, 1 / 64, draws=3, always_keep=(7, 150))
    case = Case(codec, make_logits("normal", 1, 200, 2.0, 3), torch.tensor([11]))
    p, slack = case.p_NV[0], 0.0 if profile == "threshold" else 0.15
    draws = redraws(case, 3)
    for weights in (*draws, np.mean(draws, axis=0)):
        assert z_of_means(weights, p, largest_jump(codec), slack).max() < 5
        z = (weights.mean(0) - p) / np.maximum(weights.std(0), 1e-9) * math.sqrt(REDRAWS)
        assert profile == "tempered" or np.abs(z[p > 1e-3]).mean() < 1.1
        light = p < 1 / 128
        assert weights[:, light].sum(1).mean() == pytest.approx(p[light].sum(), rel=0.03)
    # Together they are one sample of three times the size: better than three that know nothing of each other.
    alone = np.mean([((weights - p) ** 2).sum(1).mean() for weights in draws])
    assert ((np.mean(draws, axis=0) - p) ** 2).sum(1).mean() < 0.8 * alone / 3


def test_inclusion_is_in_proportion_to_size_in_every_block_and_order() -> None:
    """Tails that reach over several blocks, drawn under many block orders: token i comes with chance m g_i / R."""
    codec = make_codec("threshold", 5 * BLOCK - 3, 0.05)
    logits = make_logits("normal", 1, codec.vocabulary_size, 1.5, 8)
    p = torch.softmax(logits[0].double(), 0).numpy()
    tail = p.copy()
    tail[0] = tail[p > 0.05] = 0
    count, hits = max(1, math.floor(tail.sum() / 0.05)), np.zeros_like(p)
    for sequence in range(20):
        found = sample(codec, logits.expand(500, -1), sequence=sequence)
        np.add.at(hits, found.tail_ids[:, 0], 1)
    chance = count * tail / tail.sum()
    z = (hits - REDRAWS * chance) / np.sqrt(REDRAWS * np.maximum(chance * (1 - chance), 1e-4))
    assert (hits[tail == 0] == 0).all()
    assert np.abs(z).max() < 5
    assert np.abs(z).mean() < 1.2


@settings(deadline=None, max_examples=60)
@given(case=cases(vocabularies=(65, 300, 2048), profiles=("threshold",)))
def test_both_ways_to_draw_find_the_same_tokens(case: Case) -> None:
    """By blocks, and by one sum over all of V, of sizes in float64; of float32 a few in 100,000 find a neighbour."""
    chance, sampler = Chance.of(case.codec, 7, np.arange(len(case.logits_NV)), CPU), Sampler(case.codec)
    sizes, _ = sampler.split(case.logits_NV.double(), sampler.known(case.gold_N))
    running_NJ = sizes.sums_NJ[:, chance.order_J].cumsum(1)
    points_Nm = torch.rand(len(sizes.lse_N), 50, dtype=torch.float64) * running_NJ[:, -1:]
    drawn_Nm = (running_NJ[:, -1:] > 0).expand(-1, 50)
    by_tokens = sampling._by_tokens(sampling._running_NV(sizes, chance.order_J), points_Nm, drawn_Nm)
    assert torch.equal(by_tokens, sampling._by_blocks(sizes, running_NJ, chance.order_J, points_Nm, drawn_Nm))


def test_variance_is_the_optimum_of_the_scheme() -> None:
    """E ||w - p||² = tau' R - sum of p² over the tail: what no unbiased sample of that size can beat."""
    codec = make_codec("threshold", 500, 0.05)
    logits, gold = make_logits("normal", 1, 500, 2.0, 1), torch.zeros(REDRAWS, dtype=torch.int64)
    p = torch.softmax(logits.double(), -1)[0].numpy()
    found = sample(codec, logits.expand(REDRAWS, -1))
    tail = p.copy()
    tail[0] = tail[p > 0.05] = 0
    count = max(1, np.floor(tail.sum() / 0.05))
    weight = tail.sum() / count
    weights = np.zeros((REDRAWS, 500))
    np.add.at(weights, (np.repeat(np.arange(REDRAWS), found.tail_count), found.tail_ids[:, 0]), weight)
    error = ((weights - tail) ** 2).sum(1).mean()
    assert error == pytest.approx(weight * tail.sum() - (tail**2).sum(), rel=0.02)
    assert len(gold) == len(found.entropy)


def test_loss_over_redraws_is_full_distillation() -> None:
    """Records drawn, rounded and decoded as a cache does: value and gradient average to the dense KL's."""
    generator = torch.Generator().manual_seed(4)
    vocabulary, width, positions, rounds = 120, 8, 6, 400
    codec = make_codec("threshold", vocabulary, 0.1, always_keep=(5,))
    p = torch.softmax(torch.randn(positions, vocabulary, generator=generator, dtype=torch.float64) * 2, -1)
    gold = torch.randint(0, vocabulary, (positions,), generator=generator)
    x = torch.randn(positions, width, generator=generator)
    weight = torch.randn(vocabulary, width, generator=generator)
    head = Head(weight, None, 1.0, None, vocabulary)
    values, gradients = [], []
    for sequence in range(rounds):
        records = encode(codec, sample(codec, p.log().float(), gold, sequence), sequence)
        targets = TargetDecoder(codec).targets(gold, columns_of(records))
        hidden = x.clone().requires_grad_()
        terms = distillation_loss(hidden, head, targets, Objective(0.0))
        terms.total.backward()
        values.append(terms.total.item())
        gradients.append(hidden.grad.double())
    logq = torch.log_softmax(x.double() @ weight.double().T, -1)
    expected = float((p * (p.log() - logq)).sum())
    z = (np.mean(values) - expected) / (np.std(values) / np.sqrt(rounds))
    assert abs(z) < 5
    stacked = torch.stack(gradients)
    z = (stacked.mean(0) - (logq.exp() - p) @ weight.double()) / (stacked.std(0) / rounds**0.5)
    assert float(z.abs().max()) < 5
    assert float(z.abs().mean()) < 1.3


# ---------------------------------------------------------------------- the same bits


def same(left: Sample, right: Sample) -> None:
    for name, value in vars(left).items():
        assert np.array_equal(value, getattr(right, name)), name


@pytest.mark.parametrize("profile", ["threshold", "tempered"])
@pytest.mark.parametrize("vocabulary", [3000, 40_001])
def test_a_row_depends_on_itself_alone(profile: str, vocabulary: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many rows are given at once, worked on at once, in whatever order, and by how many threads."""
    codec = make_codec(profile, vocabulary, 0.02, draws=2, always_keep=(9,), seed=6)
    logits, gold = make_logits("normal", 20, vocabulary, 3.0, 2), torch.arange(20)
    chance = Chance.of(codec, 5, np.arange(20), CPU)
    sampler = Sampler(codec, NODES)
    whole = sampler.sample(logits, gold, chance)
    for size in (1, 7, 13):
        cuts = [slice(start, start + size) for start in range(0, 20, size)]
        same(sampling.joined([sampler.sample(logits[rows], gold[rows], chance.rows(rows)) for rows in cuts]), whole)
    for elements in (1, 7 * vocabulary, 2**30):
        monkeypatch.setitem(sampling.PASS_ELEMENTS, "cpu", elements)
        same(sampler.sample(logits, gold, chance), whole)
        torch.set_num_threads(4)
        same(sampler.sample(logits, gold, chance), whole)
        same(
            sampler.sample(logits[:1], gold[:1], chance.rows(slice(1))),
            sampler.sample(logits[:1], gold[:1], chance.rows(slice(1))),
        )
        torch.set_num_threads(1)
    backwards = sampler.sample(logits.flip(0), gold.flip(0), Chance(chance.uniform_NE.flip(0), chance.order_J))
    assert np.array_equal(backwards.entropy[::-1], whole.entropy)
    assert np.array_equal(backwards.tail_count[::-1], whole.tail_count)
    rows = np.split(backwards.tail_ids, np.cumsum(backwards.tail_count)[:-1])
    assert np.array_equal(np.concatenate(rows[::-1]), whole.tail_ids)


def test_a_sample_is_not_changed_by_the_next_one() -> None:
    """The sampler uses its room again; what it gave away must not lie in it."""
    codec = make_codec("tempered", 300)
    sampler, gold = Sampler(codec, NODES), torch.zeros(4, dtype=torch.int64)
    chance = Chance.of(codec, 0, np.arange(4), CPU)
    logits = make_logits("normal", 4, 300, 2.0, 0)
    first = sampler.sample(logits, gold, chance)
    before = {name: np.array(value) for name, value in vars(first).items()}
    sampler.sample(make_logits("normal", 4, 300, 5.0, 1), gold, chance)
    for name, value in vars(first).items():
        assert np.array_equal(value, before[name]), name
    assert torch.equal(logits, make_logits("normal", 4, 300, 2.0, 0)), "logits are read, not written"


def test_chance_is_a_function_of_seed_sequence_and_position() -> None:
    codec = make_codec("threshold", 300, draws=3)
    whole = Chance.of(codec, 5, np.arange(30), CPU)
    part = Chance.of(codec, 5, np.array([29, 3]), CPU)
    assert torch.equal(part.uniform_NE, whole.uniform_NE[[29, 3]])
    assert torch.equal(part.order_J, whole.order_J)
    others = [(codec, 6), (make_codec("threshold", 300, seed=1, draws=3), 5)]
    for other in (Chance.of(*pair, np.arange(30), CPU) for pair in others):
        assert not (other.uniform_NE == whole.uniform_NE).any()
    steps = (whole.uniform_NE - whole.uniform_NE[:, :1]) % 1.0
    np.testing.assert_allclose(steps.numpy(), np.tile([0, 1 / 3, 2 / 3], (30, 1)), atol=1e-12)


# ---------------------------------------------------------------------- what other temperatures need


@settings(deadline=None, max_examples=60)
@given(case=cases(vocabularies=(3, 65, 300)))
def test_the_partition_is_the_tails_log_sum_and_its_slope(case: Case) -> None:
    codec = make_codec("tempered", case.codec.vocabulary_size, case.codec.threshold, always_keep=case.codec.always_keep)
    case = Case(codec, case.logits_NV, case.gold_N)
    found = sample(codec, case.logits_NV, case.gold_N)
    rows = np.repeat(np.arange(len(case.gold_N)), found.head_count)
    outside = case.known_NV.copy()
    outside[rows, found.head_ids] = True
    logp = torch.log_softmax(case.logits_NV.double(), 1).clamp(min=LOWEST)
    in_tail = ~torch.from_numpy(outside) & (torch.from_numpy(case.size_NV) > 1e-37)  # what float32 takes for nothing
    for number, beta in enumerate(codec.nodes(NODES)):
        for row in np.flatnonzero(in_tail.any(1).numpy()):
            tail = logp[row][in_tail[row]]
            value = float((beta * tail).logsumexp(0))
            slope = float((torch.softmax(beta * tail, 0) * tail).sum())
            got = found.partition[row, number]
            assert got == pytest.approx([value, slope], rel=1e-4, abs=2e-3)


def test_tail_values_are_the_log_probabilities_of_the_tail() -> None:
    codec = make_codec("tempered", 500, draws=2)
    logits = make_logits("normal", 8, 500, 3.0, 0)
    found = sample(codec, logits)
    rows = np.repeat(np.arange(8), found.tail_count)[:, None]
    logp = torch.log_softmax(logits.double(), 1).numpy()
    np.testing.assert_allclose(found.tail_logprobs, logp[rows, found.tail_ids], atol=1e-4)


@pytest.mark.parametrize("betas", [(0.5, 1.0, 2.0), (1 / 1.4, 1 / 0.7), (0.25, 0.5), (1.0,)])
def test_the_sizes_are_the_mean_over_the_proposal_s_temperatures(betas: tuple[float, ...]) -> None:
    logits = make_logits("normal", 5, 300, 8.0, 0)
    got = torch.softmax(logits, 1)
    mean_tempered_(got, logits, betas)
    exact = torch.stack([torch.softmax(logits.double() * beta, 1) for beta in betas]).mean(0)
    torch.testing.assert_close(got.double(), exact, rtol=1e-5, atol=1e-12)


def test_the_partition_does_not_write_over_what_it_reads() -> None:
    tail = make_logits("normal", 3, 50, 2.0, 0)
    before = tail.clone()
    partition(tail, (0.5, 1.0, 2.0))
    assert torch.equal(tail, before)


# ---------------------------------------------------------------------- refusals


@pytest.mark.parametrize("profile", ["threshold", "tempered"])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_broken_logits_are_refused(profile: str, bad: float) -> None:
    logits = torch.zeros(2, 50)
    logits[1, 3] = bad
    with pytest.raises(ModelError, match="NaN or infinite"):
        sample(make_codec(profile, 50), logits)


@pytest.mark.parametrize("value", [-torch.inf, -3e4])
def test_a_row_whose_tokens_all_lie_below_what_is_looked_at_is_refused(value: float) -> None:
    logits = torch.zeros(2, 50)
    logits[1] = value
    with pytest.raises(ModelError, match="all below -5000"):
        sample(make_codec("threshold", 50), logits)


@pytest.mark.parametrize("shift", [-4e3, 3e4])
def test_only_differences_of_logits_count(shift: float) -> None:
    """softmax(s + c) = softmax(s): float32 leaves 2e-3 of s at 3e4, and nothing else may be lost."""
    codec = make_codec("threshold", 300)
    logits = make_logits("normal", 6, 300, 2.0, 0) + shift
    exact = torch.softmax(logits.double(), 1)
    found = sample(codec, logits)
    np.testing.assert_allclose(found.entropy, torch.special.entr(exact).sum(1), atol=2e-2)
    np.testing.assert_allclose(found.known_logprobs[:, 0], exact[:, 0].log(), atol=5e-3)
