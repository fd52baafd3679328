"""The objects whose state a checkpoint holds."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from cache.json_object import Json
from kd.optim.whole_steps import ParameterGroup
from kd.parallel.group import ALONE, Group

#: The means of an evaluation by their names; None = not measured.
Evaluation = dict[str, float | None]


@dataclass(frozen=True)
class SkippedBatch:
    """A batch that was left out: its ``step``, counted from 1, and its faulty ``sequences``.

    Those are the numbers of the sequences whose loss or gradient is not finite.
    """

    step: int
    sequences: list[int]


@dataclass
class TrainingProgress:
    """The state of training that is not a tensor.

    ``seconds`` are those of the steps; ``batch_size`` is the micro-batch that ``train.auto_batch``
    found. ``evaluation_due`` is set where the run was stopped in the evaluation after ``step``,
    which is then made anew. ``schedule_began`` is the step at which the present schedule of the
    learning rate began. ``stems`` are the digests that a longer run must share to continue this one
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
    first_evaluation: Evaluation | None = None
    last_evaluation: Evaluation = field(default_factory=dict)
    rollbacks: int = 0
    learning_rate_factor: float = 1.0
    skipped: list[SkippedBatch] = field(default_factory=list)
    batch_size: int | None = None
    schedule_began: int = 0
    stems: dict[str, str] = field(default_factory=dict)
    watch: Json = field(default_factory=dict)
    scale_watch: Json = field(default_factory=dict)
    threads: int | None = None
    phases: dict[str, list[float]] = field(default_factory=dict)

    @classmethod
    def from_json(cls, content: Json) -> TrainingProgress:
        """Read the progress in a checkpoint; what only another version has is left out."""
        known = {each.name: content[each.name] for each in fields(cls) if each.name in content}
        skipped = [SkippedBatch(**each) for each in known.pop("skipped", ())]
        return cls(**known, skipped=skipped)


@dataclass(frozen=True)
class SavedState:
    """The state.json of a checkpoint.

    ``optimizer`` has the plain numbers of the optimiser's state as {parameter}.{key}, and
    ``sha256`` the digests of the checkpoint's other files.
    """

    identity: str
    progress: TrainingProgress
    optimizer: dict[str, float]
    groups: list[ParameterGroup]
    scheduler: Json
    scaler: dict[str, float]
    sha256: dict[str, str]

    @classmethod
    def from_json(cls, content: Json) -> SavedState:
        """Read what ``kd.training.checkpoint`` has written."""
        known = {each.name: content[each.name] for each in fields(cls)}
        return cls(**known | {"progress": TrainingProgress.from_json(content["progress"])})


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
    names: dict[Tensor, str] = {each: name for name, each in state.model.named_parameters()}
    for extra, module in state.extras.items():
        names |= {each: f"{extra}/{name}" for name, each in module.named_parameters()}
    return names
