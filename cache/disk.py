"""Durable writes and file locks.

Files and folders appear whole or not at all, even after a power cut.
The name of anything unfinished begins with ``.tmp-``, so that the next capture can remove it.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import IO, Any

from cache.errors import PotstillError, StorageError

#: Prefix of the names of unfinished files and folders.
TEMPORARY_PREFIX = ".tmp-"
#: Prefix of the name of a folder that another folder is about to replace.
ASIDE_PREFIX = f"{TEMPORARY_PREFIX}old-"
#: Bytes that a probe of a disk writes, about those of a file of a shard, and how often.
PROBE_BYTES = 1 << 18
_PROBES = 3
#: Time between two attempts to take a lock.
_POLL_SECONDS = 0.2
#: Time between two attempts to remove a folder.
_REMOVE_SECONDS = 0.02
_REMOVE_ATTEMPTS = 20
_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
#: A file cannot be linked: another disk, a file system without links, or too many of this file.
_NO_LINK = {errno.EXDEV, errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK}
#: A program has a file open, or it is a mount point: it can be neither removed nor replaced.
_BUSY = {errno.EBUSY, errno.ENOTEMPTY, errno.ETXTBSY}
#: The file system has no locks, or the server of its locks does not run.
_NO_LOCKS = {errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP}
LOCKS_REMEDY = (
    "Mount the file system with locks that work between processes and hosts: NFS 4, or NFS 3 "
    "without nolock; Lustre with flock; no FUSE file system without locks. Or choose another "
    "folder."
)
#: What another process does to find out whether a lock stops it: it ends with 0 if it does not.
_TRY = (
    "import fcntl, sys\n"
    "with open(sys.argv[1], 'r+b') as file:\n"
    "    try: fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)\n"
    "    except OSError: sys.exit(1)"
)
_FORBIDDEN = {errno.EACCES, errno.EPERM, errno.EROFS}


@contextmanager
def storage_errors(path: Path) -> Iterator[None]:
    """Raise ``StorageError`` for a full, read-only or busy disk; let other errors pass unchanged.

    ``path`` is the file or folder that the remedy names.
    """
    try:
        yield
    except OSError as error:
        where = f"{error.filename or path}: {error.strerror}."
        if error.errno in _FULL:
            what = "Free space" if has_room_for_files(path) else "Delete files (no inode is free)"
            remedy = f"{what} on the disk of {path}, or raise its quota, then run again."
        elif error.errno in _FORBIDDEN:
            user = f"the user {os.geteuid()}"
            remedy = f"Make {path} readable and writable for {user}, or choose another folder."
        elif error.errno in _BUSY:
            user = f"the program that uses {error.filename or path}"
            remedy = f"End {user} (`lsof` and `findmnt` name it), then run again."
        else:
            raise
        raise StorageError(where, remedy) from error


@contextmanager
def naming_removed_folders(*folders: Path) -> Iterator[None]:
    """Raise ``StorageError`` for an unexpected error of this block whose folder somebody removed.

    That is one of ``folders``, or the file that is not found, or its folder.
    """
    try:
        yield
    except PotstillError:
        raise
    except Exception as error:
        named = getattr(error, "filename", None)
        near = [Path(named).parent, Path(named)] if isinstance(named, str) and named else []
        gone = next((each for each in (*folders, *near) if not each.exists()), None)
        if gone is None:
            raise
        raise StorageError(
            f"{gone} was removed while it was in use.",
            "Run the job again: what is missing is computed anew. To stop a job, cancel it.",
        ) from error


def is_full(error: StorageError) -> bool:
    """Return whether the error says that a disk is full, or the quota of a user on it."""
    return isinstance(error.__cause__, OSError) and error.__cause__.errno in _FULL


def find_existing(path: Path) -> Path:
    """Return ``path``, or the nearest folder above it that exists."""
    return next(each for each in (path, *path.resolve().parents) if each.exists())


def has_room_for_files(path: Path) -> bool:
    """Return whether the disk of ``path`` takes another file; most disks limit their number."""
    found = os.statvfs(find_existing(path))
    return found.f_files == 0 or found.f_favail > 0


def make_folder(folder: Path) -> None:
    """Create ``folder`` and its parents, durably; do nothing if it exists."""
    if not folder.is_dir():
        make_folder(folder.parent)
        folder.mkdir(exist_ok=True)
        sync_path(folder.parent)


def write_file(path: Path, data: bytes, mode: int = 0o666) -> None:
    """Write ``data`` to ``path``, whole or not at all and durably; replace what was there.

    ``mode`` says who may read and write the file, less what the process's umask forbids.
    """
    temporary = path.with_name(TEMPORARY_PREFIX + path.name)
    try:
        with open(temporary, "wb", opener=partial(os.open, mode=mode)) as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    sync_path(path.parent)


def measure_disk(folder: Path) -> float:
    """Return the bytes a second that the disk of ``folder`` takes and gives, the lesser of both.

    A small file is written durably and read back some times; the fastest time counts. What the
    system keeps in memory is dropped before it is read, if the disk's file system allows that.
    """
    path = folder / f"{TEMPORARY_PREFIX}probe"
    data = os.urandom(PROBE_BYTES)
    taken: list[float] = []
    given: list[float] = []
    try:
        with storage_errors(folder):
            for _ in range(_PROBES):
                taken.append(measure_seconds(lambda: write_file(path, data)))
                with path.open("rb", buffering=0) as file:
                    if hasattr(os, "posix_fadvise"):
                        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
                    given.append(measure_seconds(file.read))
    finally:
        path.unlink(missing_ok=True)
    return PROBE_BYTES / max(min(taken), min(given))


def measure_seconds(work: Callable[[], object]) -> float:
    """Return the seconds that ``work`` takes, at least a nanosecond."""
    began = time.perf_counter()
    work()
    return max(time.perf_counter() - began, 1e-9)


def publish_folder(temporary: Path, folder: Path) -> None:
    """Rename a finished folder to its place, durably.

    A folder that was there before is renamed first. After a crash between the two renames,
    ``recover_folder`` brings it back.
    """
    # Content must be on the disk before the name is, else a power cut leaves an empty folder.
    for parent, _, names in os.walk(temporary, topdown=False):
        for name in names:
            sync_path(Path(parent, name))
        sync_path(Path(parent))
    recover_folder(folder)
    if os.path.lexists(folder):
        folder.rename(folder.with_name(ASIDE_PREFIX + folder.name))
    try:
        temporary.rename(folder)
        sync_path(folder.parent)
    finally:
        recover_folder(folder)


def link_folder(source: Path, folder: Path, names: Iterable[str] | None = None) -> None:
    """Make ``folder`` with files of ``source``, which share their bytes on the disk with it.

    All files are taken, or those of ``names``.
    A file is copied if the disk has no hard links, or no more of this one. No file may be
    changed in place after that: it would change in both folders.
    """
    make_folder(folder)
    for name in list_file_sizes(source) if names is None else names:
        target = folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        try:
            os.link(source / name, target)
        except OSError as error:
            if error.errno not in _NO_LINK:
                raise
            shutil.copyfile(source / name, target)


def recover_folder(folder: Path) -> None:
    """Finish or undo a replacement of ``folder`` that a crash interrupted.

    The old folder, which was set aside, is removed if the new one is in place; else it is put back.
    """
    aside = folder.with_name(ASIDE_PREFIX + folder.name)
    if os.path.lexists(folder):
        remove_path(aside)
    elif os.path.lexists(aside):
        aside.rename(folder)
        sync_path(folder.parent)


def remove_path(path: Path) -> None:
    """Delete the file or folder at ``path``, durably; do nothing if there is none.

    Of an unfinished one (``TEMPORARY_PREFIX``) a busy file may stay: it is removed another time.
    """
    try:
        if path.is_dir() and not path.is_symlink():
            _remove_folder(path)
        elif os.path.lexists(path):
            path.unlink()
        else:
            return
    except OSError as error:
        if error.errno not in _BUSY or not path.name.startswith(TEMPORARY_PREFIX):
            raise
    sync_path(path.parent)


def _remove_folder(folder: Path) -> None:
    """Delete a folder, in several attempts if need be.

    Threads of a writer that has failed may still add files to it, or remove files from it.
    """
    for left in reversed(range(_REMOVE_ATTEMPTS)):
        try:
            shutil.rmtree(folder)
        except OSError as error:
            if left == 0 or error.errno not in (errno.ENOENT, *_BUSY):
                raise
            time.sleep(_REMOVE_SECONDS)
        if not folder.exists():
            return


def sync_path(path: Path) -> None:
    """Force the content of a file or folder to the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def set_aside(path: Path) -> Path:
    """Give ``path`` a temporary name, durably, and return it: it is no longer what it was."""
    aside = path.with_name(TEMPORARY_PREFIX + path.name)
    remove_path(aside)
    path.rename(aside)
    sync_path(aside.parent)
    return aside


