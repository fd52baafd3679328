"""The entries of all shards in the manifest: one for each shard, in the manifest or in pieces.

A manifest with few shards lists their entries. One with more names *pieces*: files with the entries
of ``PIECE_SHARDS`` consecutive shards each. So a cache of any size opens at once, and the entry of
a shard is found by arithmetic: entry ``i % piece_shards`` of piece ``i // piece_shards``.

A piece is binary, because its rows are read in any order: a row needs no parsing of those before
it, and takes a third of the bytes that it takes in JSON.
"""

from __future__ import annotations

import operator
import struct
from collections.abc import Iterable
from dataclasses import astuple, dataclass

import numpy as np

#: Shards of a piece, and of a cache without pieces at most. A piece of them is 256 KiB.
PIECE_SHARDS = 4096
#: A row of a piece: positions, head entries, tail entries, bytes, and the digest of the seal.
_ROW = struct.Struct("<4Q32s")


@dataclass(frozen=True)
class ShardEntry:
    """One shard in the manifest: counts, bytes on disk with the seal, and the seal's digest."""

    sequences: int
    positions: int
    head_entries: int
    tail_entries: int
    bytes: int
    digest: str

    @property
    def counts(self) -> tuple[int, int, int, int]:
        """Positions, head entries, tail entries and bytes, in the order of a row of a piece."""
        return self.positions, self.head_entries, self.tail_entries, self.bytes


@dataclass(frozen=True)
class ShardTotals:
    """The sums of all entries; ``shards`` is their number."""

    shards: int = 0
    sequences: int = 0
    positions: int = 0
    head_entries: int = 0
    tail_entries: int = 0
    bytes: int = 0

    @classmethod
    def of(cls, entries: Iterable[ShardEntry]) -> ShardTotals:
        """Add up ``entries``."""
        rows = [(1, entry.sequences, *entry.counts) for entry in entries]
        return cls(*map(sum, zip(*rows, strict=True)))

    def __add__(self, other: ShardTotals) -> ShardTotals:
        return ShardTotals(*map(operator.add, astuple(self), astuple(other)))


@dataclass(frozen=True)
class PieceIndex:
    """The pieces of a manifest: the sums of all entries, and the sha256 of each piece in order."""

    piece_shards: int
    totals: ShardTotals
    sha256: tuple[str, ...]

    @property
    def bytes(self) -> int:
        """Bytes of all pieces."""
        return self.totals.shards * _ROW.size

    def shard_range(self, piece: int) -> range:
        """Return the numbers of the shards whose entries are in ``piece``."""
        start = piece * self.piece_shards
        return range(start, min(start + self.piece_shards, self.totals.shards))

    def count_bytes(self, piece: int) -> int:
        """Return the bytes of ``piece``."""
        return len(self.shard_range(piece)) * _ROW.size


def encode_piece(entries: Iterable[ShardEntry]) -> bytes:
    """Encode consecutive entries as a piece. Their sequences are not stored: the identity tells."""
    return b"".join(_ROW.pack(*entry.counts, bytes.fromhex(entry.digest)) for entry in entries)


def decode_row(piece: bytes, row: int, sequences: int) -> ShardEntry:
    """Decode one entry of ``piece``, of a shard with ``sequences`` sequences."""
    positions, heads, tails, size, digest = _ROW.unpack_from(piece, row * _ROW.size)
    return ShardEntry(sequences, positions, heads, tails, size, digest.hex())


def sum_piece(piece: bytes, sequences: int) -> ShardTotals:
    """Add up the entries of ``piece``, which have ``sequences`` sequences together."""
    words = np.frombuffer(piece, "<u8").reshape(-1, _ROW.size // 8)
    return ShardTotals(len(words), sequences, *words[:, :4].sum(axis=0, dtype=np.uint64).tolist())
