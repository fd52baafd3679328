"""Let a finished run go on for more steps: the section ``resume`` of a job.

The longer job may differ from the earlier one in its length and in how often it evaluates; with
``schedule: restart`` in its learning rate too. All state goes on: weights, optimiser, loss scale,
random numbers, learned temperature, and the place in the data. The first checkpoint under the
longer job's identity is written at once, so that a stop finds it.
"""

from __future__ import annotations

import shutil
import warnings
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch.optim.lr_scheduler import OneCycleLR

from cache.disk import make_folder, storage_errors
from kd.config.optimisation.resuming import ResumeConfig
from kd.config.train import TrainConfig
from kd.errors import ConfigError, TrainingError
from kd.files import whole_folder
from kd.optim.schedules import Plateau, make_scheduler
from kd.training import checkpoint
from kd.training.early_stopping import find_best_step
from kd.training.resume.identity import RunIdentity
from kd.training.saved.state import TrainState

#: The least share of the peak at which a constant rate still trains.
LEAST_SHARE = 1e-3


@dataclass(frozen=True)
class Earlier:
    """The run that goes on: the folder of its checkpoints, and the identity in them."""

    checkpoints: Path
    identity: str


def find_earlier(resume: ResumeConfig, run_dir: Path, identity: RunIdentity) -> Earlier | None:
    """Find the shorter run that the job in ``run_dir`` continues; None if it has begun already.

    Raises ``ConfigError`` if the run that it names cannot go on as this job.
    """
    own = folder = run_dir / "checkpoints"
    newest = checkpoint.read_newest_state(own)
    if newest is None:
        if resume.run is None:
            return None
        folder = run_dir.parent / resume.run / "checkpoints"
        newest = checkpoint.read_newest_state(folder)
        if newest is None:
            detail = f"the run {resume.run} has no checkpoint."
            raise ConfigError.of_field("/resume/run", detail, _NAME_A_RUN)
    if newest.identity == identity.own:
        return None if folder == own else Earlier(folder, identity.own)
    if newest.progress.stems.get(resume.schedule) != identity.shared[resume.schedule]:
        if folder == own:
            return None  # the checkpoint itself is refused, with what differs
        raise ConfigError.of_field(
            "/resume/run",
            f"the run {resume.run} trained another student: more than its length differs from "
            "this job.",
            "Change train.max_steps or train.epochs alone; with resume.schedule restart the "
            "learning rate and its schedule may change too.",
        )
    return Earlier(folder, newest.identity)


def make_resumed_scheduler(
    optimizer: torch.optim.Optimizer,
    options: TrainConfig,
    resume: ResumeConfig | None,
    steps: int,
    run_dir: Path,
) -> Any:
    """Make the present schedule of a run of ``steps`` steps, which its newest checkpoint tells."""
    newest = checkpoint.read_newest_state(run_dir / "checkpoints")
    began = 0 if newest is None else newest.progress.schedule_began
    if not began or resume is None or resume.schedule == "extend":
        return make_scheduler(optimizer, options, steps)
    if resume.schedule == "constant":
        return make_scheduler(optimizer, _hold_rate(options), steps)
    return make_scheduler(optimizer, options, steps - began)


def _hold_rate(options: TrainConfig) -> TrainConfig:
    held = {"lr_scheduler_type": "constant", "lr_scheduler_kwargs": {}, "warmup_steps": 0}
    return options.model_copy(update=held)


def lengthen(
    state: TrainState, options: TrainConfig, resume: ResumeConfig, steps: int
) -> TrainState:
    """Let ``state``, which the earlier run's checkpoint has filled, go on to ``steps`` steps.

    Raises ``ConfigError`` where there is no step left, and ``TrainingError`` where a constant rate
    would train nothing.
    """
    progress = state.progress
    if progress.step >= steps:
        detail = f"the run has taken {progress.step} steps already, and this job has {steps}."
        remedy = f"Raise train.max_steps above {progress.step}, or train.epochs."
        raise ConfigError.of_field("/train", detail, remedy)
    progress.evaluations_since_best = 0
    progress.evaluation_due = False
    match resume.schedule:
        case "extend":
            if not isinstance(state.scheduler, Plateau):  # it depends on no length
                state = replace(state, scheduler=_repeat(state, options, steps))
            progress.schedule_began = 0
        case "restart":
            progress.schedule_began = progress.step
            _raise_rates(state, options.learning_rate)
            scheduler = make_scheduler(state.optimizer, options, steps - progress.step)
            state = replace(state, scheduler=scheduler)
        case "constant":
            progress.schedule_began = progress.step
            state = replace(state, scheduler=_hold(state, options, steps))
    return state


