"""Ways to train a job's student on some GPUs, the best first: ``kd plan``.

Nothing runs, and no weight is read. The bytes of a rank are those of ``kd.memory.step_bytes`` and
``kd.memory.parallel``. The time of a step on N ranks is

    work      6 N D FLOP, attention and LM head apart (``kd.memory.model_work``): each rank does a
              part of the step's sequences, at a share of the maker's rate
    launches  the least that work takes: the host starts the operations of a pass one by one
    waiting   for links, as far as the work does not hide what is sent

and a capture takes 2 N D FLOP of the teacher. The sequences of a step stay as the job says: with S
of them and micro-batches of b on N ranks, each rank does S / (b N) forward passes a step.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from kd.capture.codec_identity import make_codec_identity
from kd.config.job import JobConfig
from kd.config.train import SHARDED, Checkpointing, TrainConfig
from kd.errors import ConfigError, Problem
from kd.forecast.length import find_length
from kd.loss.chunk_size import PLAIN_LOGIT_BYTES, choose_gpu_chunk_positions, suits_kernels
from kd.memory import parallel
from kd.memory.auto_batch import list_remedies
from kd.memory.devices import (
    CUDA_CONTEXT,
    DEVICE_KINDS,
    HOST_DEVICES,
    LAUNCH_SECONDS,
    DeviceRates,
)
from kd.memory.model_work import ModelWork, count_model_work, count_weight_bytes
from kd.memory.step_bytes import StepMemory, StepShape
from kd.memory.step_memory import describe_student
from kd.models.layers import find_decoder_layers
from kd.models.loading import outline_teacher, require_trainable_student
from kd.models.teacher_files import TeacherFiles
from kd.models.vocabulary import choose_student_vocabulary
from kd.stages.source import load_student_tokenizer

#: Share of a device's rate that a training is expected to reach. Dense transformers are trained at
#: 0.3 to 0.5 of it (PaLM: 0.46, Chowdhery et al. 2022).
ASSUMED_UTILIZATION = 0.4
#: Operations that a training launches, counted in docs/benchmarks/gpu.md: in a micro-batch for each
#: layer, forward and backward, and beside its layers, and in a step beside its micro-batches. Those
#: of a capture are beside its layers.
LAYER_LAUNCHES = 99
PASS_LAUNCHES = 260
STEP_LAUNCHES = 21
CAPTURE_LAUNCHES = 129
_CHECKPOINTING: tuple[Checkpointing, ...] = ("none", "sqrt", "full")
#: Bytes of a number in each precision of train.precision.
_ITEM_BYTES = {"fp32": 4, "bf16": 2, "bf16_pure": 2, "fp16": 2}
#: Steps that differ by less are as fast: the simpler setting comes first.
_EQUAL_TIMES = 1.02


@dataclass(frozen=True)
class DeviceGroup:
    """``count`` GPUs of the kind ``rates``."""

    rates: DeviceRates
    count: int

    @classmethod
    def parse(cls, text: str) -> DeviceGroup:
        """Read a name such as 8xh100; ``ConfigError`` for an unknown kind or number."""
        found = re.fullmatch(r"(?:([1-9]\d{0,4})x)?(\S+)", text.strip().lower())
        if found is None or found[2] not in DEVICE_KINDS:
            detail = f"{text!r} is no number and kind of devices, such as 8xh100."
            remedy = f"The kinds are {', '.join(DEVICE_KINDS)}."
            raise ConfigError([Problem("/devices", detail, remedy)])
        return cls(DEVICE_KINDS[found[2]], int(found[1] or 1))


@dataclass(frozen=True)
class Strategy:
    """One way to train: its settings, what its rank that needs most holds, and its time.

    ``ranks`` are the devices that it uses. ``seconds`` are those of the training without its
    evaluations.
    """

    strategy: parallel.ParallelStrategy
    ranks: int
    batch_size: int
    gradient_accumulation_steps: int
    gradient_checkpointing: Checkpointing
    precision: str
    memory: StepMemory
    memory_bytes: int
    fits: bool
    step_seconds: float
    waiting_seconds: float
    seconds: float
    cost: float | None


@dataclass(frozen=True)
class CaptureTime:
    """The teacher of a capture on all devices: its weights, and the time and cost of 2 N D FLOP."""

    weight_bytes: int
    seconds: float
    cost: float | None


@dataclass(frozen=True)
class TrainingPlan:
    """Ways to train on some devices, the best first; where none fits, ``least`` needs least.

    ``flops`` are those of the whole training, and ``remedies`` the settings that need less memory.
    """

    devices: str
    device_bytes: int
    usable_bytes: int
    sequences_per_step: int
    steps: int
    tokens: int
    parameters: int
    flops: float
    strategies: tuple[Strategy, ...]
    least: Strategy
    remedies: tuple[str, ...]
    capture: CaptureTime | None


def plan_job(
    config: JobConfig,
    root: Path,
    home: Path,
    devices: DeviceGroup,
    tokens: int | None = None,
    price: float | None = None,
) -> TrainingPlan:
    """Plan the training of ``config`` on ``devices``; ``price`` is that of an hour of one device.

    ``tokens`` with a target replace those of the job. Raises ``ConfigError`` as ``find_length``
    does, and if the step cannot be split over the devices, and what building the student raises.
    """
    steps, per_step = find_length(config, root, home, tokens)
    options = config.require_train()
    if options.sequences_per_step % devices.count:
        detail = (
            f"a step of {options.sequences_per_step} sequences cannot be split evenly over "
            f"{devices.count} devices."
        )
        remedy = (
            "Ask for a number of devices that divides the step, or raise train.batch_size or "
            "train.gradient_accumulation_steps."
        )
        raise ConfigError([Problem("/devices", detail, remedy)])
    training = _Training.of(config, devices.rates, steps, price)
    found = [training.count(*setting) for setting in _list_settings(options, devices.count)]
    least = min(found, key=lambda each: each.memory_bytes)
    count = round(steps * per_step)
    return TrainingPlan(
        devices=f"{devices.count} x {devices.rates.name}",
        device_bytes=devices.rates.memory,
        usable_bytes=parallel.count_usable(devices.rates.memory),
        sequences_per_step=options.sequences_per_step,
        steps=steps,
        tokens=count,
        parameters=training.step.student.numbers,
        flops=count * training.work.count_training(config.data.sequence_length),
        strategies=tuple(_pick_best(found, options)),
        least=least,
        remedies=() if least.fits else tuple(list_remedies(options)),
        capture=_time_capture(config, devices, count, price),
    )


def _time_capture(
    config: JobConfig, devices: DeviceGroup, tokens: int, price: float | None
) -> CaptureTime | None:
    """Time a capture of ``tokens`` by 2 N D; None without a capture by a local teacher.

    With a context the teacher reads as much at once as it may, for each sequence of the student's.
    """
    teacher = config.captured_teacher
    if teacher is None or not teacher.is_local:
        return None
    model = outline_teacher(TeacherFiles.resolve(teacher, whole=False), torch.bfloat16)
    vocabulary = model.get_output_embeddings().weight.shape[0]
    sequences = tokens / config.data.sequence_length
    read = teacher.count_read(config.data.sequence_length)
    flops = sequences * read * count_model_work(model, vocabulary).count_forward(read)
    rate = ASSUMED_UTILIZATION * devices.rates.half
    micro_batches = sequences / teacher.batch_size
    launches = len(find_decoder_layers(model)) * LAYER_LAUNCHES / 3 + CAPTURE_LAUNCHES
    seconds = max(flops / rate, micro_batches * launches * LAUNCH_SECONDS) / devices.count
    held = count_weight_bytes(model, torch.bfloat16.itemsize, teacher.quantization)
    return CaptureTime(held, round(seconds, 3), _compute_cost(seconds, devices.count, price))


def _list_settings(
    options: TrainConfig, count: int
) -> Iterator[tuple[TrainConfig, parallel.ParallelStrategy, int]]:
    """The job with each micro-batch and checkpointing, on one device and on all.

    Options are those of a rank. Micro-batches are the job's, its halves and its doubles.
    """
    batch, sequences = options.batch_size, options.sequences_per_step
    sizes = [batch << n for n in range(sequences.bit_length())]
    sizes += [batch >> n for n in range(1, batch.bit_length())]
    for ranks in dict.fromkeys((1, count)):
        own = sequences // ranks
        for size in (each for each in sizes if own % each == 0):
            for how in dict.fromkeys((options.gradient_checkpointing, *_CHECKPOINTING)):
                update = {
                    "batch_size": size,
                    "gradient_accumulation_steps": own // size,
                    "gradient_checkpointing": how,
                }
                changed = options.model_copy(update=update)
                per_host = None if ranks % HOST_DEVICES else HOST_DEVICES
                for strategy in parallel.list_strategies(changed, ranks, per_host):
                    yield changed, strategy, ranks


def _pick_best(found: list[Strategy], options: TrainConfig) -> Iterator[Strategy]:
    """The fastest way of each strategy that fits, the fastest first."""

    def rank(each: Strategy) -> tuple[Any, ...]:
        pace = round(math.log(each.step_seconds) / math.log(_EQUAL_TIMES))
        kept = each.gradient_checkpointing == options.gradient_checkpointing
        return pace, each.ranks, each.strategy in SHARDED, not kept, -each.batch_size

    seen = set()
    for each in sorted((each for each in found if each.fits), key=rank):
        if (each.strategy, each.ranks) not in seen:
            seen.add((each.strategy, each.ranks))
            yield each


@dataclass(frozen=True)
class _Training:
    """A training on one kind of device: its ``step`` on one of them, and what a token costs."""

    step: StepShape
    work: ModelWork
    rates: DeviceRates
    steps: int
    price: float | None

    @classmethod
    def of(
        cls, config: JobConfig, rates: DeviceRates, steps: int, price: float | None
    ) -> _Training:
        """Build the student of a job without its weights."""
        assert config.student is not None, "a job that trains has a student"
        tokenizer = load_student_tokenizer(config)
        length = config.data.sequence_length
        teacher = config.teacher_files
        student = require_trainable_student(config.student, tokenizer, length, teacher)
        vocabulary = choose_student_vocabulary(tokenizer, config.student, teacher)
        codec = make_codec_identity(config.cache, config.keeps_entropies).record_codec(vocabulary)
        options = config.require_train()
        if options.precision == "auto":
            precision = "bf16" if rates.has_bfloat16 else "fp16"
            options = options.model_copy(update={"precision": precision})
        step = StepShape(
            student=describe_student(student),
            options=options,
            length=length,
            vocabulary=vocabulary,
            item=_ITEM_BYTES[options.precision],
            chunk=options.logits_chunk or 1,
            kernels=suits_kernels(codec if config.needs_cache else None, config.loss.divergence),
            looks_ahead=config.loss.looks_ahead,
        )
        return cls(step, count_model_work(student, vocabulary), rates, steps, price)

    def count(
        self, options: TrainConfig, strategy: parallel.ParallelStrategy, ranks: int
    ) -> Strategy:
        """Count one way to train; ``options`` are those of one of its ``ranks``."""
        precision = self.step.options.precision
        parts = HOST_DEVICES if strategy == "hsdp" else ranks
        step = replace(self.step, options=options.model_copy(update={"precision": precision}))
        if options.logits_chunk is None:
            # As many logits at once as what is free has room for.
            held = parallel.estimate_rank(step, strategy, parts).total + CUDA_CONTEXT
            free = max(self.rates.memory - held, 0)
            logit_bytes = step.item if step.kernels else PLAIN_LOGIT_BYTES
            chunk = choose_gpu_chunk_positions(step.vocabulary, free, logit_bytes)
            step = replace(step, chunk=chunk)
        memory = parallel.estimate_rank(step, strategy, parts)
        work = self._time_work(step)
        micro_batches = options.gradient_accumulation_steps
        traffic = parallel.count_traffic(step, strategy, parts)
        between = parallel.count_between_hosts(step, ranks // parts)
        sent = (traffic, strategy, parts, micro_batches, self.rates, between)
        waiting = parallel.count_waiting(work, *sent)
        seconds = self.steps * (work + waiting)
        return Strategy(
            strategy=strategy,
            ranks=ranks,
            batch_size=options.batch_size,
            # As the job counts them: the forward passes of all ranks.
            gradient_accumulation_steps=micro_batches * ranks,
            gradient_checkpointing=options.gradient_checkpointing,
            precision=precision,
            memory=memory,
            memory_bytes=memory.total + CUDA_CONTEXT,
            fits=memory.total + CUDA_CONTEXT <= parallel.count_usable(self.rates.memory),
            step_seconds=round(work + waiting, 6),
            waiting_seconds=round(waiting, 6),
            seconds=round(seconds, 3),
            cost=_compute_cost(seconds, ranks, self.price),
        )

    def _time_work(self, step: StepShape) -> float:
        """Seconds of the work of a rank in one step."""
        options = step.options
        layers = step.student.layers
        recomputed = sum(step.groups) / layers
        dtype = "fp32" if options.precision == "fp32" else "bf16"
        rate = ASSUMED_UTILIZATION * self.rates.find_rate(dtype, tf32=True)
        tokens = options.batch_size * step.length
        products = tokens * self.work.count_training(step.length, recomputed) / rate
        launches = layers * LAYER_LAUNCHES * (1 + recomputed / 3) + PASS_LAUNCHES
        passes = options.gradient_accumulation_steps * max(products, launches * LAUNCH_SECONDS)
        return passes + STEP_LAUNCHES * LAUNCH_SECONDS


def _compute_cost(seconds: float, devices: int, price: float | None) -> float | None:
    return None if price is None else round(seconds / 3600 * devices * price, 4)
