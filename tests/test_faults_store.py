"""The job store killed, stopped, full and damaged, for real: rows 5, 6, 8, 9, 12, 14, 16 and 18 of the faults."""

from __future__ import annotations

import contextlib
import json
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

from kd.config.placement import PLACEMENT
from services.embedded import ServerError, find_binary
from services.jobs import connect, new_id
from services.queue import TASK
from services.schemas import TERMINAL
from tests.chaos import Answer, Client, Prober, light_body, make_inputs, small_disk
from tests.harness import ROOT, Parts, config, wait_until
from tests.judge import job_violations, ledger, products, promised_answers, wrote

pytestmark = pytest.mark.alone

MakeParts = Callable[..., Parts]

OUTAGE_SECONDS = float(os.environ.get("CHAOS_OUTAGE_SECONDS", "20"))  # `make chaos` says 300
SLOWEST_ANSWER = 3.0
RATES = {"rate_post": 10**6, "rate_get": 10**6, "quota_open_jobs": 10**6}


@pytest.fixture
def inputs(tmp_path: Path) -> Path:
    return make_inputs(tmp_path / "inputs")


@pytest.fixture
def parts(new_parts: MakeParts, inputs: Path) -> Parts:
    """A server of its own, with the light child."""
    return new_parts(child_module="tests.light_child", data_roots=(inputs,), **RATES)


@pytest.fixture
def tmpfs() -> Iterator[Callable[[Path, str], Path]]:
    """Small disks, which end with the test."""
    with contextlib.ExitStack() as disks:
        yield lambda folder, size: disks.enter_context(small_disk(folder, size))


@contextlib.contextmanager
def probing(parts: Parts, job_id: str) -> Iterator[list[Answer]]:
    """Ask the API all the while; afterwards the list holds what it said."""
    prober, answers = Prober(parts.settings.server), list[Answer]()
    prober.jobs.append(job_id)
    try:
        yield answers
    finally:
        answers += prober.answers
        prober.close()


def steps(parts: Parts, job_id: str) -> list[int]:
    return wrote(parts.settings.run_dir(job_id), job_id)


def begins(parts: Parts, job_id: str) -> int:
    return sum(line.what == "begin" for line in ledger(parts.settings.run_dir(job_id)))


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


def require_undisturbed(parts: Parts, job_id: str, name: str, spare: Path, answers: list[Answer]) -> None:
    """One attempt, every product right, every step reported once, and the API has behaved all the while."""
    job = parts.wait_for(job_id, *TERMINAL, seconds=60)
    assert (job.status, job.attempt) == ("succeeded", 1), job.error
    assert job_violations(parts, job_id, name, spare) == []
    assert begins(parts, job_id) == 2, "one process for each stage"
    reported = [data["step"] for kind, data in parts.events(job_id) if kind == "metrics"]
    assert reported == list(range(1, len(reported) + 1)) == steps(parts, job_id), "the history is complete"
    assert list(promised_answers(answers)) == []
    heard = Counter(answer.status for answer in answers)
    assert heard[503] > 0 and heard[200] > 0 and heard[None] == 0, heard
    assert max(answer.seconds for answer in answers) < SLOWEST_ANSWER


@pytest.mark.slow
def test_row_5_a_redis_killed_ten_times_stops_no_training(parts: Parts, tmp_path: Path) -> None:
    parts.start_api()
    parts.start_worker()
    name = "light-10-20-150"
    job_id = parts.submit(name, "distill")
    wait_until(lambda: steps(parts, job_id), 30)
    with probing(parts, job_id) as answers:
        for _ in range(10):
            stop_server(parts)
            before = len(steps(parts, job_id))
            wait_until(lambda before=before: len(steps(parts, job_id)) > before + 2, 3)
            start_server(parts)
            time.sleep(0.3)
    require_undisturbed(parts, job_id, name, tmp_path / "spare", answers)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("manner", ["ended", "frozen"])
