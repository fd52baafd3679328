"""Pull a student or a cache from a hub: download it, verify it, then rename it once.

An interrupted download is continued: its folder lies beside the place of the result, and
huggingface_hub keeps what has arrived there. Nothing of it is at that place before all of it is
verified.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from huggingface_hub import HfApi, constants
from huggingface_hub.hf_api import RepoFile

from cache import disk
from cache.checking.verify import verify_cache
from cache.json_object import Json
from cache.remote.address import read_binding
from cache.shards.names import MANIFEST
from cache.store import locate_lock, read_manifest
from kd.errors import HubError
from kd.exchange.hub.cache_card import CARD
from kd.exchange.hub.pushing import LACKS, find_problems
from kd.exchange.hub.repository import OWN_FILES, Repository, RepositoryType, connect, hub_errors
from kd.files import locate_temporary
from kd.models.folder import STUDENT_FILES

#: Files that stay on the hub. A cache's folder holds its own files and no other.
_LEFT_OUT = {"model": OWN_FILES, "dataset": (*OWN_FILES, CARD)}
#: The longest name of a file or folder, in bytes.
_LONGEST_NAME = 255
#: A name of a file that stays in the folder of its repository, and is in no hidden folder.
_PLAIN_NAME = re.compile(r"((?!\.)[^/\\\0\n\r\ud800-\udfff]+/)*(?!\.\.$)[^/\\\0\n\r\ud800-\udfff]+")


def pull(
    name: str,
    type: RepositoryType | None,
    revision: str | None,
    out: Path | None,
    caches: Path,
    tell: Callable[[str], object],
) -> Json:
    """Pull the repository ``name``; return a summary.

    A student goes to ``out``, by default a folder of the repository's name in the current one; a
    cache goes to its place below ``caches``, or below ``out``. ``type`` None takes what the hub has
    of that name. ``tell`` gets a word before each long step. Raises ``HubError``, and
    ``StorageError`` for a disk that is full.
    """
    api = connect(name, "read")
    branch = Repository(name, type or "model", revision or constants.DEFAULT_REVISION)
    with hub_errors(branch, "read"):
        if type is None and api.repo_exists(name, repo_type="dataset"):
            if api.repo_exists(name, repo_type="model"):
                what = f"The hub has a model and a dataset {name}."
                raise HubError(what, "Give --type model or dataset.")
            branch = replace(branch, type="dataset")
    with hub_errors(branch, "read"):
        commit = str(api.repo_info(**branch.address, revision=branch.revision).sha)
        place = replace(branch, revision=commit)
        entries = api.list_repo_tree(**place.address, revision=commit, recursive=True)
        sizes = {each.path: each.size for each in entries if isinstance(each, RepoFile)}
        sizes = {path: sizes[path] for path in sizes if path not in _LEFT_OUT[place.type]}
        _require_plain_names(branch, sizes)
        tell("downloading")
        if MANIFEST in sizes:
            folder, reused = _pull_cache(api, place, caches if out is None else out.absolute())
        elif any(each in sizes for each in STUDENT_FILES):
            folder, reused = _pull_student(api, place, (out or Path(name.split("/")[1])).absolute())
        else:
            remedy = "Check the name. If a push was interrupted, let it finish first."
            what = f"{branch} holds neither a student nor a complete cache: {LACKS}"
            raise HubError(what, remedy)
    return branch.summarise(commit, sizes, folder=str(folder)) | {"reused": reused}


def _require_plain_names(place: Repository, names: Iterable[str]) -> None:
    """Raise ``HubError`` for a name that leads out of the folder, or is hidden or no file's."""
    for name in names:
        long = any(len(part.encode(errors="replace")) > _LONGEST_NAME for part in name.split("/"))
        if long or not _PLAIN_NAME.fullmatch(name):
            shown = name if len(name) <= _LONGEST_NAME else name[:60] + "..."
            what = f"{place} has a file with the name {shown!r}, which no model or cache has."
            raise HubError(what, "Use another, or download it with the hub's own tools.")


def _pull_student(api: HfApi, place: Repository, out: Path) -> tuple[Path, bool]:
    """Bring a student to ``out``; return its folder and whether it was there already."""
    if out.is_dir() and _compare(api, place, out) == (set(), set()):
        return out, True
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise HubError(f"{out} exists and is not empty.", "Give a new folder with --out.")
    with _locked_folder(locate_temporary(out)) as staging:
        _download(api, place, staging)
        disk.publish_folder(staging, out)
    return out, False


def _pull_cache(api: HfApi, place: Repository, root: Path) -> tuple[Path, bool]:
    """Bring a cache to its place below ``root``; return its folder and whether it was there."""
    if read_binding(root) is not None:
        remedy = "Pull into a folder with --out, and copy it with the bucket's own tools."
        raise HubError("The caches of this place are in a bucket.", remedy)
    temporary = root / f"{disk.TEMPORARY_PREFIX}pull-{place.name.replace('/', '--')}"
    with _locked_folder(temporary) as staging:
        _fetch(api, place, staging, allow_patterns=MANIFEST)
        folder = root / read_manifest(staging).identity.fingerprint
        if folder.is_dir() and not verify_cache(folder):
            disk.remove_path(staging)
            return folder, True
        _download(api, place, staging)
        with disk.locked(locate_lock(folder)):
            disk.publish_folder(staging, folder)
    return folder, False


@contextmanager
def _locked_folder(staging: Path) -> Iterator[Path]:
    """Let one process at a time fill ``staging``; it stays if the block fails."""
    with disk.storage_errors(staging.parent):
        disk.make_folder(staging.parent)
        lock = staging.with_name(f"{staging.name}.lock")
        with disk.locked(lock):
            yield staging
            lock.unlink()


def _download(api: HfApi, place: Repository, staging: Path) -> None:
    """Bring all files into ``staging`` and verify them; remove those of an earlier commit.

    Raises ``HubError`` if a file arrived with other bytes, or if student or cache are damaged.
    """
    _fetch(api, place, staging, ignore_patterns=[*_LEFT_OUT[place.type]])
    wrong, others = _compare(api, place, staging)
    for name in wrong | others:
        disk.remove_path(staging / name)
    if wrong:
        what = f"{min(wrong)} of {place} arrived with other bytes than the hub announced."
        raise HubError(what, "Run the same command again: what has arrived whole is kept.")
    if problems := find_problems(staging):
        what = f"{place} is damaged or not complete: {'; '.join(problems[:3])}."
        remedy = "If a push was interrupted, let it finish first. Else push again what is sound."
        raise HubError(what, remedy)
    disk.remove_path(staging / ".cache")  # the notes of huggingface_hub on what has arrived


def _fetch(api: HfApi, place: Repository, folder: Path, **which: Any) -> None:
    """Download the files that ``which`` names; huggingface_hub keeps what has arrived."""
    api.snapshot_download(**place.address, revision=place.revision, local_dir=folder, **which)


def _compare(api: HfApi, place: Repository, folder: Path) -> tuple[set[str], set[str]]:
    """Compare ``folder`` with the hashes of the hub.

    Returns the names of files that are missing or different, and of those that ``place`` has not.
    """
    found = api.verify_repo_checksums(**place.address, revision=place.revision, local_dir=folder)
    wrong = {each["path"] for each in found.mismatches} | set(found.missing_paths)
    return wrong - set(_LEFT_OUT[place.type]), set(found.extra_paths)
