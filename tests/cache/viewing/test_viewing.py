"""A sample is a part of the whole, the grid shows what is on the disk, a page what is stored."""

import math
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from bench.support.small.caches import (
    fill_cache,
    make_cache,
    make_codec,
    make_identity,
    make_shard,
    write_folders,
)
from cache.checking.verify import verify_cache
from cache.errors import CacheCorrupt, CacheIncomplete
from cache.inspection import compute_cache_stats
from cache.layout import Arrays
from cache.rounding import ENTROPY_STEP, KNOWN_STEP, TOP_STEP
from cache.shards.names import locate_seal, name_shard
from cache.store import Cache, open_cache, open_unchecked
from cache.viewing.grid import MOST_CELLS, STATES, find_damaged_shards, read_grid
from cache.viewing.record_pages import SHOWN_ENTRIES, read_page
from cache.viewing.sample import ENTRY_BINS, choose_runs, sample_cache
from cache.viewing.texts import TokenTexts
from cache.writing.writer import open_writer

KEEP = (0, 5, 7)
SAMPLED = {"draws": 2, "always_keep": KEEP}
CODECS = {
    "threshold": make_codec("threshold", always_keep=KEEP),
    # Of version 0.2.0.
    "earlier": make_codec("threshold", clusters=0, fitted=0, **SAMPLED),
    "tempered": make_codec("tempered", **SAMPLED),
    **{name: make_codec(name) for name in ("topk", "dense", "hidden")},
}


def make_opened(root: Path, profile: str, sequences: int = 10) -> Cache:
    identity = make_identity(
        vocabulary_size=40,
        train_sequences=sequences - 3,
        codec=CODECS[profile],
    )
    return open_cache(make_cache(root, identity))


# ---- the sample


@pytest.mark.parametrize("profile", CODECS)
def test_a_small_cache_is_sampled_whole(tmp_path, profile):
    store = make_opened(tmp_path, profile)
    every = compute_cache_stats(store)
    found = sample_cache(store)
    assert (found.whole, found.records, found.sequences_read) == (True, every.positions, 10)
    assert (found.entropy, found.kept_mass) == (every.entropy, every.kept_mass)
    assert found.entry_counts == every.entries
    assert sum(found.entries.counts) == found.records and len(found.entries.counts) <= ENTRY_BINS
    assert found.entries.mean == pytest.approx(every.entries.mean)
    assert found.entries.edges[0] <= every.entries.p50 < found.entries.edges[-1]


@pytest.mark.long
@pytest.mark.parametrize("profile", CODECS)
def test_a_sample_counts_what_its_sequences_hold(tmp_path, profile):
    store = make_opened(tmp_path, profile, 100)
    runs = choose_runs(store, 3, 300)
    numbers = [number for run in runs for number in run]
    assert len(numbers) == len(set(numbers)) and 20 <= len(numbers) <= 40
    found = sample_cache(store, 3, 300)
    records = store.read(numbers)[1]
    assert (found.records, found.sequences_read, found.whole) == (len(records), len(numbers), False)
    entropies = records["entropy"] * ENTROPY_STEP
    assert found.entropy.mean == pytest.approx(entropies.mean())
    assert sum(found.kept_mass.counts) == sum(found.entries.counts) == len(records)
    assert sample_cache(store, 3, 300) == found
    assert sample_cache(store, 4, 300) != found


@pytest.mark.long
def test_each_sequence_has_the_same_chance(tmp_path):
    store = make_opened(tmp_path, "threshold", 61)
    times = Counter(
        number for seed in range(3000) for run in choose_runs(store, seed, 250) for number in run
    )
    counts = np.array([times[number] for number in range(61)])
    assert abs(counts / counts.mean() - 1).max() < 0.2


@pytest.mark.long
def test_a_sample_of_long_sequences_reads_few_of_them(tmp_path):
    store = make_opened(tmp_path, "threshold", 80)
    assert sum(map(len, choose_runs(store, 0, 20))) <= 3
    assert sum(map(len, choose_runs(store, 0, 0))) == 1
    assert len(choose_runs(store, 0, 10**4)) == 20  # all, a run for each shard
    assert len(choose_runs(store, 0, 14 * 8)) <= 2 * 8


