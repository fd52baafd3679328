"""Merging keeps every record, removing is all or nothing, and no capture is disturbed."""

import hashlib
import json
import os
import shutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from bench.support.paths import ROOT
from bench.support.waiting import PATIENCE_SECONDS
from cache import operations
from cache.checking.listing import list_caches
from cache.checking.verify import verify_cache
from cache.disk import list_file_sizes, locked
from cache.errors import CacheCorrupt, CacheError, CacheMismatch, CacheNotFound
from cache.inspection import find_same_records
from cache.manifest import CacheIdentity, sign_json
from cache.operations import (
    find_cache,
    find_cache_or_path,
    find_garbage,
    merge_caches,
    merge_identities,
    remove_cache,
    remove_garbage,
)
from cache.reading.arrays import ArrayFolder, make_chunk_memory
from cache.records import Records
from cache.store import Cache, locate_lock, open_cache
from cache.testing import (
    PROVENANCE,
    fill_cache,
    make_cache,
    make_codec,
    make_identity,
    make_lm_head,
    make_shard,
)
from cache.writing.writer import open_writer

DRAWS = {"draws": 3, "always_keep": (0, 5)}
PROFILES = {"threshold": DRAWS, "tempered": DRAWS, "topk": {}, "dense": {}, "hidden": {}}
DAY = 86400.0


def identity_of(
    seed: int, counts: tuple[int, int], profile: str = "threshold", **options
) -> CacheIdentity:
    identity = make_identity(
        train_sequences=counts[0],
        validation_sequences=counts[1],
        codec=make_codec(profile, seed=seed, **options),
    )
    return replace(identity, data=replace(identity.data, sha256=f"{seed}" * 64))


def make_part(root: Path, *arguments, **options) -> Path:
    return make_cache(root, identity_of(*arguments, **options))


def make_parts(root: Path, profile: str = "threshold") -> list[Path]:
    """Make three caches whose splits end in the middle of shards.

    One has no training sequences, and one has no validation sequences.
    """
    counts = {1: (7, 3), 2: (5, 0), 3: (0, 2)}
    return [
        make_part(root, seed, pair, profile, **PROFILES[profile]) for seed, pair in counts.items()
    ]


@pytest.fixture(scope="module")
def parts(tmp_path_factory) -> list[Path]:
    """Three small caches that no test changes."""
    return make_parts(tmp_path_factory.mktemp("parts"))


def content(folder: Path) -> dict[str, bytes]:
    return {name: (folder / name).read_bytes() for name in list_file_sizes(folder)}


def in_order(folders: list[Path]) -> list[tuple[Cache, int]]:
    """Return the part and the number there of each sequence of the merged cache."""
    opened = [open_cache(folder) for folder in folders]
    return [(one, n) for one in opened for n in one.train] + [
        (one, n) for one in opened for n in one.validation
    ]


# ---- merge


@pytest.mark.parametrize("profile", PROFILES)
@pytest.mark.long
def test_a_merged_cache_holds_every_record_of_every_draw_in_order(tmp_path, profile):
    folders = make_parts(tmp_path / "parts", profile)
    merged = merge_caches(tmp_path / "caches", folders)
    assert verify_cache(merged.folder) == []
    assert (merged.train, merged.validation) == (range(12), range(12, 17))
    assert merged.manifest.positions == sum(
        open_cache(folder).manifest.positions for folder in folders
    )
    for number, (part, origin) in enumerate(in_order(folders)):
        for draw in range(merged.codec.draws):
            sequences, records = merged.read([number], draw)
            was_sequences, was_records = part.read([origin], draw)
            for name in ("tokens", "document_start", "target_mask"):
                assert np.array_equal(getattr(sequences, name), getattr(was_sequences, name))
            assert find_same_records(was_records, records).all()
    if profile == "hidden":
        heads = [opened.teacher_head() for opened in (merged, open_cache(folders[0]))]
        assert all(np.array_equal(heads[0][name], heads[1][name]) for name in heads[0])


