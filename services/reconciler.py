"""Mends what a crash left behind: hints that were lost, and leases that nobody renews. Drives searches, too.

Safe in many copies.
"""

from __future__ import annotations

import asyncio
import logging

from celery import Celery
from redis.exceptions import RedisError

from services.jobs import JobStore
from services.queue import publish
from services.search import Searches
from services.settings import STAGES, Settings

INTERVAL_SECONDS = 1.0
HINT_AGE_SECONDS = 10.0

log = logging.getLogger("potstill.reconciler")


class Reconciler:
    """Repeats a few idempotent steps; what they do is decided in ``jobs.lua``."""

    def __init__(self, store: JobStore, app: Celery, settings: Settings) -> None:
        self._store, self._app, self._settings = store, app, settings
        self._searches = Searches(store, app, settings)
        self._contact_since: int | None = None
        self._last_contact = 0

    async def run(self) -> None:
        """Work until cancelled."""
        while True:
            try:
                await asyncio.to_thread(self.step)
            except RedisError as error:
                self._contact_since = None
                log.warning("Redis does not answer: %s", type(error).__name__)
            except Exception:  # nothing may end this task: jobs would hang unnoticed
                log.exception("a round failed")
            await asyncio.sleep(INTERVAL_SECONDS)

    def step(self) -> None:
        """One round."""
        for stage in STAGES:
            for job_id in self._store.unannounced(stage, HINT_AGE_SECONDS):
                publish(self._app, job_id, stage)
        if self._has_watched_a_whole_lease():
            for job_id in self._store.expire(self._settings.max_attempts):
                log.warning("%s: its lease ran out", job_id)
        self._searches.step()

    def _has_watched_a_whole_lease(self) -> bool:
        """Whether every worker alive had a whole lease time to beat in.

        After an outage, or after this machine slept, leases look run out although the workers are well.
        """
        now, lease_ms = self._store.now_ms(), self._settings.lease_seconds * 1000
        if self._contact_since is None or now - self._last_contact > max(lease_ms / 2, 3000 * INTERVAL_SECONDS):
            self._contact_since = now
        self._last_contact = now
        return now - self._contact_since >= lease_ms
