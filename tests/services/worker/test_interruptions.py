"""Runs that are paused, frozen, fenced or cut off from Redis end in time and lose no step."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time

import pytest
from redis.exceptions import RedisError

from bench.support.harness import Parts, is_alive
from bench.support.paths import ROOT
from bench.support.scripted_child import STEPS
from bench.support.waiting import PATIENCE_SECONDS, wait_until
from kd.progress import Event
from services.store.queue import QUEUE_PREFIX
from services.worker import stage_process as process
from services.worker.devices import WorkerDevice
from services.worker.stage_process import SilenceTimer
from services.worker.supervisor import Attempt, retry_until_answered
from tests.support.services.runs import MakeParts, attempted, resumed, started, steps_done

# Pause and resume


def test_a_pause_saves_and_a_resume_goes_on_in_the_same_attempt(service: Parts) -> None:
    job_id, pid = started(service, "steps")
    wait_until(lambda: service.job(job_id).progress.done)
    assert service.jobs.change("pause", job_id).status == "pausing"
    job = service.wait_for(job_id, "paused", "failed", "succeeded", "queued")
    assert (job.status, job.worker) == ("paused", None)
    assert not is_alive(pid)
    done = steps_done(service, job_id)
    time.sleep(1)
    assert steps_done(service, job_id) == done, "nothing runs on"
    resumed(service, job_id)
    job = service.wait_for(job_id, "succeeded", "failed")
    assert (job.status, job.attempt) == ("succeeded", 1)
    assert steps_done(service, job_id) == list(range(STEPS))
    assert service.statuses(job_id) == [
        "queued",
        "running",
        "pausing",
        "paused",
        "queued",
        "running",
        "succeeded",
    ]


@pytest.mark.long
def test_a_resume_that_comes_before_the_pause_took_hold_loses_nothing(service: Parts) -> None:
    job_id, _ = started(service, "steps")
    wait_until(lambda: service.job(job_id).progress.done)
    service.jobs.change("pause", job_id)
    service.jobs.change("resume", job_id)
    job = service.wait_for(job_id, "succeeded", "failed", "paused")
    assert (job.status, job.attempt) == ("succeeded", 1)
    assert steps_done(service, job_id) == list(range(STEPS))


@pytest.mark.long
def test_a_deadline_lets_the_run_save_and_then_fails_it(new_parts: MakeParts) -> None:
    parts = new_parts()
    parts.start_api()
    parts.start_worker()
    job = parts.wait_for(
        parts.submit("endless", deadline_seconds=10), "failed", "cancelled", "succeeded"
    )
    assert job.error is not None
    assert (job.status, job.error.type) == ("failed", "deadline_exceeded")
    assert "Stopped on request" in (parts.settings.run_dir(job.id) / "log.txt").read_text()


# A worker that has lost the job writes nothing


@pytest.mark.long
def test_a_frozen_worker_s_run_ends_itself_and_another_one_goes_on(new_parts: MakeParts) -> None:
    parts = new_parts(lease_seconds=2.0)
    parts.start_api()
    frozen = parts.start_worker()
    job_id, pid = started(parts, "steps")
    wait_until(lambda: parts.job(job_id).progress.done)
    frozen.send_signal(signal.SIGSTOP)
    try:
        wait_until(lambda: not is_alive(pid), process.LEAST_PATIENCE_SECONDS + 3)
        parts.start_worker()
        job = parts.wait_for(job_id, "succeeded", "failed")
    finally:
        frozen.send_signal(signal.SIGCONT)
    assert (job.status, job.attempt) == ("succeeded", 2)
    assert steps_done(parts, job_id) == list(range(STEPS))
    assert parts.wait_for(parts.submit("quick"), "succeeded", "failed").status == "succeeded"
    time.sleep(1)
    assert parts.statuses(job_id).count("succeeded") == 1


def test_what_a_run_started_dies_with_a_worker_that_is_killed(new_parts: MakeParts) -> None:
    parts = new_parts()
    worker = parts.start_worker()
    job_id, pid = started(parts, "stays-alone")
    kin = int(
        wait_until(
            lambda: (file := parts.settings.run_dir(job_id) / "kin").exists() and file.read_text()
        )
    )
    os.kill(pid, signal.SIGSTOP)
    worker.kill()
    wait_until(lambda: not is_alive(pid) and not is_alive(kin))


def test_a_run_that_is_stopped_by_a_signal_is_killed_once_it_is_fenced(
    new_parts: MakeParts,
) -> None:
    parts = new_parts()
    parts.start_worker()
    job_id, pid = started(parts, "steps")
    os.kill(pid, signal.SIGSTOP)
    parts.jobs.redis.hincrby(f"kd:job:{job_id}", "fence", 1)
    wait_until(lambda: not is_alive(pid))


def test_a_run_that_is_stopped_by_a_signal_is_silent_and_replaced(new_parts: MakeParts) -> None:
    parts = new_parts(silence_seconds=10.0)
    parts.start_worker()
    job_id, pid = started(parts, "steps")
    wait_until(lambda: parts.job(job_id).progress.done)
    os.kill(pid, signal.SIGSTOP)
    job = parts.wait_for(job_id, "succeeded", "failed")
    assert (job.status, job.attempt) == ("succeeded", 2)
    assert steps_done(parts, job_id) == list(range(STEPS))


def test_a_loop_that_hangs_is_found_long_before_the_silence_of_loading(
    parts: Parts, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process, "STEP_SECONDS", 1.0)
    job_id, claim = attempted(parts, "hangs-in-its-loop", max_attempts=1)
    began = time.monotonic()
    ended = Attempt(parts.jobs, parts.settings, claim, WorkerDevice(), threading.Event()).run()
    assert ended.status == "failed"
    assert time.monotonic() - began < parts.settings.silence_seconds / 2
    job = parts.job(job_id)
    assert job.error is not None
    assert (job.error.type, "reported nothing for 1 s" in job.error.detail) == ("worker_lost", True)


def test_patience_follows_the_longest_step(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    monkeypatch.setattr("services.worker.stage_process.time.monotonic", lambda: clock[0])
    silence_timer = SilenceTimer(at=0.0)

    def hear(at: float, kind: str, **data: object) -> None:
        clock[0] = at
        silence_timer.note(Event(kind, data))

    assert silence_timer.patience(1800) == 1800, "it loads"
    hear(1000, "alive", stepping=True)
    assert silence_timer.patience(1800) == 300, "what loading took says nothing of a step"
    hear(1060, "alive", stepping=True)
    assert silence_timer.patience(1800) == 600
    hear(1070, "metrics", step=1)
    assert silence_timer.patience(1800) == 600
    hear(1071, "alive", stepping=False)
    assert silence_timer.patience(1800) == 1800, "an evaluation or a checkpoint may take long"
    hear(2000, "alive", stepping=True)
    assert silence_timer.patience(1800) == 600, "and it says nothing of a step either"
    hear(2001, "stage", phase="saving")
    assert silence_timer.patience(1800) == 1800
    clock[0] = 3802
    assert silence_timer.is_silent(1800)


# Redis is away


def test_a_run_that_nobody_can_hear_of_saves_its_state_in_the_end(new_parts: MakeParts) -> None:
    parts = new_parts(outage_seconds=2.0, lease_seconds=1.0)
    parts.start_api()
    parts.start_worker()
    job_id, pid = started(parts, "steps")
    wait_until(lambda: parts.job(job_id).progress.done)
    server = parts.server.pid
    os.kill(server, signal.SIGSTOP)
    try:
        wait_until(lambda: not is_alive(pid))
        before = len(steps_done(parts, job_id))
        assert before < STEPS
    finally:
        os.kill(server, signal.SIGCONT)
    job = parts.wait_for(job_id, "succeeded", "failed")
    assert (job.status, job.attempt) == ("succeeded", 1)
    assert steps_done(parts, job_id) == list(range(STEPS))


def test_a_worker_that_is_to_end_does_not_wait_for_redis() -> None:
    stopping = threading.Event()
    tries = []

    def never() -> str:
        tries.append(len(tries))
        stopping.set()
        raise RedisError

    assert retry_until_answered(never, stopping) == "lost"
    assert len(tries) == 2


def test_a_worker_that_gets_no_hints_ends_to_be_started_again(new_parts: MakeParts) -> None:
    parts = new_parts()
    parts.jobs.redis.lpush(f"{QUEUE_PREFIX}train", "a hint that no consumer takes")
    code = (
        "from services.worker import consumer; from services.settings import Settings; "
        "from services.store.connection import connect_redis; "
        "from services.store.jobs.store import JobStore; "
        "from services.worker.devices import WorkerDevice; "
        "consumer.UNRESPONSIVE_SECONDS = consumer.HEARTBEAT_SECONDS = 0.5; settings = Settings(); "
        "store = JobStore(connect_redis(settings.redis_url)); "
        "consumer.StageWorker(settings, None, store, ['train'], WorkerDevice()).send_heartbeats()"
    )
    unresponsive = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env=os.environ | parts.settings.environment(),
        timeout=PATIENCE_SECONDS,
        capture_output=True,
        text=True,
    )
    assert unresponsive.returncode == 1
    assert "this worker ends, to be started again" in unresponsive.stderr


def test_a_run_is_stuck_after_ten_of_its_steps() -> None:
    now = time.monotonic()
    for silent, longest, stuck in ((61.0, 0.5, True), (59.0, 0.5, False), (61.0, 7.0, False)):
        timer = SilenceTimer(now - silent, longest_step=longest)
        assert timer.has_stuck(60.0) == stuck