def test_a_merged_cache_says_what_it_was_made_from(parts, tmp_path):
    merged = merge_caches(tmp_path, parts)
    names = [folder.name for folder in parts]
    listed = json.dumps(names, separators=(",", ":")).encode()
    assert merged.identity.data.sha256 == hashlib.sha256(listed).hexdigest()
    assert merged.identity.codec == replace(open_cache(parts[0]).identity.codec, seed=0)
    assert merged.manifest.provenance == PROVENANCE
    opened = [open_cache(folder) for folder in parts]
    assert merge_identities(opened[::-1]).fingerprint != merged.identity.fingerprint


def test_a_seed_that_all_parts_share_is_kept(tmp_path):
    identities = [identity_of(7, (4, 0)), identity_of(7, (3, 1))]
    opened = [open_cache(make_cache(tmp_path, identity)) for identity in identities]
    assert merge_identities(opened).codec.seed == 7


def test_parts_may_have_shards_of_other_sizes(parts, tmp_path):
    other = make_part(tmp_path / "parts", 4, (5, 1), **DRAWS, shard_sequences=2)
    merged = merge_caches(tmp_path, [parts[0], other])
    assert merged.identity.codec.shard_sequences == 4
    for number, (part, origin) in enumerate(in_order([parts[0], other])):
        assert find_same_records(part.read([origin])[1], merged.read([number])[1]).all()


def other_nodes(records: Records) -> Records:
    return Records({**records.columns, "partition": records["partition"][:, 1:]})


def other_width(records: Records) -> Records:
    return Records({**records.columns, "hidden": records["hidden"][:, 1:]})


def make_altered(root: Path, identity: CacheIdentity, alter, head) -> Path:
    with open_writer(root, identity) as writer:
        if head is not None:
            writer.write_lm_head(head)
        for index in range(identity.shard_count):
            sequences, records = make_shard(identity, index)
            writer.write_shard(index, sequences, alter(records))
        writer.finish(PROVENANCE)
    return root / identity.fingerprint


@pytest.mark.parametrize(
    ("part", "changes", "message"),
    [
        ("teacher", {"model_sha256": "e" * 64}, "teacher.model_sha256: expected a+, got e+"),
        ("teacher", {"dtype": "bfloat16"}, "teacher.dtype: expected float32, got bfloat16"),
        ("tokenizer", {"sha256": "e" * 64}, "tokenizer.sha256"),
        ("data", {"sequence_length": 8}, "data.sequence_length: expected 16, got 8"),
        ("data", {"packing": False}, "data.packing: expected True, got False"),
        ("codec", {"threshold": 0.125}, "codec.threshold: expected 0.04, got 0.125"),
        ("codec", {"draws": 2}, "codec.draws: expected 1, got 2"),
        ("codec", {"always_keep": (3,)}, r"codec.always_keep: expected \(\), got \(3,\)"),
        (
            "codec",
            {"profile": "topk", "k": 2},
            "codec.profile: expected threshold, got topk; codec.k",
        ),
    ],
)
def test_what_does_not_fit_is_refused_by_name(tmp_path, part, changes, message):
    first = identity_of(1, (4, 1))
    second = identity_of(2, (3, 1))
    second = replace(second, **{part: replace(getattr(second, part), **changes)})
    folders = [make_cache(tmp_path / "parts", identity) for identity in (first, second)]
    with pytest.raises(CacheMismatch, match=message) as refusal:
        merge_caches(tmp_path / "caches", folders)
    assert "data.sha256" not in refusal.value.detail and "codec.seed" not in refusal.value.detail
    assert not (tmp_path / "caches").exists()


