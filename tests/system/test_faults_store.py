"""The job store is killed, stopped, full and damaged; hints are doubled or lost; clocks jump."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from bench.support.faults import (
    Answer,
    Prober,
    RetryingClient,
    make_inputs,
    make_light_body,
    small_disk,
)
from bench.support.harness import Parts
from bench.support.judge import (
    check_answers,
    find_job_violations,
    list_written,
    read_ledger,
)
from bench.support.paths import ROOT
from bench.support.waiting import wait_until
from kd.client.wire.jobs import TERMINAL_STATUSES
from services.store.connection import connect_redis
from services.store.embedded import StoreUnavailable, find_binary
from services.store.queue import TASK_NAME

MakeParts = Callable[..., Parts]

#: How long Redis is away.
OUTAGE_SECONDS = float(os.environ.get("CHAOS_OUTAGE_SECONDS", "20"))
#: Seconds that an answer of the API may take while Redis is away.
SLOWEST_ANSWER = 3.0
RATES = {"rate_post": 10**6, "rate_get": 10**6, "quota_open_jobs": 10**6}


@pytest.fixture
def inputs(tmp_path: Path) -> Path:
    return make_inputs(tmp_path / "inputs")


@pytest.fixture
def parts(new_parts: MakeParts, inputs: Path) -> Parts:
    """A private server, with the light child."""
    return new_parts(child_module="bench.support.light_child", data_roots=(inputs,), **RATES)


@pytest.fixture
def tmpfs() -> Iterator[Callable[[Path, str], Path]]:
    """Make small disks, which are removed with the test."""
    with contextlib.ExitStack() as disks:
        yield lambda folder, size: disks.enter_context(small_disk(folder, size))


@contextlib.contextmanager
def probing(parts: Parts, job_id: str) -> Iterator[list[Answer]]:
    """Ask the API all the time; afterwards the list holds its answers."""
    prober = Prober(parts.settings.server)
    answers = list[Answer]()
    prober.jobs.append(job_id)
    try:
        yield answers
    finally:
        answers += prober.answers
        prober.close()


def steps(parts: Parts, job_id: str) -> list[int]:
    return list_written(parts.settings.run_dir(job_id), job_id)


def begins(parts: Parts, job_id: str) -> int:
    return sum(line.what == "begin" for line in read_ledger(parts.settings.run_dir(job_id)))


def stop_server(parts: Parts) -> None:
    os.kill(parts.server.pid, signal.SIGKILL)
    wait_until(lambda: not is_up(parts))


def is_up(parts: Parts) -> bool:
    try:
        return bool(parts.jobs.redis.ping())
    except Exception:
        return False


def start_server(parts: Parts) -> None:
    wait_until(lambda: parts.server.ensure() or is_up(parts))


def require_undisturbed(
    parts: Parts, job_id: str, name: str, spare: Path, answers: list[Answer]
) -> None:
    """Require one attempt, right products, one report of each step, and good answers."""
    job = parts.wait_for(job_id, *TERMINAL_STATUSES)
    assert (job.status, job.attempt) == ("succeeded", 1), job.error
    assert find_job_violations(parts, job_id, name, spare) == []
    assert begins(parts, job_id) == 2, "one process for each stage"
    reported = [data["step"] for kind, data in parts.events(job_id) if kind == "metrics"]
    assert reported == list(range(1, len(reported) + 1)) == steps(parts, job_id), (
        "the history is complete"
    )
    assert list(check_answers(answers)) == []
    heard = Counter(answer.status for answer in answers)
    assert heard[503] > 0 and heard[200] > 0 and heard[None] == 0, heard
    assert max(answer.seconds for answer in answers) < SLOWEST_ANSWER


@pytest.mark.alone
@pytest.mark.slow
def test_killing_redis_ten_times_stops_no_training(parts: Parts, tmp_path: Path) -> None:
    parts.start_api()
    parts.start_worker()
    name = "light-10-20-150"
    job_id = parts.submit(name, "distill")
    wait_until(lambda: steps(parts, job_id))
    with probing(parts, job_id) as answers:
        for _ in range(10):
            stop_server(parts)
            before = len(steps(parts, job_id))
            wait_until(lambda before=before: len(steps(parts, job_id)) > before + 2)
            start_server(parts)
            time.sleep(0.3)
    require_undisturbed(parts, job_id, name, tmp_path / "spare", answers)


@pytest.mark.alone
@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("manner", ["ended", "frozen"])
def test_an_outage_of_redis_stops_no_training(parts: Parts, tmp_path: Path, manner: str) -> None:
    parts.start_api()
    parts.start_worker()
    # The run has 16 steps, so it still trains after the outage.
    milliseconds = int(OUTAGE_SECONDS / 14 * 1000) + 50
    name = f"light-11-4-{milliseconds}"
    job_id = parts.submit(name, "distill")
    wait_until(lambda: steps(parts, job_id), 30 + 5 * milliseconds / 1000)
    with probing(parts, job_id) as answers:
        pid = parts.server.pid
        os.kill(pid, signal.SIGKILL if manner == "ended" else signal.SIGSTOP)
        before = len(steps(parts, job_id))
        time.sleep(OUTAGE_SECONDS)
        assert len(steps(parts, job_id)) >= before + 10, "the run continues meanwhile"
        start_server(parts) if manner == "ended" else os.kill(pid, signal.SIGCONT)
        back = time.monotonic()
        wait_until(lambda: parts.answers("/readyz"))
        wait_until(lambda: parts.job(job_id).progress.done == len(steps(parts, job_id)))
        following = parts.submit("light-12-1-20", "distill")
        parts.wait_for(job_id, *TERMINAL_STATUSES, seconds=120)
    parts.wait_for(
        following, "running", *TERMINAL_STATUSES, seconds=max(35 - (time.monotonic() - back), 10)
    )
    require_undisturbed(parts, job_id, name, tmp_path / "spare", answers)


# ---------------------------------------------------------------------- full


def require_reads_but_no_writes(
    parts: Parts, client: RetryingClient, inputs: Path, job_id: str
) -> None:
    refused = client.http.post("/jobs", json=make_light_body(inputs, "light-13-1-20"))
    assert refused.status_code == 503, refused.text
    assert refused.json()["type"].endswith("store-unavailable")
    assert int(refused.headers["retry-after"]) >= 1
    assert client.http.get(f"/jobs/{job_id}").status_code == 200, (
        "existing records can still be read"
    )
    assert client.http.get("/readyz").status_code == 503
    assert client.http.get("/healthz").status_code == 200


def require_recovery(parts: Parts, client: RetryingClient, inputs: Path, job_id: str) -> str:
    """Require that POST and heartbeats work within five seconds; returns the id of the new job."""
    freed = time.monotonic()
    heard = parts.job(job_id).heartbeat_at
    posted = wait_until(
        lambda: (
            (
                answer := client.http.post("/jobs", json=make_light_body(inputs, "light-13-1-20"))
            ).is_success
            and answer
        ),
        5,
    )
    wait_until(
        lambda: parts.job(job_id).heartbeat_at != heard, max(5 - (time.monotonic() - freed), 0.1)
    )
    return str(posted.json()["id"])


def require_full_store_harmless(
    parts: Parts, inputs: Path, fill: Callable[[], None], free: Callable[[], None]
) -> None:
    parts.start_api()
    parts.start_worker()
    name = "light-14-12-120"
    job_id = parts.submit(name, "distill")
    client = RetryingClient(parts.settings.server)
    wait_until(lambda: steps(parts, job_id))
    fill()
    before = len(steps(parts, job_id))
    require_reads_but_no_writes(parts, client, inputs, job_id)
    time.sleep(1.5 * parts.settings.lease_seconds)
    assert len(steps(parts, job_id)) > before + 10, "the run continues meanwhile"
    free()
    other = require_recovery(parts, client, inputs, job_id)
    client.close()
    job = parts.wait_for(job_id, *TERMINAL_STATUSES)
    assert (job.status, job.attempt) == ("succeeded", 1), job.error
    assert find_job_violations(parts, job_id, name, inputs.parent / "spare") == []
    assert parts.wait_for(other, *TERMINAL_STATUSES).status == "succeeded"


@pytest.mark.alone
def test_a_redis_without_memory_refuses_jobs_and_loses_none(parts: Parts, inputs: Path) -> None:
    redis = parts.jobs.redis
    require_full_store_harmless(
        parts,
        inputs,
        lambda: redis.config_set("maxmemory", "100kb"),
        lambda: redis.config_set("maxmemory", "0"),
    )


@pytest.mark.alone
@pytest.mark.long
def test_a_redis_without_disk_refuses_jobs_and_loses_none(
    new_parts: MakeParts, inputs: Path, tmpfs: Callable[[Path, str], Path], tmp_path: Path
) -> None:
    folder = tmpfs(tmp_path / "home 0" / "redis", "3m")
    parts = new_parts(child_module="bench.support.light_child", data_roots=(inputs,), **RATES)
    ballast = folder / "ballast"

    def fill() -> None:
        with contextlib.suppress(OSError), ballast.open("wb", buffering=0) as file:
            while file.write(b"\0" * 4096):
                pass
        with contextlib.suppress(OSError), ballast.open("ab", buffering=0) as file:
            while file.write(b"\0"):
                pass
        wait_until(lambda: not is_up(parts))  # PING fails as soon as a write has failed

    require_full_store_harmless(parts, inputs, fill, ballast.unlink)


# ---------------------------------------------------------------------- damaged


def journal_of(parts: Parts) -> Path:
    (log,) = (parts.settings.home / "redis" / "appendonlydir").glob("*.incr.aof")
    return log


def run_one(parts: Parts, name: str) -> str:
    job_id = parts.submit(name, "distill")
    assert parts.wait_for(job_id, *TERMINAL_STATUSES).status == "succeeded"
    return job_id


@pytest.mark.long
def test_the_server_starts_with_a_journal_whose_tail_is_cut(parts: Parts, tmp_path: Path) -> None:
    parts.start_worker()
    kept = run_one(parts, "light-15-2-20")
    stop_server(parts)
    log = journal_of(parts)
    content = log.read_bytes()
    log.write_bytes(content[: content.rindex(b"\r\n*") + 7])
    start_server(parts)
    assert parts.job(kept).kind == "distill"
    following = run_one(parts, "light-15-2-20")
    assert find_job_violations(parts, following, "light-15-2-20", tmp_path / "spare") == []
    assert [
        line.what for line in read_ledger(parts.settings.run_dir(following)) if line.of != following
    ] == [
        "begin",
        "end",
        "begin",
        "end",
    ], "the sealed cache is found on disk, and no shard captured again"


@pytest.mark.long
def test_a_damaged_journal_is_reported_and_repaired_as_documented(
    parts: Parts, tmp_path: Path
) -> None:
    parts.start_worker()
    first = run_one(parts, "light-16-2-20")
    hole = journal_of(parts).stat().st_size
    second = run_one(parts, "light-17-2-20")
    stop_server(parts)
    log = journal_of(parts)
    content = bytearray(log.read_bytes())
    content[hole + 200 : hole + 220] = b"x" * 20
    log.write_bytes(content)
    with pytest.raises(StoreUnavailable) as error:
        parts.server.ensure()
    assert "Bad file format" in str(error.value) and "check-aof" in str(error.value), str(
        error.value
    )
    tool = tmp_path / "valkey-check-aof"
    tool.symlink_to(find_binary())
    assert subprocess.run([tool, "--fix", log], input=b"y\n", capture_output=True).returncode == 0
    start_server(parts)
    assert parts.job(first).status == "succeeded"
    assert (found := parts.jobs.get(second)) is None or found.status not in TERMINAL_STATUSES, (
        "records after the hole are lost"
    )
    again = run_one(parts, "light-17-2-20")
    assert find_job_violations(parts, again, "light-17-2-20", tmp_path / "spare") == []
    assert "wrote" not in [
        line.what for line in read_ledger(parts.settings.run_dir(again)) if line.of != again
    ]


# ---------------------------------------------------------------------- hints and doubles


@pytest.mark.long
def test_a_hundred_hints_make_one_run(parts: Parts, tmp_path: Path) -> None:
    for _ in range(2):
        parts.start_worker()
    job_id = parts.submit("light-18-4-50", "distill")
    for number in range(100):
        stage = ("precompute", "train")[number % 2]
        parts.queue.send_task(TASK_NAME, args=[job_id, stage], queue=stage)
    assert parts.wait_for(job_id, *TERMINAL_STATUSES).attempt == 1
    waiting = parts.jobs.redis.llen("kd:celery:train")
    # The workers still receive hints.
    wait_until(lambda: parts.jobs.redis.llen("kd:celery:train") < waiting or waiting == 0)
    time.sleep(2)
    assert begins(parts, job_id) == 2, "one execution of each stage"
    assert parts.statuses(job_id) == ["queued", "running"] * 2 + ["succeeded"]
    assert find_job_violations(parts, job_id, "light-18-4-50", tmp_path / "spare") == []


@pytest.mark.long
def test_a_hundred_posts_with_one_key_make_one_job(parts: Parts, inputs: Path) -> None:
    parts.start_api()
    job = make_light_body(inputs, "light-19-1-20")
    headers = {"Idempotency-Key": "the same"}
    with (
        httpx.Client(base_url=parts.settings.server, timeout=60) as http,
        ThreadPoolExecutor(50) as pool,
    ):
        answers = list(
            pool.map(lambda _: http.post("/jobs", json=job, headers=headers), range(100))
        )
    assert Counter(answer.status_code for answer in answers) == {202: 100}
    assert len({answer.json()["id"] for answer in answers}) == 1
    assert sum("idempotent-replayed" in answer.headers for answer in answers) == 99
    assert len(parts.http.get("/jobs").json()["data"]) == 1


#: An API that is killed when it would send the hint: the record exists, and no worker knows of it.
DYING_API = """
import os, runpy, signal
import services.store.queue
services.store.queue.publish_hint = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
runpy.run_module("services.api", run_name="__main__")
"""


@pytest.mark.long
def test_a_job_whose_api_was_killed_before_its_hint_starts(parts: Parts, inputs: Path) -> None:
    dying = subprocess.Popen(
        [sys.executable, "-c", DYING_API], cwd=ROOT, env=os.environ | parts.settings.environment()
    )
    try:
        wait_until(lambda: parts.answers("/healthz"))
        with pytest.raises(httpx.TransportError):
            parts.http.post("/jobs", json=make_light_body(inputs, "light-20-1-20"))
        assert dying.wait(10) == -signal.SIGKILL
    finally:
        dying.kill()
        dying.wait()
    (job_id,) = parts.jobs.redis.zrange("kd:open", 0, -1)
    assert parts.job(job_id).status == "queued"
    parts.start_worker()
    parts.start_api()
    parts.wait_for(job_id, "running", *TERMINAL_STATUSES)
    assert parts.wait_for(job_id, *TERMINAL_STATUSES).status == "succeeded"


# ---------------------------------------------------------------------- clocks


def libfaketime() -> Path:
    package = pytest.importorskip("libfaketime")
    return Path(package.__file__).parent / "vendor" / "libfaketime" / "src" / "libfaketime.so.1"


@pytest.mark.alone
@pytest.mark.long
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs LD_PRELOAD")
def test_clocks_that_jump_an_hour_do_not_change_leases(
    new_parts: MakeParts, tmp_path: Path
) -> None:
    parts = new_parts(child_module="bench.support.light_child", **RATES)
    clock = tmp_path / "clock"
    clock.write_text("+0")
    jumping = {
        "LD_PRELOAD": str(libfaketime()),
        "FAKETIME_TIMESTAMP_FILE": str(clock),
        "FAKETIME_NO_CACHE": "1",
        "FAKETIME_DONT_FAKE_MONOTONIC": "1",
        "DONT_FAKE_MONOTONIC": "1",
    }
    api = parts.start("services.api", **jumping)
    wait_until(lambda: parts.answers("/healthz") and api.poll() is None)
    worker = parts.start("services.worker", **jumping)
    name = "light-21-5-200"
    job_id = parts.submit(name, "distill")
    for jump in ("+3600", "-3600", "+0"):
        wait_until(lambda: read_ledger(parts.settings.run_dir(job_id)))
        before = len(read_ledger(parts.settings.run_dir(job_id)))
        clock.write_text(jump)
        shown = parts.http.get("/healthz").headers["date"]
        assert shown, "the API shows its own clock"
        time.sleep(0.6 * parts.settings.lease_seconds)
        # Between the stages a child begins, and nothing is written for as long as that takes.
        wait_until(lambda: len(read_ledger(parts.settings.run_dir(job_id))) > before)  # noqa: B023
    job = parts.wait_for(job_id, *TERMINAL_STATUSES)
    assert (job.status, job.attempt) == ("succeeded", 1), job.error
    assert parts.statuses(job_id) == ["queued", "running"] * 2 + ["succeeded"]
    assert find_job_violations(parts, job_id, name, tmp_path / "spare") == []
    assert worker.poll() is None and api.poll() is None
    assert connect_redis(parts.settings.redis_url or "").zcard("kd:leases") == 0