def discard_path(path: Path) -> None:
    """Rename a folder, then delete it: a crash leaves a temporary name, never half a folder.

    A file, or what has a temporary name already, is deleted at once. Raises ``FileNotFoundError``
    if there is no folder.
    """
    at_once = path.name.startswith(TEMPORARY_PREFIX) or path.is_file()
    remove_path(path if at_once else set_aside(path))


def list_file_sizes(folder: Path) -> dict[str, int]:
    """Map each file below ``folder``, by relative POSIX name, to its bytes; sorted by name.

    This is for folders of few files: ``walk_files`` goes through those of any number.
    """
    return dict(sorted((name, about.st_size) for name, about in walk_files(folder)))


def walk_files(folder: Path, seen_only: bool = False) -> Iterator[tuple[str, os.stat_result]]:
    """Yield each file below ``folder``, by relative POSIX name, in no order; nothing is listed.

    There are none if there is no folder. Links to folders, and files that go meanwhile, are left
    out. Raises ``PermissionError`` for a folder that may not be read, unless only what may be seen
    is wanted: its files are not missing.
    """
    for path, entry in _walk(str(folder), "", seen_only):
        if entry.is_dir():
            continue
        try:
            about = entry.stat(follow_symlinks=False)
        except FileNotFoundError:
            continue
        yield path, about


