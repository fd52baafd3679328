"""Schedules of the learning rate.

transformers.get_scheduler           linear, cosine, polynomial and others
torch's OneCycleLR                   onecycle
step, multistep                      the rate falls by a factor at given steps
torch's ReduceLROnPlateau            it falls when the held-out loss no longer does
"""

from __future__ import annotations

import math
from bisect import bisect_right
from typing import Any, SupportsFloat

import torch
from torch.optim.lr_scheduler import LambdaLR, ReduceLROnPlateau
from transformers import get_scheduler

from kd.config.train import TrainConfig
from kd.errors import TrainingError

#: What ``train.lr_scheduler_kwargs`` gives to the class of a schedule.
Arguments = dict[str, Any]


def make_scheduler(optimizer: torch.optim.Optimizer, options: TrainConfig, steps: int) -> Any:
    """Make the schedule that ``options`` name, over ``steps`` optimiser steps.

    Each group of parameters moves from a rate of its own. Call ``step()`` once after each optimiser
    step; ``get_last_lr()[0]`` is the rate of the LM head. Raises ``TrainingError``, with the fields
    to change, if the schedule cannot be made.
    """
    name = options.lr_scheduler_type
    # YAML may write a count as 2.0; the schedules need whole numbers.
    extra = {
        key: int(value) if not isinstance(value, tuple) and value == int(value) else value
        for key, value in options.lr_scheduler_kwargs.items()
    }
    try:
        if name == "onecycle":
            return _make_one_cycle(optimizer, options, steps)
        if name in ("step", "multistep"):
            return _make_falls(optimizer, options, steps)
        if name == "reduce_lr_on_plateau":
            return Plateau(optimizer, options.warmup_steps, **extra)
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
    extra: Arguments = dict(options.lr_scheduler_kwargs)
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


def _make_falls(optimizer: torch.optim.Optimizer, options: TrainConfig, steps: int) -> LambdaLR:
    """Make a schedule that multiplies the rate by ``gamma`` (0.1) at given steps.

    ``step_size`` counts steps from the end of the warm-up, ``milestones`` from the start of the
    run. (torch's StepLR and MultiStepLR have no warm-up.)
    """
    warmup = options.warmup_steps
    arguments: Arguments = dict(options.lr_scheduler_kwargs)
    gamma = float(arguments.get("gamma", 0.1))
    milestones = arguments.get("milestones")
    if isinstance(milestones, tuple):
        if not warmup < milestones[0] <= milestones[-1] < steps:
            raise ValueError(
                f"milestones must be steps after the {warmup} of the warm-up and before the end "
                f"of the run at {steps}"
            )
        falls = list(milestones)
    else:
        size = int(arguments.get("step_size", math.inf))
        falls = list(range(warmup + size, steps, size))

    def share(step: int) -> float:
        return step / warmup if step < warmup else gamma ** bisect_right(falls, step)

    return LambdaLR(optimizer, share)


class Plateau(ReduceLROnPlateau):
    """A linear warm-up; then the rate falls when the held-out loss no longer does.

    ``step`` follows each optimiser step, as with the other schedules, and ``observe`` each
    evaluation. Evaluations during the warm-up count for nothing.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, warmup: int, **arguments: Any) -> None:
        self.base_lrs = [float(group["lr"]) for group in optimizer.param_groups]
        self.warmup = warmup
        self.taken = 0
        super().__init__(optimizer, eps=0.0, **arguments)
        self._warm_up()

    def step(  # type: ignore[override]
        self, metrics: SupportsFloat | None = None, epoch: int | None = None
    ) -> None:
        """Count an optimiser step; the rate rises until the warm-up is over."""
        self.taken += 1
        if self.taken <= self.warmup:
            self._warm_up()

    def observe(self, loss: float) -> None:
        """Record the held-out loss of an evaluation, in nats; lower the rate if that is due."""
        if self.taken >= self.warmup:
            super().step(loss)

    def _warm_up(self) -> None:
        share = self.taken / self.warmup if self.warmup else 1.0
        for group, rate in zip(self.optimizer.param_groups, self.base_lrs, strict=True):
            group["lr"] = rate * share
        self._last_lr = [group["lr"] for group in self.optimizer.param_groups]

    def state_dict(self) -> dict[str, Any]:
        """Return all of the state as JSON values, which infinity is none of."""
        best = None if math.isinf(self.best) else self.best
        return {**super().state_dict(), "best": best, "mode_worse": None}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore a result of ``state_dict``."""
        super().load_state_dict(state_dict)
        if state_dict.get("best") is None:
            self.best = self.mode_worse


def observe_evaluation(scheduler: Any, loss: float | None) -> None:
    """Tell a schedule that follows the held-out ``loss``, in nats, of an evaluation."""
    if isinstance(scheduler, Plateau) and loss is not None:
        scheduler.observe(loss)


def scale_rates(scheduler: Any, factor: float) -> None:
    """Multiply the rates of every group, now and for the rest of the schedule, by ``factor``."""
    scheduler.base_lrs = [rate * factor for rate in scheduler.base_lrs]
    scheduler._last_lr = [rate * factor for rate in scheduler.get_last_lr()]
    for group in scheduler.optimizer.param_groups:
        for key in group.keys() & {"lr", "initial_lr", "max_lr", "min_lr"}:
            group[key] *= factor


def list_rates(options: TrainConfig, steps: int) -> list[float]:
    """Return the rate of the LM head at each of ``steps`` optimiser steps.

    A schedule that follows the held-out loss never falls here. Raises ``TrainingError`` if the
    schedule cannot be made.
    """
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(()))], options.learning_rate)
    scheduler = make_scheduler(optimizer, options, steps)
    rates = []
    for _ in range(steps):
        rates.append(float(scheduler.get_last_lr()[0]))
        optimizer.step()
        scheduler.step()
    return rates
