"""The rules of what users gave: uploaded files, and models and data of `import kd`."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from cache.disk import remove_path, storage_errors, sum_file_sizes
from services.store.retention.items import Item, Kept, Scene, describe_age, set_aside
from services.store.training_files import TrainingFiles

#: The names that ``kd.face.inputs`` gives to models and data.
_SAVED = re.compile(r"([0-9a-f]{32})(\.jsonl)?")


class Files:
    """Removes uploaded files that no job names."""

    def find(self, scene: Scene) -> Iterator[Item]:
        """Yield the files that were uploaded longer ago than the limit."""
        root = scene.settings.files
        files = TrainingFiles(root)
        for team in sorted(root.iterdir()) if root.is_dir() else ():
            for file in files.list_files(team.name):
                if not scene.is_older(file.created_at, scene.limits.files):
                    continue
                age = scene.now - file.created_at
                yield Item(
                    kind="files",
                    name=file.id,
                    path=team / file.id,
                    bytes=sum_file_sizes(team / file.id),
                    reason=f"uploaded {describe_age(age)} ago by team {team.name}",
                    age=age,
                    kept_by=scene.in_use.find_holder(file.id, ended=True),
                )

    def remove(self, item: Item, scene: Scene) -> None:
        """Remove one file."""
        assert item.path is not None, "find gives a path"
        scene.require_unnamed(item.name)
        TrainingFiles(scene.settings.files).remove(item.path.parent.name, item.name)


class Imports:
    """Removes models and data that calls of `import kd` have saved. A new call saves them again."""

    def find(self, scene: Scene) -> Iterator[Item]:
        """Yield what no call has saved for longer than the limit."""
        for root in (scene.settings.models, scene.settings.data):
            for path in sorted(root.iterdir()) if root.is_dir() else ():
                with suppress(FileNotFoundError):  # it is being removed
                    yield from self._judge(path, scene)

    def _judge(self, path: Path, scene: Scene) -> Iterator[Item]:
        found = _SAVED.fullmatch(path.name)
        status = path.lstat()
        if found is None or not scene.is_older(status.st_mtime, scene.limits.imports):
            return
        age = scene.now - status.st_mtime
        yield Item(
            kind="imports",
            name=found[1],
            path=path,
            bytes=sum_file_sizes(path) if path.is_dir() else status.st_size,
            reason=f"saved {describe_age(age)} ago",
            age=age,
            kept_by=scene.in_use.find_holder(found[1], ended=True),
        )

    def remove(self, item: Item, scene: Scene) -> None:
        """Remove one folder or file, unless a call has saved it again."""
        assert item.path is not None, "find gives a path"
        scene.require_unnamed(item.name)
        if _read_time(item.path) > scene.now:
            raise Kept("it was saved again since it was listed")
        with storage_errors(item.path):
            remove_path(set_aside(item.path))


def _read_time(path: Path) -> float:
    try:
        return path.lstat().st_mtime
    except FileNotFoundError:
        raise Kept("it is gone already") from None
