"""What a power cut must not undo: files and folders that appear whole or not at all, and one writer at a time.

Anything unfinished has a name that begins with ``.tmp-``, so that the next capture can sweep it away.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from cache.errors import StorageError

TEMPORARY = ".tmp-"
#: Begins the name of a folder that another one is about to replace.
ASIDE = f"{TEMPORARY}old-"
_POLL_SECONDS = 0.2
_ATTEMPTS = 20
_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_FORBIDDEN = {errno.EACCES, errno.EPERM, errno.EROFS}


@contextmanager
def storage_errors(path: Path) -> Iterator[None]:
    """Turn "disk full" and "not writable" under ``path`` into ``StorageError``; other errors pass unchanged."""
    try:
        yield
    except OSError as error:
        where = f"{error.filename or path}: {error.strerror}."
        if error.errno in _FULL:
            raise StorageError(
                where, f"Free space on the disk of {path}, or raise its quota, then run again."
            ) from error
        if error.errno in _FORBIDDEN:
            raise StorageError(where, f"Make {path} writable for this user, or choose another folder.") from error
        raise


def make_folder(folder: Path) -> None:
    """Create ``folder`` and its parents, durably; nothing happens where it exists."""
    if not folder.is_dir():
        make_folder(folder.parent)
        folder.mkdir(exist_ok=True)
        sync(folder.parent)


def write_file(path: Path, data: bytes) -> None:
    """Put ``data`` at ``path``, whole and durable, replacing what was there."""
    temporary = path.with_name(TEMPORARY + path.name)
    try:
        with temporary.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    sync(path.parent)


def publish_folder(temporary: Path, folder: Path) -> None:
    """Rename a finished folder to its place, durably.

    What was there before is set aside until then: whoever is killed in between leaves it for ``settle``.
    """
    for parent, _, names in os.walk(temporary, topdown=False):
        for name in names:
            sync(Path(parent, name))
        sync(Path(parent))
    settle(folder)
    if os.path.lexists(folder):
        folder.rename(folder.with_name(ASIDE + folder.name))
    try:
        temporary.rename(folder)
        sync(folder.parent)
    finally:
        settle(folder)


def settle(folder: Path) -> None:
    """End a replacement of ``folder`` that was broken off: what is aside goes, or back where nothing has its place."""
    aside = folder.with_name(ASIDE + folder.name)
    if os.path.lexists(folder):
        remove(aside)
    elif os.path.lexists(aside):
        aside.rename(folder)
        sync(folder.parent)


def remove(path: Path) -> None:
    """Delete the file or folder at ``path``, durably; nothing happens where there is none."""
    if path.is_dir() and not path.is_symlink():
        _remove_folder(path)
    elif os.path.lexists(path):
        path.unlink()
    else:
        return
    sync(path.parent)


def _remove_folder(folder: Path) -> None:
    """Delete a folder in which threads of a writer that has failed may still be adding and taking away files."""
    for left in reversed(range(_ATTEMPTS)):
        try:
            shutil.rmtree(folder)
        except OSError as error:
            if left == 0 or error.errno not in (errno.ENOENT, errno.ENOTEMPTY):
                raise
            time.sleep(_POLL_SECONDS / 10)
        if not folder.exists():
            return


def sync(path: Path) -> None:
    """Force a file's or a folder's content to the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def files_below(folder: Path) -> dict[str, int]:
    """Every file below ``folder`` and its size in bytes, by relative name with forward slashes, sorted."""
    found = {}
    for parent, _, names in os.walk(folder):
        for name in names:
            path = Path(parent, name)
            found[path.relative_to(folder).as_posix()] = path.lstat().st_size
    return dict(sorted(found.items()))


def file_sha256(path: Path) -> str:
    """The sha256 of a file's bytes, in hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextmanager
def locked(path: Path, waiting: Callable[[], None] | None = None) -> Iterator[None]:
    """Hold the lock at ``path``; while another process does, call ``waiting`` five times a second.

    ``waiting`` may raise to give up. The lock goes with the process, however it ends; its file stays, because
    deleting it would let two processes lock two files of one name.
    """
    with storage_errors(path.parent):
        handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        while not _try_lock(handle):
            if waiting is not None:
                waiting()
            time.sleep(_POLL_SECONDS)
        yield
    finally:
        os.close(handle)


def _try_lock(handle: int) -> bool:
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
