"""The tables of the dither: a hash that never changes, ranks, and a sealed folder of the cache."""

import json
import shutil
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from bench.support.small.caches import (
    PROVENANCE,
    fill_cache,
    make_cache,
    make_codec,
    make_identity,
    make_shard,
    make_tables,
    write_folders,
)
from cache.checking.verify import verify_cache
from cache.errors import CacheCorrupt, CacheIncomplete, CacheMismatch
from cache.manifest import DITHER_FORMAT_VERSION, Manifest, sign_json
from cache.store import open_cache
from cache.units.dither import (
    LEADING,
    RANKED,
    SLOTS,
    TABLE_ARRAYS,
    DitherTables,
    begin_tokens,
    choose_leading,
    hash_positions,
    hash_slots,
    hash_tokens,
    share_slots,
)
from cache.writing.writer import open_writer
from tests.support.caches import (
    EARLIER,
    IDENTITIES,
    IDENTITY,
    captured,
    content,
    equal,
    flip,
    picked,
)
from tests.support.formats.page_reader import mix

# ---- the hash

#: Seed, sequence and position; the start; the slots of candidates 1, 2 and 64,000 of 2^15; the
#: numbers of tokens 0, 1 and 70,000. These must not change: every record would name other tokens.
ANSWERS = [
    (
        (0, 0, 1),
        0x5692161D100B05E5,
        (22386, 10823, 29303),
        (281152425945831, 1946281903048140, 812245417211783),
    ),
    (
        (5, 0, 0),
        0xE7FF9472093D02B5,
        (11939, 17448, 1929),
        (1891873293162908, 1524036933848467, 1314763126270347),
    ),
    (
        (7, 3, 511),
        0x1503EFCAD46C751E,
        (18306, 6637, 28769),
        (2815843819229500, 2372749881344190, 4222294355651609),
    ),
    (
        (2**64 - 1, 2**40, 9),
        0x726D60DA54976275,
        (19115, 5592, 32515),
        (1526355871599189, 2547670002934082, 2249055130618446),
    ),
]


@pytest.mark.parametrize("kind", [np.array, torch.tensor])
@pytest.mark.parametrize("place,start,slots,tokens", ANSWERS)
def test_the_hash_never_changes(kind, place, start, slots, tokens):
    seed, sequence, position = place
    starts = hash_positions(seed, kind([sequence]), kind([position]))
    assert int(starts[0]) % 2**64 == start
    assert hash_slots(starts, kind([1, 2, 64_000]), 1 << 15).tolist() == list(slots)
    assert hash_tokens(begin_tokens(starts), kind([0, 1, 70_000])).tolist() == list(tokens)


def test_the_hash_is_splitmix64():
    """The first outputs of the generator of Steele, Lea and Flood with state 0, as published."""
    published = [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F, 0xF88BB8A8724C81EC]
    step = 0x9E3779B97F4A7C15
    assert [mix(number * step % 2**64) for number in range(1, 5)] == published
    whole = hash_slots(np.zeros(1, np.int64), np.arange(1, 5), 1 << 63)
    assert whole.tolist() == [number % 2**63 for number in published]


def test_candidates_are_spread_as_the_slots_are():
    starts = hash_positions(3, np.repeat(np.arange(50), 40), np.tile(np.arange(40), 50))
    slots = hash_slots(starts[:, None], np.arange(1, 65), 16)
    counts = np.bincount(slots.ravel(), minlength=16)
    expected = slots.size / 16
    assert np.abs(counts - expected).max() < 5 * np.sqrt(expected)
    # Neighbours in sequence, position and candidate are independent.
    for left, right in (
        (slots[:-40], slots[40:]),
        (slots[1:], slots[:-1]),
        (slots.T[1:], slots.T[:-1]),
    ):
        same = float((left == right).mean())
        assert abs(same - 1 / 16) < 5 * np.sqrt(1 / 16 / left.size)


# ---- the tables


