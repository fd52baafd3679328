"""Packed text by the numbers of its sequences, in memory or on the disk."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol

from cache.records import Sequences

#: Tokens that are read at once.
_TOKENS_AT_ONCE = 1 << 20


class PackedText(Protocol):
    """Packed sequences in memory (``cache.records.Sequences``) or on the disk, by their number."""

    def __len__(self) -> int: ...

    @property
    def length(self) -> int:
        """Number of tokens of one sequence, L."""

    @property
    def positions(self) -> int:
        """Number of positions with a record, N."""

    def select(self, indices: Any) -> Sequences:
        """Return the sequences at ``indices`` (an index array or a slice), in that order."""


def iterate(text: PackedText, rows: range | None = None) -> Iterator[Sequences]:
    """Yield the sequences ``rows`` of ``text``, or all, about a million tokens at a time."""
    rows = range(len(text)) if rows is None else rows
    some = max(_TOKENS_AT_ONCE // text.length, 1)
    for first in range(rows.start, rows.stop, some):
        yield text.select(slice(first, min(first + some, rows.stop)))
