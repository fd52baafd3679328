"""The order of training: which sequences a step has, a pure function of (seed, step).

No state is saved: a resumed run asks for step n and gets the same sequences as one without a stop.

Shapes: S sequences to train on.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from functools import partial
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from cache.reading.arrays import MEMORY_BYTES
from cache.records import Records, Sequences
from cache.rounding import ENTROPY_STEP, UNKNOWN_ENTROPY
from kd.config.train import TrainConfig
from kd.errors import ConfigError, Problem
from kd.text.batches import Source, read_in_parts
from kd.text.packing import measure_text_lengths
from kd.text.shuffling import EpochWindows, KeyedPermutation

#: Tokens of a window of ``train.order`` windows, about: in memory they take some 200 MiB of profile
#: ``threshold``.
WINDOW_TOKENS = 1 << 22
#: Bytes of a window, decoded: half of the memory that a reader has by default, so that it holds a
#: window and the beginning of the next. It is a constant, because a host's memory, or a field that
#: may change between two attempts, would change the order of a resumed run.
WINDOW_BYTES = MEMORY_BYTES // 2
#: Pieces of a window where not even two shards fit into it.
WINDOW_PIECES = 8
#: The order of an epoch is a list of at most so many sequences: 128 MiB.
LISTED_SEQUENCES = 1 << 24


class SequenceOrder(Protocol):
    """The order of an epoch: an array of all sequences, or an object that computes each one."""

    def __getitem__(self, places: NDArray[np.int64], /) -> NDArray[np.int64]:
        """Return the numbers of the sequences at ``places``."""


#: Returns the order of an epoch, from (the number of sequences, seed, epoch).
EpochOrder = Callable[[int, int, int], SequenceOrder]


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
    # An order by content depends only on the epoch: a few epochs in memory serve all threads.
    if options.order == "length":
        _require_listable(source, options)
        lengths = [
            measure_text_lengths(sequences)
            for sequences, _ in read_in_parts(source, range(source.train_count), batch)
        ]
        by_length = partial(order_by_length, np.concatenate(lengths), batch)
        return functools.lru_cache(maxsize=4)(by_length)
    if is_by_difficulty(source, options, steps.start):
        _require_listable(source, options)
        by_difficulty = partial(order_by_difficulty, compute_mean_entropies(source, batch))
        return functools.lru_cache(maxsize=4)(by_difficulty)
    return shuffle_epoch


def is_by_difficulty(source: Source, options: TrainConfig, step: int) -> bool:
    """Return whether optimiser step ``step`` has sequences in the order of the teacher's entropy.

    After the first epoch a curriculum is shuffled, so that a late resume needs no entropies.
    """
    in_first_epoch = step * options.sequences_per_step < source.train_count
    return options.order == "curriculum" and in_first_epoch


def _require_listable(source: Source, options: TrainConfig) -> None:
    """Raise ``ConfigError`` if an order by content would list too many sequences."""
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

    A piece is a shard if two of them fit into ``WINDOW_BYTES``, else a part of one. The choice
    depends only on the source, so that every machine has one order.
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
    parts = read_in_parts(source, range(source.train_count), block)
    return np.concatenate([_average_entropies(*part) for part in parts])


def _average_entropies(sequences: Sequences, records: Records | None) -> NDArray[np.float64]:
    rows = np.nonzero(sequences.target_mask)[0]
    codes = np.full(len(rows), UNKNOWN_ENTROPY)
    if records is not None:
        codes = records["entropy"].astype(np.int64)
    known = codes != UNKNOWN_ENTROPY
    count = np.bincount(rows[known], minlength=len(sequences))
    if (count[rows] == 0).any():
        raise ConfigError.of_field(
            "/train/order",
            "a curriculum needs the teacher's entropy, but the records of this job do not hold it.",
            "Set it to shuffled, or capture the teacher again.",
        )
    sums = np.bincount(rows[known], codes[known] * ENTROPY_STEP, minlength=len(sequences))
    return sums / np.maximum(count, 1)


def _make_generator(seed: int, epoch: int) -> np.random.Generator:
    # Philox takes both numbers as its key, so that no two epochs share a stream.
    return np.random.Generator(np.random.Philox(key=[seed, epoch]))
