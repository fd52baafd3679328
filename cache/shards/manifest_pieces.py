"""The pieces of a manifest on the disk: written once, and read as far as they are needed."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path

from cache.disk import TEMPORARY_PREFIX, make_folder, publish_folder, remove_path
from cache.errors import CacheCorrupt
from cache.manifest import CacheIdentity, Manifest
from cache.reading.memory import KeptValues
from cache.shards import entries as layout
from cache.shards.entries import PieceIndex, ShardEntry, ShardTotals

#: The folder of the pieces.
PIECES = "manifest"
#: Pieces that stay in memory: 16 MiB of them.
_KEPT_PIECES = 64
_REMEDY = "Run the job again: it writes a new manifest from the sealed shards."


def name_piece(piece: int) -> str:
    """Return the path of a piece, relative to the folder of its cache."""
    return f"{PIECES}/{piece:06d}.bin"


def open_entries(folder: Path, manifest: Manifest) -> tuple[ShardEntry, ...] | EntryPieces:
    """Open the entries of the cache in ``folder``; of those in pieces nothing is read yet."""
    if manifest.pieces is None:
        return manifest.shards
    return EntryPieces(folder, manifest.pieces, manifest.identity)


def write_pieces(folder: Path, entries: Iterable[ShardEntry]) -> PieceIndex:
    """Write the entries of all shards as the pieces of the cache in ``folder``.

    All pieces appear with one rename, and one of them is in memory at a time. Errors of ``entries``
    pass through, and then nothing has changed.
    """
    temporary = folder / f"{TEMPORARY_PREFIX}{PIECES}"
    coming = iter(entries)
    totals = ShardTotals()
    found: list[str] = []
    try:
        remove_path(temporary)
        make_folder(temporary)
        while part := list(islice(coming, layout.PIECE_SHARDS)):
            data = layout.encode_piece(part)
            (temporary / Path(name_piece(len(found))).name).write_bytes(data)
            found.append(hashlib.sha256(data).hexdigest())
            totals += ShardTotals.of(part)
        publish_folder(temporary, folder / PIECES)
    finally:
        remove_path(temporary)
    return PieceIndex(layout.PIECE_SHARDS, totals, tuple(found))


class EntryPieces:
    """The entries of a manifest in pieces, by number and in order; threads may share them.

    A piece is read when one of its entries is asked for, and compared with the manifest's sha256.
    The pieces that were used last stay in memory. A damaged one raises ``CacheCorrupt``.
    """

    def __init__(self, folder: Path, index: PieceIndex, identity: CacheIdentity) -> None:
        self._folder = folder
        self._index = index
        self._identity = identity
        self._kept: KeptValues[bytes] = KeptValues(_KEPT_PIECES)

    def __len__(self) -> int:
        return self._index.totals.shards

    def __getitem__(self, number: int, /) -> ShardEntry:
        if not 0 <= number < len(self):
            raise IndexError(f"A shard must lie in [0, {len(self)}), but got {number}.")
        piece, row = divmod(number, self._index.piece_shards)
        data = self._kept.get(piece, self._read, piece)
        return layout.decode_row(data, row, len(self._identity.shard_range(number)))

    def __iter__(self) -> Iterator[ShardEntry]:
        return (self[number] for number in range(len(self)))

    def require_files(self) -> None:
        """Raise ``CacheCorrupt`` unless every piece exists with its size; no content is read."""
        for piece in range(len(self._index.sha256)):
            path = self._folder / name_piece(piece)
            size = path.stat().st_size if path.is_file() else None
            self._require(size == self._index.count_bytes(piece), path, _describe_size(size))

    def find_problems(self) -> list[str]:
        """Read every piece; return a line for each that is missing or damaged."""
        lines = []
        totals = ShardTotals()
        for piece in range(len(self._index.sha256)):
            try:
                shards = self._index.shard_range(piece)
                first, last = map(self._identity.shard_range, (shards[0], shards[-1]))
                totals += layout.sum_piece(self._read(piece), last.stop - first.start)
            except CacheCorrupt as error:
                lines.append(f"{name_piece(piece)}: {error.detail}")
        if not lines and totals != self._index.totals:
            lines.append(f"{PIECES}: the entries add up to {totals}, not to {self._index.totals}")
        return lines

    def _read(self, piece: int) -> bytes:
        path = self._folder / name_piece(piece)
        try:
            data = path.read_bytes()
        except FileNotFoundError:
            raise self._make_error(path, "it is missing") from None
        self._require(len(data) == self._index.count_bytes(piece), path, _describe_size(len(data)))
        genuine = hashlib.sha256(data).hexdigest() == self._index.sha256[piece]
        self._require(genuine, path, "its content differs from its sha256")
        return data

    def _require(self, holds: bool, path: Path, why: str) -> None:
        if not holds:
            raise self._make_error(path, why)

    def _make_error(self, path: Path, why: str) -> CacheCorrupt:
        return CacheCorrupt(f"{path} is not the piece that the manifest names: {why}.", _REMEDY)


def _describe_size(size: int | None) -> str:
    return "it is missing" if size is None else f"it has {size} bytes"
