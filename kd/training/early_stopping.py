"""The best evaluation of a run so far, and whether the run should end without a better one."""

from __future__ import annotations

import math

from kd.config.train import TrainConfig
from kd.training.saved.state import Evaluation, TrainingProgress


def record_evaluation(progress: TrainingProgress, found: Evaluation) -> bool:
    """Write an evaluation into ``progress``; returns whether it is the best so far."""
    progress.last_evaluation = found
    loss = found.get("validation_loss")
    # Where nothing is held out there is no loss, and no evaluation is better than another.
    if loss is None:
        return False
    # A loss that is not finite is never the best: no later loss would be below NaN.
    best = math.inf if progress.best_loss is None else progress.best_loss
    improved = loss < best
    if improved:
        progress.best_loss = loss
        progress.best_step = progress.step
        progress.evaluations_since_best = 0
    else:
        progress.evaluations_since_best += 1
    return improved


def is_out_of_patience(progress: TrainingProgress, options: TrainConfig) -> bool:
    """Whether early stopping ends the run now."""
    patience = options.early_stopping_patience
    return patience is not None and progress.evaluations_since_best >= patience


def find_best_step(progress: TrainingProgress, options: TrainConfig) -> int | None:
    """The step of the best evaluation; None without one, and where early stopping is off."""
    # 0 stands for no evaluation yet: none is recorded before the first step.
    if options.early_stopping_patience is None or progress.best_step == 0:
        return None
    return progress.best_step
