"""The real child with a light stage: it writes real shards, then computes digests as its training.

The job's name says what it does: ``light-{seed}-{shards}-{milliseconds of a shard or step}``. Jobs
of one seed and one number of shards share a cache. Several workers may capture it together. A job
named ``poison`` dies at its start.

    precompute   writes shards of ``small.caches``, each with one rename; a resumed run checks them
    train        one step for each sequence: a digest of the step before and of the cache's content.
                 Each step is a file, written with one rename and checked by a resumed run. The last
                 one is the student. On several hosts each step waits for all members, over
                 connections that end with a process, as those of ranks do.

Beside the log in its run folder a child keeps ``ledger``: a line for every action, with the time
and the process.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import select
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.support.small.caches import (
    PROVENANCE,
    make_codec,
    make_identity,
    make_shard,
    make_token_map,
)
from cache.checking.verify import verify_cache
from cache.disk import make_folder, remove_path, write_file
from cache.errors import CacheError
from cache.manifest import CacheIdentity
from cache.remote.probe import require_store
from cache.store import Cache, open_cache
from cache.writing.writer import CacheWriter, open_helper, open_writer
from kd.config.job import JobConfig
from kd.files import RANKS, find_caches, write_json
from kd.progress import HostPlace, Monitor, ProgressMeter, ShardRanges, SharedCapture
from services.worker.stage_child import main

#: Sequences of a shard.
SEQUENCES = 4
POISON = "poison"
#: Wait of a worker for which no range of shards is left, while others finish.
WAIT_SECONDS = 0.1
#: How long the hosts of a training wait for each other.
MEETING_SECONDS = 60.0
#: What the leader tells the members: one more step, or the end.
STEP, END = b"s", b"e"
_NAME = re.compile(r"light-(\d+)-(\d+)-(\d+)(-\w+)?")


@dataclass(frozen=True)
class LightWork:
    """The work of one job; ``pause`` is in seconds for each shard or step."""

    seed: int
    shards: int
    pause: float

    @classmethod
    def of(cls, name: str) -> LightWork:
        """Parse the name of a job."""
        match = _NAME.fullmatch(name)
        assert match is not None, f"{name} is not light-SEED-SHARDS-MILLISECONDS"
        seed, shards, milliseconds = map(int, match.groups()[:3])
        return cls(seed, shards, milliseconds / 1000)

    @property
    def identity(self) -> CacheIdentity:
        """The identity of the cache that the job captures and trains from."""
        # Records of profile threshold are drawn by torch, which a light child does not import.
        codec = make_codec("tempered", shard_sequences=SEQUENCES, seed=self.seed)
        return make_identity(
            train_sequences=SEQUENCES * self.shards - 1, validation_sequences=1, codec=codec
        )


class Ledger:
    """The actions of this process, for the judge; times are those of CLOCK_MONOTONIC."""

    def __init__(self, run_dir: Path) -> None:
        self._handle = os.open(run_dir / "ledger", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        self._writer = f"{os.getpid()}-{os.urandom(4).hex()}"

    def note(self, what: str, resource: str = "", number: int = 0) -> None:
        """Append one line, in a single write."""
        line = {
            "at": time.monotonic(),
            "writer": self._writer,
            "what": what,
            "of": resource,
            "number": number,
        }
        os.write(self._handle, json.dumps(line).encode() + b"\n")


def run_stage(
    stage: str, config: JobConfig, home: Path, run_dir: Path, monitor: Monitor, turn: int
) -> dict[str, Any]:
    """Run the stage, and note its beginning and end."""
    ledger = Ledger(run_dir)
    ledger.note("begin", stage)
    if config.name.startswith(POISON):
        os.kill(os.getpid(), signal.SIGKILL)
    monitor.emit("stage", stage=stage, phase="working")
    # As kd.pipeline does: a bucket that does not answer is told after some ten seconds.
    require_store(find_caches(home, None), stage == "precompute")
    work = LightWork.of(config.name)
    run = {"precompute": precompute, "train": train}[stage]
    result = run(work, home, run_dir, monitor, ledger)
    ledger.note("end", stage)
    return result


def precompute(
    work: LightWork, home: Path, run_dir: Path, monitor: Monitor, ledger: Ledger
) -> dict[str, Any]:
    """Make sure that a sealed cache exists, as ``kd.capture.capturing.capture_cache`` does."""
    identity = work.identity
    root = find_caches(home, None)
    ranges = monitor.ranges
    if ranges is not None and ranges.shared is not None:
        assert ranges.shared.fingerprint == identity.fingerprint
        with open_helper(root, identity) as writer:
            _fill_ranges(writer, work, monitor, ranges, ledger)
        return {}
    monitor.emit("plan", fingerprint=identity.fingerprint)
    if not _is_sealed(root, identity):
        lock = root / f"{identity.fingerprint}.lock"
        shared = ranges is not None
        with open_writer(
            root, identity, lambda: monitor.wait_for("another capture", lock, "precompute"), shared
        ) as writer:
            if not _is_sealed(root, identity):
                if ranges is not None:
                    ranges.open(
                        SharedCapture(identity.fingerprint),
                        identity.shard_count,
                        lambda: monitor.check("before the first shard"),
                    )
                    _fill_ranges(writer, work, monitor, ranges, ledger)
                else:
                    _fill(writer, work, monitor, ledger)
                size = identity.tokenizer.vocabulary_size
                writer.write_token_map(make_token_map(size))
                writer.finish(PROVENANCE)
    summary = {"fingerprint": identity.fingerprint, "tokens": 0, "reused": False}
    monitor.emit("cache", **summary)
    return {"cache": summary}


def _is_sealed(root: Path, identity: CacheIdentity) -> bool:
    try:
        folder = open_cache(root / identity.fingerprint, identity).folder
    except CacheError:
        return False
    return not verify_cache(folder)


def _fill(writer: CacheWriter, work: LightWork, monitor: Monitor, ledger: Ledger) -> None:
    missing = writer.find_missing_shards()
    meter = ProgressMeter(work.shards, "shards", done=work.shards - len(missing))
    for index in missing:
        monitor.check(f"before shard {index}")
        _write(writer, work, index, ledger)
        monitor.emit("progress", **meter.advance(1, 0))


def _fill_ranges(
    writer: CacheWriter, work: LightWork, monitor: Monitor, ranges: ShardRanges, ledger: Ledger
) -> None:
    """Write the shards that are handed out, as ``kd.capture.shards.record_ranges`` does."""
    meter = ProgressMeter(writer.identity.data.sequences, "sequences")
    while (shards := ranges.take(lambda: monitor.check("between two ranges"))) is not None:
        if not shards:
            monitor.check("while others finish")
            time.sleep(WAIT_SECONDS)
            continue
        missing = writer.find_missing_shards(shards)
        for index in shards:
            monitor.check(f"before shard {index}")
            if index in missing:
                _write(writer, work, index, ledger)
            size = len(writer.identity.shard_range(index))
            monitor.emit("progress", **meter.advance(size, 0))
        ranges.finish(shards, sum(len(writer.identity.shard_range(index)) for index in shards))


def _write(writer: CacheWriter, work: LightWork, index: int, ledger: Ledger) -> None:
    content = make_shard(writer.identity, index)
    time.sleep(work.pause)
    ledger.note("write", writer.identity.fingerprint, index)
    writer.write_shard(index, *content)
    ledger.note("wrote", writer.identity.fingerprint, index)


def train(
    work: LightWork, home: Path, run_dir: Path, monitor: Monitor, ledger: Ledger
) -> dict[str, Any]:
    """Write every step that is missing or wrong; the student is the digest of the last step."""
    make_folder(run_dir / "steps")
    digests = compute_digests(
        open_cache(find_caches(home, None) / work.identity.fingerprint, work.identity)
    )
    meter = ProgressMeter(len(digests), "steps")
    with leading_members(run_dir, monitor) as meet:
        for step, digest in enumerate(digests, 1):
            file = run_dir / "steps" / f"{step:06d}"
            if file.exists() and file.read_text() == digest:
                meter.done += 1
                continue
            monitor.check(f"before step {step}")
            time.sleep(work.pause)
            meet()
            ledger.note("write", run_dir.name, step)
            write_file(file, digest.encode())
            ledger.note("wrote", run_dir.name, step)
            monitor.emit("metrics", step=step, loss=1.0 / step, writer=os.getpid())
            monitor.emit("progress", **meter.advance(1, 0))
    make_folder(run_dir / "student")
    write_file(run_dir / "student" / "digest", digests[-1].encode())
    monitor.emit("artifact", name="student", path=str(run_dir / "student"))
    return {"artifacts": {"student": str(run_dir / "student")}}


def compute_digests(store: Cache) -> list[str]:
    """Return the digest of each step: of the step before it, and of a sequence with its records."""
    digests = []
    last = hashlib.sha256()
    for number in range(len(store)):
        sequences, records = store.read([number])
        last.update(sequences.tokens.tobytes())
        for name in sorted(records.columns):
            last.update(records[name].tobytes())
        digests.append(last.copy().hexdigest())
    return digests


@contextmanager
def leading_members(run_dir: Path, monitor: Monitor) -> Iterator[Callable[[], None]]:
    """Let the members of the other hosts in; yields what waits for an answer of each of them.

    That raises ``ConnectionError`` where one has ended. Without other hosts it does nothing.
    """
    host = monitor.host
    if host is None:
        yield lambda: None
        return
    folder = run_dir / RANKS
    remove_path(folder)
    make_folder(folder)
    members: list[socket.socket] = []

    def meet() -> None:
        for each in members:
            each.sendall(STEP)
        for each in members:
            _receive(each, 1, monitor)

    with socket.create_server(split_endpoint(host)) as server:
        write_json(folder / "order.json", {"key": host.key})
        end = time.monotonic() + MEETING_SECONDS
        while len(members) < host.count - 1:
            monitor.check("before all members are there")
            if time.monotonic() > end:
                raise ConnectionError(f"{len(members) + 1} of {host.count} hosts are there")
            if select.select([server], [], [], WAIT_SECONDS)[0]:
                member = server.accept()[0]
                if _receive(member, len(host.key), monitor) != host.key.encode():
                    raise ConnectionError("a member of another gang has come")
                members.append(member)
        yield meet
        for each in members:
            each.sendall(END)


def follow(
    stage: str, config: JobConfig, home: Path, run_dir: Path, monitor: Monitor, turn: int
) -> dict[str, Any]:
    """Answer every step of the leader, until it ends."""
    assert monitor.host is not None
    ledger = Ledger(run_dir)
    ledger.note("join", stage, monitor.host.number)
    with socket.create_connection(split_endpoint(monitor.host), timeout=MEETING_SECONDS) as leader:
        leader.sendall(monitor.host.key.encode())
        while _receive(leader, 1, monitor) == STEP:
            leader.sendall(STEP)
            monitor.report_alive()
    ledger.note("leave", stage, monitor.host.number)
    return {}


def split_endpoint(host: HostPlace) -> tuple[str, int]:
    """Return the address and the port of the leader."""
    address, _, port = host.endpoint.rpartition(":")
    return address, int(port)


def _receive(peer: socket.socket, count: int, monitor: Monitor) -> bytes:
    """Wait for ``count`` bytes; raise ``ConnectionError`` if the other process has ended."""
    found = b""
    while len(found) < count:
        monitor.check("while the hosts meet")
        with suppress(TimeoutError):
            peer.settimeout(WAIT_SECONDS)
            more = peer.recv(count - len(found))
            if not more:
                raise ConnectionError("another host is lost")
            found += more
    return found


if __name__ == "__main__":
    # A test may give the worker a false clock through LD_PRELOAD. The child dates the ledger, so it
    # starts itself again without it.
    if os.environ.pop("LD_PRELOAD", None):
        command = [sys.executable, "-P", "-m", "bench.support.light_child"]
        os.execv(sys.executable, command)  # noqa: S606
    sys.exit(main(run_stage, follow))
