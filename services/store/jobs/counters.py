"""Counters for ``GET /metrics``, and numbers of jobs."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import cast

from kd.client.wire.jobs import Status
from services.store.jobs.script import ScriptedStore

#: A counter's name and labels, as Prometheus writes a sample.
_SAMPLE = re.compile(r"(\w+)\{(.*)\}")
#: One label of a sample.
_LABEL = re.compile(r'(\w+)="([^"]*)"')


class Counters(ScriptedStore):
    """Counts events and jobs."""

    def count(self, name: str, amount: float = 1.0, **labels: str) -> None:
        """Add to a counter that GET /metrics shows."""
        text = ",".join(f'{label}="{value}"' for label, value in sorted(labels.items()))
        self.redis.hincrbyfloat("kd:counters", f"{name}{{{text}}}", amount)

    def read_counters(self) -> list[tuple[str, dict[str, str], float]]:
        """Name, labels and value of every counter."""
        found = []
        for field, value in cast(dict[str, str], self.redis.hgetall("kd:counters")).items():
            match = _SAMPLE.fullmatch(field)
            assert match is not None, field
            found.append((match[1], dict(_LABEL.findall(match[2])), float(value)))
        return found

    def read_mean_use(self, kind: str) -> float | None:
        """Mean device-seconds of the jobs of a kind that have succeeded; None if there are none."""
        label = f'{{kind="{kind}"}}'
        name = "kd_job_device_seconds"
        names = [f"{name}_{part}{label}" for part in ("sum", "count")]
        total, jobs = cast(list[str | None], self.redis.hmget("kd:counters", names))
        return float(total) / float(jobs) if total and jobs else None

    def count_statuses(self) -> dict[str, int]:
        """The number of jobs of each status."""
        names = cast(tuple[str, ...], Status.__args__)  # type: ignore[attr-defined]
        return dict(self._ask_each(names, lambda line, name: line.zcard(f"kd:index:*:{name}")))

    def read_queue_depths(self, stages: Iterable[str]) -> dict[str, int]:
        """The number of jobs that wait for each stage."""
        return {stage: self.redis.zcard(f"kd:queue:{stage}") for stage in stages}
