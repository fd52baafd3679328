"""The counters of a run for GET /metrics: added up here, and written to Redis now and then."""

from __future__ import annotations

import threading
from collections import defaultdict

from kd.progress import Event
from services.store.jobs.store import JobStore

#: Upper bounds of the histogram of write times, in seconds.
WRITE_SECONDS_BUCKETS = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)

#: Name and labels of a counter.
CounterKey = tuple[str, tuple[tuple[str, str], ...]]


class RunCounters:
    """Counts from the events of one process. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: defaultdict[CounterKey, float] = defaultdict(float)
        self._tokens = 0

    def note(self, event: Event) -> None:
        """Count an event of the run."""
        data = event.data
        with self._lock:
            match event.type:
                case "progress":
                    # The tokens since the last event; those that only a teacher read do not count.
                    tokens = data.get("tokens") or 0
                    if data.get("unit") == "steps" and tokens > self._tokens:
                        self._counts["kd_train_tokens_total", ()] += tokens - self._tokens
                    self._tokens = tokens
                case "shard":
                    self._counts["kd_cache_written_bytes_total", ()] += data["bytes"]
                    name = "kd_cache_chunk_write_seconds"
                    seconds = data["seconds"]
                    self._counts[f"{name}_sum", ()] += seconds
                    self._counts[f"{name}_count", ()] += 1
                    bounds = [each for each in WRITE_SECONDS_BUCKETS if seconds <= each]
                    for bound in (*bounds, "+Inf"):
                        self._counts[f"{name}_bucket", (("le", f"{bound}"),)] += 1
                case "error" if data["type"] == "cache_corrupt":
                    self._counts["kd_cache_verify_failures_total", ()] += 1

    def flush(self, store: JobStore) -> None:
        """Add the counts to Redis. Raises ``RedisError``; the next call adds the rest then."""
        with self._lock:
            counts = dict(self._counts)
        for (name, labels), amount in counts.items():
            store.count(name, amount, **dict(labels))
            with self._lock:
                self._counts[name, labels] -= amount
                if not self._counts[name, labels]:
                    del self._counts[name, labels]
