"""Makes the loss of a training: targets, objective, temperature, features."""

from __future__ import annotations

import torch

from kd.config.loss import LossConfig
from kd.config.train import TrainConfig
from kd.loss.decoder import TargetDecoder
from kd.loss.features import FeatureLoss
from kd.loss.objective import Objective
from kd.loss.tail_control import TailControl
from kd.loss.temperature import TemperatureControl
from kd.models.lm_head import LMHead
from kd.models.routers import find_router_balance
from kd.tracking.stopwatch import Stopwatch
from kd.training.preparing.requirements import require_entropies, require_served
from kd.training.preparing.setting import TrainingSetting
from kd.training.step_loss import StepLoss


def make_loss(
    setting: TrainingSetting, config: LossConfig, options: TrainConfig, lm_head: LMHead
) -> StepLoss:
    """Make the loss that a step of the job computes.

    Raises ``ConfigError`` if the records cannot serve it.
    """
    source = setting.source
    device = setting.device
    decoder = TargetDecoder.of(source, device)
    require_served(config, source.codec)
    require_entropies(config, source)
    steps = count_total_steps(options, source.train_count)
    features = None
    if config.features.weight > 0 and decoder.lm_head is not None:
        student_width = lm_head.weight.shape[1]
        teacher_width = decoder.lm_head.weight.shape[1]
        features = FeatureLoss(config.features, student_width, teacher_width).to(device)
    # The cache's mean counts all positions alike, so it is of no use to a loss that does not.
    useful = config.tail_control and config.entropy_weighting == 0.0
    arrays = source.tail_mean() if useful and lm_head.weight.requires_grad else None
    control = None
    if arrays is not None:
        dtype = torch.promote_types(lm_head.weight.dtype, torch.float32)
        control = TailControl(arrays, lm_head.weight.shape[1], dtype).to(device)
    return StepLoss(
        config=config,
        student=setting.student,
        device=device,
        lm_head=lm_head,
        decoder=decoder,
        objective=Objective.of(config),
        temperature=TemperatureControl(config.temperature, steps),
        features=features,
        routers=find_router_balance(setting.student, config.router_balance),
        precision=setting.precision,
        logits_chunk=options.logits_chunk,
        steps=steps,
        clock=Stopwatch(device),
        control=control,
    )


def count_total_steps(options: TrainConfig, sequences: int) -> int:
    """Optimiser steps of the whole run, for ``sequences`` training sequences."""
    steps = options.count_steps(sequences)
    assert steps is not None, "TrainConfig requires max_steps or epochs"
    return steps
