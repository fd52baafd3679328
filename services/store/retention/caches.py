"""The rule of sealed caches: by the last use, and by the time since the capture."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from cache.disk import sum_file_sizes
from cache.errors import CacheError, StorageError
from cache.operations import remove_cache
from cache.reading.usage import read_last_use
from cache.shards.names import FINGERPRINT, MANIFEST
from services.store.callers import LOCAL_CALLER
from services.store.retention.items import Item, Kept, Scene, describe_age


class Caches:
    """Removes sealed caches. Incomplete ones are leftovers."""

    def find(self, scene: Scene) -> Iterator[Item]:
        """Yield the caches that are unused, or old, for longer than the limits."""
        root = scene.settings.caches
        for folder in sorted(root.iterdir()) if root.is_dir() else ():
            if FINGERPRINT.fullmatch(folder.name) and (item := _judge(folder, scene)) is not None:
                holder = scene.in_use.find_holder(folder.name)
                yield replace(item, bytes=sum_file_sizes(folder), kept_by=holder)

    def remove(self, item: Item, scene: Scene) -> None:
        """Remove a cache that nobody captures, reads or names."""
        folder = scene.settings.caches / item.name

        def require_free() -> None:
            scene.require_unnamed(item.name)
            if (used := read_last_use(folder)) is not None and used > scene.now:
                raise Kept("a run has read it since it was listed")

        try:
            remove_cache(folder, require_free)
        except StorageError:
            raise
        except CacheError as error:
            raise Kept(error.detail) from None
        except FileNotFoundError:
            raise Kept("it is gone already") from None
        scene.store.forget_cache(LOCAL_CALLER, item.name)


def _judge(folder: Path, scene: Scene) -> Item | None:
    """The cache as an item, if one of the two limits says that it can go."""
    try:
        captured = (folder / MANIFEST).stat().st_mtime
    except OSError:
        return None
    used = max(read_last_use(folder) or captured, captured)
    if scene.is_older(used, scene.limits.caches):
        age = scene.now - used
        return Item("caches", folder.name, folder, 0, f"not used for {describe_age(age)}", age)
    if scene.is_older(captured, scene.limits.caches_captured):
        age = scene.now - captured
        return Item("caches", folder.name, folder, 0, f"captured {describe_age(age)} ago", age)
    return None
