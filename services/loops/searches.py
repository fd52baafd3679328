"""The drivers of searches: they start trials, stop them early and find the best. No torch.

    search   at stage "search", a driver claims it with a lease, as a worker does
    study    an Optuna journal in Redis; only the driver with the claim adds lines
    trial    an ordinary job of kind train, created once for each number, run by any worker

A driver keeps nothing that the study and the records of the trials do not contain. If it is killed,
another driver goes on. The API's reconciler runs the drivers.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from celery import Celery
from redis.exceptions import RedisError

from cache.json_object import Json
from kd.client.wire.jobs import Job
from kd.config.job import JobConfig
from kd.config.jobfile import parse_config
from kd.config.kinds import SEARCH, TRAIN
from kd.errors import ConfigError, Problem
from kd.evaluation.teacher_effect import warn_of_verdict
from kd.progress import Event, Monitor
from kd.search.findings import describe_trial, make_search_report, write_search
from kd.search.space import keeps_best, make_trial_job
from kd.search.study import Outcome, make_study, should_prune
from services.process.names import name_process
from services.settings import Settings
from services.store.jobs.leases import Claim
from services.store.jobs.store import JobStore
from services.store.queue import publish_hint
from services.worker.failures import describe_error
from services.worker.stage_process import Outbox

if TYPE_CHECKING:
    from kd.search.study import Trial

log = logging.getLogger("potstill.search")


def find_service_problems(config: JobConfig) -> list[Problem]:
    """Find problems of a job that `kd run` does not have."""
    if config.search is None or config.search.sampler != "gp":
        return []
    detail = "gp needs torch, which the process that drives searches does not load."
    return [Problem("/search/sampler", detail, "Use tpe, or run the search with `kd run`.")]


class Fenced(Exception):
    """Another process drives the search now, or the search has ended."""


class Searches:
    """The searches that this process drives."""

    def __init__(self, store: JobStore, app: Celery, settings: Settings) -> None:
        self._store = store
        self._app = app
        self._settings = settings
        self._owner = name_process()
        self._drivers: dict[str, Driver] = {}

    def step(self) -> None:
        """Claim the searches that wait, and do one step of each search. Raises ``RedisError``."""
        lease_seconds = self._settings.lease_seconds
        while claim := self._store.claim_next(SEARCH.name, self._owner, lease_seconds):
            self._drivers[claim.id] = Driver(self._store, self._app, self._settings, claim)
        for job_id, driver in list(self._drivers.items()):
            goes_on = False
            try:
                goes_on = driver.step()
            except Fenced:
                log.warning("%s: driven by another process now", job_id)
            except RedisError:
                raise
            except Exception as error:  # only this search fails
                log.exception("%s: the search failed", job_id)
                driver.fail(error)
            if not goes_on:
                del self._drivers[job_id]


@dataclass(frozen=True)
class StudyJournal:
    """The journal of a search's study."""

    store: JobStore
    claim: Claim

    def read_logs(self, log_number_from: int) -> Iterator[Json]:
        """The lines from number ``log_number_from`` on."""
        yield from self.store.read_journal(self.claim.id, log_number_from)

    def append_logs(self, logs: list[Json]) -> None:
        """Add lines. Raises ``Fenced`` if the claim is lost."""
        if logs and self.store.add_to_journal(self.claim, logs) == "fenced":
            raise Fenced


