"""The rule of leftovers: parts of caches, runs without a record, interrupted saves and removals."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from cache.disk import (
    ASIDE_PREFIX,
    TEMPORARY_PREFIX,
    find_last_change,
    remove_path,
    storage_errors,
    sum_file_sizes,
)
from cache.operations import Garbage, find_garbage, remove_garbage
from services.settings import Settings
from services.store.retention.in_use import InUse
from services.store.retention.items import Item, Kept, Scene, holding_run, set_aside
from services.store.run_folder import JOB_ID, is_held
from services.store.training_files import ABANDONED_SECONDS


class Leftovers:
    """Removes leftovers to which nothing was written for longer than the limit."""

    def find(self, scene: Scene) -> Iterator[Item]:
        """Yield leftovers of caches, of runs, and of models and data."""
        if scene.limits.leftovers is None:
            return
        for garbage in _list_garbage(scene):
            yield _describe_garbage(garbage, scene)
        for folder in _list_unknown_runs(scene):
            item = _make_item(folder, scene, "a run that no job record names")
            if scene.is_older(scene.now - item.age, scene.limits.leftovers):
                yield replace(item, kept_by=scene.in_use.find_holder(folder.name))
        for root in _list_roots(scene.settings):
            for path in sorted(root.glob(f"{TEMPORARY_PREFIX}*")):
                item = _make_item(path, scene, "a save or a removal was interrupted")
                if not path.name.startswith(ASIDE_PREFIX) and _is_abandoned(item, scene):
                    yield item

    def remove(self, item: Item, scene: Scene) -> None:
        """Remove one leftover, if it still is one."""
        assert item.path is not None, "find gives a path"
        if item.path.is_relative_to(scene.settings.caches):
            self._remove_garbage(item, scene)
        elif JOB_ID.fullmatch(item.name):
            self._remove_run(item, scene)
        else:
            with storage_errors(item.path):
                remove_path(item.path)

    def _remove_garbage(self, item: Item, scene: Scene) -> None:
        scene.require_unnamed(item.name)
        same = [each for each in _list_garbage(scene) if each.path == item.path]
        if not remove_garbage(same, scene.limits.leftovers or 0.0):
            raise Kept("it is in use again")

    def _remove_run(self, item: Item, scene: Scene) -> None:
        assert item.path is not None, "find gives a path"
        with holding_run(item.path):
            if not scene.store.list_unknown([item.name]):
                raise Kept("a job record names it by now")
            aside = set_aside(item.path)
        remove_path(aside)


def _list_roots(settings: Settings) -> tuple[Path, ...]:
    """The folders of which entries appear and go by a rename."""
    return settings.texts, settings.runs, settings.models, settings.data


def _list_garbage(scene: Scene) -> list[Garbage]:
    return find_garbage(scene.settings.caches, scene.limits.leftovers or 0.0)


def _describe_garbage(garbage: Garbage, scene: Scene) -> Item:
    item = _make_item(garbage.path, scene, garbage.why)
    holder = find_holder_of_garbage(garbage, scene.in_use)
    return replace(item, name=garbage.folder.name, bytes=garbage.bytes, kept_by=holder)


def find_holder_of_garbage(garbage: Garbage, in_use: InUse) -> str | None:
    """Say who needs the garbage: an open job that names its cache, or a student the whole cache."""
    name = garbage.folder.name
    whole = garbage.path == garbage.folder
    return in_use.open.get(name) or (in_use.students.get(name) if whole else None)


def _make_item(path: Path, scene: Scene, reason: str) -> Item:
    try:
        age = scene.now - find_last_change(path)
    except FileNotFoundError:  # it is being written, or removed
        age = 0.0
    size = sum_file_sizes(path) if path.is_dir() else 0
    return Item("leftovers", path.name, path, size, reason, age)


def _is_abandoned(item: Item, scene: Scene) -> bool:
    """Whether no process can still write it. The name of a removed run never waits for one."""
    removed = item.name.removeprefix(TEMPORARY_PREFIX)
    return bool(JOB_ID.fullmatch(removed)) or scene.is_older(
        scene.now - item.age, max(scene.limits.leftovers or 0.0, ABANDONED_SECONDS)
    )


def _list_unknown_runs(scene: Scene) -> list[Path]:
    """The folders of jobs without a record that no process holds."""
    folders = {
        folder.name: folder
        for folder in scene.settings.runs.glob("job_*")
        if JOB_ID.fullmatch(folder.name) and folder.is_dir() and not folder.is_symlink()
    }
    unknown = (folders[name] for name in scene.store.list_unknown(sorted(folders)))
    return [folder for folder in unknown if not is_held(folder)]
