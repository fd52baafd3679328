"""Pull a student or a cache from a hub: download, compare every byte, then rename once.

A download goes on where it was cut: its folder lies beside the place of the result and keeps what
has arrived. Nothing of it is at that place before all of it is verified.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from huggingface_hub import HfApi, constants

from cache.checking.verify import verify_cache
from cache.disk import (
    TEMPORARY_PREFIX,
    list_file_sizes,
    locked,
    make_folder,
    publish_folder,
    remove_path,
    storage_errors,
)
from cache.errors import StorageError
from cache.remote.address import read_binding
from cache.shards.names import MANIFEST
from cache.store import locate_lock, read_manifest
from kd.errors import HubError
from kd.exchange.hub.cache_card import CARD
from kd.exchange.hub.repository import (
    RemoteFile,
    Repository,
    RepositoryType,
    connect,
    find_commit,
    hub_errors,
    list_remote_files,
)
from kd.files import format_bytes, locate_temporary, measure_free_bytes
from kd.models.folder import STUDENT_FILES
from kd.progress import Monitor, ProgressMeter

#: Files that are downloaded at once.
_WORKERS = 4
#: The folder in which huggingface_hub notes what has arrived.
_NOTES = ".cache"
#: Bytes that stay free on the disk.
_SPARE = 64 << 20


def pull(
    name: str,
    type: RepositoryType | None,
    revision: str | None,
    out: Path | None,
    caches: Path,
    monitor: Monitor,
) -> dict[str, Any]:
    """Pull the repository ``name``; return a summary.

    A student goes to ``out``, by default a folder of the repository's name here; a cache goes to
    its place below ``caches``. ``type`` None takes what the hub has of that name. Raises
    ``HubError``, ``StorageError`` where the disk is too small.
    """
    api = connect()
    asked = Repository(name, type or "model", revision or constants.DEFAULT_REVISION)
    with hub_errors(asked, "read"):
        repository = asked if type else _choose_type(api, asked)
    with hub_errors(repository, "read"):
        monitor.emit("stage", stage="pull", phase="listing")
        commit = find_commit(api, repository)
        files = list_remote_files(api, repository, commit)
        download = _Download(api, repository, commit, files, monitor)
        if MANIFEST in files:
            return download.describe(*_pull_cache(download, out, caches))
        if any(each in files for each in STUDENT_FILES):
            return download.describe(*_pull_student(download, out or Path(name.split("/")[1])))
    raise HubError(
        f"{repository} holds neither a student nor a complete cache: it has no {MANIFEST}, "
        f"{' or '.join(STUDENT_FILES)}.",
        "Check the name. If a push was cut, let it finish first.",
    )


def _choose_type(api: HfApi, asked: Repository) -> Repository:
    """Find out whether the hub has a model or a dataset of this name."""
    types: tuple[RepositoryType, ...] = ("model", "dataset")
    found = [each for each in types if api.repo_exists(asked.name, repo_type=each)]
    if len(found) > 1:
        raise HubError(
            f"The hub has a model and a dataset {asked.name}.", "Give --type model or dataset."
        )
    return Repository(asked.name, found[0] if found else "model", asked.revision)


def _pull_student(download: _Download, out: Path) -> tuple[Path, bool]:
    """Bring a student to ``out``; return its folder and whether it was there already."""
    out = out.absolute()
    if out.is_dir() and download.is_here(out):
        return out, True
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise HubError(f"{out} exists and is not empty.", "Give a new folder with --out.")
    with storage_errors(out.parent):
        make_folder(out.parent)
        staging = locate_temporary(out)
        lock = staging.with_name(f"{staging.name}.lock")
        with locked(lock):
            download.fetch(staging)
            publish_folder(staging, out)
            lock.unlink()
    return out, False


def _pull_cache(download: _Download, out: Path | None, caches: Path) -> tuple[Path, bool]:
    """Bring a cache to its place below ``caches``, or to ``out``."""
    root = caches if out is None else out.absolute()
    repository = download.repository
    if read_binding(root) is not None:
        raise HubError(
            "The caches of this place are in a bucket.",
            "Pull into a folder with --out, and copy it with the bucket's own tools.",
        )
    staging = root / f"{TEMPORARY_PREFIX}pull-{repository.name.replace('/', '--')}"
    with storage_errors(root):
        make_folder(root)
        lock = staging.with_name(f"{staging.name}.lock")
        with locked(lock):
            download.fetch(staging, (MANIFEST,))
            fingerprint = read_manifest(staging).identity.fingerprint
            folder = root / fingerprint
            if folder.is_dir() and not verify_cache(folder):
                remove_path(staging)
                lock.unlink()
                return folder, True
            download.fetch(staging)
            download.monitor.emit("stage", stage="pull", phase="verifying")
            if problems := verify_cache(staging):
                raise HubError(
                    f"{repository} holds a damaged cache: {'; '.join(problems[:3])}.",
                    "Push it again from a machine where `kd cache verify` finds it sound.",
                )
            with locked(locate_lock(folder)):
                publish_folder(staging, folder)
            lock.unlink()
    return folder, False


class _Download:
    """The files of a repository at one commit, and how they come here."""

    def __init__(
        self,
        api: HfApi,
        repository: Repository,
        commit: str,
        files: Mapping[str, RemoteFile],
        monitor: Monitor,
    ) -> None:
        self._api = api
        self.repository = repository
        self._commit = commit
        # A cache's folder holds its own files and no other: its card stays on the hub.
        self._files = {
            name: file for name, file in files.items() if MANIFEST not in files or name != CARD
        }
        self.monitor = monitor
        self._fetched = 0

    def is_here(self, folder: Path) -> bool:
        """Whether ``folder`` holds these files and no other, to the byte."""
        return sorted(list_file_sizes(folder)) == sorted(self._files) and all(
            file.is_equal(folder / name) for name, file in self._files.items()
        )

    def fetch(self, folder: Path, names: Iterable[str] | None = None) -> None:
        """Fill ``folder`` with the files, all or ``names``; keep what is there and is equal.

        With all files it holds nothing else afterwards. Raises ``HubError`` where a file that has
        arrived differs from what the hub announced.
        """
        wanted = sorted(self._files if names is None else names)
        self.monitor.emit("stage", stage="pull", phase="comparing")
        missing = [name for name in wanted if not self._is_here(folder, name)]
        self._require_space(folder, missing)
        self.monitor.emit("stage", stage="pull", phase="downloading")
        meter = ProgressMeter(sum(self._files[name].size for name in missing), "bytes")
        with ThreadPoolExecutor(_WORKERS) as pool:
            try:
                for name in pool.map(lambda name: self._fetch(folder, name), missing):
                    size = self._files[name].size
                    self._fetched += size
                    self.monitor.emit("progress", **meter.advance(size, 0))
                    self.monitor.check("while files are downloaded")
            except BaseException:
                pool.shutdown(cancel_futures=True)
                raise
        if names is None:
            remove_path(folder / _NOTES)
            self._remove_others(folder)

    def _is_here(self, folder: Path, name: str) -> bool:
        self.monitor.check("while files are compared")
        return (folder / name).is_file() and self._files[name].is_equal(folder / name)

    def _fetch(self, folder: Path, name: str) -> str:
        self._api.hf_hub_download(
            self.repository.name,
            name,
            repo_type=self.repository.type,
            revision=self._commit,
            local_dir=folder,
        )
        if not self._files[name].is_equal(folder / name):
            remove_path(folder / name)
            raise HubError(
                f"{name} of {self.repository} arrived with other bytes than the hub announced.",
                "Run the same command again: what has arrived whole is kept.",
            )
        return name

    def _require_space(self, folder: Path, missing: Iterable[str]) -> None:
        needed = sum(self._files[name].size for name in missing)
        free = measure_free_bytes(folder.parent) - _SPARE
        if needed > free:
            raise StorageError(
                f"{self.repository} needs {format_bytes(needed)} more, but only "
                f"{format_bytes(max(free, 0))} are free on the disk of {folder.parent}.",
                "Free space, or choose another disk with --out, KD_STORE or KD_HOME.",
            )

    def _remove_others(self, folder: Path) -> None:
        """Remove files of an earlier commit, which a download before this one brought."""
        for name in set(list_file_sizes(folder)) - set(self._files):
            remove_path(folder / name)
        for parent, _, _ in sorted(os.walk(folder), reverse=True):
            if not any(Path(parent).iterdir()):
                Path(parent).rmdir()

    def describe(self, folder: Path, reused: bool) -> dict[str, Any]:
        """Return the summary of a pull into ``folder``."""
        return {
            "repository": self.repository.name,
            "type": self.repository.type,
            "revision": self.repository.revision,
            "commit": self._commit,
            "folder": str(folder),
            "files": len(self._files),
            "bytes": sum(file.size for file in self._files.values()),
            "downloaded_bytes": self._fetched,
            "reused": reused,
        }
