"""The metadata of a stored array, and how one of its chunks is decoded.

This decodes what ``cache.shard.write_arrays`` writes, without Zarr: for small chunks Zarr's own
reader takes five times as long as hashing and decompressing them.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import google_crc32c
import numpy as np
from numcodecs import blosc
from numpy.typing import NDArray

#: The codecs of every array, in the order in which they are applied to a chunk.
_CODECS = ["bytes", "blosc", "crc32c"]
_CHECKSUM_BYTES = 4


@dataclass(frozen=True)
class StoredArray:
    """The metadata of a stored array. Its chunks divide the first axis only."""

    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    chunk_rows: int

    @classmethod
    def parse(cls, data: bytes) -> StoredArray:
        """Parse the file ``zarr.json``.

        Raises ``ValueError``, ``LookupError`` or ``TypeError`` for an array of another kind.
        """
        document = json.loads(data)
        shape = tuple(document["shape"])
        rows, *inner = document["chunk_grid"]["configuration"]["chunk_shape"]
        codecs = [codec["name"] for codec in document["codecs"]]
        if codecs != _CODECS or tuple(inner) != shape[1:]:
            raise ValueError(
                f"expected codecs {_CODECS} and chunks of whole rows of {shape}, "
                f"got {codecs} and {[rows, *inner]}"
            )
        return cls(np.dtype(document["data_type"]).newbyteorder("<"), shape, int(rows))

    def name_chunk(self, number: int) -> str:
        """Return the name of the file of chunk ``number``."""
        return ".".join(["c", str(number), *["0"] * (len(self.shape) - 1)])

    def decode_chunk(self, number: int, data: bytes) -> NDArray[Any]:
        """Decode the rows of chunk ``number`` from its file; they cannot be written to.

        Raises ``ValueError`` or ``RuntimeError`` if ``data`` is not that of a whole chunk.
        """
        # An array, because the library takes no memoryview, and a part of bytes would be a copy.
        content = np.frombuffer(data, np.uint8)[:-_CHECKSUM_BYTES]
        stored = int.from_bytes(data[-_CHECKSUM_BYTES:], "little")
        found = google_crc32c.value(content)
        if found != stored:
            raise ValueError(f"its crc32c is {found:08x}, expected {stored:08x}")
        values = np.frombuffer(blosc.decompress(content), self.dtype)
        rows = values.reshape(self.chunk_rows, *self.shape[1:])
        left = self.shape[0] - number * self.chunk_rows
        if left >= self.chunk_rows:
            return rows
        # The last chunk is filled up to the size of the others: keep only what is an array's.
        last = rows[:left].copy()
        last.flags.writeable = False
        return last
