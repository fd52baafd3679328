"""A whole job whose cache lies in a bucket gives the student of a job with a folder."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bench.stores.proxy import Proxy
from bench.stores.server import KEYS, Server
from cache.checking.verify import verify_cache
from cache.errors import StoreUnfit
from cache.remote.address import StoreAddress
from cache.remote.bucket import Bucket
from kd.config.jobfile import parse_config
from kd.errors import ConfigError
from kd.files import find_caches
from kd.pipeline import run_stage, run_stages
from kd.progress import Event, Monitor
from tests.support.kd.tiny import make_tiny_job

pytestmark = pytest.mark.usefixtures("one_thread")

Job = dict[str, Any]


@pytest.fixture(scope="module")
def job(tiny_teacher: Path, tiny_text: Path) -> Job:
    return make_tiny_job(tiny_teacher, tiny_text, train={"eval_steps": 3, "save_steps": 2})


def put_in(job: Job, store: str) -> Job:
    return {**job, "cache": {**job["cache"], "store": store}}


def read_student(home: Path) -> bytes:
    return (home / "runs" / "x" / "student" / "model.safetensors").read_bytes()


@pytest.mark.long
def test_machines_that_share_a_bucket_alone_make_the_student_of_a_folder(
    job: Job, address: str, tmp_path: Path
) -> None:
    """One machine captures, another one trains; neither sees the other's disk."""
    run_stages(parse_config(job), tmp_path / "plain", tmp_path / "plain" / "runs" / "x")
    events: list[Event] = []
    config = parse_config(put_in(job, address))
    for name, stages in {"one": ("precompute",), "two": ("precompute", "train")}.items():
        home = tmp_path / name
        for stage in stages:
            run_stage(stage, config, home, home / "runs" / "x", Monitor(events.append))
    assert read_student(tmp_path / "two") == read_student(tmp_path / "plain")
    reused = [event.data["reused"] for event in events if event.type == "cache"]
    assert reused == [False, True]
    assert not (tmp_path / "two" / "caches").exists()
    # What is written down anywhere, and what is told to anyone.
    told = json.dumps([event.data for event in events], default=str).encode()
    written = [path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()]
    bucket = Bucket(StoreAddress.parse(address))
    stored = [bucket.get(each.name) for each in bucket.walk("")]
    assert stored
    for secret in KEYS.values():
        assert not any(secret.encode() in data for data in [told, *written, *stored])


@pytest.mark.long
def test_a_cache_in_a_bucket_extends_another_with_the_bytes_of_a_folder(
    job: Job, address: str, tiny_text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cache.writing.writer.FIRST_TAILS_SHARE", 100.0)
    text = tiny_text.read_text(encoding="utf-8")
    grown = tmp_path / "grown.txt"
    found = {}
    for place in ("plain", address):
        grown.write_text(text[:8_000], encoding="utf-8")
        data = {"train": str(grown), "validation": str(tiny_text), "sequence_length": 32}
        wanted: Job = {
            "kind": "precompute",
            "teacher": job["teacher"],
            "data": {**data, "max_eval_samples": 4},
            "cache": {"shard_sequences": 8, **({"store": place} if "://" in place else {})},
        }
        first, second = (tmp_path / f"{len(found)}-{each}" for each in "ab")
        # In a bucket another machine extends what the first one captured.
        other = second if "://" in place else first
        known = run_stage("precompute", parse_config(wanted), first, first / "runs" / "x")
        grown.write_text(text[:12_000], encoding="utf-8")
        wanted["cache"]["extends"] = known.cache["fingerprint"]
        made = run_stage("precompute", parse_config(wanted), other, other / "runs" / "y")
        folder = find_caches(other, wanted["cache"].get("store")) / made.cache["fingerprint"]
        assert verify_cache(folder) == []
        found[place] = (folder / "manifest.json").read_bytes()
    assert found["plain"] == found[address]


@pytest.mark.long
def test_the_operators_store_is_used_where_the_job_names_none(
    job: Job, address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KD_STORE", address)
    result = run_stage("precompute", parse_config(job), tmp_path, tmp_path / "runs" / "x")
    fingerprint = result.cache["fingerprint"]
    bucket = Bucket(StoreAddress.parse(address))
    assert bucket.get(f"{fingerprint}/manifest.json")
    verify = parse_config({"kind": "verify", "cache": {"fingerprint": fingerprint}})
    found = run_stage("precompute", verify, tmp_path / "b", tmp_path / "b" / "runs" / "y")
    assert found.cache["verified"]


def test_a_bucket_that_will_not_do_ends_the_job_before_the_text_is_read(
    job: Job,
    address: str,
    s3_server: Server,
    reach: Callable[[int], None],
    objects: Callable[[], set[str]],
    tmp_path: Path,
) -> None:
    proxy = Proxy(s3_server.port, lambda *_: "deaf")
    with proxy.running():
        reach(proxy.port)
        config = parse_config(put_in(job, address))
        with pytest.raises(StoreUnfit, match="create only if there is none"):
            run_stage("precompute", config, tmp_path, tmp_path / "runs" / "x")
        reach(s3_server.port)
        assert objects() == set()
    assert not (tmp_path / "texts").exists()


def test_an_address_that_is_wrong_is_a_problem_of_its_field(job: Job) -> None:
    with pytest.raises(ConfigError, match="s3://bucket/prefix") as found:
        parse_config(put_in(job, "http://bucket/a"))
    assert [each.pointer for each in found.value.problems] == ["/cache/store"]
    with pytest.raises(ConfigError) as found:
        parse_config(put_in(job, "s3://me:hidden@bucket/a"))
    assert "hidden" not in str(found.value)


@pytest.mark.long
def test_a_folder_is_a_store_too(job: Job, tmp_path: Path) -> None:
    folder = tmp_path / "elsewhere"
    result = run_stage(
        "precompute", parse_config(put_in(job, str(folder))), tmp_path, tmp_path / "runs" / "x"
    )
    assert (folder / result.cache["fingerprint"] / "manifest.json").is_file()
