"""How the learning rate moves: the schedules of ``transformers.get_scheduler``, and OneCycle of torch."""

from __future__ import annotations

from typing import Any

import torch
from transformers import get_scheduler

from kd.config.train import TrainConfig
from kd.errors import TrainingError


def make_scheduler(optimizer: torch.optim.Optimizer, options: TrainConfig, steps: int) -> Any:
    """The schedule that ``options`` name, over ``steps`` optimiser steps; every group moves from a rate of its own.

    ``step()`` is called once after each optimiser step; ``get_last_lr()[0]`` is the rate of the head.
    Raises ``TrainingError`` naming the fields where the schedule cannot be made.
    """
    name = options.lr_scheduler_type
    extra = {key: int(value) if value == int(value) else value for key, value in options.lr_scheduler_kwargs.items()}
    if options.optim == "schedule_free" and not name.startswith("constant"):
        raise TrainingError(
            f"train.optim schedule_free takes the place of a schedule, but train.lr_scheduler_type is {name}.",
            "Set train.lr_scheduler_type to constant or constant_with_warmup.",
        )
    try:
        if name == "onecycle":
            return _one_cycle(optimizer, options, steps)
        return get_scheduler(name, optimizer, options.warmup_steps, steps, extra)
    except (TypeError, ValueError) as error:
        raise TrainingError(
            f"lr_scheduler_type {name} cannot be made with lr_scheduler_kwargs {extra}: {error}",
            "Set train.lr_scheduler_kwargs to what the schedule needs.",
        ) from error


def _one_cycle(optimizer: torch.optim.Optimizer, options: TrainConfig, steps: int) -> Any:
    """One rise and one fall of the rate; momentum stays, for not every optimiser has one (Smith and Topin 2017).

    The rise takes ``pct_start`` of the steps, or ``train.warmup_steps`` of them where that is given.
    """
    extra: dict[str, Any] = dict(options.lr_scheduler_kwargs)
    if options.warmup_steps and "pct_start" in extra:
        raise ValueError("pct_start and train.warmup_steps both say how long the rate rises: give one of them")
    rise = extra.pop("pct_start", options.warmup_steps / steps if options.warmup_steps else 0.3)
    if not 0 <= rise < 1:
        raise ValueError(f"the rate must rise for at least 0 and for less than 1 of the {steps} steps, got {rise:.4g}")
    rates = [group["lr"] for group in optimizer.param_groups]
    # A rise of one step has no length, and torch divides by it.
    extra["pct_start"] = float(rise) if rise * steps > 1 else 0.0
    return torch.optim.lr_scheduler.OneCycleLR(optimizer, rates, total_steps=steps, cycle_momentum=False, **extra)


def scale_rates(scheduler: Any, factor: float) -> None:
    """Multiply the rates of every group, now and for the rest of the schedule, by ``factor``."""
    scheduler.base_lrs = [rate * factor for rate in scheduler.base_lrs]
    scheduler._last_lr = [rate * factor for rate in scheduler.get_last_lr()]
    for group in scheduler.optimizer.param_groups:
        for key in group.keys() & {"lr", "initial_lr", "max_lr", "min_lr"}:
            group[key] *= factor
