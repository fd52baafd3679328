"""Whether a job is taken: disk, what it names, how many its owner has; then the record, and after it the hint."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from kd.config.job import JobConfig
from kd.errors import ConfigError, Problem
from kd.estimate import free_bytes
from kd.validate import check_inputs
from services.api.problems import ApiProblem
from services.api.service import Service
from services.jobs import Caller, Created, Origin
from services.logs import request_id
from services.queue import publish
from services.schemas import Job
from services.search import service_problems
from services.settings import STAGES, Settings
from services.telemetry import traceparent
from services.tenancy import confinement_of
from services.webhooks import webhook_problems

RETRY_QUOTA_SECONDS = "60"


@dataclass(frozen=True)
class Desk:
    """Takes jobs of one caller."""

    service: Service
    caller: Caller

    def require_admissible(self, config: JobConfig) -> None:
        """Raise where the job cannot run: ``ConfigError`` with every problem, or 507 for want of disk."""
        settings = self.service.settings
        require_space(settings.home, settings.disk_floor_bytes)
        limits = confinement_of(settings, self.service.store, self.caller.name)
        problems = check_inputs(config, settings.root, settings.home, limits)
        if problems := [*problems, *service_problems(config), *webhook_problems(config.webhook, settings)]:
            raise ConfigError(problems)

    def take(self, config: JobConfig, key: str | None) -> tuple[Job, bool]:
        """The job's record, and whether an earlier request of the same key has made it."""
        most_open, most_bytes = self.service.settings.quota_open_jobs, self.service.settings.quota_record_bytes
        created = self.service.store.earlier(config, self.caller, key) if key else None
        if created is None:  # else the inputs may have gone since: the job that was made of them has not
            self.require_admissible(config)
            origin = Origin(request_id.get(), traceparent())
            created = self.service.store.create(config, self.caller, key, most_open, most_bytes, origin)
        _require_taken(created, config, self.service.settings)
        job = self.service.store.get(created.id, self.caller)
        if job is None:
            raise ApiProblem(404, f"The job {created.id} was deleted.", "Use a new Idempotency-Key.")
        if created.outcome == "created":
            announce(self.service, job)
        return job, created.outcome == "replayed"


def _require_taken(created: Created, config: JobConfig, settings: Settings) -> None:
    if created.outcome == "conflict":
        detail = f"This Idempotency-Key made {created.id} from another body."
        raise ApiProblem(422, detail, "Use a new key.", "key-reused")
    if created.outcome == "quota":
        detail = f"{created.detail} jobs of this key have not ended, and {settings.quota_open_jobs} is the most."
        raise _quota_exceeded(detail, "Wait for one to end, or cancel one.")
    if created.outcome == "record_quota":
        most = settings.quota_record_bytes
        detail = f"With it the records of this key's jobs would take {created.detail} bytes, and {most} is the most."
        raise _quota_exceeded(detail, "Delete jobs that have ended: DELETE /jobs/{id}.")
    if created.outcome == "bad_dependency":
        pointer = f"/depends_on/{config.depends_on.index(created.id)}"
        raise ConfigError([Problem(pointer, f"{created.id} cannot be waited for: it is {created.detail}.")])


def _quota_exceeded(detail: str, remedy: str) -> ApiProblem:
    headers = {"Retry-After": RETRY_QUOTA_SECONDS}
    return ApiProblem(429, detail, remedy, "quota-exceeded", headers=headers)


def announce(service: Service, job: Job) -> None:
    """Tell a worker that the job waits; where that fails, the reconciler does it."""
    if job.status == "queued" and job.stage in STAGES:
        publish(service.queue, job.id, job.stage)


def require_space(folder: Path, floor: int) -> None:
    """Raise 507 where the disk of ``folder`` has less than ``floor`` bytes left."""
    if (free := free_bytes(folder)) < floor:
        detail = f"The disk of the data folder has {free} bytes left; jobs are taken from {floor} on."
        raise ApiProblem(507, detail, "Delete jobs with their artifacts, or caches; the operator may add space.")
