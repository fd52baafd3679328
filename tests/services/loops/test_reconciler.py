"""Rounds of the reconciler repair jobs after a crash, also with several reconcilers."""

from __future__ import annotations

import asyncio
import logging
import shutil
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from redis.exceptions import RedisError

from bench.support.harness import Parts, make_config
from bench.support.waiting import wait_until
from kd.config.job import JobConfig
from kd.errors import ConfigError
from kd.progress import Event
from services.loops import reconciler, teams
from services.loops.reconciler import LostCaches, Reconciler
from services.loops.webhooks import AT_ONCE, TIMEOUT_SECONDS
from services.settings import Settings
from services.store.connection import connect_redis
from services.store.jobs.leases import Claim, EventBatch
from services.store.jobs.store import JobStore
from services.store.queue import QUEUE_PREFIX, make_celery_app, publish_hint

LEASE = 5.0
FINGERPRINT = "f" * 32


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    """Settings with the test's own folder, which contains a folder of caches."""
    (tmp_path / "caches").mkdir()
    return Settings(home=tmp_path, lease_seconds=LEASE)


def hinted(parts: Parts, stage: str = "train") -> int:
    """The number of hints that wait for a worker."""
    count: Any = parts.jobs.redis.llen(f"{QUEUE_PREFIX}{stage}")
    return int(count)


def make_old(parts: Parts, *job_ids: str) -> None:
    """Let the last hint of each job lie long ago."""
    for job_id in job_ids:
        parts.jobs.redis.hset(f"kd:job:{job_id}", "dispatched_at", 0)


# ---------------------------------------------------------------------- hints


def test_a_hint_that_was_lost_is_sent_again(parts: Parts, settings: Settings) -> None:
    job_id = parts.jobs.create(make_config("quick")).id
    mending = Reconciler(parts.jobs, parts.queue, settings)
    mending.step()
    assert hinted(parts) == 0, "it was accepted a moment ago: its own hint is on the way"
    make_old(parts, job_id)
    mending.step()
    assert hinted(parts) == 1
    make_old(parts, job_id)
    mending.step()
    assert hinted(parts) == 1, "nobody has taken the one that is there"


def test_many_reconcilers_send_it_once(parts: Parts, settings: Settings) -> None:
    make_old(parts, parts.jobs.create(make_config("quick")).id)
    many = [Reconciler(parts.jobs, parts.queue, settings) for _ in range(5)]

    async def together() -> None:
        await asyncio.gather(*(asyncio.to_thread(each.step) for each in many))

    asyncio.run(together())
    assert hinted(parts) == 1


def test_where_no_hint_gets_through_the_first_failure_is_enough(
    parts: Parts, settings: Settings, caplog: pytest.LogCaptureFixture
) -> None:
    make_old(parts, *[parts.jobs.create(make_config("quick")).id for _ in range(3)])
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        app = make_celery_app(f"redis://127.0.0.1:{free.getsockname()[1]}/0", socket_timeout=0.5)
    Reconciler(parts.jobs, app, settings).step()
    app.close()
    assert caplog.text.count("no hint sent") == 1
    last_round = float(parts.jobs.redis.get("kd:reconciler"))  # type: ignore[arg-type]
    assert last_round > 0, "the round went on"


# ---------------------------------------------------------------------- leases, deadlines, life


def take(parts: Parts, job: JobConfig, lease: float = LEASE) -> Claim:
    """A claim on a new job."""
    claim = parts.jobs.claim(parts.jobs.create(job).id, job.stages[0], "w", lease)
    assert claim is not None
    return claim


def test_a_lease_is_taken_back_after_a_whole_lease_was_watched(
    parts: Parts, tmp_path: Path
) -> None:
    claim = take(parts, make_config("quick"), lease=0.001)
    mending = Reconciler(parts.jobs, parts.queue, Settings(home=tmp_path, lease_seconds=0.6))
    began = time.monotonic()
    mending.step()
    assert parts.job(claim.id).status == "running", "who has just begun to look cannot know"
    wait_until(lambda: mending.step() or parts.job(claim.id).status == "queued")
    assert time.monotonic() - began >= 0.5
    assert parts.jobs.beat(claim, LEASE, EventBatch(1, ())) == "fenced"


