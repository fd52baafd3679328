"""A run that began with a cache of version 0.2.0 goes on with it."""

from dataclasses import replace
from pathlib import Path

import pytest

from bench.support.small.caches import make_cache
from cache.disk import hash_file, list_file_sizes
from cache.errors import CacheCorrupt
from kd.capture.plan import CapturePlan, plan_capture, set_packing
from kd.config.job import JobConfig
from kd.config.jobfile import parse_config
from kd.files import read_json, write_json
from kd.pipeline import run_stage
from kd.stages.capture import keep_begun_cache
from kd.stages.source import select_cache_inputs
from tests.support.kd.tiny import make_tiny_job


@pytest.fixture(scope="module")
def job(tiny_teacher: Path, tiny_text: Path) -> JobConfig:
    return set_packing(parse_config(make_tiny_job(tiny_teacher, tiny_text)), True)


@pytest.fixture(scope="module")
def planned(job: JobConfig) -> CapturePlan:
    return plan_capture(job)


def begin(job: JobConfig, planned: CapturePlan, home: Path, **codec: object) -> Path:
    """Leave a run as version 0.2.0 did after its capture; return the folder of its cache."""
    earlier = {"clusters": 0, "fitted": 0, "entropies": False}
    own = replace(planned.identity.codec, **earlier | codec)
    folder = make_cache(home / "caches", replace(planned.identity, codec=own))
    known = {"fingerprint": folder.name, "inputs": select_cache_inputs(job)}
    write_json(home / "runs" / "begun" / "cache.json", known)
    return folder


def keep(job: JobConfig, planned: CapturePlan, home: Path, name: str) -> str:
    """The cache with which the run ``name`` goes on."""
    kept = keep_begun_cache(planned, job, home / "caches", home / "runs" / name)
    return kept.identity.fingerprint


def hash_files(folder: Path) -> dict[str, str]:
    return {name: hash_file(folder / name) for name in list_file_sizes(folder)}


def test_a_begun_run_goes_on_with_its_cache_and_captures_no_other(
    job: JobConfig, planned: CapturePlan, tmp_path: Path
) -> None:
    folder = begin(job, planned, tmp_path)
    before = hash_files(folder)
    run_dir = tmp_path / "runs" / "begun"
    run_stage("precompute", job, tmp_path, run_dir)
    assert read_json(run_dir / "cache.json")["fingerprint"] == folder.name
    assert [each for each in (tmp_path / "caches").iterdir() if each.is_dir()] == [folder]
    assert hash_files(folder) == before
    # Also once cache.json is of this version.
    assert keep(job, planned, tmp_path, "begun") == folder.name


def test_only_the_begun_run_and_its_continuation_go_on_with_the_cache(
    job: JobConfig, planned: CapturePlan, tmp_path: Path
) -> None:
    folder = begin(job, planned, tmp_path)
    assert keep(job, planned, tmp_path, "another") == planned.identity.fingerprint
    longer = parse_config(job.model_dump(mode="json") | {"resume": {"run": "begun"}})
    assert keep(longer, planned, tmp_path, "longer") == folder.name


@pytest.mark.parametrize("codec", [{"seed": 9}, {"clusters": 1, "fitted": 1}])
def test_a_cache_of_other_settings_or_of_this_version_is_not_taken(
    codec: dict[str, int], job: JobConfig, planned: CapturePlan, tmp_path: Path
) -> None:
    begin(job, planned, tmp_path, **codec)
    assert keep(job, planned, tmp_path, "begun") == planned.identity.fingerprint


def test_a_damaged_cache_is_refused_by_name_and_left_as_it_is(
    job: JobConfig, planned: CapturePlan, tmp_path: Path
) -> None:
    folder = begin(job, planned, tmp_path)
    sizes = list_file_sizes(folder / "shards")
    victim = folder / "shards" / max(sizes, key=lambda name: sizes[name])
    data = victim.read_bytes()
    victim.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    before = hash_files(folder)
    with pytest.raises(CacheCorrupt, match=r"is damaged, and the run goes on.*0\.2\.0"):
        run_stage("precompute", job, tmp_path, tmp_path / "runs" / "begun")
    assert hash_files(folder) == before
