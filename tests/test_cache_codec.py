"""Records as small integers: unbiased, reproducible, and decoded to exactly the grid."""

import math
from dataclasses import fields, replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cache.codec import (
    ENTROPY_STEP,
    GOLD_STEP,
    SMALLEST_THRESHOLD,
    Codec,
    id_dtype,
    level_logprobs,
    stochastic_levels,
)
from cache.random import PURPOSE_ROUNDING, uniforms
from cache.records import Records
from cache.testing import make_records

THRESHOLD = 0.04


def places(positions):
    """The positions as (sequence, position): sequences of ten."""
    return np.divmod(np.arange(positions), 10)


@settings(deadline=None, max_examples=60)
@given(p=st.floats(THRESHOLD, 1.0), threshold=st.sampled_from([SMALLEST_THRESHOLD, 0.01, THRESHOLD]))
def test_the_expected_decoded_probability_is_exact(p, threshold):
    """The draw decides between two neighbours, and the upper one begins exactly at the chance that keeps the mean."""
    logprob = np.array([math.log(p)])
    low = int(stochastic_levels(logprob, threshold, np.array([1 - 2**-53]))[0])
    high = int(stochastic_levels(logprob, threshold, np.array([0.0]))[0])
    levels = np.exp(level_logprobs(threshold))
    assert high - low in (0, 1)
    assert levels[low] * (1 - 1e-12) <= p <= levels[high] * (1 + 1e-12)
    if high > low:
        chance = (p - levels[low]) / (levels[high] - levels[low])
        draws = np.array([chance * (1 - 1e-9), min(chance * (1 + 1e-9) + 1e-12, 1 - 2**-53)])
        assert stochastic_levels(np.repeat(logprob, 2), threshold, draws).tolist() == [high, low]


def test_the_mean_over_many_redraws_is_the_probability():
    p = np.array([0.0401, 0.05, 0.123, 0.5, 0.97, 0.99999])
    sequence = np.arange(40_000)
    levels = np.exp(level_logprobs(THRESHOLD).astype(np.float32).astype(np.float64))
    for rank, value in enumerate(p):
        draws = uniforms(0, PURPOSE_ROUNDING, sequence, 0, rank)
        decoded = levels[stochastic_levels(np.full(len(draws), math.log(value)), THRESHOLD, draws)]
        z = (decoded.mean() - value) / max(decoded.std() / math.sqrt(len(draws)), 1e-9)
        assert abs(z) < 5, f"p = {value}: mean {decoded.mean()}"


def test_weights_are_unbiased_and_sum_to_one_after_rounding():
    """Redrawn with many seeds, head and tail weights of real records average to the exact ones."""
    records = make_records(1, 12, 300, THRESHOLD)
    codecs = [Codec(THRESHOLD, seed, 300) for seed in range(2000)]
    decoded = [codec.decode(codec.encode(records, *places(12))) for codec in codecs]
    for weights in ("head_weights", "tail_weights"):
        exact = getattr(records, weights)()
        draws = np.stack([getattr(redrawn, weights)() for redrawn in decoded]).astype(np.float64)
        error = draws.mean(axis=0) - exact
        assert (np.abs(error) < 5 * draws.std(axis=0) / math.sqrt(len(draws)) + 1e-6).all()
    heads = np.bincount(decoded[0].head_rows(), decoded[0].head_weights(), minlength=12)
    tails = np.bincount(decoded[0].tail_rows(), decoded[0].tail_weights(), minlength=12)
    np.testing.assert_allclose(heads + tails, 1, atol=1e-6)


@settings(deadline=None, max_examples=60)
@given(
    seed=st.integers(0, 10**6),
    positions=st.integers(0, 30),
    vocabulary_size=st.sampled_from([60, 300, 65536, 65537, 262144]),
    threshold=st.sampled_from([SMALLEST_THRESHOLD, THRESHOLD, 0.125, 0.5]),
)
def test_round_trip(seed, positions, vocabulary_size, threshold):
    records = make_records(seed, positions, vocabulary_size, threshold)
    codec = Codec(threshold, seed, vocabulary_size)
    stored = codec.encode(records, *places(positions))
    decoded = codec.decode(stored)
    for name in ("head_count", "head_ids", "tail_count", "tail_ids"):
        assert np.array_equal(getattr(decoded, name), getattr(records, name))
        assert getattr(decoded, name).dtype == getattr(records, name).dtype
    step = -math.log(threshold) / 255
    np.testing.assert_allclose(decoded.head_logprobs, records.head_logprobs, atol=step * 1.001)
    np.testing.assert_allclose(decoded.gold_logprob, np.maximum(records.gold_logprob, -65535 * GOLD_STEP), atol=0.00025)
    np.testing.assert_allclose(decoded.entropy, records.entropy, atol=ENTROPY_STEP / 2 + 1e-6)
    again = codec.encode(decoded, *places(positions))
    assert np.array_equal(again["gold_logprob"], stored["gold_logprob"])
    assert np.array_equal(again["entropy"], stored["entropy"])


