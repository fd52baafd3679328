"""Forecasts a job's training before it runs: time and memory.

It is a part of ``kd estimate``. A trial capture leaves a small cache, on which the student takes a
few real steps:

    time      the fastest of these steps, times the steps of the job
    memory    what ``kd.memory.step_memory`` estimates before a training starts
    phases    memory, time and cost of capture, training and evaluation (``kd.memory.phases``), on
              this device by the timed steps, and on a named kind of GPU by its rates
"""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import PreTrainedModel

from cache.disk import make_folder, storage_errors
from kd.capture.estimate.job import Estimate
from kd.capture.plan import resolve_teacher_folder, settle_packing
from kd.capture.probe import Trial, open_trial
from kd.config.job import JobConfig
from kd.evaluation.baseline import build_starting_student
from kd.loss.chunk_size import suits_kernels
from kd.memory.devices import CUDA_CONTEXT, DeviceRates
from kd.memory.host import choose_chunk_memory
from kd.memory.phases import (
    CapturePhase,
    DeviceForecast,
    forecast_phases,
    measure_training,
)
from kd.memory.rates import measure_rates
from kd.memory.step_bytes import StepMemoryEstimate
from kd.memory.step_memory import read_resident_memory
from kd.memory.training_phase import Place, TrainingPhase
from kd.models.attention.isolation import isolate_documents
from kd.models.loading import choose_teacher_dtype, outline_teacher
from kd.models.precision import find_hardware, pick_device
from kd.models.vocabulary import choose_run_vocabulary
from kd.pipeline import (
    adopt_cache_layout,
    load_student_tokenizer,
    open_source,
)
from kd.progress import SILENT, Monitor
from kd.text.batches import CachedRecords, Source
from kd.text.steps.reading import TimedIterator
from kd.tracking.trace import Trace
from kd.training.evaluate import choose_evaluation_temperature
from kd.training.prepare import count_total_steps, prepare
from kd.training.steps import begin_step, forward_backward, measure_gradients, take_step

#: Steps that are timed after the first one, which warms up.
STEPS = 3
#: No step begins after so many seconds.
SECONDS = 10.0
#: Training sequences whose targets are counted where the capture did not count all.
_COUNTED_SEQUENCES = 64
#: Bytes that a process takes beside its imports and its models: what libraries load at their first
#: use, the tokenizer and the text. Measured on the example's job.
_FIRST_USE_BYTES = 64 << 20
#: Training sequences whose records' bytes are measured.
_RECORD_SEQUENCES = 16
#: Times that the records of a shard are in memory while it is sealed.
_SHARD_COPIES = 3


@dataclass(frozen=True)
class TrainingForecast:
    """The length, time and memory of a training."""

    steps: int
    tokens: int
    tokens_per_step: int
    parameters: int
    step_seconds: float
    seconds: float
    hours: float
    memory_bytes: int
    memory: dict[str, int]

    def to_json(self) -> dict[str, Any]:
        """Return the forecast as JSON values."""
        return asdict(self)


@dataclass(frozen=True)
class JobForecast:
    """The forecast of a job: of its capture, of its training, and of its phases on each device.

    A job without a capture or without a training has no such estimate.
    """

    capture: Estimate | None
    training: TrainingForecast | None
    devices: tuple[DeviceForecast, ...]


@dataclass(frozen=True)
class Question:
    """What is asked beside the device at hand: a kind of GPU, and the price of a device's hour.

    The price is that of the named kind where one is named, else that of the device at hand.
    """

    kind: DeviceRates | None = None
    price: float | None = None


