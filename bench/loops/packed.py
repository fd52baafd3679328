"""Measure the memory and the time of packed rows beside rows of one document.

    python bench/loops/packed.py [--small] [--out FILE]

A packed row holds documents of random lengths; the other row has the same tokens and is one
document. Each variant runs in a process of its own:

    training    forward pass, fused loss and backward pass of a student, and a step of its optimiser
    capture     the forward pass of a teacher
    with a mask the same with the attention of transformers, which makes a mask (B, 1, L, L)

The peak is that of the process above what it had after its imports, so it includes the model.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Executor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
from transformers import PreTrainedModel

from bench import speed
from bench.speed import DEVICE, BenchmarkSizes
from bench.support.timing import MIB, fresh_processes, synchronize, use_one_heap
from cache.records import Sequences
from kd.config.train import TrainConfig
from kd.loss.fused import compute_distillation_loss
from kd.loss.objective import Objective
from kd.loss.targets import Targets
from kd.memory.step_memory import read_peak_memory, reset_peak_memory
from kd.models.attention.isolation import isolate_documents
from kd.models.layers import compute_hidden_states
from kd.models.lm_head import find_lm_head
from kd.models.precision import Precision, compute_target_hidden_states
from kd.optim.optimizers import make_optimizer
from kd.text.batches import Batch, make_batch

#: Documents of a packed row have this many tokens at most.
LONGEST_DOCUMENT = 1500


@dataclass(frozen=True)
class Row:
    """A row of ``length`` tokens: ``packed`` or one document, and whether it gets a ``mask``."""

    task: str
    length: int
    packed: bool
    mask: bool = False

    @property
    def name(self) -> str:
        """The name of the row in the table."""
        documents = "packed" if self.packed else "one document"
        return f"{documents}, with a mask" if self.mask else documents


#: The first row of each group is the one that the others are compared with.
FULL = [
    [
        Row("training", 16_384, packed=False),
        Row("training", 16_384, packed=True),
        Row("training", 16_384, packed=True, mask=True),
        Row("training", 32_768, packed=True),
    ],
    [Row("capture", 16_384, packed=False), Row("capture", 16_384, packed=True)],
]
SMALL = [[replace(row, length=64) for row in group] for group in FULL]
SIZES = BenchmarkSizes(student=(2, 128), vocabulary=2048, batch=1)


def make_row(row: Row) -> Batch:
    """Make the batch of ``row``, without records."""
    random = np.random.default_rng(0)
    tokens_1L = random.integers(0, SIZES.vocabulary, (1, row.length)).astype(np.uint32)
    start_1L = np.zeros(tokens_1L.shape, bool)
    start_1L[:, 0] = True
    if row.packed:
        longest = min(LONGEST_DOCUMENT, row.length // 2)
        stops = np.cumsum(random.integers(longest // 8, longest, row.length))
        start_1L[0, stops[stops < row.length]] = True
    target_1L = ~np.roll(start_1L, -1, axis=1)
    return make_batch(Sequences(tokens_1L, start_1L, target_1L), None).to(DEVICE)


def make_model(row: Row) -> PreTrainedModel:
    """Make the small Llama that reads ``row``."""
    sizes = replace(SIZES, length=row.length)
    model = speed.make_llama(sizes, sizes.student, tie_word_embeddings=True)
    if row.packed and not row.mask:
        isolate_documents(model)
    return model


def train(row: Row) -> Iterator[None]:
    """Take one step for each item."""
    student = make_model(row).train()
    head = find_lm_head(student, SIZES.vocabulary)
    optimizer = make_optimizer(student, (), TrainConfig(max_steps=1, learning_rate=1e-5), DEVICE)
    precision = Precision(DEVICE.type, torch.bfloat16 if DEVICE.type == "cuda" else torch.float32)
    batch = make_row(row)
    while True:
        hidden_ND = compute_target_hidden_states(student, batch, precision)
        found = compute_distillation_loss(hidden_ND, head, Targets(batch.gold_N), Objective(1.0))
        (found.total / len(batch)).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        yield


def read(row: Row) -> None:
    """Compute the teacher's hidden states of ``row``."""
    batch = make_row(row)
    with torch.no_grad():
        compute_hidden_states(make_model(row).eval(), batch.tokens_BL, batch.packed)


def measure(row: Row) -> tuple[float, float]:
    """Return the peak in MiB of a run, and the seconds of another one."""
    run: Callable[[], None]
    if row.task == "training":
        steps = train(row)
        run = partial(next, steps)
    else:
        run = partial(read, row)
    reset_peak_memory(DEVICE)
    before = read_peak_memory(DEVICE)
    run()
    synchronize()
    peak = (read_peak_memory(DEVICE) - before) / MIB
    began = time.perf_counter()
    run()
    synchronize()
    return peak, time.perf_counter() - began


def measure_rows(groups: list[list[Row]], pool: Executor) -> str:
    """Measure all rows; returns their table and what to know of it."""
    lines = [
        "| task | tokens | row | peak, MiB | peak | seconds | time |",
        "|---|--:|---|--:|--:|--:|--:|",
    ]
    for group in groups:
        found = [pool.submit(measure, row).result() for row in group]
        least, shortest = found[0]
        lines += [
            f"| {row.task} | {row.length:,} | {row.name} | {peak:,.0f} | {peak / least:.2f} | "
            f"{seconds:.2f} | {seconds / shortest:.2f} |"
            for row, (peak, seconds) in zip(group, found, strict=True)
        ]
    about = (
        f"A {speed.format_shape(SIZES.student)} Llama with a vocabulary of {SIZES.vocabulary:,}, "
        "one row. The peak is above what the imports take. Documents of a packed row have up to "
        f"{LONGEST_DOCUMENT:,} tokens."
    )
    return "\n".join([about, "", *lines])


def measure_all(small: bool) -> str:
    """Measure all rows in a pool of fresh processes."""
    with fresh_processes(speed.PRELOAD) as pool:
        return measure_rows(SMALL if small else FULL, pool)


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure packed rows beside rows of one document.")
    parser.add_argument(
        "--small", action="store_true", help="tiny sizes, which show only that it works"
    )
    parser.add_argument("--out", type=Path, help="write the same text to this file too")
    arguments = parser.parse_args()
    use_one_heap()
    text = measure_all(arguments.small)
    print(text)
    if arguments.out:
        arguments.out.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
