"""Operations on existing caches: find, merge, remove."""

from __future__ import annotations

import hashlib
import json
import re
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from cache.checking.listing import list_folders
from cache.checking.verify import verify_cache
from cache.disk import (
    TEMPORARY_PREFIX,
    find_last_change,
    find_leftovers,
    locked,
    remove_path,
    set_aside,
    storage_errors,
    sum_file_sizes,
)
from cache.errors import (
    CacheCorrupt,
    CacheError,
    CacheIncomplete,
    CacheMismatch,
    CacheNotFound,
    StorageError,
)
from cache.inspection import open_stored_shards
from cache.manifest import (
    FORMAT_VERSION,
    OLDEST_FORMAT_VERSION,
    CacheIdentity,
    FidelityOverride,
    choose_codec_version,
    encode_canonical_json,
    list_differences,
)
from cache.reading.arrays import make_chunk_memory
from cache.reading.usage import exclude_readers, hold_for, locate_use
from cache.records import Records, Sequences
from cache.remote.address import is_mirror
from cache.remote.upkeep import (
    StoredGarbage,
    find_stored_garbage,
    remove_stored,
    remove_stored_garbage,
)
from cache.shards.names import FINGERPRINT, LM_HEAD, MANIFEST
from cache.store import Cache, locate_lock, locate_writers, open_cache
from cache.writing.writer import open_writer

#: The name, in the path of garbage, of what lies in a bucket.
STORED = "bucket"
#: The beginning of a fingerprint, or all of it.
_BEGINNING = re.compile(r"[0-9a-f]{1,32}")

# ---------------------------------------------------------------------- find


