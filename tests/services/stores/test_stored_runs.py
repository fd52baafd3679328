"""Jobs whose files lie in the bucket of the service: workers and API share no disk."""

import hashlib
import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from bench.stores.server import KEYS
from bench.support.harness import Parts
from bench.support.waiting import wait_until
from cache.disk import hash_file
from cache.manifest import sign_json
from kd.buckets.inputs import begin_downloads, download_files, list_stored
from kd.buckets.runs import STATE, StoredRun, open_stored_run
from services.settings import Settings
from services.store.jobs.leases import Claim
from services.store.retention.collector import find_items, look, remove_items
from services.worker.stage_process import build_store_environment
from tests.support.kd.tiny import make_tiny_job
from tests.support.services.api import problem, running, serving, tell


@pytest.fixture
def api(_server_binary: Path, address: str, tmp_path: Path) -> Iterator[Parts]:
    with serving(tmp_path / "api", store=address) as parts:
        yield parts


def find_run(parts: Parts, job_id: str) -> StoredRun:
    found = parts.settings.find_stored_run(job_id)
    assert found is not None
    return found


def produce_elsewhere(api: Parts, folder: Path) -> tuple[Claim, Path]:
    """Create a job whose worker has another data folder, and put its results into the bucket."""
    claim = running(api)
    run_dir = folder / "runs" / claim.id
    (run_dir / "student").mkdir(parents=True)
    (run_dir / "student" / "model.safetensors").write_bytes(os.urandom(3 << 20))
    (run_dir / "student" / "config.json").write_text("{}")
    (run_dir / "report.json").write_text('{"steps": 3}')
    names = ["student/model.safetensors", "student/config.json", "report.json"]
    find_run(api, claim.id).publish_files(run_dir, names, lambda _: None)
    for name in ("student", "report.json"):
        tell(api, claim, ("artifact", {"name": name, "path": str(run_dir / name)}))
    return claim, run_dir


@pytest.mark.long
def test_the_api_serves_the_results_of_a_worker_with_another_disk(
    api: Parts, tmp_path: Path
) -> None:
    claim, run_dir = produce_elsewhere(api, tmp_path / "worker")
    listed = api.http.get(f"/jobs/{claim.id}/artifacts").json()["data"]
    assert {each["name"] for each in listed} == {
        "student/model.safetensors", "student/config.json", "report.json",
    }  # fmt: skip
    for each in listed:
        path = run_dir / each["name"]
        assert each["bytes"] == path.stat().st_size
        assert each["sha256"] == hash_file(path)
        answer = api.http.get(each["url"])
        assert answer.content == path.read_bytes()
        assert answer.headers["etag"] == f'"{each["sha256"]}"'
        head = api.http.head(each["url"])
        assert (head.status_code, int(head.headers["content-length"])) == (200, each["bytes"])
    url = f"/jobs/{claim.id}/artifacts/student/model.safetensors"
    data = (run_dir / "student" / "model.safetensors").read_bytes()
    part = api.http.get(url, headers={"Range": "bytes=1000-2000000"})
    assert (part.status_code, part.content) == (206, data[1000:2000001])
    known = api.http.get(url, headers={"If-None-Match": part.headers["etag"]})
    assert known.status_code == 304
    problem(api.http.get(f"/jobs/{claim.id}/artifacts/student/../report.json/x"), 404)
    problem(api.http.get(f"/jobs/{claim.id}/artifacts/other"), 404)
    # Nothing of another job is shown by a path that names it.
    other = running(api)
    tell(api, other, ("artifact", {"name": "student", "path": str(run_dir / "student")}))
    assert api.http.get(f"/jobs/{other.id}/artifacts").json()["data"] == []


def make_checkpoint(folder: Path, step: int, loss: float) -> Path:
    path = folder / f"step-{step:08d}"
    path.mkdir(parents=True)
    (path / "model.safetensors").write_bytes(f"model of {step}".encode())
    progress = {"step": step, "best_step": 2, "last_evaluation": {"validation_loss": loss}}
    digests = {"model.safetensors": hash_file(path / "model.safetensors")}
    (path / STATE).write_bytes(sign_json({"progress": progress, "sha256": digests}))
    return path


