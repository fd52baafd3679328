"""A search in the service: trials are jobs, drivers may die, and nothing is done twice."""

from __future__ import annotations

import base64
import json
import math
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from redis import Redis
from redis.exceptions import ConnectionError as RedisConnectionError

from bench.support.harness import Parts, make_config
from bench.support.paths import ROOT
from bench.support.waiting import PATIENCE_SECONDS, wait_until
from kd.client.wire.jobs import Job
from kd.client.wire.service import WorkerState
from kd.config.jobfile import load_config
from kd.progress import Event
from kd.search.study import make_study
from services.loops.searches import Fenced, Searches, StudyJournal
from services.settings import Settings
from services.store.callers import Caller
from services.store.connection import connect_redis
from services.store.jobs.leases import Claim, EventBatch
from services.store.jobs.listing import JobQuery
from services.store.jobs.store import JobStore
from services.store.queue import QUEUE_PREFIX
from tests.support.services.searches import Memory, search_job

LEASE = 5.0


class Played:
    """A search whose trials the test runs in the records, in place of workers."""

    def __init__(self, parts: Parts, folder: Path, **changes: Any) -> None:
        self.parts = parts
        self.jobs = parts.jobs
        self.settings = Settings(home=folder, lease_seconds=LEASE)
        self.id = self.jobs.create(make_config("sweep", "search", **search_job(**changes))).id
        claim = self.jobs.claim(self.id, "precompute", "w", LEASE)
        assert claim is not None
        self.jobs.beat(claim, LEASE, EventBatch(1, (Event("cache", {"fingerprint": "f" * 32}),)))
        assert self.jobs.advance(claim, "search") == "queued"

    def searches(self, client: Redis | None = None) -> Searches:
        """A driver's process, with ``client`` as its connection."""
        return Searches(JobStore(client) if client else self.jobs, self.parts.queue, self.settings)

    def trials(self) -> dict[int, Job]:
        return {
            number: self.parts.job(job_id)
            for number, job_id in sorted(self.jobs.list_trials(self.id).items())
        }

    def work(self, losses: Callable[[Job, int], float] | None = None, steps: int = 3) -> int:
        """Run every trial that waits. Returns their number."""
        count = 0
        while claim := self.jobs.claim_next("train", "w", LEASE):
            self.evaluate(
                claim,
                *[
                    (step, (losses or loss)(self.parts.job(claim.id), step))
                    for step in range(1, steps + 1)
                ],
            )
            self.jobs.finish(claim, "succeeded")
            count += 1
        return count

    def evaluate(self, claim: Claim, *losses: tuple[int, float | None]) -> str:
        """Report held-out losses of a trial. Returns the reply of the beat."""
        data = [{"step": step, "validation_loss": value} for step, value in losses]
        number = self.jobs.redis.incr("batch")
        return self.jobs.beat(
            claim,
            LEASE,
            EventBatch(number, tuple(Event("evaluation", each) for each in data)),
        )

    def status(self) -> str:
        return self.parts.job(self.id).status

    def to_its_end(self, searches: Searches) -> Job:
        for _ in range(50):
            searches.step()
            if self.parts.job(self.id).ended:
                return self.parts.job(self.id)
            self.work()
        raise AssertionError("the search does not end")


def rate_of(job: Job) -> float:
    rate: float = job.config["train"]["learning_rate"]
    return rate


def loss(job: Job, step: int) -> float:
    return abs(math.log10(rate_of(job)) + 2) + 1 / step


@pytest.fixture
def play(parts: Parts, tmp_path: Path) -> Callable[..., Played]:
    return lambda **changes: Played(parts, tmp_path, **changes)


# ---------------------------------------------------------------------- one search to its end


