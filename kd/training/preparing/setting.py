"""What a training works with: data, student, ranks, device and precision."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn
from transformers import PreTrainedModel

from kd.config.train import TrainConfig
from kd.models.layers import is_hollow
from kd.models.precision import Precision, allow_tf32
from kd.models.products.float8 import require_float8
from kd.parallel.group import Group
from kd.parallel.values import require_same_parameters
from kd.progress import Monitor
from kd.text.batches import Source


@dataclass(frozen=True)
class TrainingSetting:
    """What a training works with. What the job asks for is in its sections, which come beside it.

    ``vocabulary`` is that of the records; ``device`` and ``precision`` are those of the passes.
    """

    source: Source
    student: PreTrainedModel
    vocabulary: int
    folder: Path
    monitor: Monitor
    group: Group
    device: torch.device
    precision: Precision


def place_student(setting: TrainingSetting, options: TrainConfig) -> None:
    """Bring the student to where it is at first, which is the same student on every rank."""
    if options.fp8:
        require_float8(setting.device)
    allow_tf32(setting.device)
    # Where rows have many widths, plans for all of them cost more than they gain
    # (``kd.models.attention.kernels.WITHOUT_PLANS``).
    torch.backends.cuda.enable_cudnn_sdp(options.order != "length")
    require_same_parameters(setting.student, setting.group)
    if not is_hollow(setting.student):
        nn.Module.to(setting.student, choose_first_place(options, setting.device, setting.group))


def choose_first_place(options: TrainConfig, device: torch.device, group: Group) -> torch.device:
    """Choose where rank 0 holds the student at first: all of it may not fit the device."""
    whole = group.alone or options.strategy == "ddp"
    return device if whole else torch.device("cpu")
