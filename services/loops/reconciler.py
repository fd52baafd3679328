"""The loop that repairs jobs after a crash. It also drives searches and sends webhooks.

twice a second   lost hints are sent again
                 changed rules of fair share and quotas reach the job store
                 expired leases and passed deadlines take effect
                 some open jobs get back a lost lease, place in the queue or end of a dependency
every minute     queued jobs whose cache is gone from the disk capture it again, or fail
                 the caches and runs of each team are measured (services/loops/teams.py)
once a day       what the rules of retention name is removed (services/loops/retention.py)

Several copies may run at once: every step may be repeated.
"""

from __future__ import annotations

import asyncio
import logging
import time

from celery import Celery
from redis.exceptions import RedisError

from kd.config.jobfile import parse_config
from kd.config.kinds import CAPTURE, KINDS, list_stage_names
from kd.progress import Event
from services.loops.retention import NightlyRetention
from services.loops.searches import Searches
from services.loops.teams import TeamRules
from services.loops.webhooks import Webhooks
from services.process.lasting_loops import flush_restarts, keep_running_async
from services.process.names import name_process
from services.settings import Settings
from services.store.connection import describe_failure
from services.store.jobs.leases import EventBatch
from services.store.jobs.listing import JobQuery
from services.store.jobs.records import JobRecord
from services.store.jobs.script import is_own_mistake
from services.store.jobs.store import JobStore
from services.store.queue import publish_hint

#: Time between two rounds.
INTERVAL_SECONDS = 0.5
#: Time without a worker after which a hint counts as lost.
HINT_AGE_SECONDS = 10.0
#: Time between two looks at the disk.
LOOK_AT_DISK_SECONDS = 60.0
#: Queued jobs that one look at the disk reads.
JOBS_AT_ONCE = 100

log = logging.getLogger("potstill.reconciler")


class Reconciler:
    """Repeats a few idempotent steps. ``jobs.lua`` decides their effect on a job."""

    def __init__(self, store: JobStore, app: Celery, settings: Settings) -> None:
        """Raises ``ConfigError`` if webhooks are on and cannot be signed."""
        self._store = store
        self._app = app
        self._settings = settings
        self._searches = Searches(store, app, settings)
        self._webhooks = Webhooks(store, settings)
        self._caches = LostCaches(store, settings)
        self._teams = TeamRules(store, settings)
        self._retention = NightlyRetention(store, settings)
        self._next_to_repair = 0
        self._contact_since: int | None = None
        self._last_contact = 0

    async def run(self) -> None:
        """Work until cancelled."""
        # A slow receiver of webhooks, a slow disk, or a long removal does not hold up the rounds.
        async with asyncio.TaskGroup() as group:
            group.create_task(keep_running_async("reconciler", self._rounds))
            group.create_task(keep_running_async("webhooks", self._webhooks.run))
            group.create_task(keep_running_async("sizes", self._teams.run))
            group.create_task(keep_running_async("retention", self._retention.run))

    async def _rounds(self) -> None:
        while True:
            try:
                await asyncio.to_thread(self.step)
            except RedisError as error:
                self._contact_since = None
                log.warning("the job store %s", describe_failure(error))
            await asyncio.sleep(INTERVAL_SECONDS)

    def step(self) -> None:
        """Do one round. Raises only ``RedisError``: any other error must not end the loop."""
        for duty in (
            self._expire,
            self._announce,
            self._repair,
            self._caches.step,
            self._teams.step,
            self._searches.step,
        ):
            try:
                duty()
            except Exception as error:  # a mistake in one must not keep the others from theirs
                if isinstance(error, RedisError) and not is_own_mistake(error):
                    raise
                log.exception("%s failed", duty.__qualname__)
        flush_restarts(self._store)
        self._store.redis.set("kd:reconciler", self._store.read_clock_ms() / 1000)

    def _announce(self) -> None:
        for stage in list_stage_names("worker"):
            for job_id in self._store.list_unannounced(stage, HINT_AGE_SECONDS):
                if not publish_hint(self._app, job_id, stage):
                    return  # the other hints would fail too; a later round sends them

    def _expire(self) -> None:
        if self._has_watched_a_whole_lease():
            for job_id in self._store.expire():
                log.warning("%s: its lease ran out", job_id)
        for job_id in self._store.due():
            log.warning("%s: its deadline has passed", job_id)

    def _repair(self) -> None:
        lease_seconds = self._settings.lease_seconds
        self._next_to_repair, ids = self._store.repair(self._next_to_repair, lease_seconds)
        for job_id in ids:
            log.warning(
                "%s: its lease, its place in the queue, or the end of a dependency was lost", job_id
            )

    def _has_watched_a_whole_lease(self) -> bool:
        """Return whether this loop was in contact with Redis for the time of a whole lease.

        After an outage, or after this machine slept, leases seem expired although their workers
        are alive. Within a lease every such worker beats again.
        """
        now = self._store.read_clock_ms()
        lease_ms = self._settings.lease_seconds * 1000
        longest_gap = max(lease_ms / 2, 3000 * INTERVAL_SECONDS)
        if self._contact_since is None or now - self._last_contact > longest_gap:
            self._contact_since = now
        self._last_contact = now
        return now - self._contact_since >= lease_ms


class LostCaches:
    """Finds queued jobs whose cache is no longer on the disk."""

    def __init__(self, store: JobStore, settings: Settings) -> None:
        self._store = store
        self._settings = settings
        self._owner = name_process()
        self._cursor: int | None = None
        self._next_look = 0.0

    def step(self) -> None:
        """Check some jobs, if it is time.

        A host without the folder of caches checks none, and neither does one whose caches lie in a
        bucket: the worker that takes the job finds out.
        """
        if (
            self._settings.in_bucket
            or time.monotonic() < self._next_look
            or not self._settings.caches.is_dir()
        ):
            return
        self._next_look = time.monotonic() + LOOK_AT_DISK_SECONDS
        page = self._store.read_page(JobQuery(status="queued"), JOBS_AT_ONCE, self._cursor)
        self._cursor = page.next_cursor
        for job in page.jobs:
            if self._is_lost(job):
                self._take_back(job)

    def _is_lost(self, job: JobRecord) -> bool:
        if job.stage == CAPTURE.name or job.cache is None:
            return False
        # The manifest is absent while another job captures a damaged shard again, so the folder
        # decides.
        folders = [self._settings.caches / name for name in job.cache.names]
        is_lost = any(not folder.exists() for folder in folders)
        return is_lost and parse_config(job.config).needs_cache

    def _take_back(self, job: JobRecord) -> None:
        claim = self._store.claim(job.id, job.stage, self._owner, self._settings.lease_seconds)
        if claim is None:  # a worker has begun it, and will find out itself
            return
        assert job.cache is not None, "_is_lost requires a cache"
        name = next(name for name in job.cache.names if not (self._settings.caches / name).exists())
        detail = f"Cache {name} is not on the disk any more."
        log.warning("%s: %s", job.id, detail)
        if (capture := KINDS[job.kind].find_capture(job.stage, job.turn)) is not None:
            warning = Event("warning", {"message": f"{detail} It is captured again."})
            self._store.beat(claim, self._settings.lease_seconds, EventBatch(1, (warning,)))
            # No hint is sent here: _announce sends one as for any lost hint.
            self._store.advance(claim, CAPTURE.name, capture[1])
        else:
            remedy = (
                "Capture it again with a job of kind precompute, or restore a backup. "
                "Then retry this job."
            )
            error = {"type": "cache_missing", "detail": detail, "remedy": remedy}
            self._store.finish(claim, "failed", error)
