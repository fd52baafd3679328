"""Packing: nothing is lost, nothing crosses a boundary."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kd.errors import DataError
from kd.text.packing import (
    Document,
    compute_position_ids,
    measure_text_lengths,
    pack_documents,
    pack_in_blocks,
)
from tests.support.kd.text import config, cut

some_documents = st.lists(
    st.lists(st.integers(1, 2**31), min_size=2, max_size=30), min_size=1, max_size=12
)


def packed_lists(lists: list[list[int]], length: int, packing: bool):
    documents = [Document(np.asarray(ids, np.uint32)) for ids in lists]
    return pack_documents(documents, config(sequence_length=length, packing=packing), pad_id=0)


def pieces(sequences) -> list[list[int]]:
    """List every document or piece of one in order, padding included."""
    bounds = [*np.flatnonzero(sequences.document_start.reshape(-1)).tolist(), sequences.tokens.size]
    flat = sequences.tokens.reshape(-1).tolist()
    return [flat[start:stop] for start, stop in itertools.pairwise(bounds)]


@settings(max_examples=150, deadline=None)
@given(lists=some_documents, length=st.integers(8, 20))
def test_packing_loses_nothing_and_cuts_only_at_boundaries(lists, length):
    total = sum(map(len, lists))
    if total < length:
        with pytest.raises(DataError, match="fewer than one sequence"):
            packed_lists(lists, length, True)
        return
    sequences = packed_lists(lists, length, True)
    expected = []
    offset = 0
    for ids in lists:
        expected += cut(ids, offset, length)
        offset += len(ids)
    padding = -total % length
    assert pieces(sequences) == expected + [[0] * padding] * bool(padding)
    assert sequences.tokens.shape == (-(-total // length), length)


@settings(max_examples=150, deadline=None)
@given(lists=some_documents, length=st.integers(8, 20))
def test_without_packing_each_document_begins_a_sequence(lists, length):
    sequences = packed_lists(lists, length, False)
    expected = []
    for ids in lists:
        expected += cut(ids, 0, length)
        expected += [[0] * (-len(ids) % length)] * bool(-len(ids) % length)
    assert pieces(sequences) == expected
    assert len(sequences) == sum(-(-len(ids) // length) for ids in lists)


@settings(max_examples=150, deadline=None)
@given(lists=some_documents, length=st.integers(8, 20), packing=st.booleans())
def test_a_target_stands_exactly_where_the_next_token_is_in_the_same_piece_of_text(
    lists, length, packing
):
    if packing and sum(map(len, lists)) < length:
        return
    sequences = packed_lists(lists, length, packing)
    for row in range(len(sequences)):
        for t in range(length):
            inside = t + 1 < length and not sequences.document_start[row, t + 1]
            is_text = sequences.tokens[row, t] != 0  # ids begin at 1: 0 is padding only
            assert sequences.target_mask[row, t] == (inside and is_text)
    gold = sequences.find_gold_ids()
    assert (gold != 0).all()
    texts = [piece for piece in pieces(sequences) if piece[0] != 0]
    assert gold.tolist() == [token for piece in texts for token in piece[1:]]


@pytest.mark.long
@settings(max_examples=150, deadline=None)
@given(
    talks=st.lists(
        st.lists(st.tuples(st.integers(1, 2**31), st.booleans()), min_size=2, max_size=30),
        min_size=1,
        max_size=12,
    ),
    length=st.integers(8, 20),
    packing=st.booleans(),
)
def test_a_masked_document_has_targets_where_the_next_token_is_trained(talks, length, packing):
    """Sequences without any target are dropped."""
    if packing and sum(map(len, talks)) < length:
        return
    expected = {}  # by number of the sequence: (tokens, tokens to be predicted)
    offset = 0
    for talk in talks:
        for part in cut(talk, offset, length):
            tokens, gold = expected.setdefault(offset // length, ([], []))
            tokens += [token for token, _ in part]
            gold += [token for token, trained in part[1:] if trained]
            offset += len(part)
        offset += 0 if packing else -offset % length
    kept = [each for each in expected.values() if each[1]]
    documents = [Document(*map(np.asarray, zip(*talk, strict=True))) for talk in talks]
    documents = [Document(each.ids.astype(np.uint32), each.trained) for each in documents]
    if not kept:
        with pytest.raises(DataError, match="nothing predicts it"):
            pack_documents(documents, config(sequence_length=length, packing=packing))
        return
    sequences = pack_documents(documents, config(sequence_length=length, packing=packing))
    assert len(sequences) == len(kept)
    for row, (tokens, gold) in enumerate(kept):
        assert sequences.tokens[row].tolist() == tokens + [0] * (length - len(tokens))
        assert sequences.select([row]).find_gold_ids().tolist() == gold


@settings(max_examples=100, deadline=None)
@given(lists=some_documents, length=st.integers(8, 20), packing=st.booleans())
def test_positions_count_from_the_start_of_each_piece(lists, length, packing):
    if packing and sum(map(len, lists)) < length:
        return
    sequences = packed_lists(lists, length, packing)
    positions = compute_position_ids(sequences.document_start).reshape(-1).tolist()
    assert positions == [place for piece in pieces(sequences) for place in range(len(piece))]


@pytest.mark.long
@settings(max_examples=100, deadline=None)
@given(
    talks=st.lists(
        st.lists(st.tuples(st.integers(1, 2**31), st.booleans()), min_size=2, max_size=40),
        min_size=1,
        max_size=12,
    ),
    masked=st.booleans(),
    length=st.integers(8, 12),
    packing=st.booleans(),
    block=st.integers(1, 3),
)
def test_blocks_hold_what_is_packed_at_once(talks, masked, length, packing, block):
    columns = [map(np.asarray, zip(*talk, strict=True)) for talk in talks]
    documents = [
        Document(ids.astype(np.uint32), trained if masked else None) for ids, trained in columns
    ]
    options = config(sequence_length=length, packing=packing)
    found = []
    for size in (block, 1000):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("kd.text.packing.BLOCK_SEQUENCES", size)
            try:
                blocks = [block.sequences for block in pack_in_blocks(documents, options)]
            except DataError as error:
                found.append(str(error))
                continue
        joined = type(blocks[0]).concatenate(blocks)
        found.append([getattr(joined, name).tolist() for name in joined.__dataclass_fields__])
    assert found[0] == found[1]


def test_a_block_takes_no_more_documents_than_fill_it():
    read = itertools.count()
    endless = (Document(np.full(20, next(read) + 1, np.uint32)) for _ in itertools.repeat(0))
    blocks = pack_in_blocks(endless, config(sequence_length=10))
    for end in (32, 64, 96):  # 64 sequences of 10 tokens a block
        assert len(next(blocks).sequences) == 64
        assert next(read) - end in (0, 1, 2)  # each question counts too


@settings(max_examples=100, deadline=None)
@given(lists=some_documents, length=st.integers(8, 20))
def test_the_length_of_a_sequence_ends_with_the_last_token_that_is_predicted(lists, length):
    sequences = packed_lists(lists, length, False)
    expected = [len(part) if len(part) > 1 else 0 for ids in lists for part in cut(ids, 0, length)]
    assert measure_text_lengths(sequences).tolist() == expected