def test_the_best_of_the_trials_is_found_and_written_down(play: Any, tmp_path: Path) -> None:
    played = play()
    job = played.to_its_end(played.searches())
    trials = played.trials()
    assert job.status == "succeeded" and list(trials) == [0, 1, 2, 3]
    best = min(trials, key=lambda number: loss(trials[number], 3))
    report = json.loads((tmp_path / "runs" / job.id / "report.json").read_text())
    assert report["best"]["number"] == best == job.metrics.model_extra["best_trial"]
    assert report["best"]["loss"] == pytest.approx(loss(trials[best], 3))
    assert job.artifacts["student"] == str(tmp_path / "runs" / trials[best].id / "student")
    written = load_config(Path(job.artifacts["best.yaml"]))
    assert written.train is not None and written.train.learning_rate == rate_of(trials[best])
    assert (job.progress.done, job.progress.total, job.progress.unit) == (4, 4, "trials")
    told = [data for kind, data in played.parts.events(job.id) if kind == "trial"]
    assert Counter(data["state"] for data in told) == {"running": 4, "complete": 4}


def test_values_that_were_tried_take_their_value_and_make_no_job(play: Any, tmp_path: Path) -> None:
    space = {"train.learning_rate": {"choices": [1e-3, 1e-2]}}
    played = play(search={"space": space, "trials": 40})
    for number in range(3):  # so that several trials are open at once
        worker = WorkerState(id=f"w:{number}", stages=["train"])
        played.jobs.show_worker(worker, 600)
    job = played.to_its_end(played.searches())
    trials = played.trials()
    assert job.status == "succeeded" and len(trials) == 2
    assert {rate_of(each) for each in trials.values()} == {1e-3, 1e-2}
    report = json.loads((tmp_path / "runs" / job.id / "report.json").read_text())
    assert report["tried_all"] and report["best"]["number"] in trials
    others = [row for row in report["trials"] if row["number"] not in trials]
    assert all(row["same_as"] in trials and row["state"] == "complete" for row in others)


def test_trials_are_ordinary_jobs_of_the_search(play: Any) -> None:
    played = play()
    played.to_its_end(played.searches())
    for number, trial in played.trials().items():
        assert (trial.kind, trial.status, trial.parent, trial.name) == (
            "train",
            "succeeded",
            played.id,
            f"sweep-{number:04d}",
        )
        assert trial.config["cache"]["fingerprint"] == "f" * 32 and trial.config["search"] is None
    assert played.parts.job(played.id).parent is None
    listed = played.jobs.read_page(JobQuery(), 100)
    assert {job.id for job in listed.jobs} == {
        played.id,
        *(trial.id for trial in played.trials().values()),
    }


def test_as_many_trials_at_once_as_workers_train(play: Any) -> None:
    played = play()
    searches = played.searches()
    searches.step()
    assert len(played.trials()) == 1, "without a worker one trial waits"
    for number, stages in enumerate((["train"], ["precompute", "train"], ["precompute"])):
        played.jobs.show_worker(WorkerState(id=f"w{number}", stages=stages), 30)
    searches.step()
    assert len(played.trials()) == 2
    assert played.work() == 2
    searches.step()
    assert len(played.trials()) == 4


def test_a_bad_trial_is_cancelled_early(play: Any) -> None:
    played = play(search={"trials": 7})
    searches = played.searches()
    for _ in range(5):
        searches.step()
        assert played.work(lambda job, step: 1 / step) == 1
    searches.step()
    claim = played.jobs.claim_next("train", "w", LEASE)
    assert played.evaluate(claim, (1, 50.0)) == "go"
    searches.step()
    assert played.evaluate(claim) == "cancel"
    assert played.jobs.release(claim) == "cancelled"
    job = played.to_its_end(searches)
    report = json.loads(Path(job.artifacts["report.json"]).read_text())
    assert [row["number"] for row in report["trials"] if row["state"] == "pruned"] == [5]
    assert played.trials()[5].status == "cancelled"


def test_a_failed_or_cancelled_trial_is_not_the_end(play: Any) -> None:
    played = play()
    searches = played.searches()
    searches.step()
    error = {"type": "training_error", "detail": "The loss is nan.", "remedy": "Lower the rate."}
    played.jobs.finish(played.jobs.claim_next("train", "w", LEASE), "failed", error)
    searches.step()
    played.jobs.change("cancel", played.trials()[1].id)
    job = played.to_its_end(searches)
    report = json.loads(Path(job.artifacts["report.json"]).read_text())
    assert {row["number"]: row["why"] for row in report["trials"] if row["state"] == "failed"} == {
        0: "The loss is nan. Lower the rate.",
        1: "It was cancelled.",
    }


