"""Samples compared with their distribution: heads are exact, tails are unbiased, no mass is lost,
and bits are the same each time.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings

from cache.codec import Codec
from cache.profiles.sampled import Sample
from kd.capture import sampling
from kd.capture.host_copy import HostCopy
from kd.capture.sampling import (
    BLOCK,
    LOWEST,
    Randomness,
    Sampler,
    average_tempered_,
    compute_partition,
)
from kd.errors import ModelError
from kd.loss.decoder import TargetDecoder
from kd.loss.fused import compute_distillation_loss
from kd.loss.objective import Objective
from kd.models.lm_head import LMHead
from tests.support.kd.samples import (
    CPU,
    KNOTS,
    Case,
    cases,
    columns_of,
    decoded,
    encode,
    make_codec,
    make_logits,
    require_sound_weights,
    require_the_last_token,
    require_what_the_scheme_says,
    sample,
)

REDRAWS = 10_000

pytestmark = pytest.mark.usefixtures("one_thread")


# ---------------------------------------------------------------------- arbitrary distributions


@pytest.mark.long
@settings(deadline=None, max_examples=150)
@given(case=cases())
def test_samples_are_what_the_scheme_says(case: Case) -> None:
    require_what_the_scheme_says(case)


@pytest.mark.long
@settings(deadline=None, max_examples=100)
@given(case=cases())
def test_the_weights_of_every_record_are_sound_at_every_temperature_served(case: Case) -> None:
    require_sound_weights(case)


@settings(deadline=None, max_examples=8)
@given(case=cases(vocabularies=(262_143, 262_144), rows=2))
def test_the_largest_vocabularies(case: Case) -> None:
    require_the_last_token(case)


# ---------------------------------------------------------------------- unbiased


def z_of_means(
    weights_RV: np.ndarray, p_V: np.ndarray, largest: float, slack: float = 0.0
) -> np.ndarray:
    """z of the mean weight of each token, and of all rare ones together, over R redraws.

    Bernstein's inequality: a mean of values that jump by up to ``largest`` is normal only up to L M
    / 3R, L = z² / 2 at z = 5. Without that term a token that comes once in 10,000 draws would look
    like bias. ``slack`` is relative.
    """
    rare = (weights_RV != 0).sum(0) < 50
    values = np.concatenate([weights_RV, weights_RV[:, rare].sum(1, keepdims=True)], 1)
    exact = np.append(p_V, p_V[rare].sum())
    error = np.abs(values.mean(0) - exact) - 12.5 / 3 * largest / len(values) - slack * exact
    return np.maximum(error, 0) / np.maximum(values.std(0) / math.sqrt(len(values)), 1e-9)


def largest_jump(codec: Codec) -> float:
    """A tail weighs at most twice the threshold; rounding moves a probability by at most a head's
    step.
    """
    return max(2 * codec.threshold, 1 - math.exp(-codec.head_step))


def redraws(case: Case, draws: int = 1) -> list[np.ndarray]:
    """Return the decoded weights (R, V) of one distribution at R positions, for each draw."""
    logits = case.logits_NV[:1].expand(REDRAWS, -1)
    gold = case.gold_N[:1].expand(REDRAWS)
    records = encode(case.codec, sample(case.codec, logits, gold))
    return [decoded(case.codec, records, gold, 1.0, draw) for draw in range(draws)]


@pytest.mark.long
@settings(deadline=None, max_examples=12)
@given(case=cases(vocabularies=(2, 3, 64, 65, 130), rows=1))
def test_ten_thousand_redraws_average_to_the_distribution(case: Case) -> None:
    """Profile threshold at T = 1 with all its randomness: the samples, and the rounding of known
    and head.
    """
    codec = make_codec(
        "threshold",
        case.codec.vocabulary_size,
        case.codec.threshold,
        always_keep=case.codec.always_keep,
    )
    case = Case(codec, case.logits_NV, case.gold_N)
    (weights,) = redraws(case)
    assert z_of_means(weights, case.p_NV[0], largest_jump(codec)).max() < 5


@pytest.mark.long
@pytest.mark.parametrize("profile", ["threshold", "tempered"])
def test_ten_thousand_redraws_of_every_draw_average_to_the_distribution(profile: str) -> None:
    """A tempered tail is normalised by itself, which biases single tokens by the order of 1/m, but
    not its mass.
    """
    codec = make_codec(profile, 200, 1 / 64, draws=3, always_keep=(7, 150))
    case = Case(codec, make_logits("normal", 1, 200, 2.0, 3), torch.tensor([11]))
    p = case.p_NV[0]
    slack = 0.0 if profile == "threshold" else 0.15
    draws = redraws(case, 3)
    for weights in (*draws, np.mean(draws, axis=0)):
        assert z_of_means(weights, p, largest_jump(codec), slack).max() < 5
        z = (weights.mean(0) - p) / np.maximum(weights.std(0), 1e-9) * math.sqrt(REDRAWS)
        assert profile == "tempered" or np.abs(z[p > 1e-3]).mean() < 1.1
        light = p < 1 / 128
        assert weights[:, light].sum(1).mean() == pytest.approx(p[light].sum(), rel=0.03)
    # Together they are one sample of three times the size: better than three that know nothing of
    # each other.
    alone = np.mean([((weights - p) ** 2).sum(1).mean() for weights in draws])
    assert ((np.mean(draws, axis=0) - p) ** 2).sum(1).mean() < 0.8 * alone / 3


def test_inclusion_is_in_proportion_to_size_in_every_block_and_order() -> None:
    """Tails that extend over several blocks, under many orders of blocks: token i is drawn with
    probability m g_i / R.
    """
    codec = make_codec("threshold", 5 * BLOCK - 3, 0.05)
    logits = make_logits("normal", 1, codec.vocabulary_size, 1.5, 8)
    p = torch.softmax(logits[0].double(), 0).numpy()
    tail = p.copy()
    tail[0] = tail[p > 0.05] = 0
    count = max(1, math.floor(tail.sum() / 0.05))
    hits = np.zeros_like(p)
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
    """A search by blocks and one by a sum over all of V agree for sizes in float64.

    In float32 a few in 100,000 find a neighbour.
    """
    chance = Randomness.of_each(case.codec, [7], [np.arange(len(case.logits_NV))], CPU)[0]
    sampler = Sampler(case.codec)
    sizes, _ = sampler.split(case.logits_NV.double(), sampler.list_known(case.gold_N))
    running_NQ = sizes.sums_NQ[:, chance.order_Q].cumsum(1)
    points_Nm = torch.rand(len(sizes.lse_N), 50, dtype=torch.float64) * running_NQ[:, -1:]
    rows_M, slots_M = (running_NQ[:, -1:] > 0).expand(-1, 50).nonzero(as_tuple=True)
    points = sampling._Points(points_Nm, rows_M, slots_M)
    by_tokens = sampling._find_by_tokens(sampling._accumulate_sizes(sizes, chance), points)
    assert torch.equal(by_tokens, sampling._find_by_blocks(sizes, running_NQ, chance, points))


def test_variance_is_the_optimum_of_the_scheme() -> None:
    """E ||w - p||² = tau' R - sum of p² over the tail, the minimum of all unbiased samples of that
    size.
    """
    codec = make_codec("threshold", 500, 0.05)
    logits = make_logits("normal", 1, 500, 2.0, 1)
    gold = torch.zeros(REDRAWS, dtype=torch.int64)
    p = torch.softmax(logits.double(), -1)[0].numpy()
    found = sample(codec, logits.expand(REDRAWS, -1))
    tail = p.copy()
    tail[0] = tail[p > 0.05] = 0
    count = max(1, np.floor(tail.sum() / 0.05))
    weight = tail.sum() / count
    weights = np.zeros((REDRAWS, 500))
    np.add.at(
        weights, (np.repeat(np.arange(REDRAWS), found.tail_count), found.tail_ids[:, 0]), weight
    )
    error = ((weights - tail) ** 2).sum(1).mean()
    assert error == pytest.approx(weight * tail.sum() - (tail**2).sum(), rel=0.02)
    assert len(gold) == len(found.entropy)


@pytest.mark.long
def test_loss_over_redraws_is_full_distillation() -> None:
    """Records are drawn, rounded and decoded as in a cache: value and gradient average to those of
    the dense KL.
    """
    generator = torch.Generator().manual_seed(4)
    vocabulary = 120
    width = 8
    positions = 6
    rounds = 400
    codec = make_codec("threshold", vocabulary, 0.1, always_keep=(5,))
    p = torch.softmax(
        torch.randn(positions, vocabulary, generator=generator, dtype=torch.float64) * 2, -1
    )
    gold = torch.randint(0, vocabulary, (positions,), generator=generator)
    x = torch.randn(positions, width, generator=generator)
    weight = torch.randn(vocabulary, width, generator=generator)
    head = LMHead(weight, None, 1.0, None, vocabulary)
    values = []
    gradients = []
    for sequence in range(rounds):
        records = encode(codec, sample(codec, p.log().float(), gold, sequence), sequence)
        targets = TargetDecoder(codec).decode(gold, columns_of(records))
        hidden = x.clone().requires_grad_()
        terms = compute_distillation_loss(hidden, head, targets, Objective(0.0))
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
def test_a_row_depends_on_itself_alone(
    profile: str, vocabulary: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A sample does not depend on the number of rows, the rows of a pass, their order, or the
    threads.
    """
    codec = make_codec(profile, vocabulary, 0.02, draws=2, always_keep=(9,), seed=6)
    logits = make_logits("normal", 20, vocabulary, 3.0, 2)
    gold = torch.arange(20)
    chance = Randomness.of_each(codec, [5], [np.arange(20)], CPU)[0]
    sampler = Sampler(codec, KNOTS)
    whole = sampler.sample(logits, gold, chance)
    for size in (1, 7, 13):
        cuts = [slice(start, start + size) for start in range(0, 20, size)]
        same(
            sampling.make_sample(
                [
                    HostCopy.start(
                        sampler.draw(logits[rows], gold[rows], chance.select(rows))
                    ).wait()
                    for rows in cuts
                ]
            ),
            whole,
        )
    for elements in (1, 7 * vocabulary, 2**30):
        monkeypatch.setitem(sampling.PASS_ELEMENTS, "cpu", elements)
        same(sampler.sample(logits, gold, chance), whole)
        torch.set_num_threads(4)
        same(sampler.sample(logits, gold, chance), whole)
        same(
            sampler.sample(logits[:1], gold[:1], chance.select(slice(1))),
            sampler.sample(logits[:1], gold[:1], chance.select(slice(1))),
        )
        torch.set_num_threads(1)
    backwards = sampler.sample(
        logits.flip(0), gold.flip(0), Randomness(chance.uniform_NR.flip(0), chance.order_Q)
    )
    assert np.array_equal(backwards.entropy[::-1], whole.entropy)
    assert np.array_equal(backwards.tail_count[::-1], whole.tail_count)
    rows = np.split(backwards.tail_ids, np.cumsum(backwards.tail_count)[:-1])
    assert np.array_equal(np.concatenate(rows[::-1]), whole.tail_ids)


