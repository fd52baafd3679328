"""List the caches of a data folder or a bucket, with a summary of each."""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from cache.disk import sum_file_sizes, walk_files
from cache.errors import CacheError
from cache.manifest import Manifest
from cache.remote.mirror import open_mirror
from cache.remote.upkeep import list_stored
from cache.shards.names import FINGERPRINT, MANIFEST
from cache.store import measure_cache_bytes, read_manifest

#: The name of a shard's seal.
_NUMBERED = re.compile(r"[0-9]+\.json")


@dataclass(frozen=True)
class CacheSummary:
    """One line of a listing; ``problem`` is the reason why a cache cannot be used, or empty.

    ``tokens`` counts positions with a record. Numbers that only a manifest contains are None
    without one.
    """

    fingerprint: str
    path: str
    complete: bool
    problem: str
    bytes: int
    shards: int
    tokens: int | None = None
    bytes_per_token: float | None = None
    sequences: int | None = None
    sequence_length: int | None = None
    teacher: str | None = None
    profile: str | None = None
    threshold: float | None = None
    created: str | None = None


def list_caches(root: Path) -> list[CacheSummary]:
    """List every cache below ``root``, newest first, and unfinished or damaged ones after them."""
    summaries = [summarise_cache(folder) for folder in list_folders(root)]
    return sorted(summaries, key=lambda summary: summary.created or "", reverse=True)


def list_folders(root: Path) -> list[Path]:
    """List the folders of all caches below ``root``, or in the bucket that it mirrors."""
    found = (path for path in root.glob("*") if FINGERPRINT.fullmatch(path.name) and path.is_dir())
    return sorted({*found, *list_stored(root)})


def summarise_cache(folder: Path) -> CacheSummary:
    """Summarise the cache in ``folder``, from its manifest only if it has one."""
    try:
        return _summarise_complete(folder, read_manifest(folder))
    except (CacheError, OSError) as error:
        problem = error.detail if isinstance(error, CacheError) else str(error)
    if (mirror := open_mirror(folder)) is not None:
        return CacheSummary(folder.name, str(folder), False, problem, *mirror.measure())
    sealed = sum(1 for name, _ in walk_files(folder / "seals") if _NUMBERED.fullmatch(name))
    return CacheSummary(folder.name, str(folder), False, problem, sum_file_sizes(folder), sealed)


def _summarise_complete(folder: Path, manifest: Manifest) -> CacheSummary:
    size = measure_cache_bytes(folder, manifest)
    totals = manifest.totals
    mirror = open_mirror(folder)
    modified = mirror.modified if mirror else (folder / MANIFEST).stat().st_mtime
    return CacheSummary(
        fingerprint=folder.name,
        path=str(folder),
        complete=True,
        problem="",
        bytes=size,
        shards=totals.shards,
        tokens=totals.positions,
        bytes_per_token=round(size / max(totals.positions, 1), 3),
        sequences=manifest.identity.data.sequences,
        sequence_length=manifest.identity.data.sequence_length,
        teacher=manifest.teacher.name,
        profile=manifest.identity.codec.profile,
        threshold=manifest.identity.codec.threshold,
        created=datetime.fromtimestamp(modified, UTC).isoformat(timespec="seconds"),
    )
