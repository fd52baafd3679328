"""What is pushed: a sound student or a sound cache, as files with names in the repository."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from safetensors import SafetensorError, safe_open

from cache.checking.verify import find_extras, verify_cache
from cache.disk import TEMPORARY_PREFIX, list_file_sizes
from cache.errors import CacheCorrupt
from cache.remote.address import is_mirror
from cache.shards.names import MANIFEST
from cache.store import read_manifest
from kd.errors import HubError, ModelError
from kd.exchange.hub.cache_card import CARD, render_cache_card
from kd.exchange.hub.repository import RepositoryType
from kd.files import read_json
from kd.models.folder import STUDENT_FILES
from kd.progress import Monitor

_WEIGHTS = ".safetensors"
_INDEX = ".safetensors.index.json"


@dataclass(frozen=True)
class Shipment:
    """Files to push: names in the repository, each with its file or its bytes.

    ``seal`` is the file without which the others are no student or cache, so it is sent last.
    ``fingerprint`` is that of a cache, and empty for a student.
    """

    type: RepositoryType
    files: Mapping[str, Path | bytes]
    seal: str
    fingerprint: str = ""

    @property
    def names(self) -> list[str]:
        """The names in the order in which they are sent."""
        return sorted(self.files, key=lambda name: (name == self.seal, name))


def make_shipment(folder: Path, monitor: Monitor) -> Shipment:
    """Make the shipment of the student or cache in ``folder``, which must be sound.

    Raises ``HubError`` where it is neither, and ``ModelError`` or ``CacheCorrupt`` for damage.
    """
    if is_mirror(folder):
        raise HubError(
            f"The cache {folder.name} is in a bucket.",
            "Copy its folder out of the bucket with the bucket's own tools, and push the copy.",
        )
    if (folder / MANIFEST).is_file():
        return _ship_cache(folder, monitor)
    if any((folder / name).is_file() for name in STUDENT_FILES):
        return _ship_student(folder)
    raise HubError(
        f"{folder} is neither a student nor a complete cache: it has no {MANIFEST}, "
        f"{' or '.join(STUDENT_FILES)}.",
        "Name a run, the folder of a student, or a cache of `kd cache ls`.",
    )


def _ship_cache(folder: Path, monitor: Monitor) -> Shipment:
    problems = verify_cache(folder, lambda: monitor.check("while the cache is verified"))
    if problems:
        raise CacheCorrupt(
            f"{folder} is damaged and was not pushed: {'; '.join(problems[:3])}.",
            "Run its job again: it captures the damaged shards again. Then push.",
        )
    manifest = read_manifest(folder)
    extras = set(find_extras(folder))
    files: dict[str, Path | bytes] = {
        name: folder / name for name in list_file_sizes(folder) if name not in extras
    }
    files[CARD] = render_cache_card(folder, manifest).encode()
    return Shipment("dataset", files, MANIFEST, manifest.identity.fingerprint)


def _ship_student(folder: Path) -> Shipment:
    files: dict[str, Path | bytes] = {
        name: folder / name
        for name in list_file_sizes(folder)
        if not any(part.startswith((TEMPORARY_PREFIX, ".")) for part in Path(name).parts)
    }
    weights = [name for name in files if name.endswith(_WEIGHTS)]
    if not weights:
        raise ModelError(
            f"{folder} holds no weights: no file ends in {_WEIGHTS}.",
            "Name a student whose training has finished.",
        )
    for name in weights:
        require_sound_weights(folder / name)
    for name in files:
        if name.endswith(_INDEX):
            _require_parts(folder / name)
    seal = next(name for name in STUDENT_FILES if name in files)
    return Shipment("model", files, seal)


def require_sound_weights(path: Path) -> None:
    """Raise ``ModelError`` unless the size and the header of a file of weights agree."""
    try:
        with safe_open(os.fspath(path), framework="numpy"):
            pass
    except (SafetensorError, OSError) as error:
        raise ModelError(
            f"{path} is damaged: {error}.", "Save the student again: run its job again."
        ) from error


def _require_parts(index: Path) -> None:
    """Raise ``ModelError`` if a file that the index of weights names is missing."""
    named = set(read_json(index)["weight_map"].values())
    missing = sorted(name for name in named if not (index.parent / name).is_file())
    if missing:
        raise ModelError(
            f"{index.parent} lacks weights that {index.name} names: {', '.join(missing)}.",
            "Save the student again: run its job again.",
        )
