"""Views of jobs: one by its id, or many by page."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from services.store.callers import LOCAL_CALLER, Caller
from services.store.jobs.counters import Counters
from services.store.jobs.records import read_job
from services.store.jobs.workers import Workers, explain_missing_worker
from services.store.schemas import Job, Status

#: Records that one page of a listing reads at most.
MAX_SCANNED = 1000
#: The part of a run file's path that stays when the data folder is moved.
_RUN_FILE = re.compile(r"/runs/job_[0-9a-z]{26}/.*$")


@dataclass(frozen=True)
class JobQuery:
    """The jobs that a listing shows. A field that is None excludes none."""

    caller: Caller = LOCAL_CALLER
    status: Status | None = None
    kind: str | None = None
    label: tuple[str, str] | None = None
    parent: str | None = None
    created_after: datetime | None = None

    @property
    def needs_records(self) -> bool:
        """Whether an index cannot answer the query, so that records must be read and left out."""
        return (self.kind, self.label, self.parent) != (None, None, None)

    def wants(self, job: Job) -> bool:
        """Whether kind, label and parent match. The index decides owner, status and time."""
        return (
            self.kind in (None, job.kind)
            and self.parent in (None, job.parent)
            and (self.label is None or job.labels.get(self.label[0]) == self.label[1])
        )


@dataclass(frozen=True)
class JobPage:
    """A part of a listing. More may follow a short part, and even an empty one."""

    jobs: list[Job]
    next_cursor: int | None


class JobListing(Workers, Counters):
    """Reads jobs."""

    def get(self, job_id: str, caller: Caller = LOCAL_CALLER) -> Job | None:
        """The job, or None if there is none that the caller may see."""
        found = list(self._read([job_id]))
        return found[0] if found and (caller.sees_all or found[0].owner == caller.name) else None

    def read_page(self, query: JobQuery, limit: int, cursor: int | None = None) -> JobPage:
        """Up to ``limit`` jobs, newest first, from the one after ``cursor``.

        Reads ``MAX_SCANNED`` records at most, so that a rare label cannot hold up the service.
        """
        who = "*" if query.caller.sees_all else query.caller.name
        index = f"kd:index:{who}:{query.status or '*'}"
        oldest = _find_cursor_after(query.created_after) if query.created_after else "-inf"
        size = 1 + (max(limit, 99) if query.needs_records else limit)
        found = list[Job]()
        looked = 0
        while looked < MAX_SCANNED:
            newest = "+inf" if cursor is None else f"({cursor}"
            entries: Any = self.redis.zrevrangebyscore(
                index, newest, oldest, start=0, num=size, withscores=True
            )
            jobs = {job.id: job for job in self._read([job_id for job_id, _ in entries])}
            for job_id, score in entries:
                if len(found) == limit:
                    return JobPage(found, cursor)
                cursor = int(score)
                if job_id in jobs and query.wants(jobs[job_id]):
                    found.append(jobs[job_id])
            if len(entries) < size:
                return JobPage(found, None)
            looked += len(entries)
        return JobPage(found, cursor)

    def _read(self, ids: Sequence[str]) -> Iterator[Job]:
        """The jobs of these ids, in this order, without those that have no record."""
        pipeline = self.redis.pipeline(transaction=False)
        for job_id in ids:
            pipeline.hgetall(f"kd:job:{job_id}")
        records = [
            {"stage": "", "status": "", **record, "id": job_id}
            for job_id, record in zip(ids, pipeline.execute(), strict=True)
            if record
        ]
        for record in records:
            pipeline.smembers(f"kd:job:{record['id']}:waits")
            pipeline.zrank(f"kd:queue:{record['stage']}", record["id"])
        replies = pipeline.execute() if records else []
        # The replies come in the order of the calls: two for each record.
        waits = replies[::2]
        positions = replies[1::2]
        # The script decides what a job allows, from the status that is shown beside it.
        states = [
            text for record in records for text in (record["status"], record.get("parent", ""))
        ]
        actions = self._transition("actions", *states) if records else []
        workers = self.list_workers() if any(place is not None for place in positions) else []
        pace: dict[str, float | None] = {}
        for record, waits_for, position, allowed in zip(
            records, waits, positions, actions, strict=True
        ):
            job = read_job(
                record, waits_for=sorted(waits_for), queue_position=position, actions=allowed
            )
            job = self._place_artifacts(job)
            if position is None:
                yield job
            elif reason := explain_missing_worker(job, workers):
                yield job.model_copy(update={"reason": reason})
            else:
                if job.stage not in pace:
                    pace[job.stage] = self._estimate_seconds_per_job(
                        sum(job.stage in worker.stages for worker in workers)
                    )
                seconds = pace[job.stage]
                start = _compute_start_time((position + 1) * seconds) if seconds else None
                yield job.model_copy(update={"estimated_start_at": start})

    def _place_artifacts(self, job: Job) -> Job:
        """The job with the paths of its artifacts as they are since the data folder was moved."""
        if self.home is None or not job.artifacts:
            return job
        placed = {name: move_path(path, self.home) for name, path in job.artifacts.items()}
        return job.model_copy(update={"artifacts": placed})

    def _estimate_seconds_per_job(self, workers: int) -> float | None:
        """Seconds between two jobs that ``workers`` workers end, by the mean duration so far.

        Returns None if no job has succeeded yet, or if there is no worker.
        """
        seconds = 0.0
        runs = 0.0
        for name, labels, value in self.read_counters():
            if labels.get("status") == "succeeded":
                seconds += value if name == "kd_job_duration_seconds_sum" else 0
                runs += value if name == "kd_job_duration_seconds_count" else 0
        return seconds / runs / workers if workers and runs else None


def move_path(path: str, home: Path) -> str:
    """The path of a run's file below ``home``; ``path`` may name another place of that folder."""
    found = _RUN_FILE.search(path)
    return str(home / found[0].lstrip("/")) if found else path


def _compute_start_time(seconds: float) -> datetime:
    return datetime.now(UTC) + timedelta(seconds=seconds)


def _find_cursor_after(moment: datetime) -> int:
    """The first microsecond whose job is shown with a later time: records keep milliseconds."""
    return ((moment - datetime(1970, 1, 1, tzinfo=UTC)) // timedelta(milliseconds=1) + 1) * 1000