def test_a_search_whose_trial_was_deleted_goes_on_when_it_is_retried(play: Any) -> None:
    played = play()
    searches = played.searches()
    searches.step()
    trial = played.trials()[0].id
    assert played.jobs.change("cancel", played.id).status == "cancelling"
    searches.step()
    assert played.jobs.change("delete", trial).outcome == "done"
    assert played.jobs.change("retry", played.id).outcome == "done"
    for _ in range(20):
        searches.step()
        played.work()
    job = played.parts.job(played.id)
    assert job.status == "succeeded", job.error
    report = json.loads(Path(job.artifacts["report.json"]).read_text())
    assert [
        (row["number"], row["why"]) for row in report["trials"] if row["state"] == "failed"
    ] == [(0, "Its job was deleted.")]
    assert Counter(row["state"] for row in report["trials"]) == {"complete": 3, "failed": 1}


@pytest.mark.parametrize("late", [False, True], ids=["cancelled", "at its deadline"])
def test_a_retry_goes_on_with_the_trials_that_ended_with_the_search(play: Any, late: bool) -> None:
    played = play()
    for number in range(3):
        played.jobs.show_worker(WorkerState(id=f"w{number}", stages=["train"]), 30)
    searches = played.searches()
    searches.step()
    running = played.jobs.claim_next("train", "w", LEASE)
    assert played.evaluate(running, (1, 2.0)) == "go"
    before = played.trials()
    played.jobs.change("cancel", before[2].id)  # by a client, who wants no more of it
    if late:
        played.jobs.redis.zadd("kd:deadlines", {played.id: 1})
        played.jobs.due()
    else:
        played.jobs.change("cancel", played.id)
    searches.step()
    assert played.jobs.change("retry", played.id).outcome == "done"
    searches.step()
    assert played.trials()[0].status == "cancelling", "its worker still saves"
    assert played.jobs.release(running) == "cancelled"
    searches.step()
    assert [played.trials()[number].status for number in (0, 1)] == ["queued", "queued"]
    job = played.to_its_end(searches)
    assert job.status == "succeeded", job.error
    report = json.loads(Path(job.artifacts["report.json"]).read_text())
    assert [
        (row["number"], row["why"]) for row in report["trials"] if row["state"] == "failed"
    ] == [(2, "It was cancelled.")]
    assert Counter(row["state"] for row in report["trials"]) == {"complete": 3, "failed": 1}
    assert [played.trials()[number].id for number in (0, 1)] == [before[0].id, before[1].id]


def test_where_every_trial_fails_the_search_fails_with_the_reason(play: Any) -> None:
    played = play(search={"trials": 2})
    searches = played.searches()
    for _ in range(2):
        searches.step()
        claim = played.jobs.claim_next("train", "w", LEASE)
        played.jobs.finish(
            claim, "failed", {"type": "training_error", "detail": "The loss is nan.", "remedy": ""}
        )
    searches.step()
    job = played.parts.job(played.id)
    assert (
        job.status == "failed" and job.error is not None and "The loss is nan." in job.error.detail
    )
    assert [data["state"] for kind, data in played.parts.events(job.id) if kind == "trial"].count(
        "failed"
    ) == 2


def test_values_that_make_no_job_fail_their_trial_only(play: Any) -> None:
    space = {
        "train.optim": {"choices": ["adamw", "schedule_free"]},
        "train.lr_scheduler_type": {"choices": ["constant", "cosine"]},
    }
    train = {"max_steps": 3, "eval_steps": 1, "lr_scheduler_type": "constant"}
    played = play(train=train, search={"space": space, "trials": 8})
    job = played.to_its_end(played.searches())
    report = json.loads(Path(job.artifacts["report.json"]).read_text())
    failed = [row for row in report["trials"] if row["state"] == "failed"]
    assert failed and all("schedule_free needs" in row["why"] for row in failed)
    assert set(played.trials()) == {row["number"] for row in report["trials"] if row not in failed}


def test_a_sampler_that_needs_torch_is_refused(play: Any) -> None:
    played = play(search={"sampler": "gp"})
    played.searches().step()
    error = played.parts.job(played.id).error
    assert error is not None and error.type == "invalid_config" and "search.sampler" in error.detail


