"""Two jobs that need one cache: the teacher is read once, and the second job waits."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from bench.support.harness import Parts
from bench.support.waiting import PATIENCE_SECONDS
from bench.support.warm import MODELS, get_warm_python
from cache.checking.verify import verify_cache
from cache.errors import CacheError
from cache.store import open_cache
from kd.capture.plan import plan_capture
from kd.config.job import JobConfig
from kd.config.jobfile import parse_config
from kd.errors import Interrupted
from kd.pipeline import run_stage
from kd.progress import Event, Monitor, WorkHeldByAnother

SLOW = """
import json, sys
from pathlib import Path
from kd.config.jobfile import parse_config
from kd.stages.capture import run_precompute
from kd.progress import Monitor
slowly = lambda event: event.type == "progress" and (print(flush=True), sys.stdin.read(1))
job = parse_config(json.loads(sys.argv[1]))
run_precompute(job, Path(sys.argv[2]), Path(sys.argv[3]), Monitor(slowly))
"""


@pytest.fixture
def job(tiny_teacher: Path, tiny_text: Path) -> JobConfig:
    return parse_config(
        {
            "kind": "precompute",
            "name": "shared",
            "teacher": {"model": str(tiny_teacher), "batch_size": 2},
            "data": {"train": str(tiny_text), "sequence_length": 32},
            "cache": {"shard_sequences": 32},
        }
    )


@contextmanager
def captured_elsewhere(job: JobConfig, home: Path) -> Iterator[Callable[[], None]]:
    """Start a capture in another process; calling the yielded function lets it finish."""
    (home / "first").mkdir(parents=True)
    (home / "slow.py").write_text(SLOW)
    arguments = [job.model_dump_json(), str(home), str(home / "first")]
    its_input, our_output = os.pipe()
    our_input, its_output = os.pipe()
    process = get_warm_python(MODELS).start(
        "slow", arguments, [its_input, its_output, 2], home, dict(os.environ)
    )
    os.close(its_input)
    os.close(its_output)
    with os.fdopen(our_output, "wb", buffering=0) as told, os.fdopen(our_input, "rb") as said:
        assert said.readline() == b"\n", "it has begun"

        def finish() -> None:
            told.write(b"." * 10000)
            assert process.wait(PATIENCE_SECONDS) == 0

        try:
            yield finish
        finally:
            process.kill()
            process.wait(PATIENCE_SECONDS)


def folder_of(job: JobConfig, home: Path) -> Path:
    return home / "caches" / plan_capture(job).identity.fingerprint


def second(job: JobConfig, home: Path, monitor: Monitor) -> dict[str, Any]:
    (home / "second").mkdir(exist_ok=True)
    return run_stage("precompute", job, home, home / "second", monitor).cache


@pytest.mark.long
def test_without_patience_it_is_told_whose_lock_to_wait_for(job: JobConfig, tmp_path: Path) -> None:
    events: list[Event] = []
    with captured_elsewhere(job, tmp_path) as finish:
        began = time.monotonic()
        with pytest.raises(WorkHeldByAnother) as caught:
            second(job, tmp_path, Monitor(events.append, patient=False))
        assert time.monotonic() - began < 30
        folder = folder_of(job, tmp_path)
        assert caught.value.lock == folder.with_suffix(".lock")
        assert isinstance(caught.value, Interrupted), (
            "whoever knows nothing of it takes it for a stop"
        )
        with pytest.raises(CacheError):
            open_cache(folder)
        finish()
    phases = [event.data["phase"] for event in events if event.type == "stage"]
    assert phases[-1] == "waiting for another job's capture of the same cache"
    assert second(job, tmp_path, Monitor(patient=False))["reused"] is True
    assert verify_cache(folder) == []


@pytest.mark.long
def test_with_patience_it_waits_and_finds_the_work_done(job: JobConfig, tmp_path: Path) -> None:
    with captured_elsewhere(job, tmp_path) as finish:

        def listen(event: Event) -> None:
            if str(event.data.get("phase", "")).startswith("waiting"):
                finish()

        assert second(job, tmp_path, Monitor(listen))["reused"] is True


def test_a_stop_is_heard_while_it_waits(job: JobConfig, tmp_path: Path) -> None:
    waits = []

    def listen(event: Event) -> None:
        waits.extend(["it waits"] * str(event.data.get("phase", "")).startswith("waiting"))

    with captured_elsewhere(job, tmp_path), pytest.raises(Interrupted, match="while waiting"):
        second(job, tmp_path, Monitor(listen, lambda: bool(waits)))


@pytest.mark.slow
def test_three_jobs_of_a_service_read_the_teacher_once(
    job: JobConfig, new_parts: Callable[..., Parts], tiny_teacher: Path, tiny_text: Path
) -> None:
    parts = new_parts(
        child_module="services.worker.stage_child", data_roots=(tiny_teacher, tiny_text.parent)
    )
    parts.start_api()
    for _ in range(2):
        parts.start_worker()
    jobs = [parts.jobs.create(job).id for _ in range(3)]
    ended = [parts.wait_for(job_id, "succeeded", "failed", seconds=120) for job_id in jobs]
    assert [(each.status, each.attempt) for each in ended] == [("succeeded", 1)] * 3, [
        each.error for each in ended
    ]
    assert len({each.cache.fingerprint for each in ended if each.cache}) == 1
    found = [
        data["reused"] for job_id in jobs for kind, data in parts.events(job_id) if kind == "cache"
    ]
    assert sorted(found) == [False, True, True]
