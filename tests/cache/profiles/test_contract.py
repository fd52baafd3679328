"""What every profile must do: a new one passes these tests once it is in the table."""

from __future__ import annotations

import math
from dataclasses import fields, replace
from pathlib import Path

import numpy as np
import pytest

from bench.support.small.caches import (
    make_cache,
    make_codec,
    make_identity,
    make_reading,
    make_records,
    make_shard,
)
from cache.codec import Codec
from cache.inspection import compute_cache_stats
from cache.profiles.profile import Profile
from cache.profiles.table import PROFILES
from cache.records import find_axis
from cache.rounding import ENTROPY_STEP, KNOWN_STEP, RecordPositions
from cache.store import open_cache
from cache.viewing.record_pages import read_page
from kd.config.cache import CacheConfig

V = 60
N = 7


@pytest.fixture(params=PROFILES)
def codec(request: pytest.FixtureRequest) -> Codec:
    return make_codec(request.param).record_codec(V)


@pytest.fixture
def rules(codec: Codec) -> Profile:
    return codec.rules


def read_example(codec: Codec):
    rng = np.random.default_rng(3)
    logits_NV = rng.normal(0, 3, (N, V))
    logp_NV = logits_NV - np.log(np.exp(logits_NV).sum(1, keepdims=True))
    return make_reading(rng, codec, logp_NV)


def test_a_profile_has_the_name_by_which_it_is_found(codec: Codec, rules: Profile) -> None:
    assert rules.name == codec.profile and rules == type(rules)()


def test_its_columns_are_known_to_a_reader(codec: Codec, rules: Profile) -> None:
    assert rules.sampled == any(find_axis(name) != "position" for name in codec.schema())
    assert set(rules.measured) - {"tokens", "target_mask"} <= set(codec.schema())
    assert set(rules.shown) <= set(codec.schema())
    assert rules.sampled or set(rules.shown) or rules.needs_lm_head


def test_the_next_token_and_the_entropy_are_within_their_steps(codec: Codec) -> None:
    reading = read_example(codec)
    places = RecordPositions(np.zeros(N, np.int64), np.arange(N))
    records = codec.encode(reading, places)
    gold = records["known"][:, 0] * -KNOWN_STEP
    assert np.abs(gold - reading.known_logprobs[:, 0]).max() < KNOWN_STEP
    each = codec.encode(reading, places)
    if codec.spreads_entropy:
        apart = records["entropy"].sum() * ENTROPY_STEP - reading.entropy.sum()
        assert abs(apart) <= ENTROPY_STEP / 2 and np.ptp(records["entropy"]) <= 1
        each = replace(codec, entropies=True).encode(reading, places)
    assert np.abs(each["entropy"] * ENTROPY_STEP - reading.entropy).max() < ENTROPY_STEP
    again = codec.encode(reading, places)
    for name, column in records.columns.items():
        np.testing.assert_array_equal(column, again[name])


def test_its_bytes_follow_from_its_numbers(codec: Codec, rules: Profile) -> None:
    position = rules.estimate_position(codec, 64)
    assert rules.sampled or position >= sum(
        dtype.itemsize for dtype, _ in rules.schema(codec).values()
    )
    assert rules.estimate_position(codec, 128) >= position > codec.common_bytes
    assert rules.estimate_shard(codec) >= rules.shard_bytes > 1_000


def test_a_reading_of_another_profile_is_refused(codec: Codec, rules: Profile) -> None:
    strange = next(each for each in PROFILES.values() if each.reading is not rules.reading)
    other = read_example(make_codec(strange.name).record_codec(V))
    with pytest.raises((AttributeError, ValueError)):
        codec.encode(other, RecordPositions(np.zeros(N, np.int64), np.arange(N)))


def test_the_numbers_of_no_profile_are_refused_by_name(codec: Codec, rules: Profile) -> None:
    assert rules.find_fault(codec) is None
    nothing = Codec(codec.profile, V)
    fault = rules.find_fault(nothing)
    assert fault is not None and fault.startswith("codec.")
    with pytest.raises(ValueError, match="codec"):
        replace(make_codec(codec.profile), threshold=0.0, k=0, bits=0)


def test_a_cache_of_it_is_read_as_it_was_written(codec: Codec, tmp_path: Path) -> None:
    identity = make_identity(codec=make_codec(codec.profile), vocabulary_size=V)
    opened = open_cache(make_cache(tmp_path, identity))
    sequences, records = make_shard(identity, 0)
    found, read = opened.read(range(len(sequences.tokens)))
    np.testing.assert_array_equal(found.tokens, sequences.tokens)
    assert set(read.columns) == set(records.columns) == set(codec.schema())
    for name in ("known", "entropy"):
        np.testing.assert_array_equal(read[name], records[name])
    assert (opened.manifest.head.digest != "") == codec.rules.needs_lm_head


def test_people_can_look_at_it(codec: Codec, rules: Profile, tmp_path: Path) -> None:
    identity = make_identity(codec=make_codec(codec.profile), vocabulary_size=V)
    opened = open_cache(make_cache(tmp_path, identity))
    summary = compute_cache_stats(opened)
    assert summary.entries is not None
    assert summary.entries.max <= rules.bound_entries(opened.codec)
    (record,) = read_page(opened, None, 0, 0, 1).records
    assert record.entropy is not None and record.said_probability is not None
    assert (record.entries is None) == rules.needs_lm_head
    if record.tail is not None:
        shown = sum(entry.probability for entry in record.head)
        assert 0 <= record.tail < 1 and shown <= 1 + 1e-3
        assert record.entries is not None
        if record.entries == len(record.head):
            assert math.isclose(shown + record.tail, 1.0, abs_tol=0.02)


def test_a_job_can_set_its_fields_and_no_others(codec: Codec, rules: Profile) -> None:
    known = {"threshold", "temperatures", "always_keep", "draws", "k", "dtype"}
    assert rules.options and rules.options <= known
    assert bool(rules.dtypes) == ("dtype" in rules.options)
    for name in rules.dtypes:
        config = CacheConfig(profile=codec.profile, dtype=name)
        assert config.bits == rules.dtypes[name]
    values = {"threshold": 0.1, "k": 3, "draws": 2, "dtype": "float32"}
    for name, value in values.items():
        if name not in rules.options:
            with pytest.raises(ValueError, match=f"has no use for {name}"):
                CacheConfig(profile=codec.profile, **{name: value})


def test_records_of_one_seed_are_equal(codec: Codec) -> None:
    first = make_records(4, N, codec)
    assert {field.name for field in fields(codec.rules.reading)} >= {"known_logprobs", "entropy"}
    for name, column in make_records(4, N, codec).columns.items():
        np.testing.assert_array_equal(column, first[name])
