"""A killed capture resumes; two captures of one cache make it once; a full disk is reported."""

import errno
import json
import os
import resource
import shutil
import subprocess
from dataclasses import replace
from hashlib import sha256
from pathlib import Path

import pytest
import zarrs  # noqa: F401  # registers its codec pipeline

from bench.support.small.caches import (
    PROVENANCE,
    fill_cache,
    make_cache,
    make_codec,
    make_identity,
    make_lm_head,
    make_shard,
)
from bench.support.waiting import PATIENCE_SECONDS
from cache.disk import list_file_sizes, storage_errors
from cache.errors import CacheIncomplete, StorageError
from cache.store import read_manifest
from cache.writing.writer import open_writer
from tests.support.caches import IDENTITIES, IDENTITY, V, child, content, flip, tiny

#: Captures in a process of its own; prints what it found missing, and when it held the lock.
CHILD = """
import json, sys, time
from pathlib import Path
from cache.writing.writer import open_writer
from bench.support.small.caches import (
    PROVENANCE, make_identity, make_shard, make_token_map, write_folders
)

waits = []
with open_writer(Path(sys.argv[1]), make_identity(), lambda: waits.append(1)) as writer:
    began = time.monotonic()
    write_folders(writer)
    writer.write_token_map(make_token_map(writer.identity.tokenizer.vocabulary_size))
    missing = list(writer.find_missing_shards())
    for index in missing:
        writer.write_shard(index, *make_shard(writer.identity, index))
        time.sleep(0.4)
    writer.finish(PROVENANCE)
    report = {"began": began, "ended": time.monotonic(), "missing": missing, "waits": len(waits)}
    print(json.dumps(report))
"""


#: Captures that kill themselves before the n-th change they make to the disk, for many n, each in a
#: fork that has never used Zarr; then a capture that continues from what is left. Prints after each
#: the digests of all files, and whether the first was killed.
KILLED = """
import hashlib, json, os, signal, sys
from pathlib import Path
import zarr
from cache.disk import list_file_sizes
from cache.manifest import CacheIdentity
from cache.checking.verify import verify_cache
from cache.store import open_cache
from cache.writing.writer import open_writer
from bench.support.small.caches import fill_cache

root = Path(sys.argv[1])
identity = CacheIdentity.from_json(json.loads(sys.argv[2]))
step = int(sys.argv[3])
CHANGES = ("open", "os.rename", "os.mkdir", "os.remove", "os.rmdir")

def run(folder, deadly):
    changes = 0
    def count(event, arguments):
        nonlocal changes
        if event in CHANGES and str(folder) in str(arguments[0]):
            changes += 1
            if changes == deadly:
                os.kill(os.getpid(), signal.SIGKILL)
    sys.addaudithook(count)
    with open_writer(folder, identity) as writer:
        fill_cache(writer)

def fork(folder, deadly):
    if (pid := os.fork()) == 0:
        run(folder, deadly)
        os._exit(0)
    return os.waitpid(pid, 0)[1] == signal.SIGKILL

deadly = 1
died = True
while died:
    folder = root / str(deadly)
    died = fork(folder, deadly)
    store = folder / identity.fingerprint
    whole = (store / "manifest.json").exists()
    problems = verify_cache(store) if whole else []
    fork(folder, 0)
    content = {
        name: hashlib.sha256((store / name).read_bytes()).hexdigest()
        for name in list_file_sizes(store)
    }
    print(json.dumps({"died": died, "problems": problems, "content": content}), flush=True)
    deadly += step
"""


@pytest.mark.slow
def test_kill_9_at_any_moment_then_resume_gives_the_same_bytes(tmp_path, profile):
    """A capture of two shards is killed before every thirteenth change to the disk."""
    identity = replace(tiny(profile), data=replace(tiny(profile).data, train_sequences=5))
    expected = {
        name: sha256(data).hexdigest()
        for name, data in content(make_cache(tmp_path / "whole", identity)).items()
    }
    process = child(KILLED, tmp_path, json.dumps(identity.to_json()), 13)
    output, errors = process.communicate(timeout=PATIENCE_SECONDS)
    assert process.returncode == 0, errors
    reports = [json.loads(line) for line in output.splitlines()]
    assert [report["died"] for report in reports] == [True] * (len(reports) - 1) + [False]
    assert len(reports) > 7
    assert all(report["problems"] == [] for report in reports), "a manifest means that all is there"
    assert all(report["content"] == expected for report in reports)


@pytest.mark.long
def test_two_processes_that_want_the_same_cache_run_one_after_the_other(plain, tmp_path):
    processes = [child(CHILD, tmp_path) for _ in range(2)]
    reports = []
    for process in processes:
        output, errors = process.communicate(timeout=PATIENCE_SECONDS)
        assert process.returncode == 0, errors
        reports.append(json.loads(output))
    first, second = sorted(reports, key=lambda report: report["began"])
    assert first["ended"] <= second["began"]
    assert (first["missing"], second["missing"]) == ([0, 1, 2], [])
    assert content(tmp_path / plain.name) == content(plain)


