"""Prepares a training run: student, loss and optimiser, restored from the newest checkpoint."""

from __future__ import annotations

import platform
from dataclasses import replace
from pathlib import Path

from transformers import PreTrainedModel

from kd.checks.slow_disk import DiskWatch
from kd.checks.slow_rank import RankWatch
from kd.checks.watch import TrainingWatch
from kd.config.job import JobConfig
from kd.config.train import SHARDED, TrainConfig
from kd.memory.auto_batch import find_fitting_micro_batch, rehearse_step
from kd.memory.step_bytes import resize_micro_batch
from kd.memory.step_memory import estimate_optimizer_bytes, reset_peak_memory
from kd.models.precision import Precision, ScalerWatch, pick_device
from kd.parallel.group import ALONE, Group
from kd.parallel.values import allocate
from kd.progress import Monitor, ProgressMeter
from kd.text.batches import Source
from kd.text.steps.reading import read_training_batches
from kd.tracking.metrics import MetricsLog
from kd.tracking.scalars import SpeedMeter
from kd.tracking.stopwatch import count_flops_per_token
from kd.training.compiling import compile_student
from kd.training.lookahead import LookAhead
from kd.training.preparing.first_state import restore_state
from kd.training.preparing.job_loss import make_loss
from kd.training.preparing.parts import StepParts
from kd.training.preparing.setting import TrainingSetting, place_student
from kd.training.preparing.student import change_layers, examine_student
from kd.training.resume.identity import RunIdentity
from kd.training.run import Run
from kd.training.saved.state import TrainState
from kd.training.step_loss import StepLoss


def prepare(
    config: JobConfig,
    source: Source,
    student: PreTrainedModel,
    vocabulary: int,
    folder: Path,
    monitor: Monitor,
    group: Group = ALONE,
) -> Run:
    """Make everything that training needs, and restore the newest checkpoint in ``folder``.

    What is done to ``student``, and why in this order:

        place      on the device, or in the host's memory where it may not fit: it runs there next
        examine    run it once, whole and in float32: the checks need all bits of it
        round      to bfloat16 (bf16_pure): after the checks, before anything refers to a weight
        change     layers that multiply in float8, recompute or offload: before they are compiled
        allocate   memory for the weights on the other ranks (fsdp does so by itself)
        compile    the layers as they are now
        share      replicate or shard the parameters: sharded ones are new parameters,
        optimise   so the optimiser comes after them
        cut        keep the stage of this rank: the optimiser has seen the whole student
        restore    parameters and state from the newest checkpoint: all objects exist now

    Rank 0 brings the values of the student. The students of other ranks may be hollow
    (``kd.models.loading.build_hollow_student``). Raises ``ConfigError`` where the cache cannot
    serve the job, ``ModelError`` where the student cannot be trained as the job asks, and
    ``OutOfMemory`` where not even one sequence fits.
    """
    options = config.require_train()
    if options.strategy == "pipeline" and not group.alone:
        group = replace(group, staged=True)
    device = pick_device()
    precision = Precision.choose(options.precision, device)
    setting = TrainingSetting(
        source, student, vocabulary, folder, monitor, group, device, precision
    )
    place_student(setting, options)
    lm_head, memory, strategy = examine_student(setting, config.data, config.loss, options)
    change_layers(setting, options)
    if strategy not in SHARDED:
        allocate(student, device)
    compilation = compile_student(student, options.compile, device, strategy in SHARDED)
    loss = make_loss(setting, config.loss, options, lm_head.refresh(student))
    parts = StepParts.of(setting, options, loss, strategy)
    identity = RunIdentity.of(config, source.fingerprint)
    state = restore_state(setting, options, config.resume, identity, parts)
    watch = TrainingWatch(config.checks, options)
    watch.restore(state.progress.watch)
    hosts = group.gather(platform.node())
    flops = count_flops_per_token(student, lm_head.vocabulary, config.data.sequence_length)
    run = Run(
        options=_fit_micro_batch(setting, options, state, parts.loss),
        checks=config.checks,
        is_fresh=config.student is not None and config.student.init is not None,
        source=source,
        folder=folder,
        monitor=monitor,
        loss=parts.loss,
        loss_module=parts.loss_module,
        state=state,
        identity=identity.own,
        memory=memory,
        compilation=compilation,
        average=parts.average,
        look_ahead=_make_look_ahead(setting, options, parts.loss),
        watch=watch,
        disk_watch=DiskWatch(options, source.disk_reads if config.checks.alarms else None),
        rank_watch=RankWatch(hosts, strategy, options.logging_steps, config.checks.alarms),
        scale_watch=ScalerWatch(**state.progress.scale_watch),
        log=_open_log(setting, state),
        meter=ProgressMeter(parts.loss.steps, "steps", done=state.progress.step),
        speed=SpeedMeter(flops, device, group.size),
    )
    reset_peak_memory(device)
    return run


def _open_log(setting: TrainingSetting, state: TrainState) -> MetricsLog:
    """Open metrics.jsonl with the lines up to the restored step; other ranks write no file."""
    progress = state.progress
    # A run that was stopped before its first evaluation makes that evaluation again: its history is
    # empty.
    last_step = progress.step if progress.first_evaluation is not None else -1
    path = setting.folder / "metrics.jsonl" if setting.group.leads else None
    return MetricsLog(path, setting.monitor, last_step)


def _make_look_ahead(
    setting: TrainingSetting, options: TrainConfig, loss: StepLoss
) -> LookAhead | None:
    if not loss.temperature.follows_held_out:
        return None
    what = (loss.student, loss.lm_head, setting.source, loss.decoder)
    return LookAhead(*what, options.batch_size, loss.precision, setting.device)


def _fit_micro_batch(
    setting: TrainingSetting, options: TrainConfig, state: TrainState, loss: StepLoss
) -> TrainConfig:
    """The options with the largest micro-batch that fits, if the job looks for it.

    A step has as many sequences as before. A resumed run keeps the micro-batch that it found at
    first, so that its sums are of the same terms.
    """
    if not options.auto_batch:
        return options
    if state.progress.batch_size is not None:
        return resize_micro_batch(options, state.progress.batch_size)
    student = loss.student

    def attempt(tried: TrainConfig) -> None:
        # Batches in the order of length are cut to their text: only shuffled ones show what the
        # longest needs.
        shuffled = tried.model_copy(update={"order": "shuffled"})
        batch = next(read_training_batches(setting.source, shuffled, range(1)))[0]
        reserve = estimate_optimizer_bytes(student, tried)
        modules = [student, *state.extras.values()]
        rehearse_step(lambda: loss.rehearse(batch), modules, reserve, loss.device)

    found = find_fitting_micro_batch(options, attempt)
    # Devices may have different amounts of free memory.
    found = resize_micro_batch(options, min(state.group.gather(found.batch_size)))
    if found != options:
        message = f"batch_size {options.batch_size} does not fit: {found.batch_size} is used."
        setting.monitor.emit("warning", message=message)
    state.progress.batch_size = found.batch_size
    return found
