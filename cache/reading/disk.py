"""Files of a cache, read from its disk, and how fast the disk is."""

from __future__ import annotations

import time
from pathlib import Path
from threading import Lock


class DiskReads:
    """Reads files; counts their bytes and the seconds that this took. Threads may share it.

    Seconds of threads that read at the same time add up.
    """

    def __init__(self) -> None:
        self._lock = Lock()
        self.bytes = 0
        self.seconds = 0.0

    def read(self, path: Path) -> bytes:
        """Return the content of the file ``path``."""
        began = time.perf_counter()
        data = path.read_bytes()
        seconds = time.perf_counter() - began
        with self._lock:
            self.bytes += len(data)
            self.seconds += seconds
        return data
