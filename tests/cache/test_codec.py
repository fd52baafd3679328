"""Records as small integers: unbiased, reproducible, and decoded to exactly the grid."""

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.support.small.caches import make_codec, make_identity, make_records
from cache.codec import Codec
from cache.profiles.sampled import SMALLEST_THRESHOLD, Sample
from cache.profiles.table import PROFILES
from cache.profiles.threshold import UnitSample
from cache.profiles.topk import TopReading
from cache.profiles.whole import DenseReading, HiddenReading
from cache.random import PURPOSE_ROUNDING, draw_uniforms
from cache.records import Records
from cache.rounding import (
    ENTROPY_STEP,
    KNOWN_STEP,
    PARTITION_STEP,
    TAIL_STEP,
    TOP_STEP,
    UNKNOWN,
    UNKNOWN_ENTROPY,
    RecordPositions,
    choose_id_dtype,
    round_stochastically,
    round_to_bfloat16,
    round_to_fixed_point,
    spread_entropy,
)

STEPS = [KNOWN_STEP, TAIL_STEP, 2.0**-6, -math.log(0.04) / 127, -math.log(SMALLEST_THRESHOLD) / 127]
REDRAWS = 10_000


def codec_of(profile: str, vocabulary_size: int = 300, **options) -> Codec:
    return make_identity(vocabulary_size, codec=make_codec(profile, **options)).record_codec()


def exact_codec_of(profile: str, *shape: int, **options) -> Codec:
    """Return a codec of heads with logarithms: tempered, or threshold of version 0.2.0."""
    options |= {"clusters": 0, "fitted": 0} if profile == "threshold" else {}
    return codec_of(profile, *shape, **options)


def places(positions: int, first: int = 0) -> RecordPositions:
    """Return positions in sequences of ten."""
    return RecordPositions(*np.divmod(np.arange(first, first + positions), 10))


def sample(
    positions: int, head: list[float], tails: int = 2, draws: int = 1, tempered: bool = False
) -> Sample:
    """Make the same record at every position: these head probabilities, the rest in the tail."""
    known = math.log(0.01)
    count = len(head)
    return Sample(
        known_logprobs=np.full((positions, 1), known),
        entropy=np.full(positions, 2.03),
        head_count=np.full(positions, count),
        head_ids=np.tile(np.arange(1, 1 + count), positions),
        head_logprobs=np.tile(np.log(head), positions),
        tail_count=np.full(positions, tails),
        tail_ids=np.tile(np.arange(50, 50 + tails), positions)[:, None] + np.arange(draws) * 10,
        tail_logprobs=np.full((positions * tails, draws), -7.3) if tempered else None,
        partition=np.full((positions, 4, 2), -1.23456) if tempered else None,
    )


def units(positions: int, heads: int = 1, tails: int = 2) -> UnitSample:
    """Make the same record in units at every position: heads of two units, tails of one."""
    return UnitSample(
        known_logprobs=np.full((positions, 1), math.log(0.01)),
        entropy=np.full(positions, 2.03),
        cluster=np.ones(positions, np.int64),
        head_count=np.full(positions, heads),
        head_ids=np.tile(np.arange(1, 1 + heads), positions),
        head_units=np.full(positions * heads, 4),
        tail_count=np.full(positions, tails),
        tail_ids=np.tile(np.arange(50, 50 + tails), positions),
        tail_k=np.tile(np.arange(1, 1 + tails), positions),
    )


# ---- stochastic rounding


@settings(deadline=None, max_examples=100)
@given(logprob=st.floats(-60, 0), step=st.sampled_from(STEPS))
def test_the_expected_decoded_probability_is_exact(logprob, step):
    """The draw chooses between two neighbours, with exactly the chance that keeps the mean."""
    low = int(round_stochastically(np.array([logprob]), step, np.array([1 - 2**-53]))[0])
    high = int(round_stochastically(np.array([logprob]), step, np.array([0.0]))[0])
    p_low = math.exp(-step * low)
    p_high = math.exp(-step * high)
    assert low - high in (0, 1)
    assert p_low * (1 - 1e-12) <= math.exp(logprob) <= p_high * (1 + 1e-12)
    if low > high:
        chance = (math.exp(logprob) - p_low) / (p_high - p_low)
        draws = np.array(
            [max(chance * (1 - 1e-9) - 1e-12, 0), min(chance * (1 + 1e-9) + 1e-12, 1 - 2**-53)]
        )
        got = round_stochastically(np.repeat(logprob, 2), step, draws).tolist()
        assert got == [high if chance > 1e-11 else got[0], low if chance < 1 - 1e-11 else got[1]]


