"""The real child with a simulated teacher: a device that delivers at a set rate, and sleeps.

The job's name is ``simulated-RATE-SHARDS``, and a word that no other job has. All but the forward
pass is real: random numbers, encoding, sealing, writing, ranges. The child that leads begins to
read when the file ``go`` appears in its run folder: all workers are there.
"""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bench.capture import CaptureSizes, SimulatedDevice, make_shard_identity, make_texts
from bench.support.small.caches import PROVENANCE, make_token_map
from cache.manifest import CacheIdentity
from cache.records import Records, Sequences, TailSums
from cache.writing.writer import CacheWriter, open_helper, open_writer
from kd.capture.recording import TeacherReading
from kd.capture.shards import CaptureReport, record_ranges
from kd.config.job import JobConfig
from kd.progress import Monitor, SharedCapture
from services.worker.stage_child import main

SIZES = CaptureSizes(vocabulary=128_256, length=512, shard_sequences=64)
GO = "go"
#: The file that a helper writes when it has its libraries and its device.
READY = "ready"
_NAME = re.compile(r"simulated-(\d+)-(\d+)-\w+")


class PacedReader:
    """A teacher that delivers at ``rate`` tokens a second."""

    def __init__(self, identity: CacheIdentity, rate: float) -> None:
        self.device = SimulatedDevice.prepare(SIZES, identity.record_codec())
        self._rate = rate

    def deliver(self, sequences: Sequences, first: int) -> Iterator[TeacherReading]:
        """Yield what the device delivers of each micro-batch."""
        return self.device.deliver(sequences, first, self._rate)

    def take_tail_sums(self) -> TailSums | None:
        """The simulated samples have no tails that a mean could be made of."""
        return None


class NoHeldOut:
    """All text is training text."""

    def holds_out(self, index: int) -> bool:
        """Whether shard ``index`` has held-out sequences."""
        return False

    def add(self, index: int, sequences: Sequences, records: Records) -> None:
        """Nothing is compared."""

    def find_warning(self) -> str | None:
        """There is nothing to warn of."""
        return None


def parse_name(name: str) -> tuple[int, int]:
    """Return tokens a second and shards of a job by its name."""
    match = _NAME.fullmatch(name)
    assert match is not None, f"{name} is not simulated-RATE-SHARDS-WORD"
    rate, shards = map(int, match.groups())
    return rate, shards


def make_identity_of(shards: int) -> CacheIdentity:
    """Make the identity of a cache of so many shards."""
    return make_shard_identity(SIZES, shards)


def run_stage(
    stage: str, config: JobConfig, home: Path, run_dir: Path, monitor: Monitor, turn: int
) -> dict[str, Any]:
    """Capture the shards that are handed to this process; lead or help."""
    rate, shards = parse_name(config.name)
    identity = make_identity_of(shards)
    # As many jobs as there are rounds capture the same: each has a cache of its own.
    root = home / "caches" / config.name
    ranges = monitor.ranges
    assert ranges is not None
    reader = PacedReader(identity, rate)
    if ranges.shared is not None:
        (run_dir / READY).touch()
        with open_helper(root, identity) as writer:
            _record(reader, writer, monitor)
        return {}
    monitor.emit("plan", fingerprint=identity.fingerprint)
    with open_writer(root, identity, shared=True) as writer:
        writer.write_tables(reader.device.tables)
        ranges.open(
            SharedCapture(identity.fingerprint), shards, lambda: monitor.check("before a shard")
        )
        while not (run_dir / GO).exists():
            monitor.check("while the others come")
            time.sleep(0.05)
        _record(reader, writer, monitor)
        writer.write_token_map(make_token_map(identity.tokenizer.vocabulary_size))
        writer.finish(PROVENANCE)
    return {"cache": {"fingerprint": identity.fingerprint}}


def _record(reader: PacedReader, writer: CacheWriter, monitor: Monitor) -> None:
    assert monitor.ranges is not None
    report = CaptureReport(monitor, writer.identity, NoHeldOut())  # type: ignore[arg-type]
    texts = make_texts(SIZES)  # of every shard
    record_ranges(reader, writer, lambda _: texts, monitor.ranges, report)


if __name__ == "__main__":
    sys.exit(main(run_stage))
