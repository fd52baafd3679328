"""What is done with caches once they are there: find, merge, remove."""

from __future__ import annotations

import hashlib
import json
import re
import time
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from cache.disk import TEMPORARY, files_below, locked, remove, storage_errors, sync
from cache.errors import CacheCorrupt, CacheError, CacheIncomplete, CacheMismatch, CacheNotFound
from cache.inspection import stored_shards
from cache.manifest import FORMAT_VERSION, CacheIdentity, canonical_json, codec_version, differences
from cache.records import Records, Sequences
from cache.store import HEAD, MANIFEST, Cache, capture, open_cache, verify

_FINGERPRINT = re.compile(r"[0-9a-f]{32}")
_BEGINNING = re.compile(r"[0-9a-f]{1,32}")

# ---------------------------------------------------------------------- find


def find_cache(root: Path, name: str) -> Path:
    """The folder of the one cache below ``root`` whose fingerprint begins with ``name``; else ``CacheNotFound``."""
    found = [folder for folder in _folders(root) if name and folder.name.startswith(name)]
    if len(found) != 1:
        names = f" ({', '.join(folder.name[:12] for folder in found[:5])})" if found else ""
        raise CacheNotFound(f"{name!r} names {len(found)} caches under {root}{names}.", "See `kd cache ls`.")
    return found[0]


def find_cache_or_path(root: Path, name: str) -> Path:
    """The same where ``name`` can begin a fingerprint, else the folder at that path, wherever it lies."""
    return find_cache(root, name) if _BEGINNING.fullmatch(name) else Path(name)


def _folders(root: Path) -> list[Path]:
    """The caches below ``root``, in whatever state."""
    return sorted(path for path in root.glob("*") if _FINGERPRINT.fullmatch(path.name) and path.is_dir())


# ---------------------------------------------------------------------- merge


@dataclass(frozen=True)
class _Piece:
    """Sequences ``numbers`` of one shard of one part; in the merged cache they are numbered from ``start``."""

    start: int
    part: Cache
    numbers: range


def merge(root: Path, folders: Sequence[Path], written: Callable[[int, int], None] | None = None) -> Cache:
    """Write the sequences of several caches into one below ``root``: all training ones first, then all validation ones.

    Records are copied, and stay as valid as they were: no reader asks what they were drawn with. One shard is in memory
    at a time, and one of each part; ``written(done, of)`` is called after each. A merge that was interrupted goes on,
    one that was done is found.

    Raises ``CacheMismatch`` naming each field that keeps the parts from being merged.
    """
    parts = [open_cache(folder, memory_bytes=0) for folder in folders]
    identity = merged_identity(parts)
    folder = root / identity.fingerprint
    with capture(root, identity) as writer:
        if _is_sealed(folder, identity):
            return open_cache(folder, identity)
        if identity.codec.profile == "hidden":
            writer.write_head(parts[0].teacher_head())
        pieces = _pieces(parts)
        for index in writer.missing_shards():
            writer.write_shard(index, *_gather(pieces, identity.shard_range(index)))
            if written is not None:
                written(index + 1, identity.shard_count)
        writer.finish(parts[0].manifest.provenance)
    return open_cache(folder, identity)


def merged_identity(parts: Sequence[Cache]) -> CacheIdentity:
    """What the merged cache depends on: the first part's teacher, tokenizer and codec, and the data of all.

    ``data.sha256`` is that of the canonical JSON list of the parts' fingerprints, in order: each stands for all that
    its part depends on, its seed included. ``codec.seed`` is the parts', or 0 where they differ.
    """
    if len(parts) < 2 or len({part.identity.fingerprint for part in parts}) < len(parts):
        names = ", ".join(part.identity.fingerprint[:12] for part in parts)
        raise CacheMismatch(f"A merge needs at least two different caches, but got {names}.", "Name each cache once.")
    first = parts[0].identity
    for part in parts[1:]:
        if found := _obstacles(parts[0], part):
            detail = f"{part.folder} cannot be merged with {parts[0].folder}: {'; '.join(found)}."
            raise CacheMismatch(detail, "Merge caches of one teacher, tokenizer, codec and sequence length.")
    seeds = {part.identity.codec.seed for part in parts}
    fingerprints = [part.identity.fingerprint for part in parts]
    data = replace(
        first.data,
        sha256=hashlib.sha256(canonical_json(fingerprints)).hexdigest(),
        train_sequences=sum(len(part.train) for part in parts),
        validation_sequences=sum(len(part.validation) for part in parts),
    )
    return replace(first, data=data, codec=replace(first.codec, seed=seeds.pop() if len(seeds) == 1 else 0))


