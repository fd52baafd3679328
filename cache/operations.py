"""Operations on existing caches: find, read whole, remove."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np

from cache import disk
from cache.checking.listing import list_folders
from cache.errors import (
    CacheCorrupt,
    CacheError,
    CacheIncomplete,
    CacheMismatch,
    CacheNotFound,
    StorageError,
)
from cache.manifest import FORMAT_VERSION, OLDEST_FORMAT_VERSION, choose_codec_version
from cache.reading.usage import exclude_readers, locate_use
from cache.records import Records, Sequences
from cache.remote.address import is_mirror
from cache.remote.upkeep import Garbage, find_stored_garbage, remove_stored, remove_stored_garbage
from cache.shards.names import FINGERPRINT, MANIFEST
from cache.store import Cache, locate_lock, locate_writers, open_cache

#: The beginning of a fingerprint, or all of it.
_BEGINNING = re.compile(r"[0-9a-f]{1,32}")
#: The folder of a cache, what a removal left of one, and the files beside it.
_BESIDE_CACHE = re.compile(
    rf"(?:{re.escape(disk.TEMPORARY_PREFIX)})?({FINGERPRINT.pattern})(?:\.(?:lock|used|writers))?"
)

# ---------------------------------------------------------------------- find


def find_cache(root: Path, name: str) -> Path:
    """Find the one cache below ``root`` whose fingerprint begins with ``name``; return its folder.

    Raises ``CacheNotFound`` if there is none, or more than one.
    """
    found = [folder for folder in list_folders(root) if name and folder.name.startswith(name)]
    if len(found) != 1:
        names = f" ({', '.join(folder.name[:12] for folder in found[:5])})" if found else ""
        raise CacheNotFound(
            f"{name!r} names {len(found)} caches under {root}{names}.", "See `kd cache ls`."
        )
    return found[0]


def find_cache_or_path(root: Path, name: str) -> Path:
    """Find a cache by the beginning of its fingerprint, or take any other ``name`` as a path."""
    return find_cache(root, name) if _BEGINNING.fullmatch(name) else Path(name)


# ---------------------------------------------------------------------- read


def read_all_draws(opened: Cache, numbers: Sequence[int]) -> tuple[Sequences, Records]:
    """Read sequences and their records in the form for writing: each draw of the tails a column.

    Records with dither have one draw, and no such column.
    """
    sequences, records = opened.read(numbers)
    if opened.codec.rules.dithered:
        return sequences, records
    draws = [records, *(opened.read(numbers, draw)[1] for draw in range(1, opened.codec.draws))]
    tails = {
        name: np.stack([draw[name] for draw in draws], axis=1)
        for name in ("tail_ids", "tail_logprobs")
        if name in records.columns
    }
    return sequences, Records(records.columns | tails)


# ---------------------------------------------------------------------- gc and rm


def find_garbage(root: Path, older_than: float) -> list[Garbage]:
    """Find what can be removed below ``root``, except in caches that are being captured.

    Garbage is the leftovers of interrupted writers and removals, the caches that are incomplete or
    damaged and to which nothing was written for ``older_than`` seconds, and the caches of versions
    older than this program reads. Caches of newer versions stay, because another installation may
    use them. The time of the last reading does not count.
    """
    found: list[Garbage] = []
    names = filter(None, (_BESIDE_CACHE.fullmatch(path.name) for path in root.glob("*")))
    for folder in sorted({root / name[1] for name in names}):
        # A file that vanishes means that somebody writes to the cache: then it has no garbage.
        with suppress(FileNotFoundError):
            if not _is_busy(folder):
                found += list(_find_garbage_of(folder, older_than))
    return found + find_stored_garbage(root, older_than)


def remove_garbage(one: Garbage, older_than: float) -> bool:
    """Remove what ``find_garbage`` found if it is still garbage; return whether it was."""
    if one.objects:
        return remove_stored_garbage(one, older_than)
    with suppress(CacheError), exclude_captures(one.folder), disk.storage_errors(one.folder):
        if one.path in {still.path for still in _find_garbage_of(one.folder, older_than)}:
            disk.discard_path(one.path)
            if not one.folder.exists():
                disk.remove_path(locate_use(one.folder))
                disk.remove_path(locate_lock(one.folder))
            return True
    return False


def remove_cache(folder: Path, require_free: Callable[[], None] = lambda: None) -> None:
    """Remove a cache and the files beside it; raise ``CacheError`` while it is captured or read.

    The cache is removed whole or not at all. Before that ``require_free`` is called, when no
    capture and no reader can begin any more; it may raise to keep the cache.
    """
    with exclude_captures(folder), disk.storage_errors(folder):
        with exclude_readers(folder):
            require_free()
            remove_stored(folder)
            aside = disk.set_aside(folder) if not is_mirror(folder) or folder.is_dir() else None
            disk.remove_path(locate_use(folder))
        # A reader that waits finds no cache; it need not wait until all bytes are deleted.
        if aside is not None:
            disk.remove_path(aside)
        disk.remove_path(locate_lock(folder))


@contextmanager
def exclude_captures(folder: Path) -> Iterator[None]:
    """Hold the capture lock of the cache in ``folder``; raise ``CacheError`` if it is taken."""

    def refuse() -> None:
        raise CacheError(
            f"{folder} is being captured.", "Wait until the capture has ended, or cancel its job."
        )

    writers = locate_writers(folder)
    with disk.locked(locate_lock(folder), refuse), disk.locked(writers, refuse):
        # While it is locked, so that a writer that waits for it makes another.
        writers.unlink()
        yield


def _is_busy(folder: Path) -> bool:
    if not (locate_lock(folder).exists() or locate_writers(folder).exists()):
        return False
    try:
        with exclude_captures(folder):
            return False
    except CacheError:
        return True


def _find_garbage_of(folder: Path, older_than: float) -> Iterator[Garbage]:
    aside = folder.with_name(disk.TEMPORARY_PREFIX + folder.name)
    if aside.exists():
        yield _make_garbage(folder, aside, "a removal was interrupted")
    if not folder.is_dir():
        for path in (locate_lock(folder), locate_use(folder), locate_writers(folder)):
            if path.exists() and not aside.exists():
                what = "record of uses" if path == locate_use(folder) else "lock"
                yield _make_garbage(folder, path, f"the {what} of a cache that is gone")
        return
    if why := _explain_unusable(folder, older_than):
        yield _make_garbage(folder, folder, why)
        return
    for place in (folder, folder / "shards", folder / "seals"):
        for leftover in sorted(disk.find_leftovers(place)):
            yield _make_garbage(folder, leftover, "a writer was interrupted")


def _make_garbage(folder: Path, path: Path, why: str) -> Garbage:
    return Garbage(folder, path, why, disk.measure_path(path))


def _explain_unusable(folder: Path, older_than: float) -> str | None:
    """Explain why the whole cache can be removed; return None if somebody may need it."""
    try:
        open_cache(folder)
    except CacheMismatch as error:
        return error.detail if _is_older(folder) else None
    except CacheNotFound as error:
        return error.detail if is_mirror(folder) else None
    except StorageError:
        if is_mirror(folder):
            raise
        return None  # it may not be read, which does not make it unusable
    except (CacheIncomplete, CacheCorrupt) as error:
        idle = time.time() - disk.find_last_change(folder)
        if idle >= older_than:
            return f"{error.detail} Nothing was written to it for {idle / 86400:.1f} days."
    return None


def _is_older(folder: Path) -> bool:
    """Return whether a cache of another version is older, not newer, than this program reads."""
    document = json.loads((folder / MANIFEST).read_bytes())
    if not OLDEST_FORMAT_VERSION <= document["version"] <= FORMAT_VERSION:
        return bool(document["version"] < OLDEST_FORMAT_VERSION)
    codec = document["identity"]["codec"]
    return bool(codec["version"] < choose_codec_version(codec["profile"], codec["bits"]))
