"""What Prometheus scrapes at /metrics: one fresh reading of the store, the disk and this process's requests.

What workers and transitions count lies in Redis, so that one scrape tells of all of them; of several copies of the
API each tells the same, and only the ``kd_http_*`` and ``kd_sse_clients`` are a copy's own. No label holds an id.
While Redis is away ``kd_store_up`` is 0, and what would have to be read from it is missing rather than stale.
"""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Literal, Protocol, cast

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample as Line
from redis.exceptions import RedisError, ResponseError

from services.api.observer import Tally
from services.jobs import JobStore
from services.schemas import WorkerState
from services.settings import STAGES, Settings

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

Sample = tuple[str, Mapping[str, str], float]  #: name, labels, value

PARTS = ("_bucket", "_count", "_sum")  #: of a histogram


@dataclass(frozen=True)
class Description:
    """One metric: its type, what it tells, and the labels that it may have."""

    type: Literal["counter", "gauge", "histogram"]
    help: str
    labels: tuple[str, ...] = ()


#: Every metric there is, in the order of the page. docs/observability names them as well, and a test compares.
METRICS = {
    "kd_build_info": Description("gauge", "1; the version is in the label.", ("version",)),
    "kd_store_up": Description("gauge", "Whether Redis answered this scrape."),
    "kd_store_memory_bytes": Description("gauge", "Memory that Redis uses."),
    "kd_store_memory_limit_bytes": Description("gauge", "Memory at which Redis refuses to write; 0 = no limit."),
    "kd_disk_free_bytes": Description("gauge", "Free bytes on the disk of the caches and runs."),
    "kd_disk_floor_bytes": Description("gauge", "Free bytes below which no job is taken."),
    "kd_jobs": Description("gauge", "Jobs that there are now.", ("status",)),
    "kd_jobs_total": Description("counter", "Times that a job came to a status.", ("kind", "status")),
    "kd_job_duration_seconds": Description("histogram", "From a job's first start to its end.", ("kind", "status")),
    "kd_job_queue_wait_seconds": Description("histogram", "From the queueing of a stage to its claim.", ("stage",)),
    "kd_job_attempts_total": Description("counter", "Attempts that died, by the type of the error.", ("reason",)),
    "kd_lease_expirations_total": Description("counter", "Leases that ran out: a worker was not heard of."),
    "kd_fenced_writes_total": Description("counter", "Words of a worker that had lost its job, which changed nothing."),
    "kd_reconciler_republished_total": Description("counter", "Hints that were sent again."),
    "kd_reconciler_last_run_timestamp_seconds": Description(
        "gauge", "When a reconciler last did its round; 0 = never."
    ),
    "kd_queue_depth": Description("gauge", "Stages that wait for a worker.", ("queue",)),
    "kd_webhooks_waiting": Description("gauge", "Webhooks that are not delivered yet."),
    "kd_workers": Description("gauge", "Workers heard of within half a minute.", ("state",)),
    "kd_worker_heartbeat_age_seconds": Description("gauge", "Age of the oldest sign of life of a host.", ("host",)),
    "kd_gpu_memory_bytes": Description("gauge", "Memory of each GPU that a worker holds.", ("host", "device")),
    "kd_train_tokens_total": Description("counter", "Tokens that students were trained on."),
    "kd_cache_written_bytes_total": Description("counter", "Bytes that were written into caches."),
    "kd_cache_chunk_write_seconds": Description("histogram", "Time to write one chunk of a cache."),
    "kd_cache_verify_failures_total": Description("counter", "Caches whose bytes were found to differ."),
    "kd_http_requests_total": Description("counter", "Answered requests.", ("method", "route", "status")),
    "kd_http_request_duration_seconds": Description(
        "histogram", "Until the answer was complete; of a stream, until it began.", ("method", "route")
    ),
    "kd_sse_clients": Description("gauge", "Open streams of events."),
}


class Observed(Protocol):
    """What is exposed: the API's ``Service``, seen from here."""

    @property
    def settings(self) -> Settings:
        """What the operator decided."""

    @property
    def store(self) -> JobStore:
        """The jobs."""

    @property
    def tally(self) -> Tally:
        """The requests."""


def exposition(service: Observed) -> bytes:
    """The page, in Prometheus's text format 0.0.4 (``CONTENT_TYPE``); it never fails for want of Redis."""
    registry = CollectorRegistry()
    registry.register(Page(service))
    return generate_latest(registry)


class Page(Collector):
    """One reading of everything, in the order of ``METRICS``."""

    def __init__(self, service: Observed) -> None:
        self._service = service

    def describe(self) -> Iterable[Metric]:
        """Nothing: the registry lives for one reading, and need not read first to look for double names."""
        return ()

    def collect(self) -> Iterator[Metric]:
        """The families."""
        families = families_of(self._samples())
        order = [*METRICS, *sorted(families.keys() - METRICS.keys())]
        yield from (families[name] for name in order if name in families)

    def _samples(self) -> Iterator[Sample]:
        service = self._service
        yield "kd_build_info", {"version": version("potstill")}, 1
        yield "kd_disk_free_bytes", {}, shutil.disk_usage(_existing(service.settings)).free
        yield "kd_disk_floor_bytes", {}, service.settings.disk_floor_bytes
        yield from _of_requests(service.tally)
        try:
            found = list(_of_store(service.store))
        except RedisError:
            yield "kd_store_up", {}, 0
        else:
            yield "kd_store_up", {}, 1
            yield from found