@settings(deadline=None, max_examples=60)
@given(code=st.integers(0, 65534), step=st.sampled_from(STEPS), draw=st.floats(0.001, 0.999))
def test_every_level_decodes_to_itself(code, step, draw):
    assert round_stochastically(np.array([-code * step]), step, np.array([draw])).tolist() == [code]


def test_nothing_is_the_largest_number_there_is():
    assert (
        round_stochastically(np.array([-np.inf, np.nan]), KNOWN_STEP, np.zeros(2)).min() > UNKNOWN
    )
    assert round_stochastically(np.array([1e-7]), KNOWN_STEP, np.zeros(1)).tolist() == [0]


def z_of(values: np.ndarray, exact: float) -> float:
    return float((values.mean() - exact) / max(values.std() / math.sqrt(len(values)), 1e-9))


@pytest.mark.parametrize("profile", PROFILES)
def test_known_probabilities_and_entropies_are_unbiased_over_redraws(profile):
    options = {"topk": {"k": 1}, "threshold": {"entropies": True}}.get(profile, {})
    codec = codec_of(profile, **options)
    entropies = [0.0, 0.001, 2.03, 0.99 * ENTROPY_STEP, 10.61]
    for logprob, entropy in zip([-1e-4, -0.3, -2.001, -8.77, -20.0], entropies, strict=True):
        known = np.full((REDRAWS, 1), logprob)
        common = {"known_logprobs": known, "entropy": np.full(REDRAWS, entropy)}
        if profile == "topk":
            own = {"ids": np.zeros((REDRAWS, 1), int), "logprobs": known, "residual": known[:, 0]}
            records = codec.encode(TopReading(**common, **own), places(REDRAWS))
        elif profile == "dense":
            whole = DenseReading(**common, logprobs=np.zeros((REDRAWS, 3)))
            records = codec.encode(whole, places(REDRAWS))
        elif profile == "hidden":
            states = HiddenReading(**common, states=np.zeros((REDRAWS, 3)))
            records = codec.encode(states, places(REDRAWS))
        elif profile == "threshold":
            records = codec.encode(replace(units(REDRAWS), **common), places(REDRAWS))
        else:
            found = replace(sample(REDRAWS, [0.5], tempered=True), **common)
            records = codec.encode(found, places(REDRAWS))
        decoded = np.exp(records["known"][:, 0] * -KNOWN_STEP)
        assert abs(z_of(decoded, math.exp(logprob))) < 5
        assert abs(z_of(records["entropy"] * ENTROPY_STEP, entropy)) < 5
        assert np.abs(records["entropy"] * ENTROPY_STEP - entropy).max() < ENTROPY_STEP


@pytest.mark.parametrize("profile", ["threshold", "tempered"])
def test_head_probabilities_are_unbiased_over_redraws_and_rounded_independently(profile):
    head = [0.0401, 0.05, 0.123, 0.3]
    codec = exact_codec_of(profile)
    records = codec.encode(sample(REDRAWS, head, tempered=profile == "tempered"), places(REDRAWS))
    decoded = np.exp(records["head_logprobs"].reshape(REDRAWS, 4) * -codec.head_step)
    for column, p in zip(decoded.T, head, strict=True):
        assert abs(z_of(column, p)) < 5
    # With one draw for a whole record each entry would be unbiased, but their sum would be noisy.
    correlation = np.corrcoef(decoded.T) - np.eye(4)
    assert np.abs(correlation).max() < 5 / math.sqrt(REDRAWS)
    # The tail's m tokens share what head and gold leave: rounding changes it, but not its mean.
    rest = 1 - decoded.sum(1) - np.exp(records["known"][:, 0] * -KNOWN_STEP)
    assert abs(z_of(rest, 1 - sum(head) - 0.01)) < 5


