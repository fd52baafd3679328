"""What workers, hosts and storage must deliver in a distillation, and what is full first."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from kd.memory.devices import HOST_DEVICES
from kd.planning.distillation.fit import Fit
from kd.planning.distillation.limits import Limit, find_bound, list_others
from kd.planning.distillation.rates import StudentRate, TeacherRate
from kd.planning.distillation.sources import (
    BEAT_SECONDS,
    NOT_MEASURED,
    Line,
    find_host_rate,
    find_reader_rate,
)


def describe_needs(fit: Fit, within: float) -> Iterator[Line]:
    """The needs of capture and training while they run at their rates.

    ``within`` are the hours that the capture may take.
    """
    rates = {each.name: each.rate for each in fit.list_stages(None)}
    if fit.teacher is not None:
        yield from _describe_workers(fit, fit.teacher, within)
        yield from _describe_writing(fit, rates["capture"])
    if fit.student is not None:
        yield from _describe_reading(fit, fit.student, rates["training"])


def _describe_workers(fit: Fit, teacher: TeacherRate, within: float) -> Iterator[Line]:
    ranks = teacher.ranks
    workers = fit.fleet.devices // ranks
    wished = math.ceil(fit.job.text.tokens / (3600 * within) / teacher.tokens)
    beat = f"a beat in {BEAT_SECONDS:g} s of each worker"
    yield Line("devices of a teacher", ranks, "", "the fewest that hold it, by arithmetic")
    yield Line("memory of such a device", teacher.memory_bytes, "bytes",
               f"arithmetic; {NOT_MEASURED}")  # fmt: skip
    yield Line("capture workers", workers, "", f"devices / {ranks}")
    yield Line(f"workers for a capture in {within:g} h", wished, "",
               "tokens / hours / tokens/s of a teacher; see the limits below")  # fmt: skip
    yield Line("devices of those workers", wished * ranks, "", f"workers x {ranks}")
    yield Line("beats to Redis", workers / BEAT_SECONDS, "a second", beat)


def _describe_writing(fit: Fit, rate: float) -> Iterator[Line]:
    text = fit.job.text
    records = fit.job.records
    size = records.count_token_bytes(text)
    host = find_host_rate(records.codec, size, records.entries)
    objects = rate * records.count_shard_objects(text) / text.shard_positions
    yield Line("cores that encode and seal, all", rate / host.value, "", host.source)
    yield Line("capture writes", rate * size, "bytes/s", "its tokens/s x bytes a token")
    yield Line("capture writes, each host", rate * size / fit.fleet.hosts, "bytes/s",
               f"{HOST_DEVICES} devices a host")  # fmt: skip
    yield Line("capture writes objects", objects, "a second", "its tokens/s x objects a token")


def _describe_reading(fit: Fit, student: StudentRate, rate: float) -> Iterator[Line]:
    text = fit.job.text
    records = fit.job.records
    devices = fit.fleet.devices
    best = student.best
    size = records.count_token_bytes(text)
    reader = find_reader_rate(records.codec, size, text.length)
    settings = (
        f"{best.strategy}, batch_size {best.batch_size}, checkpointing "
        f"{best.gradient_checkpointing}, {best.precision}"
    )
    yield Line("memory of a training device", best.memory_bytes, "bytes",
               f"kd plan: {settings}; {NOT_MEASURED}")  # fmt: skip
    yield Line("optimiser steps", student.steps, "", f"{student.step_tokens:,} tokens a step")
    yield Line("training reads, each device", rate * size / devices, "bytes/s",
               "its tokens/s x bytes a token / devices")  # fmt: skip
    yield Line("training reads, all", rate * size, "bytes/s", "its tokens/s x bytes a token")
    yield Line("cores that read, each device", rate / reader.value / devices, "", reader.source)


# ---------------------------------------------------------------------- limits


def _group_limits(fit: Fit) -> Iterator[tuple[Limit, ...]]:
    """The limits of each stage, its own devices or cores first."""
    limits = fit.list_limits()
    for stage in dict.fromkeys(each.stage for each in limits):
        yield tuple(each for each in limits if each.stage == stage)


def describe_limits(fit: Fit) -> Iterator[dict[str, Any]]:
    """A row for each limit of each stage."""
    for limits in _group_limits(fit):
        rate = find_bound(limits).full_at
        for each in limits:
            yield each.to_json(rate, fit.fleet.devices, limits[0].full_at)


def describe_saturation(fit: Fit) -> Iterator[str]:
    """Say what bounds each stage, and what more devices and faster ones fill first."""
    for limits in _group_limits(fit):
        bound = find_bound(limits)
        others = list_others(limits)
        yield f"{bound.stage}: bound by {bound.name}, at {bound.full_at:,.0f} tokens/s." + (
            "".join(_describe_next(fit, bound, limits[0], others))
        )


def _describe_next(fit: Fit, bound: Limit, own: Limit, others: tuple[Limit, ...]) -> Iterator[str]:
    if not bound.grows:
        yield " More devices do not help."
        return
    if fixed := [each for each in others if not each.grows]:
        at = fixed[0].count_devices(fit.fleet.devices, own.full_at)
        yield f" With more devices the next limit is {fixed[0].name}, at {at:,} devices."
    if growing := [each for each in others if each.grows]:
        rate = growing[0].full_at
        yield f" With faster devices the next limit is {growing[0].name}, at {rate:,.0f} tokens/s."