def families_of(samples: Iterable[Sample]) -> dict[str, Metric]:
    """Samples by the metric that they belong to; histograms are made whole."""
    families: dict[str, Metric] = {}
    for name, labels, value in samples:
        family = _family_of(name)
        described = METRICS.get(family, Description("counter", "Counted by a part of the service."))
        # The format's library adds _total to the name of a counter itself.
        bare = family.removesuffix("_total") if described.type == "counter" else family
        metric = families.setdefault(family, Metric(bare, described.help, described.type))
        metric.add_sample(name, dict(labels), value)
    for family, metric in families.items():
        if metric.type == "histogram":
            metric.samples = list(_whole(family, metric.samples))
    return families


def _family_of(sample: str) -> str:
    parts = (sample.removesuffix(part) for part in PARTS if sample.endswith(part))
    return next((name for name in parts if name in METRICS), sample)


def _whole(name: str, samples: Iterable[Line]) -> Iterator[Line]:
    """The samples of a histogram in order, with the buckets that nothing fell into: the store only keeps the others."""
    found: dict[tuple[tuple[str, str], ...], dict[str, float]] = {}
    for line in samples:
        rest = {label: value for label, value in line.labels.items() if label != "le"}
        found.setdefault(tuple(sorted(rest.items())), {})[line.labels.get("le", line.name)] = line.value
    bounds = sorted({le for values in found.values() for le in values if not le.startswith(name)} | {"+Inf"}, key=float)
    for labels, values in found.items():
        count = values.get(f"{name}_count", 0.0)
        for le in bounds:
            yield Line(f"{name}_bucket", dict(labels) | {"le": le}, values.get(le, count if le == "+Inf" else 0.0))
        yield Line(f"{name}_sum", dict(labels), values.get(f"{name}_sum", 0.0))
        yield Line(f"{name}_count", dict(labels), count)


def _of_requests(tally: Tally) -> Iterator[Sample]:
    for (method, route, status), number in tally.requests().items():
        yield "kd_http_requests_total", {"method": method, "route": route, "status": status}, number
    name = "kd_http_request_duration_seconds"
    for (method, route), (buckets, total) in tally.durations().items():
        labels = {"method": method, "route": route}
        yield from ((f"{name}_bucket", labels | {"le": le}, number) for le, number in buckets)
        yield from ((f"{name}_sum", labels, total), (f"{name}_count", labels, buckets[-1][1]))
    yield "kd_sse_clients", {}, tally.streams


def _of_store(store: JobStore) -> Iterator[Sample]:
    """What Redis knows. Counters without labels begin at 0: of one that is missing no alert can tell an increase."""
    counted = store.counters()
    yield from counted
    missing = METRICS.keys() - {name for name, _, _ in counted}
    zero = (name for name in missing if METRICS[name].type == "counter" and not METRICS[name].labels)
    yield from ((name, {}, 0.0) for name in zero)
    yield from (("kd_jobs", {"status": status}, number) for status, number in store.statuses().items())
    yield from (("kd_queue_depth", {"queue": stage}, number) for stage, number in store.queue_depths(STAGES).items())
    yield "kd_webhooks_waiting", {}, store.redis.zcard("kd:webhooks")
    yield "kd_reconciler_last_run_timestamp_seconds", {}, float(cast(str, store.redis.get("kd:reconciler") or 0))
    yield from _of_workers(store.workers(), store.now_ms() / 1000)
    with suppress(ResponseError):  # a user of Redis that may not ask
        memory = store.redis.info("memory")
        yield "kd_store_memory_bytes", {}, memory["used_memory"]
        yield "kd_store_memory_limit_bytes", {}, memory.get("maxmemory", 0)


def _of_workers(workers: Iterable[WorkerState], now: float) -> Iterator[Sample]:
    states = Counter({"idle": 0, "busy": 0, "stopping": 0})
    ages: dict[str, float] = {}
    memory: dict[tuple[str, str], int] = {}
    for worker in workers:
        states["stopping" if worker.stopping else "busy" if worker.job else "idle"] += 1
        if worker.beat_at is not None:
            age = max(now - worker.beat_at.timestamp(), 0.0)
            ages[worker.host] = max(age, ages.get(worker.host, 0.0))
        for index in filter(None, worker.device.index.split(",")):
            memory[worker.host, index] = worker.device.memory_bytes
    yield from (("kd_workers", {"state": state}, number) for state, number in states.items())
    yield from (("kd_worker_heartbeat_age_seconds", {"host": host}, age) for host, age in ages.items())
    for (host, device), size in memory.items():
        yield "kd_gpu_memory_bytes", {"host": host, "device": device}, size


def _existing(settings: Settings) -> Path:
    """The data folder, or the nearest one above it: it is made by the first job."""
    return next(folder for folder in (settings.home, *settings.home.parents) if folder.exists())
