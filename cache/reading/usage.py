"""Who reads a cache now, and when one was last read.

The file ``{fingerprint}.used`` beside the folder of a cache says both. Its modification time is
that of the last use. A reader holds a shared lock on it, and a removal an exclusive one, so that no
cache vanishes under a reader. The folder itself, its bytes and its digests stay as they were
sealed. Where the file cannot be written (a read-only disk), nothing is recorded, and nothing could
be removed either. A folder of another name has no such file.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from cache.disk import is_file_at, share_lock, try_lock
from cache.errors import CacheError
from cache.remote.uses import held_in_bucket
from cache.shards.names import FINGERPRINT


def locate_use(folder: Path) -> Path:
    """Return the path of the file that records the uses of the cache in ``folder``."""
    return folder.with_name(f"{folder.name}.used")


def hold_for(reader: object, folder: Path) -> None:
    """Record a use of the cache in ``folder`` now, and hold the cache while ``reader`` exists.

    Forks of this process hold it too. A cache that is gone is not held.
    """
    holding = ExitStack()
    holding.enter_context(held(folder))
    holding.enter_context(held_in_bucket(folder))
    weakref.finalize(reader, holding.close)


@contextmanager
def held(folder: Path) -> Iterator[None]:
    """Hold the cache in ``folder`` in this block, and record a use; a cache that is gone is not."""
    handle = _open_held(folder)
    try:
        yield
    finally:
        if handle is not None:
            os.close(handle)


def read_last_use(folder: Path) -> float | None:
    """Return the time of the last use in seconds since 1970; None if none was recorded."""
    try:
        return locate_use(folder).stat().st_mtime
    except FileNotFoundError:
        return None


def is_read(folder: Path) -> bool:
    """Return whether a process holds the cache in ``folder`` now."""
    try:
        # Readers share their lock, so this asks for it alone; NFS asks for a file open for writing.
        with locate_use(folder).open("rb+") as file:
            return not try_lock(file)
    except (FileNotFoundError, PermissionError):
        return False


@contextmanager
def exclude_readers(folder: Path) -> Iterator[None]:
    """Let nobody begin to read the cache in ``folder``; raise ``CacheError`` while somebody does.

    The block may delete the file of uses together with the cache.
    """
    path = locate_use(folder)
    handle, made = _open_for_removal(path)
    try:
        if not try_lock(handle) or not is_file_at(handle, path):
            raise CacheError(
                f"{folder} is being read by a run.", "Wait until the run has ended, or stop it."
            )
        try:
            yield
        finally:
            if made:
                path.unlink(missing_ok=True)
    finally:
        os.close(handle)


def _open_for_removal(path: Path) -> tuple[int, bool]:
    """Open the file of uses; return its handle, and whether it was made, with no use in it."""
    try:
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o644)
    except FileExistsError:
        return os.open(path, os.O_RDWR | os.O_CREAT, 0o644), False
    os.utime(handle, (0, 0))
    return handle, True


def _open_held(folder: Path) -> int | None:
    path = locate_use(folder)
    while FINGERPRINT.fullmatch(folder.name) and folder.is_dir():
        try:
            handle = share_lock(path)  # a removal holds it for the time of a rename only
        except OSError as error:
            if error.filename is None:  # the lock failed; a file that cannot be opened has a name
                raise
            return None
        with suppress(OSError):
            os.utime(handle)
        if folder.is_dir():
            return handle
        path.unlink(missing_ok=True)
        os.close(handle)
    return None