def _obstacles(first: Cache, part: Cache) -> list[str]:
    """One line for each field that must be the same and is not."""
    ours, theirs = first.identity, part.identity
    data = replace(ours.data, sequence_length=theirs.data.sequence_length, packing=theirs.data.packing)
    codec = replace(theirs.codec, seed=ours.codec.seed, shard_sequences=ours.codec.shard_sequences)
    lines = differences(ours, replace(theirs, data=data, codec=codec))
    if not lines and ours.codec.profile in ("tempered", "hidden"):
        name = "partition" if ours.codec.profile == "tempered" else "hidden"
        wanted, got = (_row_shape(one, name) for one in (first, part))
        lines += [f"{name}: expected rows of shape {wanted}, got {got}"] if wanted != got else []
    if not lines and first.manifest.head.digest != part.manifest.head.digest:
        lines.append(f"{HEAD}: expected seal {first.manifest.head.digest}, got {part.manifest.head.digest}")
    return lines


def _row_shape(opened: Cache, name: str) -> tuple[int, ...]:
    shape: tuple[int, ...] = next(stored_shards(opened)).shape(name)
    return shape[1:]


def _is_sealed(folder: Path, identity: CacheIdentity) -> bool:
    try:
        open_cache(folder, identity)
    except CacheError:
        return False
    return not verify(folder)


def _gather(pieces: list[_Piece], wanted: range) -> tuple[Sequences, Records]:
    """The sequences numbered ``wanted`` of the merged cache, and their records."""
    starts = [piece.start for piece in pieces]
    first, last = bisect_right(starts, wanted.start) - 1, bisect_left(starts, wanted.stop)
    found = [
        _read(piece.part, piece.numbers[max(wanted.start - piece.start, 0) : wanted.stop - piece.start])
        for piece in pieces[first:last]
    ]
    sequences, records = zip(*found, strict=True)
    return Sequences.concatenate(sequences), Records.concatenate(records)


def _pieces(parts: Sequence[Cache]) -> list[_Piece]:
    """All sequences in the order of the merged cache, cut where a part's shards are: each shard is decoded once."""
    found, start = [], 0
    for part, split in [(part, part.train) for part in parts] + [(part, part.validation) for part in parts]:
        for shard in map(part.identity.shard_range, range(part.identity.shard_count)):
            if numbers := range(max(shard.start, split.start), min(shard.stop, split.stop)):
                found.append(_Piece(start, part, numbers))
                start += len(numbers)
    return found


def _read(part: Cache, numbers: range) -> tuple[Sequences, Records]:
    """Sequences with their records as they are written: every draw of the tails, one a column."""
    sequences, records = part.read(numbers)
    draws = [records, *(part.read(numbers, draw)[1] for draw in range(1, part.codec.draws))]
    tails = {
        name: np.stack([draw[name] for draw in draws], axis=1)
        for name in ("tail_ids", "tail_logprobs")
        if name in records.columns
    }
    return sequences, Records(records.columns | tails)


# ---------------------------------------------------------------------- gc and rm


@dataclass(frozen=True)
class Garbage:
    """Something that nobody can use: the folder of the cache it belongs to, where it lies, why, and its bytes."""

    folder: Path
    path: Path
    why: str
    bytes: int

    def to_json(self) -> dict[str, Any]:
        """The same as plain JSON values."""
        return {"fingerprint": self.folder.name, "path": str(self.path), "why": self.why, "bytes": self.bytes}


