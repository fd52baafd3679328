"""API and commands where caches lie in a bucket."""

import json
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from pydantic import ValidationError

from bench.stores.proxy import Proxy
from bench.stores.server import KEYS, Server
from bench.support.harness import Parts
from bench.support.small.caches import make_cache
from bench.support.waiting import wait_until
from cache.remote.address import bind_caches
from services.settings import Settings
from services.terminal.exit_codes import FAILED
from tests.support.commands import kd
from tests.support.kd.tiny import make_tiny_job
from tests.support.services.api import problem, serving, valid


@pytest.fixture
def api(_server_binary: Path, address: str, tmp_path: Path) -> Iterator[Parts]:
    with serving(tmp_path / "api", store=address) as parts:
        yield parts


def test_the_api_shows_and_removes_caches_that_other_machines_captured(
    api: Parts, address: str, tmp_path: Path
) -> None:
    folder = make_cache(bind_caches(tmp_path / "elsewhere", address))
    [entry] = api.http.get("/caches").json()["data"]
    assert (entry["fingerprint"], entry["complete"]) == (folder.name, True)
    detail = api.http.get(f"/caches/{folder.name}").json()
    assert detail["bytes"] == entry["bytes"] > 0
    assert api.http.get(f"/caches/{'0' * 32}").status_code == 404
    assert api.http.delete(f"/caches/{folder.name}").status_code == 204
    assert api.http.get("/caches").json()["data"] == []


def test_a_job_of_a_service_cannot_choose_where_credentials_are_used(api: Parts) -> None:
    text = str(api.settings.home / "inputs")
    config = valid("x", text, "distill", cache={"store": "s3://somebody-elses/bucket"})
    answer = api.http.post("/jobs", json=config)
    body = problem(answer, 422)
    assert "/cache/store" in body.model_dump_json(), body
    config["cache"]["store"] = api.settings.store
    answer = api.http.post("/jobs", json=config)
    assert answer.status_code == 202, answer.text
    assert not any(secret in answer.text for secret in KEYS.values())
    log = "".join(path.read_text() for path in (api.settings.home / "logs").iterdir())
    assert not any(secret in log for secret in KEYS.values())


@pytest.mark.long
@pytest.mark.usefixtures("_server_binary")
def test_workers_that_share_no_disk_make_the_student_of_one_machine(
    address: str, tiny_teacher: Path, tiny_text: Path, tmp_path: Path
) -> None:
    """API, capture and training have a data folder each, and share Redis and the bucket."""
    job = make_tiny_job(tiny_teacher, tiny_text)
    students = []
    for name, store in (("plain", None), ("far", address)):
        root = tmp_path / name
        parts = Parts(
            root / "api", "services.worker.stage_child", store=store, lease_seconds=30.0,
            silence_seconds=600.0,
        )  # fmt: skip
        try:
            parts.start_api()
            for queue in ("precompute", "train"):
                home = root / ("api" if store is None else queue)
                home.mkdir(exist_ok=True)
                parts.start("services.worker", queue, KD_HOME=str(home))
            job_id = parts.http.post("/jobs", json=job).json()["id"]
            ended = parts.wait_for(job_id, "succeeded", "failed", seconds=300)
            assert ended.status == "succeeded", ended.error
            assert not any(secret in ended.model_dump_json() for secret in KEYS.values())
            [student] = root.glob(f"*/runs/{job_id}/student/model.safetensors")
            students.append(student.read_bytes())
            logs = [path.read_text(errors="replace") for path in root.rglob("log*/*.log")]
            logs += [path.read_text(errors="replace") for path in root.rglob("log.txt")]
            assert not any(secret in text for text in logs for secret in KEYS.values())
        finally:
            parts.close()
    assert students[0] == students[1]
    assert not list((tmp_path / "far").glob("*/caches"))


def command(*words: object, home: Path, store: str) -> subprocess.CompletedProcess[str]:
    return kd(*words, KD_HOME=str(home), KD_STORE=store)


@pytest.mark.long
def test_the_commands_work_on_the_bucket(address: str, tmp_path: Path) -> None:
    folder = make_cache(bind_caches(tmp_path / "elsewhere", address))
    home = tmp_path / "home"
    assert folder.name[:12] in command("cache", "ls", home=home, store=address).stdout
    for words in (("verify",), ("stats",), ("info", "--json")):
        done = command("cache", words[0], folder.name[:8], *words[1:], home=home, store=address)
        assert done.returncode == 0, done.stderr
    gone = command("gc", "--store", address, "--json", home=home, store=address)
    assert json.loads(gone.stdout)["items"] == []
    done = command("cache", "rm", folder.name, "--yes", home=home, store=address)
    assert done.returncode == 0, done.stderr
    assert json.loads(command("cache", "ls", "--json", home=home, store=address).stdout) == []


@pytest.mark.long
def test_store_check_says_whether_a_bucket_will_do(
    address: str, s3_server: Server, reach: Callable[[int], None]
) -> None:
    good = kd("store", "check", address, "--json")
    assert good.returncode == 0, good.stderr
    found = json.loads(good.stdout)
    assert found["fit"]
    assert found["put_bytes"] > 0
    proxy = Proxy(s3_server.port, lambda *_: "deaf")
    with proxy.running():
        reach(proxy.port)
        bad = kd("store", "check", address)
    assert bad.returncode == FAILED
    assert "the condition is ignored" in " ".join(bad.stdout.split())
    assert "It cannot hold caches." in bad.stdout


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"AWS_ENDPOINT_URL": "http://127.0.0.1:1"}, "error sending request"),
        ({}, "NoSuchBucket|AccessDenied"),
    ],
)
def test_a_bucket_that_is_not_there_is_a_clear_error(
    address: str, change: dict[str, str], words: str
) -> None:
    done = kd("store", "check", "s3://no-such-bucket/x", **change)
    assert done.returncode == FAILED
    assert any(word in " ".join(done.stderr.split()) for word in words.split("|")), done.stderr
    assert "store_error" in done.stderr
    assert not any(secret in done.stderr for secret in KEYS.values())


def test_settings_of_a_bucket_are_checked() -> None:
    with pytest.raises(ValidationError, match="s3://bucket/prefix"):
        Settings(store="ftp://bucket")
    with pytest.raises(ValidationError, match="do not apply to a bucket"):
        Settings(store="s3://bucket/a", retain_caches_days=3)
    assert Settings(store="/data/caches").caches == Path("/data/caches")
    assert not Settings(store="/data/caches").in_bucket


@pytest.mark.long
@pytest.mark.usefixtures("_server_binary")
def test_a_job_outlives_a_bucket_that_does_not_answer(
    address: str, s3_server: Server, reach: Callable[[int], None], tmp_path: Path
) -> None:
    """Its attempt fails with what the server said; the next one finds the server well."""
    ill = True
    proxy = Proxy(s3_server.port, lambda *_: "busy" if ill else "")
    with proxy.running():
        reach(proxy.port)
        parts = Parts(tmp_path, "bench.support.light_child", store=address, max_attempts=100)
        try:
            parts.start_api()
            parts.start_worker()
            job_id = parts.submit("light-1-3-1", "precompute")
            wait_until(lambda: parts.job(job_id).attempt == 2, 120)
            assert parts.job(job_id).status in ("queued", "running")
            ill = False
            job = parts.wait_for(job_id, "succeeded", "failed", seconds=120)
            assert job.status == "succeeded", job.error
            warnings = [data["message"] for kind, data in parts.events(job_id) if kind == "warning"]
            assert any(address in text for text in warnings), warnings
        finally:
            parts.close()
