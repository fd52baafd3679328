"""Measure how a cache of any size opens, and how fast the sequences of a training step are found.

    python bench/loops/manifest.py [--tokens 1e12] [--steps 400] [--home FOLDER] [--out FILE]

The cache is a manifest in pieces, as a capture writes it, and its first shard, which is real but
short of records: no other shard exists. Entries hold made-up counts and digests.

The columns:

    open, ms            ``open_cache`` in a new process, the median of five processes
    step, ms            the numbers of the sequences of a step, where they lie (shard and row), for
                        random steps of the first three epochs: median, and the 95th percentile
    + entries, ms       the same, and the manifest's entries of their shards, that is the digest
                        that each shard's seal must have; the pieces come from the disk's cache
    memory, MiB         most resident memory of the process above that after the imports
"""

from __future__ import annotations

import argparse
import hashlib
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import torch

from bench.speed import read_cpu_name
from bench.support.small.caches import (
    PROVENANCE,
    make_codec,
    make_identity,
    make_records,
    make_sequences,
    make_tables,
)
from cache.manifest import CacheIdentity
from cache.shards.entries import ShardEntry
from cache.shards.manifest_pieces import write_pieces
from cache.shards.names import MANIFEST
from cache.store import open_cache
from cache.writing.writer import open_writer
from kd.memory.step_memory import read_peak_memory, read_resident_memory, reset_peak_memory
from kd.text.steps.order import (
    EpochOrder,
    choose_window,
    list_step_indices,
    order_by_windows,
    shuffle_epoch,
)

CPU = torch.device("cpu")
LENGTH = 4096
SHARD_SEQUENCES = 256
VOCABULARY = 300
#: Sequences of a step.
BATCH = 512
#: Positions of each sequence of the first shard that have a record.
RECORDED = 4
OPENINGS = 5
SEED = 1
MIB = 1 << 20
COLUMNS = (
    "tokens", "shards", "manifest, MiB", "open, ms", "order", "step, ms", "95 %",
    "+ entries, ms", "95 %", "memory, MiB",
)  # fmt: skip


