"""The state of a training run: ``prepare`` makes it, and the steps read and change it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import nn
from transformers import PreTrainedModel

from kd.checks.slow_disk import DiskWatch
from kd.checks.slow_rank import RankWatch
from kd.checks.watch import TrainingWatch
from kd.config.checks import ChecksConfig
from kd.config.train import TrainConfig
from kd.memory.step_bytes import StepMemory
from kd.models.layers import group_layers
from kd.models.precision import ScalerWatch
from kd.optim.averaging import Averager
from kd.optim.dropout import Dropout
from kd.parallel.group import Group
from kd.progress import Monitor, ProgressMeter
from kd.text.batches import Batch, Source
from kd.text.steps.reading import read_training_batches
from kd.tracking.metrics import MetricsLog
from kd.tracking.scalars import SpeedMeter
from kd.tracking.stopwatch import Stopwatch
from kd.training.compiling import Compilation
from kd.training.early_stopping import is_out_of_patience
from kd.training.lookahead import LookAhead
from kd.training.samples import EvaluationSamples
from kd.training.saved.state import TrainingProgress, TrainState
from kd.training.saving import CheckpointSaver
from kd.training.step_loss import StepLoss


@dataclass
class Run:
    """Everything that the steps of one run read and change.

    A checkpoint holds ``state``, ``watch`` and ``scale_watch``: a resumed run needs nothing else
    from an earlier one.
    """

    #: The job's train section; its micro-batch becomes smaller where memory runs out.
    options: TrainConfig
    checks: ChecksConfig
    #: Whether the student began with random weights.
    is_fresh: bool
    source: Source
    folder: Path
    monitor: Monitor
    loss: StepLoss
    #: ``loss`` as one module that exchanges gradients with the other ranks.
    loss_module: nn.Module
    state: TrainState
    #: The identity of the job, which its checkpoints carry.
    identity: str
    memory: StepMemory
    #: None once its report is written, and where nothing is compiled.
    compilation: Compilation | None
    average: Averager | None
    look_ahead: LookAhead | None
    watch: TrainingWatch
    disk_watch: DiskWatch
    rank_watch: RankWatch
    scale_watch: ScalerWatch
    log: MetricsLog
    meter: ProgressMeter
    speed: SpeedMeter
    #: The parameters that the optimiser moves, those of the feature projections included.
    trained: list[nn.Parameter] = field(init=False)
    #: The trained parameters of each layer, and of each group of the optimiser, by name.
    layers: list[tuple[str, list[nn.Parameter]]] = field(init=False)
    groups: list[tuple[str, list[nn.Parameter]]] = field(init=False)
    #: None where the dropout of the student stays as it is.
    dropout: Dropout | None = field(init=False)
    #: What the student writes at each evaluation; None = nothing.
    samples: EvaluationSamples | None = None
    saver: CheckpointSaver = field(init=False)

    def __post_init__(self) -> None:
        groups = [group["params"] for group in self.state.optimizer.param_groups]
        self.trained = [parameter for group in groups for parameter in group]
        self.layers = group_layers(self.student)
        self.groups = [(f"group {number}", group) for number, group in enumerate(groups)]
        self.saver = CheckpointSaver(self.checkpoints, self.group, self.monitor)
        self.dropout = None if self.options.dropout is None else Dropout.of(self.student)

    @property
    def group(self) -> Group:
        """The ranks that train the student."""
        return self.state.group

    @property
    def student(self) -> PreTrainedModel:
        """The model that is trained."""
        return self.loss.student

    @property
    def device(self) -> torch.device:
        """The device of the passes."""
        return self.loss.device

    @property
    def progress(self) -> TrainingProgress:
        """The steps taken so far, and what they found."""
        return self.state.progress

    @property
    def steps(self) -> int:
        """Optimiser steps of the whole run."""
        return self.loss.steps

    @property
    def clock(self) -> Stopwatch:
        """Seconds of each phase of a step."""
        return self.loss.clock

    @property
    def checkpoints(self) -> Path:
        """The folder of the checkpoints."""
        return self.folder / "checkpoints"

    @property
    def is_over(self) -> bool:
        """Whether every step is taken, or early stopping ends the run."""
        return self.progress.step >= self.steps or is_out_of_patience(self.progress, self.options)

    def should_stop(self) -> bool:
        """Whether some rank is asked to stop; the ranks agree, so that all stop at one step."""
        return self.group.any(self.monitor.should_stop())

    def read_batches(self) -> Iterator[list[Batch]]:
        """The micro-batches of each step that is left."""
        steps = range(self.progress.step, self.steps)
        return read_training_batches(self.source, self.options, steps, self.group.readers)
