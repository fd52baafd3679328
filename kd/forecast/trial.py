"""Rehearses a capture: the teacher reads a few sequences, whose records become a small cache."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from cache.disk import list_file_sizes
from cache.records import Records, Sequences
from cache.shards.names import LM_HEAD
from cache.store import Cache, open_cache
from cache.writing.writer import open_writer as open_for_capture
from kd.capture.estimate.job import choose_recipe, make_estimate, require_capture
from kd.capture.estimate.storage import CacheSize, estimate_cache_size
from kd.capture.estimate.text import CaptureSize, TokenCounter, estimate_capture_size
from kd.capture.opening import open_reader
from kd.capture.plan import CapturePlan, make_provenance, plan_capture
from kd.capture.shards import RecordReader
from kd.client.wire.plans import JobEstimate
from kd.config.job import JobConfig
from kd.errors import ConfigError
from kd.files import find_caches
from kd.memory.step_memory import read_device_peak, reset_peak_memory
from kd.models.precision import name_device, pick_device
from kd.progress import Monitor
from kd.text.corpus import TEXTS

#: A trial ends after this many seconds of reading.
SECONDS = 10.0
#: The most sequences that a trial reads.
SEQUENCES = 128
#: A trial ends when its records, which stay in memory, reach this many bytes.
RECORD_BYTES = 1 << 28
#: Times that the records of a shard are in memory while it is sealed.
_SHARD_COPIES = 3


@dataclass(frozen=True)
class Trial:
    """The text of a capture, its estimate, and a small sealed cache of its teacher.

    ``cache`` holds the sequences of the trial as training sequences. ``memory_bytes`` is the peak
    of the device's memory that a capture is expected to reach.
    """

    text: CaptureSize
    estimate: JobEstimate
    cache: Cache
    memory_bytes: int


def run_trial(config: JobConfig, home: Path, folder: Path, monitor: Monitor) -> Trial:
    """Run the job's teacher on the beginning of the text, and keep the records in ``folder``.

    Raises ``ConfigError`` where the job captures nothing, and the errors of the capture itself.
    """
    planned, text = _plan_trial(config, folder, monitor)
    monitor.emit("stage", stage="precompute", phase="loading the teacher")
    device = pick_device()
    reset_peak_memory(device)
    with (
        open_for_capture(folder, planned.identity) as writer,
        open_reader(planned, writer, monitor) as reader,
    ):
        monitor.emit("stage", stage="precompute", phase="reading a few sequences")
        some = _Sample.read(reader, planned)
        memory = read_device_peak(device)
        sealed = _seal(folder / "cache", planned, some, reader)
    storage = _measure_size(planned, sealed, text)
    pace = (some.seconds / len(some.sequences), name_device(device))
    caches = find_caches(home, config.cache.store)
    estimate = make_estimate(text, storage, config.cache.shard_sequences, caches, pace)
    if device.type == "cpu":
        whole = min(config.cache.shard_sequences, text.sequences) / len(some.sequences)
        memory += round((_SHARD_COPIES * whole - 1) * some.records.nbytes)
    return Trial(text, estimate, sealed, memory)


def _measure_size(planned: CapturePlan, sealed: Cache, text: CaptureSize) -> CacheSize:
    """Measure the bytes of a position; the table tells what a trial is too short for.

    That is what a shard takes besides its positions, and what more clusters of dither change.
    """
    manifest = sealed.manifest
    codec = planned.identity.record_codec()
    known = estimate_cache_size(codec)
    short = planned.identity.codec.shard_sequences > len(sealed)
    shard = known.shard if short else 0.0
    position = max(manifest.totals.bytes - shard, manifest.positions) / max(manifest.positions, 1)
    if not codec.rules.dithered:
        lm_head = sum(list_file_sizes(sealed.folder / LM_HEAD).values())
        return CacheSize(position, shard, lm_head)
    whole = estimate_cache_size(replace(codec, clusters=choose_recipe(text).clusters))
    return CacheSize(position + whole.position - known.position, shard, whole.once)


def _plan_trial(
    config: JobConfig, folder: Path, monitor: Monitor
) -> tuple[CapturePlan, CaptureSize]:
    """Plan a capture of no more text than a trial reads, and estimate the size of the whole text.

    A dataset tells its size only when all of it is read.
    """
    files = require_capture(config)
    try:
        text = estimate_capture_size(config, Path(), TokenCounter.find(files, Path()))
    except ConfigError:
        planned = plan_capture(config, monitor, folder / TEXTS)
        data, corpus = planned.identity.data, planned.corpus
        positions = corpus.train.positions + corpus.validation.positions
        counts = (data.train_sequences, data.validation_sequences, data.sequence_length, positions)
        return planned, CaptureSize(*counts, counted=True, held_out=planned.describe_held_out())
    most = min(SEQUENCES, config.data.max_train_samples or SEQUENCES)
    update = {"max_train_samples": most, "validation": (), "validation_fraction": 0.0}
    short = config.model_copy(update={"data": config.data.model_copy(update=update)})
    return plan_capture(short, monitor, folder / TEXTS), text


def _seal(root: Path, planned: CapturePlan, some: _Sample, reader: RecordReader) -> Cache:
    """Write the records as a cache, with the LM head where the profile has one.

    Its shards are of the size that the capture gives them, if a trial reads so many sequences.
    """
    count = len(some.sequences)
    data = replace(planned.identity.data, train_sequences=count, validation_sequences=0)
    size = min(planned.identity.codec.shard_sequences, count)
    codec = replace(planned.identity.codec, shard_sequences=size)
    identity = replace(planned.identity, data=data, codec=codec)
    with open_for_capture(root, identity) as writer:
        here = reader.recorder
        if here is not None and here.tables is not None:
            writer.write_tables(here.tables)
        end = 0
        for shard in range(identity.shard_count):
            sequences = some.sequences.select(identity.shard_range(shard))
            begin, end = end, end + sequences.positions
            writer.write_shard(shard, sequences, some.records.slice(begin, end))
        if identity.record_codec().rules.needs_lm_head and here is not None:
            writer.write_lm_head(here.make_lm_head_arrays())
        writer.finish(make_provenance(planned))
    return open_cache(root / identity.fingerprint, identity)


@dataclass(frozen=True)
class _Sample:
    """Sequences of the text, their records, and the seconds that they took."""

    sequences: Sequences
    records: Records
    seconds: float

    @classmethod
    def read(cls, reader: RecordReader, planned: CapturePlan) -> _Sample:
        """Read micro-batches until one of the limits is reached, and time them.

        The first micro-batch warms up: it is not timed if there are others.
        """
        train = planned.corpus.train
        places = np.linspace(0, len(train) - 1, min(SEQUENCES, len(train)))
        chosen = train.select(np.unique(places.round().astype(np.int64)))
        # A server answers many requests at once: a whole round of them is timed, and none is
        # warm-up.
        section = planned.teacher.section
        remote = not section.is_local
        least = min(section.concurrency, len(chosen)) if remote else 1
        counts = []
        parts = []
        times = [time.monotonic()]
        for reading in reader.deliver(chosen, 0):
            counts.append(reading.sequences)
            parts.append(reading.encode())
            times.append(time.monotonic())
            size = sum(part.nbytes for part in parts)
            if sum(counts) >= least and (times[-1] - times[0] > SECONDS or size > RECORD_BYTES):
                break
        done = sum(counts)
        warm = 0 if remote else min(1, len(counts) - 1)
        seconds = (times[-1] - times[warm]) / sum(counts[warm:]) * done
        return cls(chosen.select(slice(0, done)), Records.concatenate(parts), seconds)