@pytest.mark.long
def test_the_api_shows_the_checkpoints_of_disk_and_bucket(api: Parts, tmp_path: Path) -> None:
    claim = running(api)
    run = find_run(api, claim.id)
    for step in (2, 4, 6):
        path = make_checkpoint(tmp_path / "worker", step, 10 - step)
        run.put_checkpoint(path)
    own = make_checkpoint(api.settings.run_dir(claim.id) / "checkpoints", 4, 7)
    listed = api.http.get(f"/jobs/{claim.id}/checkpoints").json()["data"]
    assert [each["step"] for each in listed] == [2, 4, 6]
    assert [each["metrics"]["validation_loss"] for each in listed] == [8, 7, 4]
    assert [(each["is_best"], each["is_last"]) for each in listed] == [
        (True, False), (False, False), (False, True),
    ]  # fmt: skip
    assert listed[1]["sha256"] == hash_file(own / STATE)
    for each in listed:
        names = {file["name"] for file in each["files"]}
        assert names == {"model.safetensors", STATE}
        answer = api.http.get(f"/jobs/{claim.id}/checkpoints/{each['step']}/model.safetensors")
        assert answer.content == f"model of {each['step']}".encode()
        digest = hashlib.sha256(answer.content).hexdigest()
        assert answer.headers["etag"] == f'"{digest}"'
    assert api.http.get(f"/jobs/{claim.id}/checkpoints/6").json()["step"] == 6
    problem(api.http.get(f"/jobs/{claim.id}/checkpoints/8"), 404)
    problem(api.http.get(f"/jobs/{claim.id}/checkpoints/6/metrics.jsonl"), 404)


@pytest.mark.long
def test_a_job_that_is_deleted_with_its_files_leaves_none_in_the_bucket(
    api: Parts, tmp_path: Path
) -> None:
    claim, _ = produce_elsewhere(api, tmp_path / "worker")
    kept, _ = produce_elsewhere(api, tmp_path / "worker")
    for each in (claim, kept):
        api.jobs.finish(each, "succeeded")
    assert api.http.delete(f"/jobs/{claim.id}?artifacts=true").status_code == 204
    assert list(find_run(api, claim.id).bucket.walk(claim.id)) == []
    assert find_run(api, kept.id).read_files()


@pytest.mark.long
def test_the_rule_of_runs_removes_those_of_the_bucket(api: Parts, tmp_path: Path) -> None:
    claim, _ = produce_elsewhere(api, tmp_path / "worker")
    api.jobs.finish(claim, "succeeded")
    scene = look(api.settings, api.jobs, {"runs": 0.0})
    [item] = [each for each in find_items(scene) if each.name == claim.id]
    assert remove_items([item], scene, lambda *_, **__: None) == ([item], [])
    assert list(find_run(api, claim.id).bucket.walk(claim.id)) == []


