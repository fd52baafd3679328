"""Several processes write the shards of one cache: each appears once and whole, whoever dies."""

from __future__ import annotations

import random
import signal
import subprocess
import time
from pathlib import Path

import pytest

from bench.support.small.caches import PROVENANCE, fill_cache, make_shard, write_folders
from bench.support.waiting import PATIENCE_SECONDS
from cache.checking.verify import verify_cache
from cache.errors import CacheError
from cache.operations import exclude_captures, find_garbage
from cache.store import locate_writers
from cache.writing.writer import open_helper, open_writer
from tests.support.caches import IDENTITY, child, content, flip

#: Writes all shards in an order of its own, until it is killed or has written all of them.
HELPER = """
import random, sys
from pathlib import Path
from bench.support.small.caches import make_identity, make_shard, write_folders
from cache.writing.writer import open_helper

identity = make_identity()
shards = list(range(identity.shard_count))
chance = random.Random(int(sys.argv[2]))
with open_helper(Path(sys.argv[1]), identity) as writer:
    print("begun", flush=True)
    write_folders(writer)
    for _ in range(int(sys.argv[3])):
        chance.shuffle(shards)
        for index in shards:
            writer.write_shard(index, *make_shard(identity, index))
"""


def start_helper(root: Path, seed: int, rounds: int = 1) -> subprocess.Popen[str]:
    process = child(HELPER, root, seed, rounds)
    assert process.stdout is not None
    assert process.stdout.readline() == "begun\n"
    return process


def read_times(folder: Path) -> dict[Path, int]:
    return {path: path.stat().st_mtime_ns for path in folder.rglob("*") if path.is_file()}


@pytest.fixture
def alone(tmp_path: Path) -> dict[str, bytes]:
    """The files of the cache that one process makes."""
    with open_writer(tmp_path / "alone", IDENTITY) as writer:
        fill_cache(writer)
        return content(writer.folder)


@pytest.mark.long
def test_processes_that_write_the_same_shards_at_once_make_the_cache_of_one(
    tmp_path: Path, alone: dict[str, bytes]
) -> None:
    root = tmp_path / "together"
    with open_writer(root, IDENTITY, shared=True) as writer:
        helpers = [start_helper(root, seed) for seed in range(3)]
        fill_cache(writer)
        for helper in helpers:
            _, errors = helper.communicate(timeout=PATIENCE_SECONDS)
            assert helper.returncode == 0, errors
    assert content(writer.folder) == alone
    assert not locate_writers(writer.folder).exists()


@pytest.mark.long
def test_helpers_that_are_killed_leave_nothing_that_counts(
    tmp_path: Path, alone: dict[str, bytes]
) -> None:
    root = tmp_path / "together"
    chance = random.Random(1)
    for seed in range(6):
        helpers = [start_helper(root, 10 * seed + each, 100) for each in range(2)]
        time.sleep(chance.random() * 0.3)
        for helper in helpers:
            helper.send_signal(signal.SIGKILL)
            helper.communicate()
    with open_writer(root, IDENTITY) as writer:
        folder = writer.folder
        assert not list(folder.rglob(".tmp-*")), "the first writer cleans up"
        write_folders(writer)
        for index in writer.find_missing_shards():
            writer.write_shard(index, *make_shard(IDENTITY, index))
        fill_cache(writer)
    assert content(folder) == alone


def test_a_late_helper_changes_nothing_of_a_sealed_cache(
    tmp_path: Path, alone: dict[str, bytes]
) -> None:
    root = tmp_path / "together"
    with open_helper(root, IDENTITY) as late:
        with open_writer(root, IDENTITY, shared=True) as writer:
            fill_cache(writer)
        before = {path: path.stat().st_mtime_ns for path in writer.folder.rglob("*")}
        late.write_shard(0, *make_shard(IDENTITY, 0))
    assert {
        path: path.stat().st_mtime_ns for path in writer.folder.rglob("shards/*/*")
    }.items() <= (before.items())
    assert content(writer.folder) == alone
    assert verify_cache(writer.folder) == []


def test_a_helper_repairs_a_damaged_shard(tmp_path: Path, alone: dict[str, bytes]) -> None:
    root = tmp_path / "together"
    with open_writer(root, IDENTITY) as writer:
        fill_cache(writer)
    flip(writer.folder / "shards/000001/gap_symbols/c.0", 7)
    with open_writer(root, IDENTITY, shared=True) as leading, open_helper(root, IDENTITY) as helper:
        assert list(helper.find_missing_shards(range(2))) == [1]
        helper.write_shard(1, *make_shard(IDENTITY, 1))
        leading.finish(PROVENANCE)
    assert verify_cache(writer.folder) == []


def test_no_cache_is_removed_under_a_helper(tmp_path: Path) -> None:
    with open_helper(tmp_path, IDENTITY) as writer:
        with pytest.raises(CacheError, match="is being captured"), exclude_captures(writer.folder):
            pass
        assert find_garbage(tmp_path, 0.0) == []
    with exclude_captures(writer.folder):
        pass
    assert [item.path for item in find_garbage(tmp_path, -1.0)] == [writer.folder]