def test_a_sample_is_not_changed_by_the_next_one() -> None:
    """The sampler reuses its memory; returned samples must not lie in it."""
    codec = make_codec("tempered", 300)
    sampler = Sampler(codec, KNOTS)
    gold = torch.zeros(4, dtype=torch.int64)
    chance = Randomness.of_each(codec, [0], [np.arange(4)], CPU)[0]
    logits = make_logits("normal", 4, 300, 2.0, 0)
    first = sampler.sample(logits, gold, chance)
    before = {name: np.array(value) for name, value in vars(first).items()}
    sampler.sample(make_logits("normal", 4, 300, 5.0, 1), gold, chance)
    for name, value in vars(first).items():
        assert np.array_equal(value, before[name]), name
    assert torch.equal(logits, make_logits("normal", 4, 300, 2.0, 0)), (
        "logits are read, not written"
    )


def test_chance_is_a_function_of_seed_sequence_and_position() -> None:
    codec = make_codec("threshold", 300, draws=3)
    whole = Randomness.of_each(codec, [5], [np.arange(30)], CPU)[0]
    part = Randomness.of_each(codec, [5], [np.array([29, 3])], CPU)[0]
    assert torch.equal(part.uniform_NR, whole.uniform_NR[[29, 3]])
    assert torch.equal(part.order_Q, whole.order_Q)
    others = [(codec, 6), (make_codec("threshold", 300, seed=1, draws=3), 5)]
    for other in (
        Randomness.of_each(each, [number], [np.arange(30)], CPU)[0] for each, number in others
    ):
        assert not (other.uniform_NR == whole.uniform_NR).any()
    steps = (whole.uniform_NR - whole.uniform_NR[:, :1]) % 1.0
    np.testing.assert_allclose(steps.numpy(), np.tile([0, 1 / 3, 2 / 3], (30, 1)), atol=1e-12)


