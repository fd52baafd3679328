"""The sha256 of files, each read once and remembered until its size or time changes."""

from __future__ import annotations

import hashlib
import os
import threading
from collections import OrderedDict
from pathlib import Path

#: Digests that are remembered; the oldest is dropped first.
MAX_DIGESTS = 10_000

#: Device, inode, size and modification time in ns: they change if the bytes change.
_FileIdentity = tuple[int, int, int, int]


class FileDigests:
    """Computes and remembers the digests of files. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._known: OrderedDict[_FileIdentity, str] = OrderedDict()

    def compute(self, handle: int) -> str:
        """Return the sha256 of an open file, in hex; reads all of it the first time."""
        before = _identify_file(os.fstat(handle))
        if (found := self._find(before)) is not None:
            return found
        # A copy of the handle, because closing the file must not close the caller's. Both share one
        # offset, which the caller's os.pread does not use.
        with os.fdopen(os.dup(handle), "rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        if _identify_file(os.fstat(handle)) == before:
            # Not of a file that changed while it was read
            with self._lock:
                self._known[before] = digest
                while len(self._known) > MAX_DIGESTS:
                    self._known.popitem(last=False)
        return digest

    def look_up(self, path: Path) -> str | None:
        """Return the digest of ``path`` if it is remembered; reads nothing."""
        return self._find(_identify_file(path.stat()))

    def _find(self, key: _FileIdentity) -> str | None:
        with self._lock:
            return self._known.get(key)


def _identify_file(state: os.stat_result) -> _FileIdentity:
    return state.st_dev, state.st_ino, state.st_size, state.st_mtime_ns
