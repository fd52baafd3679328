"""What only the operator sees, over real HTTP: keys, storage and health."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

import httpx
import pytest

from bench.support.harness import Parts, make_config
from bench.support.small.caches import make_cache, make_identity
from bench.support.waiting import wait_until
from kd.client.wire.service import WorkerState
from kd.python.version import read_version
from services.store.callers import Caller
from services.store.key_file import create_key, read_keys
from services.store.key_use import KeyUse
from tests.support.services.api import client, problem, serving, tell

DAY = 86_400.0


@dataclass
class Office:
    """A service whose rules of retention name caches, with an admin and another caller."""

    parts: Parts
    file: Path
    root: httpx.Client
    ann: httpx.Client


@pytest.fixture(scope="module")
def office(_server_binary: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Office]:
    file = tmp_path_factory.mktemp("keys") / "keys.jsonl"
    root, _ = create_key(file, "root", ["admin"])
    ann, _ = create_key(file, "ann", ["write"], timedelta(days=30), team="nlp")
    create_key(file, "idle", ["read"])
    rules = {"retain_caches_unused_days": 2.0, "retain_hour": 3}
    with (
        serving(tmp_path_factory.mktemp("api"), api_keys_file=file, **rules) as parts,
        client(parts, root) as admin,
        client(parts, ann) as caller,
    ):
        yield Office(parts, file, admin, caller)


@pytest.mark.parametrize("path", ["/keys", "/storage", "/health"])
def test_only_an_admin_sees_these(office: Office, path: str) -> None:
    assert office.root.get(path).status_code == 200
    problem(office.ann.get(path), 403)
    problem(office.parts.http.get(path), 401)


def test_keys_are_listed_without_anything_that_could_be_used(office: Office) -> None:
    office.ann.get("/jobs")
    answer = office.root.get("/keys")
    found = {each["name"]: each for each in answer.json()["data"]}
    assert list(found) == ["root", "ann", "idle"]
    assert found["ann"]["team"] == "nlp" and found["root"]["team"] == "root"
    assert (found["ann"]["scopes"], found["ann"]["expired"]) == (["write"], False)
    expires = datetime.fromisoformat(found["ann"]["expires_at"])
    assert abs((expires - datetime.now(UTC)).total_seconds() - 30 * DAY) < 600
    used = datetime.fromisoformat(found["ann"]["last_used_at"])
    assert abs((datetime.now(UTC) - used).total_seconds()) < 600
    assert found["idle"]["last_used_at"] is None
    for key in read_keys(office.file):
        assert key.sha256 not in answer.text
        assert found[key.name]["id"] == key.id
    assert "kd_" not in answer.text


def test_a_use_is_noted_once_a_minute(office: Office) -> None:
    redis = office.parts.jobs.redis
    use = KeyUse(redis)
    use.note("abc")
    redis.hset("kd:keys:used", "abc", "1000")
    use.note("abc")
    assert use.read()["abc"] == datetime.fromtimestamp(1, UTC)
    KeyUse(redis).note("abc")
    assert use.read()["abc"].year > 2000


@pytest.mark.usefixtures("_server_binary")
def test_without_keys_none_are_listed(tmp_path: Path) -> None:
    with serving(tmp_path) as parts:
        assert parts.http.get("/keys").json() == {"required": False, "data": []}


def test_storage_tells_what_would_be_removed_and_what_is_needed(office: Office) -> None:
    settings = office.parts.settings
    old, needed = (
        make_cache(settings.caches, make_identity(train_sequences=count)) for count in (12, 13)
    )
    then = time.time() - 3 * DAY
    for folder in (old, needed):
        os.utime(folder / "manifest.json", (then, then))
    config = make_config("reads", cache={"fingerprint": needed.name})
    job_id = office.parts.jobs.create(config, Caller("ann")).id
    (settings.run_dir(job_id)).mkdir(parents=True)
    (settings.run_dir(job_id) / "log.txt").write_text("x" * 1000)
    (settings.runs / "of-kd-run").mkdir()
    (settings.runs / "of-kd-run" / "weights").write_bytes(b"x" * 900)
    found = office.root.get("/storage").json()
    kinds = {each["kind"]: each for each in found["kinds"]}
    assert (kinds["caches"]["items"], kinds["runs"]["items"]) == (2, 2)
    assert kinds["runs"]["bytes"] >= 1900
    assert kinds["runs"]["largest"][0] | {"bytes": 0} == {
        "kind": "runs", "name": job_id, "bytes": 0, "reason": None, "age_seconds": None,
        "kept_by": f"the job {job_id} has not ended",
    }  # fmt: skip
    (free,) = found["removable"]
    assert set(free) == set(kinds["runs"]["largest"][0]), "no path of the server"
    assert (free["kind"], free["name"], free["kept_by"]) == ("caches", old.name, None)
    assert free["reason"] == "not used for 3 days"
    assert found["removable_bytes"] == free["bytes"] > 0
    (kept,) = found["protected"]
    assert kept["name"] == needed.name
    assert kept["kept_by"] == f"the job {job_id}, which has not ended"
    assert found["nightly_hour"] == 3
    rules = {each["kind"]: each["after_days"] for each in found["rules"]}
    assert (rules["caches"], rules["leftovers"]) == (2.0, 7.0)
    assert found["disk"]["total_bytes"] > found["disk"]["free_bytes"] > 0
    assert old.is_dir(), "nothing is removed"


def test_health_says_what_is_wrong(office: Office) -> None:
    jobs = office.parts.jobs
    found = wait_until(lambda: _ask(office, "reconciler_age_seconds"))
    assert found["version"] == read_version()
    assert found["redis"]["persistent"] in (True, False)
    assert abs(found["redis"]["clock_ahead_seconds"]) < 5
    before = set(found["problems"])
    jobs.create(make_config("waits"))
    waiting = office.root.get("/health").json()["queues"][1]
    assert waiting["stage"] == "train" and waiting["waiting"] >= 1
    said = f"{waiting['waiting']} jobs wait for stage train, which no worker serves."
    assert said in office.root.get("/health").json()["problems"]
    jobs.show_worker(WorkerState(id="w:1", stages=["train"], version="0.0.1"), 60)
    found = office.root.get("/health").json()
    assert found["worker_versions"] == {"0.0.1": 1}
    assert found["queues"][1]["workers"] == 1
    assert set(found["problems"]) - before == {
        "Workers are of another version than the server: 0.0.1."
    }
    jobs.hide_worker("w:1")


def test_a_store_that_removes_keys_is_told_and_takes_no_traffic(office: Office) -> None:
    redis = office.parts.jobs.redis
    redis.config_set("maxmemory", "100mb")
    redis.config_set("maxmemory-policy", "allkeys-lru")
    try:
        problem(office.root.get("/readyz"), 503, "store-unsuitable")
        assert "allkeys-lru" in office.root.get("/health").json()["problems"][0]
    finally:
        redis.config_set("maxmemory", "0")
        redis.config_set("maxmemory-policy", "noeviction")


def test_a_store_whose_user_may_not_ask_is_told_as_one_that_answers(office: Office) -> None:
    redis = office.parts.jobs.redis
    redis.execute_command("ACL", "SETUSER", "default", "-info")
    try:
        answer = office.root.get("/health")
    finally:
        redis.execute_command("ACL", "SETUSER", "default", "+info")
    assert answer.status_code == 200
    found = answer.json()
    assert (found["redis"]["version"], found["redis"]["persistent"]) == ("", True)
    told = [each for each in found["problems"] if "Redis" in each]
    assert told == [
        "This user of Redis may not call INFO: its memory and persistence are not known."
    ]


def _ask(office: Office, name: str) -> dict[str, object] | None:
    found: dict[str, object] = office.root.get("/health").json()
    return found if found[name] is not None else None


def test_curves_are_those_of_the_caller(office: Office) -> None:
    jobs = office.parts.jobs
    for owner in ("ann", "ben"):
        claim = jobs.claim(jobs.create(make_config(owner), Caller(owner)).id, "train", "test", 600)
        assert claim is not None
        tell(office.parts, claim, ("metrics", {"step": 1, "loss": 2.0}), ("metrics", {"step": 2}))
    ids = [each["id"] for each in office.root.get("/jobs").json()["data"]]
    seen = office.ann.get("/curves", params={"jobs": ",".join(ids)}).json()["data"]
    assert [(each["steps"], each["values"]) for each in seen] == [([1], [2.0])]
    every = office.root.get("/curves", params={"jobs": ",".join(ids)}).json()["data"]
    assert len(every) == 2
    problem(office.root.get("/curves"), 422)