def sum_file_sizes(folder: Path) -> int:
    """Add up the bytes of all files below ``folder``, as far as they may be seen."""
    return sum(about.st_size for _, about in walk_files(folder, seen_only=True))


def measure_path(path: Path) -> int:
    """Return the bytes of a file, or of all files of a folder, as far as they may be seen."""
    return path.stat().st_size if path.is_file() else sum_file_sizes(path)


def find_last_change(folder: Path) -> float:
    """Return the time of the last change of anything in ``folder``, in seconds since 1970."""
    found = _walk(str(folder), "", seen_only=True)
    inside = (entry.stat(follow_symlinks=False).st_mtime for _, entry in found)
    return max(folder.lstat().st_mtime, max(inside, default=0.0))


def _walk(folder: str, name: str, seen_only: bool) -> Iterator[tuple[str, os.DirEntry[str]]]:
    """Yield everything below a folder, folders before what is in them."""
    try:
        found = os.scandir(folder)
    except (FileNotFoundError, NotADirectoryError):
        return
    except PermissionError:
        if seen_only:
            return
        raise
    with found:
        for entry in found:
            inner = f"{name}{entry.name}"
            yield inner, entry
            if entry.is_dir(follow_symlinks=False):
                yield from _walk(entry.path, f"{inner}/", seen_only)


def find_leftovers(folder: Path) -> Iterator[Path]:
    """Yield the unfinished files and folders that lie directly in ``folder``, if it exists."""
    with suppress(FileNotFoundError), os.scandir(folder) as found:
        for entry in found:
            if entry.name.startswith(TEMPORARY_PREFIX):
                yield Path(entry.path)


