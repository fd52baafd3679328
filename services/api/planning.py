"""The plan of a job that is not created yet: its stages, its cache, its steps and its memory.

Runs no model and imports no torch: what is not known without them stays null.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict
from functools import partial
from pathlib import Path

from cache.errors import CacheError, PotstillError
from cache.store import read_manifest
from kd.capture.estimate.job import (
    Estimate,
    estimate_vocabulary_size,
    list_measured_files,
    list_teacher_files,
    measure_capture,
)
from kd.client.wire.plans import JobEstimate, JobPlan, LearnedText, MemoryEstimate
from kd.client.wire.service import WorkerState
from kd.config.job import JobConfig
from kd.config.kinds import SEARCH
from kd.errors import ConfigError
from kd.files import measure_free_bytes
from kd.memory.model_memory import estimate_least_memory, estimate_model_memory
from kd.preflight.learned_rows import LearnedRow, find_row_problems
from kd.progress import Notice
from kd.text.rows import COLUMNS
from services.api.kept_answers import KeptAnswers
from services.settings import Settings
from services.store.jobs.workers import explain_small_memory


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
    capture = estimate_capture(config, settings, kept)
    steps = tokens = None
    if config.train is not None:
        sequences = None if capture is None else capture.train_sequences
        if capture is None and config.cache.fingerprint is not None:
            with suppress(CacheError):
                manifest = read_manifest(settings.caches / config.cache.fingerprint)
                sequences = manifest.identity.data.train_sequences
        steps = config.train.count_steps(sequences)
        if steps is not None:
            tokens = steps * config.train.sequences_per_step * config.data.sequence_length
    learned, notices = _show_rows(config, settings.root, kept)
    teacher = config.teacher_files

    def find_vocabulary() -> int:
        assert teacher is not None, "without a teacher the vocabulary of a student is not asked for"
        return kept.recall(
            ["vocabulary", asdict(teacher)],
            list_teacher_files(teacher, settings.root),
            lambda: estimate_vocabulary_size(teacher, settings.root),
        )

    memory = estimate_model_memory(config, settings.root, find_vocabulary)
    return JobPlan(
        stages=list(config.stages),
        config=config.model_dump(mode="json"),
        capture=capture,
        steps=steps,
        tokens=tokens,
        memory=MemoryEstimate(**asdict(memory)),
        free_bytes=measure_free_bytes(settings.home),
        warnings=[
            *_find_warnings(config, capture, steps),
            *_find_worker_warnings(config, settings.root, workers),
            *map(str, notices),
        ],
        learned=learned,
    )


def _show_rows(
    config: JobConfig, root: Path, kept: KeptAnswers
) -> tuple[list[LearnedText], list[Notice]]:
    """Return what is learned of the first rows of chats, and what is worth knowing of them.

    Raises ``ConfigError`` for rows that a run would refuse.
    """
    if config.teacher_files is None or config.data.format not in COLUMNS:
        return [], []

    def look() -> tuple[list[LearnedText], list[Notice]]:
        rows, notices = list[LearnedRow](), list[Notice]()
        if problems := list(find_row_problems(config, root, notices.append, rows.append)):
            raise ConfigError(problems)
        return [LearnedText.model_validate(row.to_json()) for row in rows], notices

    try:
        files = list_measured_files(config, root)
    except PotstillError:  # a bucket does not answer
        return [], []
    sections = config.model_dump(mode="json", include={"data", "teacher"})
    return kept.recall(["learned", sections], files, look)


def estimate_capture(
    config: JobConfig, settings: Settings, kept: KeptAnswers
) -> JobEstimate | None:
    """Estimate what the job captures; None without a capture, and where only a worker can."""
    if not config.captures:
        return None
    sections = config.model_dump(mode="json", include={"data", "teacher", "cache"})
    distilled = config.model_copy(update={"kind": "distill"})
    try:
        files = list_measured_files(config, settings.root)
        measure = partial(measure_capture, distilled, settings.root)
        work, storage = kept.recall(["capture", sections], files, measure)
    except PotstillError:  # a dataset of the hub, or text that only the worker can read
        return None
    caches = settings.locate_caches(config.cache.store)
    estimate = Estimate.of(work, storage, config.cache.shard_sequences, caches)
    return JobEstimate(**estimate.to_json())


# ---------------------------------------------------------------------- warnings


def _find_warnings(
    config: JobConfig, capture: JobEstimate | None, steps: int | None
) -> Iterator[str]:
    if capture is not None and not capture.fits:
        yield (
            f"The cache needs about {capture.local_bytes} bytes of the disk of the caches,"
            f" which has {capture.free_bytes} left."
        )
    if config.train is not None and steps is not None and config.train.warmup_steps >= steps:
        warmup = config.train.warmup_steps
        yield (
            f"train.warmup_steps {warmup} takes all {steps} steps:"
            " the learning rate never reaches its value."
        )
    if config.captures and config.own_kind.trains_one and config.loss.hard_labels_only:
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
        if stage == SEARCH.name:
            continue
        serving = [worker for worker in workers if stage in worker.stages]
        if not any(worker.device.covers(needs.gpus, needs.memory) for worker in serving):
            found = "none has the resources that it asks for" if serving else "there is none"
            yield f"The job will wait for a worker of stage {stage}: {found}."
        elif small := explain_small_memory(least_memory, stage, serving):
            yield small
