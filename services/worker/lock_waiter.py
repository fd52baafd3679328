"""The wait of a job for another process that does the same work. It needs no device and no process.

The worker keeps the claim, so that a cancel or a pause reaches the job. Once the lock of the other
process is free, the job goes back to its place in the queue in the same attempt, and finds the work
done.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from redis.exceptions import RedisError

from cache.disk import is_lock_free
from services.process.lasting_loops import keep_running
from services.store.jobs.leases import Claim, EventBatch
from services.store.jobs.store import JobStore
from services.worker.supervisor import retry_until_answered

#: Time between two looks at the lock at most.
POLL_SECONDS = 1.0

log = logging.getLogger("potstill.worker")


@dataclass(eq=False)
class LockWaiter:
    """Waits for locks, with one thread for each job.

    The lease is in seconds, and the last argument gets a claim that waits in the queue again.
    """

    _store: JobStore
    _lease: float
    _stopping: threading.Event
    _announce: Callable[[Claim], None]
    _threads: list[threading.Thread] = field(default_factory=list)

    def hold_claim(self, claim: Claim, lock: Path) -> None:
        """Keep the claim until ``lock`` is free or the job must stop."""
        thread = threading.Thread(
            target=keep_running,
            args=("lock-waiter", partial(self._keep, claim, lock), self._stopping),
            name=f"waiting {claim.id}",
        )
        self._threads = [other for other in self._threads if other.is_alive()] + [thread]
        thread.start()

    def close(self) -> None:
        """Wait until every claim is released. ``stopping`` must be set."""
        for thread in self._threads:
            thread.join()

    def _keep(self, claim: Claim, lock: Path) -> None:
        reply: str = "go"
        while (
            reply == "go"
            and not is_lock_free(lock)
            and not self._stopping.wait(min(POLL_SECONDS, self._lease / 5))
        ):
            with suppress(RedisError):  # the last order stays valid
                self._store.idle(claim)  # the worker's devices are free for other jobs
                reply = self._store.beat(claim, self._lease, EventBatch(0, ()))
        if reply == "fenced":
            return
        status = retry_until_answered(lambda: self._store.release(claim), self._stopping)
        log.info("%s waited for another process and is now %s", claim.id, status)
        if status == "queued":
            self._announce(claim)
