"""The plan of a training: the best settings for given devices, or what to change. Imports no torch.

``kd estimate`` tells a job as it is written; a plan finds settings. Both count with
``kd.memory.training_phase``.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from kd.config.job import JobConfig
from kd.errors import ConfigError, Problem
from kd.memory.training_phase import TrainingPhase
from kd.planning.budget import ComputeBudget
from kd.planning.candidates import Candidate, list_candidates, pick_best
from kd.planning.devices import DeviceGroup
from kd.planning.fitted_law import ExpectedLoss
from kd.planning.levers import Shortfall, find_shortfall
from kd.planning.texts import TextSize


@dataclass(frozen=True)
class TrainingPlan:
    """Ways to train on some devices, the best first; ``shortfall`` says why there is none.

    ``timed`` says that the rates of the devices were measured here; else they are their maker's.
    """

    devices: str
    device_bytes: int
    timed: bool
    steps: int
    sequences_per_step: int
    budget: ComputeBudget
    candidates: tuple[Candidate, ...]
    shortfall: Shortfall | None
    expected_loss: ExpectedLoss | None = None

    def to_json(self) -> dict[str, Any]:
        """Return the plan as JSON values."""
        return {
            "devices": self.devices,
            "device_bytes": self.device_bytes,
            "timed": self.timed,
            "steps": self.steps,
            "sequences_per_step": self.sequences_per_step,
            "budget": asdict(self.budget),
            "candidates": [each.to_json() for each in self.candidates],
            "shortfall": None if self.shortfall is None else self.shortfall.to_json(),
            "expected_loss": None if self.expected_loss is None else self.expected_loss.to_json(),
        }


def make_plan(
    training: TrainingPhase, devices: DeviceGroup, price: float | None = None
) -> TrainingPlan:
    """Plan ``training`` on ``devices``; ``price`` is that of an hour of one device.

    Raises ``ConfigError`` where a step cannot be split over so many devices.
    """
    found = list_candidates(training, devices, price)
    if not found:
        raise _make_split_error(training, devices)
    least = min(found, key=lambda each: each.memory_bytes)
    sequences = training.options.sequences_per_step
    return TrainingPlan(
        devices=devices.describe(),
        device_bytes=devices.place.rates.memory,
        timed=devices.place.is_timed,
        steps=training.steps,
        sequences_per_step=sequences,
        budget=ComputeBudget.of(
            training.student.numbers, round(training.steps * sequences * training.targets)
        ),
        candidates=pick_best(found),
        shortfall=None if least.fits else find_shortfall(training, devices, least),
    )


def _make_split_error(training: TrainingPhase, devices: DeviceGroup) -> ConfigError:
    return ConfigError([
        Problem(
            "/devices",
            f"a step of {training.options.sequences_per_step} sequences cannot be split evenly "
            f"over {devices.count} devices.",
            "Ask for a number of devices that divides the step, or raise train.batch_size or "
            "train.gradient_accumulation_steps.",
        )
    ])  # fmt: skip


def require_training(config: JobConfig) -> None:
    """Raise ``ConfigError`` for a job that trains no student."""
    if config.train is None or config.student is None:
        raise ConfigError([
            Problem(
                "/student",
                f"a job of kind {config.kind} trains no student, so there is nothing to plan.",
                "Give a job of kind distill, train or search.",
            )
        ])  # fmt: skip


def require_steps(config: JobConfig, text: TextSize) -> int:
    """The optimiser steps of a job; ``ConfigError`` where they depend on an unknown text."""
    steps = config.require_train().count_steps(text.train)
    if steps is None:
        raise ConfigError([
            Problem(
                "/train/epochs",
                "the steps of an epoch are not known, because the text cannot be read here.",
                "Set train.max_steps, or plan where the text is.",
            )
        ])  # fmt: skip
    return steps
