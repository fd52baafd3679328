"""``kd estimate`` and ``POST /jobs?dry_run=true``."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from bench.support.harness import Parts
from bench.support.paths import ROOT
from bench.support.small.caches import make_cache
from bench.support.waiting import PATIENCE_SECONDS
from kd.client.wire.plans import JobEstimate
from tests.support.commands import kd


def body(teacher: Path, text: Path | str, **changes: Any) -> dict[str, Any]:
    data = {"train": str(text), "sequence_length": 64}
    return {
        "kind": "precompute",
        "name": "tiny",
        "teacher": {"model": str(teacher)},
        "data": data,
        **changes,
    }


@pytest.fixture
def job_file(tiny_teacher: Path, tiny_text: Path, tmp_path: Path) -> Path:
    path = tmp_path / "job.yaml"
    path.write_text(yaml.safe_dump(body(tiny_teacher, tiny_text)))
    return path


def add_training(job_file: Path) -> None:
    """Turn the capture into a distillation of 100 steps of 8 sequences of 64 tokens."""
    job = yaml.safe_load(job_file.read_text())
    student = {"init": {"layers": 1, "hidden_size": 16}}
    job |= {"kind": "distill", "student": student, "train": {"max_steps": 100, "batch_size": 8}}
    job_file.write_text(yaml.safe_dump(job))


@pytest.mark.long
def test_kd_estimate_runs_the_teacher_and_the_student(job_file: Path, tmp_path: Path) -> None:
    add_training(job_file)
    command = ("estimate", job_file, "--home", tmp_path / "home")
    done = kd(*command, "--json", OMP_NUM_THREADS="1")
    assert done.returncode == 0, done.stderr
    found = JobEstimate.model_validate_json(done.stdout)
    assert found.method == "trial" and not found.tokens_counted and found.fits
    assert found.seconds is not None and found.device == "cpu, 1 threads"
    assert list((tmp_path / "home").iterdir()) == []
    training = json.loads(done.stdout)["training"]
    assert training["steps"] == 100 and training["tokens_per_step"] > 400
    assert training["seconds"] > 90 * training["step_seconds"] > 0
    assert training["memory_bytes"] > 0
    told = json.loads(done.stdout)
    assert 0 < told["capture_memory_bytes"] < told["device_bytes"]
    shown = kd(*command, OMP_NUM_THREADS="1").stdout
    assert re.search(r"^training memory +[\d.]+ MiB$", shown, re.MULTILINE), shown


@pytest.mark.long
def test_kd_estimate_fast_takes_the_table(job_file: Path, tmp_path: Path) -> None:
    arguments = ("estimate", job_file, "--fast", "--home", tmp_path / "home", "--json")
    printed = kd(*arguments).stdout
    found = JobEstimate.model_validate_json(printed)
    assert found.method == "table" and found.seconds is None
    assert not (tmp_path / "home").exists()
    finer = JobEstimate.model_validate_json(kd(*arguments, "--set", "cache.threshold=0.01").stdout)
    assert finer.bytes_per_token > found.bytes_per_token
    assert "training" not in json.loads(printed)
    add_training(job_file)
    shown = kd("estimate", job_file, "--fast", "--home", tmp_path / "home").stdout
    assert (
        "bytes per token" in shown
        and re.search(r"^size +[\d.]+ KiB$", shown, re.MULTILINE)
        and "hours" not in shown
        and "training" not in shown
    )


@pytest.mark.long
def test_a_cache_that_the_disk_cannot_hold_is_refused(tiny_teacher: Path, tmp_path: Path) -> None:
    """The text is a sparse file of 4 TiB."""
    text = tmp_path / "text.txt"
    text.write_text("It is a truth universally acknowledged.\n" * 20_000)
    with text.open("r+b") as file:
        file.truncate(4 << 40)
    (tmp_path / "job.yaml").write_text(
        yaml.safe_dump(body(tiny_teacher, text, cache={"profile": "dense"}))
    )
    done = kd("estimate", tmp_path / "job.yaml", "--fast", "--home", tmp_path / "home", "--json")
    assert done.returncode == 1
    assert json.loads(done.stdout)["fits"] is False
    assert "cannot hold the cache" in done.stderr and "remedy: Free space" in done.stderr


@pytest.mark.long
def test_an_invalid_job_is_refused(job_file: Path, tmp_path: Path) -> None:
    done = kd("estimate", job_file, "--fast", "--home", tmp_path, "--set", "data.train=nowhere.txt")
    assert done.returncode == 2
    assert "no file matches" in done.stderr


@pytest.mark.long
def test_a_dry_run_answers_and_queues_nothing(
    new_parts: Callable[..., Parts], tiny_teacher: Path, tiny_text: Path
) -> None:
    service = new_parts(data_roots=(tiny_teacher, tiny_text.parent))
    service.start_api()
    before = service.http.get("/jobs").json()
    answer = service.http.post("/jobs?dry_run=true", json=body(tiny_teacher, tiny_text))
    assert answer.status_code == 200, answer.text
    found = JobEstimate.model_validate(answer.json())
    assert found.method == "table" and found.fits and found.positions > 1000
    assert "location" not in answer.headers
    assert service.http.get("/jobs").json() == before
    wrong = service.http.post("/jobs?dry_run=true", json=body(tiny_teacher, "nowhere.txt"))
    assert wrong.status_code == 422
    described = service.http.get("/openapi.json").json()["paths"]["/jobs"]["post"]["responses"]
    assert described["200"]["content"]["application/json"]["schema"]["$ref"].endswith(
        "/JobEstimate"
    )
    assert described["202"]["content"]["application/json"]["schema"]["$ref"].endswith("/Job")


DRY_RUN = """
import json, sys
from pathlib import Path
from fastapi.testclient import TestClient
from services.api.app import create_app
from services.settings import Settings

home, body = Path(sys.argv[1]), json.loads(sys.argv[2])
settings = Settings(redis_url="redis://127.0.0.1:1/0", home=home, data_roots=sys.argv[3:5])
client = TestClient(create_app(settings), base_url="http://127.0.0.1")
answers = [client.post("/jobs?dry_run=true", json=body), client.get(f"/caches/{sys.argv[5]}")]
heavy = sorted({"torch", "transformers", "datasets"} & set(sys.modules))
print(json.dumps([[answer.status_code for answer in answers], heavy]))
"""


@pytest.mark.long
def test_a_dry_run_needs_neither_torch_nor_redis(
    tiny_teacher: Path, tiny_text: Path, tmp_path: Path
) -> None:
    folder = make_cache(tmp_path / "caches")
    job = json.dumps(body(tiny_teacher, tiny_text))
    command = [
        sys.executable,
        "-c",
        DRY_RUN,
        str(tmp_path),
        job,
        str(tiny_teacher),
        str(tiny_text.parent),
        folder.name,
    ]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE_SECONDS
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == [[200, 200], []]
