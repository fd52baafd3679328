"""The folders, models and hosts that a job of the service may name."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields
from pathlib import Path

from pydantic import TypeAdapter

from cache.errors import StorageError
from cache.json_object import Json
from cache.shards.names import FINGERPRINT
from kd.buckets.inputs import is_stored_name
from kd.buckets.runs import RUNS
from kd.config.job import JobConfig
from kd.preflight.named_paths import list_named_resources, resolve_links, resolve_named_paths


def grant_nothing(_: str) -> bool:
    """Return False for every name."""
    return False


@dataclass(frozen=True)
class AllowedModel:
    """A line of the operator's list of models: a hub id or a folder; revision None = any."""

    name: str
    revision: str | None = None


@dataclass(frozen=True)
class Confinement:
    """The folders, models and hosts that a job may name; its paths are absolute and have no links.

    ``models``: None = any. ``remote_code``: whether jobs may run code that comes with a model or a
    task. ``free_datasets``: whether a dataset may include files from anywhere. ``may_read_run`` and
    ``may_read_cache``: whether the job's owner may read the run folder of a job's id, or the cache
    of a fingerprint, in ``home``. ``store``: the operator's place of caches, the only one that a
    job may name, because the credentials of a worker are the operator's. ``stores``: the buckets
    below which a job may name text and models, besides ``store``.
    """

    home: Path
    roots: tuple[Path, ...]
    denied: tuple[Path, ...] = ()
    models: tuple[AllowedModel, ...] | None = None
    hosts: tuple[str, ...] = ()
    remote_code: bool = False
    free_datasets: bool = False
    may_read_run: Callable[[str], bool] = grant_nothing
    may_read_cache: Callable[[str], bool] = grant_nothing
    store: str | None = None
    stores: tuple[str, ...] = ()

    def permits_url(self, url: str) -> bool:
        """Whether text or a model at the URL of a bucket may be read.

        What runs and caches of the service have there, only their owners may read, as in ``home``.
        """
        kind, name = find_own_objects(url, self.store)
        if kind:
            return self._grants(kind, name)
        roots = (self.store, *self.stores, *(each.name for each in self.models or ()))
        return any(
            is_below(url, root)
            and not any(part.startswith(".") for part in url[len(root) :].split("/"))
            for root in roots
            if root is not None and is_stored_name(root)
        )

    def permits(self, path: Path) -> bool:
        """Whether ``path``, with its links followed, may be read. A root itself may be hidden."""
        real = resolve_links(path)
        if real is None or any(real.is_relative_to(each) for each in self.denied):
            return False
        roots = [root for root in self.roots if real.is_relative_to(root)]
        # A root may contain the data folder: that does not open the folders of other owners.
        if real.is_relative_to(self.home):
            inner = [root for root in roots if root != self.home and root.is_relative_to(self.home)]
            own = _find_own_folder(real, self.home)
            return self._grants(*own) or _is_in_plain_sight(real, inner)
        return _is_in_plain_sight(real, roots)

    def find_first_outside(self, files: Iterable[Path]) -> Path | None:
        """Find the first file that may not be read.

        Links of folders are followed once per folder, because there may be a million files.
        """
        # The resolved path of each folder; None = it may not be read.
        folders: dict[Path, Path | None] = {}
        for file in files:
            parent = file.parent
            if parent not in folders:
                folders[parent] = resolve_links(parent) if self.permits(parent) else None
            real = folders[parent]
            plain = not file.name.startswith(".") and not file.is_symlink()
            inside = real is not None and plain and real / file.name not in self.denied
            if not inside and not self.permits(file):
                return file
        return None

    def _grants(self, kind: str, name: str) -> bool:
        if kind == "runs":
            return self.may_read_run(name)
        return kind == "caches" and self.may_read_cache(name)

    def allows_model(self, name: str, revision: str | None, root: Path) -> bool:
        """Whether the operator's list has the model, by its id or by a folder that contains it."""
        if self.models is None:
            return True
        # A student that the owner's own job trained needs no place on the list.
        if is_stored_name(name):
            owned = find_own_objects(name, self.store)[0] == "runs" and self.permits_url(name)
        else:
            real = resolve_links(root / name)
            owned = real is not None and self._grants(*_find_own_folder(real, self.home))
        return owned or any(_is_listed(name, revision, root, entry) for entry in self.models)

    def to_order(self, config: JobConfig, root: Path) -> Json:
        """Return the limits as JSON for the process that runs ``config``.

        The runs and caches in ``home`` that ``config`` may read are listed by name.
        """
        # Whether a folder is granted is decided now, by the process that knows the owner.
        named = [_find_own_folder(real, self.home) for real in resolve_named_paths(config, root)]
        named += [("caches", name) for name in config.cache.named.values()]
        named += [find_own_objects(each.name, self.store) for each in list_named_resources(config)]
        known = _JSON.dump_python(self, mode="json", exclude={"may_read_run", "may_read_cache"})
        runs = {name for kind, name in named if kind == "runs" and self.may_read_run(name)}
        caches = {name for kind, name in named if kind == "caches" and self.may_read_cache(name)}
        return {**known, "runs": sorted(runs), "caches": sorted(caches)}

    @classmethod
    def from_order(cls, order: Json) -> Confinement:
        """Rebuild the confinement from the JSON that ``to_order`` returned."""
        granted = {
            "may_read_run": frozenset(order["runs"]).__contains__,
            "may_read_cache": frozenset(order["caches"]).__contains__,
        }
        known = order | granted
        # A field that is absent would take its default, and the defaults permit most.
        if lacking := {each.name for each in fields(cls)} - known.keys():
            raise KeyError(f"the order of limits lacks {', '.join(sorted(lacking))}")
        return _JSON.validate_python(known)


