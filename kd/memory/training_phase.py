"""A training as a phase of a job on any device: memory of a step, FLOP and bytes. Imports no torch.

``kd.memory.phases.measure_training`` makes one from a student, ``kd.planning.students`` from the
shapes in a model's files. ``kd estimate`` and ``kd plan`` both count with it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from kd.config.train import TrainConfig
from kd.loss.chunk_size import (
    PLAIN_LOGIT_BYTES,
    choose_cpu_chunk_positions,
    choose_gpu_chunk_positions,
)
from kd.memory.devices import CUDA_CONTEXT, DeviceRates
from kd.memory.parallel import (
    RankMemory,
    Split,
    StepTime,
    count_traffic,
    estimate_rank,
    estimate_step_time,
)
from kd.memory.step_bytes import (
    SavedBytesFit,
    StepMemoryEstimate,
    StepShape,
    StudentShape,
    compute_group_sizes,
)
from kd.memory.work import ASSUMED_UTILIZATION, ModelWork, Pass, Work, count_forward_bytes
from kd.optim.state_size import count_trained_bytes

#: Copies of a chunk of logits in a pass without gradients.
_LOGIT_COPIES = 2
#: Bytes of a number in each precision of train.precision.
ITEM_BYTES = {"fp32": 4, "bf16": 2, "bf16_pure": 2, "fp16": 2}
#: A byte between two processes of a host is copied into a socket and out of it, and each copy reads
#: and writes it.
_SOCKET_PASSES = 4
#: One rank does the whole step.
WHOLE = Split()


@dataclass(frozen=True)
class PhaseMemory:
    """Bytes at the peak of a phase.

    ``loader`` are decoded or unsealed records, which lie on the host, and ``process`` is what the
    process takes anyway: its libraries, or on a GPU the CUDA context.
    """

    weights: int
    gradients: int
    optimizer: int
    activations: int
    head: int
    loader: int
    process: int

    def count_device_bytes(self, is_gpu: bool) -> int:
        """The bytes that the device must have: a GPU does not hold the loader's."""
        return sum(asdict(self).values()) - (self.loader if is_gpu else 0)

    @classmethod
    def of_step(cls, step: StepMemoryEstimate, loader: int, process: int) -> PhaseMemory:
        """Add what lies beside a training step."""
        return cls(**asdict(step), loader=loader, process=process)


@dataclass(frozen=True)
class Place:
    """A device that a job is forecast for.

    ``process`` are the bytes that a process takes of it anyway, and ``auto`` is what the precision
    "auto" means on it. ``is_timed`` says that steps are timed on it; the times of another device
    are expected and not measured.
    """

    rates: DeviceRates
    is_gpu: bool
    process: int
    auto: str
    is_timed: bool

    @classmethod
    def named(cls, kind: DeviceRates) -> Place:
        """A GPU that is not at hand."""
        auto = "bf16" if kind.has_bfloat16 else "fp16"
        return cls(kind, True, CUDA_CONTEXT, auto, is_timed=False)

    def divide(self, count: int) -> Place:
        """One of ``count`` processes here: a GPU each, or an equal part of the processor."""
        if self.is_gpu or count == 1:
            return self
        rates = self.rates
        part = replace(
            rates,
            memory=rates.memory // count,
            half=rates.half / count,
            single=rates.single / count,
            tf32=rates.tf32 / count,
            bandwidth=rates.bandwidth / count,
            peer=rates.bandwidth / _SOCKET_PASSES / count,
        )
        return replace(self, rates=part)

    def choose_precision(self, name: str) -> str:
        """The precision that "auto" means here."""
        return self.auto if name == "auto" else name

    def choose_chunk(self, vocabulary: int, used: int, logit_bytes: int = PLAIN_LOGIT_BYTES) -> int:
        """Positions whose logits are in memory at once, where ``used`` bytes are in use."""
        if not self.is_gpu:
            return choose_cpu_chunk_positions(vocabulary)
        free = max(self.rates.memory - used, 0)
        return choose_gpu_chunk_positions(vocabulary, free, logit_bytes)


@dataclass(frozen=True)
class RankForecast:
    """A step of a training on one of its ranks: bytes, and time.

    ``memory`` is that of the rank that needs most, and ``needed`` all bytes of its device.
    ``micro_batches`` are its forward passes in a step, ``sent`` the bytes that it sends.
    """

    memory: RankMemory
    needed: int
    micro_batches: int
    sent: float
    time: StepTime


