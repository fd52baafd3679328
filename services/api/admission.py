"""Admission of jobs: check the disk, the inputs and the quotas, write the record, tell a worker.

The record comes before the hint to the workers, so that no worker hears of a job that is not there.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass

from redis.exceptions import RedisError

from cache.json_object import Json
from cache.reading.usage import held
from cache.remote.bucket import is_stored
from kd.client.wire.accounts import TeamAccount
from kd.client.wire.jobs import Cost, Job, JobResources
from kd.client.wire.plans import JobEstimate, JobPlan
from kd.client.wire.problems import QuotaProblem
from kd.config.job import JobConfig
from kd.config.kinds import list_stage_names
from kd.errors import ConfigError, Problem
from kd.files import format_bytes
from services.api.answers.accounts import describe_account, find_quota_warnings
from services.api.answers.problems import ApiProblem
from services.api.plan_process import Wish
from services.api.service import Service
from services.loops.searches import find_service_problems
from services.loops.webhooks import find_webhook_problems
from services.process.logs import request_id
from services.settings import Settings
from services.store.callers import Caller
from services.store.costs import estimate_new_job
from services.store.jobs.changes import CreateResult
from services.store.queue import publish_hint

#: The Retry-After header of a quota problem: a job seldom ends sooner.
RETRY_QUOTA_SECONDS = "60"


@dataclass(frozen=True)
class Admission:
    """Accepts the jobs of one caller."""

    service: Service
    caller: Caller

    def plan(self, config: JobConfig) -> JobPlan:
        """Return the plan of the job; raise what the check finds."""
        plan = JobPlan.model_validate(self._ask_process("plan", config))
        account = self.read_account()
        new_bytes = 0 if plan.capture is None else plan.capture.bytes
        return plan.model_copy(
            update={
                "cost": self._estimate_cost(config),
                "account": account,
                "warnings": [*plan.warnings, *find_quota_warnings(account, new_bytes)],
            }
        )

    def estimate(self, config: JobConfig) -> JobEstimate:
        """Return the estimate of the job's capture; raise what the check finds.

        Cost and account are None while the job store does not answer; the rest needs no store.
        """
        found = JobEstimate.model_validate(self._ask_process("estimate", config))
        try:
            more = {"cost": self._estimate_cost(config), "account": self.read_account()}
        except RedisError:
            return found
        return found.model_copy(update=more)

    def read_account(self) -> TeamAccount:
        """Return the account of the caller's team."""
        return describe_account(self.service.store.read_accounts(self.caller.team)[0])

    def _estimate_cost(self, config: JobConfig) -> Cost | None:
        store = self.service.store
        needs = JobResources(gpus=config.resources.gpus, memory=config.resources.memory)
        mean = store.read_mean_use(config.kind)
        return estimate_new_job(config.stages[-1], needs, store.list_workers(), mean)

    def _ask_process(self, wish: Wish, config: JobConfig) -> Json:
        """Let the process check the job; raise all its problems, or 507 if the disk is full."""
        settings = self.service.settings
        require_space(settings)
        own = [
            *find_service_problems(config),
            *find_webhook_problems(config.webhook, settings),
            *self._find_continued_problems(config),
            *self._find_dependency_problems(config),
            *self._find_cache_problems(config),
        ]
        try:
            result = self.service.plans.check(wish, config, self.caller)
        except ConfigError as error:
            told = {each.pointer for each in error.problems}
            more = [each for each in own if each.pointer not in told]
            raise ConfigError([*error.problems, *more]) from None
        if own:
            raise ConfigError(own)
        return result

    def _find_continued_problems(self, config: JobConfig) -> list[Problem]:
        """Find that the job that ``config`` continues is not the caller's, or has not ended."""
        run = None if config.resume is None else config.resume.run
        if run is None:
            return []
        job = self.service.store.get(run, self.caller)
        if job is None:
            detail = f"there is no job {run}."
            remedy = "Name one of your jobs whose training has started, or remove resume.run."
            return [Problem("/resume/run", detail, remedy)]
        if not job.ended:
            detail = f"the job {run} has not ended; it is {job.status}."
            return [Problem("/resume/run", detail, "Wait for its end, or cancel it.")]
        return []

    def _find_dependency_problems(self, config: JobConfig) -> list[Problem]:
        """Find jobs to wait for that are not the caller's, or can never succeed."""
        found = {each: self.service.store.get(each, self.caller) for each in config.depends_on}
        states = {each: job.status if job else "unknown" for each, job in found.items()}
        return [
            _make_dependency_problem(config, each, state)
            for each, state in states.items()
            if state in ("unknown", "failed", "cancelled")
        ]

    def _find_cache_problems(self, config: JobConfig) -> list[Problem]:
        """Find that the cache that ``config`` names is not on the disk."""
        caches = self.service.settings.caches
        if not caches.is_dir():
            return []
        place = "in the bucket" if self.service.settings.in_bucket else "on the disk"
        remedy = "See `kd cache ls` or GET /caches. A job of kind precompute captures a cache."
        return [
            Problem(f"/cache/{field}", f"there is no cache {name} {place}.", remedy)
            for field, name in config.cache.named.items()
            if not is_stored(caches / name)
        ]

    def admit(self, config: JobConfig, key: str | None) -> tuple[Job, bool]:
        """Return the job's record, and whether an earlier request with the same key created it."""
        settings = self.service.settings
        store = self.service.store
        created = store.find_earlier(config, self.caller, key) if key else None
        if created is None:
            # No rule of retention removes a cache between its check and the record of the job.
            with ExitStack() as holding:
                for name in config.cache.named.values():
                    holding.enter_context(held(settings.caches / name))
                # Only a new job is checked: a replayed one exists, even if its inputs are gone.
                least_memory = self._check(config)
                quotas = (settings.quota_open_jobs, settings.quota_record_bytes)
                origin = request_id.get()
                created = store.create(config, self.caller, key, *quotas, origin, least_memory)
        _require_created(created, config, settings)
        if created.outcome == "team_quota":
            raise make_bytes_problem(self.read_account())
        job = store.get(created.id, self.caller)
        if job is None:
            detail = f"The job {created.id} was deleted."
            raise ApiProblem(404, detail, "Use a new Idempotency-Key.")
        if created.outcome == "created":
            facts = {"kind": job.kind, "name": job.name}
            self.service.audit.record(self.caller, "job.create", job.id, **facts)
            announce_job(self.service, job)
        return job, created.outcome == "replayed"

    def _check(self, config: JobConfig) -> int | None:
        """Check a new job, and return the bytes of memory that its models need at least.

        Raises all its problems, or 429 if its cache is more than its team has. A capture whose size
        only its worker can find is admitted. One whose size is not found in time is refused (503).
        """
        account = self.read_account()
        captures = config.captures
        left = None if config.cache.fingerprint is not None or not captures else account.bytes.left
        found = self._ask_process("check" if left is None else "size", config)
        if left is not None and (needed := found["bytes"]) is not None and needed > left:
            more = f"The cache of this job needs about {format_bytes(needed)}."
            remedy = "If its cache is on the disk already, name it: cache.fingerprint."
            raise make_bytes_problem(account, more, remedy)
        least_memory: int | None = found["least_memory"]
        return least_memory