def test_slots_are_shared_by_the_largest_remainders():
    # Of 8 slots 3.2, 2.4, 1.6 and 0.8: 3, 2, 1 and 0 whole ones, and the last two get one more.
    assert share_slots(np.array([4.0, 3.0, 2.0, 1.0]), 8).tolist() == [0, 0, 0, 1, 1, 2, 2, 3]
    # Of equals the smaller ids come first.
    assert share_slots(np.ones(3), 4).tolist() == [0, 0, 1, 2]
    rng = np.random.default_rng(0)
    prior_V = rng.exponential(size=5000) ** 2
    slots_Z = share_slots(prior_V)
    assert len(slots_Z) == SLOTS
    counts = np.bincount(slots_Z, minlength=5000)
    assert np.abs(counts - prior_V / prior_V.sum() * SLOTS).max() < 1


def test_a_large_vocabulary_has_more_slots():
    assert len(share_slots(np.ones(65_536))) == SLOTS
    slots_Z = share_slots(np.ones(65_537))
    assert len(slots_Z) == 4 * SLOTS and len(np.unique(slots_Z)) == 65_537


@pytest.mark.parametrize("vocabulary", [20, 300, 4_096, 4_097, 65_536, 65_537])
def test_ranks_and_names_are_inverse(vocabulary):
    tables = make_tables(vocabulary, 3)
    ranked = min(RANKED, vocabulary)
    assert choose_leading(vocabulary) == min(LEADING, vocabulary)
    assert tables.ranked_CR.shape == (3, ranked)
    rng = np.random.default_rng(0)
    ids_E = rng.integers(0, vocabulary, 5000)
    ids_E[:2] = 0, vocabulary - 1
    cluster_E = rng.integers(0, 3, 5000)
    rank_E = tables.find_ranks(cluster_E, ids_E)
    names_E = tables.name_ranks(cluster_E, rank_E)
    assert (names_E == ids_E).all()
    assert names_E.dtype == (np.uint16 if vocabulary <= 65_536 else np.uint32)
    ends = tables.name_ranks(np.zeros(3, int), ranked + np.array([-1, 0, vocabulary - 1]))
    assert ends.tolist() == [tables.ranked_CR[0, -1], tables.order_V[0], tables.order_V[-1]]
    # The leading tokens of a cluster have the first ranks, and no token has two.
    for cluster in range(3):
        every = tables.find_ranks(np.full(vocabulary, cluster), np.arange(vocabulary))
        assert len(np.unique(every)) == vocabulary and every.max() < ranked + vocabulary
        assert (every < ranked).sum() == ranked
        leading = tables.leading_CL[cluster]
        assert every[leading].tolist() == list(range(len(leading)))


def test_tokens_are_ranked_by_their_slots_and_then_by_their_classes(monkeypatch):
    monkeypatch.setattr("cache.units.dither.RANKED", 7)
    tables = DitherTables(
        # Of the second cluster only leading tokens have slots.
        slots_CZ=np.array([[1, 1, 1, 2, 4, 5, 5, 9], [0, 0, 0, 0, 0, 0, 3, 3]]),
        leading_CL=np.array([[8, 1], [0, 3]]),
        classes_V=np.array([0, 5, 1, 2, 2, 0, 2, 0, 7, 1], np.uint8),
        centres_CD=np.zeros((2, 1), np.float32),
    )
    by_class = [8, 1, 3, 4, 6, 2, 9, 0, 5, 7]
    assert tables.order_V.tolist() == by_class
    # Token 5 has two slots; 4, 2 and 9 have one each; 3 is the first of the others.
    assert tables.ranked_CR.tolist() == [[8, 1, 5, 4, 2, 9, 3], [0, 3, 8, 1, 4, 6, 2]]
    for cluster in range(2):
        every = tables.name_ranks(np.full(17, cluster), np.arange(17)).tolist()
        # From rank R on all tokens are counted, those with a lower rank too.
        assert every == [*tables.ranked_CR[cluster], *by_class]
        ranks = tables.find_ranks(np.full(10, cluster), np.arange(10)).tolist()
        assert ranks == [every.index(token) for token in range(10)]


