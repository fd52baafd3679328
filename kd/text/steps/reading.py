"""Read the batches of each step ahead of the loop that takes them, and those of an evaluation."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Generic, TypeVar

import numpy as np
import torch

from cache.records import Sequences
from cache.store import Cache
from kd.config.train import TrainConfig
from kd.parallel.group import ALONE, Group
from kd.text.batches import Batch, Source, make_batch
from kd.text.joined.source import list_domains
from kd.text.packing import measure_text_lengths
from kd.text.steps.order import EpochOrder, choose_epoch_order, list_step_epochs, list_step_indices

Item = TypeVar("Item")
#: Steps whose shards are fetched from a bucket before they are read.
FAR_STEPS = 16
#: Steps that each loader thread may read ahead.
STEPS_AHEAD = 2
#: Batches of similar length are cut to a multiple of this width. Matrix units are fast at such
#: widths, and torch.compile compiles for only few of them.
WIDTH_STEP = 8


def read_training_batches(
    source: Source, options: TrainConfig, steps: range, group: Group = ALONE
) -> Iterator[list[Batch]]:
    """Yield the micro-batches of each step that this rank computes.

    Epoch e reads sample e of the sampled tails.

    If there are loader threads, they read ahead of the consumer. Raises ``ConfigError``, before the
    first step, if the source lacks what ``options.order`` needs.
    """
    arrange = choose_epoch_order(source, options, steps)
    reader = _StepReader(source, options, arrange, group)
    load = reader.load
    # In random order a shard that cannot stay on the disk would be fetched for one sequence.
    windows = options.order == "windows"
    if isinstance(source, Cache) and source.mirror and (source.brings_whole or windows):
        load = partial(reader.load_far, source)
    if workers := count_loader_threads(options):
        return _read_ahead(load, steps, workers)
    return (load(step) for step in steps)


def count_loader_threads(options: TrainConfig) -> int:
    """Count the threads that read ahead: the job's number, else one on a GPU and none on a CPU."""
    wanted = options.dataloader_num_workers
    return int(torch.cuda.is_available()) if wanted is None else wanted


def count_pinned_bytes(source: Source, options: TrainConfig) -> int:
    """Count the bytes of the batches that all ranks pin: of the step, and of those read ahead."""
    steps = count_loader_threads(options) * STEPS_AHEAD + 1
    return steps * options.sequences_per_step * source.sequence_bytes


@dataclass(frozen=True)
class _StepReader:
    """Reads the micro-batches of steps that the ``group``'s own rank computes."""

    source: Source
    options: TrainConfig
    arrange: EpochOrder
    group: Group = ALONE

    def list_slots(self, step: int) -> tuple[np.ndarray, np.ndarray]:
        """List the sequences of optimiser step ``step`` of all ranks, and the epoch of each."""
        options, count = self.options, self.source.train_count
        batch = options.batch_size * options.gradient_accumulation_steps
        indices = list_step_indices(count, batch, options.seed, step, self.arrange)
        return indices, list_step_epochs(count, batch, step)

    def load(self, step: int) -> list[Batch]:
        """Load this rank's micro-batches of ``step``: those of all ranks are the whole step."""
        indices, epochs = map(self.group.deal, self.list_slots(step))
        size = self.options.batch_size
        batches = []
        for at in range(0, len(indices), size):
            sequences, records = self.source.read(indices[at : at + size], epochs[at : at + size])
            if self.options.order == "length":
                sequences = cut_padding(sequences)
            batch = make_batch(sequences, records)
            batches.append(batch.pin() if torch.cuda.is_available() else batch)
        return batches

    def load_far(self, source: Cache, step: int) -> list[Batch]:
        """Load a step from a bucket, and begin to fetch what the steps after it need."""
        for later in range(step, step + FAR_STEPS):
            source.prefetch(self.list_slots(later)[0])
        return self.load(step)


def read_step_sequences(
    source: Source, options: TrainConfig, step: int
) -> Iterator[tuple[int, Batch]]:
    """Yield the number of each sequence of optimiser step ``step``, and a batch of only it."""
    arrange = choose_epoch_order(source, options, range(step, step + 1))
    slots = _StepReader(source, options, arrange).list_slots(step)
    for index, epoch in zip(*slots, strict=True):
        yield int(index), make_batch(*source.read(np.array([index]), np.array([epoch])))


def cut_padding(sequences: Sequences) -> Sequences:
    """Cut off the columns that are padding in all ``sequences``; targets and records stay."""
    width = max(-(-int(measure_text_lengths(sequences).max()) // WIDTH_STEP), 1) * WIDTH_STEP
    return sequences.select(np.s_[:, :width])


def group_by_width(sequences: Sequences) -> Iterator[tuple[np.ndarray, Sequences]]:
    """Yield the places of sequences that are about as long, and those sequences without padding.

    The width of a sequence is the power of two above its own text, whatever the others are.
    """
    least = np.maximum(measure_text_lengths(sequences), WIDTH_STEP)
    widths = np.exp2(np.ceil(np.log2(least))).astype(np.int64)
    for width in np.unique(widths):
        places = np.flatnonzero(widths == width)
        yield places, sequences.select((places, slice(width)))


def _read_ahead(load: Callable[[int], Item], steps: range, workers: int) -> Iterator[Item]:
    """Yield ``load`` of every step in order, while ``workers`` threads load later steps.

    They are at most ``workers * STEPS_AHEAD`` steps ahead. They live as long as the iterator:
    epochs do not begin them anew.
    """
    pool = ThreadPoolExecutor(workers, thread_name_prefix="batches")
    ahead = workers * STEPS_AHEAD
    try:
        coming = deque(pool.submit(load, step) for step in steps[:ahead])
        for number in range(len(steps)):
            ready = coming.popleft()
            later = steps[number + ahead : number + ahead + 1]
            coming.extend(pool.submit(load, step) for step in later)
            yield ready.result()
    finally:
        # A consumer that stops early must not wait for steps that nobody will use.
        pool.shutdown(cancel_futures=True)


class TimedIterator(Iterator[Item], Generic[Item]):
    """An iterator over ``items`` that measures how long its consumer waits.

    ``seconds``: for all items so far. ``last``: for the last item.
    """

    def __init__(self, items: Iterator[Item]) -> None:
        self._items = items
        self.seconds = 0.0
        self.last = 0.0

    def __next__(self) -> Item:
        began = time.perf_counter()
        item = next(self._items)
        self.last = time.perf_counter() - began
        self.seconds += self.last
        return item


def read_validation_batches(source: Source, batch_size: int) -> Iterator[Batch]:
    """Yield the held-out sequences in order, as batches."""
    return (batch for *_, batch in deal_validation_batches(source, batch_size))


def deal_validation_batches(
    source: Source, batch_size: int, group: Group = ALONE
) -> Iterator[tuple[bool, str, Batch]]:
    """Yield the held-out sequences in order, as batches of one domain; the ranks take them in turn.

    All ranks get equally many, because they compute together. A batch that only fills a round comes
    with False, and does not count. The domain's name stands before the batch; empty = the only one.
    """
    places = [
        (name, range(start, min(start + batch_size, held_out.stop)))
        for name, held_out in list_domains(source).items()
        for start in held_out[::batch_size]
    ]
    for first in range(0, len(places), group.size):
        number = first + group.rank
        name, batch = places[number % len(places)]
        yield number < len(places), name, make_batch(*source.read(np.asarray(batch)))
