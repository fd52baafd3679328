"""Rehearses a capture: the teacher reads a few sequences, whose records become a small cache."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

from cache.codec import Codec
from cache.disk import list_file_sizes, make_folder, storage_errors
from cache.records import Records, Sequences
from cache.shards.names import LM_HEAD
from cache.store import Cache, open_cache
from cache.writing.writer import open_writer as open_for_capture
from kd.capture.estimate.job import Estimate, require_capture
from kd.capture.estimate.storage import CacheSize, estimate_cache_size
from kd.capture.estimate.text import CaptureSize, TokenCounter, estimate_capture_size
from kd.capture.plan import CapturePlan, make_provenance, plan_capture
from kd.capture.shards import RecordReader
from kd.capture.teacher import Teacher, open_reader
from kd.config.job import JobConfig
from kd.errors import ConfigError
from kd.files import find_caches
from kd.forecast.operations import OperationCounter
from kd.memory.step_memory import read_device_peak, reset_peak_memory
from kd.models.precision import name_device, pick_device
from kd.progress import SILENT, Monitor
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
    """The estimate of a capture, and a small sealed cache of its teacher, in ``folder``.

    ``cache`` holds the sequences of the trial as training sequences. ``memory_bytes`` is the peak
    of the device's memory that a capture is expected to reach, and ``weight_bytes`` are the
    teacher's. ``first_sequences`` are those of the first micro-batch.
    """

    estimate: Estimate
    folder: Path
    cache: Cache
    memory_bytes: int
    weight_bytes: int
    first_sequences: int


@contextmanager
def open_trial(
    config: JobConfig,
    home: Path,
    monitor: Monitor = SILENT,
    counter: OperationCounter | None = None,
) -> Iterator[Trial]:
    """Run the job's teacher on the beginning of the text, and keep the records.

    A ``counter`` notes the operations of the first micro-batch, and what they allocate. The files
    below ``home`` are deleted at the end. Raises ``ConfigError`` where the job captures nothing,
    and the errors of the capture itself.
    """
    files = require_capture(config)
    with storage_errors(home):
        make_folder(home)
    with TemporaryDirectory(prefix=".estimate-", dir=home) as name:
        try:
            work = estimate_capture_size(config, Path(), TokenCounter.find(files, Path()))
            planned = plan_capture(_shorten_text(config), monitor, Path(name, TEXTS))
        except ConfigError:  # a dataset tells its size only when it is read
            planned = plan_capture(config, monitor, Path(name, TEXTS))
            work = _count_size(planned)
        monitor.emit("stage", stage="precompute", phase="loading the teacher")
        yield _run_trial(config, planned, work, Path(name), monitor, counter)


def _shorten_text(config: JobConfig) -> JobConfig:
    """The job with no more text than a trial reads."""
    most = min(SEQUENCES, config.data.max_train_samples or SEQUENCES)
    update = {"max_train_samples": most, "validation": (), "validation_fraction": 0.0}
    return config.model_copy(update={"data": config.data.model_copy(update=update)})


def _count_size(planned: CapturePlan) -> CaptureSize:
    """The text of a capture whose plan has read all of it."""
    data = planned.identity.data
    return CaptureSize(
        data.train_sequences,
        data.validation_sequences,
        data.sequence_length,
        planned.corpus.train.positions + planned.corpus.validation.positions,
        counted=True,
        held_out=planned.describe_held_out(),
    )


def _run_trial(
    config: JobConfig,
    planned: CapturePlan,
    work: CaptureSize,
    folder: Path,
    monitor: Monitor,
    counter: OperationCounter | None,
) -> Trial:
    device = pick_device()
    reset_peak_memory(device)
    with (
        open_for_capture(folder, planned.identity) as writer,
        open_reader(planned, writer, monitor) as reader,
    ):
        monitor.emit("stage", stage="precompute", phase="reading a few sequences")
        trial = _TrialCapture.read(reader, planned, counter)
        memory = read_device_peak(device)
        weights = reader.model.parameters() if isinstance(reader, Teacher) else ()
        weight_bytes = sum(each.nbytes for each in weights)
        sealed = _seal(folder / "cache", planned, trial.sequences, trial.records, reader)
    storage = _measure_storage(sealed, planned.identity.record_codec())
    pace = (trial.seconds / len(trial.sequences), name_device(device))
    caches = find_caches(folder.parent, config.cache.store)
    estimate = Estimate.of(work, storage, config.cache.shard_sequences, caches, pace)
    if device.type == "cpu":
        shard = min(config.cache.shard_sequences, work.sequences) / len(trial.sequences)
        memory += round((_SHARD_COPIES * shard - 1) * trial.record_bytes)
    return Trial(estimate, folder, sealed, memory, weight_bytes, trial.first_sequences)


def _seal(
    root: Path, planned: CapturePlan, sequences: Sequences, records: Records, reader: RecordReader
) -> Cache:
    """Write the records as a cache of one shard, with the LM head where the profile has one."""
    data = replace(planned.identity.data, train_sequences=len(sequences), validation_sequences=0)
    codec = replace(planned.identity.codec, shard_sequences=len(sequences))
    identity = replace(planned.identity, data=data, codec=codec)
    with open_for_capture(root, identity) as writer:
        writer.write_shard(0, sequences, records)
        if codec.profile == "hidden" and isinstance(reader, Teacher):
            writer.write_lm_head(reader.recorder.make_lm_head_arrays())
        writer.finish(make_provenance(planned))
    return open_cache(root / identity.fingerprint, identity)


def _measure_storage(sealed: Cache, codec: Codec) -> CacheSize:
    """The bytes of a position in the cache of a trial, beside what the table tells of a shard."""
    manifest = sealed.manifest
    shard = estimate_cache_size(codec).shard
    records = max(manifest.totals.bytes - shard, manifest.positions)
    lm_head = sum(list_file_sizes(sealed.folder / LM_HEAD).values())
    return CacheSize(records / max(manifest.positions, 1), shard, lm_head)


@dataclass(frozen=True)
class _TrialCapture:
    """Sequences of the text, their records, and the seconds that they took."""

    sequences: Sequences
    records: Records
    seconds: float
    first_sequences: int

    @property
    def record_bytes(self) -> int:
        """The bytes of the records in memory."""
        return sum(column.nbytes for column in self.records.columns.values())

    @classmethod
    def read(
        cls, reader: RecordReader, planned: CapturePlan, counter: OperationCounter | None
    ) -> _TrialCapture:
        """Read micro-batches until one of the limits is reached, and time them.

        The first micro-batch warms up: it is not timed if there are others.
        """
        train = planned.corpus.train
        numbers = np.unique(
            np.linspace(0, len(train) - 1, min(SEQUENCES, len(train))).round().astype(np.int64)
        )
        chosen = train.select(numbers)
        # A server answers many requests at once: a whole round of them is timed, and none is
        # warm-up.
        section = planned.teacher.section
        remote = not section.is_local
        least = min(section.concurrency, len(chosen)) if remote else 1
        counts = []
        parts = []
        times = [time.monotonic()]
        batches = ((each.sequences, each.encode()) for each in reader.deliver(chosen, 0))
        with counter or nullcontext():
            first = next(batches)
        for count, records in itertools.chain([first], batches):
            counts.append(count)
            parts.append(records)
            times.append(time.monotonic())
            size = sum(column.nbytes for part in parts for column in part.columns.values())
            if sum(counts) >= least and (times[-1] - times[0] > SECONDS or size > RECORD_BYTES):
                break
        done = sum(counts)
        warm = 0 if remote else min(1, len(counts) - 1)
        seconds = (times[-1] - times[warm]) / sum(counts[warm:]) * done
        sequences = chosen.select(slice(0, done))
        return cls(sequences, Records.concatenate(parts), seconds, counts[0])
