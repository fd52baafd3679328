"""A perplexity has the tokens that it was measured on, and an interval that holds what it says."""

from __future__ import annotations

import math
import warnings

import numpy as np
import pytest

from cache.perplexity import BLOCK_TARGETS, BlockLosses, Interval, Perplexity, compute_t_point


def test_blocks_begin_anew_in_each_sequence_and_the_mean_is_that_of_the_tokens():
    losses = np.arange(300.0)
    found = BlockLosses.of(losses, np.array([100, 0, 70, 130]))
    assert found.tokens_B.tolist() == [64, 36, 64, 6, 64, 64, 2]
    assert found.nats_B[0] == sum(range(64)) and found.nats_B[3] == sum(range(164, 170))
    assert (found.tokens, found.mean) == (300, losses.mean())
    halves = BlockLosses.of(losses[:100], np.array([100, 0]))
    halves += BlockLosses.of(losses[100:], np.array([70, 130]))
    assert halves.nats_B.tolist() == found.nats_B.tolist()
    assert halves.interval == found.interval


def test_a_token_without_a_known_loss_does_not_count():
    known = np.array([True] * 5 + [False] * 5)
    found = BlockLosses.of(np.arange(10.0), np.array([10]), known)
    assert (found.tokens, found.mean) == (5, 2.0)
    nothing = BlockLosses.of(np.arange(10.0), np.array([10]), ~known & known)
    assert (nothing.tokens, nothing.mean, nothing.perplexity) == (0, None, None)
    assert BlockLosses.none().interval is None


@pytest.mark.parametrize(
    ("freedom", "point"),
    [(1, 12.706205), (2, 4.302653), (3, 3.182446), (5, 2.570582), (10, 2.228139), (100, 1.983972)],
)
def test_the_point_of_student_s_t_is_that_of_the_tables(freedom, point):
    assert compute_t_point(freedom) == pytest.approx(point, rel=2e-3)


def test_the_interval_is_that_of_equal_blocks_by_the_textbook():
    nats = np.random.default_rng(0).gamma(2.0, 1.5, 10 * BLOCK_TARGETS)
    found = BlockLosses.of(nats, np.array([len(nats)])).interval
    means = nats.reshape(10, -1).mean(axis=1)
    reach = 2.262157 * means.std(ddof=1) / math.sqrt(10)  # the table's point for 9
    assert (found.low, found.high) == pytest.approx((means.mean() - reach, means.mean() + reach))


def test_the_interval_holds_the_mean_of_correlated_losses_in_95_of_100_texts():
    """Losses of a text go up and down together over some ten tokens."""
    random = np.random.default_rng(1)
    held = 0
    texts = 400
    for _ in range(texts):
        noise = random.normal(size=1600 + 19)
        losses = 3.0 + np.convolve(noise, np.ones(20) / math.sqrt(20), "valid")
        interval = BlockLosses.of(losses, np.array([800, 800])).interval
        held += interval.low <= 3.0 <= interval.high
    assert 0.90 <= held / texts <= 0.97
    alone = 1.96 * losses.std() / math.sqrt(len(losses))
    assert (interval.high - interval.low) / 2 > 2 * alone, "single tokens would promise too much"


def test_two_models_on_one_text_are_compared_by_their_differences():
    random = np.random.default_rng(2)
    hard = random.gamma(2.0, 2.0, 640)
    one, other = (
        BlockLosses.of(hard + more, np.array([640]))
        for more in (0.0, 0.1 + random.normal(0, 0.1, 640))
    )
    difference = (other - one).interval
    assert 0.07 < difference.low < difference.high < 0.13
    assert other.interval.low < one.mean < other.interval.high, "apart they could be equal"


def test_few_tokens_show_their_interval_and_too_few_have_none():
    shown = Perplexity.of(math.log(50.0), 1999, Interval(math.log(40.0), math.log(60.0)))
    assert str(shown) == "50.00 (1,999 tokens, 95 % interval 40.00 to 60.00)"
    assert str(Perplexity(50.0, 2000, shown.interval)) == "50.00 (2,000 tokens)"
    three_blocks = BlockLosses.of(np.ones(192), np.array([192]))
    assert three_blocks.interval is None
    assert str(three_blocks.perplexity) == "2.72 (192 tokens)"


def test_a_student_that_diverged_has_a_perplexity_and_warns_of_nothing():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for loss in (math.inf, math.nan, 1e6):
            found = BlockLosses.of(np.array([1.0] * 299 + [loss]), np.array([300])).perplexity
            assert found.tokens == 300
            assert math.isnan(loss) == math.isnan(found.value)
