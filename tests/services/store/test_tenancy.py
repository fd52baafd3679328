"""Limits of a job: other owners' runs and caches, links that change in time, and secrets."""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from bench.support.harness import Parts, is_alive, make_config
from bench.support.waiting import wait_until
from cache.errors import StorageError
from kd.preflight.limits import AllowedModel
from kd.progress import Event
from services.store.callers import LOCAL_CALLER, Caller
from services.store.jobs.leases import EventBatch
from services.store.key_file import create_key
from services.store.tenancy import build_confinement
from tests.support.services.api import UNLIMITED, client, inputs, problem, valid

MakeParts = Callable[..., Parts]


def test_a_job_reads_the_runs_of_its_owner_and_those_of_everybody_where_there_are_no_keys(
    parts: Parts,
) -> None:
    alice, bob = (
        parts.jobs.create(make_config("quick"), Caller(name)).id for name in ("alice", "bob")
    )
    unknown = "job_" + "0" * 26
    found = {
        owner: [
            build_confinement(parts.settings, parts.jobs, owner).may_read_run(job)
            for job in (alice, bob, unknown)
        ]
        for owner in ("alice", "bob", "carol", LOCAL_CALLER.name)
    }
    assert found == {
        "alice": [True, False, False],
        "bob": [False, True, False],
        "carol": [False, False, False],
        "local": [True, True, True],
    }


def test_a_job_reads_the_caches_that_its_owner_s_jobs_made_or_read(parts: Parts) -> None:
    fingerprint = "c" * 32
    made = parts.jobs.create(make_config("quick", "distill"), Caller("alice")).id
    claim = parts.jobs.claim(made, "precompute", "test", 60)
    assert claim is not None
    parts.jobs.beat(claim, 60, EventBatch(1, (Event("cache", {"fingerprint": fingerprint}),)))
    may = {
        owner: build_confinement(parts.settings, parts.jobs, owner).may_read_cache
        for owner in ("alice", "bob", "local")
    }
    assert {owner: granted(fingerprint) for owner, granted in may.items()} == {
        "alice": True,
        "bob": False,
        "local": True,
    }
    assert not may["alice"]("d" * 32)


def test_without_keys_a_job_reads_what_the_user_of_this_host_may(
    parts: Parts, tmp_path: Path
) -> None:
    home = tmp_path / "home"
    root = tmp_path / "root"
    text = tmp_path / "text.txt"
    free = parts.settings.model_copy(
        update={"home": home, "root": root, "data_roots": (), "api_keys_file": None}
    )
    named = free.model_copy(update={"data_roots": (tmp_path / "named",)})
    keyed = free.model_copy(update={"api_keys_file": tmp_path / "keys"})
    limits = [
        build_confinement(settings, parts.jobs, LOCAL_CALLER.name)
        for settings in (free, named, keyed)
    ]
    assert [each.permits(text) for each in limits] == [True, False, False]
    assert [each.free_datasets for each in limits] == [True, False, False]
    assert not build_confinement(free, parts.jobs, LOCAL_CALLER.name).permits(
        home / "redis" / "password"
    )


def test_without_keys_the_root_may_lie_in_a_hidden_folder(parts: Parts, tmp_path: Path) -> None:
    hidden = tmp_path / ".venv"
    update = {"root": hidden / "site", "data_roots": (), "api_keys_file": None}
    limits = build_confinement(
        parts.settings.model_copy(update=update), parts.jobs, LOCAL_CALLER.name
    )
    assert limits.permits(hidden / "site" / "text.txt")
    assert not limits.permits(hidden / "text.txt")
    assert not limits.permits(hidden / "site" / ".env")


def test_the_operator_s_files_may_not_be_read_and_the_models_listed_may(
    parts: Parts, tmp_path: Path
) -> None:
    root = tmp_path / "root"
    root.mkdir()
    (tmp_path / "llama").mkdir()
    for name in ("keys", "webhook", "models"):
        (root / name).write_text(f"{tmp_path}/llama\norg/x@1\n" if name == "models" else "secret")
    changes: dict[str, Any] = {
        "root": root,
        "api_keys_file": root / "keys",
        "webhook_secret_file": root / "webhook",
    }
    settings = parts.settings.model_copy(update=changes | {"model_allow_list": root / "models"})
    limits = build_confinement(settings, parts.jobs, "alice")
    assert [limits.permits(root / name) for name in ("keys", "webhook", "models", "text")] == [
        False,
        False,
        False,
        True,
    ]
    assert limits.permits(tmp_path / "llama") and not limits.permits(tmp_path / "other")
    assert limits.models == (AllowedModel(f"{tmp_path}/llama"), AllowedModel("org/x", "1"))
    (root / "models").unlink()
    with pytest.raises(StorageError, match="KD_MODEL_ALLOW_LIST"):
        build_confinement(settings, parts.jobs, "alice")


