"""Sequences and records in memory: validation and slices, for every profile."""

from dataclasses import fields
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.support.small.caches import make_records, make_sequences
from cache.codec import Codec
from cache.errors import CacheError
from cache.layout import encode_arrays
from cache.profiles.table import PROFILES
from cache.records import Records, Sequences, compute_offsets
from tests.support.caches import V, identity_of


def codec_of(profile: str) -> Codec:
    return identity_of(profile).record_codec()


def same(left: Records, right: Records) -> bool:
    assert left.columns.keys() == right.columns.keys()
    return all(np.array_equal(left[name], right[name]) for name in left.columns)


def by_hand() -> Records:
    """Two positions: two heads and two tails; no head and one tail."""
    return Records(
        {
            "known": np.array([[179], [1024]], np.uint16),
            "entropy": np.array([19, 80], np.uint8),
            "head_count": np.array([2, 0], np.uint8),
            "head_ids": np.array([7, 3], np.uint16),
            "head_logprobs": np.array([27, 47], np.uint8),
            "tail_count": np.array([2, 1], np.uint8),
            "tail_ids": np.array([9, 1, 4], np.uint16),
        }
    )


def test_lengths_and_slices_by_hand():
    records = by_hand()
    assert (len(records), records.length("head"), records.length("tail")) == (2, 2, 3)
    first = records.slice(0, 1)
    second = records.slice(1, 2)
    assert (first["head_ids"].tolist(), first["tail_ids"].tolist()) == ([7, 3], [9, 1])
    assert (second["head_ids"].tolist(), second["tail_ids"].tolist()) == ([], [4])
    assert np.shares_memory(first["tail_ids"], records["tail_ids"])


@settings(deadline=None, max_examples=60)
@given(
    profile=st.sampled_from(list(PROFILES)),
    seed=st.integers(0, 10**6),
    cuts=st.lists(st.integers(0, 30), max_size=4),
)
def test_slices_put_together_again_are_the_whole(profile, seed, cuts):
    records = make_records(seed, 30, codec_of(profile))
    ends = [0, *sorted(cuts), 30]
    parts = [records.slice(start, stop) for start, stop in pairwise(ends)]
    assert [len(part) for part in parts] == [stop - start for start, stop in pairwise(ends)]
    assert same(Records.concatenate(parts), records)


@pytest.mark.parametrize("profile", PROFILES)
def test_every_profile_has_known_and_entropy(profile):
    codec = codec_of(profile)
    records = make_records(0, 4, codec)
    assert set(records.columns) == set(codec.schema())
    assert records["known"].shape == (4, 1 + len(codec.always_keep))
    assert (len(records), len(records["entropy"])) == (4, 4)


def test_counts_beyond_a_byte_are_summed_without_overflow():
    count = np.full(300, 255, np.uint8)
    columns = {"entropy": count, "tail_count": count, "tail_ids": np.zeros((76_500, 2), np.uint16)}
    assert Records(columns).slice(299, 300).length("tail") == 255
    assert compute_offsets(count)[-1] == 76_500
    assert compute_offsets(np.zeros(0, np.uint8)).tolist() == [0]


WRONG_COLUMNS = {
    "known": np.zeros((3, 1), np.uint16),
    "entropy": np.zeros(1, np.uint8),
    "head_count": np.array([1, 0], np.uint8),
    "head_ids": np.zeros(3, np.uint16),
    "head_logprobs": np.zeros(1, np.uint8),
    "tail_count": np.array([2, 2], np.uint8),
    "tail_ids": np.zeros((2, 1), np.uint16),
}


@pytest.mark.parametrize("name", WRONG_COLUMNS)
def test_columns_of_another_length_cannot_exist(name):
    with pytest.raises(ValueError, match=r"must have \d rows, but got"):
        Records(by_hand().columns | {name: WRONG_COLUMNS[name]})


# ---- sequences


def test_sequences_are_selected_in_the_order_asked():
    sequences = make_sequences(0, 6, 16, V)
    chosen = sequences.select([4, 0, 4])
    assert len(chosen) == 3
    assert (chosen.tokens == sequences.tokens[[4, 0, 4]]).all()
    joined = Sequences.concatenate([sequences.select(slice(0, 2)), sequences.select(slice(2, 6))])
    assert all(
        np.array_equal(getattr(joined, each.name), getattr(sequences, each.name))
        for each in fields(joined)
    )


def test_gold_ids_are_the_next_tokens_of_the_positions_with_a_record():
    sequences = make_sequences(0, 3, 16, V)
    rows, positions = np.nonzero(sequences.target_mask)
    assert sequences.positions == len(rows)
    assert sequences.find_gold_ids().tolist() == sequences.tokens[rows, positions + 1].tolist()


def test_a_target_outside_its_sequence_or_document_is_refused():
    starts = np.array([[True, False, True, False]])
    tokens = np.zeros((1, 4), np.uint32)
    Sequences(tokens, starts, np.array([[True, False, True, False]]))
    with pytest.raises(ValueError, match="last position"):
        Sequences(tokens, starts, np.array([[True, False, True, True]]))
    with pytest.raises(ValueError, match="new document"):
        Sequences(tokens, starts, np.array([[True, True, True, False]]))
    with pytest.raises(ValueError, match="one shape"):
        Sequences(tokens[:, :3], starts, starts)
    with pytest.raises(ValueError, match="uint32"):
        Sequences(tokens.astype(np.int64), starts, starts)


def test_a_shard_of_more_records_than_its_offsets_count_is_refused():
    codec = Codec("dense", 2, bits=16)
    records = Records({"entropy": np.zeros(0, np.uint8)})
    most = 2**32 - 1
    found = encode_arrays(records, np.array([0, most]), codec)
    assert found["offsets"].tolist() == [[0], [most]]
    with pytest.raises(CacheError, match="got 4,294,967,296") as error:
        encode_arrays(records, np.array([0, most + 1]), codec)
    assert "cache.shard_sequences" in error.value.remedy
