"""The plan of a job that is not created yet: its stages, its cache, its steps and its memory.

Runs no model and imports no torch: what is not known without them stays null.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

from cache.errors import CacheError, PotstillError
from cache.store import read_manifest
from kd.capture.estimate.job import (
    list_measured_files,
    list_teacher_files,
    make_estimate,
    measure_capture,
)
from kd.capture.estimate.text import TokenCounter
from kd.client.wire.plans import JobEstimate, JobPlan, LearnedText, MemoryEstimate
from kd.client.wire.service import WorkerState
from kd.config.job import JobConfig
from kd.config.kinds import SEARCH
from kd.errors import ConfigError
from kd.files import measure_free_bytes
from kd.memory.model_memory import (
    count_student_bytes,
    count_teacher_bytes,
    estimate_least_memory,
    list_student_shapes,
)
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
    return JobPlan(
        stages=list(config.stages),
        config=config.model_dump(mode="json"),
        capture=capture,
        steps=steps,
        tokens=tokens,
        memory=_estimate_memory(config, settings.root, kept),
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
    try:
        work, storage = kept.recall(
            ["capture", sections, config.keeps_entropies],
            list_measured_files(config, settings.root),
            lambda: measure_capture(config, settings.root),
        )
    except PotstillError:  # a dataset of the hub, or text that only the worker can read
        return None
    caches = settings.locate_caches(config.cache.store)
    return make_estimate(work, storage, config.cache.shard_sequences, caches)


def _estimate_memory(config: JobConfig, root: Path, kept: KeptAnswers) -> MemoryEstimate:
    teacher = config.teacher_files
    trained = None if config.train is None else config.student
    is_new = trained is not None and trained.init is not None
    vocabulary = 0
    if is_new and teacher is not None:
        vocabulary = kept.recall(
            ["vocabulary", asdict(teacher)],
            list_teacher_files(teacher, root),
            lambda: TokenCounter.find(teacher, root).size,
        )
    shapes = () if is_new and not vocabulary else list_student_shapes(config, root, vocabulary)
    return MemoryEstimate(
        teacher_bytes=count_teacher_bytes(config, root),
        student_parameters=sum(each.size for each in shapes) or None,
        student_bytes=count_student_bytes(config, shapes),
    )


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