# ---------------------------------------------------------------------- a driver may die


class Flaky(Redis):
    """A connection that breaks at one call, before or after its effect, and stays broken."""

    def __init__(self, url: str, at: int, after: bool) -> None:
        sound = connect_redis(url)
        super().__init__(connection_pool=sound.connection_pool)
        self._calls = 0
        self._at = at
        self._after = after

    def execute_command(self, *arguments: Any, **options: Any) -> Any:
        if arguments[0] not in ("EVALSHA", "SCRIPT LOAD"):
            return super().execute_command(*arguments, **options)
        self._calls += 1
        if self._calls > self._at or (self._calls == self._at and not self._after):
            raise RedisConnectionError("the driver is dead")
        answer = super().execute_command(*arguments, **options)
        if self._calls == self._at:
            raise RedisConnectionError("the driver is dead")
        return answer


@pytest.fixture(scope="module")
def undisturbed() -> list[float]:
    """The rates that a search of three trials tries."""
    job = make_config("sweep", "search", **search_job(search={"trials": 3}))
    study = make_study(job, Memory())
    rates = []
    while trial := study.start_trial():
        rates.append(study.suggest_values(trial)["train.learning_rate"])
        study.report_loss(trial, 1, 1.0)
        study.end_trial(trial, "complete")
    return rates


def expire_lease(played: Played) -> None:
    """Let the driver's lease expire."""
    played.jobs.redis.zadd("kd:leases", {played.id: 0}, xx=True)
    played.jobs.expire()


@pytest.mark.long
@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("at", range(1, 34, 2))
def test_a_driver_that_dies_at_any_change_is_followed_by_one_that_goes_on(
    play: Any, undisturbed: list[float], at: int, after: bool
) -> None:
    played = play(search={"trials": 3})
    dying = played.searches(Flaky(played.parts.server.url, at, after))
    with pytest.raises(RedisConnectionError):
        played.to_its_end(dying)
    expire_lease(played)
    job = played.to_its_end(played.searches())
    assert job.status == "succeeded" and job.attempt <= 1, "who drives costs no attempt"
    assert sorted(played.trials()) == [0, 1, 2]
    assert len(played.jobs.read_page(JobQuery(kind="train"), 100).jobs) == 3, (
        "no trial was made twice"
    )
    assert [rate_of(trial) for trial in played.trials().values()] == undisturbed
    statuses = played.parts.statuses(played.id)
    assert [status for status in statuses if status in ("succeeded", "failed", "cancelled")] == [
        "succeeded"
    ]


class Overtaken(Flaky):
    """A connection that sleeps past its lease before one call: another driver takes over."""

    overtake: Callable[[], None]

    def execute_command(self, *arguments: Any, **options: Any) -> Any:
        if arguments[0] == "EVALSHA":
            self._calls += 1
            if self._calls == self._at:
                self.overtake()
        return Redis.execute_command(self, *arguments, **options)


@pytest.mark.parametrize("at", range(3, 32, 2))
def test_a_driver_that_is_overtaken_at_any_change_does_no_more(
    play: Any, undisturbed: list[float], at: int
) -> None:
    played = play(search={"trials": 3})
    slow = Overtaken(played.parts.server.url, at, False)
    second = played.searches()

    def overtake() -> None:
        expire_lease(played)
        second.step()

    slow.overtake = overtake
    first = played.searches(slow)
    for _ in range(5):
        first.step()
        played.work()
    job = played.to_its_end(second)
    assert (
        job.status == "succeeded"
        and len(played.jobs.read_page(JobQuery(kind="train"), 100).jobs) == 3
    )
    assert [rate_of(trial) for trial in played.trials().values()] == undisturbed
    assert hinted(played) <= {trial.id for trial in played.trials().values()}


def hinted(played: Played) -> set[str]:
    """The jobs for which hints wait."""
    messages = [
        json.loads(text) for text in played.jobs.redis.lrange(f"{QUEUE_PREFIX}train", 0, -1)
    ]
    return {json.loads(base64.b64decode(message["body"]))[0][0] for message in messages}


