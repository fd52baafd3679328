"""Sequences -> batches, in an order that is a pure function of (seed, step).

Nothing here has a state to save: a resumed run asks for step n and gets what the uninterrupted run got.

Shapes: B sequences, T tokens, N positions with a target, E record entries.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from cache.records import Records, Sequences
from kd.data import Corpus, position_ids
from kd.losses import RecordTargets, Targets


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
    def has_records(self) -> bool:
        """Whether the teacher's records come with them."""
        ...

    @property
    def identity(self) -> str:
        """A name for the content."""
        ...

    def read(self, indices: np.ndarray) -> tuple[Sequences, Records | None]:
        """The sequences of ``indices`` and their records, in that order."""
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
    def has_records(self) -> bool:
        """Whether the teacher's records come with them."""
        return False

    @property
    def identity(self) -> str:
        """A name for the content."""
        return self.corpus.sha256()

    def read(self, indices: np.ndarray) -> tuple[Sequences, None]:
        """The sequences of ``indices``, in that order; training and held-out indices do not mix in one call."""
        if len(indices) and indices[0] >= self.train_count:
            return self.corpus.validation.select(indices - self.train_count), None
        return self.corpus.train.select(indices), None


@dataclass(frozen=True)
class Batch:
    """What one forward pass takes. ``rows_N`` are the flat places (b * T + t) of the positions with a target.

    ``positions_BT`` is None where every row is one document, so that attention takes its plain causal path.
    ``best_N`` is the teacher's most probable id, or -1 where its record has no head.
    """

    tokens_BT: Tensor
    positions_BT: Tensor | None
    rows_N: Tensor
    targets: Targets
    best_N: Tensor | None

    def to(self, device: torch.device) -> Batch:
        """The batch on ``device``; the batch itself where it is there already."""
        if device.type == "cpu":
            return self
        record = self.targets.record
        if record is not None:
            parts = (record.offsets_N1, record.ids_E, record.weights_E, record.entropy_N)
            record = RecordTargets(*(_move(part, device) for part in parts))
        return Batch(
            tokens_BT=_move(self.tokens_BT, device),
            positions_BT=None if self.positions_BT is None else _move(self.positions_BT, device),
            rows_N=_move(self.rows_N, device),
            targets=Targets(_move(self.targets.gold_N, device), record),
            best_N=None if self.best_N is None else _move(self.best_N, device),
        )


def _move(tensor: Tensor, device: torch.device) -> Tensor:
    return tensor.pin_memory().to(device, non_blocking=True)


def make_batch(sequences: Sequences, records: Records | None) -> Batch:
    """Tensors of a batch on the CPU."""
    tokens, target = sequences.tokens, sequences.target_mask
    rows = np.flatnonzero(target)
    gold = tokens.reshape(-1)[rows + 1].astype(np.int64)
    one_document = not (sequences.document_start & target)[:, 1:].any()  # a lone token or padding does not count
    positions = None if one_document else torch.from_numpy(position_ids(sequences.document_start))
    return Batch(
        tokens_BT=torch.from_numpy(tokens.astype(np.int64)),
        positions_BT=positions,
        rows_N=torch.from_numpy(rows),
        targets=Targets(torch.from_numpy(gold), None if records is None else _record_targets(records)),
        best_N=None if records is None else torch.from_numpy(_best(records)),
    )


def _record_targets(records: Records) -> RecordTargets:
    """Head and tail of each record side by side, with their weights."""
    head, tail = records.head_count.astype(np.int64), records.tail_count.astype(np.int64)
    offsets = np.concatenate([[0], np.cumsum(head + tail)])
    ids = np.empty(offsets[-1], np.int64)
    weights = np.empty(offsets[-1], np.float32)
    from_head, from_tail = _places(offsets[:-1], head), _places(offsets[:-1] + head, tail)
    ids[from_head], ids[from_tail] = records.head_ids, records.tail_ids
    weights[from_head], weights[from_tail] = records.head_weights(), records.tail_weights()
    return RecordTargets(*map(torch.from_numpy, (offsets, ids, weights, records.entropy)))


def _places(starts: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """The indices starts[n], starts[n] + 1, ... (counts[n] of them) for every n, in one array."""
    first = np.cumsum(counts) - counts
    return np.arange(counts.sum()) + np.repeat(starts - first, counts)


def _best(records: Records) -> np.ndarray:
    """The teacher's most probable token: the first of a record's head, -1 where no token passed the threshold."""
    head = records.head_count.astype(np.int64)
    first = np.minimum(np.cumsum(head) - head, max(len(records.head_ids) - 1, 0))
    ids = records.head_ids.astype(np.int64) if len(records.head_ids) else np.full(1, -1)
    return np.where(head > 0, ids[first], -1)


# ---------------------------------------------------------------------- order


def step_indices(count: int, batch: int, seed: int, step: int) -> np.ndarray:
    """The ``batch`` sequences of optimiser step ``step``: the endless stream of reshuffled epochs, cut into steps."""
    slots = np.arange(step * batch, (step + 1) * batch)
    epochs = slots // count
    orders = {epoch: _epoch_order(count, seed, epoch) for epoch in np.unique(epochs).tolist()}
    return np.array([orders[epoch][slot % count] for epoch, slot in zip(epochs.tolist(), slots, strict=True)])


@functools.lru_cache(maxsize=4)
def _epoch_order(count: int, seed: int, epoch: int) -> np.ndarray:
    return np.random.Generator(np.random.Philox(key=[seed, epoch])).permutation(count)


def training_batches(
    source: Source, batch_size: int, accumulation: int, seed: int, steps: range
) -> Iterator[list[Batch]]:
    """For each step its micro-batches, read one step ahead of the consumer in a thread."""

    def load(step: int) -> list[Batch]:
        indices = step_indices(source.train_count, batch_size * accumulation, seed, step)
        return [make_batch(*source.read(micro)) for micro in np.split(indices, accumulation)]

    with ThreadPoolExecutor(1, thread_name_prefix="batches") as reader:
        coming = [reader.submit(load, step) for step in steps[:2]]
        for step in steps:
            ready = coming.pop(0)
            if step + 2 in steps:
                coming.append(reader.submit(load, step + 2))
            yield ready.result()


def validation_batches(source: Source, batch_size: int) -> Iterator[Batch]:
    """The held-out sequences, in order."""
    indices = np.arange(source.train_count, source.train_count + source.validation_count)
    for start in range(0, len(indices), batch_size):
        yield make_batch(*source.read(indices[start : start + batch_size]))
