"""The objects whose state a checkpoint holds."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from kd.parallel.group import ALONE, Group


@dataclass
class TrainingProgress:
    """The state of training that is not a tensor.

    ``seconds`` are those of the steps; ``batch_size`` is the micro-batch that ``train.auto_batch``
    found. ``evaluation_due`` is set where the run was stopped in the evaluation after ``step``,
    which is then made anew. ``skipped`` lists the batches that were left out, each with its
    ``step`` (counted from 1) and the numbers of its ``sequences`` whose loss or gradient is not
    finite. ``schedule_began`` is the step at which the present schedule of the learning rate began.
    ``stems`` are the digests that a longer run must share to continue this one
    (``kd.training.resume.identity.RunIdentity``). ``threads`` are those of torch, on a CPU.
    ``phases`` are those of the run's stopwatch, of all processes that have trained it.
    """

    step: int = 0
    tokens: int = 0
    seconds: float = 0.0
    best_loss: float | None = None
    best_step: int = 0
    evaluations_since_best: int = 0
    evaluation_due: bool = False
    first_evaluation: dict[str, Any] | None = None
    last_evaluation: dict[str, Any] = field(default_factory=dict)
    rollbacks: int = 0
    learning_rate_factor: float = 1.0
    skipped: list[dict[str, Any]] = field(default_factory=list)
    batch_size: int | None = None
    schedule_began: int = 0
    stems: dict[str, str] = field(default_factory=dict)
    watch: dict[str, Any] = field(default_factory=dict)
    scale_watch: dict[str, Any] = field(default_factory=dict)
    threads: int | None = None
    phases: dict[str, list[float]] = field(default_factory=dict)


@dataclass(frozen=True)
class TrainState:
    """The objects whose state a checkpoint holds.

    ``extras`` are named modules beside the model, whose ``state_dict`` is all of their state.
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer
    scheduler: Any
    scaler: Any
    progress: TrainingProgress
    extras: dict[str, nn.Module] = field(default_factory=dict)
    group: Group = ALONE


def is_sharded(state: TrainState) -> bool:
    """Whether each rank holds a part of every parameter, or a stage of the model."""
    return state.group.staged or any(isinstance(each, DTensor) for each in state.model.parameters())


def name_parameters(state: TrainState) -> dict[Tensor, str]:
    """Names of all parameters that the optimiser may hold; those of an extra are {extra}/{name}."""
    names: dict[Tensor, str] = {
        parameter: name for name, parameter in state.model.named_parameters()
    }
    for extra, module in state.extras.items():
        names.update(
            {parameter: f"{extra}/{name}" for name, parameter in module.named_parameters()}
        )
    return names
