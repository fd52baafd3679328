"""Several workers capture one cache through the whole service: real shards, no model."""

from __future__ import annotations

import json
import os
import signal
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from bench.support.harness import Parts
from bench.support.light_child import LightWork
from bench.support.waiting import wait_until
from cache.checking.verify import verify_cache
from cache.disk import list_file_sizes
from tests.support.services.runs import MakeParts

LIGHT = "bench.support.light_child"


@pytest.fixture
def parts(new_parts: MakeParts) -> Parts:
    parts = new_parts(child_module=LIGHT)
    parts.start_api()
    return parts


def submit(parts: Parts, name: str, workers: int | str, **changes: Any) -> str:
    return parts.submit(name, "precompute", resources={"workers": workers}, **changes)


def read_ledgers(parts: Parts, job_id: str) -> dict[str, list[dict[str, Any]]]:
    """The lines of each process that worked on a job, by its run folder."""
    folder = parts.settings.run_dir(job_id)
    found = {}
    for path in folder.rglob("ledger"):
        found[str(path.parent.relative_to(folder))] = [
            json.loads(line) for line in path.read_text().splitlines()
        ]
    return found


def count_writes(parts: Parts, job_id: str) -> Counter[int]:
    """How often each shard was written."""
    lines = [line for each in read_ledgers(parts, job_id).values() for line in each]
    return Counter(line["number"] for line in lines if line["what"] == "wrote")


def locate(parts: Parts, name: str) -> Path:
    return parts.settings.caches / LightWork.of(name).identity.fingerprint


def read_bytes(folder: Path) -> dict[str, bytes]:
    return {name: (folder / name).read_bytes() for name in list_file_sizes(folder)}


@pytest.mark.long
def test_workers_share_a_capture_and_the_bytes_are_those_of_one(
    parts: Parts, new_parts: MakeParts
) -> None:
    alone = new_parts(child_module=LIGHT)
    alone.start_worker()
    assert alone.wait_for(submit(alone, "light-1-24-1", 1), "succeeded", "failed")
    for _ in range(3):
        parts.start_worker()
    job_id = submit(parts, "light-1-24-100", 3)
    job = parts.wait_for(job_id, "succeeded", "failed")
    assert (job.status, job.error) == ("succeeded", None)
    ledgers = read_ledgers(parts, job_id)
    assert len(ledgers) == 3
    assert all(any(line["what"] == "wrote" for line in lines) for lines in ledgers.values())
    assert count_writes(parts, job_id) == Counter(range(24))
    folder = locate(parts, "light-1-24-100")
    assert read_bytes(folder) == read_bytes(locate(alone, "light-1-24-1"))
    assert verify_cache(folder) == []
    assert not list(folder.parent.glob("*.writers"))


def begin(parts: Parts, name: str, workers: int) -> str:
    """Start workers and a job, and wait until all of them capture it."""
    for _ in range(workers):
        parts.start_worker()
    job_id = submit(parts, name, workers)
    wait_until(lambda: len(members_of(parts, job_id)) == workers)
    return job_id


def members_of(parts: Parts, job_id: str) -> list[str]:
    capture = parts.job(job_id).capture
    return [] if capture is None else [each.worker for each in capture.workers]


def list_children(parts: Parts, job_id: str) -> dict[int, bool]:
    """The processes that capture for the job, and whether each is a helper's."""
    found = {
        int(lines[-1]["writer"].partition("-")[0]): where != "."
        for where, lines in read_ledgers(parts, job_id).items()
    }
    return {pid: helps for pid, helps in found.items() if Path(f"/proc/{pid}").exists()}


def find_child(parts: Parts, job_id: str, helper: bool) -> int:
    """The process of a child that captures for the job: a helper's, or that of the owner."""
    children = list_children(parts, job_id)
    return next(pid for pid, helps in children.items() if helps == helper)


def require_right(parts: Parts, job_id: str, name: str) -> None:
    """The job has succeeded, and every shard is as it should be."""
    job = parts.wait_for(job_id, "succeeded", "failed")
    assert (job.status, job.error) == ("succeeded", None)
    folder = locate(parts, name)
    assert verify_cache(folder) == []
    assert not list(folder.parent.glob("*.writers"))
    assert not list(folder.rglob(".tmp-*"))
    assert not parts.jobs.redis.exists(f"kd:job:{job_id}:ranges")
    assert parts.jobs.redis.hgetall("kd:devices:local") == {}


@pytest.mark.long
def test_the_view_shows_workers_and_the_progress_of_all(parts: Parts) -> None:
    job_id = begin(parts, "light-2-30-200", 2)
    wait_until(lambda: any(each.helping for each in parts.jobs.list_workers()))
    assert parts.jobs.redis.hgetall("kd:devices:local") == {job_id: "2"}
    shown = wait_until(
        lambda: job if (job := parts.job(job_id)).progress.done not in (None, 0) else None
    )
    assert shown.progress.total == 120
    assert shown.progress.unit == "sequences"
    assert shown.capture is not None
    assert shown.capture.ranges == 30
    job = parts.wait_for(job_id, "succeeded", "failed")
    assert job.capture is None
    # Two devices for most of the time.
    assert job.device_seconds > 1.3 * (job.finished_at - job.started_at).total_seconds()
    require_right(parts, job_id, "light-2-30-200")
    wait_until(lambda: not any(each.helping for each in parts.jobs.list_workers()))


