"""The data disk full, and every file of a cache damaged in turn, for real: rows 10 and 11 of the table of faults."""

from __future__ import annotations

import contextlib
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from cache.disk import files_below
from cache.errors import CacheError
from cache.store import capture, open_cache, verify
from cache.testing import fill, make_cache
from services.schemas import TERMINAL
from tests.chaos import small_disk
from tests.harness import Parts
from tests.judge import contents, job_violations, reference, wrote
from tests.light_child import Work

pytestmark = pytest.mark.alone

MakeParts = Callable[..., Parts]


@pytest.fixture
def tmpfs() -> Iterator[Callable[[Path, str], Path]]:
    """Small disks, which end with the test."""
    with contextlib.ExitStack() as disks:
        yield lambda folder, size: disks.enter_context(small_disk(folder, size))


def test_row_10_a_full_disk_fails_the_job_and_a_retry_goes_on_where_it_was(
    new_parts: MakeParts, tmpfs: Callable[[Path, str], Path], tmp_path: Path
) -> None:
    name, work = "light-30-8-50", Work.of("light-30-8-50")
    home = tmpfs(tmp_path / "home 0", "8m")
    elsewhere = tmp_path / "redis"
    elsewhere.mkdir()
    (home / "redis").symlink_to(elsewhere)
    parts = new_parts(child_module="tests.light_child", disk_floor_bytes=0)
    ballast = home / "ballast"
    ballast.write_bytes(b"\0" * (shutil.disk_usage(home).free - (400 << 10)))
    parts.start_worker()
    job_id = parts.submit(name, "distill")
    job = parts.wait_for(job_id, *TERMINAL)
    assert job.status == "failed" and job.error is not None
    assert job.error.type == "disk_full", job.error
    assert "No space left" in job.error.detail and job.error.remedy

    folder = parts.settings.caches / work.identity.fingerprint
    undisturbed, _ = reference(tmp_path / "spare", work.seed, work.shards)
    there = contents(folder)
    assert 0 < len(there) < len(undisturbed), "some shards were sealed"
    assert there.items() <= undisturbed.items(), "nothing is torn: what is there is as it will be"
    sealed = wrote(parts.settings.run_dir(job_id), folder.name)

    ballast.unlink()
    assert parts.jobs.change("retry", job_id).outcome == "done"
    parts.submit("light-31-1-20", "distill")  # whose hint the worker may take for either
    assert parts.wait_for(job_id, *TERMINAL).status == "succeeded"
    assert wrote(parts.settings.run_dir(job_id), folder.name) == list(range(work.shards)), "each once"
    assert sealed == list(range(len(sealed))) and len(sealed) < work.shards
    assert contents(folder) == undisturbed


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
def test_row_11_every_damaged_file_is_found_named_and_alone_repaired(
    tmp_path: Path, damage: Callable[[Path, random.Random], None]
) -> None:
    work, dice = Work(40, 2, 0.0), random.Random(40)
    folder = make_cache(tmp_path, work.identity)
    undisturbed = contents(folder)
    for name in [name for name in files_below(folder) if not name.endswith("shards/zarr.json")]:
        others = {other: (folder / other).stat().st_ino for other in undisturbed if _part(other) != _part(name)}
        damage(folder / name, dice)
        if damage is not flip or not is_group(name):
            with pytest.raises(CacheError) as error:  # never a wrong number: an error, before anything is used
                read_all(folder, work)
            assert _named(name, str(error.value)), (name, str(error.value))
        assert any(_named(name, line) for line in verify(folder)), name
        with capture(tmp_path, work.identity) as writer:
            assert writer.missing_shards() == ([int(_part(name))] if _part(name).isdigit() else [])
            fill(writer)
        assert contents(folder) == undisturbed
        kept = {other: (folder / other).stat().st_ino for other in others if "manifest" not in other}
        assert kept.items() <= others.items(), "no other shard was written again"


def is_group(name: str) -> bool:
    """Whether it is what other Zarr readers find the arrays by; ours knows them, and reads its size alone."""
    return name.startswith("shards/") and Path(name).name == "zarr.json" and len(Path(name).parts) == 3


def read_all(folder: Path, work: Work) -> None:
    store = open_cache(folder, work.identity)
    store.read(range(len(store)))


def _part(name: str) -> str:
    """The shard that a file belongs to, or the file itself."""
    path = Path(name)
    return path.parts[1] if path.parts[0] == "shards" else path.stem


def _named(name: str, text: str) -> bool:
    """Whether an error names the file, or the array and chunk that it is."""
    path = Path(name)
    if len(path.parts) < 4:
        return path.name in text
    return path.parts[2] in text and (path.name in text or (path.name == "zarr.json" and "metadata" in text))


def test_row_11_a_job_that_meets_damage_fails_and_another_repairs_it(new_parts: MakeParts, tmp_path: Path) -> None:
    parts = new_parts(child_module="tests.light_child")
    parts.start_worker()
    name, work = "light-41-3-20", Work.of("light-41-3-20")
    first = parts.submit(name, "distill")
    assert parts.wait_for(first, *TERMINAL).status == "succeeded"
    folder = parts.settings.caches / work.identity.fingerprint
    victim = next(file for file in (folder / "shards" / "000001").rglob("c.0*") if "tokens" in str(file))
    flip(victim, random.Random(41))
    reader = parts.submit(name, "train", cache={"fingerprint": folder.name}, loss={"alpha": 0.1})
    job = parts.wait_for(reader, *TERMINAL)
    assert job.status == "failed" and job.error is not None and job.error.type == "cache_corrupt"
    assert "000001" in job.error.detail and job.error.remedy
    assert wrote(parts.settings.run_dir(reader)) == [], "nothing was made of it"
    again = parts.submit(name, "distill")
    parts.wait_for(again, *TERMINAL)
    assert job_violations_but_one_shard(parts, again, name, tmp_path) == []
    assert wrote(parts.settings.run_dir(again), folder.name) == [1], "only the damaged one"


def job_violations_but_one_shard(parts: Parts, job_id: str, name: str, tmp_path: Path) -> list[str]:
    """Shard 1 has rightly been written twice."""
    twice = f"{Work.of(name).identity.fingerprint}: number 1 was written 2 times"
    return [line for line in job_violations(parts, job_id, name, tmp_path / "spare") if line != twice]
