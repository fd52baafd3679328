"""A model of the job record in Python. On random histories it must agree with a real server."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from bench.support.harness import Parts, make_config
from kd.client.wire.jobs import ACTIVE_STATUSES, TERMINAL_STATUSES, Action
from kd.config.job import JobConfig
from kd.progress import Event
from services.store.callers import Caller
from services.store.jobs.leases import Capacity, Claim, EventBatch
from services.store.jobs.store import JobStore
from tests.support.records import ALLOWED_IN

ERROR = {"type": "internal", "detail": "It died.", "remedy": ""}
OWNERS = (Caller("ann"), Caller("ann"), Caller("bob"))
ENDED_BADLY = frozenset({"failed", "cancelled"})
MOSTLY = st.sampled_from([True, True, True, False])
HISTORIES = int(os.environ.get("POTSTILL_HISTORIES", "60"))  # a night's worth may be asked for
STEPS = 60


@dataclass
class Model:
    """The state of one job."""

    id: str
    number: int
    owner: str
    priority: int
    gpus: int
    max_attempts: int
    needs: tuple[str, ...]
    has_deadline: bool
    fingerprint: str | None
    status: str = ""
    stage: str = ""
    fence: int = 0
    attempt: int = 0
    before: int = 0
    fresh: bool = True
    armed: bool = False
    late: bool = False
    waits: set[str] = field(default_factory=set)
    told: list[str] = field(default_factory=list)
    version: int = 0
    used_ms: int = 0


class Record(RuleBasedStateMachine):
    """Clients, workers and the reconciler act in any order, and so do workers that lost a job."""

    store: JobStore

    def __init__(self) -> None:
        super().__init__()
        self.store.redis.flushall()
        self.jobs: dict[str, Model] = {}
        self.deleted: set[str] = set()
        self.claims: list[Claim] = []
        self.keys: dict[tuple[str, str], tuple[str, str]] = {}
        self.forgotten: Counter[str] = Counter()
        self.batch = 0

    # ------------------------------------------------------------------ how the model moves

    def move(self, job: Model, status: str) -> str:
        job.status = status
        job.told.append(status)
        if status in TERMINAL_STATUSES | {"paused", "cancelling"}:
            job.armed = False
        if status in TERMINAL_STATUSES:
            job.late = job.late and status == "failed"
            for other in sorted(self.jobs.values(), key=lambda other: other.number):
                if job.id in other.waits:
                    self.settle(other, job)
        return status

    def settle(self, job: Model, other: Model) -> None:
        if other.status == "succeeded":
            job.waits.discard(other.id)
        if job.status not in ("waiting", "paused"):
            return
        if other.status != "succeeded":
            self.move(job, "cancelled")
        elif job.status == "waiting" and not job.waits:
            self.move(job, "queued")

    def enter(self, job: Model) -> str:
        job.armed = job.has_deadline
        return self.move(job, "waiting" if job.waits else "queued")

    def stopped(self, job: Model) -> str:
        if job.status == "cancelling":
            return self.move(job, "failed" if job.late else "cancelled")
        return self.move(job, "paused" if job.status == "pausing" else "queued")

    def died(self, job: Model) -> str:
        if job.status != "cancelling" and job.attempt - job.before >= job.max_attempts:
            return self.move(job, "failed")
        job.fresh = job.fresh or job.status != "cancelling"
        return self.stopped(job)

    def changed(self, action: Action, job: Model) -> tuple[str, str]:
        """The result of an action."""
        already = {"cancel": {"cancelling", "cancelled"}, "pause": {"pausing", "paused"}}
        already["resume"] = {"waiting", "queued", "running"}
        if job.status not in ALLOWED_IN[action]:
            return ("already" if job.status in already.get(action, ()) else "illegal"), job.status
        return "done", getattr(self, f"to_{action}")(job)

    def to_cancel(self, job: Model) -> str:
        return self.move(job, "cancelling" if job.status in ACTIVE_STATUSES else "cancelled")

    def to_pause(self, job: Model) -> str:
        return self.move(job, "pausing" if job.status == "running" else "paused")

    def to_resume(self, job: Model) -> str:
        if job.status == "paused":
            return self.enter(job)
        job.armed = job.has_deadline
        return self.move(job, "running")

    def to_retry(self, job: Model) -> str:
        job.before = job.attempt
        job.fresh = True
        job.late = False
        for other in job.needs:
            if other in self.jobs and self.jobs[other].status != "succeeded":
                job.waits.add(other)
        self.enter(job)
        if any(
            other not in self.jobs or self.jobs[other].status in TERMINAL_STATUSES
            for other in job.waits
        ):
            self.move(job, "cancelled")
        return job.status

    def to_delete(self, job: Model) -> str:
        self.forgotten[job.owner] += job.used_ms
        del self.jobs[job.id]
        self.deleted.add(job.id)
        return "deleted"

    def queue(self, stage: str) -> list[Model]:
        found = [job for job in self.jobs.values() if (job.status, job.stage) == ("queued", stage)]
        return sorted(found, key=lambda job: (-job.priority, job.number))

    def line(self, stage: str) -> list[Model]:
        """The queue in the order in which workers serve it: team by team, then by priority."""
        accounts = {account.team: account for account in self.store.read_accounts()}
        teams = {
            job.owner: [other for other in self.queue(stage) if other.owner == job.owner]
            for job in self.queue(stage)
        }
        order = sorted(
            teams,
            key=lambda team: (self.held(team), accounts[team].recent, teams[team][0].number),
        )
        return [job for team in order for job in teams[team]]

    def held(self, team: str) -> int:
        """The devices that the jobs of a team hold."""
        return sum(
            max(job.gpus, 1)
            for job in self.jobs.values()
            if job.owner == team and job.status in ACTIVE_STATUSES
        )

    def holds(self, claim: Claim) -> Model | None:
        job = self.jobs.get(claim.id)
        return job if job and job.status in ACTIVE_STATUSES and job.fence == claim.fence else None

    # ------------------------------------------------------------------ clients

    def pick(self, data: st.DataObject, among: list[Any]) -> Any:
        return among[data.draw(st.integers(0, len(among) - 1), label="which")]

    @initialize()
    def begin(self) -> None:
        """An empty server."""

    @precondition(lambda self: len(self.jobs) < 5)
    @rule(
        data=st.data(),
        caller=st.sampled_from(OWNERS),
        kind=st.sampled_from(["train", "distill"]),
        priority=st.sampled_from([0, 5, 5, 9]),
        gpus=st.sampled_from([0, 0, 0, 2]),
        attempts=st.sampled_from([1, 2]),
        deadline=st.booleans(),
        sealed=st.booleans(),
        key=st.sampled_from([None, None, "k1", "k2"]),
        quota=st.sampled_from([None, None, 3]),
    )
    def create(
        self,
        data: st.DataObject,
        caller: Caller,
        kind: str,
        priority: int,
        gpus: int,
        attempts: int,
        deadline: bool,
        sealed: bool,
        key: str | None,
        quota: int | None,
    ) -> None:
        mine = [
            job.id
            for job in self.jobs.values()
            if job.owner == caller.name and job.status not in ENDED_BADLY
        ]
        ids = (
            mine
            if mine and data.draw(MOSTLY, label="sensible")
            else [*self.jobs, *sorted(self.deleted)[:1]]
        )
        needs = (
            tuple(data.draw(st.lists(st.sampled_from(ids), max_size=3, unique=True))) if ids else ()
        )
        sealed = sealed and kind == "train"
        changes: dict[str, Any] = {
            "priority": priority,
            "resources": {"gpus": gpus},
            "max_attempts": attempts,
            "deadline_seconds": 3600 if deadline else None,
            "depends_on": list(needs),
            "webhook": "https://example.org/hook" if deadline else None,
        }
        if sealed:
            changes |= {"cache": {"fingerprint": "f" * 32}, "loss": {"alpha": 0.1}}
        wanted = make_config("quick", kind, **changes)
        made = self.store.create(wanted, caller, key, max_open=quota)
        expected, detail = self.creation(wanted, caller, key, quota)
        assert (made.outcome, made.detail) == (expected, detail)
        if expected == "created":
            job = Model(
                id=made.id,
                number=len(self.jobs) + len(self.deleted),
                owner=caller.name,
                priority=priority,
                gpus=gpus,
                max_attempts=attempts,
                needs=needs,
                has_deadline=deadline,
                fingerprint="f" * 32 if sealed else None,
                stage=wanted.stages[0],
            )
            self.jobs[job.id] = job
            job.waits = {other for other in needs if self.jobs[other].status != "succeeded"}
            self.enter(job)
            if key:
                self.keys[caller.name, key] = (job.id, wanted.model_dump_json())

    def creation(
        self, wanted: JobConfig, caller: Caller, key: str | None, quota: int | None
    ) -> tuple[str, str]:
        earlier, body = self.keys.get((caller.name, key or ""), ("", ""))
        if key and earlier in self.jobs:
            return ("replayed" if body == wanted.model_dump_json() else "conflict"), ""
        for other in map(self.jobs.get, wanted.depends_on):
            if other is None or other.owner != caller.name:
                return "bad_dependency", "unknown"
            if other.status in ("failed", "cancelled"):
                return "bad_dependency", other.status
        mine = sum(
            job.owner == caller.name and job.status not in TERMINAL_STATUSES
            for job in self.jobs.values()
        )
        return ("quota", str(mine)) if quota is not None and mine >= quota else ("created", "")

    def ask(self, data: st.DataObject, action: Action, among: list[Model]) -> None:
        job = self.pick(data, among)
        found = self.store.change(action, job.id)
        assert (found.outcome, found.status) == self.changed(action, job)

    def able(self, *actions: Action) -> list[Model]:
        return [
            job
            for job in self.jobs.values()
            if any(job.status in ALLOWED_IN[action] for action in actions)
        ]

    @precondition(lambda self: self.jobs)
    @rule(data=st.data(), action=st.sampled_from(list(ALLOWED_IN)))
    def change(self, data: st.DataObject, action: Action) -> None:
        self.ask(data, action, list(self.jobs.values()))

    @precondition(lambda self: any(job.status in ACTIVE_STATUSES for job in self.jobs.values()))
    @rule(data=st.data(), action=st.sampled_from(["cancel", "pause"]))
    def wish(self, data: st.DataObject, action: Action) -> None:
        self.ask(data, action, [job for job in self.jobs.values() if job.status in ACTIVE_STATUSES])

    @precondition(lambda self: self.able("retry", "resume"))
    @rule(data=st.data())
    def revive(self, data: st.DataObject) -> None:
        job = self.pick(data, self.able("retry", "resume"))
        self.ask(data, "retry" if job.status in TERMINAL_STATUSES else "resume", [job])

    @precondition(lambda self: self.able("delete"))
    @rule(data=st.data())
    def delete(self, data: st.DataObject) -> None:
        self.ask(data, "delete", self.able("delete"))

    # ------------------------------------------------------------------ workers

    def took(self, claim: Claim | None, job: Model | None) -> None:
        """Check that the claim is of that job, or that no job could be claimed."""
        if job is None:
            assert claim is None
            return
        assert claim is not None
        job.fence += 1
        job.attempt += job.fresh
        job.fresh = False
        self.move(job, "running")
        assert (claim.id, claim.fence, claim.attempt, claim.owner) == (
            job.id,
            job.fence,
            job.attempt,
            job.owner,
        )
        self.claims.append(claim)

    @precondition(lambda self: self.jobs)
    @rule(
        data=st.data(), stage=st.sampled_from(["precompute", "train"]), gpus=st.sampled_from([0, 2])
    )
    def claim(self, data: st.DataObject, stage: str, gpus: int) -> None:
        job = self.pick(data, list(self.jobs.values()))
        fits = (job.status, job.stage) == ("queued", stage) and job.gpus <= gpus
        self.took(self.store.claim(job.id, stage, "w", 600, Capacity(gpus)), job if fits else None)

    @precondition(lambda self: self.jobs)
    @rule(stage=st.sampled_from(["precompute", "train", "train"]), gpus=st.sampled_from([0, 2]))
    def claim_next(self, stage: str, gpus: int) -> None:
        fitting = [job for job in self.line(stage) if job.gpus <= gpus]
        self.took(
            self.store.claim_next(stage, "w", 600, Capacity(gpus)), fitting[0] if fitting else None
        )

    def any_claim(self, data: st.DataObject, newest: bool) -> Claim:
        """A claim that is valid, if one exists and is wanted; else any claim ever made."""
        holding = [claim for claim in self.claims if self.holds(claim)]
        found: Claim = self.pick(data, holding if newest and holding else self.claims)
        return found

    @precondition(lambda self: self.claims)
    @rule(data=st.data(), newest=st.booleans(), again=st.booleans())
    def beat(self, data: st.DataObject, newest: bool, again: bool) -> None:
        claim = self.any_claim(data, newest)
        job = self.holds(claim)
        self.batch += 1
        events = [Event("metrics", {"step": self.batch, "loss": 1.0})]
        if claim.config["kind"] == "distill":
            events.append(Event("cache", {"fingerprint": f"{self.batch % 3}" * 32}))
        for _ in range(1 + again):
            reply = self.store.beat(claim, 600, EventBatch(self.batch, tuple(events)))
            assert reply == (
                {"running": "go", "pausing": "pause"}.get(job.status, "cancel") if job else "fenced"
            )
        if job and len(events) > 1:
            job.fingerprint = events[1].data["fingerprint"]

    @precondition(lambda self: self.claims)
    @rule(data=st.data(), newest=MOSTLY, how=st.sampled_from(["advance", "release", "die"]))
    def let_go(self, data: st.DataObject, newest: bool, how: str) -> None:
        claim = self.any_claim(data, newest)
        job = self.holds(claim)
        if how == "advance":
            moves_on = job is not None and job.status in ("running", "pausing")
            assert self.store.advance(claim, "train") == (self.stopped(job) if job else "fenced")
            if job is not None and moves_on:
                job.stage = "train"
        elif how == "release":
            assert self.store.release(claim) == (self.stopped(job) if job else "fenced")
        else:
            assert self.store.fail_attempt(claim, ERROR) == (self.died(job) if job else "fenced")

    @precondition(lambda self: self.claims)
    @rule(data=st.data(), newest=MOSTLY, outcome=st.sampled_from(["succeeded", "failed"]))
    def finish(self, data: st.DataObject, newest: bool, outcome: Any) -> None:
        claim = self.any_claim(data, newest)
        job = self.holds(claim)
        assert self.store.finish(claim, outcome, ERROR) == (
            self.move(job, outcome) if job else "fenced"
        )

    def ghosts(self) -> list[Claim]:
        """Claims of jobs that another worker has now."""
        active = {job.id: job.fence for job in self.jobs.values() if job.status in ACTIVE_STATUSES}
        return [claim for claim in self.claims if active.get(claim.id, claim.fence) != claim.fence]

    @precondition(lambda self: self.ghosts())
    @rule(data=st.data())
    def haunt(self, data: st.DataObject) -> None:
        claim = self.pick(data, self.ghosts())
        events = (Event("warning", {"message": "boo"}),)
        assert self.store.beat(claim, 600, EventBatch(10**9, events)) == "fenced"
        assert self.store.release(claim) == self.store.advance(claim, "train") == "fenced"
        assert (
            self.store.finish(claim, "succeeded")
            == self.store.fail_attempt(claim, ERROR)
            == "fenced"
        )

    # ------------------------------------------------------------------ the reconciler

    def some_that(self, data: st.DataObject, fits: Any) -> list[Model]:
        found = [job for job in self.jobs.values() if fits(job)]
        return (
            data.draw(st.lists(st.sampled_from(found), unique_by=id, min_size=1), label="which")
            if found
            else []
        )

    @precondition(lambda self: any(job.status in ACTIVE_STATUSES for job in self.jobs.values()))
    @rule(data=st.data())
    def expire(self, data: st.DataObject) -> None:
        chosen = self.some_that(data, lambda job: job.status in ACTIVE_STATUSES)
        for place, job in enumerate(chosen, 1):
            self.store.redis.zadd("kd:leases", {job.id: place}, xx=True)
        assert self.store.expire() == [job.id for job in chosen]
        self.in_one_call(chosen, self.died)

    @precondition(lambda self: any(job.armed for job in self.jobs.values()))
    @rule(data=st.data())
    def due(self, data: st.DataObject) -> None:
        chosen = self.some_that(data, lambda job: job.armed)
        for place, job in enumerate(chosen, 1):
            self.store.redis.zadd("kd:deadlines", {job.id: place}, xx=True)
        assert self.store.due() == [job.id for job in chosen]
        self.in_one_call(chosen, self.too_late)

    def too_late(self, job: Model) -> str:
        job.late = True
        return self.move(job, "cancelling" if job.status in ACTIVE_STATUSES else "failed")

    def in_one_call(self, chosen: list[Model], act: Any) -> None:
        """An event of several jobs at once: first each of them, then their dependents."""
        settle = self.settle
        held = list[tuple[Model, Model]]()
        self.settle = lambda job, other: held.append((job, other))  # type: ignore[method-assign]
        for job in chosen:
            act(job)
        self.settle = settle  # type: ignore[method-assign]
        for job, other in held:
            self.settle(job, other)

    @rule(stage=st.sampled_from(["precompute", "train"]), sent=st.booleans())
    def tidy(self, stage: str, sent: bool) -> None:
        assert self.store.list_unannounced(stage, 0) == [job.id for job in self.queue(stage)]
        assert self.store.repair(0, 600) == (0, []), (
            "nothing is ever lost that would have to be put back"
        )
        for delivery in self.store.lease_webhooks(0, 3):
            assert delivery.job_id in self.jobs
            if sent:
                self.store.finish_webhook(delivery)
            else:
                self.store.retry_webhook(delivery, 0)
        for job_id in sorted(self.deleted)[-1:]:
            assert {self.store.change(action, job_id).outcome for action in ALLOWED_IN} == {
                "unknown"
            }

    # ------------------------------------------------------------------ what always holds

    @invariant()
    def the_record_is_the_model(self) -> None:
        pipeline = self.store.redis.pipeline(transaction=False)
        for job_id in self.jobs:
            pipeline.hgetall(f"kd:job:{job_id}")
            pipeline.smembers(f"kd:job:{job_id}:waits")
        found = pipeline.execute()
        for job, record, waits in zip(self.jobs.values(), found[::2], found[1::2], strict=True):
            expected = {
                "status": job.status,
                "stage": job.stage,
                "fence": str(job.fence),
                "attempt": str(job.attempt),
                "owner": job.owner,
                "format": "2",
            }
            assert {name: record[name] for name in expected} == expected
            assert waits == job.waits
            assert ("finished_at" in record) == (job.status in TERMINAL_STATUSES)
            assert ("worker" in record) == (job.status in ACTIVE_STATUSES)
            assert ("deadline_at" in record) == job.armed
            assert (record["error"] != "null") >= (job.status == "failed")
            assert json.loads(record.get("cache.fingerprint", "null")) == job.fingerprint
            assert ("devices" in record) == (job.status in ACTIVE_STATUSES)
            assert int(record["version"]) >= job.version, "versions never go back"
            job.version = int(record["version"])

    @invariant()
    def the_events_are_the_models_story(self) -> None:
        pipeline = self.store.redis.pipeline(transaction=False)
        for job_id in self.jobs:
            pipeline.xrange(f"kd:job:{job_id}:events")
        for job, entries in zip(self.jobs.values(), pipeline.execute(), strict=True):
            told = [
                json.loads(fields["data"]) for _, fields in entries if fields["type"] == "status"
            ]
            assert [event["status"] for event in told] == job.told
            lives = (
                " ".join(job.told)
                .replace("succeeded", "|")
                .replace("failed", "|")
                .replace("cancelled", "|")
                .split("|")
            )
            assert len(lives) == 1 + sum(map(Counter(job.told).__getitem__, TERMINAL_STATUSES)), (
                "one end a life"
            )
            assert (job.told[-1] in TERMINAL_STATUSES) == (not lives[-1].strip())

    @invariant()
    def every_index_is_what_the_records_say(self) -> None:
        wanted: dict[str, list[str]] = {}
        for owner in ("*", *(caller.name for caller in OWNERS)):
            mine = [job for job in self.jobs.values() if owner in ("*", job.owner)]
            wanted[f"kd:index:{owner}:*"] = [job.id for job in mine]
            for status in {"waiting", "queued", "paused", *ACTIVE_STATUSES, *TERMINAL_STATUSES}:
                wanted[f"kd:index:{owner}:{status}"] = [
                    job.id for job in mine if job.status == status
                ]
        for stage in ("precompute", "train"):
            queue = self.queue(stage)
            wanted[f"kd:queue:{stage}"] = [job.id for job in queue]
            for team in {caller.team for caller in OWNERS}:
                mine = [job.id for job in queue if job.owner == team]
                wanted[f"kd:queue:{stage}:{team}"] = mine
                assert self.store.redis.sismember(f"kd:queuers:{stage}", team) == bool(mine)
        by_status = {job.id: job.status for job in self.jobs.values()}
        wanted["kd:open"] = [
            job_id for job_id, status in by_status.items() if status not in TERMINAL_STATUSES
        ]
        pipeline = self.store.redis.pipeline(transaction=False)
        for name in (*wanted, "kd:leases", "kd:deadlines"):
            pipeline.zrange(name, 0, -1)
        *found, leases, deadlines = pipeline.execute()
        assert dict(zip(wanted, found, strict=True)) == wanted
        assert set(leases) == {
            job_id for job_id, status in by_status.items() if status in ACTIVE_STATUSES
        }
        assert set(deadlines) == {job.id for job in self.jobs.values() if job.armed}

    @invariant()
    def every_device_second_is_charged_once(self) -> None:
        for job in self.jobs.values():
            job.used_ms = int(self.store.redis.hget(f"kd:job:{job.id}", "device_ms") or 0)
        for account in self.store.read_accounts():
            team = account.team
            mine = [job for job in self.jobs.values() if job.owner == team]
            used = self.forgotten[team] + sum(job.used_ms for job in mine)
            assert account.devices == self.held(team)
            assert account.today == pytest.approx(used / 1000, abs=1e-9)
            assert account.recent <= account.today
            assert account.queued == sum(job.status == "queued" for job in mine)

    @invariant()
    def no_open_job_is_lost(self) -> None:
        """Each open job has a queue, a lease, an open job or a client that will move it."""
        for job in self.jobs.values():
            if job.status == "waiting":
                assert job.waits
                for other in job.waits:
                    assert self.jobs[other].status not in TERMINAL_STATUSES
                    assert self.store.redis.sismember(f"kd:job:{other}:dependents", job.id)

    @invariant()
    def nothing_is_left_of_what_was_deleted(self) -> None:
        redis = self.store.redis
        names: list[str] = redis.keys("*")
        for name in names:
            if name.startswith("kd:job:"):
                assert name.split(":")[2] in self.jobs, name
            if name.endswith((":waits", ":dependents")):
                assert redis.smembers(name) - self.jobs.keys() <= (
                    self.deleted if name.endswith("waits") else set()
                )
        made = {job.fingerprint for job in self.jobs.values() if job.fingerprint}
        assert {name.split(":")[2] for name in names if name.startswith("kd:cache:")} == made
        for fingerprint in made:
            users = {job.id for job in self.jobs.values() if job.fingerprint == fingerprint}
            assert redis.smembers(f"kd:cache:{fingerprint}:jobs") == users
        for entry in redis.hkeys("kd:webhooks:tries"):
            assert redis.zscore("kd:webhooks", entry) is not None

    def teardown(self) -> None:
        """At most one worker may write to a job: the one with the fence of the active run."""
        replies = [
            (claim.id, self.store.beat(claim, 600, EventBatch(0, ()))) for claim in self.claims
        ]
        writers = sorted(job_id for job_id, reply in replies if reply != "fenced")
        assert writers == sorted(
            job.id for job in self.jobs.values() if job.status in ACTIVE_STATUSES
        )


@pytest.fixture
def machine(parts: Parts) -> Iterator[type[Record]]:
    """The machine on a test server."""
    yield type("Histories", (Record,), {"store": parts.jobs})
    parts.jobs.redis.flushall()


@pytest.mark.long
def test_random_histories_and_the_script_agree(machine: type[Record]) -> None:
    profile = settings(
        max_examples=HISTORIES,
        stateful_step_count=STEPS,
        deadline=None,
        suppress_health_check=list(HealthCheck),
        print_blob=True,
    )
    run_state_machine_as_test(machine, settings=profile)  # type: ignore[no-untyped-call]
