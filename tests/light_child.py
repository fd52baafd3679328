"""The real child with a stage that is light and true: it writes real shards through the cache package, then trains.

A job's name says what it does, as ``light-{seed}-{shards}-{milliseconds of a shard or step}``; jobs of one seed and
number of shards share one cache. ``poison`` dies at its start.

    precompute   shards of ``cache.testing``, each published by one rename; sealed ones are checked on resume
    train        a step a sequence: digest of the step before and of what the cache holds; each is a file, published
                 by one rename and checked on resume; the last one is the student

Beside its run folder's log a child keeps ``ledger``: a line for all that it does, with the time and who it is.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import signal
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cache.disk import make_folder, write_file
from cache.errors import CacheError
from cache.manifest import CacheIdentity
from cache.store import Cache, CacheWriter, capture, open_cache, verify
from cache.testing import PROVENANCE, make_codec, make_identity, make_shard
from kd.config.job import JobConfig
from kd.progress import Meter, Monitor
from services.worker.child import main

SEQUENCES = 4  # of a shard
POISON = "poison"
_NAME = re.compile(r"light-(\d+)-(\d+)-(\d+)(-\w+)?")


@dataclass(frozen=True)
class Work:
    """What a job does."""

    seed: int
    shards: int
    pause: float

    @classmethod
    def of(cls, name: str) -> Work:
        """By the job's name."""
        match = _NAME.fullmatch(name)
        assert match is not None, f"{name} is not light-SEED-SHARDS-MILLISECONDS"
        seed, shards, milliseconds = map(int, match.groups()[:3])
        return cls(seed, shards, milliseconds / 1000)

    @property
    def identity(self) -> CacheIdentity:
        """Of the cache that it captures and trains from."""
        codec = make_codec(shard_sequences=SEQUENCES, seed=self.seed)
        return make_identity(train_sequences=SEQUENCES * self.shards - 1, validation_sequences=1, codec=codec)


class Ledger:
    """What this process has done, for whoever judges it afterwards: times are those of CLOCK_MONOTONIC."""

    def __init__(self, run_dir: Path) -> None:
        self._handle = os.open(run_dir / "ledger", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        self._writer = f"{os.getpid()}-{os.urandom(4).hex()}"

    def note(self, what: str, resource: str = "", number: int = 0) -> None:
        """Add a line, whole."""
        line = {"at": time.monotonic(), "writer": self._writer, "what": what, "of": resource, "number": number}
        os.write(self._handle, json.dumps(line).encode() + b"\n")


def run_stage(stage: str, config: JobConfig, home: Path, run_dir: Path, monitor: Monitor) -> dict[str, Any]:
    """Capture or train."""
    ledger = Ledger(run_dir)
    ledger.note("begin", stage)
    if config.name.startswith(POISON):
        os.kill(os.getpid(), signal.SIGKILL)
    monitor.emit("stage", stage=stage, phase="working")
    work = Work.of(config.name)
    run = {"precompute": precompute, "train": train}[stage]
    result = run(work, home, run_dir, monitor, ledger)
    ledger.note("end", stage)
    return result


def precompute(work: Work, home: Path, run_dir: Path, monitor: Monitor, ledger: Ledger) -> dict[str, Any]:
    """Make sure that the cache is sealed, as ``kd.teacher.capture`` does."""
    identity, root = work.identity, home / "caches"
    monitor.emit("plan", fingerprint=identity.fingerprint)
    if not _is_sealed(root, identity):
        lock = root / f"{identity.fingerprint}.lock"
        with capture(root, identity, lambda: monitor.wait_for("another capture", lock, "precompute")) as writer:
            if not _is_sealed(root, identity):
                _fill(writer, work, monitor, ledger)
                writer.finish(PROVENANCE)
    summary = {"fingerprint": identity.fingerprint, "tokens": 0, "reused": False}
    monitor.emit("cache", **summary)
    return {"cache": summary}


def _is_sealed(root: Path, identity: CacheIdentity) -> bool:
    try:
        folder = open_cache(root / identity.fingerprint, identity).folder
    except CacheError:
        return False
    return not verify(folder)


def _fill(writer: CacheWriter, work: Work, monitor: Monitor, ledger: Ledger) -> None:
    missing = writer.missing_shards()
    meter = Meter(work.shards, "shards", done=work.shards - len(missing))
    for index in missing:
        monitor.check(f"before shard {index}")
        content = make_shard(writer.identity, index)
        time.sleep(work.pause)
        ledger.note("write", writer.identity.fingerprint, index)
        writer.write_shard(index, *content)
        ledger.note("wrote", writer.identity.fingerprint, index)
        monitor.emit("progress", **meter.advance(1, 0))


def train(work: Work, home: Path, run_dir: Path, monitor: Monitor, ledger: Ledger) -> dict[str, Any]:
    """Go on from the newest step that is as it must be; the student is the digest of the last one."""
    make_folder(run_dir / "steps")
    digests = trained(open_cache(home / "caches" / work.identity.fingerprint, work.identity))
    meter = Meter(len(digests), "steps")
    for step, digest in enumerate(digests, 1):
        file = run_dir / "steps" / f"{step:06d}"
        if file.exists() and file.read_text() == digest:
            meter.done += 1
            continue
        monitor.check(f"before step {step}")
        time.sleep(work.pause)
        ledger.note("write", run_dir.name, step)
        write_file(file, digest.encode())
        ledger.note("wrote", run_dir.name, step)
        monitor.emit("metrics", step=step, loss=1.0 / step, writer=os.getpid())
        monitor.emit("progress", **meter.advance(1, 0))
    make_folder(run_dir / "student")
    write_file(run_dir / "student" / "digest", digests[-1].encode())
    monitor.emit("artifact", name="student", path=str(run_dir / "student"))
    return {"artifacts": {"student": str(run_dir / "student")}}


def trained(store: Cache) -> list[str]:
    """The digest of every step: of the one before it and of a sequence with its records."""
    digests, last = [], hashlib.sha256()
    for number in range(len(store)):
        sequences, records = store.read([number])
        last.update(sequences.tokens.tobytes())
        for name in sorted(records.columns):
            last.update(records[name].tobytes())
        digests.append(last.copy().hexdigest())
    return digests


if __name__ == "__main__":
    if os.environ.pop("LD_PRELOAD", None):  # the worker lives by a false clock: this child, which dates the ledger, not
        os.execv(sys.executable, [sys.executable, "-P", "-m", "tests.light_child"])  # noqa: S606
    sys.exit(main(run_stage))
