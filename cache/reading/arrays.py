"""Sealed folders of arrays, open for reading: rows of them, and sequences of a shard."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cache.codec import Codec
from cache.errors import CacheCorrupt
from cache.idcode import order_tokens
from cache.layout import TOKEN_CLASSES, Arrays, list_arrays
from cache.reading.chunks import StoredArray
from cache.reading.file_reads import DiskReads
from cache.reading.memory import KeptValues
from cache.rounding import choose_id_dtype
from cache.shard import PER_SEQUENCE, RECAPTURE_REMEDY, Seal

#: Bytes of decoded chunks that a reader keeps in memory unless the caller sets a limit.
MEMORY_BYTES = 1 << 29

ChunkMemory = KeptValues[NDArray[Any]]


def make_chunk_memory(limit: int = MEMORY_BYTES) -> ChunkMemory:
    """Make a memory for at most ``limit`` bytes of decoded chunks."""
    return KeptValues(limit, lambda chunk: chunk.nbytes)


class ArrayFolder:
    """A sealed folder of arrays, open for reading; threads may share it.

    A file is compared with the seal's sha256 when it is read for the first time, and the crc32c of
    a chunk each time: a chunk's crc32c proves that its bytes are whole, not that they belong here.
    ``sound`` has a flag for each file of the seal, which is 1 once the file has passed, so that a
    folder that is opened again is not hashed again. Decoded chunks stay in ``memory``; ``reads``
    counts what comes from the disk. Any failure raises ``CacheCorrupt`` that names the array.
    """

    def __init__(
        self,
        folder: Path,
        seal: Seal,
        sound: bytearray | None = None,
        memory: ChunkMemory | None = None,
        reads: DiskReads | None = None,
    ) -> None:
        self.folder = folder
        self.seal = seal
        self.memory = make_chunk_memory() if memory is None else memory
        self._reads = DiskReads() if reads is None else reads
        self._sound = bytearray(len(seal.files)) if sound is None else sound
        self._places = {name: place for place, name in enumerate(seal.files)}
        # A string, because the hash of a path is slow.
        self._key = str(folder)
        self._arrays: dict[str, StoredArray] = {}

    def read_array(self, name: str) -> NDArray[Any]:
        """Read all rows of array ``name``."""
        return self.read_rows(name, 0, self._get_array(name).shape[0])

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of array ``name``."""
        return self._get_array(name).shape

    def read_rows(self, name: str, start: int, stop: int) -> NDArray[Any]:
        """Read rows ``start`` to ``stop`` of array ``name`` as stored, from their chunks only.

        They are a copy, because a view would keep its whole chunk in memory.
        """
        array = self._get_array(name)
        if start == stop:
            return np.empty((0, *array.shape[1:]), array.dtype)
        size = array.chunk_rows
        first = start // size
        last = (stop - 1) // size
        if first == last:
            return self._get_chunk(name, first)[start - first * size : stop - first * size].copy()
        chunks = [self._get_chunk(name, number) for number in range(first, last + 1)]
        chunks[0] = chunks[0][start - first * size :]
        chunks[-1] = chunks[-1][: stop - last * size]
        return np.concatenate(chunks)

    def _get_array(self, name: str) -> StoredArray:
        if name not in self._arrays:
            try:
                # Nothing here reads the metadata of the group, but other readers of the folder do.
                self._read_sealed("zarr.json")
                self._arrays[name] = StoredArray.parse(self._read_sealed(f"{name}/zarr.json"))
            except (FileNotFoundError, LookupError, ValueError, TypeError) as error:
                raise self._make_error(name, error) from error
        return self._arrays[name]

    def _get_chunk(self, name: str, number: int) -> NDArray[Any]:
        return self.memory.get((self._key, name, number), self._decode, name, number)

    def _decode(self, name: str, number: int) -> NDArray[Any]:
        array = self._get_array(name)
        file = array.name_chunk(number)
        try:
            return array.decode_chunk(number, self._read_sealed(f"{name}/{file}"))
        except (FileNotFoundError, LookupError, ValueError, RuntimeError) as error:
            raise self._make_error(f"{name}, chunk {file}", error) from error

    def _read_sealed(self, path: str) -> bytes:
        """Read a file; raise unless it had the sealed sha256 when it was first read.

        Callers turn its errors into ``CacheCorrupt``.
        """
        sealed = self.seal.files[path]
        data = self._reads.read(self.folder / path, sealed)
        place = self._places[path]
        if not self._sound[place]:
            if hashlib.sha256(data).hexdigest() != sealed.sha256:
                restored = self._reads.restore(self.folder / path, sealed)
                if restored is None:
                    raise ValueError(f"{path} differs from its sha256")
                data = restored
            self._sound[place] = 1
        return data

    def _make_error(self, what: str, error: Exception) -> CacheCorrupt:
        return CacheCorrupt(
            f"{self.folder}: array {what} cannot be read: {error}.", RECAPTURE_REMEDY
        )


class Shard(ArrayFolder):
    """One sealed shard, open for reading."""

    def __init__(
        self,
        folder: Path,
        seal: Seal,
        codec: Codec,
        sound: bytearray,
        memory: ChunkMemory,
        reads: DiskReads,
    ) -> None:
        super().__init__(folder, seal, sound, memory, reads)
        self.codec = codec
        self._offsets = self.read_array("offsets")

    def count_decoded_bytes(self) -> int:
        """Count the bytes of all sequences with one sample of the tails, only from metadata."""
        names = [name for name, _ in list_arrays(self.codec, 0).values()]
        arrays = [self._get_array(name) for name in (*PER_SEQUENCE, *names)]
        return sum(each.dtype.itemsize * math.prod(each.shape) for each in arrays)

    def read_order(self) -> NDArray[Any]:
        """Read the token at each rank, (V,); it is empty where the shard has no such order."""
        if not self.codec.rules.sampled or self.codec.rules.dithered:
            return np.empty(0)
        return self.memory.get((self._key, "order"), self._make_order)

    def _make_order(self) -> NDArray[Any]:
        order = order_tokens(self.read_array(TOKEN_CLASSES))
        return order.astype(choose_id_dtype(self.codec.vocabulary_size))

    def read_sequence(self, row: int, draw: int = 0) -> Arrays:
        """Read the arrays of sequence ``row`` as stored, with the tails of ``draw``."""
        names = (*PER_SEQUENCE, *list_arrays(self.codec, draw))
        return self.read_columns(range(row, row + 1), names, draw=draw)

    def read_columns(
        self, rows: range, names: Iterable[str], positions: range | None = None, draw: int = 0
    ) -> Arrays:
        """Read columns of consecutive sequences as stored, and no others.

        ``rows`` are at least one sequence, ``names`` those of ``PER_SEQUENCE`` and of
        ``cache.layout.list_arrays`` for the ``draw``. ``positions`` selects consecutive records of
        the sequences, by their number from the first one; then every column has one row for each
        record. Only the chunks that hold these rows are read.
        """
        first = self._offsets[rows.start].tolist()
        last = self._offsets[rows.stop].tolist()
        columns = list_arrays(self.codec, draw)
        found: Arrays = {}
        for name in names:
            if name in PER_SEQUENCE:
                found[name] = self.read_rows(name, rows.start, rows.stop)
                continue
            stored, cut = columns[name]
            start, stop = first[cut], last[cut]
            if positions is not None:
                start, stop = start + positions.start, min(start + positions.stop, stop)
            found[name] = self.read_rows(stored, start, stop)
        return found
