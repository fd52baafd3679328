"""Several sources as one: the parts of a job with several teachers.

    part       domain    members: a source for each teacher, of the same sequences
    math       0         1.0 x cache of the teacher math
    novels     1         0.5 x cache of math, 0.5 x cache of novels

The sequences to train on are those of the first part, then of the second, and so on, and then the
held-out ones in the same order. The columns of a member's records have its number before their
name, and stand for the positions in the member's column ``places``: ``kd.loss.decoder`` decodes
each with its own codec, and joins them. Parts may have sequences of different lengths: those of a
batch are padded to the longest.

Shapes: S sequences, L positions of a sequence, N positions with a target, R those of a member.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

import numpy as np
from numpy.typing import NDArray

from cache.codec import Codec
from cache.records import Records, Sequences
from cache.rounding import UNKNOWN_ENTROPY
from cache.store import Cache
from kd.errors import DataError
from kd.text.batches import Source, read_in_parts
from kd.text.ngrams import read_stored_tokens

Column = TypeVar("Column")
#: Sequences that are read at once to count their positions.
_SEQUENCES_AT_ONCE = 64


class JoinedRecords(Records):
    """Columns of several members, and ``entropy`` and perhaps ``balance`` of each position, (N,).

    ``entropy`` is the weighted mean of the members'. A position counts ``balance`` times in D.
    """

    def __post_init__(self) -> None:
        """Check nothing: the records of each member were checked when they were read."""


@dataclass(frozen=True)
class SourcePart:
    """A domain: its name, and the sources of its teachers with their weights.

    The sources have the same sequences, in the same order.
    """

    name: str
    members: tuple[tuple[float, Source], ...]

    @property
    def text(self) -> Source:
        """The source from which the sequences are read."""
        return self.members[0][1]

    def __post_init__(self) -> None:
        """Raise ``DataError`` if the sources have other sequences."""
        shown = np.array([0, self.text.train_count + self.text.validation_count - 1])
        wanted = self.text.read(shown)[0].tokens
        for _, source in self.members[1:]:
            counts = source.train_count, source.validation_count
            same = counts == (self.text.train_count, self.text.validation_count)
            if not same or not np.array_equal(source.read(shown)[0].tokens, wanted):
                raise DataError(
                    f"the teachers of {self.name} read other sequences of the same text.",
                    "Give a mixture only teachers of one tokenizer and one chat template.",
                )


def name_join(parts: list[list[tuple[float, str]]], balance: str) -> str:
    """Return the fingerprint of a join, from weight and fingerprint of the members of each part."""
    content = json.dumps([[sorted(members) for members in parts], balance])
    return hashlib.sha256(content.encode()).hexdigest()[:32]


@dataclass(frozen=True)
class JoinedSource:
    """The sources of ``parts`` as one; ``balance`` is the job's ``loss.balance``."""

    parts: tuple[SourcePart, ...]
    balance: str = "tokens"
    #: The caches count what they read from the disk each for itself.
    disk_reads: ClassVar[None] = None

    @property
    def members(self) -> list[tuple[float, Source]]:
        """The members of all parts; their place is the number before their columns."""
        return [member for part in self.parts for member in part.members]

    @functools.cached_property
    def _bounds(self) -> list[int]:
        """Where the training sequences of each part begin, then its held-out ones; and the end."""
        counts = [part.text.train_count for part in self.parts]
        counts += [part.text.validation_count for part in self.parts]
        return list(itertools.accumulate(counts, initial=0))

    @property
    def domains(self) -> dict[str, range]:
        """The held-out sequences of each part, by its name."""
        pairs = itertools.pairwise(self._bounds[len(self.parts) :])
        return {part.name: range(*pair) for part, pair in zip(self.parts, pairs, strict=True)}

    @property
    def train_count(self) -> int:
        """Number of sequences to train on; their indices come first."""
        return self._bounds[len(self.parts)]

    @property
    def validation_count(self) -> int:
        """Number of held-out sequences."""
        return self._bounds[-1] - self.train_count

    @property
    def shard_sequences(self) -> int:
        """The sequences of the smallest shard."""
        return min(source.shard_sequences for _, source in self.members)

    @functools.cached_property
    def sequence_bytes(self) -> int:
        """Bytes of memory that a decoded sequence takes on average."""
        sizes = (
            part.text.train_count * sum(source.sequence_bytes for _, source in part.members)
            for part in self.parts
        )
        return -(-sum(sizes) // max(self.train_count, 1))

    @property
    def fingerprint(self) -> str:
        """A name for the content: a hash of the members, their weights and the balance."""
        return name_join(
            [
                [(weight, source.fingerprint) for weight, source in part.members]
                for part in self.parts
            ],
            self.balance,
        )

    @property
    def codec(self) -> Codec | None:
        """The codec of the member with the largest vocabulary; each has its own."""
        codecs = [source.codec for _, source in self.members if source.codec is not None]
        return max(codecs, key=lambda codec: codec.vocabulary_size, default=None)

    def teacher_head(self) -> dict[str, NDArray[Any]]:
        """Raise ``LookupError``: each member has its own."""
        raise LookupError("the teacher's LM head is that of a member")

    def tail_mean(self) -> dict[str, NDArray[Any]] | None:
        """Return None: a batch has the tails of several teachers in other shares than the text."""
        return self.members[0][1].tail_mean() if len(self.members) == 1 else None

    def projection(self) -> None:
        """Return None: each member has its own."""

    def read(
        self, indices: np.ndarray, draws: np.ndarray | int = 0
    ) -> tuple[Sequences, Records | None]:
        """Return the sequences of ``indices`` and their records, in that order."""
        numbers = np.asarray(indices)
        drawn = np.broadcast_to(draws, numbers.shape)
        stretch = np.searchsorted(self._bounds, numbers, "right") - 1
        later, place = np.divmod(stretch, len(self.parts))
        own = numbers - np.take(self._bounds, stretch)
        own += later * np.take([part.text.train_count for part in self.parts], place)
        read = [
            (number, rows, [source.read(own[rows], drawn[rows]) for _, source in part.members])
            for number, part in enumerate(self.parts)
            if len(rows := np.flatnonzero(place == number))
        ]
        sequences = _interleave([(rows, found[0][0]) for _, rows, found in read], len(numbers))
        if any(records is None for *_, found in read for _, records in found):
            return sequences, None
        return sequences, self._join_records(sequences, read)

    def _join_records(
        self, sequences: Sequences, read: list[tuple[int, NDArray[Any], list[Any]]]
    ) -> JoinedRecords:
        row_N = np.nonzero(sequences.target_mask)[0]
        entropy_N = np.zeros(len(row_N))
        balance_N = np.ones(len(row_N), np.float32)
        columns: dict[str, NDArray[Any]] = {}
        for number, rows, found in read:
            part = self.parts[number]
            first = sum(len(each.members) for each in self.parts[:number])
            # The rows ascend, so these are in the order of the members' records.
            place_R = np.flatnonzero(np.isin(row_N, rows))
            for member, (weight, _), (_, records) in zip(
                range(first, first + len(part.members)), part.members, found, strict=True
            ):
                columns |= {f"{member}.{name}": each for name, each in records.columns.items()}
                columns[f"{member}.places"] = place_R
                codes_R = records["entropy"].astype(np.float64)
                known_R = codes_R != UNKNOWN_ENTROPY
                entropy_N[place_R] += np.where(known_R, weight * codes_R, np.inf)
            if self.balance == "domains":
                balance_N[place_R] = self._weights[number]
        known_N = np.isfinite(entropy_N)
        codes_N = np.where(known_N, np.rint(np.where(known_N, entropy_N, 0)), UNKNOWN_ENTROPY)
        columns["entropy"] = codes_N.astype(np.min_scalar_type(UNKNOWN_ENTROPY))
        if self.balance == "domains":
            columns["balance"] = balance_N
        return JoinedRecords(columns)

    @functools.cached_property
    def _weights(self) -> NDArray[np.float64]:
        """The weight of a token of each part, so that all parts weigh as much: N / (D N_d)."""
        counts = np.array([count_training_positions(part.text) for part in self.parts], np.float64)
        return counts.sum() / (len(counts) * np.maximum(counts, 1))


def _interleave(parts: list[tuple[NDArray[np.int64], Sequences]], count: int) -> Sequences:
    """Put the sequences of each part at its rows, of ``count``; pad them to the longest.

    Padding begins a document of its own, without targets.
    """
    shape = count, max(sequences.length for _, sequences in parts)
    tokens = np.zeros(shape, np.uint32)
    starts, targets = np.zeros(shape, bool), np.zeros(shape, bool)
    for rows, sequences in parts:
        for whole, own in zip((tokens, starts, targets), sequences.arrays, strict=True):
            whole[rows, : sequences.length] = own
        starts[rows, sequences.length : sequences.length + 1] = True
    return Sequences(tokens, starts, targets)


def take_columns(columns: Mapping[str, Column], number: int) -> dict[str, Column]:
    """Return the columns of a member under their own names; empty if it has no sequence there."""
    prefix = f"{number}."
    return {
        name.removeprefix(prefix): column
        for name, column in columns.items()
        if name.startswith(prefix)
    }


def count_training_positions(source: Source) -> int:
    """Count the positions to train on: of a cache without its records."""
    if isinstance(source, Cache):
        return sum(part.positions for part in read_stored_tokens(source))
    parts = read_in_parts(source, range(source.train_count), _SEQUENCES_AT_ONCE)
    return sum(part.positions for part, _ in parts)


def list_domains(source: Source) -> dict[str, range]:
    """Return the held-out sequences of each domain by name; one without a name is all of them."""
    if isinstance(source, JoinedSource):
        return source.domains
    return {"": range(source.train_count, source.train_count + source.validation_count)}
