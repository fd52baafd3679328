"""The plan of a whole distillation by a number of tokens: ``kd plan --tokens``.

For a text that nobody has yet: shards, objects and bytes, hours and cost of each stage, what the
storage must carry, and what is full first. Every line names its source.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from kd.config.job import JobConfig
from kd.errors import ConfigError, Problem
from kd.memory.devices import DEVICE_KINDS, DeviceRates
from kd.planning.devices import CPU, DeviceName
from kd.planning.distillation.fit import Fit, PlannedJob
from kd.planning.distillation.models import PlannedModel
from kd.planning.distillation.needs import describe_limits, describe_needs, describe_saturation
from kd.planning.distillation.request import PlanRequest
from kd.planning.distillation.sources import DEVICE_RATES
from kd.planning.distillation.storage import describe_profiles, describe_storage

#: What stays out of a plan, and is said below it.
NOTES = (
    f"Rates of devices: {DEVICE_RATES}.",
    (
        "Rates of the host: measured on two cores of an AMD EPYC, with V = 49,152 (capture: "
        "128,256). It is assumed that each of many cores tokenises as fast."
    ),
    (
        "The limits of objects apply only to an object store, not to a disk. A larger "
        "cache.shard_sequences makes fewer objects."
    ),
    (
        "A capture by several workers needs resources.workers, and one store for all of them: see "
        "docs/how-to/capture-with-several-workers.md. Several hosts for one training are not built "
        "yet."
    ),
    (
        "Left out: loading, compilation, start of workers, checkpoints, fidelity checks, work that "
        "is repeated after a failure."
    ),
)


def plan_distillation(config: JobConfig, request: PlanRequest, root: Path) -> dict[str, Any]:
    """Plan a distillation as JSON values; relative paths start at ``root``.

    Raises ``ConfigError`` for models that are not known, and for devices that are no GPUs.
    """
    kind = _require_gpu(request.devices)
    job = PlannedJob.of(config, request, root)
    count = request.devices.count
    fit = Fit.of(job, kind, count)
    stages = list(fit.list_stages(request.prices.get(kind.name)))
    width = job.teacher.plan.shape.width
    return {
        "tokens": request.tokens,
        "devices": f"{count} x {kind.name}",
        "teacher": _describe_model(job.teacher),
        "student": None if job.student is None else _describe_model(job.student),
        "records": job.records.name,
        "storage": [each.to_json() for each in describe_storage(job.text, job.records)],
        "profiles": describe_profiles(job.text, config.cache, job.teacher.vocabulary, width),
        "stages": [each.to_json() for each in stages],
        "missing": fit.list_missing(),
        "needs": [each.to_json() for each in describe_needs(fit, request.within)],
        "limits": list(describe_limits(fit)),
        "saturation": list(describe_saturation(fit)),
        "kinds": [describe_kind(job, each, request) for each in DEVICE_KINDS.values()],
        "notes": list(NOTES),
    }


def _require_gpu(devices: DeviceName) -> DeviceRates:
    if devices.kind == CPU:
        raise ConfigError([
            Problem(
                "/devices",
                "a plan by --tokens is for GPUs: their makers' figures are known.",
                f"Give a number and a kind, such as 64xh100. The kinds: {', '.join(DEVICE_KINDS)}.",
            )
        ])  # fmt: skip
    return DEVICE_KINDS[devices.kind]


def _describe_model(model: PlannedModel) -> dict[str, Any]:
    return {
        "name": model.name,
        "parameters": model.parameters,
        "vocabulary": model.vocabulary,
        "source": model.source,
    }


def describe_kind(job: PlannedJob, kind: DeviceRates, request: PlanRequest) -> dict[str, Any]:
    """Hours and cost of a job on as many devices of another kind."""
    fit = Fit.of(job, kind, request.devices.count)
    stages = {each.name: each for each in fit.list_stages(request.prices.get(kind.name))}
    whole = not fit.list_missing()
    costs = [each.cost for each in stages.values()]
    known = [cost for cost in costs if cost is not None]
    return {
        "device": kind.name,
        "teacher_devices": None if fit.teacher is None else fit.teacher.ranks,
        "hours": {
            name: float(f"{each.seconds / 3600:.6g}") for name, each in stages.items()
        },
        "device_hours": (
            float(f"{sum(each.device_hours for each in stages.values()):.6g}") if whole else None
        ),
        "cost": float(f"{sum(known):.6g}") if whole and len(known) == len(costs) else None,
        "source": DEVICE_RATES,
    }  # fmt: skip
