"""A capture's bytes and seconds, from a few micro-batches of the real teacher written as a real shard.

Shapes: S sequences of the trial, P positions with a record.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import torch

from cache.codec import Codec
from cache.disk import files_below, make_folder, storage_errors
from cache.records import Records, Sequences
from cache.shard import Seal, shard_arrays, write_arrays
from cache.store import HEAD
from cache.store import capture as open_for_capture
from kd.config.job import JobConfig
from kd.errors import ConfigError
from kd.estimate import Estimate, Storage, Work, free_bytes, require_capture
from kd.pipeline import plan
from kd.precision import pick_device
from kd.progress import SILENT, Monitor
from kd.teacher import Plan, Reader, open_reader
from kd.validate import check_inputs

#: A trial ends after so many seconds of reading, sequences, or bytes of records, whichever comes first.
SECONDS, SEQUENCES, RECORD_BYTES = 10.0, 128, 1 << 28


def estimate_by_trial(config: JobConfig, home: Path, monitor: Monitor = SILENT) -> Estimate:
    """The estimate of a job by running its teacher on text from all over the job's; nothing of it stays.

    Raises ``ConfigError`` where the job captures nothing, and whatever its capture would raise.
    """
    require_capture(config)
    if problems := check_inputs(config, Path(), home):
        raise ConfigError(problems)
    planned = plan(config, monitor)
    with storage_errors(home):
        make_folder(home)
    monitor.emit("stage", stage="precompute", phase="loading the teacher")
    with TemporaryDirectory(prefix=".estimate-", dir=home) as folder:
        with (
            open_for_capture(Path(folder), planned.identity) as writer,
            open_reader(planned, writer, monitor) as reader,
        ):
            monitor.emit("stage", stage="precompute", phase="reading a few sequences")
            trial = _Trial.of(reader, planned)
        storage = trial.storage(Path(folder), planned.identity.record_codec())
        head = sum(files_below(writer.folder / HEAD).values())
    work = Work(
        planned.identity.data.train_sequences,
        planned.identity.data.validation_sequences,
        planned.identity.data.sequence_length,
        planned.corpus.train.positions + planned.corpus.validation.positions,
        counted=True,
    )
    storage = Storage(storage.position, storage.shard, head)
    pace = (trial.seconds / len(trial.sequences), _device())
    return Estimate.of(work, storage, config.cache.shard_sequences, free_bytes(home), pace)


@dataclass(frozen=True)
class _Trial:
    """Sequences from all over the text, their records, and the seconds that they took."""

    sequences: Sequences
    records: Records
    seconds: float

    @classmethod
    def of(cls, reader: Reader, planned: Plan) -> _Trial:
        """Read until there is enough; the first micro-batch, which warms up, does not count where there are others."""
        train = planned.corpus.train
        numbers = np.unique(np.linspace(0, len(train) - 1, min(SEQUENCES, len(train))).round().astype(np.int64))
        chosen = train.select(numbers)
        remote = planned.teacher.backend == "http"  # answers come side by side: whole rounds are timed, none is warm-up
        least = min(planned.teacher.concurrency, len(chosen)) if remote else 1
        counts, parts, times = [], [], [time.monotonic()]
        for count, records in reader.read(chosen, 0):
            counts.append(count)
            parts.append(records)
            times.append(time.monotonic())
            size = sum(column.nbytes for part in parts for column in part.columns.values())
            if sum(counts) >= least and (times[-1] - times[0] > SECONDS or size > RECORD_BYTES):
                break
        done, warm = sum(counts), 0 if remote else min(1, len(counts) - 1)
        seconds = (times[-1] - times[warm]) / sum(counts[warm:]) * done
        return cls(chosen.select(slice(0, done)), Records.concatenate(parts), seconds)

    def storage(self, folder: Path, codec: Codec) -> Storage:
        """Bytes of a position and of a shard, by the difference of a shard of all sequences and one of half of them."""
        whole = _shard_bytes(folder / "whole", self.sequences, self.records, codec)
        half = self.sequences.select(slice(0, len(self.sequences) // 2))
        positions = half.positions
        if not 0 < positions < len(self.records):
            return Storage(whole / max(len(self.records), 1), 0.0)
        less = _shard_bytes(folder / "half", half, self.records.slice(0, positions), codec)
        position = (whole - less) / (len(self.records) - positions)
        return Storage(position, max(whole - position * len(self.records), 0.0))


def _shard_bytes(folder: Path, sequences: Sequences, records: Records, codec: Codec) -> int:
    """Bytes of a shard with its seal."""
    with storage_errors(folder):
        write_arrays(folder, shard_arrays(sequences, records, codec))
        return Seal.of(folder, sequences, records).bytes


def _device() -> str:
    device = pick_device()
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"cpu, {torch.get_num_threads()} threads"