@pytest.mark.parametrize(
    ("profile", "alter", "head", "message"),
    [
        (
            "tempered",
            other_nodes,
            None,
            r"partition: expected rows of shape \(4, 2\), got \(3, 2\)",
        ),
        (
            "hidden",
            other_width,
            make_lm_head(300),
            r"hidden: expected rows of shape \(6,\), got \(5,\)",
        ),
        (
            "hidden",
            lambda records: records,
            {**make_lm_head(300), "bias": np.ones(300)},
            "head: expected seal",
        ),
    ],
)
def test_what_no_identity_names_must_fit_too(tmp_path, profile, alter, head, message):
    folder = make_part(tmp_path, 1, (4, 1), profile)
    other = make_altered(tmp_path, identity_of(2, (3, 1), profile), alter, head)
    with pytest.raises(CacheMismatch, match=message):
        merge_caches(tmp_path, [folder, other])


def test_one_cache_alone_or_twice_is_no_merge(parts, tmp_path):
    for folders in (parts[:1], [parts[0], parts[1], parts[0]]):
        with pytest.raises(CacheMismatch, match="at least two different caches"):
            merge_caches(tmp_path, folders)


def test_an_interrupted_merge_goes_on_and_gives_the_same_bytes(parts, tmp_path):
    def stop(done: int, of: int) -> None:
        if done == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        merge_caches(tmp_path / "a", parts, stop)
    assert [summary.complete for summary in list_caches(tmp_path / "a")] == [False]
    written: list[tuple[int, int]] = []
    resumed = merge_caches(tmp_path / "a", parts, lambda *pair: written.append(pair))
    assert written == [(3, 5), (4, 5), (5, 5)]
    assert content(resumed.folder) == content(merge_caches(tmp_path / "b", parts).folder)
    merge_caches(tmp_path / "a", parts, lambda *pair: written.append(pair))
    assert len(written) == 3, "a merge that was done is found"


def test_a_damaged_part_is_not_merged(parts, tmp_path):
    damaged = Path(shutil.copytree(parts[1], tmp_path / "parts" / parts[1].name))
    path = damaged / "shards/000001/known/c.0.0"
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    with pytest.raises(CacheCorrupt, match="known"):
        merge_caches(tmp_path, [parts[0], damaged])
    assert [summary.complete for summary in list_caches(tmp_path)] == [False]


@pytest.mark.long
def test_a_merge_decodes_each_chunk_once_in_bounded_memory(tmp_path, monkeypatch):
    """Memory holds the chunks of two shards, and a quarter of that would not hold one."""
    folders = [make_part(tmp_path, seed, (12, 4), **DRAWS) for seed in range(4)]
    memory = make_chunk_memory()
    open_cache(folders[0], shared=memory).read(range(8))
    tight = make_chunk_memory(memory.size)
    decoded = []
    decode = ArrayFolder._decode

    def watched(self, name, number):
        decoded.append((self.folder, name, number))
        return decode(self, name, number)

    monkeypatch.setattr(ArrayFolder, "_decode", watched)
    monkeypatch.setattr("cache.operations.make_chunk_memory", lambda: tight)
    merge_caches(tmp_path, folders)
    parts = [each for each in decoded if each[0].parent.parent in folders]
    assert len(parts) == len(set(parts)) > 0
    assert tight.size <= tight.limit


# ---- find


def test_a_cache_is_found_by_the_beginning_of_its_name_or_by_its_path(parts):
    root = parts[0].parent
    assert find_cache(root, parts[0].name[:6]) == parts[0]
    assert find_cache_or_path(root, str(parts[1])) == parts[1]
    assert find_cache_or_path(root, parts[1].name) == parts[1]
    with pytest.raises(CacheNotFound, match="names 0 caches"):
        find_cache(root, "0123456789")
    with pytest.raises(CacheNotFound, match="names 0 caches"):
        find_cache(root, "")


def test_an_ambiguous_name_says_what_it_could_mean(tmp_path):
    for last in ("0", "1"):
        (tmp_path / ("a" * 11 + last + "c" * 20)).mkdir()
    with pytest.raises(
        CacheNotFound, match=r"names 2 caches under .* \(aaaaaaaaaaa0, aaaaaaaaaaa1\)"
    ):
        find_cache(tmp_path, "aaa")


