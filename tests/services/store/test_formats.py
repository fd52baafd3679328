"""What a version says of data of earlier and later ones."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from redis.exceptions import ResponseError

from bench.support.harness import Parts, make_config
from bench.support.small.caches import make_cache
from cache.errors import PotstillError
from cache.manifest import sign_json, verify_json
from cache.store import read_manifest
from kd.errors import TrainingError
from kd.files import MARK, require_known_run, write_json
from kd.text.stored.shard_files import FORMAT as TEXT_FORMAT
from kd.text.stored.shard_files import INPUTS, read_object, require_format
from kd.training.saved.state_file import FORMAT, STATE, read_state
from services.store import key_file
from services.store.backup import Backup, BackupError
from services.store.embedded import find_free_port
from services.store.jobs.records import make_job_id
from services.store.jobs.store import JobStore
from tests.support.commands import kd


def make_checkpoint(run: Path, number: int, step: int = 5) -> Path:
    folder = run / "checkpoints" / f"step-{step:08d}"
    folder.mkdir(parents=True)
    content = {"format": number, "identity": "i", "progress": {"step": step}, "sha256": {}}
    (folder / STATE).write_bytes(sign_json(content))
    return folder


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """A data folder with a cache, a token store, a checkpoint and a file of keys."""
    make_cache(tmp_path / "caches")
    write_json(tmp_path / "texts" / ("0" * 32) / INPUTS, {"format": TEXT_FORMAT, "inputs": {}})
    make_checkpoint(tmp_path / "runs" / "job_a", FORMAT)
    write_json(tmp_path / "runs" / "job_a" / "config.json", {})
    key_file.create_key(tmp_path / "api_keys", "alice", ["read"])
    return tmp_path


def change_manifest(home: Path, version: int) -> None:
    (manifest,) = home.glob("caches/*/manifest.json")
    content = verify_json(manifest.read_bytes(), "manifest.json")
    manifest.write_bytes(sign_json({**content, "version": version}))


def write_records(home: Path, jobs: JobStore, number: int) -> None:
    jobs.redis.set("kd:format", number)


def write_cache(home: Path, jobs: JobStore, number: int) -> None:
    change_manifest(home, number)


def write_text(home: Path, jobs: JobStore, number: int) -> None:
    write_json(home / "texts" / ("0" * 32) / INPUTS, {"format": number})


def write_checkpoint(home: Path, jobs: JobStore, number: int) -> None:
    (state,) = home.glob(f"runs/*/checkpoints/*/{STATE}")
    content = verify_json(state.read_bytes(), STATE)
    state.write_bytes(sign_json({**content, "format": number}))


def write_run(home: Path, jobs: JobStore, number: int) -> None:
    write_json(home / "runs" / "job_a" / MARK, {"format": number})


def write_keys(home: Path, jobs: JobStore, number: int) -> None:
    with (home / "api_keys").open("a") as file:
        file.write(json.dumps({"format": number}) + "\n")


def read_everything(home: Path, jobs: JobStore) -> dict[str, Callable[[], object]]:
    """Return what reads each kind of data."""
    text = home / "texts" / ("0" * 32)
    (cache,) = home.glob("caches/*/manifest.json")
    run = home / "runs" / "job_a"
    (checkpoint,) = run.glob("checkpoints/*")
    return {
        "cache": lambda: read_manifest(cache.parent),
        "token store": lambda: require_format(text, read_object(text, text / INPUTS)),
        "checkpoint": lambda: read_state(checkpoint),
        "run folder": lambda: require_known_run(run),
        "job records": jobs.require_known_format,
        "key file": lambda: key_file.read_keys(home / "api_keys"),
    }


def test_everything_of_this_version_is_read_as_it_is(home: Path, jobs: JobStore) -> None:
    jobs.create(make_config("quick"))
    for read in read_everything(home, jobs).values():
        read()


@pytest.mark.parametrize(
    ("name", "write", "older"),
    [
        ("cache", write_cache, 1),
        ("token store", write_text, None),
        ("checkpoint", write_checkpoint, 1),
        ("run folder", write_run, None),
        ("job records", write_records, 1),
        ("key file", write_keys, None),
    ],
)
def test_another_format_is_refused_with_both_numbers_and_the_remedy(
    name: str,
    write: Callable[[Path, JobStore, int], None],
    older: int | None,
    home: Path,
    jobs: JobStore,
) -> None:
    jobs.create(make_config("quick"))
    for number in filter(None, (older, 99)):
        write(home, jobs, number)
        for other, read in read_everything(home, jobs).items():
            if other != name:
                read()
                continue
            with pytest.raises(PotstillError) as caught:
                read()
            detail = caught.value.detail
            assert str(number) in detail and caught.value.remedy
            assert len(re.findall(r"(?:format|reads|version|than) (\d+)", detail)) >= 2


def test_the_first_records_are_not_taken_for_those_of_today(jobs: JobStore) -> None:
    """They had an index of another name, and no number of their format."""
    jobs.redis.flushall()
    jobs.redis.zadd("kd:jobs", {"job_a": 1})
    with pytest.raises(PotstillError, match="of format 1"):
        jobs.require_known_format()
    assert jobs.redis.keys("*") == ["kd:jobs"]


def test_a_checkpoint_of_another_format_says_which(tmp_path: Path) -> None:
    with pytest.raises(TrainingError, match="format 3, but this version reads 2") as caught:
        read_state(make_checkpoint(tmp_path, 3))
    assert "or a newer one" in caught.value.remedy


def test_a_backup_of_another_format_says_which(tmp_path: Path) -> None:
    (tmp_path / "backup.json").write_text('{"format": 2, "version": "7.0.0"}')
    with pytest.raises(BackupError, match=r"format 2, written by Potstill 7\.0\.0.* format 1"):
        Backup.read(tmp_path)


@pytest.mark.parametrize("command", ["serve", "worker", "up"])
def test_no_part_of_the_service_starts_on_records_of_a_newer_version(
    command: str, parts: Parts
) -> None:
    parts.jobs.redis.set("kd:format", "3")
    places = {"KD_HOME": str(parts.settings.home), "KD_REDIS_URL": parts.server.url}
    done = kd(command, KD_PORT=str(find_free_port()), **places)
    assert done.returncode == 1
    assert "The records are of format 3, and this version of" in done.stderr
    assert "reads format 2." in done.stderr
    assert "Use a newer version" in done.stderr


def test_a_running_api_says_so_too(new_parts: Callable[..., Parts]) -> None:
    parts = new_parts()
    parts.start_api()
    job_id = parts.jobs.create(make_config("quick")).id
    parts.jobs.redis.set("kd:format", "3")
    answer = parts.http.get(f"/jobs/{job_id}")
    assert answer.status_code == 503
    assert "of format 3" in answer.json()["detail"]


FIRST_CALLS: dict[str, Callable[[JobStore], object]] = {
    "create": lambda jobs: jobs.create(make_config("quick")),
    "expire": lambda jobs: jobs.expire(),
    "due": lambda jobs: jobs.due(),
    "hints": lambda jobs: jobs.list_unannounced("train", 3600),
    "change": lambda jobs: jobs.change("cancel", make_job_id()),
    "claim": lambda jobs: jobs.claim(make_job_id(), "train", "w", 5),
    "webhooks": lambda jobs: jobs.lease_webhooks(5, 5),
}


def test_an_empty_server_is_of_this_format(jobs: JobStore) -> None:
    jobs.expire()
    assert jobs.redis.get("kd:format") == "2"
    assert jobs.redis.keys("*") == ["kd:format"]


@pytest.mark.parametrize(
    ("found", "words"),
    [
        ("3", r"NEWERFORMAT the records are of format 3.*reads format 2: use a newer version"),
        ("1", r"OLDERFORMAT the records are of format 1.*reads format 2: use an older version"),
    ],
)
def test_records_of_another_format_are_refused_and_left_alone(
    jobs: JobStore, found: str, words: str
) -> None:
    job_id = jobs.create(make_config("quick")).id
    jobs.redis.set("kd:format", found)
    before = jobs.redis.keys("*")
    record = jobs.redis.hgetall(f"kd:job:{job_id}")
    calls = {
        **FIRST_CALLS,
        "change of this job": lambda jobs: jobs.change("cancel", job_id),
        "view of this job": lambda jobs: jobs.get(job_id),
    }
    for call in calls.values():
        with pytest.raises(ResponseError, match=words):
            call(jobs)
    assert sorted(jobs.redis.keys("*")) == sorted(before)
    assert jobs.redis.hgetall(f"kd:job:{job_id}") == record
