"""Prepares a training run: student, loss and optimiser, restored from the newest checkpoint."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
import torch
from torch import nn
from transformers import PreTrainedModel

from cache.codec import Codec
from cache.rounding import UNKNOWN_ENTROPY
from kd.checks.slow_disk import DiskWatch
from kd.checks.watch import TrainingWatch
from kd.config.job import JobConfig
from kd.config.loss import LossConfig
from kd.config.train import TrainConfig
from kd.errors import ConfigError, Problem
from kd.loss.chunk_size import suits_kernels
from kd.loss.decoder import TargetDecoder
from kd.loss.features import FeatureLoss
from kd.loss.objective import Objective
from kd.loss.tail_control import TailControl
from kd.loss.temperature import TemperatureControl
from kd.memory.activation_checkpointing import checkpoint_activations, group_layers
from kd.memory.activation_offload import offload_activations
from kd.memory.auto_batch import find_fitting_micro_batch, rehearse_step
from kd.memory.parallel import ParallelStrategy, RankMemory, Split, choose_strategy, estimate_rank
from kd.memory.step_bytes import StepShape, resize_micro_batch
from kd.memory.step_memory import (
    describe_step,
    estimate_optimizer_bytes,
    measure_free_memory,
    reset_peak_memory,
)
from kd.models.attention.causality import require_causal
from kd.models.attention.interface import use_packed_attention, uses_packed_attention
from kd.models.attention.isolation import isolate_documents, warn_of_mask
from kd.models.layers import find_decoder_layers, is_hollow, require_context
from kd.models.lm_head import LMHead, find_student_head
from kd.models.precision import (
    Precision,
    ScalerWatch,
    make_scaler,
    pick_device,
    round_parameters,
    set_tf32,
)
from kd.models.products.float8 import multiply_in_float8, require_float8
from kd.models.routers import find_router_balance
from kd.models.stages.cut import cut, pick_own_layers, require_cuttable
from kd.optim.averaging import Averager
from kd.optim.optimizers import make_optimizer
from kd.parallel.cutting import compute_bubble
from kd.parallel.group import ALONE, Group
from kd.parallel.limits import needs_whole_gradients
from kd.parallel.stages import StageLoss, keep_owned
from kd.parallel.strategies import WholeLoss, replicate, shard
from kd.parallel.values import allocate, receive_values, require_same_parameters
from kd.progress import Monitor, ProgressMeter
from kd.text.batches import Source
from kd.text.steps.reading import read_training_batches
from kd.tracking.metrics import MetricsLog
from kd.tracking.scalars import SpeedMeter
from kd.tracking.stopwatch import Stopwatch, count_flops_per_token
from kd.tracking.trace import Trace
from kd.training import checkpoint
from kd.training.compiling import compile_student
from kd.training.lookahead import LookAhead
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
from kd.training.run import Run
from kd.training.saved.state import TrainingProgress, TrainState
from kd.training.step_loss import StepLoss

#: Sequences whose records are read to find out whether a cache holds entropies: it holds all of
#: them or none.
ENTROPY_SAMPLE = 8


def prepare(
    config: JobConfig,
    source: Source,
    student: PreTrainedModel,
    vocabulary: int,
    folder: Path,
    monitor: Monitor,
    trace: Trace,
    group: Group = ALONE,
) -> Run:
    """Make everything that training needs, and restore the newest checkpoint in ``folder``.

    Rank 0 brings the values of the student. The students of other ranks may be hollow
    (``kd.models.loading.build_hollow_student``). Raises ``ConfigError`` where the cache cannot
    serve the job, ``ModelError`` where the student cannot be trained as the job asks, and
    ``OutOfMemory`` where not even one sequence fits.
    """
    setting = _Setting.of(config, source, student, vocabulary, folder, monitor, group)
    lm_head, memory, strategy = _examine_student(setting)
    _change_layers(setting)
    if strategy != "fsdp":
        allocate(student, setting.device)
    compilation = compile_student(
        student, setting.options.compile, setting.device, strategy == "fsdp"
    )
    parts = _StepParts.of(setting, _make_loss(setting, lm_head.refresh(student)), strategy)
    state, identity = _restore_state(setting, parts)
    watch = TrainingWatch(config)
    watch.restore(state.progress.watch)
    flops = count_flops_per_token(student, lm_head.vocabulary, config.data.sequence_length)
    run = Run(
        config=config,
        options=_fit_micro_batch(setting, state, parts.loss),
        source=source,
        folder=folder,
        monitor=monitor,
        trace=trace,
        loss=parts.loss,
        loss_module=parts.loss_module,
        state=state,
        identity=identity,
        memory=memory,
        compilation=compilation,
        average=parts.average,
        look_ahead=_make_look_ahead(setting, parts.loss),
        watch=watch,
        disk_watch=DiskWatch(config, source.disk_reads),
        scale_watch=ScalerWatch(**state.progress.scale_watch),
        log=_open_log(setting, state.progress),
        meter=ProgressMeter(parts.loss.steps, "steps", done=state.progress.step),
        speed=SpeedMeter(flops, setting.device, setting.group.size),
    )
    reset_peak_memory(setting.device)
    return run


@dataclass(frozen=True)
class _Setting:
    """What a training is made of, its device, and the precision of its products.

    ``options`` are those of ``config``, with the micro-batches of a pipeline.
    """

    config: JobConfig
    options: TrainConfig
    source: Source
    student: PreTrainedModel
    vocabulary: int
    folder: Path
    monitor: Monitor
    group: Group
    device: torch.device
    precision: Precision

    @classmethod
    def of(
        cls,
        config: JobConfig,
        source: Source,
        student: PreTrainedModel,
        vocabulary: int,
        folder: Path,
        monitor: Monitor,
        group: Group,
    ) -> _Setting:
        """Choose device and precision, and bring the student to where it is at first."""
        options = config.require_train()
        if options.strategy == "pipeline" and not group.alone:
            group = replace(group, staged=True)
            options = cut_step(options)
        device = pick_device()
        precision = Precision.choose(options.precision, device)
        if options.fp8:
            require_float8(device)
        set_tf32(device, options.tf32)
        require_same_parameters(student, group)
        if not is_hollow(student):
            nn.Module.to(student, choose_first_place(options, device, group))
        return cls(
            config, options, source, student, vocabulary, folder, monitor, group, device, precision
        )


@dataclass(frozen=True)
class _StepParts:
    """What takes a step: the loss, the module that computes its gradients, and the optimiser."""

    loss: StepLoss
    loss_module: nn.Module
    optimizer: torch.optim.Optimizer
    average: Averager | None

    @classmethod
    def of(cls, setting: _Setting, loss: StepLoss, strategy: ParallelStrategy) -> _StepParts:
        """Make them in the one order that works: each refers to parameters of the one before."""
        student = setting.student
        options = setting.options
        # Before anything refers to a parameter: the parts of sharded parameters are new ones.
        loss_module = _make_loss_module(setting, loss, strategy)
        loss = replace(loss, lm_head=loss.live_head)
        projections = loss.features.parameters() if loss.features is not None else ()
        # Where the parameters are, which may be the host while the passes run on a GPU.
        optimizer = make_optimizer(student, projections, options, student.device)
        if setting.group.staged:
            # After the optimiser, whose groups are those of the whole student.
            loss_module = _cut_student(setting, loss, optimizer)
        average = Averager(student, options.ema_decay) if options.ema_decay is not None else None
        return cls(loss, loss_module, optimizer, average)


def _restore_state(setting: _Setting, parts: _StepParts) -> tuple[TrainState, str]:
    """Return the state of the newest checkpoint, or a new one, and what a checkpoint must match."""
    config = setting.config
    folder = setting.folder
    source = str(setting.source.identity)
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


# ---------------------------------------------------------------------- student, loss, optimiser


def choose_first_place(options: TrainConfig, device: torch.device, group: Group) -> torch.device:
    """Choose where rank 0 holds the student at first: all of it may not fit the device."""
    whole = group.alone or options.strategy == "ddp"
    return device if whole else torch.device("cpu")


def _examine_student(setting: _Setting) -> tuple[LMHead, RankMemory, ParallelStrategy]:
    """Check that the job can train its student, and choose the strategy.

    Rank 0 alone runs the student; the others do as it found. Returns the LM head, an estimate of
    the memory of a step on a rank, and the strategy.
    """
    config = setting.config
    student = setting.student
    group = setting.group
    options = config.require_train()
    length = config.data.sequence_length
    require_context(student, length)
    if group.staged:
        require_stages(config.loss, student, group.size)
    if group.leads:
        require_causal(student, length)
    lm_head = find_student_head(student, setting.vocabulary)
    # The weights of the other ranks have no values yet that could show it.
    scale, softcap = group.share((lm_head.scale, lm_head.softcap))
    lm_head = replace(lm_head, scale=scale, softcap=softcap)
    if config.data.packing:
        _isolate_documents_alike(student, group)
        warn_of_mask(student, length, setting.monitor)
    if options.is_pure_bfloat16:
        # The checks above need all bits of float32, and all that follows sees the rounded weights.
        round_parameters(student, torch.bfloat16)
    rooms = group.gather(_measure_room(student, setting.device))
    room = None if None in rooms else min(rooms)
    found = None
    if group.leads:
        in_kernels = suits_kernels(setting.source.codec, config.loss.divergence)
        kernels = setting.device.type == "cuda" and in_kernels
        sizes = (length, setting.vocabulary, setting.precision)
        step = describe_step(student, options, *sizes, kernels=kernels, device=setting.device)
        strategy = _choose_strategy(config, step, room, group)
        found = asdict(estimate_rank(step, Split(strategy, group.size))), strategy
    fields, strategy = group.share(found)
    memory = RankMemory(**fields)
    if warning := memory.warning(room):
        setting.monitor.emit("warning", message=warning)
    return lm_head, memory, strategy


def _isolate_documents_alike(student: PreTrainedModel, group: Group) -> None:
    if group.leads:
        isolate_documents(student)
    if group.share(uses_packed_attention(student)):
        use_packed_attention(student)


def _measure_room(student: PreTrainedModel, device: torch.device) -> int | None:
    """The bytes of ``device`` that are free, and those that the student takes there."""
    free = measure_free_memory(device)
    tensors = (*student.parameters(), *student.buffers())
    held = sum(each.nbytes for each in tensors if each.device.type == device.type)
    return None if free is None else free + held


def _choose_strategy(
    config: JobConfig, step: StepShape, room: int | None, group: Group
) -> ParallelStrategy:
    """Return the job's strategy, or what "auto" means for it."""
    asked = step.options.strategy
    if group.alone or asked == "single":
        return "single"
    if asked != "auto":
        return asked
    return "ddp" if needs_whole_gradients(config.loss) else choose_strategy(step, group.size, room)


