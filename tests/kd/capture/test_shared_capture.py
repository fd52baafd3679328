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
from cache.disk import hash_file, list_file_sizes
from cache.errors import CacheError
from cache.store import open_cache
from kd.capture import teacher as reading
from kd.capture.plan import plan_capture
from kd.config.job import JobConfig
from kd.config.jobfile import parse_config
from kd.errors import Interrupted
from kd.pipeline import run_stage
from kd.progress import Event, Monitor, SharedCapture, WorkHeldByAnother

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


class HandedRanges:
    """Hands ranges of one shard to this process, and tells of each question."""

    def __init__(self, shared: SharedCapture | None, left: list[range]) -> None:
        self.shared = shared
        self.left = left
        self.taken: list[range] = []
        self.on_take: Callable[[], None] = lambda: None

    def open(self, shared: SharedCapture, shards: int, check_stop: Callable[[], None]) -> None:
        self.opened = shared
        self.left = [range(index, index + 1) for index in range(shards)]

    def take(self, check_stop: Callable[[], None]) -> range | None:
        self.on_take()
        if not self.left:
            return None
        self.taken.append(self.left.pop(0))
        return self.taken[-1]

    def finish(self, shards: range, sequences: int) -> None:
        """Nothing is counted."""

    def is_finished(self, shards: range) -> bool:
        return False


def test_one_that_helps_uses_the_tables_of_the_one_that_leads(
    job: JobConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    alone = capture_alone(job, tmp_path / "alone")
    fits: list[int] = []
    fit = reading.fit_tables
    monkeypatch.setattr(reading, "fit_tables", lambda *rest: (fits.append(1), fit(*rest))[1])
    leader = HandedRanges(None, [])
    helper = HandedRanges(None, [])

    def let_help() -> None:
        if len(leader.taken) == 1 and helper.shared is None:
            assert (folder_of(job, tmp_path) / "dither").is_dir(), "before any range is handed out"
            # All shards but one, and the last ones of the cache.
            helper.shared = leader.opened
            helper.left, leader.left = leader.left[:], []
            monitor = Monitor(ranges=helper)
            (tmp_path / "helper").mkdir()
            run_stage("precompute", job, tmp_path, tmp_path / "helper", monitor)

    leader.on_take = let_help
    second(job, tmp_path, Monitor(ranges=leader))
    assert len(leader.taken) == 1 and len(helper.taken) >= 2
    assert fits == [1]
    folder = folder_of(job, tmp_path)
    assert verify_cache(folder) == []
    assert list_digests(folder) == list_digests(alone)


def capture_alone(job: JobConfig, home: Path) -> Path:
    home.mkdir()
    second(job, home, Monitor())
    return folder_of(job, home)


def list_digests(folder: Path) -> dict[str, str]:
    return {name: hash_file(folder / name) for name in list_file_sizes(folder)}


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
