"""Estimate a capture by a trial: run the teacher on a few sequences, and write their records as a
real shard.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

from cache.codec import Codec
from cache.disk import list_file_sizes, make_folder, storage_errors
from cache.records import Records, Sequences
from cache.shard import Seal, make_shard_arrays, write_arrays
from cache.shards.names import LM_HEAD
from cache.store import Cache, open_cache
from cache.writing.writer import open_writer as open_for_capture
from kd.capture.estimate.job import Estimate, require_capture
from kd.capture.estimate.storage import CacheSize
from kd.capture.estimate.text import CaptureSize
from kd.capture.plan import CapturePlan, make_provenance, plan_capture
from kd.capture.shards import RecordReader
from kd.capture.teacher import Teacher, open_reader
from kd.config.job import JobConfig
from kd.files import find_caches
from kd.models.precision import name_device, pick_device
from kd.progress import SILENT, Monitor
from kd.text.corpus import TEXTS

#: A trial ends after this many seconds of reading.
SECONDS = 10.0
#: The most sequences that a trial reads.
SEQUENCES = 128
#: A trial ends when its records, which stay in memory, reach this many bytes.
RECORD_BYTES = 1 << 28


@dataclass(frozen=True)
class Trial:
    """The estimate of a capture, and a small sealed cache of its teacher, in ``folder``.

    ``cache`` holds the sequences of the trial as training sequences.
    """

    estimate: Estimate
    folder: Path
    cache: Cache


@contextmanager
def open_trial(config: JobConfig, home: Path, monitor: Monitor = SILENT) -> Iterator[Trial]:
    """Run the job's teacher on sequences from all parts of the text, and keep their records.

    The files below ``home`` are deleted at the end. Raises ``ConfigError`` where the job captures
    nothing, and the errors of the capture itself.
    """
    require_capture(config)
    with storage_errors(home):
        make_folder(home)
    with TemporaryDirectory(prefix=".estimate-", dir=home) as name:
        planned = plan_capture(config, monitor, Path(name, TEXTS))
        monitor.emit("stage", stage="precompute", phase="loading the teacher")
        yield _run_trial(config, planned, Path(name), monitor)


def _run_trial(config: JobConfig, planned: CapturePlan, folder: Path, monitor: Monitor) -> Trial:
    with (
        open_for_capture(folder, planned.identity) as writer,
        open_reader(planned, writer, monitor) as reader,
    ):
        monitor.emit("stage", stage="precompute", phase="reading a few sequences")
        trial = _TrialCapture.read(reader, planned)
        sealed = _seal(folder / "cache", planned, trial.sequences, trial.records, reader)
    storage = trial.measure_storage(folder, planned.identity.record_codec())
    lm_head = sum(list_file_sizes(writer.folder / LM_HEAD).values())
    storage = CacheSize(storage.position, storage.shard, lm_head)
    work = CaptureSize(
        planned.identity.data.train_sequences,
        planned.identity.data.validation_sequences,
        planned.identity.data.sequence_length,
        planned.corpus.train.positions + planned.corpus.validation.positions,
        counted=True,
        held_out=planned.describe_held_out(),
    )
    pace = (trial.seconds / len(trial.sequences), name_device(pick_device()))
    caches = find_caches(folder.parent, config.cache.store)
    estimate = Estimate.of(work, storage, config.cache.shard_sequences, caches, pace)
    return Trial(estimate, folder, sealed)


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


@dataclass(frozen=True)
class _TrialCapture:
    """Sequences from all parts of the text, their records, and the seconds that they took."""

    sequences: Sequences
    records: Records
    seconds: float

    @classmethod
    def read(cls, reader: RecordReader, planned: CapturePlan) -> _TrialCapture:
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
        remote = planned.teacher.backend == "http"
        least = min(planned.teacher.concurrency, len(chosen)) if remote else 1
        counts = []
        parts = []
        times = [time.monotonic()]
        for count, records in reader.read(chosen, 0):
            counts.append(count)
            parts.append(records)
            times.append(time.monotonic())
            size = sum(column.nbytes for part in parts for column in part.columns.values())
            if sum(counts) >= least and (times[-1] - times[0] > SECONDS or size > RECORD_BYTES):
                break
        done = sum(counts)
        warm = 0 if remote else min(1, len(counts) - 1)
        seconds = (times[-1] - times[warm]) / sum(counts[warm:]) * done
        return cls(chosen.select(slice(0, done)), Records.concatenate(parts), seconds)

    def measure_storage(self, folder: Path, codec: Codec) -> CacheSize:
        """Measure the bytes of a position and of a shard.

        A shard of all sequences is compared with one of half of them: the difference belongs to
        the positions, and what is left to the shard.
        """
        whole = _measure_shard(folder / "whole", self.sequences, self.records, codec)
        half = self.sequences.select(slice(0, len(self.sequences) // 2))
        positions = half.positions
        if not 0 < positions < len(self.records):
            return CacheSize(whole / max(len(self.records), 1), 0.0)
        less = _measure_shard(folder / "half", half, self.records.slice(0, positions), codec)
        position = (whole - less) / (len(self.records) - positions)
        return CacheSize(position, max(whole - position * len(self.records), 0.0))


def _measure_shard(folder: Path, sequences: Sequences, records: Records, codec: Codec) -> int:
    """Write a shard and return its bytes, its seal included."""
    with storage_errors(folder):
        write_arrays(folder, make_shard_arrays(sequences, records, codec))
        return Seal.of(folder, sequences, records).bytes
