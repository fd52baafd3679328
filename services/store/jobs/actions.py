"""The actions of a client on a job: cancel, pause, resume, retry and delete."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from kd.client.wire.jobs import Action
from services.store.jobs.script import ScriptedStore


@dataclass(frozen=True)
class ActionResult:
    """The result of an action, and the job's status after it.

    done     the job has changed
    already  the job was so before
    illegal  the job does not allow the action; ``allowed`` lists those that it allows
    unknown  there is no such job
    """

    outcome: Literal["done", "already", "illegal", "unknown"]
    status: str
    allowed: tuple[str, ...] = ()


class JobActions(ScriptedStore):
    """Changes jobs for a client."""

    def change(self, action: Action, job_id: str) -> ActionResult:
        """Apply an action to a job. The worker of a running job learns of it with its next beat."""
        outcome, status, *allowed = self._transition("change", action, job_id)
        return ActionResult(outcome, status, tuple(allowed))