# ---- gc


@pytest.fixture
def store(parts, tmp_path) -> Path:
    """A copy of a complete cache, the only one below ``tmp_path / "caches"``."""
    return Path(shutil.copytree(parts[1], tmp_path / "caches" / parts[1].name))


def age(folder: Path, seconds: float) -> None:
    for path in (*folder.rglob("*"), folder):
        os.utime(path, (time.time() - seconds,) * 2)


def rewrite_manifest(folder: Path, **changes: object) -> None:
    document = json.loads((folder / "manifest.json").read_bytes())
    del document["digest"]
    (folder / "manifest.json").write_bytes(sign_json({**document, **changes}))


def reasons(root: Path, days: float = 7) -> dict[str, str]:
    return {
        one.path.relative_to(root).as_posix(): one.why for one in find_garbage(root, days * DAY)
    }


def test_a_usable_cache_is_no_garbage_however_old(store):
    age(store, 1000 * DAY)
    assert reasons(store.parent, 0) == {}
    assert find_garbage(store.parent / "nowhere", 0.0) == []


def test_what_writers_left_behind_is_removed_and_nothing_else(store):
    leftovers = (".tmp-manifest.json", "shards/.tmp-shards-000001", "seals/.tmp-000000.json")
    (store / leftovers[1]).mkdir()
    for name in (leftovers[0], f"{leftovers[1]}/zarr.json", leftovers[2]):
        (store / name).write_bytes(b"12345")
    root = store.parent
    assert reasons(root) == {
        f"{store.name}/{name}": "a writer was interrupted" for name in leftovers
    }
    found = find_garbage(root, DAY)
    assert [one.bytes for one in found] == [5, 5, 5]
    assert remove_garbage(found, DAY) == found
    assert verify_cache(store) == []


@pytest.mark.parametrize(
    ("damage", "why"),
    [
        (lambda folder: (folder / "manifest.json").unlink(), "its capture has not finished"),
        (lambda folder: (folder / "manifest.json").write_bytes(b"{}"), "was damaged"),
        (lambda folder: shutil.rmtree(folder / "shards/000001"), "000001 is missing"),
        (
            lambda folder: (folder / "shards/000000/known/zarr.json").write_bytes(b"x"),
            "expected .* bytes",
        ),
    ],
)
def test_an_unusable_cache_goes_when_it_is_old(store, damage, why):
    damage(store)
    age(store, 6.9 * DAY)
    assert reasons(store.parent) == {}
    age(store, 7.1 * DAY)
    (found,) = find_garbage(store.parent, 7 * DAY)
    assert (found.path, found.bytes) == (store, sum(list_file_sizes(store).values()))
    assert "Nothing was written to it for 7.1 days" in found.why
    (store / "shards").touch()
    assert find_garbage(store.parent, 7 * DAY) == [], "something was written just now"


def test_caches_of_older_versions_go_and_those_of_newer_ones_stay(store):
    root = store.parent
    rewrite_manifest(store, version=1)
    assert "version 1 is older" in reasons(root)[store.name]
    assert [
        summary.problem for summary in list_caches(root) if "version 1 is older" in summary.problem
    ]
    rewrite_manifest(store, version=99)
    assert reasons(root, 0) == {}
    identity = json.loads((store / "manifest.json").read_bytes())["identity"]
    codec = identity.pop("codec")
    rewrite_manifest(store, version=2, identity={**identity, "codec": {**codec, "version": 1}})
    assert "codec version 1 is older" in reasons(root)[store.name]
    rewrite_manifest(store, version=2, identity={**identity, "codec": {**codec, "version": 99}})
    assert reasons(root, 0) == {}


