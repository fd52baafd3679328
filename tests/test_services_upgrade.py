"""Records of the version before: read as they are, upgraded by the first transition, and nothing of them is lost."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from redis.exceptions import ResponseError

from kd.config.placement import PLACEMENT
from kd.jobfile import parse_config
from services.jobs import LOCAL, Batch, Claim, JobQuery, JobStore, new_id
from services.schemas import Job
from tests.harness import Parts, config

SCRIPT = Path(__file__).with_name("data").joinpath("jobs_format_1.lua").read_text(encoding="utf-8")  # as it was
LOST = json.dumps({"type": "worker_lost", "detail": "It was killed.", "remedy": "Buy memory."})
FINGERPRINT = "a" * 32


class Before:
    """The version before, writing through its own script."""

    def __init__(self, store: JobStore) -> None:
        self.redis = store.redis
        self._script = store.redis.register_script(SCRIPT)

    def call(self, name: str, *arguments: Any) -> Any:
        return self._script(args=[name, *arguments])

    def create(self, kind: str = "train", sha: str = "", **changes: Any) -> str:
        wanted = config("quick", kind, **changes)
        job = {name: value for name, value in wanted.model_dump(mode="json").items() if name not in PLACEMENT}
        text = json.dumps(job, sort_keys=True)
        fields = {"kind": kind, "name": "quick", "stage": wanted.stages[0], "config": text}
        flat = [part for pair in fields.items() for part in pair]
        return str(self.call("create", new_id(), sha, "b" * 64, *flat)[1])

    def claim(self, job_id: str, stage: str, lease_ms: int = 60_000) -> Claim:
        reply = self.call("claim", job_id, stage, "host:7", lease_ms)
        return Claim(reply[0], int(reply[1]), int(reply[2]), json.loads(reply[3]))

    def beat(self, claim: Claim, batch: int, events: dict[str, dict[str, Any]], **fields: str) -> str:
        flat = [text for pair in fields.items() for text in pair]
        told = [text for kind, data in events.items() for text in (kind, json.dumps(data))]
        named = [name.replace("__", ".") for name in flat]
        return str(self.call("beat", claim.id, claim.fence, 60_000, batch, len(fields), *named, *told))


@pytest.fixture
def jobs(parts: Parts) -> JobStore:
    return parts.jobs


@pytest.fixture
def before(jobs: JobStore) -> Before:
    return Before(jobs)


class World:
    """One job of the version before in every state that it had."""

    def __init__(self, before: Before) -> None:
        self.queued = before.create("distill")
        self.busy = before.claim(before.create("distill"), "precompute")
        data = {"metrics": {"step": 3, "loss": 2.5}, "cache": {"fingerprint": FINGERPRINT}}
        named = {"metrics__step": "3", "metrics__loss": "2.5", "cache__fingerprint": f'"{FINGERPRINT}"'}
        assert before.beat(self.busy, 1, data, **named) == "go"
        self.leaving = before.claim(before.create(), "train")
        before.call("cancel", self.leaving.id)
        self.done, self.failed, self.cancelled = before.create(), before.create(), before.create()
        before.call("finish", self.done, before.claim(self.done, "train").fence, "succeeded", "null")
        before.call("finish", self.failed, before.claim(self.failed, "train").fence, "failed", LOST)
        before.call("cancel", self.cancelled)
        self.died = before.create()
        before.call("fail_attempt", self.died, before.claim(self.died, "train").fence, LOST, 3)
        self.second = before.create("distill")
        before.call("advance", self.second, before.claim(self.second, "precompute").fence, "train")
        self.reader = before.create(loss={"alpha": 0.1}, cache={"fingerprint": FINGERPRINT})
        self.ids = [self.queued, self.busy.id, self.leaving.id, self.done, self.failed, self.cancelled, self.died]
        self.ids += [self.second, self.reader]


@pytest.fixture
def world(before: Before) -> World:
    return World(before)


def same(then: Job, now: Job) -> None:
    """What the version before knew of a job is what this one knows, but for words that mean something else now."""
    renamed = {"owner", "worker", "version", "status", "cache", "queue_position"}
    assert then.model_dump(exclude=renamed) == now.model_dump(exclude=renamed)


FIRST_CALLS: dict[str, Callable[[JobStore], object]] = {
    "create": lambda jobs: jobs.create(config("quick")),
    "expire": lambda jobs: jobs.expire(),
    "due": lambda jobs: jobs.due(),
    "hints": lambda jobs: jobs.unannounced("train", 3600),
    "change": lambda jobs: jobs.change("cancel", new_id()),
    "claim": lambda jobs: jobs.claim(new_id(), "train", "w", 5),
    "webhooks": lambda jobs: jobs.due_webhooks(5, 5),
}


@pytest.mark.parametrize("call", FIRST_CALLS)
def test_the_first_transition_upgrades_every_record_and_loses_nothing(jobs: JobStore, world: World, call: str) -> None:
    then = {job_id: jobs.get(job_id) for job_id in world.ids}
    told = {job_id: jobs.events(job_id) for job_id in world.ids}
    FIRST_CALLS[call](jobs)
    assert jobs.redis.get("kd:format") == "2"
    assert jobs.redis.exists("kd:jobs") == 0
    for job_id in world.ids:
        now = jobs.get(job_id)
        same(then[job_id], now)
        assert (now.priority, now.max_attempts, now.labels, now.depends_on, now.reason) == (5, 3, {}, [], None)
        assert now.version > then[job_id].version
        assert jobs.events(job_id) == told[job_id]
        assert jobs.redis.hget(f"kd:job:{job_id}", "format") == "2"
    listed = [job.id for job in jobs.page(JobQuery(), 100).jobs if job.id in then]
    assert listed == world.ids[::-1]


def test_records_can_be_read_before_they_are_upgraded(jobs: JobStore, world: World) -> None:
    """What only reads may be the first to come."""
    busy = jobs.get(world.busy.id)
    assert (busy.status, busy.metrics.loss, busy.cache.fingerprint) == ("running", 2.5, FINGERPRINT)
    assert jobs.get(world.failed).error.type == "worker_lost"
    assert jobs.version(world.done) == jobs.get(world.done).version
    assert [data["status"] for _, _, data in jobs.events(world.done, types=["status"])] == [
        "queued",
        "running",
        "succeeded",
    ]


def test_every_upgraded_record_is_where_the_indexes_say(jobs: JobStore, world: World) -> None:
    jobs.expire()
    by_status = {
        "queued": [world.queued, world.died, world.second, world.reader],
        "running": [world.busy.id],
        "cancelling": [world.leaving.id],
        "succeeded": [world.done],
        "failed": [world.failed],
        "cancelled": [world.cancelled],
    }
    for who in ("*", "local"):
        assert jobs.redis.zrange(f"kd:index:{who}:*", 0, -1) == world.ids
        for status, ids in by_status.items():
            assert jobs.redis.zrange(f"kd:index:{who}:{status}", 0, -1) == ids
    assert {status: number for status, number in jobs.statuses().items() if number} == {
        status: len(ids) for status, ids in by_status.items()
    }
    assert jobs.redis.zrange("kd:queue:precompute", 0, -1) == [world.queued]
    assert jobs.redis.zrange("kd:queue:train", 0, -1) == [world.died, world.second, world.reader]
    assert {jobs.get(job_id).owner for job_id in world.ids} == {LOCAL.name}
    assert (jobs.get(world.busy.id).worker, jobs.get(world.done).worker) == ("host:7", None)
    assert jobs.cache_users(FINGERPRINT) == sorted([world.busy.id, world.reader])


def test_a_worker_of_before_keeps_its_job(jobs: JobStore, world: World) -> None:
    assert jobs.beat(world.busy, 5, Batch(1, ({"type": "warning", "data": {"message": "twice"}},))) == "go"
    assert "warning" not in [kind for _, kind, _ in jobs.events(world.busy.id)], "the batch was known before"
    assert jobs.advance(world.busy, "train") == "queued"
    assert jobs.beat(world.leaving, 5, Batch(1, ())) == "cancel"
    assert jobs.release(world.leaving) == "cancelled"
    again = jobs.claim(world.busy.id, "train", "w", 5)
    assert (again.fence, again.attempt) == (2, 1)


def test_a_worker_of_before_that_has_died_costs_an_attempt(jobs: JobStore, before: Before) -> None:
    claim = before.claim(before.create(), "train", 1)
    jobs.redis.zadd("kd:leases", {claim.id: 1})
    assert jobs.expire() == [claim.id]
    again = jobs.claim(claim.id, "train", "w", 5)
    assert (again.attempt, again.fence) == (2, 2)
    assert parse_config(again.config).name == "quick"


def test_upgraded_jobs_do_all_that_new_ones_do(jobs: JobStore, world: World) -> None:
    jobs.expire()
    urgent = jobs.create(config("quick", priority=9, depends_on=[world.died])).id
    assert jobs.change("retry", world.failed).status == jobs.change("retry", world.cancelled).status == "queued"
    assert jobs.change("pause", world.second).status == "paused"
    assert jobs.change("resume", world.second).status == "queued"
    order = [jobs.claim_next("train", "w", 5).id for _ in range(5)]
    assert order == [world.failed, world.cancelled, world.died, world.second, world.reader]
    fence = int(jobs.redis.hget(f"kd:job:{world.died}", "fence"))
    assert jobs.finish(Claim(world.died, fence, 2, {}), "succeeded") == "succeeded"
    assert jobs.claim_next("train", "w", 5).id == urgent
    for job_id in (world.died, world.done):
        assert jobs.change("delete", job_id).outcome == "done"
        assert jobs.redis.keys(f"kd:job:{job_id}*") == []
        assert jobs.redis.zscore("kd:index:local:*", job_id) is None


def test_a_search_of_before_goes_on_with_its_trials(jobs: JobStore, before: Before) -> None:
    search = before.create("search", search={"space": {"train.learning_rate": {"choices": [0.1]}}}, data=HELD_OUT)
    before.call("advance", search, before.claim(search, "precompute").fence, "search")
    driver = before.claim(search, "search")
    before.call("journal", search, driver.fence, '{"a": 1}')
    fields = {
        "kind": "train",
        "name": "trial",
        "stage": "train",
        "config": json.dumps({"cache": {"fingerprint": None}}),
    }
    flat = [part for pair in fields.items() for part in pair]
    trial = before.call("trial", search, driver.fence, 0, new_id(), *flat)
    assert jobs.add_to_journal(driver, [{"b": 2}]) == "go"
    assert jobs.journal(search, 0) == [{"a": 1}, {"b": 2}]
    assert jobs.trials(search) == {0: trial}
    assert jobs.get(trial).parent == search
    assert jobs.create_trial(driver, 0, config("trial")) == trial
    jobs.finish(driver, "succeeded")
    assert jobs.get(trial).status == "cancelled"


HELD_OUT = {"train": "text.txt", "validation_fraction": 0.1}


def test_an_upgrade_happens_once(jobs: JobStore, world: World) -> None:
    then = {job_id: jobs.version(job_id) for job_id in world.ids}
    gate = threading.Barrier(8)
    errors: list[Exception] = []

    def first() -> None:
        gate.wait()
        try:
            jobs.expire()
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=first) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    versions = {job_id: jobs.version(job_id) for job_id in world.ids}
    jobs.expire()
    assert versions == {job_id: jobs.version(job_id) for job_id in world.ids}
    assert versions == {job_id: version + 1 for job_id, version in then.items()}


def test_an_entry_without_a_record_does_not_stop_an_upgrade(jobs: JobStore, world: World) -> None:
    lost = new_id()
    jobs.redis.zadd("kd:jobs", {lost: 1})
    jobs.expire()
    assert jobs.get(lost) is None
    assert jobs.redis.keys(f"kd:job:{lost}*") == []
    assert len(jobs.page(JobQuery(), 100).jobs) == len(world.ids)


def test_thousands_of_records_are_upgraded_before_anybody_times_out(jobs: JobStore, before: Before) -> None:
    wanted = config("quick").model_dump(mode="json", exclude=set(PLACEMENT))
    fields = {"kind": "train", "name": "quick", "stage": "train", "config": json.dumps(wanted)}
    flat = [part for pair in fields.items() for part in pair]
    pipeline = jobs.redis.pipeline(transaction=False)
    for _ in range(3000):
        before._script(args=["create", new_id(), "", "b" * 64, *flat], client=pipeline)
    pipeline.execute()
    jobs.expire()  # over a connection that waits two seconds
    assert jobs.statuses()["queued"] == jobs.queue_depths(["train"])["train"] == 3000


def test_an_empty_server_is_of_this_format(jobs: JobStore) -> None:
    jobs.expire()
    assert jobs.redis.get("kd:format") == "2"
    assert jobs.redis.keys("*") == ["kd:format"]


def test_records_of_a_newer_version_are_refused_and_left_alone(jobs: JobStore) -> None:
    job_id = jobs.create(config("quick")).id
    jobs.redis.set("kd:format", "3")
    before = jobs.redis.keys("*")
    record = jobs.redis.hgetall(f"kd:job:{job_id}")
    calls = {**FIRST_CALLS, "this one": lambda jobs: jobs.change("cancel", job_id)}
    for call in calls.values():
        with pytest.raises(ResponseError, match=r"NEWERFORMAT the records are of format 3.*knows 2: use the newer one"):
            call(jobs)
    assert sorted(jobs.redis.keys("*")) == sorted(before)
    assert jobs.redis.hgetall(f"kd:job:{job_id}") == record
