"""What the loops of the API ask for: repairs after a crash, webhooks, trials of searches."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, cast

from cache.json_object import Json
from kd.config.job import JobConfig
from services.store.jobs.leases import Claim
from services.store.jobs.records import build_fields, make_job_id
from services.store.jobs.script import ScriptedStore, flatten_fields, to_ms

#: Open jobs that one call of ``repair`` reads.
REPAIR_BATCH = 100

WORKER_LOST_ERROR = {
    "type": "worker_lost",
    "detail": (
        "The worker sent no heartbeat for longer than its lease: it died, or lost its connection "
        "to Redis."
    ),
    "remedy": "Check the worker's log and the host's memory, then retry the job.",
}
DEADLINE_ERROR = {
    "type": "deadline_exceeded",
    "detail": "The job had not ended when its deadline passed.",
    "remedy": "Retry it with a longer deadline_seconds; it continues from its last checkpoint.",
}


@dataclass(frozen=True)
class Delivery:
    """A webhook that is due: event ``event_id`` of a job, after ``tries`` failed tries."""

    job_id: str
    event_id: str
    url: str
    tries: int


class Loops(ScriptedStore):
    """Puts right what crashes and lost messages left, hands out webhooks, and keeps searches."""

    def read_clock_ms(self) -> int:
        """The server's clock in milliseconds."""
        seconds, microseconds = self.redis.time()
        return seconds * 1000 + microseconds // 1000

    def read_clock(self) -> datetime:
        """The server's clock, to the millisecond."""
        return datetime.fromtimestamp(self.read_clock_ms() / 1000, UTC)

    def expire(self) -> list[str]:
        """Take back the jobs whose lease has run out. Returns their ids."""
        return cast(list[str], self._transition("expire", json.dumps(WORKER_LOST_ERROR)))

    def due(self) -> list[str]:
        """Fail the jobs whose deadline has passed, and stop their runs. Returns their ids."""
        return cast(list[str], self._transition("due", json.dumps(DEADLINE_ERROR)))

    def repair(self, start: int, lease_seconds: float) -> tuple[int, list[str]]:
        """Put open jobs back where they should be listed, from place ``start`` on.

        Returns the place to go on from, and the ids of the jobs that were put back.
        """
        following, *ids = self._transition("repair", start, REPAIR_BATCH, to_ms(lease_seconds))
        return int(following), ids

    def list_unannounced(self, stage: str, age_seconds: float) -> list[str]:
        """Queued jobs without a hint in the last ``age_seconds``. The caller publishes them now."""
        return cast(list[str], self._transition("hints", stage, to_ms(age_seconds)))

    # -- webhooks

    def lease_webhooks(self, lease_seconds: float, limit: int) -> list[Delivery]:
        """Up to ``limit`` webhooks to send now. No other caller gets them for ``lease_seconds``."""
        flat: list[str] = self._transition("webhooks", to_ms(lease_seconds), limit)
        rows = zip(*[iter(flat)] * 4, strict=True)
        return [
            Delivery(job_id, event_id, url, int(tries)) for job_id, event_id, url, tries in rows
        ]

    def finish_webhook(self, delivery: Delivery, warning: str = "") -> None:
        """Forget a webhook that has arrived.

        A ``warning`` says that it is given up instead, and goes to the job's events.
        """
        self._transition("webhook", delivery.job_id, delivery.event_id, "", warning)

    def retry_webhook(self, delivery: Delivery, delay_seconds: float) -> None:
        """Count a failed try, and try again after ``delay_seconds``."""
        self._transition("webhook", delivery.job_id, delivery.event_id, to_ms(delay_seconds), "")

    # -- the study and the trials of a search

    def read_journal(self, job_id: str, start: int) -> list[Json]:
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