def test_a_damaged_shard_outside_the_sample_does_not_matter(tmp_path):
    store = make_opened(tmp_path, "threshold", 40)
    read = {number // 4 for run in choose_runs(store, 0, 20) for number in run}
    lost, hit = next(number for number in range(10) if number not in read), min(read)
    (store.folder / locate_seal(name_shard(lost))).unlink()
    with pytest.raises(CacheCorrupt):
        open_cache(store.folder)
    opened = open_unchecked(store.folder)
    assert sample_cache(opened, 0, 20).records > 0
    (store.folder / locate_seal(name_shard(hit))).unlink()
    with pytest.raises(CacheCorrupt):
        sample_cache(open_unchecked(store.folder), 0, 20)


def test_columns_are_read_of_one_shard_only(tmp_path):
    store = make_opened(tmp_path, "threshold")
    for numbers in (range(3, 5), range(8, 11), range(2, 2), range(-1, 1)):
        with pytest.raises(IndexError):
            store.read_columns(numbers, ("entropy",))
    sequences, records = store.read([5])
    found = store.read_columns(range(5, 6), ("entropy", "tokens"), range(2, 6))
    assert found["entropy"].tolist() == records["entropy"][2:6].tolist()
    assert found["tokens"].tolist() == sequences.tokens.tolist()


# ---- the grid


def test_every_shard_of_a_sound_cache_is_sealed(tmp_path):
    folder = make_cache(tmp_path)
    found = read_grid(folder)
    assert (found.complete, found.shards, found.cells, found.measured) == (True, 3, "000", True)
    assert found.counts == {"sealed": 3, "missing": 0, "in_work": 0, "corrupt": 0}
    assert (found.shard_sequences, found.cell_shards) == (4, 1)


def test_damage_is_seen_by_names_by_sizes_and_by_a_verification(tmp_path):
    folder = make_cache(tmp_path, make_identity(train_sequences=17))
    (folder / locate_seal(name_shard(1))).unlink()
    with (folder / name_shard(2) / "entropy" / "c.0").open("ab") as file:
        file.write(b"x")
    path = folder / name_shard(3) / "entropy" / "c.0"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    assert read_grid(folder).corrupt == (1, 2)
    damaged = find_damaged_shards(verify_cache(folder))
    assert damaged >= {2, 3}
    found = read_grid(folder, damaged)
    assert (found.corrupt, found.cells) == ((1, 2, 3), "03330")
    assert found.counts["corrupt"] == 3


def test_the_shards_of_a_capture_are_sealed_in_work_or_missing(tmp_path):
    identity = make_identity(train_sequences=17)
    with open_writer(tmp_path, identity) as writer:
        write_folders(writer)
        writer.write_shard(0, *make_shard(identity, 0))
        writer.write_shard(2, *make_shard(identity, 2))
        writer.begin_shard(1)
        found = read_grid(writer.folder)
        assert (found.complete, found.captured, found.cells) == (False, True, "020")
        assert found.in_work == (1,)
        writer.clear_unfinished()
        assert read_grid(writer.folder, expected=5).cells == "01011"
        writer.begin_shard(1)
        writer.write_shard(1, *make_shard(identity, 1))
        writer.clear_unfinished()
        assert read_grid(writer.folder, expected=5).cells == "00011"
        writer.begin_shard(3)
        assert read_grid(writer.folder, expected=5).cells == "00021"
    left = read_grid(writer.folder, expected=5)
    assert (left.captured, left.cells) == (False, "00011"), "half a shard of a crash is not in work"
    with open_writer(tmp_path, identity) as writer:
        fill_cache(writer)
    assert read_grid(writer.folder).counts["sealed"] == 5
    (tmp_path / ("a" * 32)).mkdir()
    assert (read_grid(tmp_path / ("a" * 32)).shards, read_grid(tmp_path / ("a" * 32)).cells) == (
        0,
        "",
    )


def test_many_shards_are_grouped_into_cells(tmp_path):
    folder = tmp_path / ("b" * 32)
    for name in ("seals", "shards"):
        (folder / name).mkdir(parents=True)
    count = 2 * MOST_CELLS + 1
    for number in range(count):
        (folder / name_shard(number)).mkdir()
        (folder / locate_seal(name_shard(number))).touch()
    found = read_grid(folder, damaged={5, count - 1})
    assert (found.cell_shards, len(found.cells)) == (3, -(-count // 3))
    worst = str(STATES.index("corrupt"))
    assert [place for place, cell in enumerate(found.cells) if cell == worst] == [
        1,
        (count - 1) // 3,
    ]
    assert found.counts == {"sealed": count - 2, "missing": 0, "in_work": 0, "corrupt": 2}


# ---- texts


def make_map(tokens: list[str]) -> Arrays:
    texts = [token.encode() for token in tokens]
    return {
        "ids": np.arange(len(tokens), dtype=np.uint32) * 2,
        "lengths": np.array([len(text) for text in texts], np.uint32),
        "text": np.frombuffer(b"".join(texts), np.uint8),
    }


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [
        (["ĠtheĠ", "ĊĊ", "Ã©", "Ã", "<|e|>", "a▁"], [" the ", "\n\n", "é", "�", "<|e|>", "a▁"]),
        (["▁the", "▁▁", "<0x0A>", "é", "<s>"], [" the", "  ", "\n", "é", "<s>"]),
        (["the", "##s", "[CLS]"], ["the", "##s", "[CLS]"]),
    ],
)
def test_tokens_of_each_kind_of_tokenizer_become_text(tokens, expected):
    texts = TokenTexts(make_map(tokens))
    assert [texts.get_text(2 * number) for number in range(len(tokens))] == expected
    assert texts.get_text(1) == texts.get_text(99) == ""


# ---- pages of records


@pytest.mark.parametrize("profile", CODECS)
def test_a_page_shows_what_the_records_hold(tmp_path, profile):
    store = make_opened(tmp_path, profile)
    sequences, records = store.read([8])
    places = np.flatnonzero(sequences.target_mask[0]).tolist()
    texts = TokenTexts(store.token_map())
    page = read_page(store, texts, 8, 2, 3)
    assert (page.sequence, page.split, page.start, page.count) == (8, "validation", 2, len(places))
    assert [record.position for record in page.records] == places[2:5]
    tokens = sequences.tokens[0].tolist()
    assert [record.said_id for record in page.records] == [tokens[p + 1] for p in places[2:5]]
    for row, record in enumerate(page.records, 2):
        assert (record.token, record.said) == (
            f"token {tokens[record.position]}",
            f"token {record.said_id}",
        )
        assert record.entropy == records["entropy"][row] * ENTROPY_STEP
        assert record.said_probability == pytest.approx(
            math.exp(-KNOWN_STEP * records["known"][row, 0]), rel=1e-5
        )
        shown = [entry.probability for entry in record.head]
        assert shown == sorted(shown, reverse=True) and len(shown) <= SHOWN_ENTRIES
        ids = [entry.id for entry in record.head]
        assert len(ids) == len(set(ids))
        assert [entry.text for entry in record.head] == [f"token {each}" for each in ids]
        if profile in ("threshold", "earlier", "tempered"):
            known = {record.said_id, *KEEP}
            assert record.entries == len(known) + records["head_count"][row]
            assert known <= set(ids)
            assert record.tail_count == records["tail_count"][row] == len(record.tail_tokens)
            assert record.tail == pytest.approx(max(1 - sum(shown), 0), abs=1e-5)
        elif profile == "topk":
            assert ids == records["top_ids"][row].tolist()
            assert record.tail == pytest.approx(
                math.exp(-TOP_STEP * records["residual"][row]), rel=1e-5
            )
        elif profile == "dense":
            assert record.entries == 40 and ids[0] == records["logprobs"][row].argmax()
        else:
            assert (record.entries, record.head, record.tail) == (None, (), None)


def test_pages_cover_a_sequence_and_end_with_it(tmp_path):
    store = make_opened(tmp_path, "threshold")
    whole = read_page(store, None, 0, 0, 100)
    parts = [read_page(store, None, 0, start, 4) for start in range(0, whole.count, 4)]
    assert tuple(record for part in parts for record in part.records) == whole.records
    assert len(whole.records) == whole.count
    assert not whole.texts_known and {record.said for record in whole.records} == {""}
    beyond = read_page(store, None, 0, 100, 4)
    assert (beyond.records, beyond.start) == ((), whole.count)
    for number in (-1, 10):
        with pytest.raises(IndexError):
            read_page(store, None, number, 0, 4)


def test_the_text_of_a_page_is_that_of_its_sequence(tmp_path):
    store = make_opened(tmp_path, "topk")
    sequences = store.read([1])[0]
    page = read_page(store, TokenTexts(store.token_map()), 1, 0, 100)
    tokens = sequences.tokens[0, page.text_start :][: len(page.text)].tolist()
    assert list(page.text) == [f"token {token}" for token in tokens]
    starts = np.flatnonzero(sequences.document_start[0]).tolist()
    assert list(page.document_starts) == [place for place in starts if place < len(tokens)]


def test_a_cache_without_a_sequence_has_no_sample(tmp_path):
    identity = make_identity(train_sequences=0, validation_sequences=0)
    store = open_unchecked(make_cache(tmp_path, identity))
    with pytest.raises(CacheIncomplete, match="no sequence"):
        sample_cache(store)
