"""A run's files: folders and JSON that appear whole or not at all, on top of ``cache.disk``."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from cache.disk import TEMPORARY, make_folder, publish_folder, remove, settle, storage_errors, write_file
from cache.errors import StorageError


@contextmanager
def whole_folder(final: Path) -> Iterator[Path]:
    """Fill the yielded folder; when the block ends well, it takes the place of ``final`` by a rename.

    There is a whole ``final`` from the first time on, but for a kill between two renames, which ``settle`` mends.
    """
    temporary = final.with_name(TEMPORARY + final.name)
    with _disk_errors(final.parent):
        make_folder(final.parent)
        settle(final)
        remove(temporary)
        temporary.mkdir()
        try:
            yield temporary
            publish_folder(temporary, final)
        finally:
            remove(temporary)


def write_text(path: Path, text: str) -> None:
    """Replace ``path`` by ``text`` in one step."""
    with _disk_errors(path.parent):
        make_folder(path.parent)
        write_file(path, text.encode())


def write_json(path: Path, value: Any) -> None:
    """Replace ``path`` by ``value`` as JSON; NaN is refused, JSON has none."""
    write_text(path, json.dumps(value, indent=2, allow_nan=False, ensure_ascii=False) + "\n")


def read_json(path: Path) -> Any:
    """The JSON at ``path``, or None where there is no file."""
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else None


@contextmanager
def _disk_errors(where: Path) -> Iterator[None]:
    """As ``cache.disk.storage_errors``, and also for safetensors, which has an exception of its own for a full disk."""
    try:
        with storage_errors(where):
            yield
    except SafetensorError as error:
        if "No space left" not in str(error):
            raise
        raise StorageError(f"{where}: no space left on the disk.", "Free space, then run again.") from error