def test_row_6_a_redis_away_for_minutes_stops_no_training(parts: Parts, tmp_path: Path, manner: str) -> None:
    parts.start_api()
    parts.start_worker()
    milliseconds = int(OUTAGE_SECONDS / 14 * 1000) + 50  # 16 steps: it trains until after the outage
    name = f"light-11-4-{milliseconds}"
    job_id = parts.submit(name, "distill")
    wait_until(lambda: steps(parts, job_id), 30 + 5 * milliseconds / 1000)
    with probing(parts, job_id) as answers:
        pid = parts.server.pid
        os.kill(pid, signal.SIGKILL if manner == "ended" else signal.SIGSTOP)
        before = len(steps(parts, job_id))
        time.sleep(OUTAGE_SECONDS)
        assert len(steps(parts, job_id)) >= before + 10, "the run goes on meanwhile"
        start_server(parts) if manner == "ended" else os.kill(pid, signal.SIGCONT)
        back = time.monotonic()
        wait_until(lambda: parts.answers("/readyz"), 35)
        wait_until(lambda: parts.job(job_id).progress.done == len(steps(parts, job_id)), 35)
        following = parts.submit("light-12-1-20", "distill")
        parts.wait_for(job_id, *TERMINAL, seconds=120)
    parts.wait_for(following, "running", *TERMINAL, seconds=max(35 - (time.monotonic() - back), 10))
    require_undisturbed(parts, job_id, name, tmp_path / "spare", answers)


# ---------------------------------------------------------------------- full


def require_reads_but_no_writes(parts: Parts, client: Client, inputs: Path, job_id: str) -> None:
    refused = client.http.post("/jobs", json=light_body(inputs, "light-13-1-20"))
    assert refused.status_code == 503, refused.text
    assert refused.json()["type"].endswith("store-unavailable")
    assert int(refused.headers["retry-after"]) >= 1
    assert client.http.get(f"/jobs/{job_id}").status_code == 200, "what is known can still be read"
    assert client.http.get("/readyz").status_code == 503
    assert client.http.get("/healthz").status_code == 200


def require_recovery(parts: Parts, client: Client, inputs: Path, job_id: str) -> str:
    """Within five seconds of there being space: POST is taken, and the run is heard of. Returns the job posted."""
    freed, heard = time.monotonic(), parts.job(job_id).heartbeat_at
    posted = wait_until(
        lambda: (answer := client.http.post("/jobs", json=light_body(inputs, "light-13-1-20"))).is_success and answer, 5
    )
    wait_until(lambda: parts.job(job_id).heartbeat_at != heard, max(5 - (time.monotonic() - freed), 0.1))
    return str(posted.json()["id"])


def require_full_store_harmless(parts: Parts, inputs: Path, fill: Callable[[], None], free: Callable[[], None]) -> None:
    parts.start_api()
    parts.start_worker()
    name = "light-14-12-120"
    job_id, client = parts.submit(name, "distill"), Client(parts.settings.server)
    wait_until(lambda: steps(parts, job_id))
    fill()
    before = len(steps(parts, job_id))
    require_reads_but_no_writes(parts, client, inputs, job_id)
    time.sleep(1.5 * parts.settings.lease_seconds)
    assert len(steps(parts, job_id)) > before + 10, "the run goes on meanwhile"
    free()
    other = require_recovery(parts, client, inputs, job_id)
    client.close()
    job = parts.wait_for(job_id, *TERMINAL)
    assert (job.status, job.attempt) == ("succeeded", 1), job.error
    assert job_violations(parts, job_id, name, inputs.parent / "spare") == []
    assert parts.wait_for(other, *TERMINAL).status == "succeeded"


def test_row_8_a_redis_without_memory_refuses_jobs_and_loses_none(parts: Parts, inputs: Path) -> None:
    redis = parts.jobs.redis
    require_full_store_harmless(
        parts, inputs, lambda: redis.config_set("maxmemory", "100kb"), lambda: redis.config_set("maxmemory", "0")
    )


def test_row_8_a_redis_without_disk_refuses_jobs_and_loses_none(
    new_parts: MakeParts, inputs: Path, tmpfs: Callable[[Path, str], Path], tmp_path: Path
) -> None:
    folder = tmpfs(tmp_path / "home 0" / "redis", "3m")
    parts = new_parts(child_module="tests.light_child", data_roots=(inputs,), **RATES)
    ballast = folder / "ballast"

    def fill() -> None:
        with contextlib.suppress(OSError), ballast.open("wb", buffering=0) as file:
            while file.write(b"\0" * 4096):
                pass
        with contextlib.suppress(OSError), ballast.open("ab", buffering=0) as file:
            while file.write(b"\0"):
                pass
        wait_until(lambda: not is_up(parts), 10)  # PING tells of it once a write has failed

    require_full_store_harmless(parts, inputs, fill, ballast.unlink)


# ---------------------------------------------------------------------- damaged


