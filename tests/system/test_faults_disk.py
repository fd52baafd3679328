"""A full data disk, and damage to each file of a cache in turn."""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from bench.support.faults import small_disk
from bench.support.harness import Parts
from bench.support.judge import find_job_violations, hash_files, list_written, make_reference
from bench.support.light_child import LightWork
from bench.support.paths import ROOT
from bench.support.small.caches import fill_cache, make_cache
from bench.support.waiting import PATIENCE_SECONDS, wait_until
from cache.checking.verify import verify_cache
from cache.disk import list_file_sizes
from cache.errors import CacheError
from cache.store import open_cache
from cache.writing.writer import open_writer
from kd.client.wire.jobs import TERMINAL_STATUSES
from services.store.embedded import find_free_port
from services.store.queue import publish_hint
from tests.support.services.api import inputs, valid

MakeParts = Callable[..., Parts]


@pytest.fixture
def tmpfs() -> Iterator[Callable[[Path, str], Path]]:
    """Make small disks, which are removed with the test."""
    with contextlib.ExitStack() as disks:
        yield lambda folder, size: disks.enter_context(small_disk(folder, size))


@pytest.mark.long
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


class FullDiskService:
    """`kd up` with its data, logs and job store on one small disk, which can be filled up."""

    def __init__(self, disk: Path, data: str) -> None:
        self.disk = disk
        self.data = data
        port = find_free_port()
        self.http = httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=PATIENCE_SECONDS)
        environment = {
            "KD_HOME": str(disk / "home"),
            "KD_DISK_FLOOR_BYTES": "1000000",
            "KD_LEASE_SECONDS": "2",
            "KD_RATE_POST": "100000",
            "KD_CHILD_MODULE": "bench.support.scripted_child",
        }
        with (disk / "up.log").open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "services.terminal.cli", "up", "--port", str(port)],
                stdout=log,
                stderr=log,
                cwd=ROOT,
                env=os.environ | environment,
                start_new_session=True,
            )

    def is_ready(self) -> bool:
        """Whether the service accepts jobs."""
        with contextlib.suppress(httpx.TransportError):
            return self.http.get("/readyz").is_success
        return False

    def submit(self, name: str) -> str:
        """Post a job and return its id."""
        answer = self.http.post("/jobs", json=valid(name, self.data))
        assert answer.status_code == 202, answer.text
        return str(answer.json()["id"])

    def job(self, job_id: str) -> dict[str, Any]:
        """Read a job."""
        answer = self.http.get(f"/jobs/{job_id}")
        assert answer.status_code == 200, answer.text
        view: dict[str, Any] = answer.json()
        return view

    def fill(self) -> None:
        """Write until no byte more can be written, and until every log has met the end."""
        with (self.disk / "ballast").open("wb", buffering=0) as ballast:
            for size in (1 << 20, 1 << 12, 1):
                with contextlib.suppress(OSError):
                    while ballast.write(b"\0" * size):
                        pass
        api_log = self.disk / "home" / "logs" / "api.log"
        sizes = [-1, api_log.stat().st_size]
        while sizes[-1] != sizes[-2]:  # the last page of a file has room until it is full
            for _ in range(20):
                assert self.http.post("/jobs", json={}).status_code == 422
            sizes.append(api_log.stat().st_size)

    def free(self) -> None:
        """Make room again."""
        (self.disk / "ballast").unlink()

    def close(self) -> None:
        """End the service."""
        self.process.terminate()
        self.process.wait()
        self.http.close()


@pytest.fixture
def full_disk_service(
    tmpfs: Callable[[Path, str], Path], tmp_path: Path
) -> Iterator[FullDiskService]:
    """A service that is up on a disk of 100 MB."""
    service = FullDiskService(tmpfs(tmp_path / "disk", "100m"), inputs(tmp_path / "inputs"))
    try:
        wait_until(service.is_ready)
        yield service
    finally:
        service.close()


@pytest.mark.long
def test_on_a_full_disk_reading_works_and_all_recovers_once_there_is_space(
    full_disk_service: FullDiskService,
) -> None:
    service = full_disk_service
    job_id = service.submit("endless")
    wait_until(lambda: service.job(job_id)["progress"]["done"])
    worker = service.http.get("/workers").json()["data"][0]["pid"]
    api_log = service.disk / "home" / "logs" / "api.log"

    service.fill()
    os.kill(worker, signal.SIGKILL)
    for path in ("/healthz", "/jobs", f"/jobs/{job_id}", f"/jobs/{job_id}/events", "/metrics"):
        assert service.http.get(path).status_code == 200, path
    assert service.http.get("/readyz").status_code == 503
    refused = service.http.post("/jobs", json=valid("quick", service.data))
    assert refused.status_code == 507, refused.text
    assert service.job(job_id)["status"] == "running", "nothing could be written about its end"

    service.free()
    wait_until(service.is_ready)
    wait_until(lambda: service.job(job_id)["attempt"] == 2)
    wait_until(lambda: service.job(job_id)["status"] == "running")
    assert service.http.post(f"/jobs/{job_id}/cancel").is_success
    wait_until(lambda: service.job(job_id)["status"] == "cancelled")
    done = service.submit("quick")
    wait_until(lambda: service.job(done)["status"] == "succeeded")
    assert "lines are missing here: the log could not be written" in api_log.read_text()
    assert api_log.read_text().count("Uvicorn running") == 1, "the API was never started again"


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
@pytest.mark.long
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
            assert list(writer.find_missing_shards()) == (
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


@pytest.mark.long
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


@pytest.mark.long
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
