"""Drives the searches: which trials run, which stop early, which was the best. Part of the API's reconciler; no torch.

    search, at stage "search"     claimed here by lease, as a worker claims: one driver at a time, fenced
    study                         an Optuna journal in Redis; a line is added only by who holds the claim
    trial                         an ordinary job of kind train, made once by number, run by any worker

A driver keeps nothing that the study and the trials' records do not hold: killed at any point, the next one goes on.
"""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from celery import Celery
from redis.exceptions import RedisError

from kd.config.job import JobConfig
from kd.errors import ConfigError, Problem
from kd.jobfile import parse_config
from kd.search.report import row_of, search_report, write_search
from kd.search.space import keeps_best, search_of, trial_job
from kd.search.study import Outcome, make_study, new_trial, open_trials, report, should_prune, suggest, tell
from services.jobs import Claim, JobStore
from services.queue import publish
from services.schemas import Job
from services.settings import SEARCH, Settings
from services.worker.failures import describe
from services.worker.process import Outbox

if TYPE_CHECKING:
    from kd.search.study import Trial

OUTCOME_OF_STATUS: dict[str, Outcome] = {"succeeded": "complete", "failed": "failed", "cancelled": "failed"}

log = logging.getLogger("potstill.search")


def service_problems(config: JobConfig) -> list[Problem]:
    """What is wrong with a job for the service only."""
    if config.search is None or config.search.sampler != "gp":
        return []
    detail = "gp needs torch, which the process that drives searches does not load."
    return [Problem("/search/sampler", detail, "Use tpe, or run the search with `kd run`.")]


class Fenced(Exception):
    """Somebody else drives the search now, or it has ended."""


class Searches:
    """The searches that this process drives."""

    def __init__(self, store: JobStore, app: Celery, settings: Settings) -> None:
        self._store, self._app, self._settings = store, app, settings
        self._owner = f"{socket.gethostname()}:{os.getpid()}"
        self._drivers: dict[str, Driver] = {}

    def step(self) -> None:
        """Take what waits, and let each search go one step on; may raise ``RedisError``."""
        while claim := self._store.claim_next(SEARCH, self._owner, self._settings.lease_seconds):
            self._drivers[claim.id] = Driver(self._store, self._app, self._settings, claim)
        for job_id, driver in list(self._drivers.items()):
            if not self._goes_on(driver):
                del self._drivers[job_id]

    def _goes_on(self, driver: Driver) -> bool:
        try:
            return driver.step()
        except Fenced:
            log.warning("%s: driven by another process now", driver.claim.id)
        except RedisError:
            raise
        except Exception as error:  # the search fails, and no other
            log.exception("%s: the search failed", driver.claim.id)
            driver.fail(error)
        return False


@dataclass(frozen=True)
class StudyJournal:
    """The journal of a search's study."""

    store: JobStore
    claim: Claim

    def read_logs(self, log_number_from: int) -> Iterator[dict[str, Any]]:
        """The lines from that one on."""
        yield from self.store.journal(self.claim.id, log_number_from)

    def append_logs(self, logs: list[dict[str, Any]]) -> None:
        """Add lines; raises ``Fenced`` where the claim does not hold any more."""
        if logs and self.store.add_to_journal(self.claim, logs) == "fenced":
            raise Fenced


