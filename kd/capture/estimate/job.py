"""Estimate a job's capture before it runs.

by table   counts tokens in a sample of the text; bytes per token were measured once, on another
teacher
by trial   measures bytes and seconds of a few micro-batches (``kd.forecast.trial``)
"""

from __future__ import annotations

import math
from pathlib import Path

from cache.disk import sum_file_sizes
from cache.remote.address import read_binding
from kd.addresses import ModelSource
from kd.capture.codec_identity import Recipe, make_codec_identity
from kd.capture.estimate.storage import CacheSize, estimate_cache_size
from kd.capture.estimate.text import CaptureSize, TokenCounter, estimate_capture_size, require_width
from kd.client.wire.plans import JobEstimate
from kd.config.job import JobConfig
from kd.errors import ConfigError, Problem
from kd.files import measure_free_bytes
from kd.models.folder import find_source
from kd.text.text_files import find_files

#: Disk space that must stay free beside the cache, as a share of the cache: estimates err.
MARGIN = 0.05
#: Bytes that must stay free for logs, checkpoints and other programs.
RESERVE_BYTES = 64 * 2**20


def make_estimate(
    work: CaptureSize,
    storage: CacheSize,
    shard_sequences: int,
    caches: Path,
    pace: tuple[float, str] | None = None,
) -> JobEstimate:
    """Compute the estimate of a capture.

    ``caches`` is the folder of the caches, or the mirror of their bucket. ``pace`` is the seconds
    per sequence and the device they were measured on.
    """
    shards = math.ceil(work.sequences / shard_sequences)
    size = storage.sum_bytes(work.positions, shards)
    bucket = read_binding(caches)
    # A mirror that has reached its bound makes room for what comes.
    room = size if bucket is None else bucket.mirror_bytes - sum_file_sizes(caches)
    local = min(size, max(room, 0))
    free = measure_free_bytes(caches)
    seconds = None if pace is None else pace[0] * work.sequences
    return JobEstimate(
        method="table" if pace is None else "trial",
        tokens=work.sequences * work.sequence_length,
        tokens_counted=work.counted,
        train_sequences=work.train_sequences,
        validation_sequences=work.validation_sequences,
        positions=work.positions,
        shards=shards,
        bytes_per_token=round(size / max(work.positions, 1), 2),
        bytes=size,
        local_bytes=local,
        free_bytes=free,
        fits=local * (1 + MARGIN) + RESERVE_BYTES <= free,
        seconds=None if seconds is None else round(seconds, 1),
        hours=None if seconds is None else round(seconds / 3600, 3),
        device=None if pace is None else pace[1],
        held_out=work.held_out,
        bucket="" if bucket is None else f"what is free in {bucket.address} is not known",
    )


def estimate_by_table(config: JobConfig, root: Path, caches: Path) -> JobEstimate:
    """Estimate a job's capture without running its teacher; relative paths start at ``root``.

    The cache is to fit on the disk of ``caches``, as far as it lies there.
    Raises ``ConfigError`` where the job captures nothing, or where only a trial can find its size.
    """
    work, storage = measure_capture(config, root)
    return make_estimate(work, storage, config.cache.shard_sequences, caches)


def measure_capture(config: JobConfig, root: Path) -> tuple[CaptureSize, CacheSize]:
    """Return what ``estimate_by_table`` reads from files: the size of the text and of its cache.

    Raises what that function raises.
    """
    source = require_capture(config)
    tokenizer = TokenCounter.find(source, root)
    work = estimate_capture_size(config, root, tokenizer)
    clusters = choose_recipe(work).clusters
    identity = make_codec_identity(config.cache, config.keeps_entropies, clusters=clusters)
    codec = identity.record_codec(tokenizer.size)
    width = require_width(source, root) if codec.rules.needs_lm_head else 0
    return work, estimate_cache_size(codec, width)


def choose_recipe(work: CaptureSize) -> Recipe:
    """Choose the tables of the dither for a text of this size."""
    positions = work.positions * work.train_sequences // max(work.sequences, 1)
    return Recipe.choose(positions, work.train_sequences)


def list_measured_files(config: JobConfig, root: Path) -> list[Path]:
    """List the files on which the result of ``measure_capture`` depends."""
    texts = {
        (source, split)
        for split in ("train", "validation")
        for source in getattr(config.data, split)
        if isinstance(source, str)
    }
    files = [file for source, split in texts for file in find_files(source, root, split).files]
    teacher = config.teacher_files
    return files if teacher is None else files + list_teacher_files(teacher, root)


def list_teacher_files(source: ModelSource, root: Path) -> list[Path]:
    """List the files in the folder of the teacher's tokenizer, if it is on this machine."""
    folder = find_source(source, root)
    return [] if folder is None else [file for file in folder.path.iterdir() if file.is_file()]


def require_capture(config: JobConfig) -> ModelSource:
    """Return where the captured teacher comes from; ``ConfigError`` for a job without a capture."""
    if config.teachers:
        detail = "an estimate is of one teacher, but the job has several."
        remedy = "Estimate a job with each teacher and its sources alone."
        raise ConfigError([Problem("/teachers", detail, remedy)])
    source = config.teacher_files
    if not config.captures or source is None:
        detail = f"a job of kind {config.kind} captures nothing to estimate."
        remedy = "Set it to distill or precompute, with a teacher."
        raise ConfigError([Problem("/kind", detail, remedy)])
    return source
