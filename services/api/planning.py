"""The plan of a job that is not created yet: its stages, its cache, its steps and its memory.

Runs no model and imports no torch: what is not known without them stays null.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

from cache.errors import CacheError, PotstillError
from cache.store import read_manifest
from kd.capture.estimate import (
    Estimate,
    estimate_vocabulary_size,
    list_measured_files,
    list_teacher_files,
    measure_capture,
    measure_free_bytes,
)
from kd.config.job import JobConfig
from kd.config.student import StudentInit
from kd.models.folder import ModelFolder
from kd.optim.state_size import ParameterShape, count_optimizer_bytes
from services.api.answers.views import JobPlan, MemoryEstimate
from services.api.kept_answers import KeptAnswers
from services.settings import SEARCH, Settings
from services.store.schemas import JobEstimate, WorkerState

#: Bytes of a number in float32.
FLOAT32 = 4


def plan_job(
    config: JobConfig,
    settings: Settings,
    workers: list[WorkerState],
    kept: KeptAnswers | None = None,
) -> JobPlan:
    """Return the plan of a valid job.

    What takes long is taken from ``kept``, as long as the files are the same.
    """
    kept = kept or KeptAnswers()
    capture = _estimate_capture(config, settings, kept)
    steps = _count_steps(config, settings, capture)
    return JobPlan(
        stages=list(config.stages),
        config=config.model_dump(mode="json"),
        capture=capture,
        steps=steps,
        tokens=_count_tokens(config, steps),
        memory=_estimate_memory(config, settings.root, kept),
        free_bytes=measure_free_bytes(settings.home),
        warnings=list(_find_warnings(config, capture, steps, workers)),
    )


def _estimate_capture(
    config: JobConfig, settings: Settings, kept: KeptAnswers
) -> JobEstimate | None:
    if "precompute" not in config.stages or config.kind == "verify":
        return None
    root = settings.root
    sections = config.model_dump(mode="json", include={"kind", "data", "teacher", "cache"})
    try:
        work, storage = kept.recall(
            ["capture", sections],
            list_measured_files(config, root),
            lambda: measure_capture(config, root),
        )
    except PotstillError:  # a dataset of the hub, or text that only the worker can read
        return None
    free = measure_free_bytes(settings.home)
    estimate = Estimate.of(work, storage, config.cache.shard_sequences, free)
    return JobEstimate(**estimate.to_json())


def _count_steps(config: JobConfig, settings: Settings, capture: JobEstimate | None) -> int | None:
    if config.train is None:
        return None
    if config.train.max_steps is not None:
        return config.train.max_steps
    sequences = (
        capture.train_sequences
        if capture is not None
        else _count_sealed_sequences(config, settings)
    )
    if sequences is None or config.train.epochs is None:
        return None
    return max(1, math.ceil(config.train.epochs * sequences / _count_sequences_per_step(config)))


def _count_sealed_sequences(config: JobConfig, settings: Settings) -> int | None:
    if config.cache.fingerprint is None:
        return None
    try:
        return read_manifest(
            settings.caches / config.cache.fingerprint
        ).identity.data.train_sequences
    except CacheError:
        return None


def _count_sequences_per_step(config: JobConfig) -> int:
    if config.train is None:
        return 0
    return config.train.batch_size * config.train.gradient_accumulation_steps


def _count_tokens(config: JobConfig, steps: int | None) -> int | None:
    if steps is None:
        return None
    return steps * _count_sequences_per_step(config) * config.data.sequence_length


# ---------------------------------------------------------------------- memory


def _estimate_memory(config: JobConfig, root: Path, kept: KeptAnswers) -> MemoryEstimate:
    teacher = config.teacher if "precompute" in config.stages else None
    # A remote teacher takes no memory of the worker.
    is_local = teacher is not None and teacher.backend == "local"
    weights = ModelFolder(root / teacher.model).weight_files if teacher and is_local else []
    parameters = _list_student_parameters(config, root, kept)
    return MemoryEstimate(
        teacher_bytes=sum(file.stat().st_size for file in weights) or None,
        student_parameters=sum(each.size for each in parameters) or None,
        student_bytes=_count_student_bytes(config, parameters) or None,
    )


def _count_student_bytes(config: JobConfig, parameters: list[ParameterShape]) -> int:
    """Count the bytes of weights, gradients, optimiser state and moving average, in float32."""
    weights = FLOAT32 * sum(each.size for each in parameters)
    if config.train is None or (config.student is not None and config.student.lora is not None):
        return weights  # LoRA trains only the adapters, which are small beside the weights
    average = weights if config.train.ema_decay is not None else 0
    return 2 * weights + count_optimizer_bytes(config.train.optim, parameters) + average


def _list_student_parameters(
    config: JobConfig, root: Path, kept: KeptAnswers
) -> list[ParameterShape]:
    """List the shapes of the student's parameters; empty if only a loaded model could tell them."""
    student = config.student
    if student is None or config.train is None:
        return []
    if student.init is not None and config.teacher is not None:
        vocabulary = kept.recall(
            ["vocabulary", config.teacher.model_dump(mode="json")],
            list_teacher_files(config, root),
            lambda: estimate_vocabulary_size(config, root),
        )
        return list(_list_llama_parameters(student.init, vocabulary))
    if student.model is not None:
        shapes = ModelFolder(root / student.model).read_text_shapes()
        return [
            ParameterShape(shape, _is_layer_matrix(name, shape)) for name, shape in shapes.items()
        ]
    return []