def test_two_drivers_do_what_one_does_and_the_older_is_fenced(play: Any) -> None:
    played = play()
    first = played.searches()
    second = played.searches()
    first.step()
    second.step()
    assert len(played.trials()) == 1, "the second has nothing to drive"
    expire_lease(played)
    second.step()
    first.step()  # fenced: it stops
    assert played.work() == 1
    first.step()
    assert len(played.trials()) == 1
    assert played.to_its_end(second).status == "succeeded"


def test_who_lost_the_claim_changes_neither_study_nor_trials(play: Any) -> None:
    played = play()
    old = played.jobs.claim(played.id, "search", "a", LEASE)
    expire_lease(played)
    new = played.jobs.claim(played.id, "search", "b", LEASE)
    with pytest.raises(Fenced):
        StudyJournal(played.jobs, old).append_logs([{"op_code": 0}])
    assert played.jobs.create_trial(old, 0, make_config("sweep-0000")) == "fenced"
    assert (played.jobs.list_trials(played.id), played.jobs.read_journal(played.id, 0)) == ({}, [])
    StudyJournal(played.jobs, new).append_logs([{"line": 0}, {"line": 1}])
    assert list(StudyJournal(played.jobs, new).read_logs(1)) == [{"line": 1}]
    first = played.jobs.create_trial(new, 0, make_config("sweep-0000"))
    assert played.jobs.create_trial(new, 0, make_config("sweep-0000")) == first
    assert played.jobs.list_trials(played.id) == {0: first}


# ---------------------------------------------------------------------- cancel


@pytest.mark.parametrize("driven", [True, False], ids=["driven", "between two drivers"])
def test_cancelling_a_search_cancels_its_trials(play: Any, driven: bool) -> None:
    played = play()
    for number in range(2):
        played.jobs.show_worker(WorkerState(id=f"w{number}", stages=["train"]), 30)
    searches = played.searches()
    searches.step()
    running = played.jobs.claim_next("train", "w", LEASE)
    if not driven:
        expire_lease(played)
    played.jobs.change("cancel", played.id)
    searches.step()
    assert played.status() == "cancelled"
    assert played.evaluate(running) == "cancel"
    assert played.jobs.release(running) == "cancelled"
    assert {trial.status for trial in played.trials().values()} == {"cancelled"}
    searches.step()
    assert len(played.trials()) == 2


# ---------------------------------------------------------------------- pause, resume, deadline


def two_at_once(played: Played) -> Claim:
    """Two workers: one trial runs, the other waits."""
    for number in range(2):
        played.jobs.show_worker(WorkerState(id=f"w{number}", stages=["train"]), 30)
    played.searches().step()
    running = played.jobs.claim_next("train", "w", LEASE)
    assert running is not None
    return running


@pytest.mark.parametrize("driven", [True, False], ids=["driven", "between two drivers"])
def test_trials_pause_with_their_search_and_resume_with_it(play: Any, driven: bool) -> None:
    played = play(search={"trials": 3})
    running = two_at_once(played)
    expire_lease(played)
    searches = played.searches()
    if driven:
        searches.step()
    assert played.jobs.change("pause", played.id).status == ("pausing" if driven else "paused")
    searches.step()
    assert played.status() == "paused"
    assert (
        played.evaluate(running, (1, 5.0)) == "pause" and played.jobs.release(running) == "paused"
    )
    assert {trial.status for trial in played.trials().values()} == {"paused"}
    for _ in range(3):
        searches.step()
    assert played.work() == 0 and len(played.trials()) == 2, "nothing moves"
    assert played.jobs.change("resume", played.id).status == "queued"
    assert {trial.status for trial in played.trials().values()} == {"queued"}
    job = played.to_its_end(searches)
    assert job.status == "succeeded" and job.attempt <= 1 and len(played.trials()) == 3
    assert {trial.status for trial in played.trials().values()} == {"succeeded"}