@dataclass(frozen=True)
class TrainingPhase:
    """A training: its student, its text, and what autograd keeps of it in each precision."""

    student: StudentShape
    options: TrainConfig
    vocabulary: int
    length: int
    targets: float
    steps: int
    #: Passes over the held-out sequences, and their number.
    evaluations: int
    held_out: int
    loader: int
    saved: Mapping[str, SavedBytesFit]
    model: ModelWork
    #: Whether the kernels of a GPU can compute the loss.
    suits_kernels: bool = False

    def change(self, **settings: Any) -> TrainingPhase:
        """Return this training with ``settings`` in place of those of the job's section train."""
        return replace(self, options=self.options.model_copy(update=settings))

    def estimate_step(self, place: Place) -> StepMemoryEstimate:
        """The bytes of a training step on ``place``."""
        return self.describe_step(place).estimate()

    def describe_step(self, place: Place, split: Split = WHOLE) -> StepShape:
        """Describe a step on ``place``, with as many logits at once as its memory leaves room for.

        The chunk of a GPU follows what is free beside a step with logits of one position, on a
        rank of ``split``.
        """
        shape = StepShape(
            student=self.student,
            options=self.options,
            length=self.length,
            vocabulary=self.vocabulary,
            item=ITEM_BYTES[self.choose_precision(place)],
            saved=self._find_saved(place),
            chunk=self.options.logits_chunk or 1,
            kernels=place.is_gpu and self.suits_kernels,
        )
        if self.options.logits_chunk is not None:
            return shape
        used = place.process + estimate_rank(shape, split).total
        logit_bytes = shape.item if shape.kernels else PLAIN_LOGIT_BYTES
        return replace(shape, chunk=place.choose_chunk(self.vocabulary, used, logit_bytes))

    def choose_precision(self, place: Place) -> str:
        """The precision of the training on ``place``."""
        return place.choose_precision(self.options.precision)

    def _find_saved(self, place: Place) -> SavedBytesFit:
        """Return the bytes that autograd keeps in the precision of ``place``.

        Those of float16 are taken from bfloat16, which is as wide.
        """
        name = self.choose_precision(place)
        return self.saved["bf16" if name == "fp16" else name]

    def estimate_training_memory(self, place: Place) -> PhaseMemory:
        """The bytes at the peak of the training on ``place``."""
        return PhaseMemory.of_step(self.estimate_step(place), self.loader, place.process)

    def estimate_evaluation_memory(self, place: Place) -> PhaseMemory:
        """The bytes at the peak of an evaluation between two steps: no gradient is in memory."""
        step = self.estimate_step(place)
        item = ITEM_BYTES[self.choose_precision(place)]
        tokens = self.options.batch_size * self.length
        chunk = min(place.choose_chunk(self.vocabulary, place.process + step.total), tokens)
        return PhaseMemory(
            weights=step.weights,
            gradients=0,
            optimizer=step.optimizer,
            activations=count_forward_bytes(self.student.width, self.student.inner, tokens * item),
            head=_LOGIT_COPIES * 4 * chunk * self.vocabulary,
            loader=self.loader,
            process=place.process,
        )

    def count_training(self, place: Place, split: Split = WHOLE) -> Work:
        """The FLOP and bytes of all steps: of the passes of a rank, in a pipeline of all ranks."""
        options = self.options
        micro_batches = self.steps * options.gradient_accumulation_steps
        sequences = micro_batches * options.batch_size
        shape = self.describe_step(place, split)
        step = estimate_rank(shape, WHOLE if split.strategy == "pipeline" else split)
        kept = shape.saved.at(options.batch_size, self.length)
        # A step reads weights, gradients and state, and writes weights and state.
        update = 2 * (step.gradients + step.optimizer) + step.gradients
        run = Pass(
            tokens=sequences * self.length,
            targets=sequences * self.targets,
            context=self.length,
            micro_batches=micro_batches,
            trains=True,
            chunks=math.ceil(options.batch_size * self.targets / shape.chunk),
            recomputed=self._count_recomputed(),
            saved_bytes=micro_batches * (kept.layers + kept.outside),
            updated_bytes=self.steps * update,
            offloaded_bytes=micro_batches * shape.count_offloaded_bytes(),
        )
        return Work.of(self.model, run, self._weight_bytes)

    def take_rank(self, split: Split) -> TrainingPhase:
        """The part of a step that one rank does: all micro-batches of a pipeline, else its own."""
        if split.strategy == "pipeline" or split.is_whole:
            return self
        sequences = self.options.sequences_per_step // split.ranks
        batch = min(self.options.batch_size, sequences)
        return self.change(
            batch_size=batch, gradient_accumulation_steps=math.ceil(sequences / batch)
        )

    def forecast_rank(
        self, place: Place, split: Split, utilization: float = ASSUMED_UTILIZATION
    ) -> RankForecast:
        """Forecast a step on a rank of ``split``, whose device is ``place``."""
        own = self.take_rank(split)
        step = own.describe_step(place, split)
        memory = estimate_rank(step, split)
        # The host is the device of a rank on a CPU.
        beside = 0 if place.is_gpu else self.loader + memory.offloaded
        passes = own.options.gradient_accumulation_steps
        sent = count_traffic(step, split)
        work = own.compute_work_seconds(place, split, utilization)
        return RankForecast(
            memory=memory,
            needed=memory.total + place.process + beside,
            micro_batches=passes,
            sent=sent,
            time=estimate_step_time(work, sent, split, passes, place.rates),
        )

    def compute_work_seconds(
        self, place: Place, split: Split, utilization: float = ASSUMED_UTILIZATION
    ) -> float:
        """The seconds of one step's work on a rank whose part this is; a stage does its share."""
        work = self.count_training(place, split)
        precision = self.choose_precision(place)
        seconds = work.seconds(place.rates, precision, self.options.tf32, utilization)
        return seconds / self.steps / (split.ranks if split.strategy == "pipeline" else 1)

    @property
    def _weight_bytes(self) -> int:
        """Bytes of a number of the trained weights."""
        return count_trained_bytes(1, self.options)

    def _count_recomputed(self) -> float:
        """The share of the layers whose forward pass runs twice."""
        count = self.student.layer_count
        return sum(compute_group_sizes(count, self.options.gradient_checkpointing)) / count

    def count_evaluation(self) -> Work:
        """The FLOP and bytes of all evaluations on the held-out text."""
        sequences = self.evaluations * self.held_out
        run = Pass(
            tokens=sequences * self.length,
            targets=sequences * self.targets,
            context=self.length,
            micro_batches=sequences / self.options.batch_size,
        )
        return Work.of(self.model, run, self._weight_bytes)
