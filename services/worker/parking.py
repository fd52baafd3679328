"""Jobs whose work another process does already: they wait for it here, with neither a device nor a process.

The claim stays with the worker, so that the job hears of a cancel or a pause. Once the lock of the other process is
free the job goes back to the queue, in its place and in the same attempt, and finds the work done.
"""

from __future__ import annotations

import fcntl
import logging
import threading
from collections.abc import Callable
from pathlib import Path

from redis.exceptions import RedisError

from services.jobs import Batch, Claim, JobStore
from services.worker.supervisor import until_answered

POLL_SECONDS = 1.0

log = logging.getLogger("potstill.worker")


class Parking:
    """The jobs that wait, a thread each; ``announce`` is called with the claim of one that is in the queue again."""

    def __init__(
        self, store: JobStore, lease_seconds: float, stopping: threading.Event, announce: Callable[[Claim], None]
    ) -> None:
        self._store, self._lease, self._stopping, self._announce = store, lease_seconds, stopping, announce
        self._threads: list[threading.Thread] = []

    def park(self, claim: Claim, lock: Path) -> None:
        """Keep the claim until ``lock`` is free, or the job is to stop."""
        thread = threading.Thread(target=self._keep, args=(claim, lock), name=f"parked {claim.id}")
        self._threads = [other for other in self._threads if other.is_alive()] + [thread]
        thread.start()

    def close(self) -> None:
        """Wait until every job has been let go, which ``stopping`` brings about."""
        for thread in self._threads:
            thread.join()

    def _keep(self, claim: Claim, lock: Path) -> None:
        reply = "go"
        while reply == "go" and not is_free(lock) and not self._stopping.wait(min(POLL_SECONDS, self._lease / 5)):
            reply = self._beat(claim)
        if reply == "fenced":
            return
        status = until_answered(lambda: self._store.release(claim), self._stopping)
        log.info("%s waited for another process, and is %s", claim.id, status)
        if status == "queued":
            self._announce(claim)

    def _beat(self, claim: Claim) -> str:
        try:
            return self._store.beat(claim, self._lease, Batch(0, ()))
        except RedisError:
            return "go"  # as long as nobody says otherwise


def is_free(lock: Path) -> bool:
    """Whether no process holds the lock."""
    try:
        with lock.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except FileNotFoundError:
        return True
    return True
