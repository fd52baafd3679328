"""Measure how fast a student reads its cache from a bucket, beside reading it from the disk.

    python bench/stores/reading.py [--tokens N] [--rounds 3]

A student that takes 100,000 tokens/s, and sleeps in between, reads one epoch by windows with one
thread that reads ahead:

    disk    the cache in a folder, whose files the system has forgotten
    cold    the cache in a bucket of a server on this machine; nothing of it is on the disk
    warm    the same again, with the files that cold left on the disk, forgotten by the system

The three are measured in turn, in one run. The ratio is the time of the whole epoch, with the wait
for the first batch, divided by that of the disk; the median of the rounds counts. The server,
SeaweedFS, shares the cores with the reader.
"""

from __future__ import annotations

import argparse
import os
import shutil
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from statistics import median

from bench.reader import (
    BATCH_TOKENS,
    STUDENT_RATE,
    choose_options,
    drop_from_system_memory,
    make_sampled_cache,
)
from bench.speed import SIZES, read_cpu_name
from bench.stores.server import BUCKET, run_server
from cache.remote.address import bind_caches
from cache.remote.mirror import open_mirror
from cache.shard import Seal
from cache.shards.names import MANIFEST
from cache.store import open_cache
from kd.models.loading import hide_progress_bars
from kd.text.steps.reading import TimedIterator, read_training_batches

LENGTH = 512
KINDS = ("disk", "cold", "warm")


def put_cache(folder: Path, root: Path) -> None:
    """Put a cache into the bucket that ``root`` mirrors, and leave the mirror empty."""
    target = root / folder.name
    shutil.copytree(folder, target)
    mirror = open_mirror(target)
    assert mirror is not None, "root mirrors a bucket"
    for seal in sorted((folder / "seals").iterdir()):
        name = f"shards/{seal.stem}" if seal.stem.isdigit() else seal.stem
        mirror.publish(name, Seal.from_bytes(seal.read_bytes(), str(seal)))
    manifest = (folder / MANIFEST).read_bytes()
    mirror.change_manifest(lambda found: found or manifest)
    shutil.rmtree(target)


def read_epoch(folder: Path) -> tuple[float, float]:
    """Return the seconds of an epoch of the student, and those that it waited."""
    began = time.perf_counter()
    source = open_cache(folder)
    options = choose_options(source, "windows").model_copy(update={"dataloader_num_workers": 1})
    steps = len(source.train) // options.batch_size
    timed = TimedIterator(read_training_batches(source, options, range(steps)))
    for (batch,) in timed:
        time.sleep(len(batch) / STUDENT_RATE)
    return time.perf_counter() - began, timed.seconds


def measure(root: Path, tokens: int, rounds: int) -> str:
    """Measure all kinds in turn; returns the table."""
    plain = make_sampled_cache(root / "plain", replace(SIZES["cpu"], length=LENGTH), tokens)
    found: dict[str, list[tuple[float, float]]] = {kind: [] for kind in KINDS}
    with run_server(root / "server") as server:
        os.environ.update(server.environment)
        put_cache(plain, bind_caches(root / "put", f"s3://{BUCKET}/bench"))
        for number in range(rounds):
            far = bind_caches(root / f"get-{number}", f"s3://{BUCKET}/bench") / plain.name
            for kind, folder in zip(KINDS, (plain, far, far), strict=True):
                if folder.is_dir():
                    drop_from_system_memory(folder)
                found[kind].append(read_epoch(folder))
    opened = open_cache(plain)
    head = (
        f"Machine: {read_cpu_name()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}; "
        f"{opened.manifest.positions:,} tokens in {opened.manifest.totals.shards} shards of "
        f"{opened.bytes_per_token:.1f} bytes a token, batches of {BATCH_TOKENS:,} tokens."
    )
    lines = [
        head,
        "",
        "| from | seconds | waited | ratio to disk |",
        "|---|--:|--:|--:|",
    ]
    disk = median(seconds for seconds, _ in found["disk"])
    for kind in KINDS:
        seconds = median(each for each, _ in found[kind])
        waited = median(each for _, each in found[kind])
        lines.append(f"| {kind} | {seconds:.2f} | {waited / seconds:.1%} | {seconds / disk:.3f} |")
    return "\n".join(lines)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--tokens", type=int, default=1 << 20)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path, help="also write the table to this file")
    options = parser.parse_args()
    hide_progress_bars()
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        (root / "server").mkdir()
        table = measure(root, options.tokens, options.rounds)
    print(table)
    if options.out is not None:
        options.out.write_text(f"{table}\n", encoding="utf-8")


if __name__ == "__main__":
    main()
