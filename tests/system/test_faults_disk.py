"""A full data disk, and damage to each file of a cache in turn."""

from __future__ import annotations

import contextlib
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from bench.support.faults import small_disk
from bench.support.harness import Parts, wait_until
from bench.support.judge import find_job_violations, hash_files, list_written, make_reference
from bench.support.light_child import LightWork
from cache.disk import list_file_sizes
from cache.errors import CacheError
from cache.store import open_cache, open_writer, verify_cache
from cache.testing import fill_cache, make_cache
from services.store.queue import publish_hint
from services.store.schemas import TERMINAL_STATUSES

MakeParts = Callable[..., Parts]


@pytest.fixture
def tmpfs() -> Iterator[Callable[[Path, str], Path]]:
    """Make small disks, which are removed with the test."""
    with contextlib.ExitStack() as disks:
        yield lambda folder, size: disks.enter_context(small_disk(folder, size))


def test_a_full_disk_fails_the_job_and_a_retry_continues(
    new_parts: MakeParts, tmpfs: Callable[[Path, str], Path], tmp_path: Path
) -> None:
    name = "light-30-8-50"
    work = LightWork.of(name)
    home = tmpfs(tmp_path / "home 0", "8m")
    elsewhere = tmp_path / "redis"
    elsewhere.mkdir()
    (home / "redis").symlink_to(elsewhere)
    parts = new_parts(child_module="bench.support.light_child", disk_floor_bytes=0)
    ballast = home / "ballast"
    ballast.write_bytes(b"\0" * (shutil.disk_usage(home).free - (400 << 10)))
    parts.start_worker()
    job_id = parts.submit(name, "distill")
    job = parts.wait_for(job_id, *TERMINAL_STATUSES)
    assert job.status == "failed" and job.error is not None
    assert job.error.type == "disk_full", job.error
    assert "No space left" in job.error.detail and job.error.remedy

    folder = parts.settings.caches / work.identity.fingerprint
    undisturbed, _ = make_reference(tmp_path / "spare", work.seed, work.shards)
    there = hash_files(folder)
    assert 0 < len(there) < len(undisturbed), "some shards were sealed"
    assert there.items() <= undisturbed.items(), "no file is torn: each is as it will be"
    sealed = list_written(parts.settings.run_dir(job_id), folder.name)

    ballast.unlink()
    assert parts.jobs.change("retry", job_id).outcome == "done"
    parts.submit("light-31-1-20", "distill")  # sends a hint, which wakes the worker for both
    assert parts.wait_for(job_id, *TERMINAL_STATUSES).status == "succeeded"
    assert list_written(parts.settings.run_dir(job_id), folder.name) == list(range(work.shards)), (
        "each once"
    )
    assert sealed == list(range(len(sealed))) and len(sealed) < work.shards
    assert hash_files(folder) == undisturbed


# ---------------------------------------------------------------------- damage


def flip(file: Path, dice: random.Random) -> None:
    data = bytearray(file.read_bytes())
    data[dice.randrange(len(data))] ^= 1 << dice.randrange(8)
    file.write_bytes(data)


def cut(file: Path, dice: random.Random) -> None:
    file.write_bytes(file.read_bytes()[: dice.randrange(file.stat().st_size)])


def delete(file: Path, dice: random.Random) -> None:
    file.unlink()


DAMAGES = (flip, cut, delete)


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.__name__)
def test_every_damaged_file_is_found_and_named_and_nothing_else_is_repaired(
    tmp_path: Path, damage: Callable[[Path, random.Random], None]
) -> None:
    work = LightWork(40, 2, 0.0)
    dice = random.Random(40)
    folder = make_cache(tmp_path, work.identity)
    undisturbed = hash_files(folder)
    for name in [name for name in list_file_sizes(folder) if not name.endswith("shards/zarr.json")]:
        others = {
            other: (folder / other).stat().st_ino
            for other in undisturbed
            if _part(other) != _part(name)
        }
        damage(folder / name, dice)
        if damage is not flip or not is_group(name):
            # Damage is an error before anything is used, never a wrong number.
            with pytest.raises(CacheError) as error:
                read_all(folder, work)
            assert _named(name, str(error.value)), (name, str(error.value))
        assert any(_named(name, line) for line in verify_cache(folder)), name
        with open_writer(tmp_path, work.identity) as writer:
            assert writer.find_missing_shards() == (
                [int(_part(name))] if _part(name).isdigit() else []
            )
            fill_cache(writer)
        assert hash_files(folder) == undisturbed
        kept = {
            other: (folder / other).stat().st_ino for other in others if "manifest" not in other
        }
        assert kept.items() <= others.items(), "no other shard was written again"