class Driver:
    """Drives one search while it holds the claim."""

    def __init__(self, store: JobStore, app: Celery, settings: Settings, claim: Claim) -> None:
        self.claim = claim
        self._store = store
        self._app = app
        self._settings = settings
        self._outbox = Outbox()
        # Number of a trial -> stream id of its last event that was read.
        self._read_up_to = dict[int, str]()
        # Trials that a client has paused: they leave room for others.
        self._paused: set[int] = set()
        self._begun = False

    def step(self) -> bool:
        """Beat, follow the open trials and start others. Returns whether there is more to do."""
        if self._beat() != "go":
            # This cancels or pauses the search, and its open trials with it.
            self._store.release(self.claim)
            return False
        if not self._begun:
            self._begin()
        jobs = self._store.list_trials(self.claim.id)
        self._paused.clear()
        for trial in self._study.list_open_trials():
            self._follow(trial, jobs.get(trial.number))
        self._start()
        if self._study.list_open_trials():
            return True
        self._conclude()
        return False

    def fail(self, error: Exception) -> None:
        """End the search, and with it the trials that are open."""
        with suppress(Fenced):
            self._flush()
        self._store.finish(self.claim, "failed", describe_error(error))

    def _begin(self) -> None:
        self._config = parse_config(self.claim.config)
        if found := find_service_problems(self._config):
            raise ConfigError(found)
        self._study = make_study(self._config, StudyJournal(self._store, self.claim))
        self._begun = True
        self._outbox.put(Event("stage", {"stage": SEARCH.name, "phase": "running trials"}))
        self._report_progress()

    # -- one trial

    def _start(self) -> None:
        """Start as many trials at once as there are workers for them."""
        slots = max(1, self._store.count_workers(TRAIN.name))
        while len(self._study.list_open_trials()) - len(self._paused) < slots:
            trial = self._study.start_trial()
            if trial is None:
                return
            self._launch(trial)

    def _launch(self, trial: Trial) -> None:
        """Create the trial's job. A driver repeats this if the driver before it died too early."""
        values = self._study.suggest_values(trial)
        if (twin := self._study.find_twin(trial)) is not None:
            if twin.state.is_finished():  # else its value is waited for
                self._study.end_as_twin(trial, twin)
                self._announce(trial, None)
                self._report_progress()
            return
        record = self._store.get(self.claim.id)
        assert record is not None and record.cache is not None
        assert record.cache.fingerprint is not None
        try:
            job = make_trial_job(self._config, values, record.cache.fingerprint, trial.number)
        except ConfigError as error:
            self._end(trial, None, "failed", str(error))
            return
        job_id = self._store.create_trial(self.claim, trial.number, job)
        if job_id == "fenced":
            raise Fenced
        publish_hint(self._app, job_id, job.stages[0])
        self._announce(trial, job_id)

    def _follow(self, trial: Trial, job_id: str | None) -> None:
        if job_id is None:
            self._launch(trial)
            return
        # The job is read before its events: if it has ended, no event can follow.
        job = self._store.get(job_id)
        if job is None:  # a client deleted it after the search had ended, before its retry
            self._end(trial, None, "failed", "Its job was deleted.")
            return
        after = self._read_up_to.get(trial.number, "0")
        for event in self._store.read_events(job_id, after):
            self._read_up_to[trial.number] = event.id
            if event.type == "evaluation":
                data = event.data
                self._study.note_held_out_tokens(data.get("validation_tokens"))
                self._study.report_loss(trial, data["step"], data.get("validation_loss"))
        if trial.user_attrs.get("stopped") or (not job.ended and should_prune(trial)):
            # A later driver must know why the job was cancelled.
            trial.set_user_attr("stopped", True)
            self._store.change("cancel", job_id)
            self._end(trial, job_id, "pruned")
        elif job.status == "cancelled" and job.stopped_with:
            # The search ended before the trial did, and was retried.
            self._store.change("retry", job_id)
            publish_hint(self._app, job_id, job.stage)
        elif job.ended:
            outcome: Outcome = "complete" if job.status == "succeeded" else "failed"
            self._end(trial, job_id, outcome, _explain_failure(job))
        elif job.status == "paused":
            self._paused.add(trial.number)

    def _end(self, trial: Trial, job_id: str | None, outcome: Outcome, reason: str = "") -> None:
        best = outcome == "complete" and keeps_best(self._config, trial.params)
        self._study.end_trial(trial, outcome, reason, best)
        self._announce(trial, job_id)
        self._report_progress()

    # -- beats and events

    def _beat(self) -> str:
        batch = self._outbox.next_batch()
        reply = self._store.beat(self.claim, self._settings.lease_seconds, batch)
        if reply == "fenced":
            raise Fenced
        self._outbox.mark_delivered()
        return reply

    def _flush(self) -> None:
        while not self._outbox.empty:
            self._beat()

    def _announce(self, trial: Trial, job_id: str | None) -> None:
        row = describe_trial(self._study.list_trials()[trial.number])
        shown = {"number": row.number, "state": row.state, "loss": row.loss, "values": row.values}
        self._outbox.put(Event("trial", {**shown, "why": row.why, "job": job_id}))

    def _report_progress(self) -> None:
        found = make_search_report(self._config, self._study)
        total = self._study.search.trials
        done = sum(row.state != "running" for row in found.trials)
        data = {
            "done": done,
            "total": total,
            "unit": "trials",
            "fraction": round(done / total, 6),
            "eta_seconds": self._study.estimate_seconds_left(),
        }
        self._outbox.put(Event("progress", data))
        if found.best is not None:
            data = {"best_trial": found.best.number, "validation_loss": found.best.loss}
            self._outbox.put(Event("metrics", data))

    def _conclude(self) -> None:
        found = make_search_report(self._config, self._study)
        jobs = self._store.list_trials(self.claim.id)
        artifacts = write_search(self._settings.run_dir(self.claim.id), self._config, found)
        assert found.best is not None, "write_search refuses a search without a complete trial"
        best = jobs[found.best.number]
        artifacts["student"] = str(self._settings.run_dir(best) / "student")
        warn_of_verdict(found.to_json(), Monitor(self._outbox.put))
        for name, path in artifacts.items():
            self._outbox.put(Event("artifact", {"name": name, "path": path}))
        self._flush()
        self._store.finish(self.claim, "succeeded")


def _explain_failure(job: Job) -> str:
    if job.status == "cancelled":
        return "It was cancelled."
    return f"{job.error.detail} {job.error.remedy}".strip() if job.error is not None else ""
