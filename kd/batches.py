"""Sequences -> batches, in an order that is a pure function of (seed, step).

Nothing here has a state to save: a resumed run asks for step n and gets what the uninterrupted run got.

Shapes: B sequences, T tokens, N positions with a target; S sequences to train on.
"""

from __future__ import annotations

import functools
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, Protocol, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from cache.codec import ENTROPY_STEP, UNKNOWN_ENTROPY, Codec
from cache.records import Records, Sequences
from kd.config.train import TrainConfig
from kd.data import Corpus, needs_isolation, position_ids, text_lengths
from kd.errors import ConfigError, Problem

Item = TypeVar("Item")
#: The numbers of all sequences in the order of an epoch, from (how many there are, seed, epoch).
Arrangement = Callable[[int, int, int], NDArray[np.int64]]
#: Batches of like length are cut to a multiple of this: widths that matrix units like, and few of them to compile for.
WIDTH_STEP = 8


class Source(Protocol):
    """Where sequences come from: ``train_count`` of them to train on, then ``validation_count`` held out.

    ``identity`` names the content: equal identities give equal batches.
    """

    @property
    def train_count(self) -> int:
        """Sequences to train on; their indices come first."""
        ...

    @property
    def validation_count(self) -> int:
        """Sequences held out."""
        ...

    @property
    def identity(self) -> str:
        """A name for the content."""
        ...

    @property
    def codec(self) -> Codec | None:
        """What the records' columns mean; None where there are none."""
        ...

    def teacher_head(self) -> dict[str, NDArray[Any]]:
        """The teacher's LM head, where the records are its hidden states."""
        ...

    def read(self, indices: np.ndarray, draws: np.ndarray | int = 0) -> tuple[Sequences, Records | None]:
        """The sequences of ``indices`` and their records, in that order.

        ``draws``, one for each index or for all, says which sample of a record to read, modulo how many there are.
        """
        ...


@dataclass(frozen=True)
class PlainText:
    """A source without a teacher: the packed text itself."""

    corpus: Corpus

    @property
    def train_count(self) -> int:
        """Sequences to train on; their indices come first."""
        return len(self.corpus.train)

    @property
    def validation_count(self) -> int:
        """Sequences held out."""
        return len(self.corpus.validation)

    @property
    def identity(self) -> str:
        """A name for the content."""
        return self.corpus.sha256()

    @property
    def codec(self) -> None:
        """There are no records."""
        return None

    def teacher_head(self) -> dict[str, NDArray[Any]]:
        """There is none."""
        raise LookupError("plain text has no teacher")

    def read(self, indices: np.ndarray, draws: np.ndarray | int = 0) -> tuple[Sequences, None]:
        """The sequences of ``indices``, in that order; training and held-out indices do not mix in one call."""
        if len(indices) and indices[0] >= self.train_count:
            return self.corpus.validation.select(indices - self.train_count), None
        return self.corpus.train.select(indices), None


@dataclass(frozen=True)
class Batch:
    """What one forward pass takes. ``rows_N`` are the flat places (b * T + t) of the positions with a target.

    ``positions_BT`` is None where every row is one document, so that attention takes its plain causal path.
    ``teacher`` holds the columns of the N records as they are stored (``kd.targets`` decodes them); None without.
    """

    tokens_BT: Tensor
    positions_BT: Tensor | None
    rows_N: Tensor
    gold_N: Tensor
    teacher: dict[str, Tensor] | None

    def __len__(self) -> int:
        return self.gold_N.shape[0]

    def to(self, device: torch.device) -> Batch:
        """The batch on ``device``, of which a copy from pinned memory need not be waited for; itself on the CPU."""
        if device.type == "cpu":
            return self
        return self._each(lambda tensor: tensor.to(device, non_blocking=True))

    def pinned(self) -> Batch:
        """The batch in memory that a GPU copies from by itself, at no time of the consumer's."""
        return self._each(Tensor.pin_memory)

    def _each(self, change: Callable[[Tensor], Tensor]) -> Batch:
        teacher = self.teacher
        return Batch(
            tokens_BT=change(self.tokens_BT),
            positions_BT=None if self.positions_BT is None else change(self.positions_BT),
            rows_N=change(self.rows_N),
            gold_N=change(self.gold_N),
            teacher=None if teacher is None else {name: change(column) for name, column in teacher.items()},
        )


