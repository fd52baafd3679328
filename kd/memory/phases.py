"""Memory, time and cost of a job's phases on a device: capture, training, evaluation.

    memory   of a training step by ``kd.memory.step_bytes``; of a pass without gradients from the
             widths of the model
    time     FLOP and bytes by ``kd.memory.work``, at the share of the device's rates that a timed
             step reached, or at an assumed one
    cost     the time at a price of an hour

``kd estimate`` prints them of a job as it is written, and of the same job with one lever moved.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import Any

import torch
from transformers import PreTrainedModel

from kd.capture.recording import LOGIT_ELEMENTS
from kd.capture.sampling import PASS_ELEMENTS
from kd.config.teacher import SHARED
from kd.config.train import ROUNDING_OPTIMIZERS, TrainConfig
from kd.memory.model_work import (
    count_model_work,
    count_shared_bytes,
    count_weight_bytes,
    estimate_forward_bytes,
)
from kd.memory.parallel import Split, choose_strategy, list_strategies
from kd.memory.step_bytes import SavedBytesFit, resize_micro_batch
from kd.memory.step_memory import describe_student, fit_saved_bytes
from kd.memory.training_phase import ITEM_BYTES, PhaseMemory, Place, TrainingPhase
from kd.memory.work import ASSUMED_UTILIZATION, Pass, Work, compute_cost
from kd.models.precision import Precision, rounded_parameters

#: Copies of the elements of a pass of the sampler, in float32.
_PASS_COPIES = 16
#: Positions of the chunk of the row that lowers train.logits_chunk.
_SMALL_CHUNK = 256


@dataclass(frozen=True)
class PhaseForecast:
    """The memory, work, time and cost of one phase on one device."""

    phase: str
    memory: PhaseMemory
    memory_bytes: int
    fits: bool
    flops: float
    moved_bytes: int
    #: Those of the moved bytes that the gradient of the LM head's weight takes.
    head_gradient_bytes: int
    utilization: float
    seconds: float
    cost: float | None


@dataclass(frozen=True)
class Strategy:
    """The training with one lever moved, or shared: its bytes on a device, and its seconds."""

    setting: str
    memory_bytes: int
    fits: bool
    seconds: float
    cost: float | None


@dataclass(frozen=True)
class DeviceForecast:
    """The phases of a job on a device, and its training with other settings.

    ``expected`` is true where no step was timed on it.
    """

    device: str
    device_bytes: int
    expected: bool
    phases: tuple[PhaseForecast, ...]
    strategies: tuple[Strategy, ...]

    def to_json(self) -> dict[str, Any]:
        """Return the forecast as JSON values."""
        return asdict(self)


# ---------------------------------------------------------------------- the capture


@dataclass(frozen=True)
class CapturePhase:
    """A capture: its teacher (without weights), the text, and the bytes of unsealed records.

    The memory of a teacher that is spread is that of one device, the one that needs most.
    """

    teacher: PreTrainedModel
    vocabulary: int
    batch_size: int
    length: int
    sequences: int
    targets: float
    item_bytes: int
    quantization: str | None
    records: int
    #: Seconds of the whole capture as they were timed at hand; None where no teacher ran.
    seconds: float | None
    #: How the job spreads the teacher, over how many devices, and the most bytes on each.
    parallel: str = "none"
    ranks: int = 1
    most_on_gpu: int | None = None
    most_on_host: int | None = None

    @cached_property
    def work(self) -> Work:
        """The FLOP and bytes of the whole capture."""
        run = Pass(
            tokens=self.sequences * self.length,
            targets=self.sequences * self.targets,
            context=self.length,
            micro_batches=self.sequences / self.batch_size,
        )
        return Work.of(count_model_work(self.teacher, self.vocabulary), run, self.item_bytes)

    def estimate_memory(self, place: Place) -> PhaseMemory:
        """The bytes at the peak of the capture on ``place``."""
        tokens = self.batch_size * self.length
        device = "cuda" if place.is_gpu else "cpu"
        return PhaseMemory(
            weights=self._count_weights(place),
            gradients=0,
            optimizer=0,
            activations=estimate_forward_bytes(self.teacher, tokens, self.item_bytes),
            head=estimate_logit_bytes(device, tokens, self.vocabulary),
            loader=self.records,
            process=place.process,
        )

    def _count_weights(self, place: Place) -> int:
        """The bytes of weights on ``place``; with device_map the others lie elsewhere."""
        if self.parallel in SHARED:
            return count_shared_bytes(self.teacher, self.item_bytes, self.parallel, self.ranks)
        whole = count_weight_bytes(self.teacher, self.item_bytes, self.quantization)
        most = self.most_on_gpu if place.is_gpu else self.most_on_host
        return whole if most is None else min(whole, most)


def estimate_logit_bytes(device: str, tokens: int, vocabulary: int) -> int:
    """Bytes of a chunk of a teacher's logits, and of the passes of the sampler over it."""
    rows = min(max(LOGIT_ELEMENTS[device] // vocabulary, 1), tokens)
    passes = _PASS_COPIES * min(PASS_ELEMENTS[device], rows * vocabulary)
    return 4 * (rows * vocabulary + passes)


# ---------------------------------------------------------------------- the training


def measure_training(student: PreTrainedModel, options: TrainConfig, **sizes: Any) -> TrainingPhase:
    """Run short passes of ``student`` in each precision, and count its work.

    Call it before ``checkpoint_activations``; nothing of the student changes.
    """
    saved = {
        name: measure_saved_bytes(student, sizes["length"], name)
        for name in ("fp32", "bf16", "bf16_pure")
    }
    return describe_training_phase(student, options, saved, **sizes)


def describe_training_phase(
    student: PreTrainedModel, options: TrainConfig, saved: Mapping[str, SavedBytesFit], **sizes: Any
) -> TrainingPhase:
    """Describe the training of ``student``, whose passes keep ``saved`` in each precision."""
    model = count_model_work(student, sizes["vocabulary"])
    return TrainingPhase(describe_student(student), options, saved=saved, model=model, **sizes)


def measure_saved_bytes(student: PreTrainedModel, length: int, name: str) -> SavedBytesFit:
    """Run short passes of ``student`` in the precision ``name``: fp32, bf16 or bf16_pure."""
    # float16, which CPUs lack, takes as many bytes as bfloat16.
    dtype = torch.float32 if name == "fp32" else torch.bfloat16
    precision = Precision(student.device.type, dtype)
    if name != "bf16_pure":
        return fit_saved_bytes(student, length, precision)
    with rounded_parameters(student, torch.bfloat16):
        return fit_saved_bytes(student, length, precision)


# ---------------------------------------------------------------------- the forecast


@dataclass(frozen=True)
class _Pace:
    """How fast a place works: the precision of its products, and its share of the rates."""

    place: Place
    precision: str
    tf32: bool
    utilization: float
    price: float | None

    @classmethod
    def of(
        cls,
        place: Place,
        precision: str,
        tf32: bool,
        timed: tuple[Work, float | None],
        price: float | None,
    ) -> _Pace:
        """Take the utilisation from ``timed``, work and its seconds, or assume one."""
        work, seconds = timed
        utilization = ASSUMED_UTILIZATION
        if place.is_timed and seconds:
            utilization = work.seconds(place.rates, precision, tf32, 1.0) / seconds
        return cls(place, precision, tf32, utilization, price)

    def compute_seconds(self, work: Work) -> float:
        return work.seconds(self.place.rates, self.precision, self.tf32, self.utilization)

    def forecast(self, phase: str, memory: PhaseMemory, work: Work) -> PhaseForecast:
        """Put the figures of one phase together."""
        needed = memory.count_device_bytes(self.place.is_gpu)
        seconds = self.compute_seconds(work)
        return PhaseForecast(
            phase=phase,
            memory=memory,
            memory_bytes=needed,
            fits=needed <= self.place.rates.memory,
            flops=work.flops,
            moved_bytes=round(work.bytes),
            head_gradient_bytes=round(work.head_gradient),
            utilization=round(self.utilization, 4),
            seconds=round(seconds, 3),
            cost=_round_cost(compute_cost(seconds, self.price)),
        )


def forecast_phases(
    place: Place,
    capture: CapturePhase | None,
    training: TrainingPhase | None,
    seconds: float | None = None,
    price: float | None = None,
    ranks: int = 1,
) -> DeviceForecast:
    """Forecast a job on ``place``.

    ``seconds`` are those of all training steps, as timed on the device at hand; ``price`` is that
    of an hour of the device. ``ranks`` are the devices that the job asks for: the phases are those
    of one, and the strategies tell what a training on all of them needs of each.
    """
    phases = []
    strategies: tuple[Strategy, ...] = ()
    if capture is not None:
        precision = "fp32" if capture.item_bytes == ITEM_BYTES["fp32"] else "bf16"
        pace = _Pace.of(place, precision, False, (capture.work, capture.seconds), price)
        phases.append(pace.forecast("capture", capture.estimate_memory(place), capture.work))
    if training is not None:
        precision = place.choose_precision(training.options.precision)
        work = training.count_training(place)
        pace = _Pace.of(place, precision, training.options.tf32, (work, seconds), price)
        memory = training.estimate_training_memory(place)
        phases.append(pace.forecast("training", memory, work))
        memory = training.estimate_evaluation_memory(place)
        phases.append(pace.forecast("evaluation", memory, training.count_evaluation()))
        shared = _forecast_ranks(training, pace, ranks) if ranks > 1 else ()
        strategies = (*_forecast_strategies(training, pace), *shared)
    return DeviceForecast(
        place.rates.name, place.rates.memory, not place.is_timed, tuple(phases), strategies
    )


def _forecast_strategies(training: TrainingPhase, pace: _Pace) -> Iterator[Strategy]:
    """Forecast the training with one lever moved at a time, the job as written first."""
    place = pace.place
    for setting, changed in list_levers(training, place.is_gpu):
        precision = place.choose_precision(changed.options.precision)
        moved = replace(pace, precision=precision)
        memory = changed.estimate_training_memory(place).count_device_bytes(place.is_gpu)
        seconds = moved.compute_seconds(changed.count_training(place))
        yield Strategy(
            setting=setting,
            memory_bytes=memory,
            fits=memory <= place.rates.memory,
            seconds=round(seconds, 3),
            cost=_round_cost(compute_cost(seconds, pace.price)),
        )


def _forecast_ranks(training: TrainingPhase, pace: _Pace, ranks: int) -> Iterator[Strategy]:
    """Forecast one of ``ranks`` devices for each strategy that can share the training."""
    place = pace.place.divide(ranks)
    room = place.rates.memory - place.process
    for name in list_strategies(training.options, ranks):
        split = Split(name, ranks)
        found = training.forecast_rank(place, split, pace.utilization)
        step = training.take_rank(split).describe_step(place, split)
        chosen = training.options.strategy == "auto" and name == choose_strategy(step, ranks, room)
        seconds = training.steps * found.time.total
        yield Strategy(
            setting=f"train.strategy {name}, each of {ranks} devices{' (auto)' * chosen}",
            memory_bytes=found.needed,
            fits=found.needed <= place.rates.memory,
            seconds=round(seconds, 3),
            cost=_round_cost(compute_cost(seconds * ranks, pace.price)),
        )


def list_levers(training: TrainingPhase, is_gpu: bool) -> Iterator[tuple[str, TrainingPhase]]:
    """Yield the settings that lower memory, each with the training that has it."""
    options = training.options
    yield "as written", training
    # The others would lose small steps of weights in bfloat16, and adapters stay in float32.
    is_rounding = options.optim in ROUNDING_OPTIMIZERS and not training.model.frozen
    for name in ("bf16", "bf16_pure", "fp32") if is_rounding else ("bf16", "fp32"):
        if options.precision != name:
            yield f"train.precision {name}", training.change(precision=name)
    for how in ("sqrt", "full"):
        if options.gradient_checkpointing != how:
            yield (
                f"train.gradient_checkpointing {how}",
                training.change(gradient_checkpointing=how),
            )
    if is_gpu and not options.activation_offload and options.compile == "none":
        yield "train.activation_offload true", training.change(activation_offload=True)
    if options.optim == "adamw":
        yield "train.optim adamw_8bit", training.change(optim="adamw_8bit", optim_args={})
    if options.batch_size > 1:
        single = resize_micro_batch(options, 1)
        accumulated = single.gradient_accumulation_steps
        yield (
            f"train.batch_size 1, train.gradient_accumulation_steps {accumulated}",
            replace(training, options=single),
        )
    if options.logits_chunk is None or options.logits_chunk > _SMALL_CHUNK:
        yield f"train.logits_chunk {_SMALL_CHUNK}", training.change(logits_chunk=_SMALL_CHUNK)


def _round_cost(cost: float | None) -> float | None:
    return None if cost is None else round(cost, 4)
