"""Statistics equal a plain count of the records; a comparison finds all differences, no others."""

import json
import math
import shutil
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest

from bench.support.small.caches import (
    PROVENANCE,
    fill_cache,
    make_cache,
    make_codec,
    make_identity,
    make_records,
    make_shard,
    read_units,
    write_folders,
)
from cache.disk import list_file_sizes
from cache.errors import CacheCorrupt
from cache.inspection import compare_caches, compute_cache_stats, find_same_records
from cache.manifest import CacheIdentity
from cache.profiles.sampled import Sample
from cache.profiles.threshold import count_rest, find_counted
from cache.reading.arrays import ArrayFolder
from cache.records import Records, find_axis
from cache.rounding import (
    ENTROPY_STEP,
    KNOWN_STEP,
    TOP_STEP,
    UNKNOWN,
    UNKNOWN_ENTROPY,
    RecordPositions,
)
from cache.store import Cache, open_cache
from cache.writing.writer import open_writer

KEEP = (0, 5, 7)
SAMPLED = {"draws": 2, "always_keep": KEEP}
#: Profile threshold of version 0.2.0.
EARLIER = make_codec("threshold", clusters=0, fitted=0, **SAMPLED)
CODECS = {
    "threshold": make_codec("threshold", always_keep=KEEP),
    "earlier": EARLIER,
    "tempered": make_codec("tempered", **SAMPLED),
    **{name: make_codec(name) for name in ("topk", "dense", "hidden")},
}


def make_altered(root: Path, identity: CacheIdentity, alter, provenance=PROVENANCE) -> Cache:
    """Make a cache of the usual content, whose records ``alter(index, records)`` changes."""
    with open_writer(root, identity) as writer:
        write_folders(writer)
        for index in range(identity.shard_count):
            sequences, records = make_shard(identity, index)
            writer.write_shard(index, sequences, alter(index, records))
        writer.finish(provenance)
    return open_cache(root / identity.fingerprint)


@pytest.fixture(scope="module")
def opened(tmp_path_factory) -> dict[str, Cache]:
    """A cache of each profile; the vocabulary is small, so some gold tokens are always_keep ids."""
    root = tmp_path_factory.mktemp("caches")
    return {
        name: open_cache(make_cache(root, make_identity(vocabulary_size=40, codec=codec)))
        for name, codec in CODECS.items()
    }


# ---- stats