def test_every_level_decodes_to_itself():
    levels = level_logprobs(THRESHOLD)
    assert stochastic_levels(levels, THRESHOLD, np.full(256, 0.5)).tolist() == list(range(256))
    assert (levels[0], levels[255]) == (math.log(THRESHOLD), 0.0)


def test_codes_do_not_depend_on_what_is_encoded_together():
    records = make_records(4, 30, 300, THRESHOLD)
    codec, (sequence, position) = Codec(THRESHOLD, 7, 300), places(30)
    whole = codec.encode(records, sequence, position)
    parts = [codec.encode(records.slice(s, s + 3), sequence[s : s + 3], position[s : s + 3]) for s in range(0, 30, 3)]
    assert all(np.array_equal(np.concatenate([part[name] for part in parts]), whole[name]) for name in whole)
    other = Codec(THRESHOLD, 8, 300).encode(records, sequence, position)
    assert (other["head_logprobs"] != whole["head_logprobs"]).any()


def test_the_entries_of_a_record_are_rounded_independently():
    """One draw for a whole record would keep each entry unbiased and yet make their sum needlessly noisy."""
    count = 100
    records = Records(
        head_count=np.array([count], np.uint8),
        head_ids=np.arange(count, dtype=np.uint32),
        head_logprobs=np.full(count, level_logprobs(SMALLEST_THRESHOLD)[40:42].mean(), np.float32),
        tail_count=np.array([1], np.uint8),
        tail_ids=np.array([count], np.uint32),
        gold_logprob=np.array([-5], np.float32),
        entropy=np.array([4], np.float32),
    )
    stored = Codec(SMALLEST_THRESHOLD, 0, 300).encode(records, *places(1))
    assert 25 < np.count_nonzero(stored["head_logprobs"] == 41) < 75


def test_numbers_beyond_the_fixed_point_grids_saturate():
    records = make_records(0, 3, 300, THRESHOLD)
    extreme = replace(
        records,
        gold_logprob=np.array([-np.inf, -40.0, 1e-7], np.float32),
        entropy=np.array([17.0, -1e-6, 12.5], np.float32),
    )
    codec = Codec(THRESHOLD, 0, 300)
    decoded = codec.decode(codec.encode(extreme, *places(3)))
    np.testing.assert_allclose(decoded.gold_logprob, [-65535 * GOLD_STEP, -65535 * GOLD_STEP, 0])
    np.testing.assert_allclose(decoded.entropy, [65535 * ENTROPY_STEP, 0, 12.5])


def test_ids_take_two_bytes_up_to_65536_words():
    assert [id_dtype(size).itemsize for size in (2, 65536, 65537, 262144)] == [2, 2, 4, 4]


@pytest.mark.parametrize("name", ["head_ids", "tail_ids"])
def test_an_id_outside_the_vocabulary_is_refused_instead_of_wrapped(name):
    records = make_records(0, 3, 300, THRESHOLD)
    ids = getattr(records, name).copy()
    ids[-1] = 65536 + 299
    with pytest.raises(ValueError, match=f"{name} must be below the vocabulary size 300, but got 65835"):
        Codec(THRESHOLD, 0, 300).encode(replace(records, **{name: ids}), *places(3))


@pytest.mark.parametrize("logprob", [math.log(THRESHOLD) - 0.01, 0.01])
def test_a_head_outside_the_grid_is_refused(logprob):
    with pytest.raises(ValueError, match="head_logprobs must lie in"):
        stochastic_levels(np.array([-1.0, logprob]), THRESHOLD, np.zeros(2))


def test_records_have_no_field_that_is_not_stored():
    records = make_records(0, 3, 300, THRESHOLD)
    assert set(Codec(THRESHOLD, 0, 300).encode(records, *places(3))) == {field.name for field in fields(records)}
