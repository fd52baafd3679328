"""The plan of a job that is not created yet: its stages, its cache, its steps and its memory.

Runs no model and imports no torch: what is not known without them stays null.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from cache.errors import CacheError, PotstillError
from cache.store import read_manifest
from kd.capture.estimate.job import (
    Estimate,
    estimate_vocabulary_size,
    list_measured_files,
    list_teacher_files,
    measure_capture,
)
from kd.capture.estimate.storage import CacheSize
from kd.capture.estimate.text import CaptureSize
from kd.client.wire.plans import JobEstimate, JobPlan, LearnedText, MemoryEstimate
from kd.client.wire.service import WorkerState
from kd.config.job import JobConfig
from kd.errors import ConfigError, ModelError
from kd.files import measure_free_bytes
from kd.memory.devices import DeviceRates, find_device_kind
from kd.memory.host import read_memory_bytes
from kd.memory.model_memory import estimate_least_memory, estimate_model_memory
from kd.memory.training_phase import Place
from kd.planning.by_files import plan_by_files
from kd.planning.devices import CPU, DeviceGroup, DeviceName
from kd.planning.texts import TextFiles
from kd.preflight.learned_rows import LearnedRow, find_row_problems
from kd.progress import Notice
from kd.text.rows import COLUMNS
from services.api.kept_answers import KeptAnswers
from services.settings import SEARCH, Settings
from services.store.costs import find_price
from services.store.jobs.workers import explain_small_memory


def plan_job(
    config: JobConfig,
    settings: Settings,
    workers: list[WorkerState],
    kept: KeptAnswers | None = None,
    devices: str | None = None,
) -> JobPlan:
    """Return the plan of a valid job.

    What takes long is taken from ``kept``, as long as the files are the same. The training is
    planned for ``devices``, such as 8xh100; None means those of a worker that trains.
    """
    kept = kept or KeptAnswers()
    capture = estimate_capture(config, settings, kept)
    steps = _count_steps(config, settings, capture)
    learned, notices = _show_rows(config, settings.root, kept)
    return JobPlan(
        stages=list(config.stages),
        config=config.model_dump(mode="json"),
        capture=capture,
        steps=steps,
        tokens=_count_tokens(config, steps),
        memory=_estimate_memory(config, settings.root, kept),
        training=_plan_training(config, settings, workers, kept, devices),
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
    if config.teacher is None or config.data.format not in COLUMNS:
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
    if "precompute" not in config.stages or config.checks_cache:
        return None
    try:
        work, storage = _measure_capture(config, settings.root, kept)
    except PotstillError:  # a dataset of the hub, or text that only the worker can read
        return None
    caches = settings.locate_caches(config.cache.store)
    estimate = Estimate.of(work, storage, config.cache.shard_sequences, caches)
    return JobEstimate(**estimate.to_json())


def _measure_capture(
    config: JobConfig, root: Path, kept: KeptAnswers
) -> tuple[CaptureSize, CacheSize]:
    """Measure the text and the cache of a job that captures, or that reads such a cache."""
    sections = config.model_dump(mode="json", include={"data", "teacher", "cache"})
    return kept.recall(
        ["capture", sections],
        list_measured_files(config, root),
        lambda: measure_capture(config.model_copy(update={"kind": "distill"}), root),
    )


def _count_steps(config: JobConfig, settings: Settings, capture: JobEstimate | None) -> int | None:
    if config.train is None:
        return None
    sequences = (
        capture.train_sequences
        if capture is not None
        else _count_sealed_sequences(config, settings)
    )
    return config.train.count_steps(sequences)


def _count_sealed_sequences(config: JobConfig, settings: Settings) -> int | None:
    if config.cache.fingerprint is None:
        return None
    try:
        return read_manifest(
            settings.caches / config.cache.fingerprint
        ).identity.data.train_sequences
    except CacheError:
        return None


def _count_tokens(config: JobConfig, steps: int | None) -> int | None:
    if steps is None or config.train is None:
        return None
    return steps * config.train.sequences_per_step * config.data.sequence_length


# ---------------------------------------------------------------------- memory


def _estimate_memory(config: JobConfig, root: Path, kept: KeptAnswers) -> MemoryEstimate:
    found = estimate_model_memory(config, root, _make_vocabulary_finder(config, root, kept))
    return MemoryEstimate(**asdict(found))


def _make_vocabulary_finder(config: JobConfig, root: Path, kept: KeptAnswers) -> Callable[[], int]:
    """Make the function that returns the vocabulary of the job's teacher."""
    teacher = None if config.teacher is None else config.teacher.model_dump(mode="json")
    return lambda: kept.recall(
        ["vocabulary", teacher],
        list_teacher_files(config, root),
        lambda: estimate_vocabulary_size(config, root),
    )


