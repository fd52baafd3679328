"""Caches of a bucket as a whole: which there are, what can go, and their removal."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from cache.errors import CacheCorrupt
from cache.remote.bucket import Bucket, StoredObject, find_bucket
from cache.remote.mirror import name_data
from cache.remote.probe import PROBE_FOLDER
from cache.remote.uses import USES, ask_time, is_fresh_use, require_unused
from cache.shard import Seal
from cache.shards.names import FINGERPRINT, MANIFEST, locate_seal

#: The name, in the path of garbage, of what lies in a bucket.
STORED = "bucket"
#: The folder with the files of a seal: its name, and the digest of the seal.
_DATA = re.compile(r"(?P<name>(shards|tail_sums)/[^/]+|[^/]+)\.(?P<digest>[0-9a-f]{32})/")


@dataclass(frozen=True)
class Garbage:
    """Something that can be removed: the folder of its cache, path, reason and bytes.

    ``objects`` are those of a bucket that the folder mirrors; then the path is only a name.
    """

    folder: Path
    path: Path
    why: str
    bytes: int
    objects: tuple[str, ...] = ()


def list_stored(root: Path) -> list[Path]:
    """List the folders of the caches that are in the bucket of ``root``; none for a folder."""
    bucket = find_bucket(root)
    if bucket is None:
        return []
    # Some servers keep the name of a folder for a while after its last object is gone.
    return [
        root / name
        for name in bucket.list_folders()
        if FINGERPRINT.fullmatch(name) and next(bucket.walk(name), None)
    ]


def remove_stored(folder: Path) -> None:
    """Remove a cache from its bucket, the manifest first; raise ``CacheError`` while it is used."""
    bucket = find_bucket(folder.parent)
    if bucket is None:
        return
    require_unused(bucket, folder.name)
    bucket.delete([f"{folder.name}/{MANIFEST}"])
    bucket.delete(each.name for each in bucket.walk(folder.name))


def find_stored_garbage(root: Path, older_than: float) -> list[Garbage]:
    """Find what can be removed from the bucket of ``root``; nothing of a cache that is in use.

    It is caches without a manifest to which nothing was put for ``older_than`` seconds, files of
    shards that no seal names, and what probes left, of that age. The times are the server's.
    """
    bucket = find_bucket(root)
    if bucket is None:
        return []
    now = ask_time(bucket, PROBE_FOLDER)
    found = []
    for name in bucket.list_folders():
        if FINGERPRINT.fullmatch(name):
            found += _find_garbage_of(bucket, root / name, now, older_than)
    old = [each for each in bucket.walk(PROBE_FOLDER) if now - each.modified >= older_than]
    return found + _make_garbage(root / PROBE_FOLDER, "a probe was interrupted", old)


def remove_stored_garbage(garbage: Garbage, older_than: float) -> bool:
    """Remove what ``find_stored_garbage`` found if it is still garbage; return whether it was."""
    bucket = find_bucket(garbage.folder.parent)
    if bucket is None:
        return False
    if garbage.folder.name != PROBE_FOLDER:
        found = _find_garbage_of(bucket, garbage.folder, ask_time(bucket, PROBE_FOLDER), older_than)
        if not {name for each in found for name in each.objects}.issuperset(garbage.objects):
            return False
    bucket.delete(garbage.objects)
    return True


def _find_garbage_of(bucket: Bucket, folder: Path, now: float, older_than: float) -> list[Garbage]:
    fingerprint = folder.name
    objects = list(bucket.walk(fingerprint))
    if any(is_fresh_use(each, now) for each in objects):
        return []
    complete = any(each.name == f"{fingerprint}/{MANIFEST}" for each in objects)
    newest = max((each.modified for each in objects), default=now)
    if not complete and now - newest >= older_than:
        days = (now - newest) / 86400
        why = f"its capture has not finished, and nothing was put for {days:.1f} days"
        return _make_garbage(folder, why, objects)
    unnamed = list(_find_unnamed(bucket, fingerprint, objects, now - older_than))
    return _make_garbage(folder, "files of shards that no seal names", unnamed)


def _find_unnamed(
    bucket: Bucket, fingerprint: str, objects: list[StoredObject], before: float
) -> Iterator[StoredObject]:
    """Yield objects older than ``before`` of attempts that no seal names, and of dead users."""
    attempts: dict[tuple[str, str], list[StoredObject]] = defaultdict(list)
    for each in objects:
        path = each.name.removeprefix(f"{fingerprint}/")
        if (parts := _DATA.match(path)) is not None:
            attempts[parts["name"], parts["digest"]].append(each)
        elif path.startswith(f"{USES}/") and each.modified <= before:
            yield each
    # Most shards have one attempt, that of their seal. Only the seals of the others are read.
    count = Counter(name for name, _ in attempts)
    sealed = {each.name.removeprefix(f"{fingerprint}/") for each in objects}
    for (name, digest), files in attempts.items():
        if max(each.modified for each in files) > before:
            continue
        seal = locate_seal(name)
        if count[name] == 1 and seal in sealed:
            continue
        if seal not in sealed or not _is_named(bucket, f"{fingerprint}/{seal}", name, digest):
            yield from files


def _is_named(bucket: Bucket, seal: str, name: str, digest: str) -> bool:
    try:
        found = Seal.from_bytes(bucket.get(seal), seal)
    except (FileNotFoundError, CacheCorrupt):
        return False
    return name_data(name, found.digest) == f"{name}.{digest}"


def _make_garbage(folder: Path, why: str, objects: list[StoredObject]) -> list[Garbage]:
    if not objects:
        return []
    size = sum(each.bytes for each in objects)
    names = tuple(each.name for each in objects)
    path = folder.parent / STORED / folder.name
    return [Garbage(folder, path, f"in the bucket: {why}", size, names)]
