"""Sequences and their records as sources, and batches of them for the model.

Shapes: B sequences of a batch, L positions of a sequence, N positions with a target.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Protocol

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
from kd.text.steps.pinned import beside_work, copy_from_pieces, copy_to_pieces
from kd.text.stored.shard_files import count_shard_sequences

#: Bytes from which a column of two axes is wide.
WIDE_BYTES = 2**20


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

    def projection(self) -> dict[str, NDArray[Any]] | None:
        """Return how the tokens of the records become the student's; None if they are the same."""

    def read(
        self, indices: np.ndarray, draws: np.ndarray | int = 0
    ) -> tuple[Sequences, Records | None]:
        """Return the sequences of ``indices`` and their records, in that order.

        ``draws`` selects the sample of the tail to read, for each index or for all of them, modulo
        the number of samples.
        """


def list_held_out(source: Source) -> range:
    """List the places of the held-out sequences, which follow those to train on."""
    return range(source.train_count, source.train_count + source.validation_count)


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
    #: Plain text has no records.
    codec: ClassVar[None] = None
    #: Tokens are few bytes. The system keeps the pages of the token store as it has memory.
    sequence_bytes: ClassVar[int] = 0
    disk_reads: ClassVar[None] = None

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

    @functools.cached_property
    def fingerprint(self) -> str:
        """A name for the content: a hash of it, for which the whole text is read once."""
        return self.corpus.compute_sha256()

    def teacher_head(self) -> dict[str, NDArray[Any]]:
        """Raise ``LookupError``, because plain text has no teacher."""
        raise LookupError("plain text has no teacher")

    def tail_mean(self) -> None:
        """Return None: plain text has no records."""

    def projection(self) -> None:
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
    their targets. ``packed``: None if every row is one document without padding. ``columns``: those
    of the N records, read as ``teacher``. In pinned memory the bytes of wide ones are cut into
    ``pieces``, and the columns are on the device meta. ``arrived``: when a GPU has got them.
    """

    tokens_BL: Tensor
    packed: PackedRows | None
    rows_N: Tensor
    gold_N: Tensor
    columns: dict[str, Tensor] | None
    pieces: Mapping[str, list[Tensor]] = field(default_factory=dict)
    arrived: torch.cuda.Event | None = None

    def __len__(self) -> int:
        return self.gold_N.shape[0]

    @property
    def teacher(self) -> dict[str, Tensor] | None:
        """The columns of the N records as they are stored; None without a teacher.

        ``kd.loss.targets`` decodes them. A GPU does nothing more before they have arrived. Of a
        batch in pinned memory wide ones cannot be read.
        """
        if self.arrived is not None:
            torch.cuda.current_stream(self.gold_N.device).wait_event(self.arrived)
        return self.columns

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
        return replace(self, columns=None, pieces={})

    def to(self, device: torch.device) -> Batch:
        """Copy the batch to ``device``, without waiting if it is pinned; on the CPU return it.

        Wide columns of pinned memory come while the device computes: only the loss needs them.
        """
        if device.type == "cpu":
            return self

        def bring(tensor: Tensor) -> Tensor:
            if tensor.is_meta:
                return torch.empty_like(tensor, device=device)
            return tensor.to(device, non_blocking=True)

        moved = self._map(bring)
        if not self.pieces:
            return moved
        columns = moved.columns or {}
        with beside_work(device, "records") as stream:
            for name, pieces in self.pieces.items():
                copy_from_pieces(pieces, columns[name])
                # A pass that breaks off gives the memory back while the bytes still come.
                columns[name].record_stream(stream)
            return replace(moved, pieces={}, arrived=stream.record_event())

    @property
    def is_pinned(self) -> bool:
        """True if the batch lies in pinned memory."""
        return self.tokens_BL.is_pinned()

    def pin(self) -> Batch:
        """Copy the batch to pinned memory, from which a GPU copies while the CPU goes on.

        Those of whole distributions take gigabytes. The host reads columns of one axis.
        """
        columns = self.columns or {}
        wide = {name: each.contiguous() for name, each in columns.items() if _is_wide(each)}
        pieces = {name: copy_to_pieces(each) for name, each in wide.items()}
        hollow = {name: torch.empty_like(each, device="meta") for name, each in wide.items()}
        batch = replace(self, columns=self.columns and columns | hollow, pieces=pieces)
        return batch._map(lambda tensor: tensor if tensor.is_meta else tensor.pin_memory())

    def _map(self, change: Callable[[Tensor], Tensor]) -> Batch:
        columns = self.columns
        return replace(
            self,
            tokens_BL=change(self.tokens_BL),
            packed=None if self.packed is None else self.packed.map(change),
            rows_N=change(self.rows_N),
            gold_N=change(self.gold_N),
            columns=columns and {name: change(column) for name, column in columns.items()},
        )


def _is_wide(column: Tensor) -> bool:
    return column.ndim > 1 and column.nbytes >= WIDE_BYTES


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
        columns={name: torch.from_numpy(column) for name, column in columns.items()} or None,
    )


def find_packed_rows(positions_BL: Tensor, target: np.ndarray) -> PackedRows | None:
    """Find the documents of rows on the host; None if every row is one document.

    Where no target has another document before it, they need not be kept apart.
    """
    if torch.equal(positions_BL, torch.arange(positions_BL.shape[1]).expand_as(positions_BL)):
        return None
    return PackedRows.of(positions_BL, bool(needs_isolation(positions_BL.numpy(), target).any()))