@pytest.mark.parametrize(
    "how",
    [
        "kill",
        pytest.param("hang", marks=pytest.mark.long),
        pytest.param("kill the worker", marks=pytest.mark.long),
    ],
)
@pytest.mark.parametrize(
    "helper",
    [pytest.param(True, marks=pytest.mark.long, id="helper"), pytest.param(False, id="owner")],
)
def test_a_range_of_a_worker_that_is_gone_goes_to_another(
    new_parts: MakeParts, how: str, helper: bool
) -> None:
    # A child on a busy machine may be silent for seconds, so only that which hangs gets so little.
    parts = new_parts(child_module=LIGHT, silence_seconds=5.0 if how == "hang" else 60.0)
    parts.start_api()
    workers = {parts.start_worker().pid for _ in range(3)}
    job_id = submit(parts, "light-3-30-150", 3)
    wait_until(lambda: len(members_of(parts, job_id)) == 3)
    wait_until(lambda: len(read_ledgers(parts, job_id)) == 3)
    child = find_child(parts, job_id, helper)
    if how == "kill the worker":
        job = parts.job(job_id)
        owner = int(str(job.worker).split(":")[-2])
        os.kill(owner if not helper else next(iter(workers - {owner})), signal.SIGKILL)
    else:
        os.kill(child, signal.SIGKILL if how == "kill" else signal.SIGSTOP)
    require_right(parts, job_id, "light-3-30-150")
    warnings = [data["message"] for kind, data in parts.events(job_id) if kind == "warning"]
    if how != "kill the worker":
        assert any("no longer helps with this capture" in each for each in warnings) == helper
    # At most the shards that a process held when it was killed are written twice.
    assert max(count_writes(parts, job_id).values()) <= 2


@pytest.mark.long
def test_workers_come_in_mid_job(parts: Parts) -> None:
    parts.start_worker()
    job_id = submit(parts, "light-4-120-100", "auto")
    wait_until(lambda: len(members_of(parts, job_id)) == 1)
    late = {parts.start_worker().pid for _ in range(2)}
    wait_until(lambda: len(members_of(parts, job_id)) == 3)
    assert late < {int(each.split(":")[-2]) for each in members_of(parts, job_id)}
    require_right(parts, job_id, "light-4-120-100")
    assert len(read_ledgers(parts, job_id)) == 3


@pytest.mark.long
def test_pause_stops_all_and_resume_goes_on(parts: Parts) -> None:
    name = "light-5-30-150"
    job_id = begin(parts, name, 2)
    wait_until(lambda: sum(count_writes(parts, job_id).values()) > 3)
    parts.jobs.change("pause", job_id)
    parts.wait_for(job_id, "paused")
    wait_until(lambda: not list_children(parts, job_id), 30)
    written = sum(count_writes(parts, job_id).values())
    time.sleep(0.5)
    assert sum(count_writes(parts, job_id).values()) == written
    parts.http.post(f"/jobs/{job_id}/resume").raise_for_status()
    require_right(parts, job_id, name)
    assert count_writes(parts, job_id) == Counter(range(30))


@pytest.mark.long
def test_cancel_ends_all(parts: Parts) -> None:
    job_id = begin(parts, "light-6-100-150", 2)
    parts.jobs.change("cancel", job_id)
    parts.wait_for(job_id, "cancelled")
    wait_until(lambda: not any(each.job for each in parts.jobs.list_workers()), 30)
    assert parts.jobs.redis.hgetall("kd:devices:local") == {}
    assert not parts.jobs.redis.exists(f"kd:job:{job_id}:ranges")


@pytest.mark.long
def test_a_helper_leaves_for_a_queued_job_and_comes_back(parts: Parts) -> None:
    job_id = begin(parts, "light-7-80-150", 2)
    other = submit(parts, "light-8-4-100", 1)
    require_right_soon = parts.wait_for(other, "succeeded", "failed")
    assert require_right_soon.status == "succeeded"
    assert parts.job(job_id).status == "running"
    wait_until(lambda: len(members_of(parts, job_id)) == 2, 30)
    require_right(parts, job_id, "light-7-80-150")


@pytest.mark.long
def test_a_worker_with_another_store_is_refused_by_name(parts: Parts, tmp_path: Path) -> None:
    parts.start_worker()
    job_id = submit(parts, "light-9-30-150", 2)
    wait_until(lambda: len(members_of(parts, job_id)) == 1)
    parts.start("services.worker", KD_HOME=str(tmp_path / "elsewhere"))

    def find_warning() -> str | None:
        texts = [data["message"] for kind, data in parts.events(job_id) if kind == "warning"]
        return next(iter(texts), None)

    message = wait_until(find_warning)
    assert "no longer helps with this capture: Its caches are in folder-" in message
    assert "KD_STORE" in message
    require_right(parts, job_id, "light-9-30-150")


@pytest.mark.long
def test_redis_goes_away_in_mid_capture(parts: Parts) -> None:
    job_id = begin(parts, "light-10-60-150", 2)
    parts.server.stop()
    time.sleep(6.0)
    parts.server.start()
    require_right(parts, job_id, "light-10-60-150")
