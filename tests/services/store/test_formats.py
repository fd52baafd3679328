"""What a version finds of earlier and later ones, and `kd upgrade`."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from redis.exceptions import ResponseError

from bench.support.harness import Parts, make_config
from bench.support.small.caches import make_cache
from cache.disk import locked, write_file
from cache.manifest import FORMAT_VERSION, sign_json, verify_json
from kd.client.wire.service import WorkerState
from kd.errors import TrainingError
from kd.files import LOCK, MARK, write_json
from kd.text.stored.shard_files import FORMAT as TEXT_FORMAT
from kd.text.stored.shard_files import INPUTS
from kd.training.saved.state_file import FORMAT, STATE, read_format, read_state
from services.settings import Settings
from services.store import key_file
from services.store.backup import Backup, BackupError
from services.store.embedded import find_free_port
from services.store.formats import FORMATS, Data, Format, UpgradeError, examine, rewrite
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


@pytest.fixture
def data(home: Path, jobs: JobStore) -> Data:
    jobs.create(make_config("quick"))
    return Data(Settings(home=home, api_keys_file=home / "api_keys"), jobs.redis)


def change_manifest(home: Path, version: int) -> None:
    (manifest,) = home.glob("caches/*/manifest.json")
    content = verify_json(manifest.read_bytes(), "manifest.json")
    manifest.write_bytes(sign_json({**content, "version": version}))


def test_everything_of_this_version_is_read_as_it_is(data: Data) -> None:
    found = examine(data)
    assert {each.format for each in found} == {each.name for each in FORMATS}
    assert {each.state for each in found} == {"read"}
    assert rewrite(data) == []


@pytest.mark.parametrize(
    ("name", "older", "newer"),
    [
        ("cache", 1, 99),
        ("token store", None, 99),
        ("checkpoint", 1, 99),
        ("run folder", None, 99),
        ("job records", 1, 99),
        ("key file", None, 99),
    ],
)
def test_another_format_is_refused_with_both_numbers_and_the_remedy(
    name: str, older: int | None, newer: int, data: Data
) -> None:
    home, client = data.settings.home, data.client
    assert client is not None
    for number in filter(None, (older, newer)):
        if name == "cache":
            change_manifest(home, number)
        elif name == "token store":
            write_json(home / "texts" / ("0" * 32) / INPUTS, {"format": number})
        elif name == "checkpoint":
            (state,) = home.glob(f"runs/*/checkpoints/*/{STATE}")
            content = verify_json(state.read_bytes(), STATE)
            state.write_bytes(sign_json({**content, "format": number}))
        elif name == "run folder":
            write_json(home / "runs" / "job_a" / MARK, {"format": number})
        elif name == "job records":
            client.set("kd:format", number)
        else:
            with (home / "api_keys").open("a") as file:
                file.write(json.dumps({"format": number}) + "\n")
        (found,) = (each for each in examine(data) if each.format == name)
        assert (found.state, found.number) == ("refused", number)
        assert str(number) in found.detail and found.remedy
        assert len(re.findall(r"(?:format|reads|version|than) (\d+)", found.detail)) >= 2
        assert [each.format for each in examine(data) if each.state != "read"] == [name]


def test_the_first_records_are_not_taken_for_those_of_today(data: Data) -> None:
    """They had an index of another name, and no number of their format."""
    assert data.client is not None
    data.client.flushall()
    data.client.zadd("kd:jobs", {"job_a": 1})
    (found,) = (each for each in examine(data) if each.format == "job records")
    assert (found.state, found.number) == ("refused", 1)
    assert data.client.keys("*") == ["kd:jobs"]


def test_a_checkpoint_of_another_format_says_which(tmp_path: Path) -> None:
    with pytest.raises(TrainingError, match="format 3, but this version reads 2") as caught:
        read_state(make_checkpoint(tmp_path, 3))
    assert "or a newer one" in caught.value.remedy


def test_a_backup_of_another_format_says_which(tmp_path: Path) -> None:
    (tmp_path / "backup.json").write_text('{"format": 2, "version": "7.0.0"}')
    with pytest.raises(BackupError, match=r"format 2, written by Potstill 7\.0\.0.* format 1"):
        Backup.read(tmp_path)


# ---------------------------------------------------------------------- rewriting


def to_three(folder: Path) -> None:
    content = verify_json((folder / STATE).read_bytes(), STATE)
    write_file(folder / STATE, sign_json({**content, "format": 3, "told": True}))


def to_four(folder: Path) -> None:
    content = verify_json((folder / STATE).read_bytes(), STATE)
    write_file(folder / STATE, sign_json({**content, "format": 4}))


def make_next_format(
    rewriters: dict[int, Callable[[Path], None]] | None = None,
) -> tuple[Format, ...]:
    """The table of a version whose checkpoints have the format 4."""
    (checkpoints,) = (each for each in FORMATS if each.name == "checkpoint")
    steps = rewriters or {2: to_three, 3: to_four}
    return (replace(checkpoints, check=read_format, rewriters=steps),)


def test_old_places_are_rewritten_step_by_step_and_once(data: Data) -> None:
    run = data.settings.home / "runs" / "job_b"
    folders = [make_checkpoint(run, number, step) for number, step in ((2, 1), (3, 2), (4, 3))]
    formats = make_next_format()
    assert {each.state for each in examine(data, formats)} == {"read", "rewrite"}
    assert [read_format(each) for each in folders] == [2, 3, 4], "to look changes nothing"
    assert len(rewrite(data, formats)) == 3
    assert [read_format(each) for each in folders] == [4, 4, 4]
    assert verify_json((folders[0] / STATE).read_bytes(), STATE)["told"]
    assert rewrite(data, formats) == []


def test_an_upgrade_that_was_killed_is_finished_by_the_next(data: Data) -> None:
    run = data.settings.home / "runs" / "job_b"
    folders = [make_checkpoint(run, 2, step) for step in range(1, 5)]
    calls = []

    def die_at_the_third(folder: Path) -> None:
        calls.append(folder)
        if len(calls) == 3:
            raise KeyboardInterrupt
        to_three(folder)

    with pytest.raises(KeyboardInterrupt):
        rewrite(data, make_next_format({2: die_at_the_third, 3: to_four}))
    assert {read_format(each) for each in folders} == {2, 4}
    rewrite(data, make_next_format())
    assert {read_format(each) for each in folders} == {4}


def test_nothing_is_rewritten_while_a_worker_or_a_run_is_alive(data: Data, jobs: JobStore) -> None:
    run = data.settings.home / "runs" / "job_b"
    folder = make_checkpoint(run, 2)
    jobs.show_worker(WorkerState(id="cpu:1", stages=["train"]), 600)
    with pytest.raises(UpgradeError, match="alive: cpu:1"):
        rewrite(data, make_next_format())
    jobs.hide_worker("cpu:1")
    with locked(run / LOCK, lambda: None), pytest.raises(UpgradeError, match="alive: job_b"):
        rewrite(data, make_next_format())
    assert read_format(folder) == 2
    assert len(rewrite(data, make_next_format())) == 2


def test_a_rewriter_that_does_nothing_is_found(data: Data) -> None:
    with pytest.raises(UpgradeError, match="rewriter of checkpoint 2 left it at 2"):
        rewrite(data, make_next_format({2: lambda folder: None}))


# ---------------------------------------------------------------------- the command


def test_kd_upgrade_says_that_nothing_is_to_rewrite(home: Path) -> None:
    done = kd("upgrade", "--home", home)
    assert done.returncode == 0, done.stderr
    assert "nothing to rewrite" in done.stdout and "no job store was found" in done.stdout
    found = json.loads(kd("upgrade", "--yes", "--json", "--home", home).stdout)
    assert [(each["format"], each["state"]) for each in found["found"]] == [
        (name, "read") for name in ("cache", "token store", "run folder", "checkpoint")
    ]
    assert (found["rewritten"], found["store"]) == ([], False)


def test_kd_upgrade_refuses_what_it_cannot_read(home: Path) -> None:
    change_manifest(home, 99)
    done = kd("upgrade", "--home", home)
    assert done.returncode == 1
    assert "cannot be read" in done.stdout
    assert (
        f"version 99 is newer than {FORMAT_VERSION}" in done.stderr
        and "Upgrade Potstill" in done.stderr
    )


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
