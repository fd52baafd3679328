"""Every error that Potstill raises on purpose, drawn as a tree.

    PotstillError                 detail: what and where; remedy: what to do about it
    ├── CacheError
    │   ├── CacheNotFound         no cache at the given path
    │   ├── CacheIncomplete       the capture has not finished: no manifest, or shards missing
    │   ├── CacheMismatch         sealed for other inputs, or written by a newer version
    │   └── CacheCorrupt          bytes differ from what was sealed
    ├── StorageError              disk full, folder not writable
    │   └── StoreError            a bucket that does not answer, or not as it must
    │       └── StoreUnfit        a bucket that ignores conditions of writes
    └── (kd.errors)               configuration, models, data, training

The base lives here because imports point one way, ``cache <- kd <- services``.
"""

from __future__ import annotations

from typing import ClassVar

#: The page that has an entry for every code of an error: cause, remedy, how to see it.
HELP_PAGE = "docs/troubleshooting.md"


def locate_help(code: str) -> str:
    """Return the place of the entry of ``code``: the ``type`` of an error or of a job's failure.

    The end of a problem document's ``type`` is such a code too, with dashes.
    """
    return f"{HELP_PAGE}#{code.replace('-', '_')}"


class PotstillError(Exception):
    """An error that a user can act on: what happened and where, and what to do about it."""

    type: ClassVar[str] = "internal"

    def __init__(self, detail: str, remedy: str = "") -> None:
        super().__init__(detail)
        self.detail = detail
        self.remedy = remedy

    def __str__(self) -> str:
        return f"{self.detail} {self.remedy}".strip()

    @property
    def help(self) -> str:
        """The place of this error's entry, as ``locate_help`` returns it."""
        return locate_help(self.type)

    def to_json(self) -> dict[str, str]:
        """Return the JSON object that a child process sends to the API."""
        return {"type": self.type, "detail": self.detail, "remedy": self.remedy}


class CacheError(PotstillError):
    """An error about a cache on disk."""

    type = "cache_error"


class CacheNotFound(CacheError):
    """There is no cache at the given path."""

    type = "cache_missing"


class CacheIncomplete(CacheError):
    """The cache has no manifest, or shards that its manifest names are absent."""

    type = "cache_incomplete"


class CacheMismatch(CacheError):
    """The cache is whole, but is not the requested one, or a newer version wrote it."""

    type = "cache_mismatch"


class CacheCorrupt(CacheError):
    """Bytes on disk differ from what was sealed."""

    type = "cache_corrupt"


class StorageError(PotstillError):
    """The disk is full or the folder is not writable."""

    type = "storage_error"


class StoreError(StorageError):
    """A bucket cannot be used: a wrong address, no access, no answer.

    ``passing``: whether the same request may well succeed a little later.
    """

    type = "store_error"

    def __init__(self, detail: str, remedy: str = "", passing: bool = False) -> None:
        super().__init__(detail, remedy)
        self.passing = passing


class StoreUnfit(StoreError):
    """The server of a bucket lacks what a cache needs, such as conditional writes."""

    type = "store_unfit"