def _list_llama_parameters(shape: StudentInit, vocabulary: int) -> Iterator[ParameterShape]:
    """Yield a Llama's parameters: attention, MLP and norms of each layer, embeddings, LM head."""
    width = shape.hidden_size
    keys = (shape.num_key_value_heads or shape.attention_heads) * (width // shape.attention_heads)
    attention = [(width, width), (keys, width), (keys, width), (width, width)]
    mlp = [(shape.mlp_width, width), (shape.mlp_width, width), (width, shape.mlp_width)]
    norm = ParameterShape((width,), is_layer_matrix=False)
    for _ in range(shape.layers):
        yield from (ParameterShape(each, is_layer_matrix=True) for each in (*attention, *mlp))
        yield from (norm, norm)
    yield norm
    # Tied embeddings are the LM head's weight too, and are counted once.
    for _ in range(1 if shape.tie_word_embeddings else 2):
        yield ParameterShape((vocabulary, width), is_layer_matrix=False)


def _is_layer_matrix(name: str, shape: tuple[int, ...]) -> bool:
    """Whether a tensor is a matrix of a layer.

    The name of such a tensor holds the layer's number: ``model.layers.0.mlp.up_proj.weight``.
    """
    numbered = any(part.isdecimal() for part in name.split("."))
    return numbered and len(shape) == 2 and not name.endswith("bias")


# ---------------------------------------------------------------------- warnings


def _find_warnings(
    config: JobConfig, capture: JobEstimate | None, steps: int | None, workers: list[WorkerState]
) -> Iterator[str]:
    if capture is not None and not capture.fits:
        yield (
            f"The cache needs about {capture.bytes} bytes,"
            f" but the disk has {capture.free_bytes} left."
        )
    if config.train is not None and steps is not None and config.train.warmup_steps >= steps:
        warmup = config.train.warmup_steps
        yield (
            f"train.warmup_steps {warmup} takes all {steps} steps:"
            " the learning rate never reaches its value."
        )
    if config.kind == "distill" and config.loss.hard_labels_only:
        yield (
            "loss.alpha 1 gives the teacher no weight, because alpha weighs the hard labels;"
            " the job captures the teacher all the same."
        )
    for stage in config.stages:
        serving = [worker for worker in workers if stage in worker.stages]
        needs = config.resources
        if stage != SEARCH and not any(
            worker.device.covers(needs.gpus, needs.memory) for worker in serving
        ):
            found = "none has the resources that it asks for" if serving else "there is none"
            yield f"The job will wait for a worker of stage {stage}: {found}."
