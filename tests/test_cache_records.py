"""Sequences and records in memory: valid once they exist, weights that sum to one, exact slices."""

from dataclasses import fields, replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cache.records import Records, Sequences, offsets_of
from cache.testing import make_records, make_sequences

V, THRESHOLD = 300, 0.04


def same(left, right):
    return all(np.array_equal(getattr(left, field.name), getattr(right, field.name)) for field in fields(left))


def by_hand() -> Records:
    """Two positions: head 0.5 + 0.3 and two tail tokens; no head and one tail token."""
    return Records(
        head_count=np.array([2, 0], np.uint8),
        head_ids=np.array([7, 3], np.uint32),
        head_logprobs=np.log(np.array([0.5, 0.3], np.float32)),
        tail_count=np.array([2, 1], np.uint8),
        tail_ids=np.array([1, 9, 4], np.uint32),
        gold_logprob=np.array([-0.7, -4.0], np.float32),
        entropy=np.array([1.2, 5.0], np.float32),
    )


def test_weights_by_hand():
    records = by_hand()
    np.testing.assert_allclose(records.head_weights(), [0.5, 0.3], rtol=1e-6)
    np.testing.assert_allclose(records.tail_weights(), [0.1, 0.1, 1.0], rtol=1e-6)
    assert records.head_rows().tolist() == [0, 0]
    assert records.tail_rows().tolist() == [0, 0, 1]
    assert records.tail_offsets.tolist() == [0, 2, 3]


def test_a_head_rounded_above_one_gives_a_negative_tail_instead_of_a_biased_one():
    records = replace(by_hand(), head_logprobs=np.log(np.array([0.8, 0.3], np.float32)))
    np.testing.assert_allclose(records.tail_weights(), [-0.05, -0.05, 1.0], rtol=1e-5)


@settings(deadline=None, max_examples=50)
@given(seed=st.integers(0, 10**6), positions=st.integers(0, 40))
def test_the_weights_of_every_record_sum_to_one(seed, positions):
    records = make_records(seed, positions, V, THRESHOLD)
    total = np.bincount(records.head_rows(), records.head_weights(), minlength=positions)
    total += np.bincount(records.tail_rows(), records.tail_weights(), minlength=positions)
    np.testing.assert_allclose(total, 1, atol=1e-6)


@settings(deadline=None, max_examples=50)
@given(seed=st.integers(0, 10**6), cuts=st.lists(st.integers(0, 30), max_size=4))
def test_slices_put_together_again_are_the_whole(seed, cuts):
    records = make_records(seed, 30, V, THRESHOLD)
    ends = [0, *sorted(cuts), 30]
    parts = [records.slice(start, stop) for start, stop in pairwise(ends)]
    assert [len(part) for part in parts] == [stop - start for start, stop in pairwise(ends)]
    assert same(Records.concatenate(parts), records)


def test_sequences_are_selected_in_the_order_asked():
    sequences = make_sequences(0, 6, 16, V)
    chosen = sequences.select([4, 0, 4])
    assert len(chosen) == 3
    assert (chosen.tokens == sequences.tokens[[4, 0, 4]]).all()
    assert same(Sequences.concatenate([sequences.select(slice(0, 2)), sequences.select(slice(2, 6))]), sequences)


def test_gold_ids_are_the_next_tokens_of_the_positions_with_a_record():
    sequences = make_sequences(0, 3, 16, V)
    rows, positions = np.nonzero(sequences.target_mask)
    assert sequences.positions == len(rows)
    assert sequences.gold_ids().tolist() == sequences.tokens[rows, positions + 1].tolist()


def test_offsets_run_from_zero_to_the_sum_without_overflow():
    assert offsets_of(np.full(300, 255, np.uint8))[-1] == 76500
    assert offsets_of(np.zeros(0, np.uint8)).tolist() == [0]


WRONG_RECORDS = {
    "head_count": np.array([1, 0], np.uint8),
    "head_ids": np.array([7, 3], np.int64),
    "head_logprobs": np.array([np.nan, -1], np.float32),
    "tail_count": np.array([2, 2], np.uint8),
    "tail_ids": np.array([9, 1, 4], np.uint32),
    "gold_logprob": np.array([-1, np.nan], np.float32),
    "entropy": np.array([1.0], np.float32),
}


@pytest.mark.parametrize("name", sorted(WRONG_RECORDS))
def test_records_that_are_not_valid_cannot_exist(name):
    with pytest.raises(ValueError, match="must"):
        replace(by_hand(), **{name: WRONG_RECORDS[name]})


def test_a_tail_may_begin_below_the_end_of_the_tail_before():
    assert by_hand().tail_ids.tolist() == [1, 9, 4]


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
