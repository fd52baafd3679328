"""Files of a cache, read from its disk, and how fast the disk is."""

from __future__ import annotations

import time
from pathlib import Path
from threading import Lock

from cache.shard import SealedFile


class DiskReads:
    """Reads files; counts their bytes and the seconds that this took. Threads may share it.

    Seconds of threads that read at the same time add up.
    """

    def __init__(self) -> None:
        self._lock = Lock()
        self.bytes = 0
        self.seconds = 0.0

    def read(self, path: Path, _sealed: SealedFile | None = None) -> bytes:
        """Return the content of the file ``path``, which was sealed with this digest."""
        began = time.perf_counter()
        data = path.read_bytes()
        self.count(len(data), time.perf_counter() - began)
        return data

    def restore(self, _path: Path, _sealed: SealedFile) -> bytes | None:
        """Return None: a damaged file of a folder has no other copy."""
        return None

    def count(self, size: int, seconds: float) -> None:
        """Count bytes that were read, and the time that it took."""
        with self._lock:
            self.bytes += size
            self.seconds += seconds
