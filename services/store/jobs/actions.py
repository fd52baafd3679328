"""The actions on a job: a client's cancel, pause, resume, retry and delete; the rules' removal."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from kd.client.wire.jobs import Action
from services.store.jobs.script import ScriptedStore, to_ms


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


class JobActions(ScriptedStore):
    """Changes jobs for a client, and removes old ones for the rules of retention."""

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
