"""Rehearses a job on this device before it runs: memory and hours. It is ``kd estimate``.

The teacher reads a few micro-batches (``kd.forecast.trial``), and the student takes a few real
steps on their records:

    time      of a micro-batch and of the fastest step, times those of the job
    memory    the most that the device held meanwhile; on a CPU, the process and all its imports
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import torch

from cache.disk import make_folder, storage_errors
from kd.capture.estimate.text import CaptureSize
from kd.capture.plan import settle_packing
from kd.capture.teacher import return_freed_memory
from kd.client.wire.plans import JobEstimate
from kd.config.job import JobConfig
from kd.evaluation.baseline import build_starting_student
from kd.forecast.trial import run_trial
from kd.memory.auto_batch import release_memory
from kd.memory.host import choose_chunk_memory, read_memory_bytes
from kd.memory.step_memory import read_device_peak
from kd.models.precision import name_device, pick_device
from kd.models.vocabulary import choose_run_vocabulary
from kd.progress import SILENT, Monitor
from kd.stages.source import adopt_cache_layout, load_student_tokenizer, open_source
from kd.text.batches import Source
from kd.text.steps.reading import TimedIterator
from kd.training.evaluate import choose_evaluation_temperature
from kd.training.prepare import prepare
from kd.training.preparing.job_loss import count_total_steps
from kd.training.run import Run
from kd.training.steps import begin_step, forward_backward, measure_gradients, take_step

#: Steps that are timed after the first one, which warms up.
STEPS = 3
#: No step begins after so many seconds.
SECONDS = 10.0
#: Share of a step's work that a pass without gradients does: 2 N of 6 N.
_FORWARD_SHARE = 1 / 3
#: Training sequences whose records and targets are counted.
_COUNTED_SEQUENCES = 64


@dataclass(frozen=True)
class TrainingForecast:
    """The length and time of a training; ``seconds`` count its evaluations, too."""

    steps: int
    tokens: int
    tokens_per_step: int
    parameters: int
    step_seconds: float
    seconds: float
    hours: float
    memory_bytes: int


@dataclass(frozen=True)
class JobForecast:
    """The forecast of a job: of its capture, and of its training, on the device at hand.

    A job without a capture or without a training has no such forecast.
    """

    device: str
    device_bytes: int
    capture: JobEstimate | None
    capture_memory_bytes: int
    training: TrainingForecast | None


def estimate_job(config: JobConfig, home: Path, monitor: Monitor = SILENT) -> JobForecast:
    """Rehearse a job here.

    Leaves no files behind, and raises what the capture and the training would raise.
    """
    config = settle_packing(config, monitor)
    capture = training = None
    capture_memory = 0
    with storage_errors(home):
        make_folder(home)
    with TemporaryDirectory(prefix=".estimate-", dir=home) as name:
        folder = Path(name)
        if config.captures:
            trial = run_trial(config, home, folder, monitor)
            capture, capture_memory, text = trial.estimate, trial.memory_bytes, trial.text
            source: Source = trial.cache
        else:
            # Plain text is tokenized for the rehearsal alone.
            _, source = open_source(config, home if config.needs_cache else folder, folder, monitor)
            config = adopt_cache_layout(source, config)
            text = _measure_text(source, config.data.sequence_length)
        if config.train is not None:
            monitor.emit("stage", stage="train", phase="taking a few steps")
            training = _rehearse_training(config, source, text, folder)
    device = pick_device()
    memory = read_memory_bytes()
    if device.type == "cuda":
        memory = torch.cuda.get_device_properties(device).total_memory
    return JobForecast(name_device(device), memory, capture, capture_memory, training)


def _measure_text(source: Source, length: int) -> CaptureSize:
    """Measure the text of ``source``; its positions are told by the first sequences."""
    some, _ = source.read(np.arange(min(source.train_count, _COUNTED_SEQUENCES)))
    counts = (source.train_count, source.validation_count)
    positions = round(some.positions / max(len(some), 1) * sum(counts))
    return CaptureSize(*counts, length, positions, counted=True)


# ---------------------------------------------------------------------- the training


def _rehearse_training(
    config: JobConfig, source: Source, text: CaptureSize, folder: Path
) -> TrainingForecast:
    """Forecast the job's training from a few steps on ``source``."""
    release_memory()
    return_freed_memory()
    options = config.require_train()
    steps = count_total_steps(options, text.train_sequences)
    run, times = _take_steps(_make_probe_job(config, steps), source, folder / "steps")
    memory = read_device_peak(run.device) + _count_unread(config, source, text)
    # Before the first step, after the last, and every eval_steps between.
    evaluations = (2 + steps // options.eval_steps) * text.validation_sequences
    sequences = steps * options.sequences_per_step + _FORWARD_SHARE * evaluations
    passes = sequences / options.batch_size
    micro_batch = min(times[1:] or times)
    tokens = round(options.sequences_per_step * text.targets)
    return TrainingForecast(
        steps=steps,
        tokens=steps * tokens,
        tokens_per_step=tokens,
        parameters=run.student.num_parameters(),
        step_seconds=round(micro_batch * options.sequences_per_step / options.batch_size, 4),
        seconds=round(passes * micro_batch, 3),
        hours=round(passes * micro_batch / 3600, 3),
        memory_bytes=memory,
    )


def _take_steps(config: JobConfig, source: Source, folder: Path) -> tuple[Run, list[float]]:
    """Take steps of one micro-batch, from the loader to the optimiser; return their seconds."""
    tokenizer = load_student_tokenizer(config)
    student = build_starting_student(config, tokenizer)
    vocabulary = choose_run_vocabulary(source, tokenizer, student)
    folder.mkdir()
    run = prepare(config, source, student, vocabulary, folder, SILENT)
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
    return run, np.diff(ends).tolist()


def _count_unread(config: JobConfig, source: Source, text: CaptureSize) -> int:
    """Bytes of decoded records that the job's loader will keep, beyond those of the rehearsal.

    They lie on the host, and so count for a CPU only.
    """
    some, records = source.read(np.arange(min(source.train_count, _COUNTED_SEQUENCES)))
    if records is None or not some.positions or pick_device().type == "cuda":
        return 0
    each = records.nbytes / len(some)
    most = choose_chunk_memory()
    return round(min(each * text.sequences, most) - min(each * source.train_count, most))


def _make_probe_job(config: JobConfig, steps: int) -> JobConfig:
    """The job with one micro-batch a step, and without what a few steps cannot have."""
    train = config.require_train().model_copy(
        update={
            "max_steps": max(steps, STEPS + 1),
            "epochs": None,
            "gradient_accumulation_steps": 1,
            "order": "shuffled",
            "report_to": (),
        }
    )
    # A learned temperature may look at held-out text, which the trial has none of.
    temperature = choose_evaluation_temperature(config.loss)
    loss = config.loss.model_copy(update={"temperature": temperature})
    return config.model_copy(update={"train": train, "loss": loss})