def test_tail_values_are_unbiased_over_redraws_in_every_draw():
    codec = codec_of("tempered", draws=3)
    records = codec.encode(sample(REDRAWS, [0.5], tails=1, draws=3, tempered=True), places(REDRAWS))
    decoded = np.exp(records["tail_logprobs"] * -TAIL_STEP)
    assert all(abs(z_of(column, math.exp(-7.3))) < 5 for column in decoded.T)
    assert np.abs(np.corrcoef(decoded.T) - np.eye(3)).max() < 5 / math.sqrt(REDRAWS)


def test_rounding_of_different_columns_is_independent():
    """Known, head and entropy of one position must not share a draw."""
    codec = exact_codec_of("threshold")
    half = math.log((1 + math.exp(-codec.head_step)) / 2)
    found = replace(
        sample(REDRAWS, [0.5]),
        known_logprobs=np.full((REDRAWS, 1), math.log((1 + math.exp(-KNOWN_STEP)) / 2)),
        head_logprobs=np.full(REDRAWS, half),
        entropy=np.full(REDRAWS, 0.5 * ENTROPY_STEP),
    )
    records = codec.encode(found, places(REDRAWS))
    ups = np.stack(
        [records["known"][:, 0] == 0, records["head_logprobs"] == 0, records["entropy"] == 1]
    )
    assert np.abs(np.corrcoef(ups) - np.eye(3)).max() < 5 / math.sqrt(REDRAWS)


