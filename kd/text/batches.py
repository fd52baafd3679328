"""Sequences -> batches, in an order that is a pure function of (seed, step).

No state is saved: a resumed run asks for step n and gets the same batch as an uninterrupted run.

Shapes: B sequences of a batch, L positions of a sequence, N positions with a target, S sequences to
train on.
"""

from __future__ import annotations

import functools
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Generic, Protocol, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from cache.codec import ENTROPY_STEP, UNKNOWN_ENTROPY, Codec
from cache.reading.arrays import MEMORY_BYTES
from cache.reading.disk import DiskReads
from cache.records import Records, Sequences
from cache.store import Cache
from kd.config.train import TrainConfig
from kd.errors import ConfigError, Problem
from kd.parallel.group import ALONE, Group
from kd.text.corpus import Corpus
from kd.text.packed_rows import PackedRows
from kd.text.packing import compute_position_ids, measure_text_lengths, needs_isolation
from kd.text.shuffling import EpochWindows, KeyedPermutation
from kd.text.stored.shards import count_shard_sequences

Item = TypeVar("Item")
#: Tokens of a window of ``train.order`` windows, about: in memory they take some 200 MiB of profile
#: ``threshold``.
WINDOW_TOKENS = 1 << 22
#: Bytes of a window, decoded: half of the memory that a reader has by default, so that it holds a
#: window and the beginning of the next. It is a constant, because a host's memory, or a field that
#: may change between two attempts, would change the order of a resumed run.
WINDOW_BYTES = MEMORY_BYTES // 2
#: Pieces of a window where not even two shards fit into it.
WINDOW_PIECES = 8
#: Steps whose shards are fetched from a bucket before they are read.
FAR_STEPS = 16
#: The order of an epoch is a list of at most so many sequences: 128 MiB.
LISTED_SEQUENCES = 1 << 24


class SequenceOrder(Protocol):
    """The order of an epoch: an array of all sequences, or an object that computes each alone."""

    def __getitem__(self, places: NDArray[np.int64], /) -> NDArray[np.int64]:
        """Return the numbers of the sequences at ``places``."""
        ...


#: Returns the order of an epoch, from (the number of sequences, seed, epoch).
EpochOrder = Callable[[int, int, int], SequenceOrder]
#: Batches of similar length are cut to a multiple of this width. Matrix units are fast at such
#: widths,
#: and torch.compile compiles for only few of them.
WIDTH_STEP = 8


class Source(Protocol):
    """Sequences, with or without records: ``train_count`` to train on, then the held-out ones.

    Sources with equal ``identity`` give equal batches.
    """

    @property
    def train_count(self) -> int:
        """Number of sequences to train on; their indices come first."""
        ...

    @property
    def validation_count(self) -> int:
        """Number of held-out sequences."""
        ...

    @property
    def shard_sequences(self) -> int:
        """Number of consecutive sequences that are read together at little more than one's cost."""
        ...

    @property
    def sequence_bytes(self) -> int:
        """Bytes of memory that a decoded sequence takes on average; 0 if all are in memory."""
        ...

    @property
    def identity(self) -> str:
        """A name for the content: a hash of it."""
        ...

    @property
    def codec(self) -> Codec | None:
        """The codec of the records; None if there are no records."""
        ...

    @property
    def disk_reads(self) -> DiskReads | None:
        """Bytes and seconds of reading from the disk so far; None if all is in memory."""
        ...

    def teacher_head(self) -> dict[str, NDArray[Any]]:
        """Return the teacher's LM head, if the records are its hidden states."""
        ...

    def tail_mean(self) -> dict[str, NDArray[Any]] | None:
        """Return the mean tail of the records, as ``cache.store.Cache.tail_mean`` does."""
        ...

    def read(
        self, indices: np.ndarray, draws: np.ndarray | int = 0
    ) -> tuple[Sequences, Records | None]:
        """Return the sequences of ``indices`` and their records, in that order.

        ``draws`` selects the sample of the tail to read, for each index or for all of them, modulo
        the number of samples.
        """
        ...


