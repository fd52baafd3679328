"""Records in units as arrays of a shard: what is stored is what is read, in a part of the space."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.support.small.caches import make_codec, make_identity, make_sequences, make_tables
from bench.support.small.caches import make_records as draw_records
from cache.codec import Codec
from cache.layout import encode_arrays, list_arrays
from cache.profiles.threshold import (
    WHOLE,
    UnitSample,
    count_rest,
    count_units,
    find_counted,
    list_known_masses,
)
from cache.records import Records, Sequences, compute_offsets
from cache.rounding import KNOWN_STEP, UNKNOWN, RecordPositions
from cache.units.dither import DitherTables
from cache.units.layout import decode_units
from tests.support.caches import equal


def codec_of(vocabulary: int = 300, **options) -> Codec:
    return make_identity(vocabulary, codec=make_codec(**options)).record_codec()


def find_tables(codec: Codec) -> DitherTables:
    """Return the tables as they are read from a cache."""
    made = make_tables(codec.vocabulary_size, codec.clusters)
    return DitherTables.from_arrays(made.to_arrays())


def make_records(sequences: Sequences, codec: Codec, first: int = 0) -> Records:
    """Draw the records of sequences that have the numbers ``first``, ``first`` + 1, ..."""
    rows, position_N = np.nonzero(sequences.target_mask)
    places = RecordPositions(rows + first, position_N)
    return draw_records(1, len(rows), codec, sequences.find_gold_ids(), places)


def encode(sequences: Sequences, records: Records, codec: Codec) -> dict[str, np.ndarray]:
    positions = compute_offsets(sequences.target_mask.sum(axis=1))
    tables = find_tables(codec)
    return encode_arrays(records, positions, codec, tables)


def cut(sequences: Sequences, arrays: dict[str, np.ndarray], codec: Codec) -> list:
    """Cut the arrays into those of each sequence, as a shard is read."""
    offsets = arrays["offsets"]
    parts = []
    for row in range(len(sequences)):
        part = {
            name: arrays[stored][offsets[row, column] : offsets[row + 1, column]]
            for name, (stored, column) in list_arrays(codec, 0).items()
        }
        own = {name: each[row : row + 1] for name, each in vars(sequences).items()}
        parts.append(part | own)
    return parts


def decode(parts: list, numbers: list[int], codec: Codec) -> tuple[Sequences, Records]:
    tables = find_tables(codec)
    found = decode_units(parts, np.array(numbers), codec, tables)
    tokens, starts, targets = (
        found.pop(name) for name in ("tokens", "document_start", "target_mask")
    )
    return Sequences(tokens, starts, targets), Records(found)


@settings(deadline=None, max_examples=25)
@given(
    seed=st.integers(0, 10**6),
    vocabulary=st.sampled_from([20, 300, 65_536, 65_537]),
    threshold=st.sampled_from([0.004, 0.04, 0.3]),
    clusters=st.sampled_from([1, 3]),
    first=st.sampled_from([0, 10**9]),
    keep=st.sampled_from([(), (0, 5, 7)]),
)
def test_what_is_stored_is_what_is_read(seed, vocabulary, threshold, clusters, first, keep):
    options = {"threshold": threshold, "clusters": clusters, "always_keep": keep}
    codec = codec_of(vocabulary, seed=seed, **options)
    sequences = make_sequences(seed, 3, 8, vocabulary)
    records = make_records(sequences, codec, first)
    arrays = encode(sequences, records, codec)
    parts = cut(sequences, arrays, codec)
    assert equal(decode(parts, [first, first + 1, first + 2], codec), (sequences, records))
    # Each sequence is read by itself too, in any order.
    ends = compute_offsets(sequences.target_mask.sum(axis=1))
    for row in (2, 0):
        own = records.slice(ends[row], ends[row + 1])
        assert equal(decode([parts[row]], [first + row], codec), (sequences.select([row]), own))


def make_by_hand(sequences: Sequences, codec: Codec, known: list[int], tails: list) -> Records:
    """Make records without heads, of clusters 0 and 1 in turn, with tails of (id, candidate)."""
    pairs = [pair for tail in tails for pair in tail]
    count = len(known)
    ids = np.uint16 if codec.vocabulary_size <= 65_536 else np.uint32
    return Records(
        {
            "known": np.array(known, np.uint16)[:, None],
            "entropy": np.zeros(count, np.uint8),
            "cluster": np.arange(count, dtype=np.uint8) % 2,
            "head_count": np.zeros(count, np.uint8),
            "head_ids": np.zeros(0, ids),
            "head_units": np.zeros(0, np.uint16),
            "tail_count": np.array([len(tail) for tail in tails], np.uint8),
            "tail_ids": np.array([pair[0] for pair in pairs], ids),
            "tail_k": np.array([pair[1] for pair in pairs], np.uint16),
        }
    )


def test_records_without_heads_without_tails_and_with_all_of_the_mass():
    codec = codec_of(threshold=0.25)
    tokens = np.array([[5, 6, 8, 9]], np.uint32)
    starts = np.array([[True, False, False, False]])
    sequences = Sequences(tokens, starts, np.array([[True, True, True, False]]))
    # exp(-178 / 256) is just below a half: two units and a bit, and so three.
    known = [178, 0, 65_528]
    tails = [[(3, 0), (0, 0), (299, 0)], [], [(1, 0), (2, 0), (3, 0), (4, 0)]]
    records = make_by_hand(sequences, codec, known, tails)
    arrays = encode(sequences, records, codec)
    assert arrays["offsets"].tolist() == [[0] * 7, [3, 0, 0, 7, 0, 0, len(arrays["other_bits"])]]
    assert arrays["other_count"].tolist() == [3, 0, 4]
    for name in ("head_units", "head_symbols", "head_bits", "gap_symbols", "gap_bits"):
        assert len(arrays[name]) == 0, name
    assert equal(decode(cut(sequences, arrays, codec), [0], codec), (sequences, records))


def test_a_sequence_without_a_position_has_no_entries():
    codec = codec_of()
    sequences = make_sequences(2, 3, 12, 300)
    sequences.target_mask[1] = False
    records = make_records(sequences, codec)
    arrays = encode(sequences, records, codec)
    assert (arrays["offsets"][1] == arrays["offsets"][2]).all()
    assert equal(decode(cut(sequences, arrays, codec), [0, 1, 2], codec), (sequences, records))
    nothing = sequences.select([1])
    empty = records.slice(0, 0)
    arrays = encode(nothing, empty, codec)
    assert arrays["offsets"].tolist() == [[0] * 7] * 2
    assert equal(decode(cut(nothing, arrays, codec), [0], codec), (nothing, empty))


def test_offsets_name_the_end_of_every_array():
    codec = codec_of(threshold=0.02)
    sequences = make_sequences(3, 4, 16, 300)
    records = make_records(sequences, codec)
    arrays = encode(sequences, records, codec)
    ends = arrays["offsets"][-1]
    names = {name: column for name, (_, column) in list_arrays(codec, 0).items()}
    assert set(names) == set(arrays) - {"offsets"}
    for name, column in names.items():
        assert len(arrays[name]) == ends[column], name
    assert sorted(set(names.values())) == list(range(7))
    entries = records.length("tail")
    assert ends[2] + ends[3] == entries and ends[1] == records.length("head")
    assert (np.diff(arrays["offsets"].astype(np.int64), axis=0) >= 0).all()


def test_the_order_within_a_record_has_no_meaning():
    codec = codec_of(threshold=0.02)
    sequences = make_sequences(3, 2, 16, 300)
    records = make_records(sequences, codec)
    columns = dict(records.columns)
    rng = np.random.default_rng(0)
    for axis in ("head", "tail"):
        rows = np.repeat(np.arange(len(records)), records[f"{axis}_count"])
        order = np.lexsort((rng.random(len(rows)), rows))
        assert (order != np.arange(len(rows))).any()
        names = [name for name in columns if name.startswith(axis) and not name.endswith("count")]
        columns |= {name: columns[name][order] for name in names}
    ours, theirs = (encode(sequences, each, codec) for each in (records, Records(columns)))
    for name, array in ours.items():
        assert np.array_equal(array, theirs[name]), name


@pytest.mark.parametrize("change", ["seed", "number", "position"])
def test_candidates_belong_to_their_position(change):
    """The tokens follow from seed, sequence and position, so other ones name other tokens."""
    codec = codec_of(threshold=0.02)
    sequences = make_sequences(3, 1, 16, 300)
    sequences.target_mask[:, 13:] = False
    parts = cut(sequences, encode(sequences, make_records(sequences, codec), codec), codec)
    right = decode(parts, [0], codec)[1]
    came = right["tail_k"] > 0
    assert came.sum() > 20
    if change == "position":
        mask = np.roll(parts[0]["target_mask"], 1, axis=1)
        # The next tokens decide nothing here: no id is always kept.
        moved = [
            {**parts[0], "target_mask": mask, "tokens": np.roll(parts[0]["tokens"], 1, axis=1)}
        ]
        wrong = decode_units(moved, np.array([0]), codec, find_tables(codec))
    elif change == "number":
        wrong = decode(parts, [1], codec)[1]
    else:
        wrong = decode(parts, [0], replace(codec, seed=1))[1]
    assert np.array_equal(wrong["tail_k"], right["tail_k"])
    assert np.array_equal(wrong["tail_ids"][~came], right["tail_ids"][~came])
    assert (wrong["tail_ids"][came] != right["tail_ids"][came]).mean() > 0.5


# ---- units


def test_masses_and_units_are_counted_in_integers():
    masses = list_known_masses()
    assert (masses[0], masses[UNKNOWN]) == (WHOLE, 0)
    # Known answers: reader and writer must agree on every bit, today and later.
    assert masses[[1, 8, 178, 256, 512, 8192]].tolist() == [
        1_095_225_038_176,
        1_065_683_211_334,
        548_566_704_802,
        404_487_723_188,
        148_802_717_567,
        0,
    ]
    assert (np.diff(masses) <= 0).all()
    for mass, threshold, expected in [
        # A unit is at most the threshold, whose 25 parts are a bit less than the whole.
        (0, 0.04, 26),
        (0, 0.25, 4),
        (WHOLE, 0.04, 0),
        (WHOLE - 1, 0.04, 1),
        (WHOLE + 7, 0.04, 0),
        (WHOLE - round(0.04 * WHOLE), 0.04, 1),
        (WHOLE - round(0.04 * WHOLE) - 1, 0.04, 2),
        (0, 0.001, 1000),
    ]:
        rest, units = count_units(np.array([mass]), threshold)
        assert (rest.tolist(), units.tolist()) == ([WHOLE - mass], [expected]), (mass, threshold)


@pytest.mark.parametrize(
    "threshold,units",
    [
        (0.25, 4),
        (0.003921569, 255),
        # 2^40 / 255 is a little more than a whole number.
        (1 / 255 + 2e-13, 256),
        (1 / 255, 256),
        (1 / 256, 256),
        (0.001, 1000),
    ],
)
def test_counts_hold_all_units_of_a_record_whose_known_token_has_no_mass(threshold, units):
    codec = codec_of(1200, threshold=threshold)
    none = np.zeros(0, np.int64)
    reading = UnitSample(
        known_logprobs=np.array([[-65_528 * KNOWN_STEP]]),
        entropy=np.zeros(1),
        cluster=np.zeros(1, np.int64),
        head_count=np.zeros(1, np.int64),
        head_ids=none,
        head_units=none,
        tail_count=np.array([units]),
        tail_ids=np.arange(units) + 100,
        tail_k=np.zeros(units, np.int64),
    )
    sequences = Sequences(np.array([[5, 6]], np.uint32), *np.array([[[1, 0]]] * 2, bool))
    records = codec.encode(reading, RecordPositions(np.zeros(1, np.int64), np.zeros(1, np.int64)))
    assert records["known"].tolist() == [[65_528]]
    assert records["tail_count"].tolist() == [units]
    counts = np.dtype(np.uint8 if units < 256 else np.uint16)
    arrays = encode(sequences, records, codec)
    assert arrays["head_count"].dtype == arrays["other_count"].dtype == counts
    assert equal(decode(cut(sequences, arrays, codec), [0], codec), (sequences, records))


@pytest.mark.parametrize("threshold,counts", [(1 / 255, np.uint8), (0.0039, np.uint16)])
def test_counts_of_entries_have_the_types_of_version_020(threshold, counts):
    for codec in (
        codec_of(threshold=threshold, clusters=0, fitted=0),
        make_identity(codec=make_codec("tempered", threshold=threshold)).record_codec(),
    ):
        schema = codec.schema()
        assert schema["head_count"][0] == schema["tail_count"][0] == counts


@pytest.mark.parametrize("threshold", [0.01, 0.04, 0.125, 0.5])
def test_the_units_of_every_record_are_those_that_its_known_tokens_leave(threshold):
    codec = codec_of(40, threshold=threshold, always_keep=(0, 5))
    sequences = make_sequences(4, 4, 16, 40)
    gold_N = sequences.find_gold_ids()
    assert np.isin(gold_N, (0, 5)).any()
    records = make_records(sequences, codec)
    counted_NK = find_counted(codec, records["known"], gold_N)
    assert (counted_NK.sum(1) < 3).sum() == np.isin(gold_N, (0, 5)).sum()
    rest_N, units_N = count_rest(codec, records["known"], counted_NK)
    rows_H = np.repeat(np.arange(len(records)), records["head_count"])
    heads_N = np.bincount(rows_H, records["head_units"] // 2, len(records))
    assert (heads_N + records["tail_count"] == units_N).all()
    assert (rest_N / units_N <= threshold * WHOLE * (1 + 1e-9)).all()
    assert (records["known"] % 8 == 0).all()
    # No token is there twice, and no known one.
    ends = [compute_offsets(records[f"{part}_count"]) for part in ("head", "tail")]
    for row, gold in enumerate(gold_N.tolist()):
        ids = [gold, 0, 5]
        for part, cuts in zip(("head", "tail"), ends, strict=True):
            ids += records[f"{part}_ids"][cuts[row] : cuts[row + 1]].tolist()
        assert len(set(ids)) == len(ids) - (gold in (0, 5))