def test_a_capture_under_way_is_never_touched(tmp_path):
    identity = identity_of(1, (4, 1))
    with open_writer(tmp_path, identity) as writer:
        (writer.folder / ".tmp-x").write_bytes(b"x")
        age(writer.folder, 100 * DAY)
        assert find_garbage(tmp_path, 0) == []
        with pytest.raises(CacheError, match="is being captured"):
            remove_cache(writer.folder)
    (found,) = find_garbage(tmp_path, 0)
    with open_writer(tmp_path, identity):
        assert remove_garbage([found], 0) == []
    with open_writer(tmp_path, identity) as writer:
        fill_cache(writer)
    assert remove_garbage([found], 0) == [], "it has been completed since it was found"
    assert verify_cache(writer.folder) == []


def test_files_that_vanish_do_not_stop_a_search_for_garbage(store, monkeypatch):
    """A capture may begin after its lock was checked and before its files are."""
    other = shutil.copytree(store, store.parent / ("0" * 64))
    (store / ".tmp-x").write_bytes(b"x")
    real = operations._find_garbage_of

    def vanishing(folder, older_than):
        if folder == other:
            raise FileNotFoundError(folder / "seals" / "000000.json")
        return real(folder, older_than)

    monkeypatch.setattr(operations, "_find_garbage_of", vanishing)
    assert [found.path for found in find_garbage(store.parent, 0)] == [store / ".tmp-x"]


def test_what_is_no_cache_is_left_alone(store):
    root = store.parent
    (root / "notes.txt").write_bytes(b"x")
    (root / "mine").mkdir()
    (root / ".tmp-mine").mkdir()
    assert reasons(root, 0) == {}


# ---- rm

#: Removes a cache in a process that kills itself before the n-th change that it makes to the disk.
CHILD = """
import os, signal, sys
from pathlib import Path
from cache.operations import remove_cache

folder = Path(sys.argv[1])
deadly = int(sys.argv[2])
changes = 0

def count(event, arguments):
    global changes
    if event in ("os.rename", "os.remove", "os.rmdir"):
        changes += 1
        if changes == deadly:
            os.kill(os.getpid(), signal.SIGKILL)

sys.addaudithook(count)
remove_cache(folder)
"""


def test_a_removed_cache_is_gone_with_its_lock(store):
    root = store.parent
    identity = open_cache(store).identity
    remove_cache(store)
    assert list(root.iterdir()) == []
    assert make_cache(root, identity) == store
    assert verify_cache(store) == []


@pytest.mark.parametrize("deadly", [1, 2, 3, 4, 10, 40])
def test_a_removal_that_is_killed_leaves_a_whole_cache_or_none(store, deadly):
    root = store.parent
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", CHILD, str(store), str(deadly)]
    assert subprocess.run(command, env=environment, timeout=PATIENCE_SECONDS).returncode == -9
    if deadly <= 2:  # before the lock file of writers is deleted, and before the cache is renamed
        assert verify_cache(store) == []
        return
    assert list_caches(root) == []
    (found,) = find_garbage(root, DAY)
    assert (found.folder, found.why) == (store, "a removal was interrupted")
    assert remove_garbage([found], DAY) == [found]
    assert list(root.iterdir()) == []


def test_the_lock_of_a_cache_that_is_gone_is_garbage_unless_it_is_held(store):
    root = store.parent
    shutil.rmtree(store)
    lock = locate_lock(store)
    with locked(lock):
        assert find_garbage(root, DAY) == []
    (found,) = find_garbage(root, DAY)
    assert (found.path, found.why) == (lock, "the lock of a cache that is gone")
    assert remove_garbage([found], DAY) == [found]
    assert list(root.iterdir()) == []


def test_a_lock_that_was_deleted_with_its_cache_keeps_others_out_all_the_same(tmp_path):
    lock = tmp_path / "lock"
    holders = []

    def hold():
        with locked(lock):
            holders.append(lock.stat().st_ino)
            assert len(holders) == 1, "two threads hold the lock"
            time.sleep(0.05)
            lock.unlink()
            holders.pop()

    with ThreadPoolExecutor(4) as threads:
        for done in [threads.submit(hold) for _ in range(8)]:
            done.result()
    assert not lock.exists()