@dataclass(frozen=True)
class PlainText:
    """A source without a teacher: the packed text itself."""

    corpus: Corpus

    @property
    def train_count(self) -> int:
        """Number of sequences to train on; their indices come first."""
        return len(self.corpus.train)

    @property
    def validation_count(self) -> int:
        """Number of held-out sequences."""
        return len(self.corpus.validation)

    @property
    def shard_sequences(self) -> int:
        """The sequences of a shard of the token store, or all training sequences if fewer."""
        most = count_shard_sequences(self.corpus.train.length)
        return max(min(self.train_count, most), 1)

    @property
    def sequence_bytes(self) -> int:
        """0: the system keeps the pages of the token store, as far as it has memory."""
        return 0

    @functools.cached_property
    def identity(self) -> str:
        """A name for the content: a hash of it, for which the whole text is read once."""
        return self.corpus.compute_sha256()

    @property
    def codec(self) -> None:
        """Plain text has no records."""
        return None

    @property
    def disk_reads(self) -> None:
        """Tokens are few bytes, which the system keeps in memory."""
        return None

    def teacher_head(self) -> dict[str, NDArray[Any]]:
        """Raise ``LookupError``, because plain text has no teacher."""
        raise LookupError("plain text has no teacher")

    def tail_mean(self) -> None:
        """Return None: plain text has no records."""

    def read(self, indices: np.ndarray, draws: np.ndarray | int = 0) -> tuple[Sequences, None]:
        """Return the sequences of ``indices``: either all training ones or all held-out ones."""
        if len(indices) and indices[0] >= self.train_count:
            return self.corpus.validation.select(indices - self.train_count), None
        return self.corpus.train.select(indices), None


@dataclass(frozen=True)
class Batch:
    """The input of one forward pass.

    ``rows_N``: the flat places (b * L + l) of the positions with a target. ``gold_N``: the ids of
    their targets. ``packed``: None if every row is one document, so that attention takes its plain
    causal path. ``teacher``: the columns of the N records as they are stored
    (``kd.loss.targets`` decodes them); None without a teacher.
    """

    tokens_BL: Tensor
    packed: PackedRows | None
    rows_N: Tensor
    gold_N: Tensor
    teacher: dict[str, Tensor] | None

    def __len__(self) -> int:
        return self.gold_N.shape[0]

    @property
    def positions_BL(self) -> Tensor | None:
        """The place of each token in its document; None if every row is one document."""
        return None if self.packed is None else self.packed.positions_BL

    def count_targets(self) -> NDArray[np.int64]:
        """Count the targets of each sequence, (B,)."""
        count, length = self.tokens_BL.shape
        row_N = self.rows_N.cpu().numpy() // length
        return np.bincount(row_N, minlength=count)

    def drop_records(self) -> Batch:
        """Return the batch without records, for a rank that computes no loss."""
        return replace(self, teacher=None)

    def to(self, device: torch.device) -> Batch:
        """Copy the batch to ``device``, without waiting if it is pinned; on the CPU return it."""
        if device.type == "cpu":
            return self
        return self._map(lambda tensor: tensor.to(device, non_blocking=True))

    @property
    def is_pinned(self) -> bool:
        """Whether the batch lies in pinned memory."""
        return self.tokens_BL.is_pinned()

    def pin(self) -> Batch:
        """Copy the batch to pinned memory, from which a GPU copies while the CPU goes on."""
        return self._map(Tensor.pin_memory)

    def _map(self, change: Callable[[Tensor], Tensor]) -> Batch:
        teacher = self.teacher
        return Batch(
            tokens_BL=change(self.tokens_BL),
            packed=None if self.packed is None else self.packed.map(change),
            rows_N=change(self.rows_N),
            gold_N=change(self.gold_N),
            teacher=None
            if teacher is None
            else {name: change(column) for name, column in teacher.items()},
        )


def make_batch(sequences: Sequences, records: Records | None) -> Batch:
    """Make the tensors of a batch, on the CPU."""
    tokens = sequences.tokens
    target = sequences.target_mask
    rows = np.flatnonzero(target)
    # The last position of a row is never a target, so that rows + 1 stays within the row.
    gold = tokens.reshape(-1)[rows + 1].astype(np.int64)
    positions = compute_position_ids(sequences.document_start)
    columns = records.columns if records is not None else {}
    return Batch(
        tokens_BL=torch.from_numpy(tokens.astype(np.int64)),
        packed=PackedRows.of(torch.from_numpy(positions))
        if needs_isolation(positions, target).any()
        else None,
        rows_N=torch.from_numpy(rows),
        gold_N=torch.from_numpy(gold),
        teacher={name: torch.from_numpy(column) for name, column in columns.items()} or None,
    )


# ---------------------------------------------------------------------- order


def list_step_indices(
    count: int, batch: int, seed: int, step: int, arrange: EpochOrder | None = None
) -> np.ndarray:
    """List the ``batch`` sequences of optimiser step ``step``.

    The epochs follow one another without a gap, and each step takes the next ``batch`` sequences.
    ``arrange`` gives the order of an epoch; None shuffles it.
    """
    slots = np.arange(step * batch, (step + 1) * batch)
    epochs = list_step_epochs(count, batch, step)
    found = np.empty(batch, np.int64)
    for epoch in np.unique(epochs).tolist():
        chosen = epochs == epoch
        found[chosen] = (arrange or shuffle_epoch)(count, seed, epoch)[slots[chosen] % count]
    return found


