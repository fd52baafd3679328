"""What takes a step: the loss, the module that computes its gradients, and the optimiser."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import nn

from kd.config.train import TrainConfig
from kd.memory.activation_checkpointing import group_layers
from kd.memory.parallel import ParallelStrategy
from kd.models.layers import find_decoder_layers
from kd.models.stages.cut import cut
from kd.optim.averaging import Averager
from kd.optim.optimizers import make_optimizer
from kd.parallel.cutting import compute_bubble
from kd.parallel.stages import StageLoss, keep_owned
from kd.parallel.strategies import WholeLoss, replicate, shard
from kd.parallel.values import receive_values
from kd.training.preparing.setting import TrainingSetting
from kd.training.step_loss import StepLoss


@dataclass(frozen=True)
class StepParts:
    """What takes a step: the loss, the module that computes its gradients, and the optimiser."""

    loss: StepLoss
    loss_module: nn.Module
    optimizer: torch.optim.Optimizer
    average: Averager | None

    @classmethod
    def of(
        cls,
        setting: TrainingSetting,
        options: TrainConfig,
        loss: StepLoss,
        strategy: ParallelStrategy,
    ) -> StepParts:
        """Make them in the one order that works: each refers to parameters of the one before."""
        student = setting.student
        group = setting.group
        # Before anything refers to a parameter: the parts of sharded parameters are new ones.
        loss_module = _make_loss_module(setting, options, loss, strategy)
        loss = replace(loss, lm_head=loss.live_head)
        projections = loss.features.parameters() if loss.features is not None else ()
        # Where the parameters are, which may be the host while the passes run on a GPU.
        optimizer = make_optimizer(student, projections, options, student.device)
        if group.staged:
            # After the optimiser, whose groups are those of the whole student: this rank keeps one
            # stage of it, and the parameters of that stage.
            stage = cut(student, group.rank, group.size, loss.precision)
            keep_owned(optimizer, stage.owned)
            bubble = compute_bubble(group.size, options.gradient_accumulation_steps)
            phase = f"pipeline; each waits for {bubble:.0%} of a step"
            phase = f"training on {group.devices} ({phase})"
            setting.monitor.emit("stage", stage="train", phase=phase)
            loss_module = StageLoss(stage, group, loss.device, loss.clock.alone)
        average = Averager(student, options.ema_decay) if options.ema_decay is not None else None
        return cls(loss, loss_module, optimizer, average)


def _make_loss_module(
    setting: TrainingSetting, options: TrainConfig, loss: StepLoss, strategy: ParallelStrategy
) -> nn.Module:
    """Make all parameters one module, which exchanges gradients where there are several ranks."""
    group = setting.group
    parts = [loss.student] if loss.features is None else [loss.student, loss.features]
    whole = WholeLoss(parts)
    if group.staged:
        receive_values(whole, loss.device)
    if group.alone or group.staged:
        return whole
    phase = f"training on {group.devices} ({strategy})"
    setting.monitor.emit("stage", stage="train", phase=phase)
    if strategy == "ddp":
        return replicate(whole)
    layers = find_decoder_layers(loss.student)
    together = group_layers(layers, options.gradient_checkpointing)
    taken = {layer for each in together for layer in each}
    groups = [*together, *([layer] for layer in layers if layer not in taken)]
    mesh = (group.size // group.per_host, group.per_host) if strategy == "hsdp" else (group.size,)
    sharded = shard(whole, groups, loss.precision.dtype, loss.device, mesh, options.fsdp_offload)
    for layer in layers:
        loss.clock.measure_calls(layer)  # now that it is gathered before each call
    return sharded
