"""The state of each shard of a cache, for a picture of all of them.

The names on the disk, or in the bucket, tell it; no array is read. Of few shards the sizes of the
files are compared with the seals as well. What a verification has found is passed in.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from cache.disk import TEMPORARY_PREFIX, is_lock_free
from cache.errors import CacheCorrupt, CacheError, CacheIncomplete
from cache.manifest import Manifest
from cache.reading.sealed import read_seal
from cache.remote.mirror import open_mirror
from cache.shards.manifest_pieces import open_entries
from cache.shards.names import name_shard
from cache.store import locate_lock, read_manifest

#: Cells of the grid at most: with more shards a cell stands for several.
MOST_CELLS = 2048
#: Shards at most whose files are compared with their seals by size.
MEASURED_SHARDS = 512
#: Damaged shards that are named.
NAMED = 100
#: The states, from the best to the worst: a cell has that of its worst shard.
STATES = ("sealed", "missing", "in_work", "corrupt")
_SEALED, _MISSING, _IN_WORK, _CORRUPT = range(len(STATES))
_SEAL = re.compile(r"([0-9]+)\.json")
_FOLDER = re.compile(r"[0-9]+")
_HALF = re.compile(rf"{re.escape(TEMPORARY_PREFIX)}(?:[0-9]+-[0-9a-f]+-)?shards-([0-9]+)")
_IN_LINE = re.compile(r"shards/([0-9]+)")


@dataclass(frozen=True)
class ShardGrid:
    """The states of all ``shards``, in cells of ``cell_shards`` consecutive ones.

    ``cells`` holds the place in ``STATES`` of the worst shard of each cell, ``counts`` the shards
    in each state; ``corrupt`` and ``in_work`` name the first such shards. ``complete`` means that
    the cache has its manifest. Without one ``shards`` is what is known so far, ``captured`` says
    whether a process writes to it now, and ``shard_sequences``, the sequences of a shard, is None.
    ``measured``: the sizes of the files were compared.
    """

    complete: bool
    captured: bool
    shards: int
    shard_sequences: int | None
    cell_shards: int
    cells: str
    measured: bool
    counts: dict[str, int] = field(default_factory=dict)
    corrupt: tuple[int, ...] = ()
    in_work: tuple[int, ...] = ()


def find_damaged_shards(lines: Iterable[str]) -> set[int]:
    """Find the shards that the lines of ``cache.checking.verify`` name."""
    return {int(found[1]) for line in lines if (found := _IN_LINE.search(line))}


def read_grid(folder: Path, damaged: Collection[int] = (), expected: int = 0) -> ShardGrid:
    """Read the states of the shards of the cache in ``folder``, complete or not.

    ``damaged`` shards are known to be corrupt. ``expected`` is the number of shards that a capture
    under way will write, 0 if it is not known.
    """
    try:
        manifest = read_manifest(folder)
    except (CacheIncomplete, CacheCorrupt):
        manifest = None
    mirror = open_mirror(folder)
    if mirror is not None:
        sealed = mirror.find_sealed()
    else:  # both the seal and the folder
        sealed = _find_numbers(folder / "seals", _SEAL)
        sealed &= _find_numbers(folder / "shards", _FOLDER)
    captured = measured = False
    if manifest is None:
        captured = not is_lock_free(locate_lock(folder))
        # Half a shard without a writer was left by a crash: the next capture begins it again.
        begun = _find_numbers(folder, _HALF) if captured else set()
        count = max([expected, *(1 + number for number in sealed | begun)])
        states = np.full(count, _MISSING, np.uint8)
        _set(states, begun, _IN_WORK)
        _set(states, sealed, _SEALED)
    else:
        count = manifest.totals.shards
        states = np.full(count, _CORRUPT, np.uint8)
        _set(states, sealed, _SEALED)
        measured = mirror is None and count <= MEASURED_SHARDS
        _set(states, _find_wrong_sizes(folder, manifest, states) if measured else (), _CORRUPT)
    _set(states, damaged, _CORRUPT)
    return _make_grid(states, manifest, captured, measured)


def _find_numbers(folder: Path, pattern: re.Pattern[str]) -> set[int]:
    try:
        with os.scandir(folder) as entries:
            names = [entry.name for entry in entries]
    except FileNotFoundError:
        return set()
    matches = (pattern.fullmatch(name) for name in names)
    return {int(found[found.lastindex or 0]) for found in matches if found}


def _find_wrong_sizes(folder: Path, manifest: Manifest, states: NDArray[np.uint8]) -> set[int]:
    """Find the shards whose seal is not the manifest's, or whose files have other sizes."""
    entries = open_entries(folder, manifest)
    wrong = set()
    for number in np.flatnonzero(states == _SEALED).tolist():
        name = name_shard(number)
        try:
            read_seal(folder, name, entries[number].digest).require_files(folder / name)
        except (CacheError, OSError):
            wrong.add(number)
    return wrong


def _set(states: NDArray[np.uint8], numbers: Collection[int], state: int) -> None:
    states[[number for number in numbers if number < len(states)]] = state


def _make_grid(
    states: NDArray[np.uint8], manifest: Manifest | None, captured: bool, measured: bool
) -> ShardGrid:
    """Join the ``states`` of the shards to cells, each of the worst state in it, and count them."""
    count = len(states)
    width = max(-(-count // MOST_CELLS), 1)
    worst = np.maximum.reduceat(states, np.arange(0, count, width)) if count else states
    return ShardGrid(
        complete=manifest is not None,
        captured=captured,
        shards=count,
        shard_sequences=None if manifest is None else manifest.identity.codec.shard_sequences,
        cell_shards=width,
        cells="".join(map(str, worst.tolist())),
        measured=measured,
        counts=dict(zip(STATES, np.bincount(states, minlength=len(STATES)).tolist(), strict=True)),
        corrupt=tuple(np.flatnonzero(states == _CORRUPT)[:NAMED].tolist()),
        in_work=tuple(np.flatnonzero(states == _IN_WORK)[:NAMED].tolist()),
    )
