"""The cost of a device-hour and of a job: estimated before it ends, and final after it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Literal

from kd.client.wire.jobs import Cost, JobResources
from kd.client.wire.service import WorkerState
from kd.config.kinds import KINDS, SEARCH
from kd.memory.devices import find_device_kind
from services.settings import ANY_DEVICE, CPU_DEVICE
from services.store.jobs.records import JobRecord


def find_price(prices: Mapping[str, float], kind: str, name: str) -> float | None:
    """The price of an hour of a device; None if none is set.

    ``kind`` is cpu or cuda, and ``name`` the name that the hardware reports. A price is found by
    the device's kind, such as a100-80gb, else by the longest name that is a part of the device's.
    """
    if kind == CPU_DEVICE:
        return prices.get(CPU_DEVICE, prices.get(ANY_DEVICE))
    known = find_device_kind(name)
    if known is not None and known.name in prices:
        return prices[known.name]
    plain = name.lower()
    parts = [part for part in prices if part not in (ANY_DEVICE, CPU_DEVICE) and part in plain]
    return prices.get(max(parts, key=len, default=ANY_DEVICE))


def estimate_cost(
    job: JobRecord,
    record: Mapping[str, str],
    workers: Iterable[WorkerState],
    means: Mapping[str, float],
) -> JobRecord:
    """The job with the estimate of its cost, as far as prices and times are known.

    ``means`` are the mean device-seconds of the jobs that have succeeded, by kind.
    """
    if job.ended:
        return job
    # Of the device that the job has or had, else of a worker that may take it.
    known = record.get("price")
    price = float(known) if known else find_worker_price(job.stage, job.resources, workers)
    if price is None:
        return job
    amount = job.cost.amount if job.cost is not None else 0.0
    estimated: float | None = None
    basis: Literal["pace", "earlier_jobs"] | None = None
    if (seconds := _find_seconds_left(job)) is not None:
        estimated, basis = amount + seconds / 3600 * price, "pace"
    elif job.kind in means:
        estimated, basis = max(amount, means[job.kind] / 3600 * price), "earlier_jobs"
    cost = Cost(amount=amount, final=False, estimated=estimated, basis=basis)
    return job.model_copy(update={"cost": cost})


def estimate_new_job(
    stage: str, needs: JobResources, workers: Iterable[WorkerState], mean: float | None
) -> Cost | None:
    """The cost of a job that is not created yet, from the mean device-seconds of its kind."""
    price = find_worker_price(stage, needs, workers)
    if price is None or mean is None:
        return None
    return Cost(amount=0.0, final=False, estimated=mean / 3600 * price, basis="earlier_jobs")


def find_worker_price(
    stage: str, needs: JobResources, workers: Iterable[WorkerState]
) -> float | None:
    """The lowest price of the workers that could take a job; None if none has a price."""
    prices = [
        worker.device.price
        for worker in workers
        if stage in worker.stages
        and worker.device.price is not None
        and worker.device.covers(needs.gpus, needs.memory)
    ]
    return min(prices, default=None)


def count_devices(gpus: int | None) -> int:
    """The devices that a job holds while it runs: those that it asks for, or one."""
    return max(gpus or 1, 1)


def _find_seconds_left(job: JobRecord) -> float | None:
    """Device-seconds that are left at the present pace; None if another stage will follow."""
    seconds = job.progress.eta_seconds
    if job.worker is None or seconds is None:
        return None
    if job.stage == SEARCH.name or KINDS[job.kind].find_next(job.stage, job.turn) is not None:
        return None
    return seconds * count_devices(job.resources.gpus)
