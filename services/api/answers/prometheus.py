"""The page that Prometheus scrapes at /metrics: the job store, the disk and the HTTP requests.

Every scrape reads all values anew. The counters of workers and of jobs are in Redis, so that one
scrape shows those of the whole service, and every copy of the API shows the same. Only
``kd_http_*`` and ``kd_sse_clients`` belong to one copy. No label holds an id. While Redis is away
``kd_store_up`` is 0, and the metrics from Redis are missing rather than stale.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Literal, cast

from prometheus_client import generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample as Line
from redis.exceptions import RedisError, ResponseError

from kd.client.wire.service import WorkerState
from kd.config.kinds import list_stage_names
from kd.files import Disk
from kd.python.version import read_version
from services.api.guards.request_metrics import RequestMetrics
from services.settings import Settings
from services.store.jobs.store import JobStore

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

#: Name, labels and value.
MetricSample = tuple[str, Mapping[str, str], float]

#: The endings of the names of a histogram's samples.
HISTOGRAM_SUFFIXES = ("_bucket", "_count", "_sum")


@dataclass(frozen=True)
class Description:
    """The description of one metric: its type, its help text and its labels."""

    type: Literal["counter", "gauge", "histogram"]
    help: str
    labels: tuple[str, ...] = ()


def _counter(help: str, *labels: str) -> Description:
    return Description("counter", help, labels)


def _gauge(help: str, *labels: str) -> Description:
    return Description("gauge", help, labels)


def _histogram(help: str, *labels: str) -> Description:
    return Description("histogram", help, labels)


#: Every metric, in the order of the page. docs/observability lists them too, and a test compares.
METRICS = {
    "kd_build_info": _gauge("Always 1; the label holds the version.", "version"),
    "kd_store_up": _gauge("Whether Redis answered this scrape."),
    "kd_store_memory_bytes": _gauge("Memory that Redis uses."),
    "kd_store_memory_limit_bytes": _gauge("Memory at which Redis refuses to write; 0 = no limit."),
    "kd_disk_free_bytes": _gauge("Free bytes on the disk of KD_HOME, and of KD_STORE.", "folder"),
    "kd_disk_free_files": _gauge("Files that the disk still takes.", "folder"),
    "kd_disk_floor_bytes": _gauge("Free bytes below which no job is accepted."),
    "kd_jobs": _gauge("Jobs by their present status.", "status"),
    "kd_jobs_total": _counter("How often a job reached a status.", "kind", "status"),
    "kd_job_duration_seconds": _histogram(
        "Seconds from a job's first start to its end.", "kind", "status"
    ),
    "kd_job_device_seconds": _histogram("Device-seconds of the jobs that have succeeded.", "kind"),
    "kd_job_worker_seconds": _histogram(
        "Seconds for which workers had the jobs that have succeeded.", "kind"
    ),
    "kd_job_queue_wait_seconds": _histogram("Seconds that a stage waited in the queue.", "stage"),
    "kd_job_attempts_total": _counter("Attempts that died, by the type of the error.", "reason"),
    "kd_lease_expirations_total": _counter(
        "Leases that expired because a worker sent no heartbeat."
    ),
    "kd_fenced_writes_total": _counter(
        "Writes that were refused because the worker had lost its job."
    ),
    "kd_reconciler_republished_total": _counter("Hints to workers that were sent again."),
    "kd_reconciler_last_run_timestamp_seconds": _gauge(
        "Time of the last round of a reconciler; 0 = never."
    ),
    "kd_loop_restarts_total": _counter(
        "Loops of the service that died of an error and were started again.", "loop"
    ),
    "kd_queue_depth": _gauge("Stages that wait for a worker.", "queue"),
    "kd_webhooks_waiting": _gauge("Webhooks that are not yet delivered."),
    "kd_workers": _gauge("Workers with a heartbeat in the last 30 s.", "state"),
    "kd_worker_heartbeat_age_seconds": _gauge(
        "Age of the oldest heartbeat of a host's workers.", "host"
    ),
    "kd_gpu_memory_bytes": _gauge("Memory of each GPU that a worker holds.", "host", "device"),
    "kd_train_tokens_total": _counter("Tokens that students were trained on."),
    "kd_cache_written_bytes_total": _counter("Bytes written into caches."),
    "kd_cache_chunk_write_seconds": _histogram("Time to write one chunk of a cache."),
    "kd_cache_verify_failures_total": _counter("Caches that failed their verification."),
    "kd_retention_freed_bytes_total": _counter(
        "Bytes that the retention rules and `kd gc` have freed.", "kind"
    ),
    "kd_http_requests_total": _counter("Answered requests.", "method", "route", "status"),
    "kd_http_request_duration_seconds": _histogram(
        "Seconds until the answer was complete; for a stream, until it began.", "method", "route"
    ),
    "kd_sse_clients": _gauge("Open event streams."),
}


def render_metrics(settings: Settings, store: JobStore, requests: RequestMetrics) -> bytes:
    """Render the page in Prometheus's text format 0.0.4; works without Redis."""
    return generate_latest(MetricsCollector(settings, store, requests))