def forget_lost_best(earlier: Earlier, state: TrainState, options: TrainConfig) -> str | None:
    """Let the evaluations so far count for nothing where the weights of the best one are lost.

    Early stopping would need them at the end. The earlier run kept them only if it stopped early
    too. Returns a warning, None where nothing is lost. All ranks call it.
    """
    progress = state.progress
    best = find_best_step(progress, options)
    # The newest checkpoint is there: the run goes on from it.
    if best is None or best == progress.step:
        return None
    if state.group.share(checkpoint.locate_checkpoint(earlier.checkpoints, best).is_dir()):
        return None
    progress.best_loss = None
    progress.best_step = 0
    return (
        f"The earlier run was best at step {best}, of which it kept no checkpoint: early stopping "
        f"chooses among the evaluations after step {progress.step}."
    )


def copy_best(
    options: TrainConfig, resume: ResumeConfig | None, run_dir: Path, state: TrainState
) -> None:
    """Copy the best checkpoint of the run that this one continues, where early stopping needs it.

    Call it after the first checkpoint is saved: a run without one would go on from the best.
    """
    best = find_best_step(state.progress, options)
    if best is None or resume is None or resume.run is None:
        return
    own = checkpoint.locate_checkpoint(run_dir / "checkpoints", best)
    named = checkpoint.locate_checkpoint(run_dir.parent / resume.run / "checkpoints", best)
    if state.group.leads and named.is_dir() and not own.is_dir():
        with whole_folder(own) as partial:
            shutil.copytree(named, partial, dirs_exist_ok=True)
    state.group.wait()


def _raise_rates(state: TrainState, peak: float | None = None) -> None:
    """Set every group's rate to its peak, as roll-backs have lowered it.

    ``peak`` is another peak of the first group, whose share the other groups keep.
    """
    peaks = _list_peaks(state)
    scale = 1.0 if peak is None else peak * state.progress.learning_rate_factor / peaks[0]
    for group, own in zip(state.optimizer.param_groups, peaks, strict=True):
        group["lr"] = group["initial_lr"] = own * scale


def _list_peaks(state: TrainState) -> list[float]:
    """List the peak of every group's rate, as roll-backs have lowered it."""
    # OneCycleLR begins below its peak. After it the groups of another schedule keep its peak.
    key = "max_lr" if isinstance(state.scheduler, OneCycleLR) else "initial_lr"
    rates = zip(state.optimizer.param_groups, state.scheduler.base_lrs, strict=True)
    # ReduceLROnPlateau leaves no peak in the groups.
    return [float(group.get(key, group.get("initial_lr", base))) for group, base in rates]


def _repeat(state: TrainState, options: TrainConfig, steps: int) -> Any:
    """Make the schedule of ``steps`` steps, at the step where the run stands."""
    # The schedule does not count steps that overflowed, nor batches that were left out.
    taken = state.progress.schedule_began + state.scheduler.last_epoch
    _raise_rates(state)
    scheduler = make_scheduler(state.optimizer, options, steps)
    with warnings.catch_warnings():
        # torch wants a step of the optimiser before each; they were taken by the earlier run.
        warnings.simplefilter("ignore", UserWarning)
        for _ in range(taken):
            scheduler.step()
    return scheduler


def _hold(state: TrainState, options: TrainConfig, steps: int) -> Any:
    groups = state.optimizer.param_groups
    rate, peak = float(groups[0]["lr"]), _list_peaks(state)[0]
    if rate < LEAST_SHARE * peak:
        raise TrainingError(
            f"resume.schedule constant would train at a rate of {rate:.3g}, to which "
            f"{options.lr_scheduler_type} had fallen from {peak:.3g}.",
            "Set resume.schedule to restart or extend.",
        )
    for group in groups:
        group["initial_lr"] = group["lr"]  # the base of the schedule
    return make_scheduler(state.optimizer, _hold_rate(options), steps)


def copy_history(earlier: Earlier, run_dir: Path) -> None:
    """Begin the history of a run with that of the run that it continues, unless it has one."""
    theirs, own = earlier.checkpoints.parent / "metrics.jsonl", run_dir / "metrics.jsonl"
    if theirs != own and theirs.exists() and not own.exists():
        with storage_errors(run_dir):
            make_folder(run_dir)
            shutil.copyfile(theirs, own)


_NAME_A_RUN = "Name a run folder beside this one, or the id of a job whose training has started."