def make_batch(sequences: Sequences, records: Records | None) -> Batch:
    """Tensors of a batch on the CPU."""
    tokens, target = sequences.tokens, sequences.target_mask
    rows = np.flatnonzero(target)
    gold = tokens.reshape(-1)[rows + 1].astype(np.int64)
    positions = position_ids(sequences.document_start)
    columns = records.columns if records is not None else {}
    return Batch(
        tokens_BT=torch.from_numpy(tokens.astype(np.int64)),
        positions_BT=torch.from_numpy(positions) if needs_isolation(positions, target).any() else None,
        rows_N=torch.from_numpy(rows),
        gold_N=torch.from_numpy(gold),
        teacher={name: torch.from_numpy(column) for name, column in columns.items()} or None,
    )


# ---------------------------------------------------------------------- order


def step_indices(count: int, batch: int, seed: int, step: int, arrange: Arrangement | None = None) -> np.ndarray:
    """The ``batch`` sequences of optimiser step ``step``: the endless stream of epochs, cut into steps.

    ``arrange`` lays an epoch out; None shuffles it.
    """
    slots, epochs = np.arange(step * batch, (step + 1) * batch), step_epochs(count, batch, step)
    orders = {epoch: (arrange or shuffled)(count, seed, epoch) for epoch in np.unique(epochs).tolist()}
    return np.array([orders[epoch][slot % count] for epoch, slot in zip(epochs.tolist(), slots, strict=True)])


def step_epochs(count: int, batch: int, step: int) -> np.ndarray:
    """The epoch that each of the ``batch`` sequences of optimiser step ``step`` belongs to."""
    return np.arange(step * batch, (step + 1) * batch) // count


def arrangement(source: Source, options: TrainConfig, steps: range) -> Arrangement:
    """How ``options.order`` lays out an epoch; where it goes by content, the source is read once for it.

    Raises ``ConfigError`` for a curriculum without the teacher's entropies.
    """
    batch = options.batch_size
    if not steps:
        return shuffled
    if options.order == "length":
        lengths = [text_lengths(sequences) for sequences, _ in _in_order(source, batch)]
        return functools.lru_cache(maxsize=4)(partial(by_length, np.concatenate(lengths), batch))
    in_first_epoch = steps.start * batch * options.gradient_accumulation_steps < source.train_count
    if options.order == "curriculum" and in_first_epoch:
        return functools.lru_cache(maxsize=4)(partial(by_difficulty, mean_entropies(source, batch)))
    return shuffled


@functools.lru_cache(maxsize=4)
def shuffled(count: int, seed: int, epoch: int) -> NDArray[np.int64]:
    """Any order, another one in each epoch."""
    return _generator(seed, epoch).permutation(count)


def by_difficulty(entropy_S: NDArray[np.float64], count: int, seed: int, epoch: int) -> NDArray[np.int64]:
    """From low to high entropy in the first epoch, shuffled after it."""
    return np.argsort(entropy_S, kind="stable") if epoch == 0 else shuffled(count, seed, epoch)


def by_length(length_S: NDArray[np.int64], batch: int, count: int, seed: int, epoch: int) -> NDArray[np.int64]:
    """Batches of like length, in any order.

    Where an epoch ends within a batch, that one is filled up with the longest of both epochs, so that every other
    batch begins where the stream is cut.
    """
    random = _generator(seed, epoch)
    order = random.permutation(count)
    order = order[np.argsort(length_S[order], kind="stable")]
    begun = min(-epoch * count % batch, count)  # of the batch that the epoch before this one has begun
    whole = (count - begun) // batch * batch
    inner = random.permutation(order[:whole].reshape(-1, batch)).reshape(-1)
    longest = order[whole:]
    return np.concatenate([longest[:begun], inner, longest[begun:]])


def mean_entropies(source: Source, block: int = 8) -> NDArray[np.float64]:
    """The mean entropy in nats of the teacher over the targets of each training sequence, (S,); 0 without targets.

    Read ``block`` sequences at a time. Raises ``ConfigError`` where a sequence has targets and no entropy.
    """
    return np.concatenate([_mean_entropies(*part) for part in _in_order(source, block)])