def list_step_epochs(count: int, batch: int, step: int) -> np.ndarray:
    """List the epoch of each of the ``batch`` sequences of optimiser step ``step``."""
    return np.arange(step * batch, (step + 1) * batch) // count


def choose_epoch_order(source: Source, options: TrainConfig, steps: range) -> EpochOrder:
    """Choose the order of epochs for ``options.order``; an order by content reads the source once.

    Raises ``ConfigError`` for a curriculum without the teacher's entropies, and for an order by
    content of more than ``LISTED_SEQUENCES``.
    """
    batch = options.batch_size
    if not steps:
        return shuffle_epoch
    if options.order == "windows":
        return partial(order_by_windows, *choose_window(source))
    # An order by content depends on the epoch alone: a few epochs in memory serve all threads.
    if options.order == "length":
        _require_listable(source, options)
        lengths = [
            measure_text_lengths(sequences) for sequences, _ in _read_in_order(source, batch)
        ]
        return functools.lru_cache(maxsize=4)(
            partial(order_by_length, np.concatenate(lengths), batch)
        )
    # After the first epoch a curriculum is shuffled, so that a late resume needs no entropies.
    in_first_epoch = steps.start * batch * options.gradient_accumulation_steps < source.train_count
    if options.order == "curriculum" and in_first_epoch:
        _require_listable(source, options)
        return functools.lru_cache(maxsize=4)(
            partial(order_by_difficulty, compute_mean_entropies(source, batch))
        )
    return shuffle_epoch


def _require_listable(source: Source, options: TrainConfig) -> None:
    """Raise ``ConfigError`` where an order by content would list too many sequences."""
    if source.train_count > LISTED_SEQUENCES:
        detail = (
            f"order {options.order} lists all sequences in memory, so it takes at most "
            f"{LISTED_SEQUENCES:,}, but there are {source.train_count:,}."
        )
        raise ConfigError([Problem("/train/order", detail, "Set it to windows or shuffled.")])


def shuffle_epoch(count: int, seed: int, epoch: int) -> SequenceOrder:
    """Return a random order, which differs between epochs.

    It is a list of up to ``LISTED_SEQUENCES`` sequences; the place of more is computed.
    """
    if count > LISTED_SEQUENCES:
        return KeyedPermutation.draw(count, seed, epoch, 0)
    return _list_shuffled(count, seed, epoch)


@functools.lru_cache(maxsize=4)
def _list_shuffled(count: int, seed: int, epoch: int) -> NDArray[np.int64]:
    return _make_generator(seed, epoch).permutation(count)


def order_by_windows(piece: int, width: int, count: int, seed: int, epoch: int) -> EpochWindows:
    """Order by windows of ``width`` pieces of ``piece`` sequences; lists no sequences."""
    return EpochWindows(count, piece, width, seed, epoch)


