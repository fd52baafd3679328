"""Verify a cache: every file is there, and every byte is as it was sealed."""

from __future__ import annotations

import re
from collections.abc import Callable
from itertools import chain
from pathlib import Path

from cache.disk import storage_errors, walk_files
from cache.errors import CacheCorrupt, CacheIncomplete, CacheMismatch
from cache.manifest import Manifest
from cache.reading.sealed import check_group, list_pieces, list_sealed_folders, read_seal
from cache.remote.mirror import Mirror, open_mirror
from cache.shards.entries import ShardEntries
from cache.shards.names import GROUP_FILE, MANIFEST, locate_seal, name_shard
from cache.shards.pieces import EntryPieces, name_piece, open_entries
from cache.store import Cache, read_manifest

#: The number in the name of a file of the cache.
_NUMBER = re.compile(r"[0-9]+")


def verify_cache(folder: Path, waiting: Callable[[], None] | None = None) -> list[str]:
    """Read every byte of a cache; return one line for each file that is missing, extra or damaged.

    A sound cache gives no line. ``waiting`` is called before each shard, and may raise to give up.
    Raises ``CacheNotFound`` where there is no folder.
    """
    try:
        manifest = read_manifest(folder)
    except (CacheIncomplete, CacheMismatch, CacheCorrupt) as error:
        return [f"{MANIFEST}: {error.detail}"]
    if (mirror := open_mirror(folder)) is not None:
        return _verify_mirrored(mirror, manifest, waiting)
    with storage_errors(folder):
        lines = check_group(folder)
        entries = open_entries(folder, manifest)
        if isinstance(entries, EntryPieces):
            lines += entries.find_problems()
        for index in range(len(entries)):
            if waiting is not None:
                waiting()
            lines += _check_shard(folder, entries, index)
        for name, digest in list_sealed_folders(manifest):
            lines += _check_folder(folder, name, digest)
        return lines + _find_unknown_files(folder, manifest)


def _verify_mirrored(
    mirror: Mirror, manifest: Manifest, waiting: Callable[[], None] | None
) -> list[str]:
    """Read every byte in the bucket, as ``verify_cache`` does in a folder."""
    if manifest.pieces is not None:
        mirror.fetch_pieces(list_pieces(manifest.pieces))
    lines: list[str] = []
    entries = open_entries(mirror.folder, manifest)
    shards = ((name_shard(index), entry.digest) for index, entry in enumerate(entries))
    for name, digest in chain(shards, list_sealed_folders(manifest)):
        if waiting is not None:
            waiting()
        try:
            mirror.open_folder(name, digest)
            seal = read_seal(mirror.folder, name, digest)
        except (CacheCorrupt, CacheIncomplete) as error:
            lines.append(error.detail)
            continue
        lines += [f"{name}/{line}" for line in mirror.find_problems(name, seal)]
    return lines


def find_missing(opened: Cache, waiting: Callable[[], None] | None = None) -> list[str]:
    """Return a line for each file that is missing, or damaged, as ``verify_cache`` does.

    Of a cache in a bucket no byte is read: its files are compared with their sha256 when they are
    read, and now their sizes alone.
    """
    if (mirror := opened.mirror) is None:
        return verify_cache(opened.folder, waiting)
    lines = []
    for index, entry in enumerate(opened.entries):
        if waiting is not None:
            waiting()
        name = name_shard(index)
        if not mirror.is_whole(name, opened.open_seal(name, entry.digest)):
            lines.append(f"{name}: a file is missing")
    return lines


def _check_shard(folder: Path, entries: ShardEntries, index: int) -> list[str]:
    try:
        digest = entries[index].digest
    except CacheCorrupt:
        return []  # its piece of the manifest has a line already
    return _check_folder(folder, name_shard(index), digest)


def _check_folder(folder: Path, name: str, digest: str) -> list[str]:
    try:
        seal = read_seal(folder, name, digest)
    except (CacheCorrupt, CacheIncomplete) as error:
        return [error.detail]
    return [f"{name}/{line}" for line in seal.find_problems(folder / name)]


def _find_unknown_files(folder: Path, manifest: Manifest) -> list[str]:
    """Return a line for each file outside the sealed folders that no cache has."""
    names = [name for name, _ in list_sealed_folders(manifest)]
    known = {MANIFEST, GROUP_FILE} | {locate_seal(name) for name in names}
    inside = tuple(f"{name}/" for name in names)
    shards = manifest.totals.shards
    pieces = len(manifest.pieces.sha256) if manifest.pieces else 0
    found = (
        name
        for name, _ in walk_files(folder)
        if name not in known
        and not name.startswith(inside)
        and not _is_numbered(name, shards, pieces)
    )
    return [f"{name}: not part of the cache" for name in sorted(found)]


def _is_numbered(name: str, shards: int, pieces: int) -> bool:
    """Whether a file belongs to a shard or is a piece, by arithmetic: there may be a million."""
    found = _NUMBER.search(name)
    number = int(found[0]) if found else -1
    if 0 <= number < pieces and name == name_piece(number):
        return True
    shard = name_shard(number)
    return 0 <= number < shards and (name.startswith(f"{shard}/") or name == locate_seal(shard))
