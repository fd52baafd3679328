"""The formats of what one version of Potstill leaves for the next: ``kd upgrade``.

    caches         KD_HOME/caches/*/manifest.json
    run folders    KD_HOME/runs/*/run.json
    token stores   KD_HOME/texts/*/inputs.json
    checkpoints    KD_HOME/runs/**/checkpoints/step-*/state.json
    job records    kd:format in the job store
    key file       KD_API_KEYS_FILE

A version reads an earlier format as it is, or rewrites it. ``FORMATS`` is the one table of both: a
change of a format adds a rewriter to its row.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from redis import Redis

from cache.disk import storage_errors
from cache.errors import PotstillError
from cache.store import read_manifest
from kd.files import read_run_format, require_known_run
from kd.text.stored.shard_files import INPUTS, list_stores, read_object, require_format
from kd.training.saved.state_file import STATE, read_format, read_state
from services.settings import Settings
from services.store import key_file
from services.store.jobs.script import OtherFormat
from services.store.jobs.store import JobStore
from services.store.run_folder import is_held

#: A folder or file, or the job store.
Place = Path | Redis


class UpgradeError(PotstillError):
    """Data cannot be rewritten now, or not by this version."""

    type = "upgrade_failed"


@dataclass(frozen=True)
class Data:
    """All that a service keeps. ``client`` is None if there is no job store yet."""

    settings: Settings
    client: Redis | None


@dataclass(frozen=True)
class Format:
    """One format: where it lies, which number a place has, and how this version takes it.

    ``check`` raises ``PotstillError`` if this version cannot read the place; its text names both
    numbers and the remedy. ``rewriters`` has, for each number that this version rewrites, the
    function that brings a place to a higher one. A rewriter is atomic: it writes beside the place
    and renames (``cache.disk``), or writes the number last. A kill then leaves the place as it was,
    or as it shall be, and the next call does the rest.
    """

    name: str
    find: Callable[[Data], Iterable[Place]]
    read: Callable[[Any], int]
    check: Callable[[Any], object]
    rewriters: Mapping[int, Callable[[Any], None]] = field(default_factory=dict)


@dataclass(frozen=True)
class FoundFormat:
    """The outcome of one place. ``number`` is None if it cannot be told."""

    format: str
    place: str
    number: int | None
    state: Literal["read", "rewrite", "refused"]
    detail: str = ""
    remedy: str = ""


def examine(data: Data, formats: Sequence[Format] | None = None) -> list[FoundFormat]:
    """Find every place of every format, and what this version does with it. Changes nothing."""
    return [
        _examine_place(each, place)
        for each in (FORMATS if formats is None else formats)
        for place in each.find(data)
    ]


def _examine_place(each: Format, place: Place) -> FoundFormat:
    name = str(place) if isinstance(place, Path) else "job store"
    number = None
    try:
        number = each.read(place)
        if number in each.rewriters:
            return FoundFormat(each.name, name, number, "rewrite")
        each.check(place)
    except PotstillError as error:
        return FoundFormat(each.name, name, number, "refused", error.detail, error.remedy)
    except (OSError, ValueError, LookupError, TypeError) as error:
        detail = f"{name} cannot be read: {type(error).__name__}: {error}."
        return FoundFormat(each.name, name, None, "refused", detail, "Restore it from a backup.")
    return FoundFormat(each.name, name, number, "read")


def rewrite(data: Data, formats: Sequence[Format] | None = None) -> list[FoundFormat]:
    """Rewrite every place that needs it; returns what they were. It may be killed and repeated.

    Raises ``UpgradeError`` while a worker or a run is alive.
    """
    alive = [] if data.client is None else JobStore(data.client).list_workers()
    busy = [worker.id for worker in alive]
    busy += [run.name for run in data.settings.runs.glob("*") if is_held(run)]
    if busy:
        remedy = "Stop the service, wait for runs of `kd run`, and try again."
        raise UpgradeError(f"Workers or runs are alive: {', '.join(busy[:5])}.", remedy)
    rewritten = []
    for each in FORMATS if formats is None else formats:
        for place in each.find(data):
            found = _examine_place(each, place)
            if found.state == "rewrite":
                with storage_errors(data.settings.home):
                    _rewrite_place(each, place)
                rewritten.append(found)
    return rewritten


def _rewrite_place(each: Format, place: Place) -> None:
    number = each.read(place)
    while number in each.rewriters:
        each.rewriters[number](place)
        before, number = number, each.read(place)
        if number <= before:
            remedy = "This is a bug in Potstill. Continue with the earlier version, and report it."
            raise UpgradeError(f"The rewriter of {each.name} {before} left it at {number}.", remedy)


# ---------------------------------------------------------------------- where formats lie


def _find_caches(data: Data) -> list[Path]:
    return [each.parent for each in sorted(data.settings.caches.glob("[!.]*/manifest.json"))]


def _read_cache(folder: Path) -> int:
    return int(json.loads((folder / "manifest.json").read_bytes())["version"])


def _find_texts(data: Data) -> list[Path]:
    return [store.folder for store in list_stores(data.settings.texts)]


def _read_text(folder: Path) -> int:
    return int(read_object(folder, folder / INPUTS)["format"])


def _require_known_text(folder: Path) -> None:
    require_format(folder, read_object(folder, folder / INPUTS))


def _find_runs(data: Data) -> list[Path]:
    return [each.parent for each in sorted(data.settings.runs.glob("[!.]*/config.json"))]


def _find_checkpoints(data: Data) -> list[Path]:
    pattern = f"checkpoints/step-*/{STATE}"
    return [each.parent for each in sorted(data.settings.runs.rglob(pattern))]


def _find_store(data: Data) -> Iterator[Redis]:
    if data.client is not None and data.client.exists("kd:format", "kd:jobs"):
        yield data.client


def _read_records(client: Redis) -> int:
    # The first records did not say their format.
    return int(str(client.get("kd:format") or 1))


def require_known_records(client: Redis) -> None:
    """Raise ``UpgradeError`` if the records are of another format than this version reads."""
    try:
        JobStore(client).require_known_format()
    except OtherFormat as error:
        _, _, text = str(error).partition(" ")
        detail, _, remedy = text.partition(": ")
        remedy = f"{remedy[:1].upper()}{remedy[1:]}; or restore a backup of this version."
        raise UpgradeError(f"{detail[:1].upper()}{detail[1:]}.", remedy) from None


def _find_key_file(data: Data) -> Iterator[Path]:
    path = data.settings.api_keys_file
    if path is not None and path.exists():
        yield path


#: Every format. What changes a format adds a rewriter here, or reads the earlier one as it is.
FORMATS = (
    Format("cache", _find_caches, _read_cache, read_manifest),
    Format("token store", _find_texts, _read_text, _require_known_text),
    Format("run folder", _find_runs, read_run_format, require_known_run),
    Format("checkpoint", _find_checkpoints, read_format, read_state),
    Format("job records", _find_store, _read_records, require_known_records),
    Format("key file", _find_key_file, key_file.read_format, key_file.read_keys),
)
