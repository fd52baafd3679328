"""Caches are found by name, removing is all or nothing, and no capture is disturbed."""

import json
import os
import shutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from bench.support.paths import ROOT
from bench.support.small.caches import (
    fill_cache,
    make_cache,
    make_codec,
    make_identity,
)
from bench.support.waiting import PATIENCE_SECONDS
from cache import operations
from cache.checking.listing import list_caches
from cache.checking.verify import verify_cache
from cache.disk import list_file_sizes, locked
from cache.errors import CacheError, CacheNotFound
from cache.manifest import CacheIdentity, sign_json
from cache.operations import (
    find_cache,
    find_cache_or_path,
    find_garbage,
    remove_cache,
    remove_garbage,
)
from cache.store import locate_lock, open_cache
from cache.writing.writer import open_writer

DAY = 86400.0


def identity_of(seed: int, counts: tuple[int, int], **options) -> CacheIdentity:
    identity = make_identity(
        train_sequences=counts[0],
        validation_sequences=counts[1],
        codec=make_codec(seed=seed, **options),
    )
    return replace(identity, data=replace(identity.data, sha256=f"{seed}" * 64))


@pytest.fixture(scope="module")
def parts(tmp_path_factory) -> list[Path]:
    """Three small caches that no test changes.

    One has no training sequences, and one has no validation sequences.
    """
    root = tmp_path_factory.mktemp("parts")
    counts = {1: (7, 3), 2: (5, 0), 3: (0, 2)}
    return [
        make_cache(root, identity_of(seed, pair, always_keep=(0, 5)))
        for seed, pair in counts.items()
    ]


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
    assert all(remove_garbage(one, DAY) for one in found)
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
        assert not remove_garbage(found, 0)
    with open_writer(tmp_path, identity) as writer:
        fill_cache(writer)
    assert not remove_garbage(found, 0), "it has been completed since it was found"
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
    assert remove_garbage(found, DAY)
    assert list(root.iterdir()) == []


def test_the_lock_of_a_cache_that_is_gone_is_garbage_unless_it_is_held(store):
    root = store.parent
    shutil.rmtree(store)
    lock = locate_lock(store)
    with locked(lock):
        assert find_garbage(root, DAY) == []
    (found,) = find_garbage(root, DAY)
    assert (found.path, found.why) == (lock, "the lock of a cache that is gone")
    assert remove_garbage(found, DAY)
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
