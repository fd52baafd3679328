"""Measure a DataLoader over a cache of profile threshold, beside the reader of the training loop.

    python bench/loops/dataloader.py [--quick] [--tokens N] [--rounds 3] [--out FILE]

Each row reads the same cache once an epoch, its chunks in memory as far as they fit:

    reader            the batches of our own loop, in this process: the columns as they are stored
    stream, form      whole batches from the workers (DataLoader(stream, batch_size=None))
    sequences, form   single sequences, put together by collate (DataLoader(train, collate_fn=...))

The form entries is (ids, weights) padded to the widest position of a batch; records are the columns
as they are stored. Tokens are positions with a record. "Per core" divides by the seconds that the
processors worked for it, those of the workers included; tokens/s by the time on the clock.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from torch.utils.data import DataLoader

from bench.reader import BATCH_TOKENS, Reading, choose_options, make_sampled_cache, read_steps
from bench.speed import SIZES, read_cpu_name
from cache.store import open_cache as open_store
from kd.cached.decoding import IGNORED, Form
from kd.cached.opening import OpenCache, open_cache
from kd.models.loading import hide_progress_bars

LENGTH = 2048
WORKERS = 2
COLUMNS = ("what", "workers", "tokens/s", "per core", "of the reader's, per core")
#: Tokens a second for each core that a loader of entries is to reach.
GOAL = 200_000


def count_targets(batch: dict[str, Any]) -> int:
    """Count the positions with a record."""
    return int((batch["labels"] != IGNORED).sum())


def read_all(make_loader: Callable[[], Iterable[dict[str, Any]]]) -> Reading:
    """Read all batches of a new loader; the time to start its workers counts."""
    began = time.perf_counter()
    began_cpu = measure_processors()
    tokens = sum(map(count_targets, make_loader()))
    # The workers have ended, so that their time counts as that of children.
    return Reading(tokens, time.perf_counter() - began, measure_processors() - began_cpu)


def measure_processors() -> float:
    """Measure the processors' seconds of this process and of its children that have ended."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


def make_stream_loader(opened: OpenCache, size: int, workers: int) -> DataLoader[Any]:
    """Make a loader of whole batches."""
    return DataLoader(opened.stream(size), batch_size=None, num_workers=workers)


def make_sequence_loader(opened: OpenCache, size: int, workers: int) -> DataLoader[Any]:
    """Make a loader of single sequences, in the same order."""
    return DataLoader(
        opened.train,
        size,
        sampler=opened.sampler(),
        collate_fn=opened.collate,
        num_workers=workers,
        drop_last=True,
    )


def take_middle(measure: Callable[[], Reading], rounds: int) -> Reading:
    """Measure several times; returns the reading of the middle rate per core."""
    found = sorted((measure() for _ in range(rounds)), key=lambda reading: reading.core_rate)
    return found[len(found) // 2]


def measure_rows(folder: Path, rounds: int) -> Iterator[tuple[str, int, Reading]]:
    """Yield the name, the workers and the reading of each row."""
    size = choose_options(open_store(folder), "windows").batch_size
    yield "reader", 0, take_middle(lambda: read_steps(open_store(folder), "windows"), rounds)
    forms: tuple[Form, ...] = ("records", "entries")
    for form in forms:
        opened = open_cache(folder, form=form)
        for name, make in (("stream", make_stream_loader), ("sequences", make_sequence_loader)):
            for workers in (0, WORKERS):
                print(f"measuring: {name}, {form}", file=sys.stderr, flush=True)
                load = partial(make, opened, size, workers)
                yield f"{name}, {form}", workers, take_middle(partial(read_all, load), rounds)


def measure(folder: Path, length: int, rounds: int) -> str:
    """Measure all rows; returns the text of the table."""
    store = open_store(folder)
    lines = [
        (
            f"Machine: {read_cpu_name()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}; "
            f"profile threshold, length {length:,}, V = {store.codec.vocabulary_size:,}, "
            f"{store.manifest.positions:,} tokens of {store.bytes_per_token:.1f} bytes; batches of "
            f"{BATCH_TOKENS:,} tokens."
        ),
        "",
        f"| {' | '.join(COLUMNS)} |",
        "|---|--:|--:|--:|--:|",
    ]
    base = None
    rates = []
    for name, workers, found in measure_rows(folder, rounds):
        base = base or found.core_rate
        cells = f"{workers} | {found.rate:,.0f} | {found.core_rate:,.0f}"
        lines.append(f"| {name} | {cells} | {found.core_rate / base:.0%} |")
        if name.endswith("entries") and workers:
            rates.append(found.core_rate)
    verdict = "reached" if min(rates) > GOAL else "missed"
    goal = f"Goal: more than {GOAL:,} tokens/s per core as (ids, weights) with {WORKERS} workers"
    return "\n".join([*lines, "", f"{goal}: {verdict}."])


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure a DataLoader over a cache.")
    parser.add_argument("--tokens", type=int, default=1 << 22, help="tokens of the cache, about")
    parser.add_argument("--rounds", type=int, default=3, help="epochs of each row")
    parser.add_argument("--cache", type=Path, help="read this cache instead of one that is made")
    parser.add_argument("--quick", action="store_true", help="tiny sizes, to see that it works")
    parser.add_argument("--out", type=Path, help="write the same text to this file too")
    given = parser.parse_args()
    sizes = replace(SIZES["cpu"], length=LENGTH)
    tokens = given.tokens
    if given.quick:
        sizes = replace(sizes, vocabulary=1000, length=64)
        tokens = 8192
    hide_progress_bars()
    with tempfile.TemporaryDirectory() as name:
        folder = given.cache or make_sampled_cache(Path(name), sizes, tokens)
        text = measure(folder, open_store(folder).identity.data.sequence_length, given.rounds)
    print(text)
    if given.out:
        given.out.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
