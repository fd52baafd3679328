"""Sequences and their records as sources, and batches of them for the model.

Shapes: B sequences of a batch, L positions of a sequence, N positions with a target.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from cache.codec import Codec
from cache.reading.file_reads import DiskReads
from cache.records import Records, Sequences
from kd.text.corpus import Corpus
from kd.text.packed_rows import PackedRows
from kd.text.packing import compute_position_ids, needs_isolation
from kd.text.stored.shard_files import count_shard_sequences


class Source(Protocol):
    """Sequences, with or without records: ``train_count`` to train on, then the held-out ones.

    A sealed cache is one (``cache.store.Cache``). Sources with equal ``fingerprint`` give equal
    batches.
    """

    @property
    def train_count(self) -> int:
        """Number of sequences to train on; their indices come first."""

    @property
    def validation_count(self) -> int:
        """Number of held-out sequences."""

    @property
    def shard_sequences(self) -> int:
        """Number of consecutive sequences that are read together at little more than one's cost."""

    @property
    def sequence_bytes(self) -> int:
        """Bytes of memory that a decoded sequence takes on average; 0 if all are in memory."""

    @property
    def fingerprint(self) -> str:
        """A name for the content: a hash of it."""

    @property
    def codec(self) -> Codec | None:
        """The codec of the records; None if there are no records."""

    @property
    def disk_reads(self) -> DiskReads | None:
        """Bytes and seconds of reading from the disk so far; None if all is in memory."""

    def teacher_head(self) -> dict[str, NDArray[Any]]:
        """Return the teacher's LM head, if the records are its hidden states."""

    def tail_mean(self) -> dict[str, NDArray[Any]] | None:
        """Return the mean tail of the records, as ``cache.store.Cache.tail_mean`` does."""

    def read(
        self, indices: np.ndarray, draws: np.ndarray | int = 0
    ) -> tuple[Sequences, Records | None]:
        """Return the sequences of ``indices`` and their records, in that order.

        ``draws`` selects the sample of the tail to read, for each index or for all of them, modulo
        the number of samples.
        """


def read_in_parts(
    source: Source, places: range, most: int
) -> Iterator[tuple[Sequences, Records | None]]:
    """Yield the sequences at ``places``, which follow each other, and their records."""
    for start in places[::most]:
        yield source.read(np.arange(start, min(start + most, places.stop)))


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
        return max(min(self.train_count, count_shard_sequences(self.corpus.train.length)), 1)

    @property
    def sequence_bytes(self) -> int:
        """0: the system keeps the pages of the token store, as far as it has memory."""
        return 0

    @functools.cached_property
    def fingerprint(self) -> str:
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
    their targets. ``packed``: None if every row is one document without padding. ``teacher``: the
    columns of the N records as they are stored (``kd.loss.targets`` decodes them); None without a
    teacher.
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
        """The place of each token in its document; None if one of a row is all that matters."""
        return self.packed.positions_BL if self.packed is not None and self.packed.apart else None

    def count_targets(self) -> NDArray[np.int64]:
        """Count the targets of each sequence, (B,)."""
        count, length = self.tokens_BL.shape
        return np.bincount(self.rows_N.cpu().numpy() // length, minlength=count)

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
        """True if the batch lies in pinned memory."""
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
            teacher=teacher and {name: change(column) for name, column in teacher.items()},
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
        packed=find_packed_rows(torch.from_numpy(positions), target),
        rows_N=torch.from_numpy(rows),
        gold_N=torch.from_numpy(gold),
        teacher={name: torch.from_numpy(column) for name, column in columns.items()} or None,
    )


def find_packed_rows(positions_BL: Tensor, target: np.ndarray) -> PackedRows | None:
    """Find the documents of rows on the host; None if every row is one document.

    Where no target has another document before it, they need not be kept apart.
    """
    if torch.equal(positions_BL, torch.arange(positions_BL.shape[1]).expand_as(positions_BL)):
        return None
    return PackedRows.of(positions_BL, bool(needs_isolation(positions_BL.numpy(), target).any()))
