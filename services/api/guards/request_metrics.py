"""The metrics of this process's requests: how many there were, and how long they took."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

#: Upper bounds of the duration buckets, in seconds. A long poll takes up to 30.
BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 35.0)

#: Method, route template and status of a request.
Labels = tuple[str, str, str]


@dataclass
class DurationHistogram:
    """A histogram of seconds: the count of each bucket (not cumulative), and the sum."""

    counts: list[int] = field(default_factory=lambda: [0] * (len(BUCKETS) + 1))
    total: float = 0.0

    def add(self, seconds: float) -> None:
        """Count one duration."""
        self.counts[sum(seconds > bound for bound in BUCKETS)] += 1
        self.total += seconds

    def accumulate(self) -> Iterator[tuple[str, float]]:
        """Yield each upper bound with the count of durations up to it, as Prometheus expects."""
        count = 0
        for bound, more in zip((*map(str, BUCKETS), "+Inf"), self.counts, strict=True):
            count += more
            yield bound, float(count)


class RequestMetrics:
    """Counts and durations of the requests of this process. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._requests: Counter[Labels] = Counter()
        self._durations: dict[tuple[str, str], DurationHistogram] = {}
        #: Event streams that are open now. Only the event loop changes this number.
        self.streams = 0

    def add(self, method: str, route: str, status: int, seconds: float) -> None:
        """Count an answered request.

        ``seconds`` runs until the answer was complete; for a stream, until the stream began.
        """
        with self._lock:
            self._requests[method, route, str(status)] += 1
            self._durations.setdefault((method, route), DurationHistogram()).add(seconds)

    def read_counts(self) -> dict[Labels, int]:
        """Return the number of requests by method, route and status."""
        with self._lock:
            return dict(self._requests)

    def read_durations(self) -> dict[tuple[str, str], tuple[list[tuple[str, float]], float]]:
        """Return the cumulative buckets and the sum of the seconds, by method and route."""
        with self._lock:
            return {
                labels: (list(each.accumulate()), each.total)
                for labels, each in self._durations.items()
            }