# With the real API, the real worker and a child that starts like the real one


@pytest.fixture
def house(new_parts: MakeParts, tmp_path: Path) -> tuple[Parts, Path]:
    """An API without a worker, and a folder that jobs may read, with the inputs of ``valid``."""
    data = tmp_path / "data"
    inputs(data / "model")
    parts = new_parts(**UNLIMITED | {"data_roots": (data,)})
    parts.start_api()
    return parts, data


@pytest.mark.parametrize(
    "target",
    [
        "outside",
        pytest.param("another's run", marks=pytest.mark.long),
        pytest.param("the service's own", marks=pytest.mark.long),
    ],
)
def test_a_link_that_is_turned_between_post_and_run_fails_the_job(
    house: tuple[Parts, Path], tmp_path: Path, target: str
) -> None:
    parts, data = house
    (tmp_path / "outside").mkdir()
    other = parts.jobs.create(make_config("quick"), Caller("bob")).id
    turned = {
        "outside": tmp_path / "outside",
        "another's run": parts.settings.run_dir(other),
        "the service's own": parts.settings.home / "logs",
    }[target]
    turned.mkdir(parents=True, exist_ok=True)
    (turned / "text.txt").write_text("Not for everybody.")
    (data / "inner").mkdir()
    (data / "inner/text.txt").write_text("For everybody.")
    (data / "now").symlink_to(data / "inner")
    body = valid("quick", f"{data}/model") | {"data": {"train": f"{data}/now/text.txt"}}
    answer = parts.http.post("/jobs", json=body)
    assert answer.status_code == 202, answer.text
    kept = parts.http.post("/jobs", json=valid("quick", f"{data}/model"))
    (data / "now").unlink()
    (data / "now").symlink_to(turned)
    parts.jobs.redis.hset(
        f"kd:job:{answer.json()['id']}", "owner", "alice"
    )  # without keys, all would be one owner's
    parts.start_worker()
    job = parts.wait_for(answer.json()["id"], "failed", "succeeded")
    assert job.status == "failed" and job.error is not None and job.error.type == "invalid_config"
    assert "data.train.0" in job.error.detail and "outside the folders" in job.error.detail
    assert parts.wait_for(kept.json()["id"], "failed", "succeeded").status == "succeeded"


def test_what_was_outside_at_post_is_refused_there(
    house: tuple[Parts, Path], tmp_path: Path
) -> None:
    parts, data = house
    (tmp_path / "secret.txt").write_text("A secret.")
    (data / "link.txt").symlink_to(tmp_path / "secret.txt")
    for source in (
        str(tmp_path / "secret.txt"),
        f"{data}/link.txt",
        str(data),
        f"{data}/../secret.txt",
    ):
        document = problem(
            parts.http.post(
                "/jobs", json=valid("quick", f"{data}/model") | {"data": {"train": source}}
            ),
            422,
        )
        assert [each.pointer for each in document.errors] == ["/data/train/0"]
    url = {
        "backend": "http",
        "model": "m",
        "url": "http://169.254.169.254/",
        "tokenizer": f"{data}/model",
    }
    body = valid("quick", f"{data}/model", "precompute") | {
        "teacher": url,
        "cache": {"profile": "topk"},
    }
    document = problem(parts.http.post("/jobs", json=body), 422)
    assert [each.pointer for each in document.errors] == ["/teacher/url"]


# Secrets