def _mean_entropies(sequences: Sequences, records: Records | None) -> NDArray[np.float64]:
    rows = np.nonzero(sequences.target_mask)[0]
    codes = np.full(len(rows), UNKNOWN_ENTROPY) if records is None else records["entropy"].astype(np.int64)
    known = codes != UNKNOWN_ENTROPY
    count = np.bincount(rows[known], minlength=len(sequences))
    if (count[rows] == 0).any():
        detail = "a curriculum goes by the teacher's entropy, which the records of this job do not hold."
        raise ConfigError([Problem("/train/order", detail, "Set it to shuffled, or capture the teacher anew.")])
    sums = np.bincount(rows[known], codes[known] * ENTROPY_STEP, minlength=len(sequences))
    return sums / np.maximum(count, 1)


def _in_order(source: Source, block: int) -> Iterator[tuple[Sequences, Records | None]]:
    """The training sequences and their records, ``block`` at a time."""
    for start in range(0, source.train_count, block):
        yield source.read(np.arange(start, min(start + block, source.train_count)))


def _generator(seed: int, epoch: int) -> np.random.Generator:
    return np.random.Generator(np.random.Philox(key=[seed, epoch]))


# ---------------------------------------------------------------------- reading


def training_batches(source: Source, options: TrainConfig, steps: range) -> Iterator[list[Batch]]:
    """For each step its micro-batches, read ahead of the consumer where there are threads for it; epoch e reads draw e.

    What ``options.order`` asks for and the source lacks is refused here, before the first step.
    """
    load = partial(_step, source, options, arrangement(source, options, steps))
    if workers := loader_threads(options):
        return _read_ahead(load, steps, workers, options.dataloader_prefetch_factor)
    return (load(step) for step in steps)


def loader_threads(options: TrainConfig) -> int:
    """Threads that read ahead: as many as the job says, else one where a GPU trains and none where a CPU does."""
    said = options.dataloader_num_workers
    return int(torch.cuda.is_available()) if said is None else said


def _step(source: Source, options: TrainConfig, arrange: Arrangement, step: int) -> list[Batch]:
    """The micro-batches of ``step``."""
    count, batch = source.train_count, options.batch_size * options.gradient_accumulation_steps
    slots = step_indices(count, batch, options.seed, step, arrange), step_epochs(count, batch, step)
    micro_slots = zip(*(np.split(each, options.gradient_accumulation_steps) for each in slots), strict=True)
    return [_micro_batch(source, options, indices, epochs) for indices, epochs in micro_slots]


def _micro_batch(source: Source, options: TrainConfig, indices: np.ndarray, epochs: np.ndarray) -> Batch:
    sequences, records = source.read(indices, epochs)
    batch = make_batch(cut_to_text(sequences) if options.order == "length" else sequences, records)
    return batch.pinned() if options.dataloader_pin_memory and torch.cuda.is_available() else batch


def cut_to_text(sequences: Sequences) -> Sequences:
    """``sequences`` without what is padding in all of them; targets, and so records, stay as they are."""
    width = max(-(-int(text_lengths(sequences).max()) // WIDTH_STEP), 1) * WIDTH_STEP
    return Sequences(
        tokens=sequences.tokens[:, :width],
        document_start=sequences.document_start[:, :width],
        target_mask=sequences.target_mask[:, :width],
    )


def _read_ahead(load: Callable[[int], Item], steps: range, workers: int, steps_each: int) -> Iterator[Item]:
    """``load`` of every step in order, ``workers`` threads being ``workers * steps_each`` ahead; they end with it."""
    pool, ahead = ThreadPoolExecutor(workers, thread_name_prefix="batches"), workers * steps_each
    try:
        coming = deque(pool.submit(load, step) for step in steps[:ahead])
        for number in range(len(steps)):
            ready = coming.popleft()
            coming.extend(pool.submit(load, step) for step in steps[number + ahead : number + ahead + 1])
            yield ready.result()
    finally:
        pool.shutdown(cancel_futures=True)


class Waited(Iterator[Item], Generic[Item]):
    """Hands on what ``items`` gives, and counts the ``seconds`` its consumer waited: in all, and for the ``last``."""

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


def validation_batches(source: Source, batch_size: int) -> Iterator[Batch]:
    """The held-out sequences, in order."""
    indices = np.arange(source.train_count, source.train_count + source.validation_count)
    for start in range(0, len(indices), batch_size):
        yield make_batch(*source.read(indices[start : start + batch_size]))