@pytest.mark.parametrize("vocabulary", [300, 70_000])
def test_tables_and_arrays_are_inverse(vocabulary):
    tables = make_tables(vocabulary, 2)
    arrays = tables.to_arrays()
    assert tuple(arrays) == TABLE_ARRAYS
    wanted = np.uint16 if vocabulary == 300 else np.uint32
    types = [arrays[name].dtype for name in TABLE_ARRAYS]
    assert types == [wanted, wanted, np.uint8, np.uint16]
    again = DitherTables.from_arrays(arrays)
    for name in ("slots_CZ", "leading_CL", "classes_V", "centres_CD"):
        assert np.array_equal(getattr(again, name), getattr(tables, name)), name


def test_candidates_have_the_prior_of_their_cluster():
    tables = make_tables(40, 2)
    starts_E = hash_positions(0, np.arange(60_000), np.zeros(60_000, np.int64))
    for cluster in range(2):
        found = tables.name_candidates(np.full(60_000, cluster), starts_E, np.full(60_000, 7))
        prior_V = np.bincount(tables.slots_CZ[cluster], minlength=40) / SLOTS
        share_V = np.bincount(found, minlength=40) / 60_000
        assert np.abs(share_V - prior_V).max() < 5 * np.sqrt(0.25 / 60_000)


# ---- the folder


def turn(tables: DitherTables) -> DitherTables:
    """Return tables that give tokens other ranks."""
    return replace(tables, classes_V=tables.classes_V[::-1].copy())


@pytest.fixture
def copy(all_pristine, tmp_path) -> Path:
    folder = all_pristine["threshold"]
    return Path(shutil.copytree(folder, tmp_path / folder.name))


def test_only_caches_of_records_in_units_have_the_folder(all_pristine, tmp_path):
    folders = {**all_pristine, "earlier": make_cache(tmp_path, EARLIER)}
    for name, folder in folders.items():
        document = json.loads((folder / "manifest.json").read_bytes())
        assert ("dither" in document) == (folder / "dither").exists() == (name == "threshold")
        assert (document["version"] == DITHER_FORMAT_VERSION) == (name == "threshold")