def _change_layers(setting: _Setting) -> None:
    """Let the layers multiply in float8, and checkpoint or offload what they keep, as asked."""
    student = setting.student
    options = setting.options
    group = setting.group
    if options.fp8:
        multiply_in_float8(student)
    own = pick_own_layers(student, group.rank, group.size) if group.staged else None
    checkpoint_activations(student, options.gradient_checkpointing, own)
    if options.activation_offload:
        offload_activations(student)


def _make_loss(setting: _Setting, lm_head: LMHead) -> StepLoss:
    config = setting.config
    source = setting.source
    device = setting.device
    decoder = TargetDecoder.of(source, device)
    require_served(config, source.codec)
    require_entropies(config, source)
    steps = count_total_steps(setting.options, source.train_count)
    features = None
    if config.loss.features.weight > 0 and decoder.lm_head is not None:
        student_width = lm_head.weight.shape[1]
        teacher_width = decoder.lm_head.weight.shape[1]
        features = FeatureLoss.of(config.loss.features, student_width, teacher_width).to(device)
    return StepLoss(
        config=config.loss,
        student=setting.student,
        device=device,
        lm_head=lm_head,
        decoder=decoder,
        objective=Objective.of(config.loss),
        temperature=TemperatureControl.of(config.loss.temperature, steps),
        features=features,
        routers=find_router_balance(setting.student, config.loss.router_balance),
        precision=setting.precision,
        logits_chunk=setting.options.logits_chunk,
        steps=steps,
        clock=Stopwatch(device),
        control=_make_control(config.loss, source, lm_head, device),
    )