def make_big_identity(tokens: float) -> CacheIdentity:
    """Make the identity of a cache of ``tokens`` tokens; one sequence in 10,000 is held out."""
    sequences = max(round(tokens / LENGTH), 2 * SHARD_SEQUENCES)
    held_out = max(sequences // 10_000, 1)
    codec = make_codec(shard_sequences=SHARD_SEQUENCES)
    return make_identity(VOCABULARY, LENGTH, sequences - held_out, held_out, codec)


def write_cache(root: Path, identity: CacheIdentity) -> Path:
    """Write the first shard and the manifest of a cache below ``root``; return its folder."""
    whole = make_sequences(SEED, SHARD_SEQUENCES, LENGTH, VOCABULARY)
    whole = replace(whole, target_mask=whole.target_mask & (np.arange(LENGTH) < RECORDED))
    records = make_records(SEED, whole.positions, identity.record_codec())
    # The writer of a cache of one shard makes the manifest, which then gets all other entries.
    small = replace(identity, data=replace(identity.data, train_sequences=SHARD_SEQUENCES))
    small = replace(small, data=replace(small.data, validation_sequences=0))
    with open_writer(root / "small", small) as writer:
        writer.write_tables(make_tables(VOCABULARY, identity.codec.clusters))
        writer.write_shard(0, whole, records)
        manifest = writer.finish(PROVENANCE)
    folder = root / identity.fingerprint
    (root / "small" / small.fingerprint).rename(folder)
    pieces = write_pieces(folder, list_entries(identity, manifest.shards[0]))
    manifest = replace(manifest, identity=identity, shards=(), pieces=pieces)
    (folder / MANIFEST).write_bytes(manifest.to_bytes())
    return folder


def list_entries(identity: CacheIdentity, first: ShardEntry) -> Iterator[ShardEntry]:
    """Yield an entry for each shard; only the first is true."""
    yield first
    for index in range(1, identity.shard_count):
        sequences = len(identity.shard_range(index))
        digest = hashlib.sha256(str(index).encode()).hexdigest()
        positions = sequences * (LENGTH - 1)
        yield ShardEntry(sequences, positions, 3 * positions, 4 * positions, 20 * positions, digest)


def time_steps(folder: Path, order: str, steps: int) -> Iterator[float]:
    """Yield the milliseconds of finding each of ``steps`` steps, without and with entries."""
    source = open_cache(folder)
    arrange: EpochOrder = shuffle_epoch
    if order == "windows":
        arrange = partial(order_by_windows, *choose_window(source))
    count = source.train_count
    numbers = np.random.default_rng(SEED).integers(0, 3 * count // BATCH, steps + 3)
    for place, step in enumerate(numbers.tolist()):
        began = time.perf_counter()
        found = list_step_indices(count, BATCH, SEED, step, arrange)
        shards, _rows = np.divmod(found, SHARD_SEQUENCES)
        located = time.perf_counter()
        for shard in np.unique(shards).tolist():
            _ = source.entries[shard].digest
        ended = time.perf_counter()
        if place >= 3:  # the first steps load code
            yield 1e3 * (located - began)
            yield 1e3 * (ended - began)


def run_child(folder: Path, order: str, steps: int) -> None:
    """Open the cache in this process, find steps if any, and print the numbers."""
    before = read_resident_memory()
    reset_peak_memory(CPU)
    began = time.perf_counter()
    opened = open_cache(folder)
    seconds = time.perf_counter() - began
    assert len(opened.entries) == opened.identity.shard_count
    found = list(time_steps(folder, order, steps)) if steps else []
    print(1e3 * seconds, (read_peak_memory(CPU) - before) / MIB, *found)


def measure(folder: Path, order: str, steps: int) -> list[float]:
    """Run a child, and return what it printed."""
    command = [sys.executable, __file__, "--child", str(folder), order, str(steps)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return [float(word) for word in done.stdout.split()]


def make_rows(root: Path, tokens: float, steps: int) -> Iterator[list[str]]:
    """Yield the cells of the rows of one size."""
    identity = make_big_identity(tokens)
    began = time.perf_counter()
    folder = write_cache(root, identity)
    print(f"wrote {folder.name} in {time.perf_counter() - began:.0f} s", file=sys.stderr)
    manifest = open_cache(folder).manifest
    size = (folder / MANIFEST).stat().st_size + (manifest.pieces.bytes if manifest.pieces else 0)
    opened = statistics.median(measure(folder, "windows", 0)[0] for _ in range(OPENINGS))
    for order in ("windows", "shuffled"):
        _, memory, *found = measure(folder, order, steps)
        cells = [
            f"{identity.data.sequences * LENGTH:,}",
            f"{identity.shard_count:,}",
            f"{size / MIB:.1f}",
            f"{opened:.1f}",
            order,
        ]
        for kind in (found[::2], found[1::2]):
            cells += [f"{np.median(kind):.2f}", f"{np.percentile(kind, 95):.2f}"]
        yield [*cells, f"{memory:.1f}"]


def main() -> None:
    """Write the caches, and print the table."""
    if sys.argv[1:2] == ["--child"]:
        run_child(Path(sys.argv[2]), sys.argv[3], int(sys.argv[4]))
        return
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--tokens", type=float, nargs="+", default=[1e10, 1e12])
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--home", type=Path, help="folder for the caches; else a temporary one")
    parser.add_argument("--out", type=Path, help="also write the table to this file")
    arguments = parser.parse_args()
    machine = (
        f"Machine: {read_cpu_name()}, {os.cpu_count()} cores; sequences of {LENGTH:,} tokens, "
        f"{SHARD_SEQUENCES} in a shard; steps of {BATCH} sequences, {arguments.steps} random ones."
    )
    lines = [
        machine,
        "",
        f"| {' | '.join(COLUMNS)} |",
        f"|{'--:|' * len(COLUMNS)}",
    ]
    with tempfile.TemporaryDirectory(dir=arguments.home) as root:
        for tokens in arguments.tokens:
            place = Path(root) / f"{tokens:.0f}"
            lines += [f"| {' | '.join(row)} |" for row in make_rows(place, tokens, arguments.steps)]
    text = "\n".join(lines) + "\n"
    print(text, end="")
    if arguments.out:
        arguments.out.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
