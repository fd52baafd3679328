"""Mends what a crash left behind, keeps time, drives searches and sends webhooks. Safe in many copies.

twice a second hints that were lost are sent again; leases that ran out and deadlines that passed take effect; some of
               the open jobs get back what they have lost: a lease, a place in the queue, the end of a dependency
every minute   queued jobs whose cache is gone from the disk go back to its capture, or fail where they cannot
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import time
from collections.abc import Callable

from celery import Celery
from redis.exceptions import RedisError

from kd.jobfile import parse_config
from services.jobs import Batch, Claim, JobQuery, JobStore
from services.queue import publish
from services.schemas import Job
from services.search import Searches
from services.settings import SEARCH, STAGES, Settings
from services.webhooks import Webhooks

INTERVAL_SECONDS = 0.5
HINT_AGE_SECONDS = 10.0
LOOK_AT_DISK_SECONDS = 60.0
JOBS_AT_ONCE = 100

log = logging.getLogger("potstill.reconciler")


class Reconciler:
    """Repeats a few idempotent steps; what they do to a job is decided in ``jobs.lua``."""

    def __init__(self, store: JobStore, app: Celery, settings: Settings) -> None:
        """Raises ``ConfigError`` where webhooks are on and cannot be signed."""
        self._store, self._app, self._settings = store, app, settings
        self._searches, self._webhooks = Searches(store, app, settings), Webhooks(store, settings)
        self._caches = LostCaches(store, settings)
        self._next_to_mend = 0
        self._contact_since: int | None = None
        self._last_contact = 0

    async def run(self) -> None:
        """Work until cancelled."""
        async with asyncio.TaskGroup() as group:  # a slow receiver must not hold up the rest
            group.create_task(self._rounds())
            group.create_task(self._webhooks.run())

    async def _rounds(self) -> None:
        while True:
            try:
                await asyncio.to_thread(self.step)
            except RedisError as error:
                self._contact_since = None
                log.warning("Redis does not answer: %s", type(error).__name__)
            await asyncio.sleep(INTERVAL_SECONDS)

    def step(self) -> None:
        """One round; raises ``RedisError``, and no other: nothing may end this, or jobs would hang unnoticed."""
        for duty in (self._expire, self._announce, self._mend, self._caches.step, self._searches.step):
            _do(duty)
        self._store.redis.set("kd:reconciler", self._store.now_ms() / 1000)

    def _announce(self) -> None:
        for stage in STAGES:
            for job_id in self._store.unannounced(stage, HINT_AGE_SECONDS):
                if not publish(self._app, job_id, stage):
                    return  # the others would wait as long for nothing; they come up again

    def _expire(self) -> None:
        if self._has_watched_a_whole_lease():
            for job_id in self._store.expire():
                log.warning("%s: its lease ran out", job_id)
        for job_id in self._store.due():
            log.warning("%s: its deadline has passed", job_id)

    def _mend(self) -> None:
        self._next_to_mend, ids = self._store.mend(self._next_to_mend, self._settings.lease_seconds)
        for job_id in ids:
            log.warning("%s: its lease, its place in the queue, or the end of what it waits for was lost", job_id)

    def _has_watched_a_whole_lease(self) -> bool:
        """Whether every worker alive had a whole lease time to beat in.

        After an outage, or after this machine slept, leases look run out although the workers are well.
        """
        now, lease_ms = self._store.now_ms(), self._settings.lease_seconds * 1000
        if self._contact_since is None or now - self._last_contact > max(lease_ms / 2, 3000 * INTERVAL_SECONDS):
            self._contact_since = now
        self._last_contact = now
        return now - self._contact_since >= lease_ms


def _do(duty: Callable[[], None]) -> None:
    try:
        duty()
    except RedisError:
        raise
    except Exception:
        log.exception("%s failed", getattr(duty, "__qualname__", duty))


class LostCaches:
    """Finds queued jobs that are to read a cache which the disk does not hold any more."""

    def __init__(self, store: JobStore, settings: Settings) -> None:
        self._store, self._settings = store, settings
        self._owner = f"{socket.gethostname()}:{os.getpid()}"
        self._cursor: int | None = None
        self._next_look = 0.0

    def step(self) -> None:
        """Look at some jobs, if it is time; where there is no folder of caches at all, this host has not the disk."""
        if time.monotonic() < self._next_look or not self._settings.caches.is_dir():
            return
        self._next_look = time.monotonic() + LOOK_AT_DISK_SECONDS
        page = self._store.page(JobQuery(status="queued"), JOBS_AT_ONCE, self._cursor)
        self._cursor = page.next_cursor
        for job in page.jobs:
            if self._is_lost(job):
                self._take_back(job)

    def _is_lost(self, job: Job) -> bool:
        if job.stage not in ("train", SEARCH) or job.cache is None or job.cache.fingerprint is None:
            return False
        # The folder, not its manifest: that is away for a while where another job captures a damaged shard anew.
        folder = self._settings.caches / job.cache.fingerprint
        return not folder.exists() and parse_config(job.config).needs_cache

    def _take_back(self, job: Job) -> None:
        claim = self._store.claim(job.id, job.stage, self._owner, self._settings.lease_seconds)
        if claim is None:  # somebody has begun it, and will see for himself
            return
        assert job.cache is not None, "_is_lost has seen to that"
        detail = f"Cache {job.cache.fingerprint} is not on the disk any more."
        log.warning("%s: %s", job.id, detail)
        if job.kind in ("distill", "search"):
            self._capture_again(claim, detail)
        else:
            remedy = "Capture it again by a job of kind precompute, or restore a backup; then retry this one."
            self._store.finish(claim, "failed", {"type": "cache_missing", "detail": detail, "remedy": remedy})

    def _capture_again(self, claim: Claim, detail: str) -> None:
        warning = {"type": "warning", "data": {"message": f"{detail} It is captured again."}}
        self._store.beat(claim, self._settings.lease_seconds, Batch(1, (warning,)))
        self._store.advance(claim, "precompute")  # a hint follows in some seconds, as for any that was lost