@pytest.mark.long
def test_a_student_in_the_bucket_is_named_by_its_job(
    api: Parts, address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    claim, run_dir = produce_elsewhere(api, tmp_path / "worker")
    monkeypatch.setenv("KD_DOWNLOADS", "")
    begin_downloads(tmp_path / "home")
    url = f"{address}/runs/{claim.id}/student"
    assert set(list_stored(url).objects) == {"model.safetensors", "config.json"}
    folder = download_files(url, ["model.safetensors"])
    theirs = run_dir / "student" / "model.safetensors"
    assert (folder / "model.safetensors").read_bytes() == theirs.read_bytes()


def test_the_operator_decides_whether_runs_are_kept_in_the_bucket(address: str) -> None:
    job_id = "job_" + "1" * 26
    kept = build_store_environment(Settings(store=address), job_id)
    assert kept["KD_RUN_STORE"] == f"{address}/runs/{job_id}"
    assert set(KEYS) <= set(kept)
    for settings in (Settings(store=address, store_runs=False), Settings(store="/a"), Settings()):
        assert "KD_RUN_STORE" not in build_store_environment(settings, job_id)
        assert settings.find_stored_run(job_id) is None
    alone = build_store_environment(Settings(data_stores="s3://their-bucket/text"), job_id)
    assert set(KEYS) <= set(alone)
    assert not set(KEYS) & set(build_store_environment(Settings(), job_id))


# ---------------------------------------------------------------------- several hosts


@pytest.fixture
def job(tiny_teacher: Path, tiny_text: Path) -> dict[str, Any]:
    train = {"max_steps": 60, "save_steps": 1, "save_total_limit": 2}
    return make_tiny_job(tiny_teacher, tiny_text, train=train)


@pytest.mark.long
@pytest.mark.usefixtures("_server_binary")
def test_a_host_that_dies_in_mid_training_is_replaced_by_one_with_another_disk(
    job: dict[str, Any], address: str, tiny_teacher: Path, tiny_text: Path, tmp_path: Path
) -> None:
    """Two hosts capture. The replacement has the text and the teacher from the bucket too."""
    plain = finish_undisturbed(job, tmp_path / "plain")
    inputs = open_stored_run(f"{address}/inputs/x").bucket
    for path in tiny_teacher.iterdir():
        if path.is_file():
            inputs.put(f"model/{path.name}", path.read_bytes())
    inputs.put("text.txt", tiny_text.read_bytes())
    job["teacher"] |= {"model": f"{address}/inputs/model"}
    job["data"] |= {"train": f"{address}/inputs/text.txt"}
    job["resources"] = {"workers": 2}
    parts = Parts(
        tmp_path / "api", "services.worker.stage_child", store=address, lease_seconds=3.0,
        silence_seconds=600.0,
    )  # fmt: skip
    try:
        parts.start_api()
        first = start_host(parts, tmp_path / "first", "precompute", "train")
        start_host(parts, tmp_path / "helper", "precompute")
        job_id = parts.http.post("/jobs", json=job).json()["id"]
        run = find_run(parts, job_id)
        wait_until(lambda: run.list_checkpoints() or has_failed(parts, job_id))
        # What a worker has started dies with it, and its disk is lost.
        os.kill(first.pid, signal.SIGKILL)
        first.wait()
        (tmp_path / "first").rename(tmp_path / "lost")
        start_host(parts, tmp_path / "second", "train")
        ended = parts.wait_for(job_id, "succeeded", "failed", seconds=300)
        assert ended.status == "succeeded", ended.error
        steps = read_steps(tmp_path / "second" / "runs" / job_id)
        assert steps and min(steps) > 1
        url = f"/jobs/{job_id}/artifacts/student/model.safetensors"
        assert parts.http.get(url).content == plain
        listed = parts.http.get(f"/jobs/{job_id}/checkpoints").json()["data"]
        # One that is saved while an older one is on its way gives its place to the next.
        assert len(listed) == 2 and listed[-1]["step"] == 60
        assert not (parts.settings.run_dir(job_id) / "student").exists()
    finally:
        parts.close()


def start_host(parts: Parts, home: Path, *queues: str) -> Any:
    home.mkdir()
    return parts.start("services.worker", *queues, KD_HOME=str(home))


def has_failed(parts: Parts, job_id: str) -> bool:
    return parts.http.get(f"/jobs/{job_id}").json()["status"] == "failed"


def read_steps(run_dir: Path) -> list[int]:
    """The steps that were trained on this disk: its checkpoints."""
    return [int(path.name.removeprefix("step-")) for path in (run_dir / "checkpoints").iterdir()]


def finish_undisturbed(job: dict[str, Any], folder: Path) -> bytes:
    parts = Parts(folder, "services.worker.stage_child", lease_seconds=30.0, silence_seconds=600.0)
    try:
        parts.start_api()
        parts.start("services.worker", "precompute", "train")
        job_id = parts.http.post("/jobs", json=job).json()["id"]
        ended = parts.wait_for(job_id, "succeeded", "failed", seconds=300)
        assert ended.status == "succeeded", ended.error
        assert json.loads((folder / "runs" / job_id / "report.json").read_text())["steps"] == 60
        return (folder / "runs" / job_id / "student" / "model.safetensors").read_bytes()
    finally:
        parts.close()