def test_a_trial_made_while_the_pause_came_is_paused_too(play: Any) -> None:
    played = play()
    claim = played.jobs.claim(played.id, "search", "a", LEASE)
    played.jobs.change("pause", played.id)
    trial = played.jobs.create_trial(claim, 0, make_config("sweep-0000"))
    assert played.parts.job(trial).status == "paused"
    assert played.jobs.release(claim) == "paused"
    played.jobs.change("resume", played.id)
    assert (
        played.to_its_end(played.searches()).status == "succeeded"
        and played.parts.job(trial).status == "succeeded"
    )


def test_a_search_resumed_before_its_driver_heard_of_the_pause_goes_on(play: Any) -> None:
    played = play()
    searches = played.searches()
    searches.step()
    played.jobs.change("pause", played.id)
    assert played.jobs.change("resume", played.id).status == "running"
    assert played.to_its_end(searches).status == "succeeded"
    assert played.parts.statuses(played.id).count("paused") == 0


def test_a_trial_paused_by_itself_holds_up_no_other(play: Any) -> None:
    played = play(search={"trials": 3})
    searches = played.searches()
    searches.step()
    first = played.trials()[0].id
    played.jobs.change("pause", first)
    for _ in range(4):
        searches.step()
        played.work()
    assert [trial.status for trial in played.trials().values()] == [
        "paused",
        "succeeded",
        "succeeded",
    ]
    assert played.status() == "running", "it waits for the paused one"
    played.jobs.change("resume", first)
    assert played.to_its_end(searches).status == "succeeded"


def test_cancelling_a_paused_search_cancels_its_trials(play: Any) -> None:
    played = play()
    searches = played.searches()
    searches.step()
    played.jobs.change("pause", played.id)
    searches.step()
    assert played.jobs.change("cancel", played.id).status == "cancelled"
    assert {trial.status for trial in played.trials().values()} == {"cancelled"}


def test_a_search_whose_deadline_passes_fails_with_its_trials_cancelled(play: Any) -> None:
    played = play(deadline_seconds=3600, webhook="https://example.org/")
    searches = played.searches()
    searches.step()
    assert {trial.deadline_at for trial in played.trials().values()} == {None}, (
        "the search's is enough"
    )
    assert all(trial.config["webhook"] is None for trial in played.trials().values())
    played.jobs.redis.zadd("kd:deadlines", {played.id: 0}, xx=True)
    assert played.jobs.due() == [played.id]
    searches.step()
    job = played.parts.job(played.id)
    assert (
        job.status == "failed" and job.error is not None and job.error.type == "deadline_exceeded"
    )
    assert {trial.status for trial in played.trials().values()} == {"cancelled"}


def test_trials_belong_to_whoever_asked_for_the_search(parts: Parts, tmp_path: Path) -> None:
    settings = Settings(home=tmp_path, lease_seconds=LEASE)
    owner = Caller("alice")
    wanted = make_config("sweep", "search", **search_job(labels={"team": "x"}, priority=9))
    job_id = parts.jobs.create(wanted, owner).id
    claim = parts.jobs.claim(job_id, "precompute", "w", LEASE)
    assert claim is not None
    parts.jobs.beat(claim, LEASE, EventBatch(1, (Event("cache", {"fingerprint": "f" * 32}),)))
    parts.jobs.advance(claim, "search")
    Searches(parts.jobs, parts.queue, settings).step()
    trial = parts.jobs.list_trials(job_id)[0]
    assert parts.jobs.get(trial, Caller("bob")) is None
    found = parts.jobs.get(trial, owner)
    assert found is not None and (found.labels, found.priority) == ({"team": "x"}, 9)


# ---------------------------------------------------------------------- with processes


@pytest.fixture
def live(new_parts: Callable[..., Parts]) -> Parts:
    """API and one worker, whose child is tests/support/services/search_child.py."""
    parts = new_parts(child_module="tests.support.services.search_child")
    parts.start_api()
    parts.start_worker()
    return parts


def kill_everything(parts: Parts) -> None:
    """Kill API and worker with -9. The run dies with its worker."""
    for process in parts._processes:
        process.send_signal(signal.SIGKILL)
        process.wait()