@dataclass(frozen=True)
class MetricsCollector(Collector):
    """Reads every metric once, in the order of ``METRICS``."""

    settings: Settings
    store: JobStore
    requests: RequestMetrics

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics with their samples."""
        families = group_samples(self._collect_samples())
        order = [*METRICS, *sorted(families.keys() - METRICS.keys())]
        yield from (families[name] for name in order if name in families)

    def _collect_samples(self) -> Iterator[MetricSample]:
        yield "kd_build_info", {"version": read_version()}, 1
        for name, folder in self.settings.places.items():
            disk = Disk.of(folder)
            yield "kd_disk_free_bytes", {"folder": name}, disk.free_bytes
            if disk.free_files is not None:
                yield "kd_disk_free_files", {"folder": name}, disk.free_files
        yield "kd_disk_floor_bytes", {}, self.settings.disk_floor_bytes
        yield from self.requests.read_samples()
        try:
            found = list(_sample_store(self.store))
        except RedisError:
            yield "kd_store_up", {}, 0
        else:
            yield "kd_store_up", {}, 1
            yield from found


def group_samples(samples: Iterable[MetricSample]) -> dict[str, Metric]:
    """Group samples by their metric, and add the empty buckets of histograms."""
    families: dict[str, Metric] = {}
    for name, labels, value in samples:
        # The name of a histogram's sample is that of the histogram with an ending.
        bare = (name.removesuffix(part) for part in HISTOGRAM_SUFFIXES if name.endswith(part))
        family = next((each for each in bare if each in METRICS), name)
        described = METRICS.get(family, Description("counter", "A counter of the service."))
        # The Prometheus library adds _total to the name of a counter.
        title = family.removesuffix("_total") if described.type == "counter" else family
        metric = families.setdefault(family, Metric(title, described.help, described.type))
        metric.add_sample(name, dict(labels), value)
    for family, metric in families.items():
        if metric.type == "histogram":
            metric.samples = list(_complete_histogram(family, metric.samples))
    return families


def _complete_histogram(name: str, samples: Iterable[Line]) -> Iterator[Line]:
    """Yield a histogram's samples in order, with its empty buckets, which Redis does not hold."""
    found: dict[tuple[tuple[str, str], ...], dict[str, float]] = {}
    for line in samples:
        rest = {label: value for label, value in line.labels.items() if label != "le"}
        values = found.setdefault(tuple(sorted(rest.items())), {})
        values[line.labels.get("le", line.name)] = line.value
    known = {le for values in found.values() for le in values if not le.startswith(name)}
    bounds = sorted(known | {"+Inf"}, key=float)
    for labels, values in found.items():
        count = values.get(f"{name}_count", 0.0)
        for le in bounds:
            value = values.get(le, count if le == "+Inf" else 0.0)
            yield Line(f"{name}_bucket", dict(labels) | {"le": le}, value)
        yield Line(f"{name}_sum", dict(labels), values.get(f"{name}_sum", 0.0))
        yield Line(f"{name}_count", dict(labels), count)


def _sample_store(store: JobStore) -> Iterator[MetricSample]:
    """Yield the metrics that Redis holds.

    Counters without labels begin at 0, because no alert can see the increase of a missing counter.
    """
    counted = store.read_counters()
    yield from counted
    for name in METRICS.keys() - {name for name, _, _ in counted}:
        if METRICS[name].type == "counter" and not METRICS[name].labels:
            yield name, {}, 0.0
    for status, number in store.count_statuses().items():
        yield "kd_jobs", {"status": status}, number
    for stage, number in store.read_queue_depths(list_stage_names("worker")).items():
        yield "kd_queue_depth", {"queue": stage}, number
    yield "kd_webhooks_waiting", {}, store.redis.zcard("kd:webhooks")
    last = float(cast(str, store.redis.get("kd:reconciler") or 0))
    yield "kd_reconciler_last_run_timestamp_seconds", {}, last
    yield from _sample_workers(store.list_workers(), store.read_clock_ms() / 1000)
    with suppress(ResponseError):  # our user of Redis may lack the right to call INFO
        memory = store.redis.info("memory")
        yield "kd_store_memory_bytes", {}, memory["used_memory"]
        yield "kd_store_memory_limit_bytes", {}, memory.get("maxmemory", 0)


def _sample_workers(workers: Iterable[WorkerState], now: float) -> Iterator[MetricSample]:
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
    for state, number in states.items():
        yield "kd_workers", {"state": state}, number
    for host, age in ages.items():
        yield "kd_worker_heartbeat_age_seconds", {"host": host}, age
    for (host, device), size in memory.items():
        yield "kd_gpu_memory_bytes", {"host": host, "device": device}, size