def test_every_flipped_bit_of_the_tables_is_refused(copy):
    chunks = sorted((copy / "dither").glob("*/c.*"))
    assert len(chunks) == 4
    bits = Counter()
    for path in chunks:
        size = 8 * path.stat().st_size
        for bit in {*range(0, size, max(size // 40, 1)), 3, size - 1}:
            flip(path, bit)
            with pytest.raises(CacheCorrupt, match=f"dither.*{path.parent.name}"):
                open_cache(copy).read([0])
            if bit in (3, size - 1):
                assert any(f"dither/{path.parent.name}" in line for line in verify_cache(copy))
            flip(path, bit)
            bits[path.parent.name] += 1
    assert min(bits.values()) >= 20
    assert verify_cache(copy) == []
    assert equal(open_cache(copy).read(range(10)), captured(IDENTITIES["threshold"]))


def test_a_cache_whose_manifest_names_other_tables_is_refused(copy, tmp_path):
    identity = IDENTITIES["threshold"]
    other = turn(make_tables(300, 2))
    with open_writer(tmp_path / "other", identity) as writer:
        writer.write_tables(other)
        fill_cache(writer)
    # The tables and their seal are sound, but they are not those of the manifest.
    for name in ("dither", "seals/dither.json"):
        place = copy / name
        shutil.rmtree(place) if place.is_dir() else place.unlink()
        source = writer.folder / name
        (shutil.copytree if source.is_dir() else shutil.copy)(source, place)
    with pytest.raises(CacheCorrupt, match=r"dither"):
        open_cache(copy).read([0])
    assert any("dither" in line for line in verify_cache(copy))


def test_tables_that_are_lost_are_named(copy):
    shutil.rmtree(copy / "dither")
    with pytest.raises((CacheCorrupt, CacheIncomplete), match="dither"):
        open_cache(copy).read([0])
    assert any("dither" in line for line in verify_cache(copy))


def test_a_cache_is_not_complete_without_its_tables(tmp_path):
    with open_writer(tmp_path, EARLIER) as writer:
        fill_cache(writer)
    assert writer.folder.exists()
    with open_writer(tmp_path, IDENTITY) as writer:
        fill_cache(writer)
        (writer.folder / "seals/dither.json").unlink()
        with pytest.raises(CacheIncomplete, match="tables of the dither are not sealed"):
            writer.finish(PROVENANCE)


def test_a_capture_that_goes_on_keeps_the_sealed_tables(tmp_path):
    tables = make_tables(300, 2)
    with open_writer(tmp_path, IDENTITY) as writer:
        assert writer.read_tables() is None
        writer.write_tables(tables)
        writer.write_shard(0, *make_shard(IDENTITY, 0))
    with open_writer(tmp_path, IDENTITY) as writer:
        before = content(writer.folder)
        found = writer.write_tables(turn(tables))
        for name, array in tables.to_arrays().items():
            assert np.array_equal(found.to_arrays()[name], array), name
        assert content(writer.folder) == before
        assert list(writer.find_missing_shards()) == [1, 2]
        fill_cache(writer)
    assert equal(open_cache(writer.folder).read(range(10)), captured(IDENTITY))


@pytest.mark.parametrize("first", ["find shards", "write tables"])
@pytest.mark.parametrize("damage", ["array", "seal", "lost seal"])
def test_shards_go_with_damaged_tables(tmp_path, first, damage):
    """No other tables name their tokens: they are captured again."""
    with open_writer(tmp_path, IDENTITY) as writer:
        write_folders(writer)
        writer.write_shard(0, *make_shard(IDENTITY, 0))
    if damage == "lost seal":
        (writer.folder / "seals/dither.json").unlink()
    else:
        damaged = "dither/classes/c.0" if damage == "array" else "seals/dither.json"
        flip(writer.folder / damaged, 99)
    others = turn(make_tables(300, 2))
    with open_writer(tmp_path, IDENTITY) as writer:
        assert writer.read_tables() is None
        if first == "find shards":
            assert list(writer.find_missing_shards()) == [0, 1, 2]
        sealed = writer.write_tables(others)
        assert (sealed.classes_V == others.classes_V).all()
        assert list(writer.find_missing_shards()) == [0, 1, 2]
        fill_cache(writer)
    assert verify_cache(writer.folder) == []
    assert equal(open_cache(writer.folder).read(range(10)), captured(IDENTITY))


# ---- other versions


@pytest.mark.parametrize("kept", [(), (5, 7)])
def test_records_of_version_020_are_read_and_decoded(tmp_path, kept):
    codec = make_codec("threshold", clusters=0, fitted=0, draws=2, always_keep=kept)
    identity = make_identity(codec=codec)
    store = open_cache(make_cache(tmp_path, identity))
    assert not store.codec.rules.dithered and store.manifest.dither.digest == ""
    for draw in range(2):
        assert equal(store.read(range(10), draw), captured(identity, draw))
    sequences, records = make_shard(identity, 1)
    assert {"head_logprobs", "tail_ids"} <= set(records.columns)
    assert "cluster" not in records.columns
    assert equal(store.read(range(4, 8)), (sequences, picked(records, 0)))


def test_a_program_of_version_020_calls_these_caches_newer(copy, monkeypatch):
    monkeypatch.setattr("cache.manifest.FORMAT_VERSION", 7)
    with pytest.raises(CacheMismatch, match="format version 8 is newer than 7") as refusal:
        open_cache(copy)
    assert "Upgrade" in refusal.value.remedy
    newer = sign_json({"format": "potstill-cache", "version": 10})
    monkeypatch.undo()
    with pytest.raises(CacheMismatch, match="format version 10 is newer than 9"):
        Manifest.from_bytes(newer, "manifest.json")
