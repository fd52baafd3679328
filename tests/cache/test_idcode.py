"""Ids in few bits: every set of ids comes back, for all gaps, and the code does not change."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cache.idcode import (
    PackedIds,
    compute_frequency_classes,
    order_tokens,
    pack_ranks,
    sort_by_rank,
    sort_ranks,
    unpack_ranks,
)
from cache.records import compute_offsets

SIZES = [2, 16, 300, 65_536, 65_537, 262_144]


def make_sets(
    seed: int, vocabulary_size: int, positions: int, largest: int
) -> tuple[np.ndarray, np.ndarray]:
    """Make ascending distinct ranks of each record, and their counts: dense, sparse and empty."""
    rng = np.random.default_rng(seed)
    counts = rng.integers(0, min(largest, vocabulary_size) + 1, positions)
    spans = np.maximum(counts, (vocabulary_size * rng.random(positions) ** 4).astype(int))
    sets = [
        np.sort(rng.choice(span, count, replace=False))
        for span, count in zip(spans, counts, strict=True)
    ]
    return np.concatenate([np.empty(0, int), *sets]), counts


def read(
    packed: PackedIds,
    counts: np.ndarray,
    entries: np.ndarray,
    positions: np.ndarray,
    chosen: list[int] | None = None,
) -> np.ndarray:
    """Decode the ranks of ``chosen`` sequences (by default of all), cut out as from a shard."""
    chosen = list(range(len(entries) - 1)) if chosen is None else chosen

    def cut(values: np.ndarray, cuts: np.ndarray) -> list[np.ndarray]:
        return [values[:0], *(values[cuts[s] : cuts[s + 1]] for s in chosen)]

    symbols = cut(packed.symbols, entries)
    ends = np.cumsum([len(part) for part in symbols])
    bits = cut(packed.bits, packed.starts)
    records = cut(counts, positions)
    return unpack_ranks(
        np.concatenate(symbols), np.concatenate(bits), np.concatenate(records), ends
    )


@settings(deadline=None, max_examples=150)
@given(
    seed=st.integers(0, 10**9),
    vocabulary_size=st.sampled_from(SIZES),
    positions=st.integers(0, 20),
    largest=st.sampled_from([0, 1, 3, 40, 255]),
    cuts=st.lists(st.integers(0, 20), max_size=3),
    data=st.data(),
)
def test_every_set_of_ranks_comes_back_from_any_sequences_in_any_order(
    seed, vocabulary_size, positions, largest, cuts, data
):
    ranks, counts = make_sets(seed, vocabulary_size, positions, largest)
    ends = np.array([0, *sorted(min(cut, positions) for cut in cuts), positions])
    entries = compute_offsets(counts)[ends]
    packed = pack_ranks(ranks, counts, entries)
    assert read(packed, counts, entries, ends).tolist() == ranks.tolist()
    chosen = data.draw(st.lists(st.integers(0, len(entries) - 2), max_size=4))
    expected = np.concatenate([ranks[:0], *(ranks[entries[s] : entries[s + 1]] for s in chosen)])
    assert read(packed, counts, entries, ends, chosen).tolist() == expected.tolist()
    assert packed.symbols.dtype == packed.bits.dtype == np.uint8
    assert packed.starts[-1] == len(packed.bits)


@pytest.mark.parametrize("vocabulary_size", SIZES)
def test_every_gap_has_a_code(vocabulary_size):
    """With one id for each record, the rank is the gap.

    Small vocabularies are tested in full, large ones at and beside every power of two.
    """
    powers = [1 << bit for bit in range(18)]
    around = {near for power in powers for near in (power - 1, power, power + 1)} | {
        vocabulary_size - 1
    }
    ranks = np.array(
        sorted(set(range(min(vocabulary_size, 5000))) | {r for r in around if r < vocabulary_size})
    )
    counts = np.ones(len(ranks), int)
    ends = np.array([0, len(ranks)])
    packed = pack_ranks(ranks, counts, ends)
    assert read(packed, counts, ends, ends).tolist() == ranks.tolist()
    small = ranks < 16
    assert packed.symbols[small].tolist() == ranks[small].tolist()


def test_the_code_by_hand():
    """Gaps 3 | 20, 980: 20 = (8 + 2) 2 + 0 and 980 = (8 + 7) 2^6 + 20.

    Bits lie lowest first: 0, then 010100.
    """
    packed = pack_ranks(np.array([3, 20, 1000]), np.array([1, 2]), np.array([0, 3]))
    assert packed.symbols.tolist() == [3, 8 * 2 + 2, 8 * 7 + 7]
    assert packed.bits.tolist() == [20 << 1]
    assert packed.starts.tolist() == [0, 1]


def test_frequent_tokens_come_first_and_equals_by_id():
    ids = [np.array([9, 9, 9, 9, 2, 5, 5]), np.array([5, 5, 7])]
    classes = compute_frequency_classes(ids, 11)
    assert classes.tolist() == [0, 0, 1, 0, 0, 3, 0, 1, 0, 3, 0]
    assert order_tokens(classes).tolist() == [5, 9, 2, 7, 0, 1, 3, 4, 6, 8, 10]
    assert compute_frequency_classes([], 3).tolist() == [0, 0, 0]


@settings(deadline=None, max_examples=40)
@given(seed=st.integers(0, 10**6), vocabulary_size=st.sampled_from([3, 300, 262_144]))
def test_an_order_holds_every_token_once_and_sorts_every_record(seed, vocabulary_size):
    rng = np.random.default_rng(seed)
    counts = rng.integers(0, 4, 50)
    ids = rng.integers(0, vocabulary_size, counts.sum())
    order = order_tokens(compute_frequency_classes([ids], vocabulary_size))
    assert np.array_equal(np.sort(order), np.arange(vocabulary_size))
    rank = np.empty(vocabulary_size, int)
    rank[order] = np.arange(vocabulary_size)
    places = sort_by_rank(rank, ids, counts)
    rows = np.repeat(np.arange(50), counts)
    assert (rows[places] == rows).all()
    assert (np.diff(rank[ids][places])[np.diff(rows) == 0] >= 0).all()
    assert np.array_equal(sort_ranks(rank[ids], counts), rank[ids[places]])


def test_a_frequent_order_takes_fewer_bits():
    """The purpose of the token table: the same sets need fewer bits than in the order of ids."""
    rng = np.random.default_rng(0)
    p = 1 / np.arange(1, 50_001)
    names = rng.permutation(50_000)
    sets = [names[np.unique(rng.choice(50_000, 8, p=p / p.sum()))] for _ in range(2000)]
    counts = np.array([len(each) for each in sets])
    ids = np.concatenate(sets)
    sizes = []
    for rank in (
        np.arange(50_000),
        np.argsort(order_tokens(compute_frequency_classes([ids], 50_000))),
    ):
        packed = pack_ranks(
            rank[ids[sort_by_rank(rank, ids, counts)]], counts, np.array([0, len(ids)])
        )
        freq = np.bincount(packed.symbols) / len(ids)
        sizes.append(
            -(freq[freq > 0] * np.log2(freq[freq > 0])).sum() + 8 * len(packed.bits) / len(ids)
        )
    assert sizes[1] < 0.85 * sizes[0]