def find_interrupted(folder: Path) -> list[Path]:
    """List what an interrupted write or removal left directly in ``folder``, sorted by name.

    A folder that was set aside is left out: it is whole, and ``recover_folder`` puts it back.
    """
    return sorted(path for path in find_leftovers(folder) if not path.name.startswith(ASIDE_PREFIX))


def hash_file(path: Path) -> str:
    """Return the sha256 of a file's bytes, in hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextmanager
def locked(
    path: Path, on_wait: Callable[[], None] | None = None, poll_seconds: float = _POLL_SECONDS
) -> Iterator[None]:
    """Hold the lock file at ``path``; while another process holds it, wait.

    ``on_wait`` is called every ``poll_seconds`` meanwhile, and may raise to give up. The operating
    system frees the lock when the process ends, in any way. The lock file stays, unless the block
    deletes it together with what it locks: a process that waited for it then locks a new file.
    """
    handle = _open_lock(path)
    try:
        while not (locked_now := try_lock(handle)) or not is_file_at(handle, path):
            if locked_now:  # the file was deleted; another process may lock its successor
                os.close(handle)
                handle = _open_lock(path)
                continue
            if on_wait is not None:
                on_wait()
            time.sleep(poll_seconds)
        yield
    finally:
        os.close(handle)


def _open_lock(path: Path) -> int:
    with storage_errors(path.parent):
        return os.open(path, os.O_RDWR | os.O_CREAT, 0o644)


def is_file_at(handle: int, path: Path) -> bool:
    """Return whether the open file is the one that has this path now."""
    try:
        return os.path.samestat(os.fstat(handle), path.stat())
    except FileNotFoundError:
        return False


def try_lock(file: int | IO[Any], shared: bool = False) -> bool:
    """Lock an open file without waiting; return whether it is locked now.

    Any number of ``shared`` locks can be held at once, but none beside an exclusive one. Closing
    the file frees the lock.
    """
    try:
        _lock(file, shared, fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def is_lock_free(lock: Path) -> bool:
    """Return whether no process holds the lock."""
    try:
        with lock.open("rb") as file:
            # Shared, so that two workers that test it at once do not see each other's lock.
            return try_lock(file, shared=True)
    except FileNotFoundError:
        return True


def wait_for_lock(file: int | IO[Any], shared: bool = False) -> None:
    """Lock an open file as ``try_lock`` does, but wait until the lock is free."""
    _lock(file, shared)


def share_lock(path: Path) -> int:
    """Return the open lock file at ``path`` with a shared lock; wait until that is free.

    A file that was deleted meanwhile is made again.
    """
    while True:
        handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        wait_for_lock(handle, shared=True)
        if is_file_at(handle, path):
            return handle
        os.close(handle)


def _lock(file: int | IO[Any], shared: bool, flags: int = 0) -> None:
    """Lock an open file; raise ``StorageError`` if its file system has no locks."""
    try:
        fcntl.flock(file, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | flags)
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
        number = file if isinstance(file, int) else file.fileno()
        raise StorageError(f"{_name_file(number)}: {error.strerror}.", LOCKS_REMEDY) from error


def _name_file(handle: int) -> str:
    """Return the path of an open file, if the system tells it."""
    try:
        return str(Path(f"/proc/self/fd/{handle}").readlink())
    except OSError:
        return "the lock file"


def require_locks(folder: Path) -> None:
    """Raise ``StorageError`` unless a lock in ``folder`` of one process stops another.

    A file system may have no locks, or some that do nothing: then two runs would write one folder.
    """
    path = folder / f"{TEMPORARY_PREFIX}lock-{os.getpid()}"
    with storage_errors(folder):
        make_folder(folder)
        handle = _open_lock(path)
        try:
            try_lock(handle)
            other = subprocess.run([sys.executable, "-I", "-S", "-c", _TRY, path], check=False)
        finally:
            os.close(handle)
            path.unlink(missing_ok=True)
    if other.returncode == 0:
        raise StorageError(
            f"Locks in {folder} do nothing: two processes held one at the same time.", LOCKS_REMEDY
        )
