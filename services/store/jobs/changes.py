"""Records are made, changed for a client, and removed by the operator's rules."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, cast

from kd.client.wire.jobs import Action
from kd.config.job import JobConfig
from services.store.callers import LOCAL_CALLER, Caller
from services.store.jobs.records import build_fields, make_job_id, serialise_config
from services.store.jobs.script import ScriptedStore, flatten_fields, to_ms
from services.store.run_folder import JOB_ID, FoundRun


@dataclass(frozen=True)
class CreateResult:
    """The result of ``create``.

    created         job ``id`` is new
    replayed        this key created job ``id`` earlier, from the same configuration
    conflict        this key created job ``id`` earlier, from another configuration
    quota           the caller has ``detail`` open jobs
    record_quota    with this job, the caller's records would take ``detail`` bytes
    team_quota      caches and runs of the caller's team take ``detail`` bytes, and may not
    bad_dependency  no job can wait for job ``id``, whose status is ``detail``
    """

    outcome: Literal[
        "created", "replayed", "conflict", "quota", "record_quota", "team_quota", "bad_dependency"
    ]
    id: str
    detail: str = ""


@dataclass(frozen=True)
class ActionResult:
    """The result of an action, and the job's status after it.

    done     the job has changed
    already  the job was so before
    illegal  the job does not allow the action; ``allowed`` lists those that it allows
    unknown  there is no such job
    quota    its owner has ``open_jobs`` open jobs already, and may have no more
    """

    outcome: Literal["done", "already", "illegal", "unknown", "quota"]
    status: str
    allowed: tuple[str, ...] = ()
    open_jobs: int = 0


class JobChanges(ScriptedStore):
    """Creates, changes and removes jobs, and restores the records of runs that have lost them."""

    def create(
        self,
        config: JobConfig,
        caller: Caller = LOCAL_CALLER,
        key: str | None = None,
        max_open: int | None = None,
        max_bytes: int | None = None,
        request_id: str = "",
        least_memory: int | None = None,
    ) -> CreateResult:
        """Create a job and queue its first stage.

        For a day, the same ``key`` of the same caller returns the same job. ``least_memory`` is the
        estimate of the bytes that its models need.
        """
        fields = build_fields(config, self._max_attempts)
        fields |= {"request_id": request_id, "team": caller.team}
        if least_memory is not None:
            fields["least_memory"] = str(least_memory)
        limits = ("" if limit is None else limit for limit in (max_open, max_bytes))
        outcome, *rest = self._transition(
            "create",
            make_job_id(),
            caller.name,
            int(caller.sees_all),
            _hash_key(caller, key) if key else "",
            _hash_text(fields["config"]),
            *limits,
            *flatten_fields(fields),
        )
        if outcome in ("quota", "record_quota", "team_quota"):
            return CreateResult(outcome, "", rest[0])
        return CreateResult(outcome, *rest)

    def find_earlier(self, config: JobConfig, caller: Caller, key: str) -> CreateResult | None:
        """The result that ``create`` would return if this key has created a job already.

        Returns None if it has not. Nothing is created.
        """
        entry = cast(str | None, self.redis.get(f"kd:idempotency:{_hash_key(caller, key)}"))
        job_id, _, body = (entry or "").partition(" ")
        if entry is None or not self.redis.exists(f"kd:job:{job_id}"):
            return None
        same = body == _hash_text(serialise_config(config))
        return CreateResult("replayed" if same else "conflict", job_id)

    def change(self, action: Action, job_id: str, max_open: int | None = None) -> ActionResult:
        """Apply an action to a job. The worker of a running job learns of it with its next beat.

        ``max_open`` are the open jobs that the owner of a job may have when one is retried.
        """
        limit = "" if max_open is None else max_open
        outcome, status, *rest = self._transition("change", action, job_id, limit)
        if outcome == "quota":
            return ActionResult(outcome, status, open_jobs=int(rest[0]))
        return ActionResult(outcome, status, tuple(rest))

    def retire(self, job_id: str, older_than: float, force: bool = False) -> bool:
        """Delete the record of a job that ended ``older_than`` seconds ago; return whether it is.

        A job that an open job names stays, unless ``force`` is true.
        """
        return bool(self._transition("retire", job_id, to_ms(older_than), int(force)) == "retired")

    def list_unknown(self, job_ids: Sequence[str]) -> list[str]:
        """The ids among ``job_ids`` that have no record."""
        known = self._ask_each(job_ids, lambda line, job_id: line.exists(f"kd:job:{job_id}"))
        return [job_id for job_id, exists in known if not exists]

    def find_lost_records(self, runs: Path) -> list[str]:
        """Say that the store has no job, although ``runs`` holds the folders of some."""
        if self.redis.exists("kd:index:*:*"):
            return []
        count = sum(JOB_ID.fullmatch(each.name) is not None for each in runs.glob("job_*"))
        if not count:
            return []
        lost = f"{count} run folders of jobs are on the disk, but the job store has no job: it may"
        return [f"{lost} have lost its data. `kd jobs adopt` restores their records."]

    def adopt(self, run: FoundRun, owner: str) -> bool:
        """Write the record of a run; return whether there was none.

        Its times are those of the adoption. It depends on no job and has no webhook: both concern
        a time that has passed.
        """
        config = run.config.model_copy(update={"depends_on": (), "webhook": None})
        fields = build_fields(config, self._max_attempts)
        fields |= {"stage": run.stage, "turn": str(run.turn)}
        if run.fingerprint is not None:
            fields["cache.fingerprint"] = json.dumps(run.fingerprint)
        if run.fingerprints:
            fields["cache.fingerprints"] = json.dumps(run.fingerprints)
        for name, path in run.artifacts.items():
            fields[f"artifacts.{name}"] = json.dumps(str(path))
        status = "succeeded" if run.error is None else "failed"
        head = (run.id, owner, status, json.dumps(run.error))
        return cast(str, self._transition("adopt", *head, *flatten_fields(fields))) == "adopted"


def _hash_key(caller: Caller, key: str) -> str:
    return _hash_text(json.dumps([caller.name, key]))


def _hash_text(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
