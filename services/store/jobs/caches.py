"""Which caches a caller's jobs use, which jobs use a cache, and what all jobs name."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple, cast

from services.store.callers import Caller
from services.store.jobs.script import ScriptedStore

#: Fields of a record: how a job ended, and those that name other jobs, caches, files and folders.
FIELDS = (
    "status", "finished_at", "config", "cache.fingerprint", "cache.fingerprints", "parent",
)  # fmt: skip


class NamingJob(NamedTuple):
    """A job with the text of all that it names.

    A job is open until its end, and as long as a worker has it. ``ended`` is the time of its end in
    seconds since 1970; 0 = it has not ended.
    """

    id: str
    open: bool
    status: str
    ended: float
    text: str


class CacheLists(ScriptedStore):
    """Reads and shortens the lists of caches, and reads what jobs name."""

    def find_caches(self, caller: Caller) -> set[str] | None:
        """Fingerprints that the caller's jobs made or read; None if it may see every cache."""
        if caller.sees_all:
            return None
        return cast(set[str], self.redis.smembers(f"kd:caches:{caller.name}"))

    def find_cache_users(self, fingerprint: str) -> list[str]:
        """Open jobs that make or read a cache."""
        jobs = sorted(cast(set[str], self.redis.smembers(f"kd:cache:{fingerprint}:jobs")))
        return [job_id for job_id in jobs if self.redis.zscore("kd:open", job_id) is not None]

    def find_cache_jobs(self, fingerprint: str) -> list[str]:
        """All jobs that made, read or checked a cache, newest first; some may be deleted."""
        members = cast(set[str], self.redis.smembers(f"kd:cache:{fingerprint}:jobs"))
        return sorted(members, reverse=True)

    def forget_cache(self, caller: Caller, fingerprint: str) -> bool:
        """Take a cache off every list that the caller may see.

        Returns whether another key still lists it.
        """
        self.redis.srem(f"kd:caches:{caller.name}", fingerprint)
        owners = self.redis.scan_iter("kd:caches:*", count=1000)
        if not caller.sees_all:
            return any(self.redis.sismember(owner, fingerprint) for owner in owners)
        for owner in owners:
            self.redis.srem(owner, fingerprint)
        return False

    def read_naming_jobs(self) -> Iterator[NamingJob]:
        """Yield every job, also one that a worker has although no index names it."""
        every, unfinished, held = (
            set(cast(list[str], self.redis.zrange(key, 0, -1)))
            for key in ("kd:index:*:*", "kd:open", "kd:leases")
        )
        records = self._ask_each(
            sorted(every | unfinished | held),
            lambda pipeline, job_id: pipeline.hmget(f"kd:job:{job_id}", *FIELDS),
        )
        for job_id, (status, finished, *names) in records:
            is_open = job_id in unfinished or job_id in held
            text = "\n".join(filter(None, names))
            yield NamingJob(job_id, is_open, status, int(finished or 0) / 1000, text)

    def find_open_users(self, name: str) -> list[str]:
        """Open jobs whose records contain a name: the id of a job or a file, or a fingerprint."""
        return cast(list[str], self._transition("named", name))