def estimate_job(
    config: JobConfig, home: Path, monitor: Monitor = SILENT, question: Question | None = None
) -> JobForecast:
    """Estimate a job's capture by a trial, and its training by a few steps on the trial's records.

    Leaves no files behind, and raises what the capture and the training would raise.
    """
    question = question or Question()
    config = settle_packing(config, monitor)
    here = describe_device(pick_device())
    if config.kind == "train":
        with storage_errors(home):
            make_folder(home)
        with TemporaryDirectory(prefix=".estimate-", dir=home) as name:
            # Plain text is tokenized for the estimate alone.
            place = home if config.needs_cache else Path(name)
            _, source = open_source(config, place, Path(name), monitor)
            monitor.emit("stage", stage="train", phase="taking a few steps")
            config = adopt_cache_layout(source, config)
            text = _Text.of(source)
            training, phase = forecast_training(config, source, text, Path(name), here)
            return _put_together(config, None, (training, phase), None, here, question)
    with open_trial(config, home, monitor) as trial:
        capture = make_capture_phase(config, trial)
        if config.train is None:
            return _put_together(config, trial.estimate, None, capture, here, question)
        monitor.emit("stage", stage="train", phase="taking a few steps")
        first = CachedRecords(trial.cache)
        text = _Text.planned(trial.estimate)
        found = forecast_training(config, first, text, trial.folder, here)
        return _put_together(config, trial.estimate, found, capture, here, question)


def _put_together(
    config: JobConfig,
    capture: Estimate | None,
    training: tuple[TrainingForecast, TrainingPhase] | None,
    phase: CapturePhase | None,
    here: Place,
    question: Question,
) -> JobForecast:
    forecast, learning = training or (None, None)
    seconds = None if forecast is None else forecast.steps * forecast.step_seconds
    own_price = question.price if question.kind is None else None
    # Devices may be for the teacher alone.
    shared = config.train is not None and config.train.strategy != "single"
    ranks = config.resources.gpus or 1 if shared else 1
    devices = [forecast_phases(here, phase, learning, seconds, own_price, ranks)]
    if question.kind is not None:
        there = Place.named(question.kind)
        devices.append(forecast_phases(there, phase, learning, None, question.price, ranks))
    return JobForecast(capture, forecast, tuple(devices))


def describe_device(device: torch.device) -> Place:
    """Measure the rates of ``device``, and what this process takes of it by now."""
    is_gpu = device.type == "cuda"
    process = CUDA_CONTEXT if is_gpu else read_resident_memory() + _FIRST_USE_BYTES
    rates = measure_rates(device)
    return Place(rates, is_gpu, process, find_hardware(device).precision, is_timed=True)


def make_capture_phase(config: JobConfig, trial: Trial) -> CapturePhase | None:
    """Describe the capture of a job by its teacher's shape and a trial; None for a remote one."""
    teacher = config.teacher
    if teacher is None or teacher.backend != "local":
        return None
    folder = resolve_teacher_folder(teacher, teacher.gguf_file)
    dtype = choose_teacher_dtype(teacher, folder, pick_device())
    found = trial.estimate
    sequences = found.train_sequences + found.validation_sequences
    shard = min(config.cache.shard_sequences, sequences) * found.positions / max(sequences, 1)
    return CapturePhase(
        teacher=outline_teacher(teacher, folder, dtype),
        vocabulary=trial.cache.identity.tokenizer.vocabulary_size,
        batch_size=teacher.batch_size,
        length=config.data.sequence_length,
        sequences=sequences,
        targets=found.positions / max(sequences, 1),
        item_bytes=dtype.itemsize,
        quantization=teacher.quantization,
        records=round(_SHARD_COPIES * shard * measure_record_bytes(CachedRecords(trial.cache))),
        seconds=found.seconds,
        parallel=teacher.parallel,
        ranks=config.resources.gpus or 1,
        most_on_gpu=teacher.gpu_memory,
        most_on_host=teacher.host_memory,
    )


def measure_record_bytes(source: Source) -> float:
    """The bytes of a decoded record in memory, of the first sequences; 0 for plain text."""
    some, records = source.read(np.arange(min(source.train_count, _RECORD_SEQUENCES)))
    if records is None or not some.positions:
        return 0.0
    return sum(column.nbytes for column in records.columns.values()) / some.positions


@dataclass(frozen=True)
class _Text:
    """The sequences of a job in both splits, and the targets of one."""

    train: int
    validation: int
    targets: float

    @classmethod
    def planned(cls, capture: Estimate) -> _Text:
        sequences = capture.train_sequences + capture.validation_sequences
        targets = capture.positions / max(sequences, 1)
        return cls(capture.train_sequences, capture.validation_sequences, targets)

    @classmethod
    def of(cls, source: Source) -> _Text:
        some, _ = source.read(np.arange(min(source.train_count, _COUNTED_SEQUENCES)))
        targets = some.positions / max(len(some), 1)
        return cls(source.train_count, source.validation_count, targets)


