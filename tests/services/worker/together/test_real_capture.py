"""Several workers capture one cache with a real teacher, and its bytes are those of one process."""

from __future__ import annotations

import json
import os
import re
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from bench.support.harness import Parts
from bench.support.waiting import wait_until
from cache.disk import list_file_sizes
from kd.capture.capturing import help_capture
from kd.capture.plan import plan_capture
from kd.config.jobfile import parse_config
from kd.errors import OtherCapture
from kd.pipeline import run_stage
from kd.progress import Monitor, SharedCapture
from tests.support.kd.sharing.processes import find_parent
from tests.support.services.runs import MakeParts

PATIENCE = 300.0
PROFILES: dict[str, dict[str, Any]] = {
    "threshold": {"profile": "threshold"},
    "tempered": {"profile": "tempered", "temperatures": {"min": 1.0, "max": 4.0}},
    "hidden": {"profile": "hidden"},
}


@pytest.fixture
def body(tiny_teacher: Path, tiny_text: Path) -> dict[str, Any]:
    return {
        "kind": "precompute",
        "name": "together",
        "teacher": {"model": str(tiny_teacher), "batch_size": 2},
        "data": {"train": str(tiny_text), "sequence_length": 32, "validation_fraction": 0.1},
        "cache": {"shard_sequences": 4},
    }


@pytest.fixture
def parts(new_parts: MakeParts, tiny_teacher: Path, monkeypatch: pytest.MonkeyPatch) -> Parts:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    roots = (tiny_teacher.parent.parent,)
    parts = new_parts(
        child_module="services.worker.stage_child", data_roots=roots, silence_seconds=300.0
    )
    parts.start_api()
    return parts


@contextmanager
def owner_held(parts: Parts, job_id: str) -> Iterator[None]:
    """Stop the child that leads from the moment at which the others can take ranges."""
    wait_until(lambda: parts.job(job_id).capture is not None, PATIENCE)
    worker = int(str(parts.job(job_id).worker).split(":")[-2])
    child = find_child_of(worker)
    os.kill(child, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(child, signal.SIGCONT)


def find_child_of(worker: int) -> int:
    """The process that runs a stage for a worker."""
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            words = (folder / "cmdline").read_bytes().split(b"\0")
            if b"services.worker.stage_child" in words and find_parent(int(folder.name)) == worker:
                return int(folder.name)
    raise AssertionError(f"worker {worker} has no child")


def count_helped(parts: Parts, job_id: str) -> int:
    """Sequences that the workers have done that do not lead."""
    job = parts.job(job_id)
    assert job.capture is not None
    return sum(each.sequences for each in job.capture.workers if each.worker != job.worker)


@pytest.mark.long
@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("profile", PROFILES)
def test_the_bytes_are_those_of_one_process(
    parts: Parts, body: dict[str, Any], profile: str, tmp_path: Path
) -> None:
    body["cache"] |= PROFILES[profile]
    found = run_stage("precompute", parse_config(body), tmp_path / "one", tmp_path / "one/runs/x")
    alone = tmp_path / "one" / "caches" / found.cache["fingerprint"]
    for _ in range(2):
        parts.start_worker()
    answer = parts.http.post("/jobs", json={**body, "resources": {"workers": 2}})
    job_id = answer.json()["id"]
    with owner_held(parts, job_id):
        wait_until(lambda: count_helped(parts, job_id) > 0, PATIENCE)
    job = parts.wait_for(job_id, "succeeded", "failed", seconds=PATIENCE)
    assert (job.status, job.error) == ("succeeded", None)
    together = parts.settings.caches / alone.name
    names = [name for name in list_file_sizes(alone) if name != "manifest"]
    assert names == [name for name in list_file_sizes(together) if name != "manifest"]
    for name in names:
        assert (alone / name).read_bytes() == (together / name).read_bytes(), name
    progress = [data for kind, data in parts.events(job_id) if kind == "progress"]
    assert progress[-1]["unit"] == "sequences"


@pytest.mark.long
@pytest.mark.usefixtures("one_thread")
def test_a_context_survives_a_kill_among_several_workers(
    parts: Parts, tiny_teacher: Path, tmp_path: Path
) -> None:
    """The teacher is told more than the student, which is the teacher itself with adapters."""
    rows = [
        {"prompt": f"Number {number}:", "completion": f" {number} is all.", "hint": "Be glad. " * 3}
        for number in range(80)
    ]
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    told = {"model": str(tiny_teacher), "batch_size": 1, "context": "{hint}{prompt}"}
    data = {"train": str(path), "format": "prompt_completion", "sequence_length": 32}
    body = {
        "kind": "distill", "name": "told", "teacher": told, "data": data,
        "student": {"model": str(tiny_teacher), "lora": {"rank": 2}},
        "cache": {"shard_sequences": 4}, "train": {"max_steps": 4},
    }  # fmt: skip
    home = tmp_path / "one"
    found = run_stage("precompute", parse_config(body), home, home / "runs" / "x")
    alone = home / "caches" / found.cache["fingerprint"]
    for _ in range(2):
        parts.start_worker()
    answer = parts.http.post("/jobs", json={**body, "resources": {"workers": 2}})
    assert answer.status_code == 202, answer.text
    job_id = answer.json()["id"]
    wait_until(lambda: parts.job(job_id).capture is not None, PATIENCE)
    child = find_child_of(int(str(parts.job(job_id).worker).split(":")[-2]))
    os.kill(child, signal.SIGSTOP)
    wait_until(lambda: count_helped(parts, job_id) > 0, PATIENCE)
    os.kill(child, signal.SIGKILL)
    job = parts.wait_for(job_id, "succeeded", "failed", seconds=PATIENCE)
    assert (job.status, job.error) == ("succeeded", None) and job.attempt > 1
    together = parts.settings.caches / alone.name
    for name in list_file_sizes(alone):
        if name != "manifest":
            assert (alone / name).read_bytes() == (together / name).read_bytes(), name
    assert (parts.settings.run_dir(job_id) / "student" / "model.safetensors").is_file()


class NoRanges:
    """A helper's ranges of a capture that is over."""

    def __init__(self, fingerprint: str) -> None:
        self.shared: SharedCapture | None = SharedCapture(fingerprint)

    def open(self, shared: SharedCapture, shards: int, check_stop: Callable[[], None]) -> None:
        raise AssertionError("a helper opens nothing")

    def take(self, check_stop: Callable[[], None]) -> range | None:
        raise AssertionError("nothing is taken from another capture")

    def finish(self, shards: range, sequences: int) -> None:
        raise AssertionError("nothing was taken")

    def is_finished(self, shards: range) -> bool:
        return False


def test_a_helper_whose_inputs_give_another_cache_is_refused(
    body: dict[str, Any], tmp_path: Path
) -> None:
    plan = plan_capture(parse_config(body))
    ranges = NoRanges("f" * 32)
    assert ranges.shared is not None
    expected = f"makes cache {plan.identity.fingerprint}, .* makes {'f' * 32}"
    with pytest.raises(OtherCapture, match=re.compile(expected, re.DOTALL)):
        help_capture(plan, tmp_path, ranges.shared, Monitor(ranges=ranges))
    assert not list(tmp_path.iterdir()), "nothing is written into the wrong cache"