def find_cache(root: Path, name: str) -> Path:
    """Find the one cache below ``root`` whose fingerprint begins with ``name``; return its folder.

    Raises ``CacheNotFound`` where there is none, or more than one.
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


# ---------------------------------------------------------------------- merge


def merge_caches(
    root: Path, folders: Sequence[Path], written: Callable[[int, int], None] | None = None
) -> Cache:
    """Merge several caches into one below ``root``; open the result.

    All training sequences come first, then all validation sequences. Records are copied and stay
    valid, because no reader uses the random numbers that they were drawn with. One shard of the
    merged cache is in memory at a time, and chunks of the parts as far as one memory holds them;
    ``written(done, of)`` is called after each shard. A merge that was interrupted continues, and a
    finished one is opened.

    Raises ``CacheMismatch`` that names each field in which the parts must agree and do not.
    """
    # One part is read after the other, so that the one in use has the memory of all.
    memory = make_chunk_memory()
    parts = [open_cache(folder, shared=memory) for folder in folders]
    for part in parts:
        hold_for(part, part.folder)
    identity = merge_identities(parts)
    folder = root / identity.fingerprint
    with open_writer(root, identity) as writer:
        if _is_sealed(folder, identity):
            return open_cache(folder, identity)
        if identity.codec.profile == "hidden":
            writer.write_lm_head(parts[0].teacher_head())
        # All parts have one tokenizer, but some may be older than token maps.
        if (
            token_map := next(filter(None, (part.token_map() for part in parts)), None)
        ) is not None:
            writer.write_token_map(token_map)
        for index in writer.find_missing_shards():
            writer.write_shard(index, *_read_merged(parts, identity.shard_range(index)))
            if written is not None:
                written(index + 1, identity.shard_count)
        writer.finish(parts[0].manifest.provenance, overruled=_join_overruled(parts))
    return open_cache(folder, identity)


def _join_overruled(parts: Sequence[Cache]) -> FidelityOverride | None:
    """Join the overruled verdicts of ``parts``; None where no part has one."""
    found = [part.manifest.overruled for part in parts if part.manifest.overruled]
    if not found:
        return None
    return FidelityOverride(
        noise=max(each.noise for each in found),
        problems=tuple(line for each in found for line in each.problems),
        field=found[0].field,
    )


def merge_identities(parts: Sequence[Cache]) -> CacheIdentity:
    """Return the identity of the merged cache: of the first part, with the data of all parts.

    ``data.sha256`` is the sha256 of the canonical JSON list of the parts' fingerprints, in order: a
    fingerprint covers all that its part depends on, its seed too. ``codec.seed`` is that of the
    parts, or 0 where they differ.
    """
    if len(parts) < 2 or len({part.identity.fingerprint for part in parts}) < len(parts):
        names = ", ".join(part.identity.fingerprint[:12] for part in parts)
        raise CacheMismatch(
            f"A merge needs at least two different caches, but got {names}.",
            "Name each cache once.",
        )
    first = parts[0].identity
    for part in parts[1:]:
        if found := _find_obstacles(parts[0], part):
            detail = f"{part.folder} cannot be merged with {parts[0].folder}: {'; '.join(found)}."
            raise CacheMismatch(
                detail, "Merge caches of one teacher, tokenizer, codec and sequence length."
            )
    seeds = {part.identity.codec.seed for part in parts}
    fingerprints = [part.identity.fingerprint for part in parts]
    data = replace(
        first.data,
        sha256=hashlib.sha256(encode_canonical_json(fingerprints)).hexdigest(),
        train_sequences=sum(len(part.train) for part in parts),
        validation_sequences=sum(len(part.validation) for part in parts),
    )
    return replace(
        first, data=data, codec=replace(first.codec, seed=seeds.pop() if len(seeds) == 1 else 0)
    )


def _find_obstacles(first: Cache, part: Cache) -> list[str]:
    """Return one line for each field that must be the same and is not."""
    ours = first.identity
    theirs = part.identity
    data = replace(
        ours.data, sequence_length=theirs.data.sequence_length, packing=theirs.data.packing
    )
    codec = replace(theirs.codec, seed=ours.codec.seed, shard_sequences=ours.codec.shard_sequences)
    lines = list_differences(ours, replace(theirs, data=data, codec=codec))
    if not lines and ours.codec.profile in ("tempered", "hidden"):
        name = "partition" if ours.codec.profile == "tempered" else "hidden"
        wanted, got = (_read_row_shape(one, name) for one in (first, part))
        lines += [f"{name}: expected rows of shape {wanted}, got {got}"] if wanted != got else []
    if not lines and first.manifest.head.digest != part.manifest.head.digest:
        lines.append(
            f"{LM_HEAD}: expected seal {first.manifest.head.digest}, "
            f"got {part.manifest.head.digest}"
        )
    return lines


def _read_row_shape(opened: Cache, name: str) -> tuple[int, ...]:
    shape: tuple[int, ...] = next(open_stored_shards(opened)).shape(name)
    return shape[1:]


def _is_sealed(folder: Path, identity: CacheIdentity) -> bool:
    try:
        open_cache(folder, identity)
    except CacheError:
        return False
    return not verify_cache(folder)


def _read_merged(parts: Sequence[Cache], wanted: range) -> tuple[Sequences, Records]:
    """Read the sequences numbered ``wanted`` of the merged cache, and their records."""
    found = [read_all_draws(*run) for run in _find_runs(parts, wanted)]
    sequences, records = zip(*found, strict=True)
    return Sequences.concatenate(sequences), Records.concatenate(records)


def _find_runs(parts: Sequence[Cache], wanted: range) -> Iterator[tuple[Cache, range]]:
    """Yield where the sequences ``wanted`` of the merged cache are: a part and numbers in it.

    They are cut at the ends of the part's shards, so that each shard is decoded once for each split
    that it holds.
    """
    splits = [(part, part.train) for part in parts] + [(part, part.validation) for part in parts]
    start = 0
    for part, split in splits:
        numbers = split[max(wanted.start - start, 0) : max(wanted.stop - start, 0)]
        start += len(split)
        while numbers:
            shard = part.identity.shard_range(numbers[0] // part.identity.codec.shard_sequences)
            yield part, range(numbers.start, min(numbers.stop, shard.stop))
            numbers = range(min(numbers.stop, shard.stop), numbers.stop)


def read_all_draws(part: Cache, numbers: Sequence[int]) -> tuple[Sequences, Records]:
    """Read sequences and their records in the form for writing: each draw of the tails a column."""
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
    """Something that can be removed: the folder of its cache, path, reason and bytes.

    ``stored`` are objects of the bucket that the folder mirrors; their path is only a name.
    """

    folder: Path
    path: Path
    why: str
    bytes: int
    stored: StoredGarbage | None = None

    def to_json(self) -> dict[str, Any]:
        """Return it as plain JSON values."""
        return {
            "fingerprint": self.folder.name,
            "path": str(self.path),
            "why": self.why,
            "bytes": self.bytes,
        }


def find_garbage(root: Path, older_than: float) -> list[Garbage]:
    """Find what can be removed below ``root``, except in caches that are being captured.

    Garbage is the leftovers of interrupted writers and removals, the caches that are incomplete or
    damaged and to which nothing was written for ``older_than`` seconds, and the caches of versions
    older than this program reads. Caches of newer versions stay, because another installation may
    use them. The time of the last reading does not count.
    """
    half_removed = [
        root / path.name.removeprefix(TEMPORARY_PREFIX)
        for path in root.glob(f"{TEMPORARY_PREFIX}*")
    ]
    folders = sorted(
        {
            *(path for path in root.glob("*") if FINGERPRINT.fullmatch(path.name)),
            *(folder for folder in half_removed if FINGERPRINT.fullmatch(folder.name)),
            *(
                path.with_suffix("")
                for pattern in ("*.lock", "*.used", "*.writers")
                for path in root.glob(pattern)
                if FINGERPRINT.fullmatch(path.stem)
            ),
        }
    )
    here = [
        garbage
        for folder in folders
        if not _is_busy(folder)
        for garbage in _list_garbage(folder, older_than)
    ]
    return here + [
        Garbage(root / each.fingerprint, root / STORED / each.fingerprint, why, each.bytes, each)
        for each in find_stored_garbage(root, older_than)
        for why in [f"in the bucket: {each.why}"]
    ]


def _list_garbage(folder: Path, older_than: float) -> list[Garbage]:
    """List the garbage of a cache that was not locked a moment ago.

    A file that vanishes meanwhile means that somebody writes to the cache: then there is none.
    """
    try:
        return list(_find_garbage_of(folder, older_than))
    except FileNotFoundError:
        return []


def remove_garbage(garbage: Iterable[Garbage], older_than: float) -> list[Garbage]:
    """Remove what ``find_garbage`` found, if it is still garbage; return what was removed."""
    removed = []
    for one in garbage:
        if one.stored is not None:
            if remove_stored_garbage(one.folder.parent, one.stored, older_than):
                removed.append(one)
            continue
        with suppress(CacheError), exclude_captures(one.folder), storage_errors(one.folder):
            if one.path in {still.path for still in _find_garbage_of(one.folder, older_than)}:
                _discard(one.path)
                if not one.folder.exists():
                    remove_path(locate_use(one.folder))
                    remove_path(locate_lock(one.folder))
                removed.append(one)
    return removed


def remove_cache(folder: Path, require_free: Callable[[], None] = lambda: None) -> None:
    """Remove a cache and the files beside it; raise ``CacheError`` while it is captured or read.

    The cache is removed whole or not at all. Before that ``require_free`` is called, when no
    capture and no reader can begin any more; it may raise to keep the cache.
    """
    with exclude_captures(folder), storage_errors(folder):
        with exclude_readers(folder):
            require_free()
            remove_stored(folder)
            aside = set_aside(folder) if not is_mirror(folder) or folder.is_dir() else None
            remove_path(locate_use(folder))
        # A reader that waits finds no cache; it need not wait until all bytes are deleted.
        if aside is not None:
            remove_path(aside)
        remove_path(locate_lock(folder))


@contextmanager
def exclude_captures(folder: Path) -> Iterator[None]:
    """Hold the capture lock of the cache in ``folder``; raise ``CacheError`` if it is taken."""

    def refuse() -> None:
        raise CacheError(
            f"{folder} is being captured.", "Wait until the capture has ended, or cancel its job."
        )

    writers = locate_writers(folder)
    with locked(locate_lock(folder), refuse), locked(writers, refuse):
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


def _discard(path: Path) -> None:
    """Rename ``path``, then delete it: a crash leaves a temporary name, never half a cache."""
    remove_path(path if path.name.startswith(TEMPORARY_PREFIX) else set_aside(path))


def _find_garbage_of(folder: Path, older_than: float) -> Iterator[Garbage]:
    aside = folder.with_name(TEMPORARY_PREFIX + folder.name)
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
        for leftover in sorted(find_leftovers(place)):
            yield _make_garbage(folder, leftover, "a writer was interrupted")


def _make_garbage(folder: Path, path: Path, why: str) -> Garbage:
    size = sum_file_sizes(path) if path.is_dir() else path.stat().st_size
    return Garbage(folder, path, why, size)


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
        idle = time.time() - find_last_change(folder)
        return (
            f"{error.detail} Nothing was written to it for {idle / 86400:.1f} days."
            if idle >= older_than
            else None
        )
    return None


def _is_older(folder: Path) -> bool:
    """Return whether a cache of another version is older, not newer, than this program reads."""
    document = json.loads((folder / MANIFEST).read_bytes())
    if not OLDEST_FORMAT_VERSION <= document["version"] <= FORMAT_VERSION:
        return bool(document["version"] < OLDEST_FORMAT_VERSION)
    codec = document["identity"]["codec"]
    return bool(codec["version"] < choose_codec_version(codec["profile"], codec["bits"]))