def _require_created(created: CreateResult, config: JobConfig, settings: Settings) -> None:
    if created.outcome == "conflict":
        detail = f"This Idempotency-Key created {created.id} from another body."
        raise ApiProblem(422, detail, "Use a new Idempotency-Key.", "key-reused")
    if created.outcome == "quota":
        raise make_open_jobs_problem(int(created.detail), settings)
    if created.outcome == "record_quota":
        most = settings.quota_record_bytes
        detail = (
            f"With this job, the records of this key's jobs would take {created.detail} bytes,"
            f" and they may take {most}."
        )
        used = int(created.detail)
        frees_up = "when jobs are deleted"
        quota = QuotaProblem(what="record_bytes", limit=most, used=used, frees_up=frees_up)
        raise _make_quota_problem(detail, "Delete jobs that have ended: DELETE /jobs/{id}.", quota)
    if created.outcome == "bad_dependency":
        raise ConfigError([_make_dependency_problem(config, created.id, created.detail)])


def _make_dependency_problem(config: JobConfig, job_id: str, state: str) -> Problem:
    return Problem(
        f"/depends_on/{config.depends_on.index(job_id)}",
        f"the job cannot wait for {job_id}, which is {state}.",
        "Name jobs that will end or have succeeded; GET /jobs lists them.",
    )


def make_open_jobs_problem(used: int, settings: Settings) -> ApiProblem:
    """Return the 429 for a key that has ``used`` open jobs, and may have no more."""
    most = settings.quota_open_jobs
    return _make_quota_problem(
        f"{used} jobs of this key have not ended, and it may have {most}.",
        "Wait for one to end, or cancel one.",
        QuotaProblem(what="open_jobs", limit=most, used=used, frees_up="when one of its jobs ends"),
    )


def make_bytes_problem(account: TeamAccount, needed: str = "", remedy: str = "") -> ApiProblem:
    """Return the 429 for a team whose caches, runs and files take too much of the disk.

    ``needed`` says what would be added, and ``remedy`` what else to do; sentences, or empty.
    """
    use = account.bytes
    limit = use.limit or 0.0
    return _make_quota_problem(
        f"Caches and runs of team {account.team} take {format_bytes(use.used)}, and its quota is"
        f" {format_bytes(limit)}. {needed}".rstrip(),
        "Delete caches (DELETE /caches/{fingerprint}), or jobs with their files (DELETE"
        f" /jobs/{{id}}?artifacts=true). The disk is measured every minute. {remedy}".rstrip(),
        QuotaProblem(what="bytes", limit=limit, used=use.used, frees_up=use.frees_up),
    )


def _make_quota_problem(detail: str, remedy: str, quota: QuotaProblem) -> ApiProblem:
    headers = {"Retry-After": RETRY_QUOTA_SECONDS}
    members = {"quota": quota}
    return ApiProblem(429, detail, remedy, "quota-exceeded", headers=headers, members=members)


def announce_job(service: Service, job: Job) -> None:
    """Tell a worker that the job waits; if that fails, the reconciler tells it later."""
    if job.status == "queued" and job.stage in list_stage_names("worker"):
        publish_hint(service.queue, job.id, job.stage)


def require_space(settings: Settings, coming: int = 0) -> None:
    """Raise 507 if a disk of the service is nearly full, or ``coming`` bytes would make it so."""
    if full := settings.find_full_disk(coming):
        remedy = "Delete caches, or jobs with their artifacts, or ask the operator for more space."
        raise ApiProblem(507, full, remedy)
