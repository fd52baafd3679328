"""A cache as data sets of torch: by number, or as a stream of whole batches in a seeded order.

Shapes: B sequences of a batch, L positions of a sequence.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Literal

import numpy as np
import torch.distributed as dist
from numpy.typing import NDArray
from torch.utils.data import Dataset, IterableDataset, Sampler, get_worker_info

from kd.cached.decoding import Decoding, Item, decode_batch
from kd.cached.items import split_batch
from kd.cached.shared_store import SharedStore
from kd.text.batches import Source
from kd.text.steps.order import (
    EpochOrder,
    choose_window,
    list_step_epochs,
    list_step_indices,
    order_by_windows,
    shuffle_epoch,
)

Order = Literal["windows", "shuffled"]
#: A sequence, or a sequence and the epoch, which selects the sample of the tail.
Key = int | tuple[int, int]
#: Places of an epoch whose sequences are computed at once.
_PLACES = 1 << 14


class CachedSequences(Dataset[Item]):
    """The training or the held-out sequences of a cache, by number; an item is one sequence.

    ``item[n]`` reads sequence n of this set with the first sample of its tail, and ``item[n, e]``
    with that of epoch e. A ``DataLoader`` reads a batch at a time (``__getitems__``), in its
    workers too: each process opens the cache for itself.
    """

    def __init__(self, store: SharedStore, numbers: range, decoding: Decoding) -> None:
        self.store = store
        self.numbers = numbers
        self.decoding = decoding

    def __len__(self) -> int:
        return len(self.numbers)

    def __getitem__(self, key: Key) -> Item:
        return self.__getitems__([key])[0]

    def __getitems__(self, keys: Sequence[Key]) -> list[Item]:
        """Read the sequences of ``keys`` at once; raises ``IndexError`` for one that is not there.

        Errors of the cache are raised as ``cache.store.Cache.read`` raises them.
        """
        pairs = [key if isinstance(key, tuple) else (key, 0) for key in keys]
        numbers = np.array([self.numbers[number] for number, _ in pairs])
        epochs = np.array([epoch for _, epoch in pairs])
        return split_batch(_read(self.store, self.decoding, numbers, epochs))


class EpochSampler(Sampler[Key]):
    """All training sequences in a random order, which the seed and the epoch determine.

    It is the order of our own training loop with the same seed and ``train.order``. Call
    ``set_epoch`` before each epoch.
    """

    def __init__(self, store: SharedStore, seed: int = 0, order: Order = "windows") -> None:
        self.count = store.open().train_count
        self.seed = seed
        self.epoch = 0
        self._arrange = choose_order(store.open(), order)

    def set_epoch(self, epoch: int) -> None:
        """Choose the order, and the sample of the tails, of ``epoch``."""
        self.epoch = epoch

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[Key]:
        order = self._arrange(self.count, self.seed, self.epoch)
        for start in range(0, self.count, _PLACES):
            places = np.arange(start, min(start + _PLACES, self.count))
            yield from ((number, self.epoch) for number in order[places].tolist())


class CachedStream(IterableDataset[Item]):
    """The training sequences as whole batches, in the order of our own training loop.

    Give it to ``DataLoader(stream, batch_size=None, num_workers=W)``. Worker w reads batches w,
    w + W and so on, so that the order does not depend on the number of workers. Each rank of
    torch.distributed gets ``batch_size`` sequences of its own at each step, and all ranks equally
    many steps. ``steps`` counts the batches of each rank; the epochs follow one another without a
    gap, and epoch e reads sample e of the tails. None is one epoch, without sequences that fill no
    batch. ``start`` is the first step, for a loop that resumes.
    """

    def __init__(
        self,
        store: SharedStore,
        decoding: Decoding,
        batch_size: int,
        seed: int = 0,
        order: Order = "windows",
        steps: int | None = None,
        start: int = 0,
    ) -> None:
        if batch_size < 1:
            raise ValueError(f"batch_size must be at least 1, but got {batch_size}.")
        # Here, because a worker of a DataLoader has no process group.
        self.rank, self.world_size = find_rank()
        self.store = store
        self.decoding = decoding
        self.batch_size = batch_size
        self.seed = seed
        self.order: Order = order
        epoch = store.open().train_count // (batch_size * self.world_size)
        self.steps = range(start, epoch if steps is None else steps)

    def __len__(self) -> int:
        return len(self.steps)

    def __iter__(self) -> Iterator[Item]:
        worker = get_worker_info()
        first, apart = (0, 1) if worker is None else (worker.id, worker.num_workers)
        source = self.store.open()
        arrange = choose_order(source, self.order)
        count = source.train_count
        size = self.batch_size * self.world_size
        own = slice(self.rank * self.batch_size, (self.rank + 1) * self.batch_size)
        for step in self.steps[first::apart]:
            numbers = list_step_indices(count, size, self.seed, step, arrange)
            epochs = list_step_epochs(count, size, step)
            yield _read(self.store, self.decoding, numbers[own], epochs[own])


def choose_order(source: Source, order: Order) -> EpochOrder:
    """Choose the order of an epoch; raises ``ValueError`` for a name that is none."""
    if order == "windows":
        return partial(order_by_windows, *choose_window(source))
    if order == "shuffled":
        return shuffle_epoch
    raise ValueError(f"order must be windows or shuffled, but got {order!r}.")


def find_rank() -> tuple[int, int]:
    """Return the rank of this process and the number of all, as torch.distributed has them.

    Before its process group exists they are those that torchrun and accelerate launch announce.
    """
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))


def _read(
    store: SharedStore, decoding: Decoding, numbers: NDArray[np.int64], draws: NDArray[np.int64]
) -> Item:
    return decode_batch(*store.open().read(numbers, draws), store.make_decoder(), decoding)
