"""The heartbeat of a run: it sends events and renews the lease. The reply says whether to go on.

It has its own thread, because a Redis or a name server that does not answer must not hold up the
run. Meanwhile the events wait in the outbox, and the last reply stays valid.
"""

from __future__ import annotations

import logging
import threading
import time
from dataclasses import dataclass
from typing import ClassVar

from redis.exceptions import RedisError

from services.process.lasting_loops import BlockLoop
from services.store.connection import describe_failure
from services.store.jobs.leases import BEAT_SECONDS, BEATS_PER_LEASE, BeatReply, Claim
from services.store.jobs.store import JobStore
from services.worker.counters import RunCounters
from services.worker.stage_process import Outbox

log = logging.getLogger("potstill.worker")


@dataclass(eq=False)
class Heartbeat(BlockLoop):
    """Beats for one claim, with a lease in seconds, until it is closed or fenced."""

    _store: JobStore
    _claim: Claim
    _lease: float
    _outbox: Outbox
    _counters: RunCounters
    reply: BeatReply = "go"
    _lost: bool = False

    loop: ClassVar[str] = "heartbeat"

    def deliver(self, give_up: threading.Event) -> None:
        """Send the remaining events, however long Redis is away, until ``give_up`` is set."""
        while self.reply != "fenced" and not self._outbox.empty:
            if not self._beat() and give_up.wait(BEAT_SECONDS):
                return
        self._flush_counters()

    def _run(self) -> None:
        interval = min(BEAT_SECONDS, self._lease / BEATS_PER_LEASE)
        while self.reply != "fenced":
            self._beat()
            self._flush_counters()
            if self._closing.wait(interval):
                return

    def _beat(self) -> bool:
        try:
            self.reply = self._store.beat(self._claim, self._lease, self._outbox.next_batch())
        except RedisError as error:
            if not self._lost:
                log.warning("the job store %s; the run continues", describe_failure(error))
            self._lost = True
            return False
        if self._lost:
            log.info("Redis answers again, after %.0f s", self.outage_seconds)
        self._contact = time.monotonic()
        self._lost = False
        self._outbox.mark_delivered()
        return True

    def _flush_counters(self) -> None:
        if self._lost:
            return
        try:
            self._counters.flush(self._store)
        except RedisError:
            log.debug("the counters wait for Redis")
