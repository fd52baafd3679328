"""List what is on the disk, by kind, and what the rules of retention would remove now."""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator, Mapping
from dataclasses import replace

from cache.checking.listing import list_caches
from cache.disk import sum_file_sizes
from kd.client.wire import operator as wire
from services.settings import DAY_SECONDS, Settings
from services.store.jobs.store import JobStore
from services.store.retention.collector import (
    RULES,
    AgeLimits,
    Scene,
    find_items,
    look,
)

KINDS = ("caches", "texts", "runs", "evaluations", "imports", "files")
#: Things of each list at most.
SHOWN = 50


def survey(
    settings: Settings, store: JobStore, disks: Mapping[str, wire.DiskSpace | None]
) -> wire.StorageReport:
    """Measure what is stored, and ask the rules. Reads the sizes of all files of the data folder.

    Raises ``RedisError``.
    """
    limits = AgeLimits.of(settings).with_leftovers()
    scene = look(settings, store, limits)
    items = [item.view for item in find_items(scene)]
    free = [item for item in items if item.kept_by is None]
    needed = [item for item in items if item.kept_by is not None]
    stored: dict[str, list[wire.StoredItem]] = {kind: [] for kind in KINDS}
    for kind, name, size in _measure(scene):
        holder = scene.in_use.find_holder(name, ended=True)
        stored[kind].append(wire.StoredItem(kind=kind, name=name, bytes=size, kept_by=holder))
    return wire.StorageReport(
        **disks,
        kinds=[_describe_kind(kind, things) for kind, things in stored.items()],
        rules=[_describe_rule(kind, limits) for kind in limits.kinds],
        nightly_hour=settings.retain_hour if AgeLimits.of(settings).ages else None,
        removable=_take_largest(free),
        removable_items=len(free),
        removable_bytes=sum(item.bytes for item in free),
        protected=_take_largest(needed),
        protected_items=len(needed),
    )


def _measure(scene: Scene) -> Iterator[tuple[str, str, int]]:
    """Yield the kind, the name and the bytes of each thing on the disk."""
    for each in list_caches(scene.settings.caches):
        yield "caches", each.fingerprint, each.bytes
    roots = {"runs": scene.settings.runs, "evaluations": scene.settings.home / "evaluations"}
    for kind, root in roots.items():
        for folder in sorted(root.glob("[!.]*")):
            if folder.is_dir():
                yield kind, folder.name, sum_file_sizes(folder)
    of_any_age = AgeLimits(dict.fromkeys(("texts", "imports", "files"), -math.inf))
    for item in find_items(replace(scene, limits=of_any_age)):
        yield item.kind, item.name, item.bytes


def _describe_kind(kind: str, things: list[wire.StoredItem]) -> wire.StoredKind:
    size = sum(each.bytes for each in things)
    return wire.StoredKind(kind=kind, items=len(things), bytes=size, largest=_take_largest(things))


def _describe_rule(kind: str, limits: AgeLimits) -> wire.RetentionRule:
    seconds = min(age for name, age in limits.ages.items() if RULES[name].kind == kind)
    keep = (limits.keep or None) if kind == "checkpoints" else None
    return wire.RetentionRule(kind=kind, after_days=seconds / DAY_SECONDS, keep=keep)


def _take_largest(things: list[wire.StoredItem]) -> list[wire.StoredItem]:
    return heapq.nlargest(SHOWN, things, key=lambda each: each.bytes)