def journal_of(parts: Parts) -> Path:
    (log,) = (parts.settings.home / "redis" / "appendonlydir").glob("*.incr.aof")
    return log


def run_one(parts: Parts, name: str) -> str:
    job_id = parts.submit(name, "distill")
    assert parts.wait_for(job_id, *TERMINAL).status == "succeeded"
    return job_id


def test_row_9_a_journal_whose_tail_is_cut_starts(parts: Parts, tmp_path: Path) -> None:
    parts.start_worker()
    kept = run_one(parts, "light-15-2-20")
    stop_server(parts)
    log = journal_of(parts)
    content = log.read_bytes()
    log.write_bytes(content[: content.rindex(b"\r\n*") + 7])
    start_server(parts)
    assert parts.job(kept).kind == "distill"
    following = run_one(parts, "light-15-2-20")
    assert job_violations(parts, following, "light-15-2-20", tmp_path / "spare") == []
    assert [line.what for line in ledger(parts.settings.run_dir(following)) if line.of != following] == [
        "begin",
        "end",
        "begin",
        "end",
    ], "the sealed cache is found on disk, and no shard captured again"


def test_row_9_a_journal_with_a_hole_is_reported_and_repaired_as_documented(parts: Parts, tmp_path: Path) -> None:
    parts.start_worker()
    first = run_one(parts, "light-16-2-20")
    hole = journal_of(parts).stat().st_size
    second = run_one(parts, "light-17-2-20")
    stop_server(parts)
    log = journal_of(parts)
    content = bytearray(log.read_bytes())
    content[hole + 200 : hole + 220] = b"x" * 20
    log.write_bytes(content)
    with pytest.raises(ServerError) as error:
        parts.server.ensure()
    assert "Bad file format" in str(error.value) and "check-aof" in str(error.value), str(error.value)
    tool = tmp_path / "valkey-check-aof"
    tool.symlink_to(find_binary())
    assert subprocess.run([tool, "--fix", log], input=b"y\n", capture_output=True).returncode == 0
    start_server(parts)
    assert parts.job(first).status == "succeeded"
    assert (found := parts.jobs.get(second)) is None or found.status not in TERMINAL, "what came after the hole is lost"
    again = run_one(parts, "light-17-2-20")
    assert job_violations(parts, again, "light-17-2-20", tmp_path / "spare") == []
    assert "wrote" not in [line.what for line in ledger(parts.settings.run_dir(again)) if line.of != again]


# ---------------------------------------------------------------------- hints and doubles


def test_row_12_a_hundred_hints_are_one_run(parts: Parts, tmp_path: Path) -> None:
    for _ in range(2):
        parts.start_worker()
    job_id = parts.submit("light-18-4-50", "distill")
    for number in range(100):
        stage = ("precompute", "train")[number % 2]
        parts.queue.send_task(TASK, args=[job_id, stage], queue=stage)
    assert parts.wait_for(job_id, *TERMINAL).attempt == 1
    waiting = parts.jobs.redis.llen("kd:celery:train")
    wait_until(lambda: parts.jobs.redis.llen("kd:celery:train") < waiting or waiting == 0)  # hints go on being taken
    time.sleep(2)
    assert begins(parts, job_id) == 2, "one execution of each stage"
    assert parts.statuses(job_id) == ["queued", "running"] * 2 + ["succeeded"]
    assert job_violations(parts, job_id, "light-18-4-50", tmp_path / "spare") == []


def test_row_12_a_hundred_posts_with_one_key_are_one_job(parts: Parts, inputs: Path) -> None:
    parts.start_api()
    job, headers = light_body(inputs, "light-19-1-20"), {"Idempotency-Key": "the same"}
    with httpx.Client(base_url=parts.settings.server, timeout=60) as http, ThreadPoolExecutor(50) as pool:
        answers = list(pool.map(lambda _: http.post("/jobs", json=job, headers=headers), range(100)))
    assert Counter(answer.status_code for answer in answers) == {202: 100}
    assert len({answer.json()["id"] for answer in answers}) == 1
    assert sum("idempotent-replayed" in answer.headers for answer in answers) == 99
    assert len(parts.http.get("/jobs").json()["data"]) == 1


#: The API, which is killed the moment that it would publish: the record is written, and nobody was told.
DYING_API = """
import os, runpy, signal
import services.queue
services.queue.publish = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
runpy.run_module("services.api", run_name="__main__")
"""


