"""What lies on the disk, by kind, and what the rules of retention would remove now."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from cache.checking.listing import list_caches
from cache.disk import sum_file_sizes
from kd.text.stored.shards import list_stores
from services.settings import Settings
from services.store.jobs.store import JobStore
from services.store.retention.collection import find_items, look
from services.store.retention.items import Item
from services.store.retention.rules import AgeLimits
from services.store.training_files import TrainingFiles

#: Things of each list at most.
SHOWN = 50


@dataclass(frozen=True)
class Stored:
    """A thing on the disk, its bytes, and who needs it; None = nobody."""

    kind: str
    name: str
    bytes: int
    kept_by: str | None


Sized = TypeVar("Sized", Stored, Item)


@dataclass(frozen=True)
class Overview:
    """All things by kind, and the items of the rules, those that somebody needs among them."""

    stored: Mapping[str, list[Stored]]
    items: list[Item]


def survey(settings: Settings, store: JobStore, limits: AgeLimits) -> Overview:
    """Measure what is stored, and ask the rules. Reads the sizes of all files of the data folder.

    Raises ``RedisError``.
    """
    scene = look(settings, store, limits)
    stored = {
        kind: [
            Stored(kind, name, size, scene.in_use.find_holder(name, ended=True))
            for name, size in sizes
        ]
        for kind, sizes in _measure(settings)
    }
    return Overview(stored, find_items(scene))


def _measure(settings: Settings) -> Iterator[tuple[str, Iterable[tuple[str, int]]]]:
    """Yield each kind with the names and bytes of its things."""
    yield "caches", ((each.fingerprint, each.bytes) for each in list_caches(settings.caches))
    yield "texts", ((each.folder.name, each.size) for each in list_stores(settings.texts))
    yield "runs", _measure_folders(settings.runs)
    yield "evaluations", _measure_folders(settings.home / "evaluations")
    yield "imports", itertools.chain(*map(_measure_folders, (settings.models, settings.data)))
    yield "files", _measure_files(settings.files)


def _measure_folders(root: Path) -> Iterator[tuple[str, int]]:
    """Yield the name and the bytes of each folder in ``root``."""
    for folder in sorted(root.glob("[!.]*")):
        if folder.is_dir():
            yield folder.name, sum_file_sizes(folder)


def _measure_files(root: Path) -> Iterator[tuple[str, int]]:
    files = TrainingFiles(root)
    for team in sorted(root.iterdir()) if root.is_dir() else ():
        for file in files.list_files(team.name):
            yield file.id, sum_file_sizes(team / file.id)


def take_largest(things: Iterable[Sized]) -> list[Sized]:
    """The largest things of a list, the largest first."""
    return heapq.nlargest(SHOWN, things, key=lambda each: each.bytes)
