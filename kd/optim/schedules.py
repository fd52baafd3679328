"""Schedules of the learning rate: those of ``transformers.get_scheduler``, and torch's OneCycle."""

from __future__ import annotations

from typing import Any

import torch
from transformers import get_scheduler

from kd.config.train import TrainConfig
from kd.errors import TrainingError


def make_scheduler(optimizer: torch.optim.Optimizer, options: TrainConfig, steps: int) -> Any:
    """Make the schedule that ``options`` name, over ``steps`` optimiser steps.

    Each group of parameters moves from a rate of its own. Call ``step()`` once after each optimiser
    step; ``get_last_lr()[0]`` is the rate of the LM head. Raises ``TrainingError``, with the fields
    to change, where the schedule cannot be made.
    """
    name = options.lr_scheduler_type
    # YAML may write a count as 2.0; the schedules need whole numbers.
    extra = {
        key: int(value) if value == int(value) else value
        for key, value in options.lr_scheduler_kwargs.items()
    }
    if options.optim == "schedule_free" and not name.startswith("constant"):
        raise TrainingError(
            "train.optim schedule_free takes the place of a schedule, but train.lr_scheduler_type "
            f"is {name}.",
            "Set train.lr_scheduler_type to constant or constant_with_warmup.",
        )
    try:
        if name == "onecycle":
            return _make_one_cycle(optimizer, options, steps)
        return get_scheduler(name, optimizer, options.warmup_steps, steps, extra)
    except (TypeError, ValueError) as error:
        raise TrainingError(
            f"lr_scheduler_type {name} cannot be made with lr_scheduler_kwargs {extra}: {error}",
            "Set train.lr_scheduler_kwargs to the arguments of the schedule.",
        ) from error


def _make_one_cycle(optimizer: torch.optim.Optimizer, options: TrainConfig, steps: int) -> Any:
    """Make a schedule of one rise and one fall of the rate (Smith and Topin 2017).

    The rise takes the share ``pct_start`` of the steps, or ``train.warmup_steps`` steps. Momentum
    stays constant, because not every optimiser has one.
    """
    extra: dict[str, Any] = dict(options.lr_scheduler_kwargs)
    if options.warmup_steps and "pct_start" in extra:
        raise ValueError(
            "pct_start and train.warmup_steps both set the length of the rise: give one of them"
        )
    rise = extra.pop("pct_start", options.warmup_steps / steps if options.warmup_steps else 0.3)
    if not 0 <= rise < 1:
        raise ValueError(
            f"the rate must rise for a share of at least 0 and less than 1 of the {steps} steps, "
            f"got {rise:.4g}"
        )
    rates = [group["lr"] for group in optimizer.param_groups]
    # A rise of one step has no length, and torch divides by it.
    extra["pct_start"] = float(rise) if rise * steps > 1 else 0.0
    return torch.optim.lr_scheduler.OneCycleLR(
        optimizer, rates, total_steps=steps, cycle_momentum=False, **extra
    )


def scale_rates(scheduler: Any, factor: float) -> None:
    """Multiply the rates of every group, now and for the rest of the schedule, by ``factor``."""
    scheduler.base_lrs = [rate * factor for rate in scheduler.base_lrs]
    scheduler._last_lr = [rate * factor for rate in scheduler.get_last_lr()]
    for group in scheduler.optimizer.param_groups:
        for key in group.keys() & {"lr", "initial_lr", "max_lr", "min_lr"}:
            group[key] *= factor
