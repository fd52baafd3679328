"""Ways to train a job's student on some devices, the best first: ``kd plan``.

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
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from kd.capture.codec_identity import make_codec_identity
from kd.config.job import JobConfig
from kd.config.train import Checkpointing, TrainConfig
from kd.errors import ConfigError, Problem
from kd.forecast.device_names import DeviceGroup
from kd.forecast.operations import LAUNCH_SECONDS
from kd.forecast.text_size import find_text_size, require_steps, require_training
from kd.loss.chunk_size import (
    PLAIN_LOGIT_BYTES,
    choose_cpu_chunk_positions,
    choose_gpu_chunk_positions,
    suits_kernels,
)
from kd.memory.auto_batch import list_remedies
from kd.memory.devices import CUDA_CONTEXT, DeviceRates
from kd.memory.model_work import ModelWork, count_model_work, count_weight_bytes
from kd.memory.parallel import (
    ParallelStrategy,
    RankMemory,
    Split,
    count_traffic,
    count_usable,
    count_waiting,
    estimate_rank,
    list_strategies,
)
from kd.memory.step_bytes import StepShape, StudentShape, compute_group_sizes
from kd.memory.step_memory import describe_student
from kd.models.layers import find_decoder_layers
from kd.models.loading import outline_teacher, require_trainable_student
from kd.models.teacher_files import TeacherFiles
from kd.models.vocabulary import choose_student_vocabulary
from kd.stages.source import load_student_tokenizer

#: Share of a device's rate that a training is expected to reach. Dense transformers are trained at
#: 0.3 to 0.5 of it (PaLM: 0.46, Chowdhery et al. 2022).
ASSUMED_UTILIZATION = 0.4
#: Operations that a micro-batch of a training launches for each layer, forward and backward, and
#: beside its layers; and those of a capture beside the layers: counted in docs/benchmarks/gpu.md.
_LAYER_LAUNCHES = 99
_PASS_LAUNCHES = 260
_CAPTURE_LAUNCHES = 129
_CHECKPOINTING: tuple[Checkpointing, ...] = ("none", "sqrt", "full")
#: Bytes of a number in each precision of train.precision.
_ITEM_BYTES = {"fp32": 4, "bf16": 2, "bf16_pure": 2, "fp16": 2}
#: Steps that differ by less are as fast: the simpler setting comes first.
_EQUAL_TIMES = 1.02


@dataclass(frozen=True)
class Strategy:
    """One way to train: its settings, what its rank that needs most holds, and its time.

    ``ranks`` are the devices that it uses. ``seconds`` are those of the training without its
    evaluations.
    """

    strategy: ParallelStrategy
    ranks: int
    batch_size: int
    gradient_accumulation_steps: int
    gradient_checkpointing: Checkpointing
    precision: str
    memory: RankMemory
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
    measured: bool
    sequences_per_step: int
    steps: int
    tokens: int
    parameters: int
    flops: float
    strategies: tuple[Strategy, ...]
    least: Strategy
    remedies: tuple[str, ...]
    capture: CaptureTime | None

    def to_json(self) -> dict[str, Any]:
        """Return the plan as JSON values."""
        return asdict(self)


def plan_job(
    config: JobConfig,
    root: Path,
    home: Path,
    devices: DeviceGroup,
    tokens: int | None = None,
    price: float | None = None,
) -> TrainingPlan:
    """Plan the training of ``config`` on ``devices``; ``price`` is that of an hour of one device.

    ``tokens`` with a target replace those of the job. Raises ``ConfigError`` for a job that trains
    nothing, or whose step cannot be split over the devices, and what building the student raises.
    """
    require_training(config)
    _require_even_split(config.require_train(), devices)
    text = find_text_size(config, root, home)
    per_step = config.require_train().sequences_per_step * text.targets
    steps = require_steps(config, text) if tokens is None else math.ceil(tokens / per_step)
    training = _Training.of(config, text.targets, steps)
    found = [
        training.count(devices, price, changed, strategy, ranks)
        for changed, strategy, ranks in _list_settings(training.options, devices)
    ]
    least = min(found, key=lambda each: each.memory_bytes)
    count = round(steps * per_step)
    return TrainingPlan(
        devices=devices.describe(),
        device_bytes=devices.rates.memory,
        usable_bytes=count_usable(devices.rates.memory),
        measured=devices.measured,
        sequences_per_step=training.options.sequences_per_step,
        steps=steps,
        tokens=count,
        parameters=training.student.numbers,
        flops=count * training.work.count_training(training.length),
        strategies=tuple(_pick_best(found, training.options)),
        least=least,
        remedies=() if least.fits else tuple(list_remedies(training.options)),
        capture=_time_capture(config, devices, count, price),
    )


def _require_even_split(options: TrainConfig, devices: DeviceGroup) -> None:
    """Raise ``ConfigError`` for a step whose sequences the devices cannot share evenly."""
    if options.sequences_per_step % devices.count:
        raise ConfigError([
            Problem(
                "/devices",
                f"a step of {options.sequences_per_step} sequences cannot be split evenly over "
                f"{devices.count} devices.",
                "Ask for a number of devices that divides the step, or raise train.batch_size or "
                "train.gradient_accumulation_steps.",
            )
        ])  # fmt: skip


def _time_capture(
    config: JobConfig, devices: DeviceGroup, tokens: int, price: float | None
) -> CaptureTime | None:
    """Time a capture of ``tokens`` by 2 N D; None without a capture by a local teacher."""
    teacher = config.captured_teacher
    if teacher is None or not teacher.is_local:
        return None
    model = outline_teacher(TeacherFiles.resolve(teacher, whole=False), torch.bfloat16)
    vocabulary = model.get_output_embeddings().weight.shape[0]
    flops = tokens * count_model_work(model, vocabulary).count_forward(config.data.sequence_length)
    rate = ASSUMED_UTILIZATION * devices.rates.find_rate("bf16", tf32=False)
    micro_batches = tokens / (teacher.batch_size * config.data.sequence_length)
    launches = len(find_decoder_layers(model)) * _LAYER_LAUNCHES / 3 + _CAPTURE_LAUNCHES
    least = micro_batches * launches * LAUNCH_SECONDS
    seconds = max(flops / rate, least) / devices.count
    return CaptureTime(
        count_weight_bytes(model, torch.bfloat16.itemsize, teacher.quantization),
        round(seconds, 1),
        _compute_cost(seconds, devices.count, price),
    )


# ---------------------------------------------------------------------- settings


def _list_settings(
    options: TrainConfig, devices: DeviceGroup
) -> Iterator[tuple[TrainConfig, ParallelStrategy, int]]:
    """The job with each micro-batch and checkpointing, on one device and on all.

    Options are those of a rank.
    """
    sequences = options.sequences_per_step
    for ranks in dict.fromkeys((1, devices.count)):
        own = sequences // ranks
        batches = [each for each in _list_micro_batches(options) if own % each == 0]
        for batch in batches:
            for how in dict.fromkeys((options.gradient_checkpointing, *_CHECKPOINTING)):
                changed = options.model_copy(
                    update={
                        "batch_size": batch,
                        "gradient_accumulation_steps": own // batch,
                        "gradient_checkpointing": how,
                    }
                )
                for strategy in list_strategies(changed, ranks):
                    yield changed, strategy, ranks


def _list_micro_batches(options: TrainConfig) -> list[int]:
    """The job's micro-batch, its halves, and its doubles."""
    sequences = options.sequences_per_step
    doubles = [options.batch_size << n for n in range(sequences.bit_length())]
    halves = [options.batch_size >> n for n in range(1, options.batch_size.bit_length())]
    return [each for each in (*doubles, *halves) if each <= sequences]