# ---------------------------------------------------------------------- training


#: Memory of a worker's process beside its job: the libraries that it imports. An assumption.
_PROCESS_BYTES = 512 << 20
#: Rates of a processor that is not at hand, to compare settings by; no time is told of them.
_CORE = DeviceRates("cpu", 0, half=1e11, single=1e11, tf32=1e11, bandwidth=1e10)


def _plan_training(
    config: JobConfig,
    settings: Settings,
    workers: list[WorkerState],
    kept: KeptAnswers,
    devices: str | None,
) -> dict[str, Any] | None:
    """Plan the training for ``devices``, or for a worker that trains.

    None without a training or a device, and where only a loaded model tells the student. Devices
    that were asked for must suit the job; those of a worker need not.
    """
    group = _choose_devices(config, workers, devices)
    if group is None:
        return None
    files = TextFiles(
        settings.root,
        settings.home,
        lambda job, root: _measure_capture(job, root, kept)[0],
        _make_vocabulary_finder(config, settings.root, kept),
    )
    try:
        kind = "cuda" if group.place.is_gpu else CPU
        price = find_price(settings.prices, kind, group.place.rates.name)
        plan = plan_by_files(config, files, group, price)
    except ConfigError:
        if devices is not None:
            raise
        return None
    except ModelError:
        return None
    return None if plan is None else _hide_times(plan.to_json(), group)


def _choose_devices(
    config: JobConfig, workers: list[WorkerState], devices: str | None
) -> DeviceGroup | None:
    """The devices that were asked for; else the largest of a worker that trains."""
    training = [each.device for each in workers if "train" in each.stages]
    largest = max(training, key=lambda each: each.total_bytes, default=None)
    if devices is not None:
        name = DeviceName.parse(devices)
        if name.kind != CPU:
            return DeviceGroup.of_kind(name)
        memory = 0 if largest is None or largest.count else largest.memory_bytes
        return _make_processor(memory or read_memory_bytes(), name.count)
    if largest is None or not largest.memory_bytes:
        return None
    if not largest.count:
        return _make_processor(largest.memory_bytes, 1)
    kind = find_device_kind(largest.name)
    if kind is None:
        return None
    rates = replace(kind, name=largest.name, memory=largest.memory_bytes)
    return DeviceGroup(Place.named(rates), config.resources.gpus or largest.count)


def _make_processor(memory: int, count: int) -> DeviceGroup:
    place = Place(replace(_CORE, memory=memory), False, _PROCESS_BYTES, "fp32", is_timed=False)
    return DeviceGroup.of_host(place, count)


def _hide_times(plan: dict[str, Any], group: DeviceGroup) -> dict[str, Any]:
    """Leave the times of a processor out: nobody measured its rates."""
    if group.place.is_gpu:
        return plan
    least = [] if plan["shortfall"] is None else [plan["shortfall"]["least"]]
    for candidate in (*plan["candidates"], *least):
        candidate |= {"step_seconds": None, "step": None, "seconds": None, "efficiency": None}
        candidate |= {"cost": None, "why": ""}
    return plan


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
