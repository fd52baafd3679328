"""The repairs of the reconciler: lost leases, passed deadlines, lost entries and lost hints."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from typing import cast

from services.store.jobs.script import ScriptedStore, to_ms

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


class Reconciling(ScriptedStore):
    """Puts right what a crash or a lost message has left behind."""

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