def test_a_deadline_ends_a_waiting_job_and_stops_a_running_one(
    parts: Parts, settings: Settings
) -> None:
    waiting = parts.jobs.create(make_config("quick", deadline_seconds=3600)).id
    running = take(parts, make_config("quick", deadline_seconds=3600))
    in_time = parts.jobs.create(make_config("quick", deadline_seconds=3600)).id
    for job_id in (waiting, running.id):
        parts.jobs.redis.zadd("kd:deadlines", {job_id: 0})
    Reconciler(parts.jobs, parts.queue, settings).step()
    failed = parts.job(waiting)
    assert (
        failed.status == "failed"
        and failed.error is not None
        and failed.error.type == "deadline_exceeded"
    )
    assert parts.jobs.beat(running, LEASE, EventBatch(1, ())) == "cancel"
    assert parts.jobs.release(running) == "failed"
    assert parts.job(in_time).status == "queued"


def test_each_round_leaves_its_time(parts: Parts, settings: Settings) -> None:
    before = parts.jobs.read_clock_ms() / 1000
    Reconciler(parts.jobs, parts.queue, settings).step()
    assert (
        before <= float(parts.jobs.redis.get("kd:reconciler")) <= parts.jobs.read_clock_ms() / 1000
    )  # type: ignore[arg-type]


def test_one_duty_that_fails_does_not_stop_the_others(
    parts: Parts, settings: Settings, caplog: pytest.LogCaptureFixture
) -> None:
    broken = parts.jobs.create(make_config("quick")).id
    parts.jobs.redis.hset(f"kd:job:{broken}", mapping={"stage": "search", "config": "{"})
    parts.jobs.redis.zadd("kd:queue:search", {broken: 0})
    make_old(parts, parts.jobs.create(make_config("quick")).id)
    Reconciler(parts.jobs, parts.queue, settings).step()
    assert "Searches.step failed" in caplog.text
    assert hinted(parts) == 1 and parts.jobs.redis.exists("kd:reconciler")


def test_a_script_that_fails_at_one_record_does_not_stop_the_other_duties(
    parts: Parts, settings: Settings, caplog: pytest.LogCaptureFixture
) -> None:
    parts.jobs.redis.set("kd:deadlines", "no sorted set")
    make_old(parts, parts.jobs.create(make_config("quick")).id)
    Reconciler(parts.jobs, parts.queue, settings).step()
    assert "WRONGTYPE" in caplog.text
    assert hinted(parts) == 1 and parts.jobs.redis.exists("kd:reconciler")


def test_redis_away_ends_the_round(settings: Settings) -> None:
    store = JobStore(connect_redis("redis://127.0.0.1:1/0"))
    with pytest.raises(RedisError):
        Reconciler(store, make_celery_app("redis://127.0.0.1:1/0"), settings).step()


def test_webhooks_without_a_secret_are_refused_at_once(parts: Parts) -> None:
    with pytest.raises(ConfigError, match="KD_WEBHOOK_SECRET_FILE"):
        Reconciler(parts.jobs, parts.queue, Settings(webhook_hosts=["example.org"]))


# ---------------------------------------------------------------------- by itself


async def _running(mending: Reconciler, meanwhile: Callable[[], None]) -> None:
    task = asyncio.create_task(mending.run())
    try:
        await asyncio.to_thread(meanwhile)
        assert not task.done()
    finally:
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task


class FallingReconciler(Reconciler):
    """A reconciler whose first round raises an error that no round should raise."""

    fallen = False

    def step(self) -> None:
        """Fall once, then work."""
        if not self.fallen:
            self.fallen = True
            raise OSError(28, "No space left on device")
        super().step()