@pytest.mark.long
def test_a_secret_is_in_no_log_no_record_no_event_no_file_and_no_process_list(
    new_parts: MakeParts, tmp_path: Path
) -> None:
    """Use every secret while jobs run, fail and are refused; then search everything for them."""
    text = inputs(tmp_path / "inputs")
    keys = tmp_path / "keys"
    key, _ = create_key(keys, "alice", ["write"])
    webhook = tmp_path / "webhook"
    webhook.write_text("whsec_" + "QUJD" * 8 + secrets.token_hex(16))
    webhook.chmod(0o600)
    parts = new_parts(
        **UNLIMITED | {"data_roots": (text,), "api_keys_file": keys, "webhook_secret_file": webhook}
    )
    canaries = {
        "the API key": key,
        "a wrong key": "kd_" + secrets.token_urlsafe(32),
        "the webhook's": webhook.read_text(),
        "the hub's": "hf_" + secrets.token_hex(17),
        "the teacher's": "sk-" + secrets.token_hex(20),
        "the command line's": "kd_" + secrets.token_urlsafe(32),
    }
    environment = {
        "HF_TOKEN": canaries["the hub's"],
        "KD_TEACHER_KEY": canaries["the teacher's"],
        "KD_API_KEY": canaries["the command line's"],
    }
    processes = [
        parts.start("services.api", **environment),
        parts.start("services.worker", **environment),
    ]
    wait_until(lambda: parts.answers("/healthz") and parts.jobs.list_workers())
    with client(parts, key) as alice, client(parts, canaries["a wrong key"]) as stranger:
        jobs = [
            alice.post("/jobs", json=valid(name, text)).json()["id"]
            for name in ("quick", "fails", "buggy", "endless")
        ]
        running = jobs[-1]
        parts.wait_for(jobs[0], "succeeded")
        for job, status in zip(jobs[1:3], ("failed", "failed"), strict=True):
            parts.wait_for(job, status)
        child = parts.child_pid(running)
        shown = [
            stranger.post("/jobs", json=valid("quick", text)),
            stranger.get(f"/jobs/{running}"),
            alice.post("/jobs", json={"lose": 1}),
            alice.get("/nowhere", params={"token": key}),
            alice.get(f"/jobs/{jobs[1]}/logs"),
            alice.get("/workers"),
            alice.get(f"/jobs/{jobs[1]}"),
        ]
        lines = process_list()
        own = Path(f"/proc/{child}/environ").read_text()
        assert any("bench.support.scripted_child" in line for line in lines)
        alice.post(f"/jobs/{running}/cancel")
        parts.wait_for(running, "cancelled")
    assert [answer.status_code for answer in shown[:4]] == [401, 401, 422, 404]
    parts.jobs.redis.bgrewriteaof()
    password = parts.server.url.partition("@")[0].rpartition(":")[2]
    assert len(password) > 16
    everything = {
        "answers": [answer.text + str(answer.headers) for answer in shown],
        "the process list": lines,
        "the store": stored(parts),
        "files": read_files(parts),
    }
    for name, secret in {**canaries, "the store's": password}.items():
        for place, texts in everything.items():
            assert not any(secret in found for found in texts), f"{name} secret is in {place}"
    kept = {
        name
        for name in (*canaries, "the store's")
        if {**canaries, "the store's": password}[name] in own
    }
    assert kept <= {"the hub's", "the teacher's"}, (
        "a run gets what it needs to load models, and nothing else"
    )
    assert all(is_alive(process.pid) for process in processes)


def process_list() -> list[str]:
    """The command line of every visible process."""
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdecimal() and int(folder.name) != os.getpid():
            try:
                found.append((folder / "cmdline").read_bytes().decode("latin-1"))
            except OSError:  # it has ended
                continue
    return found


def stored(parts: Parts) -> list[str]:
    """Every value in the store, of any type."""
    redis: Any = parts.jobs.redis
    read = {
        "string": redis.get,
        "hash": redis.hgetall,
        "set": redis.smembers,
        "list": lambda key: redis.lrange(key, 0, -1),
        "zset": lambda key: redis.zrange(key, 0, -1, withscores=True),
        "stream": redis.xrange,
    }
    values = [
        key + json.dumps(read[redis.type(key)](key), default=str)
        for key in redis.scan_iter("*", count=1000)
    ]
    assert len(values) > 10
    return values


def read_files(parts: Parts) -> list[str]:
    """The content of every file; the store may replace its own while it is read."""
    found = []
    for file in files_of(parts):
        with suppress(FileNotFoundError):
            found.append(file.read_bytes().decode("latin-1"))
    return found


def files_of(parts: Parts) -> Iterator[Path]:
    """Every file below home except the one with the store's password."""
    found = [path for path in parts.settings.home.rglob("*") if path.is_file()]
    kept = parts.settings.home / "redis/password"
    assert kept.stat().st_mode & 0o077 == 0
    found.remove(kept)
    assert {"log.txt", "services.api-0.log", "services.worker-1.log"} <= {
        path.name for path in found
    }
    yield from found