@pytest.mark.long
def test_a_search_survives_kill_9_of_api_and_worker(live: Parts) -> None:
    changes = search_job(train={"max_steps": 20, "eval_steps": 1}, search={"trials": 3})
    job_id = live.submit("sweep", "search", **changes)
    for number in (0, 1):
        wait_until(lambda: live.jobs.list_trials(job_id).get(number))  # noqa: B023
        live.child_pid(live.jobs.list_trials(job_id)[number])
        kill_everything(live)
        live.start_api()
        live.start_worker()
    job = live.wait_for(job_id, "succeeded", "failed")
    assert job.error is None and job.status == "succeeded"
    listed = live.http.get("/jobs", params={"kind": "train"}).json()["data"]
    assert sorted((each["name"], each["parent"]) for each in listed) == [
        (f"sweep-{number:04d}", job_id) for number in range(3)
    ]
    trials = {number: live.job(trial) for number, trial in live.jobs.list_trials(job_id).items()}
    best = min(trials, key=lambda number: loss(trials[number], 20))
    assert load_config(Path(job.artifacts["best.yaml"])).train.learning_rate == rate_of(
        trials[best]
    )  # type: ignore[union-attr]
    assert live.http.get("/jobs", params={"kind": "search"}).json()["data"][0]["id"] == job_id


def test_a_search_is_cancelled_over_http_with_the_trial_that_runs(live: Parts) -> None:
    job_id = live.submit(
        "sweep", "search", **search_job(train={"max_steps": 5000, "eval_steps": 1})
    )
    wait_until(lambda: live.jobs.list_trials(job_id))
    trial = live.jobs.list_trials(job_id)[0]
    live.child_pid(trial)
    # A search that lost its lease on a busy machine is queued until it is claimed again.
    live.wait_for(job_id, "running")
    assert live.http.post(f"/jobs/{job_id}/cancel").json()["status"] == "cancelling"
    assert live.wait_for(job_id, "cancelled").status == "cancelled"
    assert live.wait_for(trial, "cancelled").status == "cancelled"


@pytest.mark.long
def test_the_api_drives_searches_without_torch() -> None:
    program = """
import sys
import services.api.app
from kd.search.study import make_study
from tests.support.services.searches import memory_study_runs
memory_study_runs()
print(sorted({"torch", "transformers", "scipy"} & {*sys.modules}))
"""
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=PATIENCE_SECONDS,
    )
    assert done.stdout.strip() == "[]", done.stderr


@pytest.mark.long
def test_a_real_search_through_the_service(
    new_parts: Any, tiny_teacher: Path, tiny_text: Path
) -> None:
    """Over HTTP with real students: one capture, two trials, and the better one is found."""
    roots = [tiny_teacher, tiny_text.parent]
    parts = new_parts(
        child_module="services.worker.stage_child", lease_seconds=15.0, data_roots=roots
    )
    parts.start_api()
    parts.start_worker()
    job = {
        "kind": "search",
        "name": "sweep",
        "teacher": {"model": str(tiny_teacher), "batch_size": 4},
        "student": {"init": {"layers": 1, "hidden_size": 16}},
        "data": {
            "train": str(tiny_text),
            "validation_fraction": 0.1,
            "sequence_length": 32,
            "max_train_samples": 8,
        },
        "cache": {"shard_sequences": 8},
        "train": {"max_steps": 3, "batch_size": 4, "eval_steps": 3},
        "search": {
            "space": {"train.learning_rate": {"choices": [1e-6, 1e-2]}},
            "trials": 2,
            "sampler": "random",
        },
    }
    posted = parts.http.post("/jobs", json=job)
    assert posted.status_code == 202, posted.text
    done = parts.wait_for(posted.json()["id"], "succeeded", "failed", "cancelled", seconds=240)
    assert done.error is None
    trials = {number: parts.job(trial) for number, trial in parts.jobs.list_trials(done.id).items()}
    assert {rate_of(trial) for trial in trials.values()} == {1e-6, 1e-2}
    assert {trial.status for trial in trials.values()} == {"succeeded"}
    assert rate_of(trials[done.metrics.model_extra["best_trial"]]) == 1e-2  # type: ignore[index]
    assert (Path(done.artifacts["student"]) / "model.safetensors").is_file()
    assert [path.name for path in parts.settings.caches.iterdir() if path.is_dir()] == [
        done.cache.fingerprint
    ]