_JSON = TypeAdapter(Confinement)


def read_allow_list(file: Path | None) -> tuple[AllowedModel, ...] | None:
    """Read the operator's list of models: a hub id or folder per line; None without a ``file``.

    ``@revision`` may follow the name, and ``#`` begins a comment. Raises ``StorageError`` if the
    file cannot be read.
    """
    if file is None:
        return None
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        detail = f"the list of models {file} (KD_MODEL_ALLOW_LIST) cannot be read: {error}."
        remedy = "Give a file with one hub id or folder per line, or unset the variable."
        raise StorageError(detail, remedy) from None
    words = (line.partition("#")[0].strip().partition("@") for line in lines)
    return tuple(AllowedModel(name, revision or None) for name, _, revision in words if name)


def _find_own_folder(real: Path, home: Path) -> tuple[str, str]:
    """Return ``("runs", id)`` or ``("caches", fingerprint)`` of the folder that ``real`` is in.

    For any other path both words are empty.
    """
    parts = real.relative_to(home).parts if real.is_relative_to(home) else ()
    return (parts[0], parts[1]) if len(parts) >= 2 else ("", "")


def find_own_objects(url: str, store: str | None) -> tuple[str, str]:
    """Return ``("runs", id)`` or ``("caches", fingerprint)`` of what lies at ``url`` in ``store``.

    ``("store", "")`` is the whole store, or more; for any other URL both words are empty.
    """
    if store is None or not is_stored_name(store) or not is_stored_name(url):
        return "", ""
    if is_below(store, url):  # the store itself, or what contains it
        return "store", ""
    parts = url.removeprefix(store.rstrip("/") + "/").split("/") if is_below(url, store) else [""]
    if parts[0] == RUNS:
        return "runs", parts[1] if len(parts) > 1 else ""
    return ("caches", parts[0]) if FINGERPRINT.fullmatch(parts[0]) else ("", "")


def is_below(url: str, root: str) -> bool:
    """Whether the URL is that of the folder ``root``, or of something in it."""
    root = root.rstrip("/")
    return url.rstrip("/") == root or url.startswith(f"{root}/")


def _is_in_plain_sight(real: Path, roots: Iterable[Path]) -> bool:
    return any(
        not any(part.startswith(".") for part in real.relative_to(root).parts) for root in roots
    )


def _is_listed(name: str, revision: str | None, root: Path, entry: AllowedModel) -> bool:
    # A hub id must be equal; a folder also allows the models inside it.
    if entry.name == name:
        return entry.revision in (None, revision)
    if is_stored_name(name) or is_stored_name(entry.name):
        return is_stored_name(entry.name) and is_below(name, entry.name)
    folder = resolve_links(root / Path(entry.name).expanduser())
    wanted = resolve_links(root / name)
    if folder is None or wanted is None:
        return False
    return folder.is_dir() and wanted.is_relative_to(folder)


#: The limits of this process as JSON, for the processes that it starts.
LIMITS_VARIABLE = "KD_GRANTED_LIMITS"


def grant_limits(order: Json | None) -> None:
    """Let the processes that this one starts have the limits of ``order``; None = no limits."""
    os.environ.pop(LIMITS_VARIABLE, None)
    if order is not None:
        os.environ[LIMITS_VARIABLE] = json.dumps(order)


def read_granted_limits() -> Confinement | None:
    """Read the limits that the process which started this one has granted; None = no limits."""
    text = os.environ.get(LIMITS_VARIABLE)
    return None if text is None else Confinement.from_order(json.loads(text))