def test_it_goes_on_after_an_error_that_ends_its_loop(
    parts: Parts, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(reconciler, "INTERVAL_SECONDS", 0.05)
    mending = FallingReconciler(parts.jobs, parts.queue, parts.settings)
    redis = parts.jobs.redis
    asyncio.run(_running(mending, lambda: wait_until(lambda: redis.exists("kd:reconciler"))))
    assert "the loop reconciler died and is started again" in caplog.text
    assert ("kd_loop_restarts_total", {"loop": "reconciler"}, 1.0) in parts.jobs.read_counters()


def test_it_outlives_a_redis_that_goes_and_comes_back(
    new_parts: Callable[..., Parts],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(reconciler, "INTERVAL_SECONDS", 0.05)
    parts = new_parts()
    redis = parts.jobs.redis

    def outage() -> None:
        wait_until(lambda: redis.exists("kd:reconciler"))
        parts.server.stop()
        wait_until(lambda: "the job store does not answer" in caplog.text)
        parts.server.start()
        redis.delete("kd:reconciler")
        wait_until(lambda: redis.exists("kd:reconciler"))

    asyncio.run(_running(Reconciler(parts.jobs, parts.queue, parts.settings), outage))


def test_a_disk_that_is_slow_holds_up_no_round(
    parts: Parts, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reconciler, "INTERVAL_SECONDS", 0.05)
    answering, asked = threading.Event(), threading.Event()

    def hang(_: Path) -> int:
        asked.set()
        answering.wait()
        return 0

    monkeypatch.setattr("services.loops.teams.sum_file_sizes", hang)
    job_id = parts.jobs.create(make_config("quick")).id
    settings.run_dir(job_id).mkdir(parents=True)

    def meanwhile() -> None:
        try:
            asked.wait()
            make_old(parts, job_id)
            wait_until(lambda: hinted(parts) == 1, 10)
        finally:
            answering.set()

    asyncio.run(_running(Reconciler(parts.jobs, parts.queue, settings), meanwhile))


def test_a_measurement_ends_with_the_api(
    parts: Parts, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured: list[Path] = []

    def measure(folder: Path) -> int:
        measured.append(folder)
        time.sleep(0.2)
        return 0

    monkeypatch.setattr("services.loops.teams.sum_file_sizes", measure)
    for _ in range(100):
        settings.run_dir(parts.jobs.create(make_config("quick")).id).mkdir(parents=True)
    began = time.monotonic()
    asyncio.run(
        _running(
            Reconciler(parts.jobs, parts.queue, settings), lambda: wait_until(lambda: measured)
        )
    )
    assert time.monotonic() - began < 10
    assert len(measured) < 50
    assert not parts.jobs.redis.exists(teams.NEXT), "another API may measure at once"


def sending(parts: Parts, folder: Path, url: str) -> Reconciler:
    """A reconciler with more messages for ``url`` than it may send at once."""
    secret = folder / "secret"
    secret.write_text("whsec_MDEyMzQ1Njc4OTAxMjM0NTY3ODkwMTIzNDU2Nzg5MDE=")
    secret.chmod(0o600)
    for _ in range(AT_ONCE + 1):
        parts.jobs.create(make_config("quick", webhook=url))
    hosts: Any = {
        "webhook_hosts": ["http://127.0.0.1", "http://hooks.example"],
        "webhook_secret_file": secret,
    }
    return Reconciler(parts.jobs, parts.queue, Settings(home=folder, **hosts))


def some_rounds(parts: Parts) -> None:
    for _ in range(3):
        parts.jobs.redis.delete("kd:reconciler")
        # Less than TIMEOUT_SECONDS: a round that waits for the receiver would take as long.
        wait_until(lambda: parts.jobs.redis.exists("kd:reconciler"), TIMEOUT_SECONDS * 0.8)


def test_a_receiver_that_never_answers_holds_up_no_round(
    parts: Parts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reconciler, "INTERVAL_SECONDS", 0.05)
    with socket.create_server(
        ("127.0.0.1", 0), backlog=128
    ) as deaf:  # accepts the connection and never answers
        mending = sending(parts, tmp_path, f"http://127.0.0.1:{deaf.getsockname()[1]}/")

        def rounds() -> None:
            connection, _ = deaf.accept()
            some_rounds(parts)
            connection.close()

        asyncio.run(_running(mending, rounds))


def test_a_resolver_that_never_answers_holds_up_no_round(
    parts: Parts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reconciler, "INTERVAL_SECONDS", 0.05)
    real = socket.getaddrinfo
    asked = threading.Semaphore(0)
    answer = threading.Event()

    def getaddrinfo(host: Any, *rest: Any, **more: Any) -> Any:
        if host == "hooks.example":
            asked.release()
            answer.wait(30)
            raise socket.gaierror
        return real(host, *rest, **more)

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)

    def rounds() -> None:
        try:
            assert all(asked.acquire(timeout=10) for _ in range(AT_ONCE))
            some_rounds(parts)
        finally:
            answer.set()

    asyncio.run(_running(sending(parts, tmp_path, "http://hooks.example/"), rounds))


@pytest.mark.long
def test_a_job_whose_api_was_killed_before_it_was_announced_starts_by_itself(
    new_parts: Callable[..., Parts], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.CRITICAL)
    parts = new_parts()
    parts.start_api()
    parts.start_worker()
    job_id = parts.jobs.create(make_config("quick")).id  # as after a kill between record and hint
    assert parts.wait_for(job_id, "succeeded").attempt == 1


# ---------------------------------------------------------------------- caches that are gone


def at_train(parts: Parts, name: str = "quick", kind: str = "distill", **changes: Any) -> str:
    """A job that has captured its cache and waits to train."""
    claim = take(parts, make_config(name, kind, **changes))
    cached = Event("cache", {"fingerprint": FINGERPRINT})
    parts.jobs.beat(claim, LEASE, EventBatch(1, (cached,)))
    assert parts.jobs.advance(claim, "search" if kind == "search" else "train") == "queued"
    return claim.id


def look(parts: Parts, settings: Settings) -> None:
    LostCaches(parts.jobs, settings).step()


def test_a_job_whose_cache_is_gone_captures_it_again(parts: Parts, settings: Settings) -> None:
    job_id = at_train(parts)
    look(parts, settings)
    job = parts.job(job_id)
    assert (job.status, job.stage, job.attempt) == ("queued", "precompute", 1)
    warnings = [data["message"] for kind, data in parts.events(job_id) if kind == "warning"]
    assert warnings == [f"Cache {FINGERPRINT} is not on the disk any more. It is captured again."]
    make_old(parts, job_id)
    Reconciler(parts.jobs, parts.queue, settings).step()
    assert hinted(parts, "precompute") == 1


def test_a_job_of_several_caches_misses_each_of_them(parts: Parts, settings: Settings) -> None:
    claim = take(parts, make_config("quick", "distill"))
    names = ["a" * 32, "b" * 32]
    plan = Event("plan", {"fingerprint": names[0], "fingerprints": names})
    parts.jobs.beat(claim, LEASE, EventBatch(1, (plan,)))
    assert parts.jobs.advance(claim, "train") == "queued"
    for name in names:
        (settings.caches / name).mkdir(parents=True)
    look(parts, settings)
    assert parts.job(claim.id).stage == "train"
    (settings.caches / names[1]).rmdir()
    look(parts, settings)
    assert parts.job(claim.id).stage == "precompute"
    (warning,) = [data for kind, data in parts.events(claim.id) if kind == "warning"]
    assert names[1] in warning["message"]


def test_a_job_that_only_reads_the_cache_fails(parts: Parts, settings: Settings) -> None:
    job = make_config("quick", cache={"fingerprint": FINGERPRINT}, loss={"alpha": 0.1})
    job_id = parts.jobs.create(job).id
    look(parts, settings)
    error = parts.job(job_id).error
    assert (
        error is not None
        and error.type == "cache_missing"
        and FINGERPRINT in error.detail
        and error.remedy
    )


def test_jobs_that_need_no_mending_are_left_alone(parts: Parts, settings: Settings) -> None:
    (settings.caches / FINGERPRINT).mkdir()
    there = at_train(parts)
    plain = parts.jobs.create(
        make_config("quick", cache={"fingerprint": "e" * 32})
    ).id  # reads no cache: alpha is 1
    versions = [parts.jobs.get(job_id).version for job_id in (there, plain)]
    look(parts, settings)
    assert [parts.jobs.get(job_id).version for job_id in (there, plain)] == versions
    shutil.rmtree(settings.caches)
    look(parts, settings)
    assert parts.jobs.get(there).version == versions[0], (
        "without any folder of caches, this is not their host"
    )


def test_a_run_under_way_is_not_disturbed(parts: Parts, settings: Settings) -> None:
    job_id = at_train(parts)
    claim = parts.jobs.claim(job_id, "train", "w", LEASE)
    assert claim is not None
    look(parts, settings)
    assert parts.jobs.beat(claim, LEASE, EventBatch(1, ())) == "go"


def test_a_search_whose_cache_is_gone_captures_it_again_before_it_is_driven_on(
    parts: Parts, settings: Settings
) -> None:
    data = {"train": "text.txt", "validation_fraction": 0.1}
    search = {"space": {"train.learning_rate": {"min": 1e-4, "max": 0.9}}, "trials": 2}
    job_id = at_train(parts, kind="search", data=data, search=search)
    look(parts, settings)
    assert (parts.job(job_id).status, parts.job(job_id).stage) == ("queued", "precompute")


def test_every_queued_job_is_looked_at_a_part_a_time(
    parts: Parts, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reconciler, "JOBS_AT_ONCE", 2)
    jobs = [at_train(parts) for _ in range(5)]
    looking = LostCaches(parts.jobs, settings)
    mended = []
    for _ in range(3):
        looking.step()
        looking.step()  # not yet time for the next
        looking._next_look = 0.0
        mended.append(sum(parts.job(job_id).stage == "precompute" for job_id in jobs))
    assert mended[0] == 2 and mended[-1] == 5


# ---------------------------------------------------------------------- damage to Redis's data


def damaged(parts: Parts, name: str, job_id: str) -> Reconciler:
    """Something that must repair a job that is missing from a list."""
    assert parts.jobs.redis.zrem(name, job_id) == 1
    return Reconciler(
        parts.jobs, parts.queue, Settings(home=parts.settings.home, lease_seconds=0.5)
    )


@pytest.mark.parametrize(
    "action, after",
    [(None, "queued"), ("pause", "paused"), ("cancel", "cancelled")],
    ids=["running", "pausing", "cancelling"],
)
def test_a_job_without_a_lease_gets_one_that_runs_out(
    parts: Parts, action: Any, after: str
) -> None:
    claim = take(parts, make_config("quick"))
    if action is not None:
        parts.jobs.change(action, claim.id)
    mending = damaged(parts, "kd:leases", claim.id)
    wait_until(lambda: mending.step() or parts.job(claim.id).status == after)


def test_a_worker_that_is_well_keeps_its_job(parts: Parts) -> None:
    claim = take(parts, make_config("quick"))
    damaged(parts, "kd:leases", claim.id).step()
    assert parts.jobs.beat(claim, LEASE, EventBatch(1, ())) == "go"
    assert parts.jobs.expire() == [] and parts.job(claim.id).status == "running"


@pytest.mark.parametrize("name", ["kd:queue:train", "kd:queue:train:local", "kd:queuers:train"])
def test_a_queued_job_gets_its_place_back(parts: Parts, name: str) -> None:
    redis = parts.jobs.redis
    job_id = parts.jobs.create(make_config("quick")).id
    before = {each: redis.dump(each) for each in redis.keys("kd:queue*")}
    mending = Reconciler(parts.jobs, parts.queue, parts.settings)
    redis.delete(name)
    if name != "kd:queue:train":  # this one is for hints and counts; claims go by team
        assert parts.jobs.claim_next("train", "w", LEASE) is None
    mending.step()
    assert {each: redis.dump(each) for each in redis.keys("kd:queue*")} == before
    claim = parts.jobs.claim_next("train", "w", LEASE)
    assert claim is not None and claim.id == job_id


@pytest.mark.parametrize(
    "outcome, status", [("succeeded", "queued"), ("failed", "cancelled"), (None, "cancelled")]
)
def test_the_end_of_a_dependency_is_heard_of_late(
    parts: Parts, settings: Settings, outcome: Any, status: str
) -> None:
    first = take(parts, make_config("quick"))
    second = parts.jobs.create(make_config("quick", depends_on=[first.id])).id
    parts.jobs.redis.delete(f"kd:job:{first.id}:dependents")
    if outcome is None:
        parts.jobs.redis.delete(f"kd:job:{first.id}")
        parts.jobs.redis.zrem("kd:open", first.id)
    else:
        parts.jobs.finish(first, outcome)
    assert parts.job(second).status == "waiting"
    Reconciler(parts.jobs, parts.queue, settings).step()
    assert parts.job(second).status == status


def test_a_deadline_is_kept_though_it_was_lost(parts: Parts) -> None:
    job_id = parts.jobs.create(make_config("quick", deadline_seconds=1)).id
    mending = damaged(parts, "kd:deadlines", job_id)
    wait_until(lambda: mending.step() or parts.job(job_id).status == "failed")


def test_what_has_nothing_to_mend_does_not_change(parts: Parts, settings: Settings) -> None:
    running = take(parts, make_config("quick")).id
    waiting = parts.jobs.create(make_config("quick", depends_on=[running])).id
    paused, queued = (parts.jobs.create(make_config("quick")).id for _ in range(2))
    parts.jobs.change("pause", paused)
    jobs = (running, waiting, paused, queued)
    versions = [parts.jobs.get(job_id).version for job_id in jobs]
    assert parts.jobs.repair(0, LEASE) == (0, [])
    assert [parts.jobs.get(job_id).version for job_id in jobs] == versions


def test_every_open_job_has_its_turn(parts: Parts, settings: Settings) -> None:
    jobs = [parts.jobs.create(make_config("quick")).id for _ in range(250)]
    parts.jobs.redis.delete("kd:queue:train")
    mending = Reconciler(parts.jobs, parts.queue, settings)
    sizes = [mending.step() or parts.jobs.redis.zcard("kd:queue:train") for _ in range(3)]
    assert sizes == [100, 200, 250] == [100, 200, len(jobs)]


def test_hints_do_not_pile_up_beside_workers_that_are_busy(
    parts: Parts, settings: Settings
) -> None:
    for _ in range(200):
        publish_hint(parts.queue, parts.jobs.create(make_config("quick")).id, "train")
    assert hinted(parts) == 200
    Reconciler(parts.jobs, parts.queue, settings).step()
    assert hinted(parts) == 32