def test_the_draws_of_a_rounding_are_those_on_record():
    """Another purpose or counter would change the bytes of a capture that is resumed."""
    codec = exact_codec_of("threshold", seed=5)
    records = codec.encode(sample(30, [0.123, 0.3]), places(30))
    at = np.repeat(np.arange(30), 2)
    draws = draw_uniforms(5, PURPOSE_ROUNDING, at // 10, at % 10, np.tile([0, 1], 30))
    expected = round_stochastically(np.tile(np.log([0.123, 0.3]), 30), codec.head_step, draws)
    assert records["head_logprobs"].tolist() == expected.tolist()


# ---- round trip


@settings(deadline=None, max_examples=40)
@given(
    seed=st.integers(0, 10**6),
    positions=st.integers(0, 12),
    vocabulary_size=st.sampled_from([60, 300, 65536, 65537]),
    threshold=st.sampled_from([SMALLEST_THRESHOLD, 0.04, 0.125, 0.5]),
    draws=st.integers(1, 3),
    profile=st.sampled_from(["threshold", "tempered"]),
)
def test_sampled_records_round_trip(seed, positions, vocabulary_size, threshold, draws, profile):
    options = {"threshold": threshold, "draws": draws, "always_keep": (5, 7)}
    codec = exact_codec_of(profile, vocabulary_size, **options)
    records = make_records(seed, positions, codec)
    assert {
        name: (column.dtype, column.ndim) for name, column in records.columns.items()
    } == codec.schema()
    found = Sample(
        known_logprobs=records["known"] * -KNOWN_STEP,
        entropy=records["entropy"] * ENTROPY_STEP,
        head_logprobs=records["head_logprobs"] * -codec.head_step,
        **{name: records[name] for name in ("head_count", "head_ids", "tail_count", "tail_ids")},
        tail_logprobs=records["tail_logprobs"] * -TAIL_STEP if profile == "tempered" else None,
        partition=records["partition"] * PARTITION_STEP if profile == "tempered" else None,
    )
    again = codec.encode(found, places(positions))
    # A head entry just above the threshold may have been rounded below it, by one step at most.
    for name, column in records.columns.items():
        apart = np.abs(again[name].astype(int) - column.astype(int)).max(initial=0)
        assert apart <= (1 if name == "head_logprobs" else 0), name


@settings(deadline=None, max_examples=40)
@given(
    seed=st.integers(0, 10**6),
    positions=st.integers(0, 12),
    vocabulary_size=st.sampled_from([60, 300, 65536, 65537]),
    threshold=st.sampled_from([SMALLEST_THRESHOLD, 0.04, 0.125, 0.5]),
    entropies=st.booleans(),
)
def test_records_in_units_round_trip(seed, positions, vocabulary_size, threshold, entropies):
    options = {"threshold": threshold, "entropies": entropies, "always_keep": (5, 7)}
    codec = codec_of("threshold", vocabulary_size, **options)
    records = make_records(seed, positions, codec)
    assert {
        name: (column.dtype, column.ndim) for name, column in records.columns.items()
    } == codec.schema()
    names = set(records.columns) - {"known", "entropy"}
    found = UnitSample(
        known_logprobs=records["known"] * -KNOWN_STEP,
        entropy=records["entropy"] * ENTROPY_STEP,
        **{name: records[name] for name in names},
    )
    sequence = RecordPositions(np.zeros(positions, np.int64), np.arange(positions))
    again = codec.encode(found, sequence)
    for name, column in records.columns.items():
        assert again[name].tolist() == column.tolist(), name


def test_the_mean_entropy_of_a_sequence_is_spread_over_its_positions():
    rng = np.random.default_rng(2)
    sequence_N = rng.permutation(np.repeat([7, 2, 30], [40, 1, 9]))
    entropy = rng.uniform(0, 9, 50)
    codes = spread_entropy(entropy, RecordPositions(sequence_N, np.arange(50)))
    for number in (7, 2, 30):
        own = codes[sequence_N == number]
        total = entropy[sequence_N == number].sum()
        assert abs(own.sum() * ENTROPY_STEP - total) <= ENTROPY_STEP / 2
        # The larger codes come first, so that the column takes no space.
        assert np.ptp(own) <= 1 and (np.diff(own.astype(int)) <= 0).all()
    high = spread_entropy(np.full(3, 40.0), RecordPositions(np.zeros(3, int), np.arange(3)))
    assert high.tolist() == [UNKNOWN_ENTROPY - 1] * 3
    nothing = spread_entropy(np.zeros(0), RecordPositions(np.zeros(0, int), np.zeros(0, int)))
    assert (nothing.shape, nothing.dtype) == ((0,), np.uint8)


def test_rounding_stays_within_a_step():
    codec = codec_of("tempered", always_keep=(5,))
    rng = np.random.default_rng(0)
    known = rng.uniform(-30, 0, (500, 2))
    found = replace(
        sample(500, [0.3, 0.2], tempered=True),
        known_logprobs=known,
        head_logprobs=rng.uniform(-9, 0, 1000),
        tail_logprobs=rng.uniform(-31, 0, (1000, 1)),
        partition=rng.uniform(-31, 31, (500, 4, 2)),
    )
    records = codec.encode(found, places(500))
    assert np.abs(records["known"] * -KNOWN_STEP - known).max() <= KNOWN_STEP
    assert (
        np.abs(records["head_logprobs"] * -codec.head_step - found.head_logprobs).max()
        <= codec.head_step
    )
    assert np.abs(records["tail_logprobs"] * -TAIL_STEP - found.tail_logprobs).max() <= TAIL_STEP
    assert (
        np.abs(records["partition"] * PARTITION_STEP - found.partition).max() <= PARTITION_STEP / 2
    )


def test_topk_records_are_rounded_to_the_nearest_step_and_absent_entries_stay_absent():
    codec = codec_of("topk", k=3)
    top = np.array([[-0.1234, -2.5, -np.inf], [-1.0, -9.0, -31.99]])
    ids = np.array([[7, 299, 299], [1, 2, 3]])
    residual = np.array([-np.inf, -3.3333])
    common = {"known_logprobs": top[:, :1], "entropy": np.array([0.4, 1.1])}
    reading = TopReading(**common, ids=ids, logprobs=top, residual=residual)
    records = codec.encode(reading, places(2))
    assert records["top_ids"].tolist() == [[7, 299, 0], [1, 2, 3]]
    assert records["top_logprobs"][0, 2] == records["residual"][0] == UNKNOWN
    there = np.isfinite(top)
    assert np.abs(records["top_logprobs"][there] * -TOP_STEP - top[there]).max() <= TOP_STEP / 2
    assert abs(records["residual"][1] * -TOP_STEP - residual[1]) <= TOP_STEP / 2


@pytest.mark.parametrize("bits,relative", [(16, 2**-11), (32, 2**-24)])
def test_dense_records_keep_their_precision_and_nothing_becomes_infinite(bits, relative):
    codec = codec_of("dense", 50, bits=bits)
    logprobs = -np.random.default_rng(0).uniform(0.01, 100, (4, 50))
    logprobs[0, 3] = -np.inf
    common = {"known_logprobs": logprobs[:, :1], "entropy": np.ones(4)}
    records = codec.encode(DenseReading(**common, logprobs=logprobs), places(4))
    there = np.isfinite(logprobs)
    np.testing.assert_allclose(records["logprobs"][there], logprobs[there], rtol=relative)
    assert np.isfinite(records["logprobs"]).all()
    assert np.exp(records["logprobs"][0, 3].astype(np.float64)) == 0.0


@pytest.mark.parametrize("bits,largest", [(8, 127), (16, 32_767)])
@pytest.mark.parametrize("size", [1e-30, 1.0, 1e4])
def test_hidden_states_are_kept_to_half_a_step_of_their_largest_number(bits, largest, size):
    hidden = (np.random.default_rng(0).normal(size=(6, 40)) * size).astype(np.float32)
    hidden[3] = 0.0
    common = {"known_logprobs": np.full((6, 1), -1.0), "entropy": np.ones(6)}
    reading = HiddenReading(**common, states=hidden)
    records = codec_of("hidden", bits=bits).encode(reading, places(6))
    scale = records["hidden_scale"].astype(np.float64)[:, None]
    assert (np.abs(records["hidden"] * scale - hidden) <= scale * 0.51).all()
    assert (
        np.abs(records["hidden"].astype(int)).max(axis=1).tolist()
        == [largest] * 3 + [0] + [largest] * 2
    )
    assert records["hidden"].dtype.itemsize == bits // 8


def test_bfloat16_is_rounded_to_nearest_even():
    values = np.array([1.0, 1.00390625, 1.01171875, -3.140625, 0.0, -0.0, 65280.0], np.float32)
    # A value half-way between two neighbours goes to the even one: 1 + 1/256 becomes 1, and
    # 1 + 3/256 becomes 1 + 1/64.
    expected = np.array([1.0, 1.0, 1.015625, -3.140625, 0.0, -0.0, 65280.0], np.float32)
    assert round_to_bfloat16(values).tolist() == (expected.view(np.uint32) >> 16).tolist()


def test_numbers_beyond_the_grids_saturate_and_unknown_ones_say_so():
    known = np.array([[-np.inf], [-400.0], [1e-7], [np.nan]])
    found = replace(
        sample(4, [0.5]), known_logprobs=known, entropy=np.array([17.0, -1e-6, 12.5, np.nan])
    )
    records = exact_codec_of("threshold").encode(found, places(4))
    assert records["known"][:, 0].tolist() == [UNKNOWN - 1, UNKNOWN - 1, 0, UNKNOWN]
    assert records["entropy"].tolist() == [UNKNOWN_ENTROPY - 1, 0, 200, UNKNOWN_ENTROPY]
    tempered = replace(sample(1, [0.5], tempered=True), tail_logprobs=np.array([[-100.0], [-0.5]]))
    assert codec_of("tempered").encode(tempered, places(1))["tail_logprobs"].tolist() == [
        [255],
        [4],
    ]
    assert round_to_fixed_point(np.array([1e9, -1e9, 0.0004])).tolist() == [32767, -32768, 0]


# ---- what codes depend on


@pytest.mark.parametrize("profile", ["threshold", "tempered"])
def test_codes_depend_on_seed_sequence_and_position_and_not_on_what_is_encoded_together(profile):
    codec = exact_codec_of(profile, draws=2, seed=7)
    found = sample(30, [0.123, 0.3], draws=2, tempered=profile == "tempered")
    whole = codec.encode(found, places(30))
    part = sample(3, [0.123, 0.3], draws=2, tempered=profile == "tempered")
    parts = Records.concatenate(codec.encode(part, places(3, start)) for start in range(0, 30, 3))
    assert all(np.array_equal(parts[name], column) for name, column in whole.columns.items())
    other = replace(codec, seed=8).encode(found, places(30))
    elsewhere = codec.encode(found, places(30, 100))
    for name in (
        "known",
        "entropy",
        "head_logprobs",
        *(["tail_logprobs"] if profile == "tempered" else []),
    ):
        assert (other[name] != whole[name]).any()
        assert (elsewhere[name] != whole[name]).any()


def test_codes_in_units_depend_on_seed_sequence_and_position_and_not_on_what_is_encoded_together():
    codec = codec_of("threshold", seed=7, entropies=True)
    whole = codec.encode(units(30), places(30))
    parts = Records.concatenate(
        codec.encode(units(3), places(3, start)) for start in range(0, 30, 3)
    )
    assert all(np.array_equal(parts[name], column) for name, column in whole.columns.items())
    other = replace(codec, seed=8).encode(units(30), places(30))
    elsewhere = codec.encode(units(30), places(30, 100))
    for name in ("known", "entropy"):
        assert (other[name] != whole[name]).any()
        assert (elsewhere[name] != whole[name]).any()


def test_proposals_stand_at_the_ends_of_the_range_and_at_least_at_every_factor_of_two():
    for low, high in [(0.5, 2.0), (1.0, 2.0), (0.25, 8.0), (0.9, 1.1), (0.7, 1.9)]:
        betas = codec_of("tempered", temperatures=(low, high)).proposal_betas
        assert betas[0] == pytest.approx(1 / high)
        assert betas[-1] == pytest.approx(1 / low)
        assert (np.diff(np.log2(betas)) <= 1 + 1e-9).all()
    assert codec_of("tempered").nodes(3) == pytest.approx((0.5, 1.0, 2.0))


# ---- refusals


def test_ids_take_two_bytes_up_to_65536_words():
    assert [choose_id_dtype(size).itemsize for size in (2, 65536, 65537, 262144)] == [2, 2, 4, 4]


@pytest.mark.parametrize("clusters", [0, 2])
@pytest.mark.parametrize("name", ["head_ids", "tail_ids"])
@pytest.mark.parametrize(
    "value,message",
    [
        (300, "below the vocabulary size 300, but got 300"),
        (65_835, "got 65835"),
        (-1, "not be negative"),
    ],
)
def test_an_id_outside_the_vocabulary_is_refused_instead_of_wrapped(name, value, message, clusters):
    found = units(3) if clusters else sample(3, [0.5])
    ids = getattr(found, name).copy()
    ids[-1] = value
    with pytest.raises(ValueError, match=f"{name} must .*{message}"):
        codec_of("threshold", clusters=clusters, fitted=clusters).encode(
            replace(found, **{name: ids}), places(3)
        )


@pytest.mark.parametrize("value", [-7, 300, 65536])
def test_an_id_of_topk_outside_the_vocabulary_is_refused_instead_of_wrapped(value):
    reading = TopReading(
        known_logprobs=np.array([[-1.0]]),
        entropy=np.ones(1),
        ids=np.array([[5, value]]),
        logprobs=np.array([[-0.1, -3.0]]),
        residual=np.array([-4.0]),
    )
    with pytest.raises(ValueError, match="top_ids must"):
        codec_of("topk", k=2).encode(reading, places(1))


@pytest.mark.parametrize(
    "profile,logprob",
    [
        ("threshold", math.log(0.04) - 0.01),
        ("threshold", 0.01),
        ("tempered", 0.01),
        ("tempered", -1030.0),
    ],
)
def test_a_head_outside_the_grid_is_refused(profile, logprob):
    found = replace(
        sample(1, [0.5, 0.2], tempered=profile == "tempered"),
        head_logprobs=np.array([-1.0, logprob]),
    )
    with pytest.raises(ValueError, match="head_logprobs must lie in"):
        exact_codec_of(profile).encode(found, places(1))


@pytest.mark.parametrize("profile", PROFILES)
def test_columns_that_are_not_the_profiles_are_refused(profile):
    codec = codec_of(profile)
    records = make_records(0, 3, codec)
    assert codec.require(records) is records
    name = sorted(codec.schema())[-1]
    with pytest.raises(ValueError, match=f"Profile {profile} has columns"):
        codec.require(
            Records({key: column for key, column in records.columns.items() if key != name})
        )
    with pytest.raises(ValueError, match=r"but got .*'colour'"):
        codec.require(Records(records.columns | {"colour": np.zeros(3)}))
    with pytest.raises(ValueError, match=f"{name} must be of type"):
        codec.require(Records(records.columns | {name: records[name].astype(np.float64)}))
    with pytest.raises(ValueError, match="dimensions"):
        codec.require(Records(records.columns | {name: records[name][..., None]}))