def forecast_training(
    config: JobConfig, source: Source, text: _Text, folder: Path, here: Place
) -> tuple[TrainingForecast, TrainingPhase]:
    """Take a few steps of the job's training on ``source``.

    Returns the forecast, and the training as a phase of a job on any device.
    """
    tokenizer = load_student_tokenizer(config)
    student = build_starting_student(config, tokenizer)
    vocabulary = choose_run_vocabulary(source, tokenizer, student)
    options = config.require_train()
    steps = count_total_steps(options, text.train)
    phase = _make_training_phase(config, source, text, student, vocabulary)
    probe = _make_probe_job(config, steps)
    seconds, memory = _time_steps(probe, source, student, vocabulary, folder / "training")
    sequences = options.batch_size * options.gradient_accumulation_steps
    step_seconds = seconds * options.gradient_accumulation_steps
    phases = forecast_phases(here, None, phase, steps * step_seconds).phases
    whole = sum(each.seconds for each in phases)
    tokens = round(sequences * text.targets)
    return TrainingForecast(
        steps=steps,
        tokens=steps * tokens,
        tokens_per_step=tokens,
        parameters=student.num_parameters(),
        step_seconds=round(step_seconds, 4),
        seconds=round(whole, 1),
        hours=round(whole / 3600, 3),
        memory_bytes=memory.total,
        memory=asdict(memory),
    ), phase


def _make_training_phase(
    config: JobConfig, source: Source, text: _Text, student: PreTrainedModel, vocabulary: int
) -> TrainingPhase:
    """Measure what autograd keeps of ``student``, as the job and a GPU would train it."""
    options = config.require_train()
    nn.Module.to(student, pick_device())
    if config.data.packing:
        isolate_documents(student)
    steps = count_total_steps(options, text.train)
    records = (text.train + text.validation) * text.targets * measure_record_bytes(source)
    return measure_training(
        student,
        options,
        vocabulary=vocabulary,
        length=config.data.sequence_length,
        targets=text.targets,
        steps=steps,
        # Before the first step, after the last, and every eval_steps between.
        evaluations=2 + steps // options.eval_steps,
        held_out=text.validation,
        loader=round(min(records, choose_chunk_memory(options))),
        suits_kernels=suits_kernels(source.codec, config.loss.divergence),
    )


# ---------------------------------------------------------------------- time and memory


def _time_steps(
    config: JobConfig, source: Source, student: PreTrainedModel, vocabulary: int, folder: Path
) -> tuple[float, StepMemoryEstimate]:
    """The seconds of one micro-batch, from the loader to the optimiser, and the step's memory."""
    folder.mkdir()
    trace = Trace(folder / "trace.json", 0)
    run = prepare(config, source, student, vocabulary, folder, SILENT, trace)
    ends = [time.monotonic()]
    batches = TimedIterator(run.read_batches())
    for micro_batches in batches:
        step = begin_step(run, micro_batches, batches.last)
        forward_backward(run, step)
        measure_gradients(run, step)
        take_step(run, step)
        if run.device.type == "cuda":
            torch.cuda.synchronize(run.device)
        ends.append(time.monotonic())
        if len(ends) > STEPS + 1 or ends[-1] - ends[0] > SECONDS:
            break
    seconds = np.diff(ends)
    return float(seconds[1:].min() if len(seconds) > 1 else seconds[0]), run.memory.step


def _make_probe_job(config: JobConfig, steps: int) -> JobConfig:
    """The job with one micro-batch a step, and without what a few steps cannot have."""
    train = config.require_train().model_copy(
        update={
            "max_steps": max(steps, STEPS + 1),
            "epochs": None,
            "gradient_accumulation_steps": 1,
            "order": "shuffled",
            "report_to": (),
            "trace_steps": 0,
        }
    )
    # A learned temperature may look at held-out text, which the trial has none of.
    temperature = choose_evaluation_temperature(config.loss)
    loss = config.loss.model_copy(update={"temperature": temperature})
    return config.model_copy(update={"train": train, "loss": loss})
