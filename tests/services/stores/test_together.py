"""Two workers capture into a bucket and a third one trains; no two of them share a folder."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from bench.stores.server import KEYS
from bench.support.harness import Parts
from bench.support.paths import ROOT
from bench.support.waiting import wait_until
from cache.remote.address import bind_caches
from cache.store import open_cache
from kd.client.wire.jobs import Job
from kd.config.jobfile import load_config
from tests.support.kd.tiny import make_tiny_job

pytestmark = [
    pytest.mark.usefixtures("_server_binary", "one_thread"),
    pytest.mark.timeout(1500),
]
PATIENCE = 900.0
EXAMPLE = ROOT / "examples" / "austen" / "job.yaml"


@pytest.fixture
def tiny(tiny_teacher: Path, tiny_text: Path) -> dict[str, Any]:
    more = {"data": {"max_train_samples": 40}, "cache": {"shard_sequences": 4}}
    return make_tiny_job(tiny_teacher, tiny_text, **more)


@contextmanager
def running(root: Path, store: str | None, homes: dict[str, str]) -> Iterator[Parts]:
    """A service whose workers have the data folders and queues of ``homes``."""
    parts = Parts(
        root / "api", "services.worker.stage_child", store=store, lease_seconds=30.0,
        silence_seconds=600.0, data_roots=(ROOT / "examples", root.parent.parent),
    )  # fmt: skip
    try:
        parts.start_api()
        for home, queue in homes.items():
            (root / home).mkdir(exist_ok=True)
            parts.start("services.worker", queue, KD_HOME=str(root / home), OMP_NUM_THREADS="1")
        wait_until(lambda: len(parts.jobs.list_workers()) == len(homes))
        yield parts
    finally:
        parts.close()


def submit(parts: Parts, body: dict[str, Any]) -> str:
    answer = parts.http.post("/jobs", json=body)
    assert answer.status_code == 202, answer.text
    return str(answer.json()["id"])


def finish(parts: Parts, job_id: str) -> Job:
    job = parts.wait_for(job_id, "succeeded", "failed", seconds=PATIENCE)
    assert job.status == "succeeded", job.error
    return job


def read_student(root: Path, job_id: str) -> bytes:
    [student] = root.glob(f"*/runs/{job_id}/student/model.safetensors")
    return student.read_bytes()


@contextmanager
def leader_held(parts: Parts, job_id: str) -> Iterator[None]:
    """Stop the process that leads the capture from the moment at which others can help."""
    wait_until(lambda: parts.job(job_id).capture is not None, PATIENCE)
    worker = int(str(parts.job(job_id).worker).split(":")[-2])
    [child] = [
        int(pid)
        for file in Path(f"/proc/{worker}/task").glob("*/children")
        for pid in file.read_text().split()
        if b"services.worker.stage_child" in Path(f"/proc/{pid}/cmdline").read_bytes()
    ]
    os.kill(child, signal.SIGSTOP)
    try:
        yield
    finally:
        with suppress(ProcessLookupError):
            os.kill(child, signal.SIGCONT)


def compare(body: dict[str, Any], address: str, tmp_path: Path) -> None:
    """The student of a service with one folder, and of one whose workers share a bucket alone."""
    with running(tmp_path / "plain", None, {"api": "precompute,train"}) as parts:
        job_id = submit(parts, body)
        plain = finish(parts, job_id)
        expected = read_student(tmp_path / "plain", job_id)

    homes = {"one": "precompute", "two": "precompute", "three": "train"}
    with running(tmp_path / "far", address, homes) as parts:
        job_id = submit(parts, {**body, "resources": {"workers": 2}})
        with leader_held(parts, job_id):
            # The helper has captured all that is left, but for what the leader holds.
            wait_until(lambda: count_helped(parts, job_id) > 0, PATIENCE)
        far = finish(parts, job_id)
        assert plain.cache is not None
        assert far.cache is not None
        assert far.cache.fingerprint == plain.cache.fingerprint
        assert read_student(tmp_path / "far", job_id) == expected
    assert not list((tmp_path / "far").glob("*/caches"))
    helpers = list((tmp_path / "far").glob(f"*/runs/{job_id}/helpers/*/log.txt"))
    assert len(helpers) == 1
    logs = [path for path in (tmp_path / "far").rglob("*") if path.suffix in (".log", ".txt")]
    texts = [path.read_text(errors="replace") for path in logs]
    assert not any(secret in text for text in texts for secret in KEYS.values())
    seen = open_cache(bind_caches(tmp_path / "reader", address) / str(far.cache.fingerprint))
    assert len(seen) == seen.manifest.identity.data.sequences


def count_helped(parts: Parts, job_id: str) -> int:
    """Sequences that the workers have done that do not lead."""
    job = parts.job(job_id)
    assert job.capture is not None, job.error
    return sum(each.sequences for each in job.capture.workers if each.worker != job.worker)


@pytest.mark.long
def test_two_workers_capture_into_a_bucket(
    tiny: dict[str, Any], address: str, tmp_path: Path
) -> None:
    compare(tiny, address, tmp_path)


@pytest.mark.slow
def test_the_example_s_student_is_that_of_one_machine(address: str, tmp_path: Path) -> None:
    """With the number of threads of the test, as the first student of this test has them."""
    body = load_config(EXAMPLE).model_dump(mode="json", exclude_unset=True)
    compare(body, address, tmp_path)