def _make_control(
    config: LossConfig, source: Source, lm_head: LMHead, device: torch.device
) -> TailControl | None:
    """Make the control variate; None where the records or the loss have no use for one.

    The cache's mean counts all positions alike, so it is of no use to a loss that does not.
    """
    useful = config.tail_control and config.entropy_weighting == 0.0
    arrays = source.tail_mean() if useful and lm_head.weight.requires_grad else None
    if arrays is None:
        return None
    dtype = torch.promote_types(lm_head.weight.dtype, torch.float32)
    return TailControl(arrays, lm_head.weight.shape[1], dtype).to(device)


def _make_loss_module(setting: _Setting, loss: StepLoss, strategy: ParallelStrategy) -> nn.Module:
    """Make all parameters one module, which exchanges gradients where there are several ranks."""
    options = setting.options
    group = setting.group
    parts = [loss.student] if loss.features is None else [loss.student, loss.features]
    whole = WholeLoss(parts)
    if group.staged:
        receive_values(whole, loss.device)
    if group.alone or group.staged:
        return whole
    phase = f"training on {group.size} devices ({strategy})"
    setting.monitor.emit("stage", stage="train", phase=phase)
    if strategy == "ddp":
        return replicate(whole)
    layers = find_decoder_layers(loss.student)
    together = group_layers(layers, options.gradient_checkpointing)
    taken = {layer for each in together for layer in each}
    groups = [*together, *([layer] for layer in layers if layer not in taken)]
    return shard(whole, groups, loss.precision.dtype, loss.device, group, options.fsdp_offload)


