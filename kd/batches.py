"""Sequences -> batches, in an order that is a pure function of (seed, step).

Nothing here has a state to save: a resumed run asks for step n and gets what the uninterrupted run got.

Shapes: B sequences, T tokens, N positions with a target.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from cache.codec import Codec
from cache.records import Records, Sequences
from kd.data import Corpus, position_ids


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
    def has_records(self) -> bool:
        """Whether the teacher's records come with them."""
        return False

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
        """The batch on ``device``; the batch itself where it is there already."""
        if device.type == "cpu":
            return self
        teacher = self.teacher
        return Batch(
            tokens_BT=_move(self.tokens_BT, device),
            positions_BT=None if self.positions_BT is None else _move(self.positions_BT, device),
            rows_N=_move(self.rows_N, device),
            gold_N=_move(self.gold_N, device),
            teacher=None if teacher is None else {name: _move(column, device) for name, column in teacher.items()},
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
    columns = records.columns if records is not None else {}
    return Batch(
        tokens_BT=torch.from_numpy(tokens.astype(np.int64)),
        positions_BT=positions,
        rows_N=torch.from_numpy(rows),
        gold_N=torch.from_numpy(gold),
        teacher={name: torch.from_numpy(column) for name, column in columns.items()} or None,
    )


# ---------------------------------------------------------------------- order


def step_indices(count: int, batch: int, seed: int, step: int) -> np.ndarray:
    """The ``batch`` sequences of optimiser step ``step``: the endless stream of reshuffled epochs, cut into steps."""
    slots, epochs = np.arange(step * batch, (step + 1) * batch), step_epochs(count, batch, step)
    orders = {epoch: _epoch_order(count, seed, epoch) for epoch in np.unique(epochs).tolist()}
    return np.array([orders[epoch][slot % count] for epoch, slot in zip(epochs.tolist(), slots, strict=True)])


def step_epochs(count: int, batch: int, step: int) -> np.ndarray:
    """The epoch that each of the ``batch`` sequences of optimiser step ``step`` belongs to."""
    return np.arange(step * batch, (step + 1) * batch) // count


@functools.lru_cache(maxsize=4)
def _epoch_order(count: int, seed: int, epoch: int) -> np.ndarray:
    return np.random.Generator(np.random.Philox(key=[seed, epoch])).permutation(count)


def training_batches(
    source: Source, batch_size: int, accumulation: int, seed: int, steps: range
) -> Iterator[list[Batch]]:
    """For each step its micro-batches, read one step ahead of the consumer in a thread; epoch e reads draw e."""

    def load(step: int) -> list[Batch]:
        count, batch = source.train_count, batch_size * accumulation
        slots = step_indices(count, batch, seed, step), step_epochs(count, batch, step)
        micro_slots = zip(*(np.split(each, accumulation) for each in slots), strict=True)
        return [make_batch(*source.read(indices, epochs)) for indices, epochs in micro_slots]

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