class Driver:
    """One search, as long as its claim holds."""

    def __init__(self, store: JobStore, app: Celery, settings: Settings, claim: Claim) -> None:
        self.claim = claim
        self._store, self._app, self._settings = store, app, settings
        self._outbox, self._read_up_to = Outbox(), dict[int, str]()
        self._paused: set[int] = set()  # trials that somebody has paused by themselves
        self._begun = False

    def step(self) -> bool:
        """Beat, hear of the trials under way, start others; returns whether there is more to do."""
        if self._beat() != "go":
            self._store.release(self.claim)  # cancelled or paused now, and so are the trials that are open
            return False
        if not self._begun:
            self._begin()
        jobs = self._store.trials(self.claim.id)
        self._paused.clear()
        for trial in open_trials(self._study):
            self._follow(trial, jobs.get(trial.number))
        self._start()
        if open_trials(self._study):
            return True
        self._conclude()
        return False

    def fail(self, error: Exception) -> None:
        """End the search, and with it the trials that are open."""
        with suppress(Fenced):
            self._flush()
        self._store.finish(self.claim, "failed", describe(error))

    def _begin(self) -> None:
        self._config = parse_config(self.claim.config)
        if found := service_problems(self._config):
            raise ConfigError(found)
        self._study = make_study(self._config, StudyJournal(self._store, self.claim))
        self._begun = True
        self._outbox.put({"type": "stage", "data": {"stage": SEARCH, "phase": "running trials"}})
        self._tell_progress()

    # -- one trial

    def _start(self) -> None:
        """As many trials at once as there are workers for them."""
        slots = max(1, self._store.workers_of("train"))
        while len(open_trials(self._study)) - len(self._paused) < slots:
            trial = new_trial(self._study, search_of(self._config))
            if trial is None:
                return
            self._launch(trial)

    def _launch(self, trial: Trial) -> None:
        """Make the trial's job; again for one whose driver died before it had made it."""
        values = suggest(self._study, trial, search_of(self._config))
        try:
            job = trial_job(self._config, values, self._fingerprint(), trial.number)
        except ConfigError as error:
            self._end(trial, None, "failed", str(error))
            return
        job_id = self._store.create_trial(self.claim, trial.number, job)
        if job_id == "fenced":
            raise Fenced
        publish(self._app, job_id, job.stages[0])
        self._announce(trial, job_id)

    def _follow(self, trial: Trial, job_id: str | None) -> None:
        if job_id is None:
            self._launch(trial)
            return
        job = self._store.get(job_id)  # before its events: once it has ended, none can follow
        if job is None:  # by somebody, while the search had ended and was not retried yet
            self._end(trial, None, "failed", "Its job was deleted.")
            return
        self._take_losses(trial, job_id)
        if trial.user_attrs.get("stopped") or (not job.ended and should_prune(trial)):
            trial.set_user_attr("stopped", True)  # so that a driver after this one knows why the job was cancelled
            self._store.change("cancel", job_id)
            self._end(trial, job_id, "pruned")
        elif job.ended:
            self._end(trial, job_id, OUTCOME_OF_STATUS[job.status], _why(job))
        elif job.status == "paused":
            self._paused.add(trial.number)

    def _take_losses(self, trial: Trial, job_id: str) -> None:
        for event_id, kind, data in self._store.events(job_id, self._read_up_to.get(trial.number, "0")):
            self._read_up_to[trial.number] = event_id
            if kind == "evaluation":
                report(self._study, trial, data["step"], data.get("validation_loss"))

    def _end(self, trial: Trial, job_id: str | None, outcome: Outcome, why: str = "") -> None:
        best = outcome == "complete" and keeps_best(self._config, trial.params)
        tell(self._study, trial, outcome, why, best)
        self._announce(trial, job_id)
        self._tell_progress()

    # -- what is told of it

    def _beat(self) -> str:
        reply = self._store.beat(self.claim, self._settings.lease_seconds, self._outbox.batch())
        if reply == "fenced":
            raise Fenced
        self._outbox.delivered()
        return reply

    def _flush(self) -> None:
        while not self._outbox.empty:
            self._beat()

    def _announce(self, trial: Trial, job_id: str | None) -> None:
        row = row_of(self._study.get_trials(deepcopy=False)[trial.number])
        data = {name: row[name] for name in ("number", "state", "loss", "values", "why")} | {"job": job_id}
        self._outbox.put({"type": "trial", "data": data})

    def _tell_progress(self) -> None:
        found, total = search_report(self._config, self._study), search_of(self._config).trials
        done = sum(row["state"] != "running" for row in found["trials"])
        data = {"done": done, "total": total, "unit": "trials", "fraction": round(done / total, 6)}
        self._outbox.put({"type": "progress", "data": data})
        if found["best"] is not None:
            data = {"best_trial": found["best"]["number"], "validation_loss": found["best"]["loss"]}
            self._outbox.put({"type": "metrics", "data": data})

    def _conclude(self) -> None:
        found, jobs = search_report(self._config, self._study), self._store.trials(self.claim.id)
        artifacts = write_search(self._settings.run_dir(self.claim.id), self._config, found)
        artifacts["student"] = str(self._settings.run_dir(jobs[found["best"]["number"]]) / "student")
        for name, path in artifacts.items():
            self._outbox.put({"type": "artifact", "data": {"name": name, "path": path}})
        self._flush()
        self._store.finish(self.claim, "succeeded")

    def _fingerprint(self) -> str:
        record = self._store.get(self.claim.id)
        assert record is not None and record.cache is not None and record.cache.fingerprint is not None
        return record.cache.fingerprint


def _why(job: Job) -> str:
    if job.status == "cancelled":
        return "It was cancelled."
    return f"{job.error.detail} {job.error.remedy}".strip() if job.error is not None else ""
