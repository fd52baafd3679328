"""What a run does, as numbers for GET /metrics: added up here, and put into the record's counters now and then."""

from __future__ import annotations

import threading
from collections import defaultdict
from typing import Any

from services.jobs import JobStore

SECONDS = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)

Sample = tuple[str, tuple[tuple[str, str], ...]]


class Tally:
    """Counts what the events of one process tell. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: defaultdict[Sample, float] = defaultdict(float)
        self._tokens = 0

    def note(self, event: dict[str, Any]) -> None:
        """Take note of an event of the run."""
        with self._lock:
            match event["type"]:
                case "progress":
                    self._trained(event["data"])
                case "shard":
                    self._wrote(event["data"]["bytes"], event["data"]["seconds"])
                case "error" if event["data"]["type"] == "cache_corrupt":
                    self._counts["kd_cache_verify_failures_total", ()] += 1

    def _trained(self, data: dict[str, Any]) -> None:
        """The tokens since the last time; those that a teacher read are not trained on."""
        tokens = data.get("tokens") or 0
        if data.get("unit") == "steps" and tokens > self._tokens:
            self._counts["kd_train_tokens_total", ()] += tokens - self._tokens
        self._tokens = tokens

    def _wrote(self, size: int, seconds: float) -> None:
        self._counts["kd_cache_written_bytes_total", ()] += size
        name = "kd_cache_chunk_write_seconds"
        self._counts[f"{name}_sum", ()] += seconds
        self._counts[f"{name}_count", ()] += 1
        for bound in (*(each for each in SECONDS if seconds <= each), "+Inf"):
            self._counts[f"{name}_bucket", (("le", f"{bound}"),)] += 1

    def settle(self, store: JobStore) -> None:
        """Put it into the counters; what an outage keeps from there goes the next time. Raises ``RedisError``."""
        with self._lock:
            counts = dict(self._counts)
        for (name, labels), amount in counts.items():
            store.count(name, amount, **dict(labels))
            with self._lock:
                self._counts[name, labels] -= amount
                if not self._counts[name, labels]:
                    del self._counts[name, labels]