def find_garbage(root: Path, older_than: float) -> list[Garbage]:
    """What can be removed below ``root``; a cache that is being captured has none.

    That is what interrupted writers and removals left behind, caches that are incomplete or damaged and to which
    nothing was written for ``older_than`` seconds, and caches of versions older than this program reads. Those of
    newer versions are somebody else's, and when a cache was last read nobody knows.
    """
    half_removed = [root / path.name.removeprefix(TEMPORARY) for path in root.glob(f"{TEMPORARY}*")]
    folders = sorted({*_folders(root), *(folder for folder in half_removed if _FINGERPRINT.fullmatch(folder.name))})
    return [garbage for folder in folders if not _is_busy(folder) for garbage in _listed(folder, older_than)]


def _listed(folder: Path, older_than: float) -> list[Garbage]:
    """Garbage of a cache that nobody held a moment ago; none where files go while one looks: somebody writes to it."""
    try:
        return list(_garbage_of(folder, older_than))
    except FileNotFoundError:
        return []


def collect(garbage: Iterable[Garbage], older_than: float) -> list[Garbage]:
    """Remove what ``find_garbage`` found and what is garbage still; returns what was removed."""
    removed = []
    for one in garbage:
        with suppress(CacheError), alone(one.folder), storage_errors(one.folder):
            if one.path in {still.path for still in _garbage_of(one.folder, older_than)}:
                _discard(one.path)
                removed.append(one)
    return removed


def remove_cache(folder: Path) -> None:
    """Remove a cache, whole or not at all; raises ``CacheError`` while it is being captured.

    Its lock file stays: see ``cache.disk.locked``.
    """
    with alone(folder), storage_errors(folder):
        _discard(folder)


@contextmanager
def alone(folder: Path) -> Iterator[None]:
    """Keep captures out of the cache in ``folder``; raises ``CacheError`` while there is one."""

    def refuse() -> None:
        raise CacheError(f"{folder} is being captured.", "Wait until that has ended, or cancel its job.")

    with locked(folder.with_name(f"{folder.name}.lock"), refuse):
        yield


def _is_busy(folder: Path) -> bool:
    if not folder.with_name(f"{folder.name}.lock").exists():
        return False
    try:
        with alone(folder):
            return False
    except CacheError:
        return True


def _discard(path: Path) -> None:
    """Rename first: a crash then leaves something that has a temporary name, and nothing that is half a cache."""
    if not path.name.startswith(TEMPORARY):
        aside = path.with_name(TEMPORARY + path.name)
        remove(aside)
        path = path.rename(aside)
        sync(path.parent)
    remove(path)


def _garbage_of(folder: Path, older_than: float) -> Iterator[Garbage]:
    aside = folder.with_name(TEMPORARY + folder.name)
    if aside.exists():
        yield _garbage(folder, aside, "a removal was interrupted")
    if not folder.is_dir():
        return
    if why := _why_unusable(folder, older_than):
        yield _garbage(folder, folder, why)
        return
    for place in (folder, folder / "shards", folder / "seals"):
        for leftover in sorted(place.glob(f"{TEMPORARY}*")):
            yield _garbage(folder, leftover, "a writer was interrupted")


def _garbage(folder: Path, path: Path, why: str) -> Garbage:
    size = sum(files_below(path).values()) if path.is_dir() else path.stat().st_size
    return Garbage(folder, path, why, size)


def _why_unusable(folder: Path, older_than: float) -> str | None:
    """Why the whole cache can go; None if it is of use, or of use to somebody."""
    try:
        open_cache(folder)
    except CacheMismatch as error:
        return error.detail if _is_older(folder) else None
    except (CacheIncomplete, CacheCorrupt) as error:
        idle = time.time() - _last_written(folder)
        return f"{error.detail} Nothing was written to it for {idle / 86400:.1f} days." if idle >= older_than else None
    return None


def _is_older(folder: Path) -> bool:
    """Whether a cache that this program does not read was written by an older one, not by a newer one."""
    document = json.loads((folder / MANIFEST).read_bytes())
    if document["version"] != FORMAT_VERSION:
        return bool(document["version"] < FORMAT_VERSION)
    codec = document["identity"]["codec"]
    return bool(codec["version"] < codec_version(codec["profile"], codec["bits"]))


def _last_written(folder: Path) -> float:
    """When anything in ``folder`` was last written, in seconds since 1970."""
    return max(path.lstat().st_mtime for path in (folder, *folder.rglob("*")))