def is_group(name: str) -> bool:
    """Whether the file is a Zarr group, which other readers need; ours compares its size alone."""
    return (
        name.startswith("shards/") and Path(name).name == "zarr.json" and len(Path(name).parts) == 3
    )


def read_all(folder: Path, work: LightWork) -> None:
    store = open_cache(folder, work.identity)
    store.read(range(len(store)))
    store.token_map()


def _part(name: str) -> str:
    """The shard or the token map that a file belongs to, or the file itself."""
    path = Path(name)
    if path.parts[0] == "token_map":
        return path.parts[0]
    return path.parts[1] if path.parts[0] == "shards" else path.stem


def _named(name: str, text: str) -> bool:
    """Whether an error names the file, or its array and chunk."""
    path = Path(name)
    if len(path.parts) < 4:
        return path.name in text
    return path.parts[2] in text and (
        path.name in text or (path.name == "zarr.json" and "metadata" in text)
    )


def test_a_job_that_meets_damage_fails_and_another_repairs_it(
    new_parts: MakeParts, tmp_path: Path
) -> None:
    parts = new_parts(child_module="bench.support.light_child")
    parts.start_worker()
    name = "light-41-3-20"
    work = LightWork.of(name)
    first = parts.submit(name, "distill")
    assert parts.wait_for(first, *TERMINAL_STATUSES).status == "succeeded"
    folder = parts.settings.caches / work.identity.fingerprint
    victim = next(
        file for file in (folder / "shards" / "000001").rglob("c.0*") if "tokens" in str(file)
    )
    flip(victim, random.Random(41))
    reader = parts.submit(name, "train", cache={"fingerprint": folder.name}, loss={"alpha": 0.1})
    job = parts.wait_for(reader, *TERMINAL_STATUSES)
    assert job.status == "failed" and job.error is not None and job.error.type == "cache_corrupt"
    assert "000001" in job.error.detail and job.error.remedy
    assert list_written(parts.settings.run_dir(reader)) == [], "the damaged cache was not used"
    again = parts.submit(name, "distill")
    parts.wait_for(again, *TERMINAL_STATUSES)
    assert job_violations_but_one_shard(parts, again, name, tmp_path) == []
    assert list_written(parts.settings.run_dir(again), folder.name) == [1], "only the damaged shard"


def test_a_job_whose_cache_vanished_before_its_training_captures_it_again_on_retry(
    new_parts: MakeParts,
) -> None:
    parts = new_parts(child_module="bench.support.light_child")
    capturing = parts.start_worker("precompute")
    name = "light-42-3-20"
    folder = parts.settings.caches / LightWork.of(name).identity.fingerprint
    job_id = parts.submit(name, "distill")
    wait_until(lambda: (job := parts.job(job_id)).stage == "train" and job.status == "queued")
    capturing.terminate()
    capturing.wait()
    shutil.rmtree(folder)
    parts.start_worker()
    job = parts.wait_for(job_id, *TERMINAL_STATUSES)
    assert job.status == "failed" and job.error is not None and job.error.type == "cache_missing"
    assert str(folder) in job.error.detail and "retry" in job.error.remedy
    assert parts.jobs.change("retry", job_id).outcome == "done"
    publish_hint(parts.queue, job_id, "precompute")
    assert parts.wait_for(job_id, *TERMINAL_STATUSES).status == "succeeded"
    assert verify_cache(folder) == []
    twice = list_written(parts.settings.run_dir(job_id), folder.name)
    assert sorted(twice) == [0, 0, 1, 1, 2, 2], "every shard was captured once more"


def job_violations_but_one_shard(parts: Parts, job_id: str, name: str, tmp_path: Path) -> list[str]:
    """All violations but one: shard 1 was rightly written twice."""
    twice = f"{LightWork.of(name).identity.fingerprint}: number 1 was written 2 times"
    return [
        line
        for line in find_job_violations(parts, job_id, name, tmp_path / "spare")
        if line != twice
    ]
