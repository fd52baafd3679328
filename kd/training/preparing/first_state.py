"""The state of a training: a new one, or that of the newest checkpoint."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from cache.errors import StoreError
from kd.config.optimisation.resuming import ResumeConfig
from kd.config.train import TrainConfig
from kd.errors import ModelError
from kd.models.precision import make_scaler
from kd.training import checkpoint
from kd.training.preparing.parts import StepParts
from kd.training.preparing.setting import TrainingSetting
from kd.training.resume import continuing
from kd.training.resume.identity import RunIdentity
from kd.training.saved.state import TrainingProgress, TrainState


def restore_state(
    setting: TrainingSetting,
    options: TrainConfig,
    resume: ResumeConfig | None,
    identity: RunIdentity,
    parts: StepParts,
) -> TrainState:
    """Return the state of the newest checkpoint that the job may go on from, or a new one."""
    folder = setting.folder
    earlier = None if resume is None else continuing.find_earlier(resume, folder, identity)
    steps = parts.loss.steps
    scheduler = continuing.make_resumed_scheduler(parts.optimizer, options, resume, steps, folder)
    state = _make_state(setting, parts, scheduler)
    # A new run draws its random numbers from this seed on; a checkpoint brings the state of the
    # generators with it. Ranks draw different dropout.
    torch.manual_seed(options.seed + setting.group.rank)
    stored = earlier or continuing.Earlier(folder / "checkpoints", identity.own)
    for problem in checkpoint.load_newest(stored.checkpoints, state, stored.identity):
        setting.monitor.emit("warning", message=problem)
    if len(found := set(setting.group.gather(state.progress.step))) > 1:
        detail = f"The hosts of this training see different checkpoints: of steps {sorted(found)}."
        raise StoreError(detail, "It is tried again: the shared place may lag behind.", True)
    state.progress.stems = identity.shared
    if resume is not None and earlier is not None:
        if setting.group.apart:
            detail = "resume.run does not work on several hosts that share a bucket and no folder."
            raise ModelError(detail, "Continue it on one host, or give all the same KD_HOME.")
        state = continuing.lengthen(state, options, resume, steps)
        if (warning := continuing.forget_lost_best(earlier, state, options)) is not None:
            setting.monitor.emit("warning", message=warning)
        if setting.group.leads:
            continuing.copy_history(earlier, folder)
        checkpoint.save_checkpoint(folder / "checkpoints", state, identity.own)
    continuing.copy_best(options, resume, folder, state)
    _keep_threads(setting, state.progress)
    return state


def _keep_threads(setting: TrainingSetting, progress: TrainingProgress) -> None:
    """Note the number of torch's threads on a CPU, and warn where earlier steps had another one."""
    threads = torch.get_num_threads() if setting.device.type == "cpu" else None
    if None not in (threads, progress.threads) and threads != progress.threads:
        setting.monitor.warn_once(
            f"The {progress.step:,} steps so far were computed with {progress.threads} threads, "
            f"and this process has {threads}, which changes how sums are rounded: the student will "
            "differ in its last digits from one that was trained without a stop. Set "
            f"OMP_NUM_THREADS={progress.threads} for the same bits."
        )
    progress.threads = threads


def _make_state(setting: TrainingSetting, parts: StepParts, scheduler: Any) -> TrainState:
    """Make the loss scale, and name all that a checkpoint must hold."""
    loss = parts.loss
    extras: dict[str, nn.Module | None] = {
        "temperature": loss.temperature if loss.temperature.learned else None,
        "features": loss.features,
        "average": parts.average,
        "tail_control": loss.control,
    }
    return TrainState(
        model=loss.student,
        optimizer=parts.optimizer,
        scheduler=scheduler,
        scaler=make_scaler(loss.precision),
        progress=TrainingProgress(),
        extras={name: module for name, module in extras.items() if module is not None},
        group=setting.group,
    )
