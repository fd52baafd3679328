"""Which caches a caller's jobs use, and which jobs use a cache."""

from __future__ import annotations

from typing import cast

from services.store.callers import Caller
from services.store.jobs.script import ScriptedStore


class CacheLists(ScriptedStore):
    """Reads and shortens the lists of caches."""

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
