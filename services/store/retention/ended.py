"""Ended jobs, and the names in the records of jobs, as the rules of retention need them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, cast

from kd.client.wire.jobs import TERMINAL_STATUSES
from services.store.jobs.script import ScriptedStore, to_ms

#: Records that one call of Redis reads.
BATCH = 500
#: Fields of a record that name other jobs, caches, files and folders.
NAMING = ("config", "cache.fingerprint", "parent")
#: Keys of the history of a job, after its own.
HISTORY = ("events", "metrics", "evaluation", "temperature", "scalars", "study", "trials")


@dataclass(frozen=True)
class EndedJob:
    """A job that has ended; ``ended`` is the time in seconds since 1970."""

    id: str
    status: str
    ended: float


class EndedJobs(ScriptedStore):
    """Lists ended jobs, and removes them or their histories, if nothing open needs them."""

    def list_ended(self) -> list[EndedJob]:
        """All jobs that have ended."""
        found = []
        for status in sorted(TERMINAL_STATUSES):
            ids = cast(list[str], self.redis.zrange(f"kd:index:*:{status}", 0, -1))
            for job_id, (finished,) in self._read_fields(ids, ("finished_at",)):
                if finished:
                    found.append(EndedJob(job_id, status, int(finished) / 1000))
        return found

    def read_naming_texts(self) -> Iterator[tuple[str, bool, str]]:
        """Id, whether it is open, and all that it names, of every job."""
        ids = cast(list[str], self.redis.zrange("kd:index:*:*", 0, -1))
        unfinished = {
            *cast(list[str], self.redis.zrange("kd:open", 0, -1)),
            *cast(list[str], self.redis.zrange("kd:leases", 0, -1)),
        }
        for job_id, texts in self._read_fields([*ids, *(unfinished - set(ids))], NAMING):
            yield job_id, job_id in unfinished, "\n".join(text for text in texts if text)

    def _read_fields(
        self, ids: list[str], fields: tuple[str, ...]
    ) -> Iterator[tuple[str, list[Any]]]:
        for start in range(0, len(ids), BATCH):
            some = ids[start : start + BATCH]
            pipeline = self.redis.pipeline(transaction=False)
            for job_id in some:
                pipeline.hmget(f"kd:job:{job_id}", list(fields))
            yield from zip(some, pipeline.execute(), strict=True)

    def measure_histories(self, ids: Iterable[str]) -> dict[str, int]:
        """Bytes of Redis that the events and metrics of jobs take, of those that have any."""
        found = {}
        wanted = list(ids)
        for start in range(0, len(wanted), BATCH):
            some = wanted[start : start + BATCH]
            pipeline = self.redis.pipeline(transaction=False)
            for job_id in some:
                for part in HISTORY:
                    pipeline.memory_usage(f"kd:job:{job_id}:{part}")
            sizes = iter(pipeline.execute())
            for job_id in some:
                if size := sum(next(sizes) or 0 for _ in HISTORY):
                    found[job_id] = size
        return found

    def find_open_users(self, name: str) -> list[str]:
        """Open jobs whose records contain a name: the id of a job or a file, or a fingerprint."""
        return cast(list[str], self._transition("named", name))

    def retire(self, job_id: str, older_than: float, force: bool = False) -> bool:
        """Delete the record of a job that ended ``older_than`` seconds ago; return whether it is.

        A job that an open job names stays, unless ``force`` is true.
        """
        return bool(self._transition("retire", job_id, to_ms(older_than), int(force)) == "retired")

    def forget_history(self, job_id: str, older_than: float) -> bool:
        """Remove the events and metrics of a job that ended ``older_than`` seconds ago."""
        return bool(self._transition("forget", job_id, to_ms(older_than)) == "forgotten")
