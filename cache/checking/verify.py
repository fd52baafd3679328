"""Verify a cache: every file is there, and every byte is as it was sealed."""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import suppress
from functools import lru_cache
from pathlib import Path

from cache.disk import storage_errors, walk_files
from cache.errors import CacheCorrupt, CacheIncomplete, CacheMismatch
from cache.reading.sealed import check_group, list_pieces, list_sealed_folders, read_seal
from cache.remote.mirror import Mirror, open_mirror, split_path
from cache.shard import Seal
from cache.shards.manifest_pieces import EntryPieces, open_entries
from cache.shards.names import GROUP_FILE, MANIFEST, locate_seal, name_shard
from cache.store import Cache, read_manifest

#: The number in the name of a file of the cache.
_NUMBER = re.compile(r"[0-9]+")
#: The name of an object in a bucket: that of its file, with the digest of its seal or piece inside.
_OBJECT = re.compile(r"(manifest\.json|seals/.+)|(.+?)\.[0-9a-f]{32}(/.+)?")


def verify_cache(folder: Path, check_stop: Callable[[], None] | None = None) -> list[str]:
    """Read every byte of a cache; return one line for each file that is missing or damaged.

    A sound cache gives no line. Files that are not part of it count for nothing; ``find_extras``
    names them. ``check_stop`` is called before each shard, and may raise to give up.
    Raises ``CacheNotFound`` if there is no folder.
    """
    try:
        manifest = read_manifest(folder)
    except (CacheIncomplete, CacheMismatch, CacheCorrupt) as error:
        return [f"{MANIFEST}: {error.detail}"]
    mirror = open_mirror(folder)
    with storage_errors(folder):
        lines = check_group(folder) if mirror is None else []
        if mirror is not None and manifest.pieces is not None:
            mirror.fetch_pieces(list_pieces(manifest.pieces))
        entries = open_entries(folder, manifest)
        if isinstance(entries, EntryPieces):
            lines += entries.find_problems()
        for index in range(len(entries)):
            if check_stop is not None:
                check_stop()
            with suppress(CacheCorrupt):  # its piece of the manifest has a line already
                lines += _check_folder(folder, name_shard(index), entries[index].digest, mirror)
        for name, entry in list_sealed_folders(manifest).items():
            lines += _check_folder(folder, name, entry.digest, mirror)
        return lines


def _check_folder(folder: Path, name: str, digest: str, mirror: Mirror | None) -> list[str]:
    """Read every byte of a sealed folder, here or in the bucket."""
    try:
        if mirror is not None:
            mirror.open_folder(name, digest)
        seal = read_seal(folder, name, digest)
    except (CacheCorrupt, CacheIncomplete) as error:
        return [error.detail]
    found = (
        seal.find_problems(folder / name) if mirror is None else mirror.find_problems(name, seal)
    )
    return [f"{name}/{line}" for line in found]


def find_missing(opened: Cache, check_stop: Callable[[], None] | None = None) -> list[str]:
    """Return a line for each file that is missing, or damaged, as ``verify_cache`` does.

    Of a cache in a bucket no byte is read: its files are compared with their sha256 when they are
    read, and now only their sizes.
    """
    if (mirror := opened.mirror) is None:
        return verify_cache(opened.folder, check_stop)
    lines = []
    for index, entry in enumerate(opened.entries):
        if check_stop is not None:
            check_stop()
        name = name_shard(index)
        if not mirror.is_whole(name, opened.open_seal(name, entry.digest)):
            lines.append(f"{name}: a file is missing")
    return lines


def find_extras(folder: Path) -> list[str]:
    """Name the files in the folder of a verified cache, or its objects, that are not part of it.

    File managers and file servers make such files. They are ignored wherever the cache is used.
    Objects of a writer that lost are not named: ``find_stored_garbage`` finds them.
    """
    manifest = read_manifest(folder)
    others = list_sealed_folders(manifest)
    pieces = list_pieces(manifest.pieces) if manifest.pieces else ()
    known = {MANIFEST, GROUP_FILE, *map(locate_seal, others), *pieces}

    @lru_cache(maxsize=1)  # the walk goes through one folder after the other
    def list_sealed(inside: str) -> set[str]:
        path = folder / locate_seal(inside)
        return {f"{inside}/{file}" for file in Seal.from_bytes(path.read_bytes(), str(path)).files}

    def belongs(name: str) -> bool:
        # The shards are known by arithmetic: there may be a million.
        number = _NUMBER.search(name)
        shard = name_shard(int(number[0])) if number else ""
        is_shard = number is not None and int(number[0]) < manifest.totals.shards
        inside, _ = split_path(name)
        if inside in others or (is_shard and inside == shard):
            return name in list_sealed(inside)
        return name in known or (is_shard and name == locate_seal(shard))

    if (mirror := open_mirror(folder)) is None:
        return sorted(name for name, _ in walk_files(folder, seen_only=True) if not belongs(name))
    objects = ((_OBJECT.fullmatch(name), name) for name in mirror.list_names())
    return sorted(
        name for match, name in objects if not match or not belongs("".join(match.groups("")))
    )
