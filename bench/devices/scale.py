"""Measure what several ranks gain on this machine, and what their exchange costs.

    python bench/devices/scale.py [--rounds 5] [--steps 4] [--quick | --large] [--out FILE]
    python bench/devices/scale.py --planned

The steps are those of ``kd.training``, on a cache of profile threshold, with as many sequences
whatever the number of ranks. Every rank is a process with one arithmetic thread, and exchanges
through gloo on the loopback. One rank of strategy single is the reference; the variants take turns.

    apart    as many processes, each on its part of the step, which exchange nothing. No strategy
             can be faster here, so this is the ideal: with two cores four processes are no faster
             than two, and two hardware threads of one core are less than twice one.
    exchange the time of a step less that of ranks apart; of a pipeline, also the time in which
             stages wait for each other
    loading  the resident memory of a rank above that of the imports, at its peak until the first
             step: rank 0 reads the student, and the others get their parts from it
    training the same from then on

``--large`` takes a student whose weights are larger than all else, to see what is held of them.
``--planned`` measures nothing: it prints what is expected of 8 to 1,024 devices, by the arithmetic
of ``kd plan`` (``bench.devices.planned``).
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import torch
from accelerate import init_empty_weights
from transformers import PreTrainedModel

import kd.training.prepare
from bench.devices.planned import print_planned
from bench.speed import (
    BenchmarkSizes,
    make_frozen_llama,
    make_random_documents,
    seal_cache,
)
from bench.support.ranks import run_ranks
from bench.support.training import step_by_hand
from cache.store import open_cache
from kd.config.job import JobConfig
from kd.config.jobfile import parse_config
from kd.memory.step_memory import read_peak_memory, read_resident_memory, reset_peak_memory
from kd.parallel.group import ALONE, Group
from kd.progress import SILENT
from kd.training.prepare import prepare

SIZES = BenchmarkSizes(student=(4, 384), vocabulary=16_384, length=256, batch=2)
QUICK = BenchmarkSizes(teacher=(1, 64), student=(4, 64), vocabulary=512, length=32, batch=2)
LARGE = BenchmarkSizes(teacher=(1, 64), student=(8, 1024), vocabulary=8192, length=32, batch=2)
#: Micro-batches of a step, which the ranks share.
MICRO_BATCHES = 4
#: Sequences of the cache.
SEQUENCES = 64
#: The variants: the number of ranks and their strategy.
VARIANTS = (
    (1, "single"),
    (2, "apart"),
    (2, "ddp"),
    (2, "fsdp"),
    (2, "pipeline"),
    (4, "apart"),
    (4, "ddp"),
    (4, "fsdp"),
    (4, "pipeline"),
)
#: The strategies by which ranks work on one student.
SHARED = ("ddp", "fsdp", "pipeline")
#: The variants of the large student: so many ranks apart would not find memory.
LARGE_VARIANTS = ((1, "single"), (2, "ddp"), (2, "fsdp"), (4, "fsdp"))
MIB = 2**20
CPU = torch.device("cpu")


def measure_rank(
    group: Group, sizes: BenchmarkSizes, cache: str, folder: str, strategy: str, steps: int
) -> dict[str, float]:
    """Take steps as one of the ranks; returns the seconds of a step and the bytes of the peak."""
    torch.set_num_threads(1)
    before = read_resident_memory()
    shared = strategy in SHARED
    parts = 1 if shared else group.size
    config = make_config(sizes, cache, strategy if shared else "auto", MICRO_BATCHES // parts)
    team = group if shared else ALONE
    student = make_student(sizes, hollow=not team.leads)
    place = Path(folder) / f"{strategy}-{group.size}-{time.time_ns() if shared else os.getpid()}"
    source = open_cache(Path(cache))
    reset_peak_memory(CPU)
    with watching_loading() as peaks:
        run = prepare(config, source, student, sizes.vocabulary, place, SILENT, team)
    batches = run.read_batches()
    step_by_hand(run, next(batches))
    group.wait()
    seconds = []
    for _ in range(steps):
        began = time.perf_counter()
        step_by_hand(run, next(batches))
        seconds.append(time.perf_counter() - began)
    training = read_peak_memory(CPU)
    return {
        "seconds": median(seconds),
        "loading": float(max(peaks) - before),
        "training": float(training - before),
    }


def make_config(sizes: BenchmarkSizes, cache: str, strategy: str, micro_batches: int) -> JobConfig:
    """Make the job of a training whose step has so many micro-batches, on all ranks together."""
    layers, width = sizes.student
    return parse_config({
        "kind": "train",
        "student": {"init": {"layers": layers, "hidden_size": width, "tokenizer": "the teacher's"}},
        "data": {"sequence_length": sizes.length},
        "cache": {"fingerprint": Path(cache).name},
        "train": {
            "max_steps": 1000, "logging_steps": 1000, "batch_size": sizes.batch,
            "gradient_accumulation_steps": micro_batches, "strategy": strategy,
        },
    })  # fmt: skip


def make_student(sizes: BenchmarkSizes, hollow: bool) -> PreTrainedModel:
    """Make the student of a rank: without memory for its weights where it is ``hollow``."""
    torch.manual_seed(0)
    with init_empty_weights(include_buffers=False) if hollow else nullcontext():
        student = make_frozen_llama(sizes, sizes.student)
    student.tie_weights()
    return student.requires_grad_(True).train()


@contextmanager
def watching_loading() -> Iterator[list[int]]:
    """Yield a list that gets the peak of the memory before ``prepare`` begins to count anew."""
    peaks: list[int] = []

    def remember(device: torch.device) -> None:
        peaks.append(read_peak_memory(device))
        reset_peak_memory(device)

    module: Any = kd.training.prepare
    own = module.reset_peak_memory
    module.reset_peak_memory = remember
    try:
        yield peaks
    finally:
        module.reset_peak_memory = own


def seal_documents(sizes: BenchmarkSizes, folder: Path) -> str:
    """Seal a cache of profile threshold of random text in ``folder``; returns its own folder."""
    documents = make_random_documents(sizes, SEQUENCES)
    cached = replace(sizes, batch=len(documents))
    return str(seal_cache(cached, folder, documents, "threshold").folder)


def measure(
    sizes: BenchmarkSizes, rounds: int, steps: int, variants: Sequence[tuple[int, str]] = VARIANTS
) -> dict[tuple[int, str], list[dict[str, float]]]:
    """Measure every variant once a round: its slowest rank, and the memory of rank 0 and others."""
    found: dict[tuple[int, str], list[dict[str, float]]] = {each: [] for each in variants}
    with tempfile.TemporaryDirectory() as name:
        cache = seal_documents(sizes, Path(name))
        for turn in range(rounds + 1):
            for count, strategy in variants:
                ranks = run_ranks(count, measure_rank, sizes, cache, name, strategy, steps)
                if turn:  # the first round fills caches of files
                    found[count, strategy].append(summarise(ranks))
    return found


def summarise(ranks: list[dict[str, float]]) -> dict[str, float]:
    """The seconds of the slowest rank, and the memory of rank 0 and the most of another one."""
    found = {"seconds": max(each["seconds"] for each in ranks)}
    for name in ("loading", "training"):
        first, *others = (each[name] for each in ranks)
        found |= {f"{name} first": first, f"{name} others": max(others, default=first)}
    return found


def render(found: dict[tuple[int, str], list[dict[str, float]]], sizes: BenchmarkSizes) -> str:
    """Render the table; ratios are taken within a round, and their median counts."""
    layers, width = sizes.student
    tokens = sizes.tokens * MICRO_BATCHES
    title = (
        f"A student of {layers} layers of {width}, V = {sizes.vocabulary:,}, "
        f"{tokens:,} tokens a step; {os.cpu_count()} cores, one thread a rank; the speed of one "
        "rank is 1."
    )
    columns = (
        "ranks", "strategy", "step ms", "tokens/s", "speed", "of the ideal", "exchange ms",
        "loading MiB, rank 0", "others", "training MiB, rank 0", "others",
    )  # fmt: skip
    lines = [
        title,
        "",
        f"| {' | '.join(columns)} |",
        "|--:|---|--:|--:|--:|--:|--:|--:|--:|--:|--:|",
    ]
    alone = [each["seconds"] for each in found[1, "single"]]
    for (count, strategy), rows in found.items():
        seconds = [row["seconds"] for row in rows]
        apart = [row["seconds"] for row in found.get((count, "apart"), rows)]
        speed = median(one / each for one, each in zip(alone, seconds, strict=True))
        ideal = median(least / each for least, each in zip(apart, seconds, strict=True))
        exchange = median(each - least for least, each in zip(apart, seconds, strict=True))
        memory = [
            f"{median(row[f'{name} {who}'] for row in rows) / MIB:,.0f}"
            for name in ("loading", "training")
            for who in ("first", "others")
        ]
        shown = strategy in SHARED
        lines.append(
            f"| {count} | {strategy} | {1e3 * median(seconds):.0f} | "
            f"{tokens / median(seconds):,.0f} | {speed:.2f} | "
            f"{f'{ideal:.0%}' if shown else '-'} | {f'{1e3 * exchange:.0f}' if shown else '-'} | "
            f"{' | '.join(memory)} |"
        )
    return "\n".join(lines) + "\n"


def main(arguments: list[str] | None = None) -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=4, help="timed steps of a variant in a round")
    parser.add_argument("--quick", action="store_true", help="a tiny student, to try the bench")
    parser.add_argument("--large", action="store_true", help="a student that memory depends on")
    parser.add_argument(
        "--planned", action="store_true", help="compute 1,024 devices; no measuring"
    )
    parser.add_argument("--out", type=Path, help="also write the table to this file")
    options = parser.parse_args(arguments)
    sizes: Any = QUICK if options.quick else LARGE if options.large else SIZES
    variants = LARGE_VARIANTS if options.large else VARIANTS
    if options.planned:
        table = "\n".join(print_planned()) + "\n"
    else:
        table = render(measure(sizes, options.rounds, options.steps, variants), sizes)
    sys.stdout.write(table)
    if options.out:
        options.out.write_text(table, encoding="utf-8")


if __name__ == "__main__":
    main()
