"""The plan of a job that is not created yet: its stages, its cache, its steps and its memory.

Runs no model and imports no torch: what is not known without them stays null.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import asdict
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
from kd.memory.model_memory import estimate_least_memory, estimate_model_memory
from services.api.answers.views import JobPlan, MemoryEstimate
from services.api.kept_answers import KeptAnswers
from services.settings import SEARCH, Settings
from services.store.jobs.workers import explain_small_memory
from services.store.schemas import JobEstimate, WorkerState


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
        warnings=[
            *_find_warnings(config, capture, steps),
            *_find_worker_warnings(config, settings.root, workers),
        ],
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
    teacher = None if config.teacher is None else config.teacher.model_dump(mode="json")

    def find_vocabulary() -> int:
        files = list_teacher_files(config, root)
        return kept.recall(
            ["vocabulary", teacher], files, lambda: estimate_vocabulary_size(config, root)
        )

    return MemoryEstimate(**asdict(estimate_model_memory(config, root, find_vocabulary)))


# ---------------------------------------------------------------------- warnings


def _find_warnings(
    config: JobConfig, capture: JobEstimate | None, steps: int | None
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


def _find_worker_warnings(
    config: JobConfig, root: Path, workers: list[WorkerState]
) -> Iterator[str]:
    """Say for each stage that no worker has the resources, or the memory that the models need."""
    least_memory = estimate_least_memory(config, root)
    needs = config.resources
    for stage in config.stages:
        if stage == SEARCH:
            continue
        serving = [worker for worker in workers if stage in worker.stages]
        if not any(worker.device.covers(needs.gpus, needs.memory) for worker in serving):
            found = "none has the resources that it asks for" if serving else "there is none"
            yield f"The job will wait for a worker of stage {stage}: {found}."
        elif small := explain_small_memory(least_memory, stage, serving):
            yield small
