"""The bytes of a mirror: files that were fetched stay, until they are too many.

What was used the longest ago goes first, a shard at a time. A reader that needs it again fetches it
again, so nothing has to be locked.
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from threading import Lock, get_ident
from typing import NamedTuple

from cache.disk import TEMPORARY_PREFIX, remove_path, sum_file_sizes

#: The part of the bound that is left after files have gone.
_LEFT = 0.9


def write_copy(path: Path, data: bytes) -> None:
    """Write what can be fetched again, whole or not at all; others may write the same now."""
    temporary = path.with_name(f"{TEMPORARY_PREFIX}{os.getpid()}-{get_ident()}-{path.name}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_bytes(data)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


class _Kept(NamedTuple):
    used: float
    folder: Path
    bytes: int


class MirrorRoom:
    """The shards that all mirrors below ``root`` keep, of ``limit`` bytes together."""

    def __init__(self, root: Path, limit: int) -> None:
        self.root = root
        self.limit = limit
        self._lock = Lock()
        self._bytes: int | None = None

    def touch(self, folder: Path) -> None:
        """Record that a shard is used now."""
        with suppress(OSError):
            os.utime(folder)

    def keep(self, path: Path, data: bytes) -> None:
        """Write a fetched file. Where the disk does not take it, it is fetched again later."""
        try:
            write_copy(path, data)
        except OSError:
            return
        self.grow(len(data))

    def grow(self, size: int) -> None:
        """Count bytes that were added, and remove shards if there are too many."""
        with self._lock:
            if self._bytes is None:
                self._bytes = sum(each.bytes for each in self._list())
            else:
                self._bytes += size
            if self._bytes > self.limit:
                self._bytes = self._shrink()

    def _shrink(self) -> int:
        """Remove the shards that were used the longest ago; return the bytes that are left."""
        kept = sorted(self._list())
        left = sum(each.bytes for each in kept)
        # The newest stays, even where it is larger than the bound: it is in use.
        for each in kept[:-1]:
            if left <= self.limit * _LEFT:
                break
            aside = each.folder.with_name(f"{TEMPORARY_PREFIX}{os.getpid()}-{each.folder.name}")
            with suppress(OSError):
                each.folder.rename(aside)
                remove_path(aside)
                left -= each.bytes
        return left

    def _list(self) -> list[_Kept]:
        found = []
        for folder in self.root.glob("*/shards/[0-9]*"):
            with suppress(OSError):
                found.append(_Kept(folder.stat().st_mtime, folder, sum_file_sizes(folder)))
        return found