def test_a_waiting_capture_calls_back_and_may_give_up(tmp_path):
    def give_up() -> None:
        raise InterruptedError("asked to stop")

    with (
        open_writer(tmp_path, IDENTITY),
        pytest.raises(InterruptedError),
        open_writer(tmp_path, IDENTITY, give_up),
    ):
        pass
    with (
        open_writer(tmp_path, make_identity(codec=make_codec(seed=1)), give_up),
        open_writer(tmp_path, IDENTITY, give_up),
    ):
        # Neither waits: one is another cache, and for the other the first writer has finished.
        pass


def test_a_damaged_shard_is_captured_again_and_not_trusted(plain, plain_copy):
    flip(plain_copy / "shards/000001/gap_symbols/c.0", 7)
    flip(plain_copy / "seals/000002.json", 99)
    with open_writer(plain_copy.parent, IDENTITY) as writer:
        assert list(writer.find_missing_shards()) == [1, 2]
        writer.write_shard(1, *make_shard(IDENTITY, 1))
        with pytest.raises(CacheIncomplete):
            read_manifest(plain_copy)
        fill_cache(writer)
    assert content(plain_copy) == content(plain)


def test_a_shard_whose_new_capture_failed_is_not_sealed_any_more(plain_copy, monkeypatch):
    def refuse(*_):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    flip(plain_copy / "shards/000001/gap_symbols/c.0", 7)
    with open_writer(plain_copy.parent, IDENTITY) as writer:
        monkeypatch.setattr("cache.writing.writer.write_arrays", refuse)
        with pytest.raises(OSError, match=os.strerror(errno.EIO)):
            writer.write_shard(1, *make_shard(IDENTITY, 1))
        with pytest.raises(CacheIncomplete, match="the first is 1"):
            writer.finish(PROVENANCE)


def test_leftovers_of_a_crash_are_removed(plain, plain_copy):
    (plain_copy / ".tmp-shards-000001").mkdir()
    (plain_copy / ".tmp-shards-000001/half").write_bytes(b"x")
    (plain_copy / "seals/.tmp-000001.json").write_bytes(b"{")
    (plain_copy / "shards/zarr.json").write_bytes(b"{")
    with open_writer(plain_copy.parent, IDENTITY) as writer:
        assert list(writer.find_missing_shards()) == []
    assert content(plain_copy) == content(plain)


@pytest.mark.long
def test_a_damaged_head_is_written_again_and_a_sound_one_left_alone(all_pristine, tmp_path):
    store = Path(shutil.copytree(all_pristine["hidden"], tmp_path / all_pristine["hidden"].name))
    before = (store / "head/weight/c.0.0").stat().st_mtime_ns
    with open_writer(tmp_path, IDENTITIES["hidden"]) as writer:
        writer.write_lm_head(make_lm_head(V))
        assert (store / "head/weight/c.0.0").stat().st_mtime_ns == before
        flip(store / "head/weight/c.0.0", 70)
        fill_cache(writer)
    assert content(store) == content(all_pristine["hidden"])


@pytest.fixture
def small_disk(tmp_path):
    """A folder that is soon full, and a function that makes room.

    It is a tiny tmpfs where this user may mount one, else a limit on file sizes stands for it.
    """
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=200k", "tmpfs", str(folder)]
    if shutil.which("mount") and subprocess.run(mount, capture_output=True).returncode == 0:
        yield (
            folder,
            lambda: subprocess.run(["mount", "-o", "remount,size=4m", str(folder)], check=True),
        )
        subprocess.run(["umount", str(folder)], check=True)
        return
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (300, limits[1]))
    yield folder, lambda: resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_a_full_disk_is_reported_leaves_nothing_half_written_and_can_be_resumed(small_disk, plain):
    root, make_room = small_disk
    with pytest.raises(StorageError) as refusal, open_writer(root, IDENTITY) as writer:
        fill_cache(writer)
    assert (
        os.strerror(errno.ENOSPC) in refusal.value.detail
        or os.strerror(errno.EFBIG) in refusal.value.detail
    )
    assert "Free space" in refusal.value.remedy
    folder = root / IDENTITY.fingerprint
    assert not [name for name in list_file_sizes(folder) if ".tmp-" in name]
    assert not (folder / "manifest.json").exists()
    make_room()
    with open_writer(root, IDENTITY) as writer:
        sealed = {int(path.stem) for path in folder.glob("seals/[0-9]*.json")}
        assert sealed.isdisjoint(writer.find_missing_shards())
        fill_cache(writer)
    assert content(folder) == content(plain)


def test_a_folder_that_is_not_writable_is_reported():
    with (
        pytest.raises(StorageError, match="/sys") as refusal,
        open_writer(Path("/sys/potstill"), IDENTITY),
    ):
        pass
    assert "writable" in refusal.value.remedy


def test_errors_that_have_nothing_to_do_with_storage_pass_unchanged():
    with pytest.raises(FileNotFoundError), storage_errors(Path("/")):
        raise FileNotFoundError(errno.ENOENT, "gone")
