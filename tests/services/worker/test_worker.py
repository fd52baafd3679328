"""A real worker, supervisor and child. Only the stage in the child is a script."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from datetime import UTC, datetime, timedelta, tzinfo
from pathlib import Path

import pytest

from bench.support.harness import Parts, is_alive, make_config
from bench.support.paths import ROOT
from bench.support.scripted_child import HOLD, STEPS
from bench.support.waiting import PATIENCE_SECONDS, wait_until
from cache.disk import is_lock_free
from kd.progress import Event
from services.store.callers import Caller
from services.store.queue import publish_hint
from services.worker import consumer
from services.worker.consumer import StageWorker
from services.worker.devices import WorkerDevice
from services.worker.failures import describe_crash, describe_error
from services.worker.stage_messages import LONGEST_EVENT, LONGEST_TEXT, Order
from services.worker.stage_process import Outbox, build_child_environment
from services.worker.supervisor import Attempt
from tests.support.services.runs import MakeParts, attempted, started, steps_done


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


def test_what_a_worker_sends_of_an_event_is_bounded(service: Parts) -> None:
    job = service.wait_for(service.submit("talks"), "failed")
    assert job.error is not None
    assert job.error.detail.startswith("d" * LONGEST_TEXT + "...")
    events = service.events(job.id)
    assert max(len(json.dumps(data)) for _, data in events) <= LONGEST_EVENT
    long, left_out = [data["message"] for kind, data in events if kind == "warning"]
    assert long == "w" * LONGEST_TEXT + f"... ({(1 << 20) - LONGEST_TEXT:,} characters cut)"
    assert re.fullmatch(r"An event 'metrics' of [\d,]+ bytes was left out; .*", left_out)


def test_an_error_of_the_run_arrives_whole(service: Parts) -> None:
    job = service.wait_for(service.submit("fails"), "succeeded", "failed")
    assert job.status == "failed"
    assert job.error is not None
    assert job.error.model_dump() == {
        "type": "data_error",
        "detail": "text.txt is empty.",
        "remedy": "Give a file with text in it.",
        "help": "docs/troubleshooting.md#data_error",
    }


def test_a_folder_that_cannot_be_written_is_named(service: Parts) -> None:
    job_id = service.jobs.create(make_config("quick")).id
    run_dir = service.settings.run_dir(job_id)
    run_dir.parent.mkdir(exist_ok=True)
    run_dir.symlink_to("/sys/kernel")  # where even root cannot create a file
    publish_hint(service.queue, job_id, "train")
    job = service.wait_for(job_id, "succeeded", "failed")
    assert job.error is not None
    assert job.error.type == "storage_error"
    assert job.error.remedy


def test_a_job_that_one_host_cannot_start_goes_to_another(
    parts: Parts, monkeypatch: pytest.MonkeyPatch
) -> None:
    sick = parts.settings.model_copy(update={"home": Path("/sys/kernel")})  # nobody can write there
    worker = StageWorker(sick, parts.queue, parts.jobs, ["train"], WorkerDevice())
    waited: list[float] = []
    monkeypatch.setattr(worker.stopping, "wait", waited.append)
    job_id = parts.jobs.create(make_config("quick")).id
    claim = parts.jobs.claim(job_id, "train", worker.id, 60)
    assert claim is not None
    worker._run(claim)
    assert (parts.job(job_id).status, waited) == ("queued", [sick.lease_seconds])
    (warning,) = [data["message"] for kind, data in parts.events(job_id) if kind == "warning"]
    assert "/sys/kernel" in warning
    parts.start_worker()
    assert parts.wait_for(job_id, "succeeded", "failed").status == "succeeded"


def test_a_heartbeat_has_the_time_of_the_job_store(
    parts: Parts, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = StageWorker(parts.settings, parts.queue, parts.jobs, ["train"], WorkerDevice())
    hour = timedelta(hours=1)

    class Ahead(datetime):
        @classmethod
        def now(cls, tz: tzinfo | None = None) -> datetime:
            return datetime.now(tz) + hour

    monkeypatch.setattr(consumer, "datetime", Ahead)
    beat_at = worker.describe().beat_at
    assert beat_at is not None
    assert abs(datetime.now(UTC) - beat_at) < hour / 2


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
    service.jobs.change("cancel", job_id)
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
    kin = int(
        wait_until(
            lambda: (file := service.settings.run_dir(job_id) / "kin").exists() and file.read_text()
        )
    )
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: not is_alive(kin))
    service.jobs.change("cancel", job_id)
    service.wait_for(job_id, "cancelled")


def test_the_child_gets_no_secrets_and_this_copy_of_the_code(
    service: Parts, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = service.wait_for(service.submit("environment"), "succeeded", "failed")
    lines = (service.settings.run_dir(job.id) / "environment").read_text().split("\n")
    names = [line.partition("=")[0] for line in lines]
    assert "PATH" in names
    assert "KD_REDIS_URL" not in names
    monkeypatch.setenv("HF_HOME", "/models")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "x")
    environment = build_child_environment()
    assert environment["HF_HOME"] == "/models"
    assert "AWS_SECRET_ACCESS_KEY" not in environment
    assert environment["PYTHONPATH"] == str(ROOT)


def test_a_child_gets_the_logins_of_trackers_and_the_one_key_that_its_job_names(
    new_parts: MakeParts,
) -> None:
    parts = new_parts(remote_hosts=("127.0.0.1",))
    keys = {
        "KD_TEACHER_KEY": "one",
        "KD_TEACHER_KEY_LAB": "two",
        "WANDB_API_KEY": "three",
        "MLFLOW_TRACKING_URI": "four",
    }
    parts.start("services.worker", **keys)
    remote = {"backend": "http", "url": "http://127.0.0.1:9", "model": "m", "tokenizer": "teacher"}
    told = {"cache": {"profile": "topk"}}
    found = []
    for named in (
        {"api_key_env": "KD_TEACHER_KEY_LAB"},
        {"api_key_env": "KD_TEACHER_KEY_ELSEWHERE"},
        {},
    ):
        job_id = parts.submit("environment", "precompute", teacher=remote | named, **told)
        job = parts.wait_for(job_id, "succeeded", "failed")
        assert job.error is None
        lines = (parts.settings.run_dir(job_id) / "environment").read_text().split("\n")
        found.append({line for line in lines if line.startswith(("KD_TEACHER", "WANDB", "MLFLOW"))})
    trackers = {"WANDB_API_KEY=three", "MLFLOW_TRACKING_URI=four"}
    assert found == [trackers | {"KD_TEACHER_KEY_LAB=two"}, trackers, trackers]


def test_a_library_s_progress_bar_stays_out_of_the_log() -> None:
    bar = [sys.executable, "-c", "from tqdm.auto import tqdm; [*tqdm(range(3))]"]
    shown, in_a_child = (
        subprocess.run(bar, capture_output=True, text=True, env=environment).stderr
        for environment in (os.environ | {"TQDM_DISABLE": ""}, build_child_environment())
    )
    assert "3/3" in shown
    assert in_a_child == ""


def test_kill_of_the_worker_leaves_no_orphan_and_loses_no_step(new_parts: MakeParts) -> None:
    parts = new_parts(lease_seconds=1.5)
    parts.start_api()
    worker = parts.start_worker()
    job_id, pid = started(parts, "steps")
    wait_until(lambda: parts.job(job_id).progress.done)
    worker.kill()
    wait_until(lambda: not is_alive(pid))
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
    assert parts.jobs.list_workers() == [], "it signs off"
    assert parts.job(job_id).status == "queued"
    parts.start_worker()
    job = parts.wait_for(job_id, "succeeded", "failed")
    assert (job.status, job.attempt) == ("succeeded", 1)
    assert steps_done(parts, job_id) == list(range(STEPS))


#: A child that imports the pipeline for a minute, as on a busy machine.
SLOW_IMPORT = """
import sys, time
from services.worker import stage_child
class Slow:
    def find_spec(self, name, *_):
        if name == "kd.pipeline":
            print("imports", file=sys.stderr, flush=True)
            time.sleep(60)
