"""The nightly pass of the operator's rules of retention: once a day, by one API of several."""

from __future__ import annotations

import logging
import threading
from datetime import datetime, timedelta
from functools import partial
from itertools import takewhile

from services.process.lasting_loops import repeat_in_thread
from services.settings import Settings
from services.store.audit import AuditLog
from services.store.jobs.store import JobStore
from services.store.retention.collector import find_items, look, read_ages, remove_items

#: Time between two looks at the clock.
INTERVAL_SECONDS = 60.0

log = logging.getLogger("potstill.retention")


class NightlyRetention:
    """Applies the rules of the settings in the hour that they name, without ``--force``."""

    def __init__(self, store: JobStore, settings: Settings) -> None:
        self._store = store
        self._settings = settings
        self._stopping = threading.Event()

    async def run(self) -> None:
        """Work until cancelled."""
        await repeat_in_thread(self.step, INTERVAL_SECONDS, self._stopping)

    def step(self, now: datetime | None = None) -> None:
        """Remove what the rules name, if it is time and no other process has begun today.

        ``now`` is the time of Redis, unless a test gives another. Raises ``RedisError``.
        """
        ages = read_ages(self._settings)
        if not ages:
            return
        now = now or self._store.read_clock()
        if now.hour != self._settings.retain_hour:
            return
        # For longer than the day, so that no other process begins a pass of it.
        if self._store.redis.set(f"kd:retention:{now.date()}", "1", nx=True, ex=timedelta(days=2)):
            scene = look(self._settings, self._store, ages)
            items = takewhile(lambda _: not self._stopping.is_set(), find_items(scene))
            audit = partial(AuditLog(self._settings).record, "retention")
            gone, kept = remove_items(items, scene, audit)
            total = sum(item.bytes for item in gone)
            log.info("retention: %d removed, %d bytes; %d are needed", len(gone), total, len(kept))