def test_row_14_a_job_whose_api_was_killed_before_its_hint_starts(parts: Parts, inputs: Path) -> None:
    dying = subprocess.Popen([sys.executable, "-c", DYING_API], cwd=ROOT, env=os.environ | parts.settings.environment())
    try:
        wait_until(lambda: parts.answers("/healthz"))
        with pytest.raises(httpx.TransportError):
            parts.http.post("/jobs", json=light_body(inputs, "light-20-1-20"))
        assert dying.wait(10) == -signal.SIGKILL
    finally:
        dying.kill()
        dying.wait()
    (job_id,) = parts.jobs.redis.zrange("kd:open", 0, -1)
    assert parts.job(job_id).status == "queued"
    parts.start_worker()
    parts.start_api()
    parts.wait_for(job_id, "running", *TERMINAL, seconds=30)
    assert parts.wait_for(job_id, *TERMINAL).status == "succeeded"


# ---------------------------------------------------------------------- clocks


def libfaketime() -> Path:
    package = pytest.importorskip("libfaketime")
    return Path(package.__file__).parent / "vendor" / "libfaketime" / "src" / "libfaketime.so.1"


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs LD_PRELOAD")
def test_row_16_clocks_that_jump_an_hour_do_nothing_to_leases(new_parts: MakeParts, tmp_path: Path) -> None:
    parts = new_parts(child_module="tests.light_child", **RATES)
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
    name = "light-21-8-100"
    job_id = parts.submit(name, "distill")
    for jump in ("+3600", "-3600", "+0"):
        wait_until(lambda: ledger(parts.settings.run_dir(job_id)))
        before = len(ledger(parts.settings.run_dir(job_id)))
        clock.write_text(jump)
        shown = parts.http.get("/healthz").headers["date"]
        assert shown, "the API shows its own clock"
        time.sleep(0.6 * parts.settings.lease_seconds)
        assert len(ledger(parts.settings.run_dir(job_id))) > before
    job = parts.wait_for(job_id, *TERMINAL)
    assert (job.status, job.attempt) == ("succeeded", 1), job.error
    assert parts.statuses(job_id) == ["queued", "running"] * 2 + ["succeeded"]
    assert job_violations(parts, job_id, name, tmp_path / "spare") == []
    assert worker.poll() is None and api.poll() is None
    assert connect(parts.settings.redis_url or "").zcard("kd:leases") == 0


# ---------------------------------------------------------------------- the version before

FORMAT_1 = ROOT / "tests" / "data" / "jobs_format_1.lua"


def test_row_18_jobs_of_the_version_before_are_shown_and_run(parts: Parts, tmp_path: Path) -> None:
    before = parts.jobs.redis.register_script(FORMAT_1.read_text(encoding="utf-8"))
    name, ids = "light-60-1-20", [new_id() for _ in range(4)]
    plain = config(name, "distill").model_dump(mode="json", exclude=set(PLACEMENT))
    fields = {"kind": "distill", "name": name, "stage": "precompute", "config": json.dumps(plain)}
    for job_id in ids:
        before(args=["create", job_id, "", "b" * 64, *[text for pair in fields.items() for text in pair]])
    queued, held, ended, cancelled = ids
    before(args=["claim", held, "precompute", "a worker that is no more", 1])
    _, fence, _, _ = before(args=["claim", ended, "precompute", "host:1", 60_000])
    before(args=["finish", ended, fence, "failed", json.dumps({"type": "worker_lost", "detail": "x", "remedy": "y"})])
    before(args=["cancel", cancelled])

    parts.start_api()
    shown = {job_id: parts.http.get(f"/jobs/{job_id}") for job_id in ids}
    assert {answer.status_code for answer in shown.values()} == {200}
    assert [shown[job_id].json()["status"] for job_id in (queued, ended, cancelled)] == [
        "queued",
        "failed",
        "cancelled",
    ]
    assert {job["id"] for job in parts.http.get("/jobs").json()["data"]} == set(ids)
    parts.start_worker()
    for job_id in (ended, cancelled):
        assert parts.http.post(f"/jobs/{job_id}/retry").status_code == 202
    for job_id in ids:
        assert parts.wait_for(job_id, *TERMINAL, seconds=60).status == "succeeded"
        assert list(products(parts, name, job_id, tmp_path / "spare")) == []
    assert parts.job(held).attempt == 2, "the worker that had it is gone"
