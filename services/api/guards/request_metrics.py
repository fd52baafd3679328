"""The metrics of this process's requests: how many there were, and how long they took."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import chain

from prometheus_client import Counter, Histogram

#: Upper bounds of the duration buckets, in seconds. A long poll takes up to 30.
BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 35.0)


class RequestMetrics:
    """Counts and durations of the requests of this process. Thread-safe."""

    def __init__(self) -> None:
        labels = ("method", "route", "status")
        # ``services.api.answers.prometheus`` has the texts, and the page that shows the samples.
        self._requests = Counter("kd_http_requests_total", "", labels, registry=None)
        self._seconds = Histogram(
            "kd_http_request_duration_seconds", "", labels[:2], registry=None, buckets=BUCKETS
        )
        #: Event streams that are open now. Only the event loop changes this number.
        self.streams = 0

    def add(self, method: str, route: str, status: int, seconds: float) -> None:
        """Count an answered request.

        ``seconds`` runs until the answer was complete; for a stream, until the stream began.
        """
        self._requests.labels(method, route, status).inc()
        self._seconds.labels(method, route).observe(seconds)

    def read_samples(self) -> Iterator[tuple[str, Mapping[str, str], float]]:
        """Yield the name, the labels and the value of each sample; buckets are cumulative."""
        for metric in chain(self._requests.collect(), self._seconds.collect()):
            for sample in metric.samples:
                if not sample.name.endswith("_created"):  # the time at which it was made
                    yield sample.name, sample.labels, sample.value
        yield "kd_sse_clients", {}, self.streams