def cut_step(options: TrainConfig) -> TrainConfig:
    """Return ``options`` with the micro-batches that ``train.pipeline`` asks for."""
    count = options.pipeline.microbatches or options.gradient_accumulation_steps
    return resize_micro_batch(options, options.sequences_per_step // count)


def _cut_student(setting: _Setting, loss: StepLoss, optimizer: torch.optim.Optimizer) -> StageLoss:
    """Leave one stage of the student on this rank, and its parameters alone in ``optimizer``."""
    options = setting.options
    group = setting.group
    monitor = setting.monitor
    stage = cut(loss.student, group.rank, group.size, loss.precision)
    keep_owned(optimizer, stage.owned)
    bubble = compute_bubble(group.size, options.gradient_accumulation_steps)
    phase = f"training on {group.size} devices (pipeline; each waits for {bubble:.0%} of a step)"
    monitor.emit("stage", stage="train", phase=phase)
    if options.gradient_accumulation_steps < group.size:
        message = (
            f"A step has {options.gradient_accumulation_steps} micro-batches for {group.size} "
            f"stages, so that each stage waits for {bubble:.0%} of the step. Raise "
            "train.pipeline.microbatches."
        )
        monitor.emit("warning", message=message)
    return StageLoss(stage, group, options.pipeline.schedule, loss.device)


def _make_state(setting: _Setting, parts: _StepParts, schedule_began: int) -> TrainState:
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
        scaler=make_scaler(setting.options.initial_loss_scale, loss.precision),
        progress=TrainingProgress(),
        extras={name: module for name, module in extras.items() if module is not None},
        group=setting.group,
    )


def _make_look_ahead(setting: _Setting, loss: StepLoss) -> LookAhead | None:
    if not loss.temperature.follows_held_out:
        return None
    what = (loss.student, loss.lm_head, setting.source, loss.decoder)
    return LookAhead(*what, setting.options.batch_size, loss.precision, setting.device)


def count_total_steps(options: TrainConfig, sequences: int) -> int:
    """Optimiser steps of the whole run, for ``sequences`` training sequences."""
    steps = options.count_steps(sequences)
    assert steps is not None, "TrainConfig requires max_steps or epochs"
    return steps


# ---------------------------------------------------------------------- requirements of the loss


def require_served(config: JobConfig, codec: Codec | None) -> None:
    """Raise ``ConfigError`` if records of ``codec`` cannot serve the loss at each temperature."""
    if not config.needs_cache or codec is None:
        return
    if problems := config.loss.list_unserved(codec.profile, codec.temperatures):
        raise ConfigError(problems)


def require_entropies(config: JobConfig, source: Source) -> None:
    """Raise ``ConfigError`` if the loss needs the teacher's entropies and the records hold none."""
    if config.loss.entropy_weighting == 0.0 or source.codec is None:
        return
    _, records = source.read(np.arange(min(source.train_count, ENTROPY_SAMPLE)))
    if records is not None and len(records) and (records["entropy"] == UNKNOWN_ENTROPY).all():
        detail = "it needs the teacher's entropy, which the records of this cache do not hold."
        remedy = "Set it to 0, or capture with a local teacher."
        raise ConfigError([Problem("/loss/entropy_weighting", detail, remedy)])


def require_stages(config: LossConfig, student: PreTrainedModel, stages: int) -> None:
    """Raise ``ModelError`` or ``ConfigError`` where ``student`` cannot be trained in ``stages``.

    It may be hollow. What only its numbers show is found when it is cut.
    """
    require_cuttable(student, stages)
    if find_router_balance(student, config.router_balance) is not None:
        detail = (
            "train.strategy is pipeline, but no stage sees the routers of all layers of a "
            f"{type(student).__name__}."
        )
        remedy = "Set it to 0, or train.strategy to ddp or fsdp."
        raise ConfigError([Problem("/loss/router_balance", detail, remedy)])


# ---------------------------------------------------------------------- restored state


def _fit_micro_batch(setting: _Setting, state: TrainState, loss: StepLoss) -> TrainConfig:
    """The options with the largest micro-batch that fits, if the job looks for it.

    A step has as many sequences as before. A resumed run keeps the micro-batch that it found at
    first, so that its sums are of the same terms.
    """
    options = setting.options
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
    found = resize_micro_batch(options, state.group.find_least(found.batch_size))
    if found != options:
        message = f"batch_size {options.batch_size} does not fit: {found.batch_size} is used."
        setting.monitor.emit("warning", message=message)
    state.progress.batch_size = found.batch_size
    return found


def _open_log(setting: _Setting, progress: TrainingProgress) -> MetricsLog:
    """metrics.jsonl, with the lines up to the restored step; on other ranks no file."""
    # A run that was stopped before its first evaluation makes that evaluation again: its history is
    # empty.
    last_step = progress.step if progress.first_evaluation is not None else -1
    path = setting.folder / "metrics.jsonl" if setting.group.leads else None
    return MetricsLog(path, setting.monitor, last_step)