def counted(store: Cache) -> tuple[list[float], list[int]]:
    """Count kept mass and entries of every record, one after the other."""
    sequences, records = store.read(range(len(store)))
    masses = []
    entries = []
    head = 0
    for row, gold in enumerate(sequences.find_gold_ids().tolist()):
        if store.codec.profile == "topk":
            codes = [code for code in records["top_logprobs"][row].tolist() if code != UNKNOWN]
            masses.append(sum(math.exp(-TOP_STEP * code) for code in codes))
            entries.append(len(codes))
        elif store.codec.profile in ("dense", "hidden"):
            masses.append(1.0)
            entries.append(40)
        else:
            ids = [gold, *store.codec.always_keep]
            codes = records["known"][row].tolist()
            known = {
                token: math.exp(-KNOWN_STEP * code) for token, code in zip(ids, codes, strict=True)
            }
            known[gold] = math.exp(-KNOWN_STEP * codes[0])
            heads, tails = (int(records[name][row]) for name in ("head_count", "tail_count"))
            if store.codec.rules.dithered:
                units = sum(each // 2 for each in records["head_units"][head : head + heads])
                # Every unit of the rest has one weight.
                share = (1 - sum(known.values())) / max(units + tails, 1)
                masses.append(sum(known.values()) + units * share)
            else:
                codes = records["head_logprobs"][head : head + heads].tolist()
                in_head = (math.exp(-store.codec.head_step * code) for code in codes)
                masses.append(sum(known.values()) + sum(in_head))
            entries.append(len(known) + heads + tails)
            head += heads
    return masses, entries


@pytest.mark.long
@pytest.mark.parametrize("profile", CODECS)
def test_kept_mass_and_entries_are_those_of_the_records(opened, profile):
    found = compute_cache_stats(opened[profile])
    masses, entries = counted(opened[profile])
    assert found.positions == len(masses)
    assert found.kept_mass.mean == pytest.approx(np.mean(masses), abs=1e-12)
    bins = np.minimum((np.array(masses) * 20 + 1e-9).astype(int), 19)
    assert found.kept_mass.counts == tuple(np.bincount(bins, minlength=20))
    assert (found.kept_mass.edges[0], found.kept_mass.edges[-1]) == (0.0, 1.0)
    expected = (np.mean(entries), *np.percentile(entries, [50, 99, 100], method="inverted_cdf"))
    assert (
        found.entries.mean,
        found.entries.p50,
        found.entries.p99,
        found.entries.max,
    ) == pytest.approx(expected)


def test_a_gold_token_that_is_always_kept_is_counted_once(opened):
    sequences, records = opened["threshold"].read(range(10))
    twice = np.isin(sequences.find_gold_ids(), KEEP).sum()
    assert twice > 5
    every = 1 + len(KEEP) + records["head_count"].astype(int) + records["tail_count"]
    assert compute_cache_stats(opened["threshold"]).entries.mean * len(records) == pytest.approx(
        every.sum() - twice
    )


@pytest.mark.parametrize("profile", CODECS)
def test_entropy_and_perplexity_are_those_of_the_records(opened, profile):
    store = opened[profile]
    found = compute_cache_stats(store)
    entropies = store.read(range(10))[1]["entropy"] * ENTROPY_STEP
    assert found.entropy.mean == pytest.approx(entropies.mean())
    assert found.entropy.counts == tuple(np.histogram(entropies, found.entropy.edges)[0])
    assert sum(found.entropy.counts) == len(entropies) and found.entropy.unknown == 0
    for split in ("train", "validation"):
        logprobs = store.read(getattr(store, split))[1]["known"][:, 0] * -KNOWN_STEP
        assert found.gold[split].positions == len(logprobs)
        assert found.gold[split].logprob == pytest.approx(logprobs.mean())
        assert found.gold[split].perplexity == pytest.approx(math.exp(-logprobs.mean()))


@pytest.mark.parametrize("profile", CODECS)
def test_bytes_by_array_add_up_to_the_folder(opened, profile):
    store = opened[profile]
    found = compute_cache_stats(store)
    files = list_file_sizes(store.folder)
    assert sum(found.bytes.values()) == sum(files.values())
    assert found.bytes["tokens"] == sum(size for name, size in files.items() if "/tokens/" in name)
    assert ("lm_head" in found.bytes) == (profile == "hidden")
    assert json.loads(json.dumps(asdict(found), allow_nan=False))["bytes"] == found.bytes


def test_small_thresholds_keep_more_entries_than_a_byte_counts(tmp_path):
    """Shards are summed up too where some records hold nearly every token and others few."""
    options = {"clusters": 0, "fitted": 0, "threshold": 0.001}
    identity = make_identity(vocabulary_size=900, codec=make_codec("threshold", **options))
    codec = identity.record_codec()
    p_V = np.where(np.arange(900) < 880, 1.0, 0.5) / 890.0
    with open_writer(tmp_path, identity) as writer:
        for index in writer.find_missing_shards():
            sequences, records = make_shard(identity, index)
            if index == 1:
                count = sequences.positions
                sample = Sample(
                    known_logprobs=np.log(np.full((count, 1), p_V[0])),
                    entropy=np.full(count, 6.8),
                    head_count=np.full(count, 879),
                    head_ids=np.tile(np.arange(1, 880), count),
                    head_logprobs=np.log(np.tile(p_V[1:880], count)),
                    tail_count=np.full(count, 10),
                    tail_ids=np.tile(np.arange(880, 890), count)[:, None],
                )
                records = codec.encode(
                    sample, RecordPositions(np.zeros(count, np.int64), np.arange(count))
                )
            writer.write_shard(index, sequences, records)
        writer.finish(PROVENANCE)
    found = compute_cache_stats(open_cache(tmp_path / identity.fingerprint)).entries
    assert (found.max, found.p50 < 500) == (1 + 879 + 10, True)


def test_small_units_keep_more_entries_than_a_byte_counts(tmp_path):
    identity = make_identity(vocabulary_size=900, codec=make_codec("threshold", threshold=0.001))
    codec = identity.record_codec()
    logp_V = np.log(np.where(np.arange(900) < 880, 1.0, 0.5) / 890.0)
    with open_writer(tmp_path, identity) as writer:
        write_folders(writer)
        for index in writer.find_missing_shards():
            sequences, records = make_shard(identity, index)
            if index == 1:
                rows, position_N = np.nonzero(sequences.target_mask)
                places = RecordPositions(rows + 4, position_N)
                logp_NV = np.tile(logp_V, (len(rows), 1))
                reading = read_units(codec, logp_NV, sequences.find_gold_ids(), places)
                records = codec.encode(reading, places)
            writer.write_shard(index, sequences, records)
        writer.finish(PROVENANCE)
    store = open_cache(tmp_path / identity.fingerprint)
    found = compute_cache_stats(store)
    masses, entries = counted(store)
    assert found.entries.max == max(entries) > 880
    assert found.entries.p50 < 500
    assert found.kept_mass.mean == pytest.approx(np.mean(masses), abs=1e-12)


def test_what_an_import_does_not_know_is_left_out(tmp_path):
    def forget(index: int, records: Records) -> Records:
        known = records["known"].copy()
        known[::2, 0] = UNKNOWN
        entropy = records["entropy"].copy()
        entropy[::2] = UNKNOWN_ENTROPY
        return Records({**records.columns, "known": known, "entropy": entropy})

    codec = make_codec("threshold", clusters=0, fitted=0)
    identity = make_identity(train_sequences=4, validation_sequences=0, codec=codec)
    store = make_altered(tmp_path, identity, forget)
    found = compute_cache_stats(store)
    _, records = store.read(range(4))
    assert found.entropy.unknown == (len(records) + 1) // 2
    assert found.entropy.mean == pytest.approx(records["entropy"][1::2].mean() * ENTROPY_STEP)
    assert found.gold["train"].positions == len(records) // 2
    assert found.gold["train"].logprob == pytest.approx(
        records["known"][1::2, 0].mean() * -KNOWN_STEP
    )
    assert found.gold["validation"].perplexity is None
    unknown = records["known"][:, 0] == UNKNOWN
    every = 1 + records["head_count"].astype(int) + records["tail_count"]
    assert found.entries.mean == pytest.approx((every - unknown).mean())
    heads = np.exp(-store.codec.head_step * records["head_logprobs"]).sum()
    golds = np.exp(-KNOWN_STEP * records["known"][1::2, 0]).sum()
    assert found.kept_mass.mean == pytest.approx((heads + golds) / len(records))


def test_a_cache_without_any_record_has_statistics(tmp_path):
    identity = make_identity(train_sequences=2, validation_sequences=0)
    sequences, records = make_shard(identity, 0)
    sequences = replace(sequences, target_mask=np.zeros_like(sequences.target_mask))
    with open_writer(tmp_path, identity) as writer:
        write_folders(writer)
        writer.write_shard(0, sequences, records.slice(0, 0))
        writer.finish(PROVENANCE)
    found = compute_cache_stats(open_cache(tmp_path / identity.fingerprint))
    assert (found.positions, found.entries, found.entropy.mean, found.kept_mass.mean) == (
        0,
        None,
        None,
        None,
    )
    assert found.gold["train"].logprob is None


@pytest.mark.parametrize("profile", ["threshold", "earlier", "dense", "hidden"])
def test_only_what_is_needed_is_decoded_and_one_shard_after_the_other(opened, profile, monkeypatch):
    decoded: list[tuple[str, str]] = []
    decode = ArrayFolder._decode

    def watched(self: ArrayFolder, name: str, number: int):
        decoded.append((self.folder.name, name))
        return decode(self, name, number)

    monkeypatch.setattr(ArrayFolder, "_decode", watched)
    compute_cache_stats(opened[profile])
    assert [shard for shard, _ in decoded] == sorted(shard for shard, _ in decoded)
    sampled = {"head_count", "tokens", "target_mask"}
    own = {
        "threshold": sampled | {"head_units"},
        "earlier": sampled | {"head_logprobs", "tail_count"},
    }
    needed = {"entropy", "known", "offsets"} | own.get(profile, set())
    assert {name for _, name in decoded} == needed


def test_statistics_of_damaged_bytes_are_refused(opened, tmp_path):
    folder = Path(shutil.copytree(opened["topk"].folder, tmp_path / opened["topk"].folder.name))
    path = folder / "shards/000001/top_logprobs/c.0.0"
    path.write_bytes(path.read_bytes()[::-1])
    with pytest.raises(CacheCorrupt, match="000001: array top_logprobs"):
        compute_cache_stats(open_cache(folder))


# ---- diff


def test_a_cache_and_its_copy_do_not_differ(opened, tmp_path):
    for store in opened.values():
        copied = open_cache(Path(shutil.copytree(store.folder, tmp_path / store.folder.name)))
        found = compare_caches(store, copied)
        assert found.equal and found.fields == ()
        assert (found.records.equal_shards, found.records.shards, found.records.same) == (
            3,
            3,
            None,
        )


def test_every_differing_field_is_named_with_both_values(tmp_path):
    first = make_identity()
    second = replace(
        make_identity(train_sequences=6, codec=make_codec(threshold=0.125)),
        teacher=replace(first.teacher, dtype="f16"),
    )
    provenance = replace(PROVENANCE, teacher_name="other", special_tokens={"bos": 1, "eos": 0})
    left = open_cache(make_cache(tmp_path, first))
    right = make_altered(tmp_path, second, lambda _, records: records, provenance)
    found = compare_caches(left, right)
    pairs = {name: (ours, theirs) for name, ours, theirs in found.fields}
    assert pairs.pop("counts.positions") == (left.manifest.positions, right.manifest.positions)
    assert pairs.pop("counts.sequences") == (10, 9)
    assert {name: pair for name, pair in pairs.items() if not name.startswith("counts.")} == {
        "teacher.dtype": ("float32", "f16"),
        "data.train_sequences": (7, 6),
        "codec.threshold": (0.04, 0.125),
        "provenance.teacher_name": ("tiny", "other"),
        "provenance.special_tokens.bos": (None, 1),
    }
    assert found.records is None and not found.equal
    assert json.loads(json.dumps(found.to_json()))["fields"][0] == {
        "field": "teacher.dtype",
        "a": "float32",
        "b": "f16",
    }


def with_other_teacher(identity: CacheIdentity) -> CacheIdentity:
    return replace(identity, teacher=replace(identity.teacher, model_sha256="e" * 64))


def choose_rows(store: Cache, records: Records, gold_N: np.ndarray, steps: int) -> np.ndarray:
    """Choose ten records that have the same number of units if the next token is less probable."""
    rows = np.arange(len(records))
    if store.codec.rules.dithered:
        known_NK = records["known"].copy()
        counted_NK = find_counted(store.codec, known_NK, gold_N)
        _, before_N = count_rest(store.codec, known_NK, counted_NK)
        known_NK[:, 0] += steps
        _, after_N = count_rest(store.codec, known_NK, counted_NK)
        rows = np.flatnonzero(before_N == after_N)
    return rows[:10]


@pytest.mark.long
def test_records_of_the_same_sequences_are_compared(opened, tmp_path):
    for store in opened.values():
        sequences, records = make_shard(store.identity, 1)
        rows = choose_rows(store, records, sequences.find_gold_ids(), 64)

        def shift(index: int, records: Records, rows=rows) -> Records:
            known = records["known"].copy()
            if index == 1:
                known[rows, 0] += 64  # a quarter of a nat
            return Records({**records.columns, "known": known})

        other = make_altered(tmp_path, with_other_teacher(store.identity), shift)
        found = compare_caches(store, other)
        assert (found.records.equal_shards, found.records.shards) == (2, 3)
        positions = store.manifest.shards[1].positions
        assert found.records.positions == positions
        assert found.records.same == pytest.approx(1 - 10 / positions)
        assert found.records.gold_difference == pytest.approx(0.25 * 10 / positions)
        assert not found.equal


def test_records_that_are_stored_in_other_bytes_are_the_same(opened, tmp_path, monkeypatch):
    monkeypatch.setattr("cache.shard.CHUNK_BYTES", 64)
    store = opened["tempered"]
    with open_writer(tmp_path, store.identity) as writer:
        fill_cache(writer)
    found = compare_caches(store, open_cache(writer.folder))
    assert (found.records.equal_shards, found.records.same, found.records.gold_difference) == (
        0,
        1.0,
        0.0,
    )
    assert {name for name, _, _ in found.fields} == {"counts.bytes"}


def test_of_a_large_cache_a_spread_sample_is_compared(opened, tmp_path, monkeypatch):
    store = opened["topk"]
    identity = with_other_teacher(store.identity)
    other = make_altered(
        tmp_path,
        identity,
        lambda _, records: make_records(99, len(records), identity.record_codec()),
    )
    monkeypatch.setattr("cache.inspection.COMPARED_SEQUENCES", 3)
    found = compare_caches(store, other)
    assert found.records.equal_shards == 0
    assert found.records.positions == sum(store.read([number])[0].positions for number in (0, 4, 8))
    assert found.records.same == 0.0


@pytest.mark.parametrize("profile", CODECS)
def test_any_change_of_any_column_is_a_difference_of_one_record(opened, profile):
    records = opened[profile].read(range(10))[1]
    assert find_same_records(records, records).all()
    for name, column in records.columns.items():
        if name.endswith("_count"):
            continue  # a count does not change alone
        changed = column.copy()
        row = len(changed) // 2
        flat = changed[row : row + 1].reshape(-1)
        flat[-1] = (
            39 if name.endswith("_ids") and flat[-1] != 39 else flat[-1] // 2 if flat[-1] else 1
        )
        same = find_same_records(records, Records({**records.columns, name: changed}))
        assert (~same).sum() == 1, name
        if find_axis(name) == "position":
            assert not same[row]
        else:
            assert not same[
                np.repeat(np.arange(len(records)), records[f"{find_axis(name)}_count"])[row]
            ]


def test_the_order_of_entries_within_a_record_makes_no_difference(opened):
    records = opened["tempered"].read(range(10))[1]
    rng = np.random.default_rng(0)
    columns = dict(records.columns)
    for axis in ("head", "tail"):
        rows = np.repeat(np.arange(len(records)), records[f"{axis}_count"])
        order = np.lexsort((rng.random(len(rows)), rows))
        assert (order != np.arange(len(rows))).any()
        columns |= {
            name: column[order] for name, column in columns.items() if find_axis(name) == axis
        }
    assert find_same_records(records, Records(columns)).all()


def test_a_moved_entry_a_lost_record_or_another_width_is_a_difference(opened):
    records = opened["tempered"].read(range(10))[1]
    counts = records["tail_count"].copy()
    counts[3] += 1
    counts[4] -= 1
    same = find_same_records(records, Records({**records.columns, "tail_count": counts}))
    assert np.flatnonzero(~same).tolist() == [3, 4]
    assert not find_same_records(records, records.slice(0, len(records) - 1)).any()
    narrow = Records({**records.columns, "partition": records["partition"][:, 1:]})
    assert not find_same_records(records, narrow).any()
