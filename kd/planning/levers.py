"""When no setting fits: by how much, and which levers lower the memory. Imports no torch.

Each lever is pulled alone, on the candidate that needs least.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

from kd.config.train import ROUNDING_OPTIMIZERS
from kd.memory.parallel import count_usable
from kd.memory.training_phase import TrainingPhase
from kd.planning.candidates import Candidate, list_candidates
from kd.planning.devices import MOST_DEVICES, DeviceGroup
from kd.planning.shapes import StudentPlan, adapt, shorten

#: Rank of the adapters that are tried.
_RANK = 16


@dataclass(frozen=True)
class Lever:
    """A change of the job that needs less memory; ``changes`` says what it costs."""

    setting: str
    memory_bytes: int
    saved_bytes: int
    fits: bool
    changes: str


@dataclass(frozen=True)
class Shortfall:
    """By how much the least candidate misses the devices, and the levers, the largest first."""

    least: Candidate
    usable_bytes: int
    missing_bytes: int
    levers: tuple[Lever, ...]

    def to_json(self) -> dict[str, Any]:
        """Return the shortfall as JSON values."""
        return asdict(self) | {"least": self.least.to_json()}


def find_shortfall(training: TrainingPhase, devices: DeviceGroup, least: Candidate) -> Shortfall:
    """Tell by how much ``least`` does not fit, and what each lever saves of it."""
    usable = count_usable(devices.place.rates.memory)
    levers = (
        replace(lever, saved_bytes=least.memory_bytes - lever.memory_bytes)
        for lever in _pull_levers(training, devices)
    )
    useful = sorted(
        (each for each in levers if each.saved_bytes > 0), key=lambda each: each.memory_bytes
    )
    return Shortfall(least, usable, least.memory_bytes - usable, tuple(useful))


def _pull_levers(training: TrainingPhase, devices: DeviceGroup) -> Iterator[Lever]:
    options = training.options
    adapted = training.model.frozen
    yield from _pull_student_levers(training, devices)
    if options.optim == "adamw" and not adapted:
        small = training.change(optim="adamw_8bit", optim_args={})
        yield _pull("train.optim adamw_8bit", small, devices, "the state has 8 bits a number")
    if options.optim in ROUNDING_OPTIMIZERS and not options.is_pure_bfloat16 and not adapted:
        yield _pull(
            "train.precision bf16_pure",
            training.change(precision="bf16_pure"),
            devices,
            "weights and gradients are in bfloat16",
        )
    if devices.place.is_gpu and not options.activation_offload and options.compile == "none":
        yield _pull(
            "train.activation_offload true",
            training.change(activation_offload=True),
            devices,
            "copies to the host take time",
        )
    shorter = training.length // 2
    if shorter > 1:
        yield _pull(
            f"data.sequence_length {shorter}",
            replace(training, length=shorter, targets=training.targets / 2),
            devices,
            "contexts are half as long",
        )
    yield from _add_devices(training, devices)


def _pull_student_levers(training: TrainingPhase, devices: DeviceGroup) -> Iterator[Lever]:
    plan = StudentPlan(training.student, training.model, training.saved)
    layers = training.student.layer_count
    if not training.model.frozen:
        yield _pull(
            f"student.lora {{rank: {_RANK}}}",
            _exchange(training, adapt(plan, _RANK)),
            devices,
            "adapters alone are trained",
        )
    if layers > 1:
        yield _pull(
            f"a student of {layers // 2} layers in place of {layers}",
            _exchange(training, shorten(plan, layers // 2)),
            devices,
            "the student is smaller",
        )


def _exchange(training: TrainingPhase, plan: StudentPlan) -> TrainingPhase:
    return replace(training, student=plan.shape, model=plan.work, saved=plan.saved)


def _add_devices(training: TrainingPhase, devices: DeviceGroup) -> Iterator[Lever]:
    """The least number of devices that fits, by doubling; none where a step cannot be split more.

    Processes of one host share its memory, so more of them have no more.
    """
    if not devices.place.is_gpu:
        return
    count = 2 * devices.count
    while count <= min(training.options.sequences_per_step, MOST_DEVICES):
        more = replace(devices, count=count)
        name = f"--devices {count}x{devices.place.rates.name}"
        lever = _pull(name, training, more, "more devices cost more an hour")
        if lever.fits:
            yield lever
            return
        count *= 2


def _pull(setting: str, changed: TrainingPhase, devices: DeviceGroup, changes: str) -> Lever:
    least = min(list_candidates(changed, devices), key=lambda each: each.memory_bytes)
    return Lever(setting, least.memory_bytes, 0, least.fits, changes)
