"""Read the sequences of a token store by their numbers; nothing for each sequence is in memory.

Shapes: S sequences, L positions of a sequence.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cache.disk import hash_file
from cache.reading.memory import KeptValues
from cache.reading.usage import hold_for
from cache.records import Sequences
from kd.text.stored.packed import iterate
from kd.text.stored.shard_files import ShardArrays, TextManifest, TokenSeal, damaged, locate_shard

#: Shards that are mapped into memory at once.
_OPEN_SHARDS = 8


class TokenStore:
    """A complete store; a shard is compared with its seal when it is first read.

    While this object exists, the store is not removed (``cache.reading.usage``).
    Raises ``DataError`` for a shard that is missing or damaged.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        hold_for(self, folder)
        self.manifest = TextManifest.read(folder)
        self._open: KeptValues[ShardArrays] = KeptValues(_OPEN_SHARDS)
        self._compared = bytearray(-(-len(self) // self.manifest.layout.shard_sequences))

    def __len__(self) -> int:
        return self.manifest.sequences

    def read_shard(self, index: int) -> ShardArrays:
        """Return the arrays of shard ``index``."""
        return self._open.get(index, self._map_shard, index)

    def read_seal(self, index: int) -> TokenSeal:
        """Return the seal of shard ``index``."""
        return TokenSeal.read(self.folder, index)

    def _map_shard(self, index: int) -> ShardArrays:
        layout = self.manifest.layout
        path = locate_shard(self.folder, index)
        count = min(layout.shard_sequences, len(self) - index * layout.shard_sequences)
        name = path.relative_to(self.folder)
        try:
            size = path.stat().st_size
        except FileNotFoundError:
            raise damaged(self.folder, f"{name} is missing") from None
        if size != (expected := layout.count_bytes(count)):
            raise damaged(self.folder, f"{name} has {size} bytes, but must have {expected}")
        if not self._compared[index]:
            if hash_file(path) != self.read_seal(index).sha256:
                raise damaged(self.folder, f"{name} is not what its seal says")
            self._compared[index] = 1
        return layout.map_shard(path, count)


@dataclass(frozen=True)
class StoredSequences:
    """Sequences ``first`` to ``first + count`` of a store, read as ``Sequences`` are."""

    store: TokenStore
    first: int
    count: int

    @classmethod
    def whole(cls, store: TokenStore) -> StoredSequences:
        """Return all sequences of ``store``."""
        return cls(store, 0, len(store))

    def __len__(self) -> int:
        return self.count

    @property
    def length(self) -> int:
        """Number of tokens of one sequence, L."""
        return self.store.manifest.layout.sequence_length

    @cached_property
    def positions(self) -> int:
        """Number of positions with a record, N; shards at the ends are counted, others sealed."""
        if self.count == len(self.store):
            return self.store.manifest.targets
        size = self.store.manifest.layout.shard_sequences
        whole = range(-(-self.first // size), (self.first + self.count) // size)
        if not whole:
            return self._count_targets(range(self.count))
        ends = (
            range(whole.start * size - self.first),
            range(whole.stop * size - self.first, self.count),
        )
        sealed = sum(self.store.read_seal(index).targets for index in whole)
        return sealed + sum(map(self._count_targets, ends))

    def _count_targets(self, rows: range) -> int:
        return sum(part.positions for part in iterate(self, rows))

    def part(self, start: int, stop: int) -> StoredSequences:
        """Return the sequences from ``start`` to before ``stop``, without reading them."""
        return StoredSequences(self.store, self.first + start, max(stop - start, 0))

    def select(self, indices: Any) -> Sequences:
        """Return the sequences at ``indices`` (an index array or a slice), in that order."""
        if isinstance(indices, slice):
            indices = np.arange(*indices.indices(self.count))
        numbers = np.asarray(indices, np.int64)
        if ((numbers < -self.count) | (numbers >= self.count)).any():
            raise IndexError(f"sequences are numbered from 0 to {self.count - 1}")
        numbers_S = self.first + np.where(numbers < 0, numbers + self.count, numbers)
        size = self.store.manifest.layout.shard_sequences
        shape = (len(numbers_S), self.length)
        found = (np.empty(shape, np.uint32), np.empty(shape, bool), np.empty(shape, bool))
        shards_S = numbers_S // size
        # Shard by shard, each once.
        for index in np.unique(shards_S).tolist():
            places = np.flatnonzero(shards_S == index)
            part = self.store.read_shard(index).read(_to_slice(numbers_S[places] - index * size))
            for array, some in zip(found, part.arrays, strict=True):
                array[_to_slice(places)] = some
        return Sequences(*found)


def _to_slice(rows: NDArray[np.int64]) -> Any:
    """Return the slice that means the same as ``rows`` if they follow each other."""
    first = int(rows[0])
    run = bool((rows == np.arange(first, first + len(rows))).all())
    return slice(first, first + len(rows)) if run else rows
