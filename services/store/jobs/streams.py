"""The history of a job: its events, and its metrics by step."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any, cast

from services.store.jobs.script import ScriptedStore

#: Types of events whose data is kept by step.
SERIES = ("metrics", "evaluation", "temperature", "scalars")


class Streams(ScriptedStore):
    """Reads the histories of jobs."""

    def read_events(
        self,
        job_id: str,
        after: str = "0",
        limit: int | None = None,
        types: Iterable[str] | None = None,
    ) -> list[tuple[str, str, dict[str, Any]]]:
        """Stream id, type and data of the events after stream id ``after``, oldest first."""
        wanted = set(types or ())
        found = list[tuple[str, str, dict[str, Any]]]()
        while True:
            entries: Any = self.redis.xrange(f"kd:job:{job_id}:events", f"({after}", count=1000)
            for after, fields in entries:
                if not wanted or fields["type"] in wanted:
                    found.append((after, fields["type"], json.loads(fields["data"])))
                if limit is not None and len(found) == limit:
                    return found
            if len(entries) < 1000:
                return found

    def read_newest_events(
        self, job_id: str, before: str | None, limit: int
    ) -> list[tuple[str, str, dict[str, Any]]]:
        """Stream id, type and data of events before stream id ``before``, newest first."""
        end = "+" if before is None else f"({before}"
        entries: Any = self.redis.xrevrange(f"kd:job:{job_id}:events", end, count=limit)
        return [(place, each["type"], json.loads(each["data"])) for place, each in entries]

    def read_metrics(
        self, job_id: str, after_step: int = -1, series: Sequence[str] = SERIES
    ) -> list[dict[str, Any]]:
        """One point for each step after ``after_step``, in order, with the data of all ``series``.

        The script thins out a long history evenly.
        """
        points: dict[int, dict[str, Any]] = {}
        for name in series:
            texts = self.redis.zrangebyscore(f"kd:job:{job_id}:{name}", f"({after_step}", "+inf")
            for text in cast(list[str], texts):
                point = json.loads(text)
                points.setdefault(point["step"], {}).update(point)
        return [points[step] for step in sorted(points)]
