"""Views of jobs: one by its id, or many by page."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, cast

from kd.client.wire.jobs import Status
from services.store.callers import LOCAL_CALLER, Caller
from services.store.costs import estimate_cost
from services.store.jobs.records import JobRecord, read_job
from services.store.jobs.workers import Workers, explain_missing_worker, parse_worker
from services.store.ranges import parse_range_view

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
    text: str | None = None
    trials: bool = True

    @property
    def needs_records(self) -> bool:
        """True if an index cannot answer the query, so that records must be read and left out."""
        named = (self.kind, self.label, self.parent, self.text)
        return named != (None, None, None, None) or not self.trials

    def wants(self, job: JobRecord) -> bool:
        """Return whether all but owner, status and time match, which the index decides.

        ``text`` is looked for in the id, the name, the labels and the models of a job, whatever its
        case. Without ``trials`` a job that belongs to a search is left out.
        """
        return (
            self.kind in (None, job.kind)
            and self.parent in (None, job.parent)
            and (self.trials or job.parent is None)
            and (self.label is None or job.labels.get(self.label[0]) == self.label[1])
            and (self.text is None or self.text.casefold() in _gather_words(job))
        )


def _gather_words(job: JobRecord) -> str:
    """Return all that a search by text looks at, one item a line."""
    labels = (f"{name}:{value}" for name, value in job.labels.items())
    sections = (job.config.get(name) or {} for name in ("teacher", "student"))
    models = (str(each.get("model") or "") for each in sections)
    return "\n".join([job.id, job.name, *labels, *models]).casefold()


@dataclass(frozen=True)
class JobPage:
    """A part of a listing. More may follow a short part, and even an empty one."""

    jobs: list[JobRecord]
    next_cursor: int | None


class JobListing(Workers):
    """Reads jobs."""

    def get(self, job_id: str, caller: Caller = LOCAL_CALLER) -> JobRecord | None:
        """The job, or None if there is none that the caller may see."""
        job = next(iter(self.get_many([job_id], caller)), None)
        at_work = ("running", "pausing", "cancelling")
        if job is None or job.stage != "precompute" or job.status not in at_work:
            return job
        # Several workers may capture its cache together.
        view = parse_range_view(self._transition("ranges_view", job.id))
        return job if view is None else job.model_copy(update={"capture": view.capture})

    def get_many(self, ids: Sequence[str], caller: Caller = LOCAL_CALLER) -> list[JobRecord]:
        """Those of these jobs that exist and that the caller may see, in this order."""
        found = self._read(ids)
        return [job for job in found if caller.sees_all or job.owner == caller.name]

    def read_page(self, query: JobQuery, limit: int, cursor: int | None = None) -> JobPage:
        """Up to ``limit`` jobs, newest first, from the one after ``cursor``.

        Reads ``MAX_SCANNED`` records at most, so that a rare label cannot hold up the service.
        """
        who = "*" if query.caller.sees_all else query.caller.name
        index = f"kd:index:{who}:{query.status or '*'}"
        oldest: int | str = "-inf"
        if query.created_after is not None:
            # The first microsecond whose job is shown with a later time: records keep milliseconds.
            age = query.created_after - datetime(1970, 1, 1, tzinfo=UTC)
            oldest = (age // timedelta(milliseconds=1) + 1) * 1000
        size = 1 + (max(limit, 99) if query.needs_records else limit)
        found = list[JobRecord]()
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

    def find_jobs(self, caller: Caller) -> set[str] | None:
        """The ids of the caller's jobs; None if it may see every job."""
        if caller.sees_all:
            return None
        return set(cast(list[str], self.redis.zrange(f"kd:index:{caller.name}:*", 0, -1)))

    def _read(self, ids: Sequence[str]) -> Iterator[JobRecord]:
        """The jobs of these ids, in this order, without those that have no record."""
        if not ids:
            return
        # One call of the script, because each round trip to Redis costs more than it reads.
        shown, states, durations = self._transition("show", *ids)
        workers = [parse_worker(state) for state in states]
        totals, means = _read_durations(durations)
        for job_id, (flat, waits_for, position, actions, held) in zip(ids, shown, strict=True):
            if not flat:
                continue
            # The record is sent as names and values in turn.
            fields = dict(zip(flat[::2], flat[1::2], strict=True))
            record = {"stage": "", "status": "", **fields, "id": job_id}
            job = read_job(
                record, waits_for=sorted(waits_for), queue_position=position, actions=actions
            )
            job = estimate_cost(self._place_artifacts(job), record, workers, means)
            if position is None:
                yield job
            elif reason := held or explain_missing_worker(job, workers):
                yield job.model_copy(update={"reason": reason})
            else:
                # By the mean so far; unknown if no job has succeeded yet, or if there is no worker.
                seconds, ended = totals
                serving = sum(job.stage in worker.stages for worker in workers)
                start = None
                if seconds and ended and serving:
                    wait = (position + 1) * seconds / ended / serving
                    start = datetime.now(UTC) + timedelta(seconds=wait)
                yield job.model_copy(update={"estimated_start_at": start})

    def _place_artifacts(self, job: JobRecord) -> JobRecord:
        """The job with the paths of its artifacts as they are since the data folder was moved."""
        if self.home is None or not job.artifacts:
            return job
        placed = {name: move_path(path, self.home) for name, path in job.artifacts.items()}
        return job.model_copy(update={"artifacts": placed})


def _read_durations(flat: Sequence[str]) -> tuple[tuple[float, float], dict[str, float]]:
    """The sum of the seconds for which workers had the jobs that have succeeded, and their number.

    With them for each kind of job the mean of their device-seconds.
    """
    if not flat:
        return (0.0, 0.0), {}
    seconds, jobs, *rest = flat
    rows = zip(*[iter(rest)] * 3, strict=True)
    means = {kind: float(total) / float(number) for kind, total, number in rows if float(number)}
    return (float(seconds), float(jobs)), means


def move_path(path: str, home: Path) -> str:
    """The path of a run's file below ``home``; ``path`` may name another place of that folder."""
    found = _RUN_FILE.search(path)
    return str(home / found[0].lstrip("/")) if found else path
