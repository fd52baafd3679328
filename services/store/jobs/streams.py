"""The history of a job: its events, and its metrics by step."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from datetime import UTC, datetime
from itertools import islice
from typing import Any, cast

from cache.json_object import Json
from kd.client.wire.history import JobEvent
from services.store.callers import Caller
from services.store.jobs.script import ScriptedStore

#: Types of events whose data is kept by step.
SERIES = ("metrics", "evaluation", "temperature", "scalars")
#: Types of events that name a step of the run.
STEPPED = frozenset({*SERIES, "check", "checkpoint"})
#: Events before a page that are searched for the step at its beginning.
SEARCHED = 100


class Streams(ScriptedStore):
    """Reads the histories of jobs."""

    def read_events(
        self,
        job_id: str,
        after: str = "0",
        limit: int | None = None,
        types: Iterable[str] | None = None,
        finds_step: bool = False,
    ) -> list[JobEvent]:
        """Read the events after stream id ``after``, oldest first.

        The step of an event is its own, else that of the run when it came. With ``finds_step`` the
        step at ``after`` is looked up, too; otherwise it is not known.
        """
        step = self._find_step(job_id, after) if finds_step and after != "0" else None
        return list(islice(self._walk(job_id, after, types, step), limit))

    def _walk(
        self, job_id: str, after: str, types: Iterable[str] | None, step: int | None
    ) -> Iterator[JobEvent]:
        """Yield the events after ``after``; the run was at ``step`` then."""
        wanted = set(types or ())
        last: Any = None  # the last event that may name a step, which is parsed only if needed
        while True:
            entries: Any = self.redis.xrange(f"kd:job:{job_id}:events", f"({after}", count=1000)
            for after, fields in entries:
                kind = fields["type"]
                if kind in STEPPED or kind == "progress":
                    last = fields
                if wanted and kind not in wanted:
                    continue
                step, last = _read_step(last, step), None
                ts = datetime.fromtimestamp(int(after.partition("-")[0]) / 1000, UTC)
                data = json.loads(fields["data"])
                yield JobEvent(id=after, ts=ts, type=kind, step=step, data=data)
            if len(entries) < 1000:
                return

    def _find_step(self, job_id: str, place: str) -> int | None:
        """The step of the run at an event; None if no event shortly before it names one."""
        entries: Any = self.redis.xrevrange(f"kd:job:{job_id}:events", place, count=SEARCHED)
        steps = (_read_step(fields, None) for _, fields in entries)
        return next((step for step in steps if step is not None), None)

    def read_metrics(
        self, job_id: str, after_step: int = -1, series: Sequence[str] = SERIES
    ) -> list[Json]:
        """One point for each step after ``after_step``, in order, with the data of all ``series``.

        The script thins out a long history evenly.
        """
        points: dict[int, Json] = {}
        for name in series:
            texts = self.redis.zrangebyscore(f"kd:job:{job_id}:{name}", f"({after_step}", "+inf")
            for text in cast(list[str], texts):
                point = json.loads(text)
                points.setdefault(point["step"], {}).update(point)
        return [points[step] for step in sorted(points)]

    def sample_metrics(
        self, job_ids: Sequence[str], caller: Caller, limit: int
    ) -> dict[str, list[Json]]:
        """Read up to ``limit`` points of the metrics of each job, evenly spread, in order.

        Jobs that the caller may not see are left out. However long the runs are, this takes two
        round trips to Redis and reads no other point.
        """
        sizes = self.redis.pipeline(transaction=False)
        for job_id in job_ids:
            sizes.hget(f"kd:job:{job_id}", "owner")
            sizes.zcard(f"kd:job:{job_id}:metrics")
        answers = sizes.execute()
        places = {
            job_id: _spread(size, limit)
            for job_id, owner, size in zip(job_ids, answers[::2], answers[1::2], strict=True)
            if owner is not None and (caller.sees_all or owner == caller.name)
        }
        reads = self.redis.pipeline(transaction=False)
        for job_id, ranks in places.items():
            for rank in ranks:
                reads.zrange(f"kd:job:{job_id}:metrics", rank, rank)
        texts = iter(reads.execute())
        return {
            job_id: [json.loads(text) for found in islice(texts, len(ranks)) for text in found]
            for job_id, ranks in places.items()
        }


def _spread(size: int, limit: int) -> list[int]:
    """Up to ``limit`` of the numbers below ``size``, with the first and the last one."""
    if size <= limit:
        return list(range(size))
    return [round(at * (size - 1) / (limit - 1)) for at in range(limit)]


def _read_step(fields: dict[str, str] | None, otherwise: int | None) -> int | None:
    """The step that an event names; progress names one if it counts steps."""
    if fields is None or fields["type"] not in (*STEPPED, "progress"):
        return otherwise
    data: Json = json.loads(fields["data"])
    name = "step"
    if fields["type"] == "progress":
        name = "done" if data.get("unit") == "steps" else ""
    step: int | None = data.get(name, otherwise)
    return step
