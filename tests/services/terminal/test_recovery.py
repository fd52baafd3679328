"""``kd jobs adopt`` restores a record, and `kd gc` removes a run without one, or by the rules."""

from __future__ import annotations

import json
import os
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from bench.support.harness import Parts, make_config
from bench.support.small.caches import make_cache, make_identity
from cache.disk import locked, sum_file_sizes
from kd.files import LOCK, write_json
from services.settings import Settings
from services.store.jobs.records import make_job_id
from services.terminal.commands import retention
from services.terminal.console import format_value
from tests.support.commands import kd

FINGERPRINT = "f" * 32


def make_run(parts: Parts, kind: str = "distill", *files: str, **changes: object) -> Path:
    """The folder of a run without a record, as a run of ``kind`` leaves it."""
    folder = parts.settings.run_dir(make_job_id())
    folder.mkdir(parents=True)
    (folder / LOCK).touch()
    write_json(
        folder / "config.json", make_config("quick", kind, **changes).model_dump(mode="json")
    )
    for name in files:
        write_json(folder / name, {"fingerprint": FINGERPRINT, "problems": []})
    return folder


def make_old(*folders: Path) -> None:
    for folder in folders:
        for path in (*folder.rglob("*"), folder):
            os.utime(path, (0, 0))


def command(parts: Parts, *arguments: object, answer: str = "") -> subprocess.CompletedProcess[str]:
    environment = {"KD_HOME": str(parts.settings.home), "KD_REDIS_URL": parts.server.url}
    return kd(*arguments, answer=answer, **environment)


# ---------------------------------------------------------------------- adopt


@pytest.mark.long
def test_an_ended_run_is_adopted_with_its_artifacts(parts: Parts) -> None:
    folder = make_run(parts, "distill", "cache.json", "report.json", labels={"team": "nlp"})
    (folder / "student").mkdir()
    done = command(parts, "jobs", "adopt", folder)
    assert (done.returncode, done.stdout) == (0, f"{folder.name}: succeeded\n"), done.stderr
    job = parts.job(folder.name)
    assert (job.status, job.stage, job.kind, job.owner) == (
        "succeeded",
        "train",
        "distill",
        "local",
    )
    assert job.labels == {"team": "nlp"} and job.error is None
    assert job.cache is not None and job.cache.fingerprint == FINGERPRINT
    assert job.artifacts == {name: str(folder / name) for name in ("student", "report.json")}
    again = command(parts, "jobs", "adopt", folder)
    assert (again.returncode, again.stdout) == (0, f"{folder.name}: has a record already\n")
    other = make_run(parts, "distill", "cache.json", "report.json")
    told = json.loads(command(parts, "jobs", "adopt", folder, other, "--json").stdout)
    assert told == [
        {"id": folder.name, "adopted": False, "status": None},
        {"id": other.name, "adopted": True, "status": "succeeded"},
    ]
    assert parts.jobs.change("delete", folder.name).outcome == "done"


@pytest.mark.long
@pytest.mark.parametrize(
    "files, stage", [((), "precompute"), (("cache.json",), "train")], ids=["capture", "training"]
)
def test_a_run_that_had_not_ended_is_adopted_as_failed_and_a_retry_continues_it(
    parts: Parts, files: tuple[str, ...], stage: str
) -> None:
    before = parts.jobs.create(make_config("quick")).id
    changes = {"depends_on": [before], "webhook": "https://example.org/x"}
    folder = make_run(parts, "distill", *files, **changes)
    done = command(parts, "jobs", "adopt", folder, "--owner", "team")
    assert done.returncode == 0 and f"kd jobs retry {folder.name}" in done.stdout
    job = parts.job(folder.name)
    assert (job.status, job.stage, job.owner) == ("failed", stage, "team")
    assert job.error is not None and job.error.type == "record_lost"
    assert parts.jobs.redis.zcard("kd:webhooks") == 0
    assert parts.jobs.change("retry", folder.name).status == "queued"
    claim = parts.jobs.claim(folder.name, stage, "w", 5)
    assert claim is not None and claim.attempt == 1
    assert parts.jobs.finish(claim, "succeeded") == "succeeded"


@pytest.mark.long
def test_what_is_no_run_is_refused_and_nothing_is_adopted(parts: Parts, tmp_path: Path) -> None:
    good = make_run(parts)
    empty = parts.settings.run_dir(make_job_id())
    empty.mkdir()
    held = make_run(parts)
    named = parts.settings.home / "runs" / "mine"
    named.mkdir()
    with locked(held / LOCK):
        for folder, why in (
            (empty, "has no config.json"),
            (held, "is in use"),
            (named, "its name is not a job id"),
            (tmp_path, "is not a folder below"),
        ):
            refused = command(parts, "jobs", "adopt", good, folder)
            assert refused.returncode == 1 and why in refused.stderr, refused.stderr
    assert parts.jobs.get(good.name) is None


# ---------------------------------------------------------------------- gc