# ---------------------------------------------------------------------- other temperatures


@settings(deadline=None, max_examples=60)
@given(case=cases(vocabularies=(3, 65, 300)))
def test_the_partition_is_the_tails_log_sum_and_its_slope(case: Case) -> None:
    codec = make_codec(
        "tempered",
        case.codec.vocabulary_size,
        case.codec.threshold,
        always_keep=case.codec.always_keep,
    )
    case = Case(codec, case.logits_NV, case.gold_N)
    found = sample(codec, case.logits_NV, case.gold_N)
    rows = np.repeat(np.arange(len(case.gold_N)), found.head_count)
    outside = case.known_NV.copy()
    outside[rows, found.head_ids] = True
    logp = torch.log_softmax(case.logits_NV.double(), 1).clamp(min=LOWEST)
    sampler = Sampler(codec, KNOTS)
    sizes, _ = sampler.split(case.logits_NV, sampler.list_known(case.gold_N))
    in_tail = sizes.size_NQU.flatten(1)[:, : codec.vocabulary_size] > 0
    # float32 may take a size of 1e-46 to 1e-37 for 0 or not, so the sampler decides about those.
    free = torch.from_numpy(~outside)
    size_NV = torch.from_numpy(case.size_NV)
    assert in_tail[free & (size_NV > 1e-37)].all()
    assert not in_tail[~free | (size_NV < 1e-46)].any()
    for number, beta in enumerate(codec.nodes(KNOTS)):
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
    average_tempered_(got, logits, betas)
    exact = torch.stack([torch.softmax(logits.double() * beta, 1) for beta in betas]).mean(0)
    torch.testing.assert_close(got.double(), exact, rtol=1e-5, atol=1e-12)


def test_the_partition_does_not_write_over_what_it_reads() -> None:
    tail = make_logits("normal", 3, 50, 2.0, 0)
    before = tail.clone()
    compute_partition(tail, (0.5, 1.0, 2.0))
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
    """softmax(s + c) = softmax(s): float32 keeps s to 2e-3 at 3e4, and nothing else may be lost."""
    codec = make_codec("threshold", 300)
    logits = make_logits("normal", 6, 300, 2.0, 0) + shift
    exact = torch.softmax(logits.double(), 1)
    found = sample(codec, logits)
    np.testing.assert_allclose(found.entropy, torch.special.entr(exact).sum(1), atol=2e-2)
    np.testing.assert_allclose(found.known_logprobs[:, 0], exact[:, 0].log(), atol=5e-3)