sys.meta_path.insert(0, Slow())
sys.exit(stage_child.main())
"""


def test_a_child_that_imports_hears_of_a_stop(tmp_path: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", SLOW_IMPORT],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        cwd=ROOT,
    )
    config = make_config("quick").model_dump(mode="json")
    order = Order("train", config, str(tmp_path), str(tmp_path / "run"), 600)
    with process:
        assert process.stdin is not None and process.stderr is not None
        process.stdin.write(json.dumps(asdict(order)).encode() + b"\n")
        process.stdin.flush()
        assert process.stderr.readline() == b"imports\n"
        began = time.monotonic()
        process.terminate()
        assert process.wait(PATIENCE_SECONDS) == -signal.SIGTERM
        assert time.monotonic() - began < 5


def test_a_run_that_does_not_stop_is_killed_after_the_grace(new_parts: MakeParts) -> None:
    parts = new_parts(stop_grace_seconds=0.5)
    parts.start_worker()
    job_id, pid = started(parts, "stubborn")
    parts.jobs.change("cancel", job_id)
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
    assert int((parts.settings.run_dir(job_id) / "pid").read_text()) == pid, (
        "it is the same process"
    )
    assert steps_done(parts, job_id) == list(range(STEPS))
    reported = [data["step"] for kind, data in parts.events(job_id) if kind == "metrics"]
    assert reported == list(range(STEPS)), "every event has arrived, once"


def test_a_worker_says_in_one_line_that_its_store_takes_no_writes(new_parts: MakeParts) -> None:
    parts = new_parts()
    parts.jobs.redis.replicaof("127.0.0.1", "1")
    try:
        worker = parts.start("services.worker", "train")
        assert worker.wait(PATIENCE_SECONDS) == 1
    finally:
        parts.jobs.redis.replicaof("no", "one")
    (log,) = parts.settings.home.glob("logs/services.worker-*.log")
    text = log.read_text()
    assert text.count("the job store is a read-only copy") == 1 and "Traceback" not in text, text


def test_a_fenced_run_is_killed_at_once(new_parts: MakeParts) -> None:
    parts = new_parts()
    parts.start_worker()
    job_id, pid = started(parts, "endless")
    parts.jobs.redis.hincrby(f"kd:job:{job_id}", "fence", 1)
    wait_until(lambda: not is_alive(pid))
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
        "patience": 60,
        "confinement": None,
    }
    second = subprocess.Popen(
        [sys.executable, "-m", "bench.support.scripted_child"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        cwd=ROOT,
    )
    assert second.stdin is not None
    second.stdin.write(json.dumps(order).encode() + b"\n")
    second.stdin.flush()
    kin = Path(f"/proc/{second.pid}/task/{second.pid}/children")
    wait_until(kin.read_text)  # its guard: it has read the order
    time.sleep(1.0)
    assert second.poll() is None, "it waits"
    second.terminate()
    assert second.wait(5) == 75
    assert second.communicate()[0] == b"", "it has not run anything"
    service.jobs.change("cancel", job_id)
    service.wait_for(job_id, "cancelled")


def test_the_outbox_keeps_all_but_stale_progress() -> None:
    outbox = Outbox()
    for number in range(1200):
        outbox.put(Event("metrics", {"step": number}))
        outbox.put(Event("progress", {"done": number}))
    sent = []
    while not outbox.empty:
        assert outbox.next_batch() is outbox.next_batch(), "undelivered, it is the same batch"
        sent.append(outbox.next_batch())
        outbox.mark_delivered()
    assert [batch.number for batch in sent] == [1, 2, 3]
    events = [event for batch in sent for event in batch.events]
    assert [event.data["step"] for event in events if event.type == "metrics"] == list(range(1200))
    assert [event.data["done"] for event in events if event.type == "progress"] == [1199]


def test_the_worker_never_imports_torch(tmp_path: Path) -> None:
    code = (
        "import services.worker.consumer, sys; "
        "print([*{'torch', 'transformers', 'datasets'} & {*sys.modules}])"
    )
    out = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True
    )
    assert out.stdout.strip() == "[]"


# One capture for all


def test_jobs_that_need_one_cache_share_its_capture(new_parts: MakeParts) -> None:
    parts = new_parts()
    parts.start_worker()
    parts.start_worker()
    hold = parts.settings.caches / HOLD
    hold.parent.mkdir()
    hold.touch()
    first = parts.submit("captures", "distill")
    parts.child_pid(first)
    second = parts.submit("captures", "distill")
    parts.child_pid(second)
    waiting = wait_until(lambda: "waiting" in ((job := parts.job(second)).phase or "") and job)
    assert (waiting.status, waiting.phase) == ("running", "waiting for another job's capture")
    assert parts.wait_for(parts.submit("quick"), "succeeded").attempt == 1, (
        "its device is free meanwhile"
    )
    assert parts.job(first).stage == "precompute"
    hold.unlink()
    for job_id in (first, second):
        job = parts.wait_for(job_id, "succeeded", "failed")
        assert (job.status, job.attempt) == ("succeeded", 1)
    captured = [
        (parts.settings.run_dir(job_id) / "captured").exists() for job_id in (first, second)
    ]
    assert captured == [True, False], "the teacher was read once"


@pytest.mark.long
def test_a_job_that_waits_for_a_capture_hears_of_a_pause_and_a_cancel(new_parts: MakeParts) -> None:
    parts = new_parts()
    parts.start_worker()
    lock = parts.settings.caches / f"{'f' * 32}.lock"
    lock.parent.mkdir()
    with held(lock):
        jobs = [parts.submit("captures", "precompute") for _ in range(3)]
        for job_id in jobs:
            wait_until(lambda job_id=job_id: "waiting" in (parts.job(job_id).phase or ""))
        parts.jobs.change("cancel", jobs[0])
        parts.jobs.change("pause", jobs[1])
        parts.wait_for(jobs[0], "cancelled")
        parts.wait_for(jobs[1], "paused")
        time.sleep(2 * parts.settings.lease_seconds)
        assert parts.job(jobs[2]).status == "running", "its lease is kept"
    assert parts.wait_for(jobs[2], "succeeded", "failed").attempt == 1


def test_sigterm_lets_go_of_a_job_that_waits_for_a_capture(new_parts: MakeParts) -> None:
    parts = new_parts()
    worker = parts.start_worker()
    lock = parts.settings.caches / f"{'f' * 32}.lock"
    lock.parent.mkdir()
    with held(lock):
        job_id = parts.submit("captures", "precompute")
        wait_until(lambda: "waiting" in (parts.job(job_id).phase or ""))
        worker.terminate()
        assert worker.wait(10) == 0
        assert (parts.job(job_id).status, parts.job(job_id).attempt) == ("queued", 1)


@contextmanager
def held(lock: Path) -> Iterator[None]:
    """The lock of a capture, held by another process for the time of the block."""
    code = (
        "import fcntl, sys; file = open(sys.argv[1], 'w'); fcntl.flock(file, fcntl.LOCK_EX); "
        "print(flush=True); sys.stdin.read()"
    )
    holder = subprocess.Popen(
        [sys.executable, "-c", code, lock], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert holder.stdout is not None
    holder.stdout.readline()
    assert not is_lock_free(lock)
    try:
        yield
    finally:
        holder.communicate()
    assert is_lock_free(lock)
    assert is_lock_free(lock.with_name("no such file"))


# The error of a failed run


@pytest.mark.parametrize(("name", "word"), [("hungry", "out_of_memory"), ("fills", "disk_full")])
def test_memory_and_disk_have_words_of_their_own(service: Parts, name: str, word: str) -> None:
    job = service.wait_for(service.submit(name), "failed", "succeeded")
    assert job.error is not None
    assert job.error.type == word
    assert job.error.remedy


@pytest.mark.parametrize(
    ("error", "word"),
    [
        (
            RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB.\nIf you ..."),
            "out_of_memory",
        ),
        (
            RuntimeError(
                "[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried ..."
            ),
            "out_of_memory",
        ),
        (type("OutOfMemoryError", (RuntimeError,), {})("no room"), "out_of_memory"),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED"), "out_of_memory"),
        (RuntimeError("std::bad_alloc"), "out_of_memory"),
        (ValueError("out of memory"), "internal"),
        (RuntimeError("shape mismatch"), "internal"),
    ],
)
def test_the_libraries_words_for_it_are_known(error: Exception, word: str) -> None:
    found = describe_error(error)
    assert found["type"] == word
    assert "\n" not in found["detail"]
    assert found["remedy"]


def test_a_crash_for_want_of_memory_is_known_by_its_log(tmp_path: Path) -> None:
    log = tmp_path / "log.txt"
    log.write_text("terminate called after throwing an instance of 'std::bad_alloc'\n")
    assert describe_crash(-6, "the run", log)["type"] == "out_of_memory"
    log.write_text("Segmentation fault\n")
    assert describe_crash(-11, "the run", log)["type"] == "internal"


def test_a_crash_quotes_the_end_of_a_long_log(tmp_path: Path) -> None:
    log = tmp_path / "log.txt"
    with log.open("wb") as file:
        file.truncate(64 << 20)  # a hole, which takes no disk
        file.seek(0, os.SEEK_END)
        file.write(b"\nthe library gave up\n")
    tracemalloc.start()
    try:
        found = describe_crash(3, "the run", log)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 1 << 20
    assert found["detail"].endswith("the library gave up")
    log.unlink()
    assert "its log is empty" in describe_crash(3, "the run", log)["detail"]


@pytest.mark.parametrize("name", ["leaks", "leaks-and-exits"])
def test_no_error_and_no_warning_of_a_job_shows_a_secret(
    parts: Parts, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    token = "a-token-of-no-known-form"
    monkeypatch.setenv("HF_TOKEN", token)
    _, claim = attempted(parts, name)
    device = WorkerDevice(hidden=True)
    Attempt(parts.jobs, parts.settings, claim, device, threading.Event()).run()
    job = parts.job(claim.id)
    assert job.error is not None
    assert "403 for the token ***" in job.error.detail
    assert token not in str(parts.events(claim.id))
    assert token not in job.model_dump_json()


def test_a_run_that_the_kernel_killed_for_its_memory_says_so(parts: Parts) -> None:
    with control_group(2**28) as group:
        _, claim = attempted(parts, "eats", max_attempts=1)
        program = (
            "import os, sys, json, threading; "
            "from services.settings import Settings; "
            "from services.store.connection import connect_redis; "
            "from services.store.jobs.leases import Claim; "
            "from services.store.jobs.store import JobStore; "
            "from services.worker.devices import WorkerDevice; "
            "from services.worker.supervisor import Attempt; "
            "open(sys.argv[1], 'w').write(str(os.getpid())); settings = Settings(); "
            "claim = Claim(**json.loads(sys.argv[2])); "
            "store = JobStore(connect_redis(settings.redis_url)); "
            "print(Attempt(store, settings, claim, WorkerDevice(), "
            "threading.Event()).run().status)"
        )
        (parts.settings.run_dir(claim.id)).mkdir(parents=True)
        (parts.settings.run_dir(claim.id) / "go").touch()
        out = subprocess.run(
            [sys.executable, "-c", program, str(group / "cgroup.procs"), json.dumps(vars(claim))],
            cwd=ROOT,
            env=os.environ | parts.settings.environment(),
            capture_output=True,
            text=True,
            timeout=PATIENCE_SECONDS,
        )
    assert out.stdout.strip() == "failed", out.stderr
    job = parts.job(claim.id)
    assert job.error is not None
    assert job.error.type == "out_of_memory"
    assert re.search(r"needed more than \d+ MiB of memory, its limit", job.error.detail)
    assert "batch_size" in job.error.remedy


@contextmanager
def control_group(limit: int) -> Iterator[Path]:
    """A control group with a memory limit. The test is skipped without root."""
    folder = Path("/sys/fs/cgroup/memory") / f"kd-test-{os.getpid()}"
    try:
        folder.mkdir()
        (folder / "memory.limit_in_bytes").write_text(str(limit))
    except OSError as error:
        pytest.skip(f"no control group of the first version can be made: {error}")
    yield folder
    wait_until(lambda: not (folder / "cgroup.procs").read_text().split())
    folder.rmdir()


# Access to files


def test_a_link_that_is_turned_after_the_post_is_noticed(
    new_parts: MakeParts, tmp_path: Path
) -> None:
    texts = tmp_path / "texts"
    texts.mkdir()
    (texts / "real.txt").write_text("text")
    (texts / "link.txt").symlink_to(texts / "real.txt")
    parts = new_parts(data_roots=(texts,))
    good = parts.submit("quick", data={"train": str(texts / "link.txt")})
    parts.start_worker()
    assert parts.wait_for(good, "succeeded", "failed").status == "succeeded"
    (texts / "link.txt").unlink()
    (texts / "link.txt").symlink_to("/etc/passwd")
    job = parts.wait_for(
        parts.submit("quick", data={"train": str(texts / "link.txt")}), "succeeded", "failed"
    )
    assert job.error is not None
    assert job.error.type == "invalid_config"
    assert "outside the folders" in job.error.detail
    assert "root:" not in (parts.settings.run_dir(job.id) / "log.txt").read_text()


def test_a_job_reads_no_run_of_another_owner(new_parts: MakeParts) -> None:
    parts = new_parts()
    parts.start_worker()
    theirs = parts.jobs.create(make_config("quick"), Caller("them")).id
    publish_hint(parts.queue, theirs, "train")
    parts.wait_for(theirs, "succeeded")
    (parts.settings.run_dir(theirs) / "text.txt").write_text("secret")
    wanted = make_config("quick", data={"train": str(parts.settings.run_dir(theirs) / "text.txt")})
    for owner, status in (("us", "failed"), ("them", "succeeded")):
        job_id = parts.jobs.create(wanted, Caller(owner)).id
        publish_hint(parts.queue, job_id, "train")
        assert parts.wait_for(job_id, "succeeded", "failed").status == status


def test_no_secret_stands_in_a_command_line(service: Parts) -> None:
    job_id, pid = started(service, "endless")
    password = service.server.url.split(":")[2].split("@")[0]
    lines = {file: file.read_bytes() for file in Path("/proc").glob("[0-9]*/cmdline")}
    assert any(b"scripted_child" in line for line in lines.values())
    assert not [file for file, line in lines.items() if password.encode() in line]
    assert password.encode() not in Path(f"/proc/{pid}/environ").read_bytes()
    service.jobs.change("cancel", job_id)
    service.wait_for(job_id, "cancelled")


# Signs of life and counters


def test_the_most_urgent_job_goes_first(new_parts: MakeParts) -> None:
    parts = new_parts()
    parts.start_worker()
    job_id, _ = started(parts, "endless")
    low = parts.submit("quick", priority=1)
    high = parts.submit("quick", priority=9)
    parts.jobs.change("cancel", job_id)
    later, sooner = (parts.wait_for(each, "succeeded").started_at for each in (low, high))
    assert sooner is not None and later is not None
    assert sooner < later


def test_what_runs_do_is_counted(new_parts: MakeParts) -> None:
    parts = new_parts()
    parts.start_worker()
    parts.wait_for(parts.submit("counts"), "succeeded")

    def counted() -> dict[str, float]:
        found = parts.jobs.read_counters()
        return {
            name + labels.get("le", ""): value
            for name, labels, value in found
            if "kd_job" not in name
        }

    wait_until(lambda: counted().get("kd_train_tokens_total") == 300)
    assert counted()["kd_cache_written_bytes_total"] == 2000
    assert counted()["kd_cache_chunk_write_seconds_sum"] == pytest.approx(7.3)
    assert counted()["kd_cache_chunk_write_seconds_bucket0.5"] == 1
    assert counted()["kd_cache_chunk_write_seconds_bucket10"] == 2
    assert (
        counted()["kd_cache_chunk_write_seconds_bucket+Inf"]
        == counted()["kd_cache_chunk_write_seconds_count"]
        == 2
    )
    job_id = parts.submit("counts")
    parts.wait_for(job_id, "succeeded")
    wait_until(lambda: counted()["kd_train_tokens_total"] == 600)
    kinds = {kind for kind, _ in parts.events(job_id)}
    assert not kinds & {"alive", "shard"}, "these are for the supervisor"


def test_the_log_says_which_job_attempt_and_fence(new_parts: MakeParts) -> None:
    parts = new_parts(log_format="json")
    parts.start_worker()
    job = parts.wait_for(parts.submit("quick"), "succeeded")
    (file,) = (parts.settings.home / "logs").glob("services.worker-*.log")
    wait_until(lambda: "stage train ends" in file.read_text())
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    begun = next(line for line in lines if line["msg"] == "stage train begins")
    assert (begun["job_id"], begun["attempt"], begun["fence"]) == (job.id, 1, 1)