def choose_window(source: Source) -> tuple[int, int]:
    """Choose the sequences of a piece and the pieces of a window.

    A piece is a shard where two of them fit into ``WINDOW_BYTES``, else a part of one. The choice
    depends on the source alone, so that every machine has one order.
    """
    shard = source.shard_sequences
    most = WINDOW_BYTES // max(source.sequence_bytes, 1)
    if most < 2 * shard:
        piece = max(most // WINDOW_PIECES, 1)
        return piece, max(most // piece, 2)
    length = source.read(np.arange(1))[0].length
    wanted = WINDOW_TOKENS // (length * shard)
    return shard, max(min(wanted, most // shard), 2)


def order_by_difficulty(
    entropy_S: NDArray[np.float64], count: int, seed: int, epoch: int
) -> SequenceOrder:
    """Order by entropy from low to high in the first epoch, and shuffle the others."""
    return np.argsort(entropy_S, kind="stable") if epoch == 0 else shuffle_epoch(count, seed, epoch)


def order_by_length(
    length_S: NDArray[np.int64], batch: int, count: int, seed: int, epoch: int
) -> NDArray[np.int64]:
    """Group sequences into batches of similar length, in random order.

    A batch in which one epoch ends and the next begins takes the longest sequences of both, so that
    all other batches lie within an epoch.
    """
    # The shuffle before the stable sort puts sequences of equal length in random order.
    random = _make_generator(seed, epoch)
    order = random.permutation(count)
    order = order[np.argsort(length_S[order], kind="stable")]
    # Sequences that complete the batch which the epoch before this one has begun.
    begun = min(-epoch * count % batch, count)
    whole = (count - begun) // batch * batch
    inner = random.permutation(order[:whole].reshape(-1, batch)).reshape(-1)
    longest = order[whole:]
    return np.concatenate([longest[:begun], inner, longest[begun:]])


def compute_mean_entropies(source: Source, block: int = 8) -> NDArray[np.float64]:
    """Compute the teacher's mean entropy in nats over the targets of each training sequence, (S,).

    It is 0 for a sequence without targets. Reads ``block`` sequences at a time. Raises
    ``ConfigError`` if a sequence has targets but no entropy.
    """
    return np.concatenate([_average_entropies(*part) for part in _read_in_order(source, block)])


def _average_entropies(sequences: Sequences, records: Records | None) -> NDArray[np.float64]:
    rows = np.nonzero(sequences.target_mask)[0]
    codes = (
        np.full(len(rows), UNKNOWN_ENTROPY)
        if records is None
        else records["entropy"].astype(np.int64)
    )
    known = codes != UNKNOWN_ENTROPY
    count = np.bincount(rows[known], minlength=len(sequences))
    if (count[rows] == 0).any():
        detail = (
            "a curriculum needs the teacher's entropy, but the records of this job do not hold it."
        )
        raise ConfigError(
            [Problem("/train/order", detail, "Set it to shuffled, or capture the teacher again.")]
        )
    sums = np.bincount(rows[known], codes[known] * ENTROPY_STEP, minlength=len(sequences))
    return sums / np.maximum(count, 1)


def _read_in_order(source: Source, block: int) -> Iterator[tuple[Sequences, Records | None]]:
    """Yield the training sequences and their records, ``block`` at a time."""
    for start in range(0, source.train_count, block):
        yield source.read(np.arange(start, min(start + block, source.train_count)))


def _make_generator(seed: int, epoch: int) -> np.random.Generator:
    # Philox takes both numbers as its key, so that no two epochs share a stream.
    return np.random.Generator(np.random.Philox(key=[seed, epoch]))


# ---------------------------------------------------------------------- reading


def read_training_batches(
    source: Source, options: TrainConfig, steps: range, group: Group = ALONE
) -> Iterator[list[Batch]]:
    """Yield the micro-batches of each step that this rank has; epoch e reads draw e.

    If there are loader threads, they read ahead of the consumer. Raises ``ConfigError``, before the
    first step, if the source lacks what ``options.order`` needs.
    """
    arrange = choose_epoch_order(source, options, steps)
    load = partial(_load_step, source, options, arrange, group)
    if isinstance(source, CachedRecords) and source.is_far(options):
        load = partial(_load_far_step, source, options, arrange, load)
    if workers := count_loader_threads(options):
        return _read_ahead(load, steps, workers, options.dataloader_prefetch_factor)
    return (load(step) for step in steps)


def count_loader_threads(options: TrainConfig) -> int:
    """Count the threads that read ahead: the job's number, else one on a GPU and none on a CPU."""
    wanted = options.dataloader_num_workers
    return int(torch.cuda.is_available()) if wanted is None else wanted


def _load_step(
    source: Source, options: TrainConfig, arrange: EpochOrder, group: Group, step: int
) -> list[Batch]:
    """Load this rank's micro-batches of ``step``: those of all ranks are the whole step."""
    indices, epochs = (
        group.deal(each) for each in _list_step_slots(source, options, arrange, step)
    )
    size = options.batch_size
    return [
        _load_micro_batch(source, options, indices[at : at + size], epochs[at : at + size])
        for at in range(0, len(indices), size)
    ]


def _load_far_step(
    source: CachedRecords,
    options: TrainConfig,
    arrange: EpochOrder,
    load: Callable[[int], list[Batch]],
    step: int,
) -> list[Batch]:
    """Load a step from a bucket, and begin to fetch what the steps after it need."""
    for later in range(step, step + FAR_STEPS):
        source.store.bring_ahead(_list_step_slots(source, options, arrange, later)[0])
    return load(step)


def _list_step_slots(
    source: Source, options: TrainConfig, arrange: EpochOrder, step: int
) -> tuple[np.ndarray, np.ndarray]:
    """List the sequences of optimiser step ``step``, and the epoch of each."""
    count = source.train_count
    batch = options.batch_size * options.gradient_accumulation_steps
    return (
        list_step_indices(count, batch, options.seed, step, arrange),
        list_step_epochs(count, batch, step),
    )


def read_step_sequences(
    source: Source, options: TrainConfig, step: int
) -> Iterator[tuple[int, Batch]]:
    """Yield the number of each sequence of optimiser step ``step``, and a batch of it alone."""
    arrange = choose_epoch_order(source, options, range(step, step + 1))
    slots = _list_step_slots(source, options, arrange, step)
    for index, epoch in zip(*slots, strict=True):
        yield int(index), make_batch(*source.read(np.array([index]), np.array([epoch])))


def _load_micro_batch(
    source: Source, options: TrainConfig, indices: np.ndarray, epochs: np.ndarray
) -> Batch:
    sequences, records = source.read(indices, epochs)
    batch = make_batch(cut_padding(sequences) if options.order == "length" else sequences, records)
    return batch.pin() if options.dataloader_pin_memory and torch.cuda.is_available() else batch


def cut_padding(sequences: Sequences) -> Sequences:
    """Cut off the columns that are padding in all ``sequences``; targets and records stay."""
    width = max(-(-int(measure_text_lengths(sequences).max()) // WIDTH_STEP), 1) * WIDTH_STEP
    return Sequences(
        tokens=sequences.tokens[:, :width],
        document_start=sequences.document_start[:, :width],
        target_mask=sequences.target_mask[:, :width],
    )


def _read_ahead(
    load: Callable[[int], Item], steps: range, workers: int, steps_each: int
) -> Iterator[Item]:
    """Yield ``load`` of every step in order, while ``workers`` threads load later steps.

    They are at most ``workers * steps_each`` steps ahead. They live as long as the iterator: epochs
    do not begin them anew.
    """
    pool = ThreadPoolExecutor(workers, thread_name_prefix="batches")
    ahead = workers * steps_each
    try:
        coming = deque(pool.submit(load, step) for step in steps[:ahead])
        for number in range(len(steps)):
            ready = coming.popleft()
            coming.extend(
                pool.submit(load, step) for step in steps[number + ahead : number + ahead + 1]
            )
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
    return (batch for _, batch in deal_validation_batches(source, batch_size))


def deal_validation_batches(
    source: Source, batch_size: int, group: Group = ALONE
) -> Iterator[tuple[bool, Batch]]:
    """Yield the held-out sequences in order, as batches; the ranks take them in turn.

    All ranks get equally many, because they compute together. A batch that only fills a round comes
    with False, and does not count.
    """
    end = source.train_count + source.validation_count
    count = -(-source.validation_count // batch_size)
    for first in range(0, count, group.size):
        number = first + group.rank
        start = source.train_count + number % count * batch_size
        indices = np.arange(start, min(start + batch_size, end))
        yield number < count, make_batch(*source.read(indices))


@dataclass(frozen=True)
class CachedRecords:
    """A sealed cache as a source of training batches."""

    store: Cache

    @property
    def train_count(self) -> int:
        """Number of sequences to train on; their indices come first."""
        return len(self.store.train)

    @property
    def validation_count(self) -> int:
        """Number of held-out sequences."""
        return len(self.store.validation)

    @property
    def shard_sequences(self) -> int:
        """Sequences of a shard."""
        return self.store.identity.codec.shard_sequences

    @property
    def sequence_bytes(self) -> int:
        """Bytes of memory that a decoded sequence takes, on average over the first shard."""
        return self.store.measure_decoded_sequence()

    @property
    def identity(self) -> str:
        """A name for the content: a hash of it."""
        return self.store.identity.fingerprint

    @property
    def codec(self) -> Codec:
        """The codec of the records."""
        return self.store.codec

    @property
    def disk_reads(self) -> DiskReads:
        """Bytes and seconds of reading from the disk so far."""
        return self.store.disk_reads

    def is_far(self, options: TrainConfig) -> bool:
        """Whether whole shards are to be fetched from a bucket before they are read.

        In random order a shard that cannot stay on the disk would be fetched for one sequence.
        """
        return self.store.mirror is not None and (
            self.store.brings_whole or options.order == "windows"
        )

    def teacher_head(self) -> dict[str, NDArray[Any]]:
        """Return the teacher's LM head, which a cache of profile hidden holds."""
        return self.store.teacher_head()

    def tail_mean(self) -> dict[str, NDArray[Any]] | None:
        """Return the mean tail; None where the cache has none."""
        return self.store.tail_mean()

    def read(self, indices: np.ndarray, draws: int | np.ndarray = 0) -> tuple[Sequences, Records]:
        """Return the sequences of ``indices`` and their records; ``draws`` selects tail samples."""
        return self.store.read(indices, draws)