def _pick_best(found: list[Strategy], options: TrainConfig) -> Iterator[Strategy]:
    """The fastest way of each strategy that fits, the fastest first."""

    def rank(each: Strategy) -> tuple[Any, ...]:
        pace = round(math.log(each.step_seconds) / math.log(_EQUAL_TIMES))
        kept = each.gradient_checkpointing == options.gradient_checkpointing
        return pace, each.ranks, each.strategy == "fsdp", not kept, -each.batch_size

    seen = set()
    for each in sorted((each for each in found if each.fits), key=rank):
        if (each.strategy, each.ranks) not in seen:
            seen.add((each.strategy, each.ranks))
            yield each


# ---------------------------------------------------------------------- bytes and seconds


@dataclass(frozen=True)
class _Training:
    """A training: its student, what a token costs in it, and its length in optimiser steps.

    ``targets`` are the positions of a sequence that have one.
    """

    student: StudentShape
    work: ModelWork
    options: TrainConfig
    vocabulary: int
    length: int
    targets: float
    steps: int
    in_kernels: bool

    @classmethod
    def of(cls, config: JobConfig, targets: float, steps: int) -> _Training:
        """Build the student of a job without its weights."""
        assert config.student is not None, "a job that trains has a student"
        tokenizer = load_student_tokenizer(config)
        length = config.data.sequence_length
        teacher = config.teacher_files
        student = require_trainable_student(config.student, tokenizer, length, teacher)
        vocabulary = choose_student_vocabulary(tokenizer, config.student, teacher)
        codec = make_codec_identity(config.cache).record_codec(vocabulary)
        return cls(
            student=describe_student(student),
            work=count_model_work(student, vocabulary),
            options=config.require_train(),
            vocabulary=vocabulary,
            length=length,
            targets=targets,
            steps=steps,
            in_kernels=suits_kernels(codec if config.needs_cache else None, config.loss.divergence),
        )

    def count(
        self,
        devices: DeviceGroup,
        price: float | None,
        options: TrainConfig,
        strategy: ParallelStrategy,
        ranks: int,
    ) -> Strategy:
        """Count one way to train; ``options`` are those of one of its ``ranks``."""
        split = Split(strategy, ranks)
        precision = self._choose_precision(devices)
        options = options.model_copy(update={"precision": precision})
        step = self._describe_step(options, split, devices)
        memory = estimate_rank(step, split)
        beside = CUDA_CONTEXT if devices.is_gpu else memory.offloaded
        work = self._time_work(options, devices.rates)
        micro_batches = options.gradient_accumulation_steps
        waiting = count_waiting(
            work, count_traffic(step, split), split, micro_batches, devices.rates
        )
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
            memory_bytes=memory.total + beside,
            fits=memory.total + beside <= count_usable(devices.rates.memory),
            step_seconds=round(work + waiting, 6),
            waiting_seconds=round(waiting, 6),
            seconds=round(seconds, 1),
            cost=_compute_cost(seconds, ranks, price),
        )

    def _choose_precision(self, devices: DeviceGroup) -> str:
        """The job's precision, or what "auto" means on the devices."""
        if self.options.precision != "auto":
            return self.options.precision
        if not devices.is_gpu:
            return "fp32"
        return "bf16" if devices.rates.has_bfloat16 else "fp16"

    def _describe_step(self, options: TrainConfig, split: Split, devices: DeviceGroup) -> StepShape:
        """Describe a step, with as many logits at once as what is free has room for."""
        shape = StepShape(
            student=self.student,
            options=options,
            length=self.length,
            vocabulary=self.vocabulary,
            item=_ITEM_BYTES[options.precision],
            chunk=options.logits_chunk or 1,
            kernels=devices.is_gpu and self.in_kernels,
        )
        if options.logits_chunk is not None:
            return shape
        if not devices.is_gpu:
            return replace(shape, chunk=choose_cpu_chunk_positions(self.vocabulary))
        free = max(devices.rates.memory - CUDA_CONTEXT - estimate_rank(shape, split).total, 0)
        logit_bytes = shape.item if shape.kernels else PLAIN_LOGIT_BYTES
        chunk = choose_gpu_chunk_positions(self.vocabulary, free, logit_bytes)
        return replace(shape, chunk=chunk)

    def _time_work(self, options: TrainConfig, rates: DeviceRates) -> float:
        """Seconds of the work of a rank in one step."""
        count = self.student.layer_count
        recomputed = sum(compute_group_sizes(count, options.gradient_checkpointing)) / count
        tokens = options.batch_size * self.length
        dtype = "fp32" if options.precision == "fp32" else "bf16"
        rate = ASSUMED_UTILIZATION * rates.find_rate(dtype, options.tf32)
        products = tokens * self.work.count_training(self.length, recomputed) / rate
        launches = count * _LAYER_LAUNCHES * (1 + recomputed / 3) + _PASS_LAUNCHES
        least = max(products, launches * LAUNCH_SECONDS)
        return options.gradient_accumulation_steps * least


def _compute_cost(seconds: float, devices: int, price: float | None) -> float | None:
    return None if price is None else round(seconds / 3600 * devices * price, 4)
