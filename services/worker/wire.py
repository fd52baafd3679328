"""The way from a run to its record and back: events and signs of life go out, the reply says whether to go on.

It has a thread of its own: a Redis, or a name server, that does not answer holds up nothing else. Meanwhile the
events wait in the outbox, and the last reply stands.
"""

from __future__ import annotations

import logging
import threading
import time

from redis.exceptions import RedisError

from services.jobs import Claim, JobStore, Reply
from services.worker.process import Outbox
from services.worker.tally import Tally

BEAT_SECONDS = 1.0
PARTS_OF_LEASE = 5  #: beats in the time of a lease

log = logging.getLogger("potstill.worker")


class Wire:
    """Beats for one claim until it is closed, or fenced."""

    def __init__(self, store: JobStore, claim: Claim, lease_seconds: float, outbox: Outbox, tally: Tally) -> None:
        self.reply: Reply = "go"
        self._store, self._claim, self._lease, self._outbox, self._tally = store, claim, lease_seconds, outbox, tally
        self._contact = time.monotonic()
        self._lost = False
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="beat", daemon=True)

    def __enter__(self) -> Wire:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        """No beat is under way afterwards."""
        self._closing.set()
        self._thread.join()

    @property
    def outage_seconds(self) -> float:
        """Since Redis last answered."""
        return time.monotonic() - self._contact

    def deliver(self, give_up: threading.Event) -> None:
        """Send what is left, however long Redis is away, unless this worker is to end."""
        while self.reply != "fenced" and not self._outbox.empty:
            if not self._beat() and give_up.wait(BEAT_SECONDS):
                return
        self._settle()

    def _run(self) -> None:
        interval = min(BEAT_SECONDS, self._lease / PARTS_OF_LEASE)
        while self.reply != "fenced":
            self._beat()
            self._settle()
            if self._closing.wait(interval):
                return

    def _beat(self) -> bool:
        try:
            self.reply = self._store.beat(self._claim, self._lease, self._outbox.batch())
        except RedisError as error:
            if not self._lost:
                log.warning("Redis does not answer (%s); the run goes on", type(error).__name__)
            self._lost = True
            return False
        if self._lost:
            log.info("Redis answers again, after %.0f s", self.outage_seconds)
        self._contact, self._lost = time.monotonic(), False
        self._outbox.delivered()
        return True

    def _settle(self) -> None:
        if self._lost:
            return
        try:
            self._tally.settle(self._store)
        except RedisError:
            log.debug("the counters wait")
