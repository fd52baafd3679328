"""The rule of token stores: by the last use. A run that needs one again makes it again."""

from __future__ import annotations

from collections.abc import Iterator

from cache.disk import locked, remove_path, storage_errors
from cache.errors import CacheError
from cache.reading.usage import exclude_readers, locate_use, read_last_use
from kd.text.stored.shards import list_stores, locate_lock
from services.store.retention.items import Item, Kept, Scene, describe_age, set_aside


class Texts:
    """Removes token stores that nobody reads or writes."""

    def find(self, scene: Scene) -> Iterator[Item]:
        """Yield the stores that are unused for longer than the limit."""
        for store in list_stores(scene.settings.texts):
            if scene.is_older(store.used, scene.limits.texts):
                age = scene.now - store.used
                reason = f"not used for {describe_age(age)}"
                name = store.folder.name
                yield Item("texts", name, store.folder, store.size, reason, age)

    def remove(self, item: Item, scene: Scene) -> None:
        """Remove one store."""
        folder = item.path
        assert folder is not None, "find gives a path"

        def refuse() -> None:
            raise Kept("a process writes it")

        with storage_errors(folder), locked(locate_lock(folder), refuse):
            try:
                with exclude_readers(folder):
                    if (used := read_last_use(folder)) is not None and used > scene.now:
                        raise Kept("a run has read it since it was listed")
                    aside = set_aside(folder)
                    remove_path(locate_use(folder))
            except CacheError as error:
                raise Kept(error.detail) from None
            remove_path(aside)
            remove_path(locate_lock(folder))
