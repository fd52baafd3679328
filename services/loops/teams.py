"""The rules of fair share and quotas, and the bytes on the disk, as the job store needs them.

The job store decides which job goes next, but it knows neither the settings nor the disk. The API
writes both there: the rules when they change, and the bytes of each team every minute. A disk that
is slow or has many files takes longer, so that its measurement is a loop of its own.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import TypeVar

from cache.disk import sum_file_sizes
from cache.remote.address import is_mirror
from cache.shards.names import MANIFEST
from services.process.lasting_loops import repeat_in_thread
from services.settings import DAY_SECONDS, Settings
from services.store.callers import Quota
from services.store.jobs.store import JobStore
from services.store.jobs.teams import TeamBytes
from services.store.key_file import KeyFile, KeysError
from services.store.run_folder import JOB_ID
from services.store.training_files import TrainingFiles

#: Time between two measurements. One API of several makes each of them.
MEASURE_SECONDS = 60
#: Time between two looks whether one is due.
INTERVAL_SECONDS = 0.5
#: The key whose end is the time of the next measurement.
NEXT = "kd:measured"
#: The team that stands for every team without quotas of its own.
EVERY_TEAM = ""

Thing = TypeVar("Thing")

log = logging.getLogger("potstill.reconciler")


class _Stopped(Exception):
    """The API ends, and with it a measurement."""


class TeamRules:
    """Keeps the rules and the sizes in the job store up to date."""

    def __init__(self, store: JobStore, settings: Settings) -> None:
        self._store = store
        self._settings = settings
        file = settings.api_keys_file
        self._keys = None if file is None else KeyFile(file)
        # Sealed caches do not change, so their size is read once.
        self._sealed = dict[str, int]()
        self._owners_have_teams = False
        self._stopping = threading.Event()

    async def run(self) -> None:
        """Measure the disk whenever it is time, until cancelled."""
        await repeat_in_thread(self.measure_if_due, INTERVAL_SECONDS, self._stopping)

    def measure_if_due(self) -> None:
        """Measure the disk, unless this or another API has done so within the last minute.

        The first call names the teams of owners whose jobs a version without teams has made.
        """
        if not self._owners_have_teams:
            if found := self._store.name_owners():
                log.info("%d owners of jobs of an earlier version have a team now", len(found))
            self._owners_have_teams = True
        if self._store.redis.set(NEXT, "1", nx=True, ex=MEASURE_SECONDS):
            try:
                self._store.write_bytes(self.measure())
            except _Stopped:
                self._store.redis.delete(NEXT)

    def step(self) -> None:
        """Write the rules if they have changed."""
        settings = self._settings
        default = Quota(settings.quota_device_seconds, settings.quota_bytes)
        try:
            own = {} if self._keys is None else self._keys.list_quotas()
        except KeysError as error:  # the old rules stay
            log.warning("%s", error)
            return
        half_life = settings.fair_share_half_life_seconds
        history = settings.retain_events_days * DAY_SECONDS
        if self._store.write_policy(half_life, {EVERY_TEAM: default, **own}, history):
            log.info("the rules of fair share, quotas and events have changed")

    def measure(self) -> dict[str, TeamBytes]:
        """Bytes of each team: the caches of its jobs, the folders of its runs, and its files.

        A cache that several teams use counts for each of them. The folder of a deleted job counts
        for nobody, and neither do models and data that calls of `import kd` have saved.
        """
        caches = Counter[str]()
        held = Counter[str]()
        for team, fingerprints in self._store.list_team_caches().items():
            caches[team] = sum(map(self._measure_cache, self._go_on(fingerprints)))
        runs = self._settings.runs
        ids = [path.name for path in runs.glob("job_*") if JOB_ID.fullmatch(path.name)]
        for job_id, team in self._go_on(self._store.find_teams(ids).items()):
            held[team] += sum_file_sizes(runs / job_id)
        files = TrainingFiles(self._settings.files).measure()
        teams = caches.keys() | held.keys() | files.keys()
        return {team: TeamBytes(caches[team], held[team], files.get(team, 0)) for team in teams}

    def _go_on(self, things: Iterable[Thing]) -> Iterator[Thing]:
        """Yield the things until the API ends."""
        for thing in things:
            if self._stopping.is_set():
                raise _Stopped
            yield thing

    def _measure_cache(self, fingerprint: str) -> int:
        folder = self._settings.caches / fingerprint
        if fingerprint in self._sealed and folder.is_dir():
            return self._sealed[fingerprint]
        if is_mirror(folder):
            # Only now, because it loads zarr.
            from cache.checking.listing import summarise_cache

            found = summarise_cache(folder)
            sealed, size = found.complete, found.bytes
        else:
            sealed, size = (folder / MANIFEST).exists(), sum_file_sizes(folder)
        if sealed:
            self._sealed[fingerprint] = size
        return size
