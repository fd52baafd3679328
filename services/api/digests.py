"""The sha256 of files, read once: remembered for as long as a file has the same size and time."""

from __future__ import annotations

import hashlib
import os
import threading
from collections import OrderedDict
from pathlib import Path

REMEMBERED = 10_000

_Key = tuple[int, int, int, int]


class Digests:
    """Remembers the digests of the files that were asked for last. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._known: OrderedDict[_Key, str] = OrderedDict()

    def of(self, handle: int) -> str:
        """The sha256 in hex of an open file; reads all of it the first time."""
        before = _key(os.fstat(handle))
        if (found := self._find(before)) is not None:
            return found
        with os.fdopen(os.dup(handle), "rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        if _key(os.fstat(handle)) == before:  # not of a file that changed while it was read
            self._remember(before, digest)
        return digest

    def known(self, path: Path) -> str | None:
        """The digest, where it needs no reading."""
        return self._find(_key(path.stat()))

    def _find(self, key: _Key) -> str | None:
        with self._lock:
            return self._known.get(key)

    def _remember(self, key: _Key, digest: str) -> None:
        with self._lock:
            self._known[key] = digest
            while len(self._known) > REMEMBERED:
                self._known.popitem(last=False)


def _key(state: os.stat_result) -> _Key:
    return state.st_dev, state.st_ino, state.st_size, state.st_mtime_ns
