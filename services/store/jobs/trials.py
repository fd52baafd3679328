"""The study and the trials of a search."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any, cast

from kd.config.job import JobConfig
from services.store.jobs.leases import Claim
from services.store.jobs.records import build_fields, make_job_id
from services.store.jobs.script import ScriptedStore, flatten_fields


class Trials(ScriptedStore):
    """Keeps the study of a search, and creates the jobs of its trials."""

    def read_journal(self, job_id: str, start: int) -> list[dict[str, Any]]:
        """The lines of a search's study from number ``start`` on."""
        lines = cast(list[str], self.redis.lrange(f"kd:job:{job_id}:study", start, -1))
        return [json.loads(line) for line in lines]

    def add_to_journal(self, claim: Claim, lines: Iterable[Mapping[str, Any]]) -> str:
        """Add lines to the study of a search, all or none. Returns "go" or "fenced"."""
        texts = map(json.dumps, lines)
        return cast(str, self._transition("journal", claim.id, claim.fence, *texts))

    def create_trial(self, claim: Claim, number: int, config: JobConfig) -> str:
        """Create the job of a trial. Every further call with the number returns the same job.

        Returns the job's id, or "fenced".
        """
        head = (claim.id, claim.fence, number, make_job_id())
        fields = build_fields(config, self._max_attempts)
        return cast(str, self._transition("trial", *head, *flatten_fields(fields)))

    def list_trials(self, job_id: str) -> dict[int, str]:
        """Numbers of a search's trials -> ids of their jobs."""
        found = cast(dict[str, str], self.redis.hgetall(f"kd:job:{job_id}:trials"))
        return {int(number): trial for number, trial in found.items()}