@pytest.mark.long
def test_gc_removes_old_runs_without_a_record_and_nothing_else(parts: Parts) -> None:
    old = make_run(parts)
    young = make_run(parts)
    held = make_run(parts)
    known = parts.settings.run_dir(parts.jobs.create(make_config("quick")).id)
    named = parts.settings.home / "runs" / "mine"
    for folder in (known, named):
        folder.mkdir(exist_ok=True)
        (folder / "config.json").write_text("{}")
    make_old(old, held, known, named)
    with locked(held / LOCK):
        listed = command(parts, "gc", "--json")
        assert json.loads(listed.stdout)["removed"] is False
        assert [item["path"] for item in json.loads(listed.stdout)["items"]] == [str(old)]
        assert json.loads(listed.stdout)["local_runs"] == {"number": 1, "bytes": 2}
        refused = command(parts, "gc", answer="n\n")
        assert refused.returncode == 1 and str(old) in refused.stdout and old.is_dir()
        done = command(parts, "gc", "--yes")
        assert command(parts, "gc").stdout == "nothing to remove\n"
    assert done.returncode == 0 and "1 of 1 removed" in done.stdout, done.stderr
    assert not old.exists()
    assert all(folder.is_dir() for folder in (young, held, known, named))


@pytest.mark.long
def test_gc_lists_what_the_rules_remove_and_what_stays(parts: Parts, tmp_path: Path) -> None:
    home = tmp_path / "home"
    folders = []
    for name in ("1", "2"):
        identity = make_identity(train_sequences=3, validation_sequences=1)
        identity = replace(identity, data=replace(identity.data, sha256=name * 64))
        folders.append(make_cache(home / "caches", identity))
        make_old(folders[-1])
    free, needed = folders
    job_id = parts.jobs.create(make_config("waits", cache={"fingerprint": needed.name})).id
    environment = {"KD_HOME": str(home), "KD_REDIS_URL": parts.server.url}
    assert kd("gc", **environment).stdout == "nothing to remove\n", "no rule is set"
    environment["KD_RETAIN_CACHES_UNUSED_DAYS"] = "30"
    listed = json.loads(kd("gc", "--json", **environment).stdout)
    (item,), (kept,) = listed["items"], listed["kept"]
    assert (item["kind"], item["path"], item["kept_by"]) == ("caches", str(free), None)
    assert item["bytes"] > 0 and item["age_seconds"] > 30 * 86400 and "not used" in item["reason"]
    assert (kept["path"], kept["kept_by"]) == (
        str(needed),
        f"the job {job_id}, which has not ended",
    )
    declined = kd("gc", answer="n\n", **environment)
    assert declined.returncode == 1 and str(free) in declined.stdout and free.is_dir()
    assert f"{needed} stays: the job {job_id}" in declined.stderr
    done = kd("gc", answer="y\n", **environment)
    assert (done.returncode, free.exists(), needed.exists()) == (0, False, True)
    assert f"1 of 1 removed, {format_value(item['bytes'], 'bytes')}" in done.stdout
    forced = kd("gc", "--force", "--yes", "--json", **environment)
    assert [each["path"] for each in json.loads(forced.stdout)["items"]] == [str(needed)]
    written = (home / "audit" / "audit.jsonl").read_text()
    entries = [json.loads(line) for line in written.splitlines()]
    assert [(each["action"], each["target"], each["kind"]) for each in entries] == [
        ("retention.remove", folder.name, "caches") for folder in (free, needed)
    ]
    freed = {
        labels["kind"]: value
        for name, labels, value in parts.jobs.read_counters()
        if name == "kd_retention_freed_bytes_total"
    }
    assert freed["caches"] > item["bytes"]


@pytest.mark.long
@pytest.mark.parametrize("arguments", [("gc", "--yes"), ("jobs", "adopt", "{run}")])
def test_without_the_job_store_nothing_is_done(parts: Parts, arguments: tuple[str, ...]) -> None:
    old = make_run(parts)
    make_old(old)
    asked = [each.format(run=old) for each in arguments]
    environment = {"KD_HOME": str(parts.settings.home), "KD_REDIS_URL": "redis://127.0.0.1:1/0"}
    done = kd(*asked, **environment)
    assert done.returncode == 1 and "The job store does not answer" in done.stderr
    assert old.is_dir()


def test_only_runs_without_a_job_are_measured_as_local(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in (make_job_id(), "mine"):
        (tmp_path / "runs" / name).mkdir(parents=True)
    (tmp_path / "runs" / "mine" / "log.txt").write_text("a line")
    measured: list[Path] = []

    def measure(folder: Path) -> int:
        measured.append(folder)
        return sum_file_sizes(folder)

    monkeypatch.setattr("cache.disk.sum_file_sizes", measure)
    found = retention._measure_local_runs(Settings(home=tmp_path))
    assert found == {"number": 1, "bytes": 6}
    assert measured == [tmp_path / "runs" / "mine"]
