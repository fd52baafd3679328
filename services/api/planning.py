"""What a job would be and need, were it posted: its stages, its cache, its steps, its memory. Runs no model."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path

from cache.errors import CacheError, PotstillError
from cache.store import read_manifest
from kd.config.job import JobConfig
from kd.config.student import StudentInit
from kd.estimate import estimate_by_table, free_bytes, vocabulary_size
from services.api.views import JobPlan, MemoryEstimate
from services.schemas import JobEstimate, WorkerState
from services.settings import SEARCH, Settings

#: Bytes that an optimiser keeps for each parameter, in float32; adafactor's rows and columns are next to nothing.
OPTIMIZER_BYTES = {"adamw": 8, "adafactor": 0, "muon": 8, "lion": 4, "lars": 4, "schedule_free": 8}
FLOAT32 = 4
LONGEST_HEADER = 1 << 25  #: bytes of a safetensors header that are believed


def plan_job(config: JobConfig, settings: Settings, workers: list[WorkerState]) -> JobPlan:
    """The plan of a job that was found to be valid."""
    capture = _capture(config, settings)
    steps = _steps(config, settings, capture)
    return JobPlan(
        stages=list(config.stages),
        config=config.model_dump(mode="json"),
        capture=capture,
        steps=steps,
        tokens=_tokens(config, steps),
        memory=_memory(config, settings.root),
        free_bytes=free_bytes(settings.home),
        warnings=list(_warnings(config, capture, steps, workers)),
    )


def _capture(config: JobConfig, settings: Settings) -> JobEstimate | None:
    if "precompute" not in config.stages or config.kind == "verify":
        return None
    try:
        return JobEstimate(**estimate_by_table(config, settings.root, settings.home).to_json())
    except PotstillError:  # a data set of the hub, or text that only the worker can read
        return None


def _steps(config: JobConfig, settings: Settings, capture: JobEstimate | None) -> int | None:
    if config.train is None or config.train.max_steps is not None:
        return config.train.max_steps if config.train is not None else None
    sequences = capture.train_sequences if capture is not None else _sealed_sequences(config, settings)
    if sequences is None or config.train.epochs is None:
        return None
    return max(1, math.ceil(config.train.epochs * sequences / _sequences_of_a_step(config)))


def _sealed_sequences(config: JobConfig, settings: Settings) -> int | None:
    if config.cache.fingerprint is None:
        return None
    try:
        return read_manifest(settings.caches / config.cache.fingerprint).identity.data.train_sequences
    except CacheError:
        return None


def _sequences_of_a_step(config: JobConfig) -> int:
    return config.train.batch_size * config.train.gradient_accumulation_steps if config.train is not None else 0


def _tokens(config: JobConfig, steps: int | None) -> int | None:
    return None if steps is None else steps * _sequences_of_a_step(config) * config.data.sequence_length


# ---------------------------------------------------------------------- memory


def _memory(config: JobConfig, root: Path) -> MemoryEstimate:
    runs = "precompute" in config.stages and config.teacher is not None and config.teacher.backend == "local"
    weights = list(_weights(root / config.teacher.model)) if runs and config.teacher is not None else []
    parameters = _student_parameters(config, root)
    return MemoryEstimate(
        teacher_bytes=sum(file.stat().st_size for file in weights) or None,
        student_parameters=parameters,
        student_bytes=None if parameters is None else parameters * _bytes_a_parameter(config),
    )


def _bytes_a_parameter(config: JobConfig) -> int:
    if config.train is None or (config.student is not None and config.student.lora is not None):
        return FLOAT32  # the rest is that of the adapters
    average = FLOAT32 if config.train.ema_decay is not None else 0
    return 2 * FLOAT32 + OPTIMIZER_BYTES[config.train.optim] + average


def _student_parameters(config: JobConfig, root: Path) -> int | None:
    student = config.student
    if student is None or config.train is None:
        return None
    if student.init is not None and config.teacher is not None:
        return _llama_parameters(student.init, vocabulary_size(config, root))
    if student.model is not None:
        return sum(map(_stored_parameters, _weights(root / student.model))) or None
    return None


def _llama_parameters(shape: StudentInit, vocabulary: int) -> int:
    """Of a Llama: embeddings, and for each layer attention, MLP and two norms."""
    width, head_width = shape.hidden_size, shape.hidden_size // shape.heads
    keys = (shape.num_key_value_heads or shape.heads) * head_width
    layer = 2 * width * width + 2 * width * keys + 3 * width * shape.mlp_width + 2 * width
    return (1 if shape.tie_word_embeddings else 2) * vocabulary * width + shape.layers * layer + width


def _weights(folder: Path) -> Iterator[Path]:
    yield from folder.glob("*.safetensors") if folder.is_dir() else ()


def _stored_parameters(file: Path) -> int:
    """The numbers in a safetensors file, by its header; 0 for one that cannot be read."""
    try:
        with file.open("rb") as opened:
            length = int.from_bytes(opened.read(8), "little")
            header = json.loads(opened.read(length)) if length < LONGEST_HEADER else {}
        return sum(math.prod(tensor["shape"]) for name, tensor in header.items() if name != "__metadata__")
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return 0


# ---------------------------------------------------------------------- what will not end well


def _warnings(
    config: JobConfig, capture: JobEstimate | None, steps: int | None, workers: list[WorkerState]
) -> Iterator[str]:
    if capture is not None and not capture.fits:
        yield f"The cache needs about {capture.bytes} bytes, but the disk has {capture.free_bytes} left."
    if config.train is not None and steps is not None and config.train.warmup_steps >= steps:
        warmup = config.train.warmup_steps
        yield f"train.warmup_steps {warmup} takes all {steps} steps: the learning rate does not get to its value."
    if config.kind == "distill" and config.loss.hard_labels_only:
        yield "loss.alpha 1 gives the teacher no weight, but it is captured all the same: alpha weighs the hard labels."
    for stage in config.stages:
        serving = [worker for worker in workers if stage in worker.stages]
        needs = config.resources
        if stage != SEARCH and not any(worker.device.covers(needs.gpus, needs.memory) for worker in serving):
            found = "none of them has the resources asked for" if serving else "there is none"
            yield f"The job will wait for a worker of stage {stage}: {found}."
