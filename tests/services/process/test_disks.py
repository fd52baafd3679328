"""The disks of KD_HOME and of KD_STORE: each is asked for what will be written there."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from bench.support.faults import small_disk
from bench.support.harness import Parts
from bench.support.small.caches import make_codec, make_identity
from cache.disk import storage_errors
from cache.errors import StorageError
from kd.capture.estimate.storage import require_space
from kd.files import Disk
from services.settings import Settings
from services.terminal.commands.doctor import _check_folder
from tests.support.commands import kd
from tests.support.services.api import UNLIMITED, inputs, problem, valid

#: A disk with bytes enough for what the tests write, and too few for a job.
SMALL = "16m"
#: A disk that takes this many files, whatever their sizes.
FEW_FILES = "2g,nr_inodes=100"


@pytest.fixture(params=[SMALL, FEW_FILES])
def full_disk(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    with small_disk(tmp_path / "full", request.param) as folder:
        yield folder


@pytest.mark.parametrize("setting", ["KD_HOME", "KD_STORE"])
def test_a_full_disk_of_either_kind_is_told_by_every_door(
    new_parts: Callable[..., Parts], tmp_path: Path, full_disk: Path, setting: str
) -> None:
    text = inputs(tmp_path / "inputs")
    place: dict[str, Any] = {"home": full_disk} if setting == "KD_HOME" else {"store": full_disk}
    changes = UNLIMITED | {"disk_floor_bytes": 64 << 20, "data_roots": (tmp_path / "inputs",)}
    parts = new_parts(**changes | ({} if "home" in place else {"store": str(full_disk)}))
    if "home" in place:
        parts.settings = parts.settings.model_copy(update=place)
    parts.start_api()
    refused = problem(parts.http.post("/jobs", json=valid("quick", text)), 507, "disk-full")
    unready = problem(parts.http.get("/readyz"), 503, "disk-full")
    assert all(f"The disk of {setting} " in each.detail for each in (refused, unready))
    health = parts.http.get("/health").json()
    assert any(f"The disk of {setting} " in line for line in health["problems"])
    full = health["disk" if setting == "KD_HOME" else "caches_disk"]
    assert full["free_bytes"] < 64 << 20 or full["free_files"] < 100
    metrics = parts.http.get("/metrics").text
    assert f'kd_disk_free_bytes{{folder="{setting}"}}' in metrics
    findings = [each for each in _check_folder(setting, full_disk) if each.what == "disk"]
    assert [each.ok for each in findings] == [False] and setting in findings[0].detail


def test_the_cache_of_an_estimate_must_fit_on_its_own_disk(
    tmp_path: Path, tiny_teacher: Path
) -> None:
    text = tmp_path / "text.txt"
    text.write_text("It is a truth universally acknowledged, that it rains.\n" * 20_000)
    job = {
        "kind": "precompute",
        "teacher": {"model": str(tiny_teacher)},
        "data": {"train": str(text), "sequence_length": 64},
        "cache": {"profile": "dense"},
    }
    file = tmp_path / "job.yaml"
    file.write_text(yaml.safe_dump(job))
    with small_disk(tmp_path / "small", "300m") as small:
        for home, store, fits in ((small, tmp_path / "store", True), (tmp_path, small, False)):
            done = kd("estimate", file, "--fast", "--json", "--home", home, KD_STORE=str(store))
            assert done.returncode == (0 if fits else 1), done.stderr
            assert fits or (f"The disk of {small}" in done.stderr and "KD_STORE" in done.stderr)
            assert (json.loads(done.stdout)["free_bytes"] <= 300 << 20) is not fits
        # A bucket's room is not that of the disk, which keeps what it has room for.
        bucket = {"KD_STORE": "s3://bucket/prefix", "KD_STORE_CACHE_BYTES": str(100 << 20)}
        done = kd("estimate", file, "--fast", "--home", small, **bucket)
        assert done.returncode == 0, done.stderr
        assert "what is free in s3://bucket/prefix is not known" in " ".join(done.stdout.split())


def test_a_cache_of_more_files_than_the_disk_takes_is_refused_before_the_capture(
    tmp_path: Path,
) -> None:
    identity = make_identity(train_sequences=97, codec=make_codec(shard_sequences=4))
    with small_disk(tmp_path / "disk", FEW_FILES) as folder:
        require_space(tmp_path, identity, 1600, 1 << 20)
        with pytest.raises(StorageError, match=r"files \(inodes\).*KD_STORE"):
            require_space(folder, identity, 1600, 1 << 20)


def test_an_error_for_a_disk_without_inodes_says_so(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", "2g,nr_inodes=3") as folder:
        with (
            pytest.raises(StorageError, match=r"Delete files \(no inode is free\)"),
            storage_errors(folder),
        ):
            [(folder / str(number)).touch() for number in range(4)]
        assert Disk.of(folder).free_files == 0


def test_settings_name_their_disks(tmp_path: Path) -> None:
    assert Settings(home=tmp_path).places == {"KD_HOME": tmp_path}
    here = Settings(home=tmp_path, store=str(tmp_path / "far"))
    assert list(here.places) == ["KD_HOME", "KD_STORE"]
    bucket = Settings(home=tmp_path, store="s3://bucket/prefix")
    assert bucket.places == {"KD_HOME": tmp_path}
