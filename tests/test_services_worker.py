"""A real Celery worker and the real supervisor and child; only the stage in the child is a script."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from services.queue import publish
from services.worker.process import Outbox, child_environment
from tests.harness import ROOT, Parts, config, is_alive, wait_until
from tests.scripted_child import STEPS

MakeParts = Callable[..., Parts]


def started(parts: Parts, name: str, kind: str = "train") -> tuple[str, int]:
    job_id = parts.submit(name, kind)
    return job_id, parts.child_pid(job_id)


def steps_done(parts: Parts, job_id: str) -> list[int]:
    return [int(line) for line in (parts.settings.run_dir(job_id) / "steps").read_text().split()]


def test_a_job_succeeds_and_its_record_tells_how(service: Parts) -> None:
    job = service.wait_for(service.submit("quick"), "succeeded", "failed")
    assert (job.status, job.error, job.attempt) == ("succeeded", None, 1)
    assert (job.metrics.step, job.metrics.loss, job.metrics.kd_loss) == (3, 1.0, None)
    assert job.metrics.validation_perplexity == 20.5
    assert (job.progress.done, job.progress.total, job.progress.unit) == (3, 3, "steps")
    run_dir = service.settings.run_dir(job.id)
    assert job.artifacts == {"student": str(run_dir / "student")}
    assert job.started_at <= job.heartbeat_at <= job.finished_at
    assert "printed by the run" in (run_dir / "log.txt").read_text()


def test_a_distillation_runs_both_stages(service: Parts) -> None:
    job = service.wait_for(service.submit("quick", "distill"), "succeeded", "failed")
    assert (job.status, job.stage) == ("succeeded", "train")
    assert job.cache is not None
    assert (job.cache.fingerprint, job.cache.bytes_per_token) == ("f" * 32, 12.5)
    assert service.statuses(job.id) == ["queued", "running", "queued", "running", "succeeded"]


def test_an_error_of_the_run_arrives_whole(service: Parts) -> None:
    job = service.wait_for(service.submit("fails"), "succeeded", "failed")
    assert job.status == "failed"
    assert job.error is not None
    assert job.error.model_dump() == {
        "type": "data_error",
        "detail": "text.txt is empty.",
        "remedy": "Give a file with text in it.",
    }


def test_a_folder_that_cannot_be_written_is_named(service: Parts) -> None:
    job_id = service.jobs.create(config("quick")).id
    run_dir = service.settings.run_dir(job_id)
    run_dir.parent.mkdir(exist_ok=True)
    run_dir.symlink_to("/sys/kernel")  # where not even root may make a file
    publish(service.queue, job_id, "train")
    job = service.wait_for(job_id, "succeeded", "failed")
    assert job.error is not None
    assert job.error.type == "storage_error"
    assert job.error.remedy


def test_an_unforeseen_error_names_its_class_and_place(service: Parts) -> None:
    job = service.wait_for(service.submit("buggy"), "succeeded", "failed")
    assert job.error is not None
    assert job.error.type == "internal"
    assert "ZeroDivisionError: division by zero at" in job.error.detail
    assert "scripted_child.py" in job.error.detail
    assert "log.txt" in job.error.remedy
    assert "Traceback" in (service.settings.run_dir(job.id) / "log.txt").read_text()


def test_a_process_that_ends_without_a_word_leaves_its_log(service: Parts) -> None:
    job = service.wait_for(service.submit("exits"), "succeeded", "failed")
    assert job.error is not None
    assert "exit code 3: the library gave up" in job.error.detail


def test_cancel_lets_the_run_save_and_end(service: Parts) -> None:
    job_id, pid = started(service, "endless")
    service.jobs.cancel(job_id)
    job = service.wait_for(job_id, "cancelled", "failed", "succeeded")
    assert job.status == "cancelled"
    assert not is_alive(pid)
    assert "Stopped on request" in (service.settings.run_dir(job_id) / "log.txt").read_text()


def test_a_killed_child_is_replaced_until_its_attempts_are_used_up(service: Parts) -> None:
    job = service.wait_for(service.submit("dies"), "failed", "succeeded")
    assert (job.status, job.attempt) == ("failed", 3)
    assert job.error is not None
    assert job.error.type == "worker_lost"
    assert "signal 9 (SIGKILL)" in job.error.detail
    assert "out of memory" in job.error.remedy
    assert service.statuses(job.id) == ["queued", "running"] * 3 + ["failed"]


def test_kill_of_the_child_costs_an_attempt_and_no_step(service: Parts) -> None:
    job_id, pid = started(service, "steps")
    wait_until(lambda: service.job(job_id).progress.done)
    os.kill(pid, signal.SIGKILL)
    job = service.wait_for(job_id, "succeeded", "failed")
    assert (job.status, job.attempt) == ("succeeded", 2)
    assert steps_done(service, job_id) == list(range(STEPS))


def test_everything_that_a_run_started_ends_with_it(service: Parts) -> None:
    job_id, pid = started(service, "with-kin")
    kin = int(wait_until(lambda: (file := service.settings.run_dir(job_id) / "kin").exists() and file.read_text()))
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: not is_alive(kin), 10)
    service.jobs.cancel(job_id)
    service.wait_for(job_id, "cancelled")


def test_the_child_gets_no_secrets_and_this_copy_of_the_code(service: Parts, monkeypatch: pytest.MonkeyPatch) -> None:
    job = service.wait_for(service.submit("environment"), "succeeded", "failed")
    names = (service.settings.run_dir(job.id) / "environment").read_text().split("\n")
    assert "PATH" in names
    assert "KD_REDIS_URL" not in names
    monkeypatch.setenv("HF_HOME", "/models")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "x")
    environment = child_environment()
    assert environment["HF_HOME"] == "/models"
    assert "AWS_SECRET_ACCESS_KEY" not in environment
    assert environment["PYTHONPATH"] == str(ROOT)


def test_kill_of_the_worker_leaves_no_orphan_and_loses_no_step(new_parts: MakeParts) -> None:
    parts = new_parts(lease_seconds=1.5)
    parts.start_api()
    worker = parts.start_worker()
    job_id, pid = started(parts, "steps")
    wait_until(lambda: parts.job(job_id).progress.done)
    worker.kill()
    wait_until(lambda: not is_alive(pid), 5)
    parts.start_worker()
    job = parts.wait_for(job_id, "succeeded", "failed")
    assert (job.status, job.attempt) == ("succeeded", 2)
    assert steps_done(parts, job_id) == list(range(STEPS))


def test_sigterm_of_the_worker_saves_and_costs_no_attempt(new_parts: MakeParts) -> None:
    parts = new_parts()
    worker = parts.start_worker()
    job_id, pid = started(parts, "steps")
    wait_until(lambda: parts.job(job_id).progress.done)
    worker.terminate()
    assert worker.wait(10) == 0
    assert not is_alive(pid)
    assert parts.jobs.workers() == [], "it signs off"
    assert parts.job(job_id).status == "queued"
    parts.start_worker()
    job = parts.wait_for(job_id, "succeeded", "failed")
    assert (job.status, job.attempt) == ("succeeded", 1)
    assert steps_done(parts, job_id) == list(range(STEPS))


def test_a_run_that_does_not_stop_is_killed_after_the_grace(new_parts: MakeParts) -> None:
    parts = new_parts(stop_grace_seconds=0.5)
    parts.start_worker()
    job_id, pid = started(parts, "stubborn")
    parts.jobs.cancel(job_id)
    assert parts.wait_for(job_id, "cancelled", "failed").status == "cancelled"
    assert not is_alive(pid)


def test_a_silent_run_is_killed_and_the_error_says_so(new_parts: MakeParts) -> None:
    parts = new_parts(silence_seconds=1.5, max_attempts=1)
    parts.start_worker()
    job = parts.wait_for(parts.submit("silent"), "failed")
    assert job.error is not None
    assert job.error.type == "worker_lost"
    assert "reported nothing for 1.5 s" in job.error.detail


def test_a_redis_that_dies_under_a_run_costs_nothing(new_parts: MakeParts) -> None:
    parts = new_parts(lease_seconds=1.0)
    parts.start_api()
    parts.start_worker()
    job_id, pid = started(parts, "steps")
    wait_until(lambda: parts.job(job_id).progress.done)
    before = len(steps_done(parts, job_id))
    os.kill(parts.server.pid, signal.SIGKILL)
    time.sleep(1.5)  # longer than the lease
    assert is_alive(pid)
    assert len(steps_done(parts, job_id)) > before + 10, "the run goes on meanwhile"
    assert not parts.answers("/readyz")
    parts.server.ensure()
    job = parts.wait_for(job_id, "succeeded", "failed")
    assert (job.status, job.attempt) == ("succeeded", 1)
    assert int((parts.settings.run_dir(job_id) / "pid").read_text()) == pid, "it is the same process"
    assert steps_done(parts, job_id) == list(range(STEPS))
    reported = [data["step"] for kind, data in parts.events(job_id) if kind == "metrics"]
    assert reported == list(range(STEPS)), "every event has arrived, once"


def test_a_fenced_run_is_killed_at_once(new_parts: MakeParts) -> None:
    parts = new_parts()
    parts.start_worker()
    job_id, pid = started(parts, "endless")
    parts.jobs.redis.hincrby(f"kd:job:{job_id}", "fence", 1)
    wait_until(lambda: not is_alive(pid), 5)
    assert parts.job(job_id).status == "running", "it belongs to whoever holds the new fence"


def test_a_hundred_hints_are_one_run(service: Parts) -> None:
    job_id = service.submit("steps")
    for _ in range(100):
        service.queue.send_task("kd.run_stage", args=[job_id, "train"], queue="train")
    assert service.wait_for(job_id, "succeeded", "failed").attempt == 1
    time.sleep(2)
    assert service.statuses(job_id) == ["queued", "running", "succeeded"]


def test_a_worker_takes_only_the_stages_of_its_queues(new_parts: MakeParts) -> None:
    parts = new_parts()
    parts.start_worker("precompute")
    job_id = parts.submit("quick", "distill")
    wait_until(lambda: parts.job(job_id).stage == "train")
    time.sleep(0.5)
    assert parts.job(job_id).status == "queued"
    parts.start_worker("train")
    assert parts.wait_for(job_id, "succeeded", "failed").status == "succeeded"


def test_a_second_process_waits_for_the_run_folder(service: Parts) -> None:
    job_id, _ = started(service, "endless")
    order = {
        "stage": "train",
        "config": service.job(job_id).config,
        "home": str(service.settings.home),
        "run_dir": str(service.settings.run_dir(job_id)),
    }
    second = subprocess.Popen(
        [sys.executable, "-m", "tests.scripted_child"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=ROOT
    )
    assert second.stdin is not None
    second.stdin.write(json.dumps(order).encode() + b"\n")
    second.stdin.flush()
    time.sleep(1.0)
    assert second.poll() is None, "it waits"
    second.terminate()
    assert second.wait(5) == 75
    assert second.communicate()[0] == b"", "it has not run anything"
    service.jobs.cancel(job_id)
    service.wait_for(job_id, "cancelled")


def test_the_outbox_keeps_all_but_stale_progress() -> None:
    outbox = Outbox()
    for number in range(1200):
        outbox.put({"type": "metrics", "data": {"step": number}})
        outbox.put({"type": "progress", "data": {"done": number}})
    sent = []
    while not outbox.empty:
        assert outbox.batch() is outbox.batch(), "undelivered, it is the same batch"
        sent.append(outbox.batch())
        outbox.delivered()
    assert [batch.number for batch in sent] == [1, 2, 3]
    events = [event for batch in sent for event in batch.events]
    assert [event["data"]["step"] for event in events if event["type"] == "metrics"] == list(range(1200))
    assert [event["data"]["done"] for event in events if event["type"] == "progress"] == [1199]


def test_the_worker_never_imports_torch(tmp_path: Path) -> None:
    code = "import services.worker.consumer, sys; print([*{'torch', 'transformers', 'datasets'} & {*sys.modules}])"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True)
    assert out.stdout.strip() == "[]"
