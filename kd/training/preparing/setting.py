"""What a training is made of, its device, and the precision of its products."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import nn
from transformers import PreTrainedModel

from kd.config.job import JobConfig
from kd.config.train import TrainConfig
from kd.models.layers import is_hollow
from kd.models.precision import Precision, pick_device, set_tf32
from kd.models.products.float8 import require_float8
from kd.parallel.group import Group
from kd.parallel.values import require_same_parameters
from kd.progress import Monitor
from kd.text.batches import Source


@dataclass(frozen=True)
class TrainingSetting:
    """What a training is made of, its device, and the precision of its products."""

    config: JobConfig
    options: TrainConfig
    source: Source
    student: PreTrainedModel
    vocabulary: int
    folder: Path
    monitor: Monitor
    group: Group
    device: torch.device
    precision: Precision

    @classmethod
    def of(
        cls,
        config: JobConfig,
        source: Source,
        student: PreTrainedModel,
        vocabulary: int,
        folder: Path,
        monitor: Monitor,
        group: Group,
    ) -> TrainingSetting:
        """Choose device and precision, and bring the student to where it is at first."""
        options = config.require_train()
        if options.strategy == "pipeline" and not group.alone:
            group = replace(group, staged=True)
        device = pick_device()
        precision = Precision.choose(options.precision, device)
        if options.fp8:
            require_float8(device)
        set_tf32(device, options.tf32)
        require_same_parameters(student, group)
        if not is_hollow(student):
            nn.Module.to(student, choose_first_place(options, device, group))
        return cls(
            config, options, source, student, vocabulary, folder, monitor, group, device, precision
        )


def choose_first_place(options: TrainConfig, device: torch.device, group: Group) -> torch.device:
    """Choose where rank 0 holds the student at first: all of it may not fit the device."""
    whole = group.alone or options.strategy == "ddp"
    return device if whole else torch.device("cpu")
