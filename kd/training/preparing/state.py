"""The state of a training: a new one, or that of the newest checkpoint."""

from __future__ import annotations

import torch
from torch import nn

from kd.models.precision import make_scaler
from kd.progress import Monitor
from kd.training import checkpoint
from kd.training.preparing.parts import StepParts
from kd.training.preparing.setting import TrainingSetting
from kd.training.resume.continuing import (
    Earlier,
    copy_best,
    copy_history,
    find_earlier,
    forget_lost_best,
    lengthen,
    make_resumed_scheduler,
    read_schedule_start,
)
from kd.training.resume.identity import compute_resume_identity, compute_stems
from kd.training.saved.state import TrainingProgress, TrainState


def restore_state(setting: TrainingSetting, parts: StepParts) -> tuple[TrainState, str]:
    """Return the state of the newest checkpoint, or a new one, and what a checkpoint must match."""
    config = setting.config
    folder = setting.folder
    source = setting.source.fingerprint
    identity = compute_resume_identity(config, source)
    earlier = find_earlier(config, folder, identity, source)
    state = _make_state(setting, parts, read_schedule_start(folder))
    # A new run draws its random numbers from this seed on; a checkpoint brings the state of the
    # generators with it. Ranks draw different dropout.
    torch.manual_seed(setting.options.seed + setting.group.rank)
    stored = earlier or Earlier(folder / "checkpoints", identity)
    for problem in checkpoint.load_newest(stored.checkpoints, state, stored.identity):
        setting.monitor.emit("warning", message=problem)
    state.progress.stems = compute_stems(config, source)
    if earlier is not None:
        state = lengthen(state, config, parts.loss.steps)
        warning = forget_lost_best(earlier, state, config.require_train())
        if warning is not None:
            setting.monitor.emit("warning", message=warning)
        if setting.group.leads:
            copy_history(earlier, folder)
        checkpoint.save_checkpoint(folder / "checkpoints", state, identity)
    copy_best(config, folder, state)
    keep_threads(state.progress, setting.device, setting.monitor)
    return state, identity


def keep_threads(progress: TrainingProgress, device: torch.device, monitor: Monitor) -> None:
    """Note the number of torch's threads on a CPU, and warn where earlier steps had another one."""
    threads = torch.get_num_threads() if device.type == "cpu" else None
    if None not in (threads, progress.threads) and threads != progress.threads:
        monitor.warn_once(
            f"The {progress.step:,} steps so far were computed with {progress.threads} threads, "
            f"and this process has {threads}, which changes how sums are rounded: the student will "
            "differ in its last digits from one that was trained without a stop. Set "
            f"OMP_NUM_THREADS={progress.threads} for the same bits."
        )
    progress.threads = threads


def _make_state(setting: TrainingSetting, parts: StepParts, schedule_began: int) -> TrainState:
    """Make schedule and loss scale, with all that a checkpoint must hold."""
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
        scheduler=make_resumed_scheduler(
            parts.optimizer, setting.config, loss.steps, schedule_began
        ),
        scaler=make_scaler(loss.precision),
        progress=TrainingProgress(),
        extras={name: module for name, module in extras.items() if module is not None},
        group=setting.group,
    )
