"""Push a student or a cache to a hub, in batches of commits that a cut does not undo.

Each batch is uploaded and committed before the next one begins, and the file that makes the folder
a student or a cache is in the last one. A new attempt lists what the repository holds and sends the
rest. A commit whose answer was lost is therefore found, and not made twice. Each commit names the
one before it, so that another writer is noticed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi, constants

from cache.manifest import Manifest
from cache.reading.usage import held
from cache.shards.names import MANIFEST
from kd.errors import HubError
from kd.exchange.hub.repository import (
    RemoteFile,
    Repository,
    connect,
    find_commit,
    hub_errors,
    list_remote_files,
    require_token,
)
from kd.exchange.hub.shipment import Shipment, make_shipment
from kd.files import whole_folder
from kd.progress import Monitor, ProgressMeter

#: Files of a commit: what the hub recommends at most.
COMMIT_FILES = 100
#: Files that are uploaded before progress is reported again.
_UPLOAD_FILES = 16
#: Weights of a student that was there before would be loaded beside those of the new one, and its
#: chat templates in place of none.
_STALE = (".safetensors", ".safetensors.index.json", ".jinja")


def push(
    folder: Path, name: str, revision: str | None, private: bool | None, monitor: Monitor
) -> dict[str, Any]:
    """Push the student or the cache in ``folder`` to the repository ``name``; return a summary.

    The repository, a model for a student and a dataset for a cache, is made where there is none: a
    private one, unless ``private`` is False. True also refuses a public one that is there. Raises
    ``HubError``, and for damage what ``make_shipment`` raises.
    """
    Repository(name, "model")  # a wrong name is refused before a large cache is verified
    api = connect()
    with held(folder):
        monitor.emit("stage", stage="push", phase="verifying")
        shipment = make_shipment(folder, monitor)
        repository = Repository(name, shipment.type, revision or constants.DEFAULT_REVISION)
        require_token(repository)
        with hub_errors(repository, "write to"):
            _make_repository(api, repository, private)
            return _Push(api, repository, shipment, monitor).run()


def push_to_folder(folder: Path, target: Path | None, monitor: Monitor) -> dict[str, Any]:
    """Write into the new folder ``target`` what a push would send; None = only list it.

    Raises ``HubError`` where the folder exists, and for damage what ``make_shipment`` raises.
    """
    if target is not None and target.exists():
        raise HubError(f"{target} exists.", "Name a folder that does not exist yet.")
    with held(folder):
        shipment = make_shipment(folder, monitor)
        if target is not None:
            with whole_folder(target) as place:
                for name, content in shipment.files.items():
                    path = place / name
                    path.parent.mkdir(parents=True, exist_ok=True)
                    path.write_bytes(
                        content if isinstance(content, bytes) else content.read_bytes()
                    )
        sizes = {name: measure_content(content) for name, content in shipment.files.items()}
    return {"type": shipment.type, "bytes": sum(sizes.values()), "files": sizes}


def _make_repository(api: HfApi, repository: Repository, private: bool | None) -> None:
    """Make the repository and the branch unless they are there.

    Raises ``HubError`` where the repository is public, but must be private.
    """
    api.create_repo(
        repository.name, repo_type=repository.type, private=private is not False, exist_ok=True
    )
    start = replace(repository, revision=constants.DEFAULT_REVISION)
    found = api.repo_info(start.name, repo_type=start.type)
    if private and not found.private:
        raise HubError(
            f"{repository.name} is public, and --private was asked for.",
            f"Make it private at {repository.url}/settings, or push to another repository.",
        )
    if repository.revision != start.revision:
        api.create_branch(
            repository.name, branch=repository.revision, repo_type=repository.type, exist_ok=True
        )


class _Push:
    """One attempt to bring a repository to what a shipment holds."""

    def __init__(
        self, api: HfApi, repository: Repository, shipment: Shipment, monitor: Monitor
    ) -> None:
        self._api = api
        self._repository = repository
        self._shipment = shipment
        self._monitor = monitor

    def run(self) -> dict[str, Any]:
        """Send what is missing; return a summary."""
        self._monitor.emit("stage", stage="push", phase="comparing")
        head = find_commit(self._api, self._repository)
        there = list_remote_files(self._api, self._repository, head)
        self._require_ours(there, head)
        missing = [name for name in self._shipment.names if not self._is_there(name, there)]
        stale = self._list_stale(there)
        self._monitor.emit("stage", stage="push", phase="sending")
        sizes = {name: measure_content(self._shipment.files[name]) for name in missing}
        meter = ProgressMeter(sum(sizes.values()), "bytes")
        batches = list(_cut(missing, COMMIT_FILES)) or ([[]] if stale else [])
        for number, batch in enumerate(batches, start=1):
            removals = stale if number == len(batches) else []
            message = f"Potstill: part {number} of {len(batches)}"
            head = self._commit(batch, removals, message, head, meter, sizes)
        return {
            "repository": self._repository.name,
            "type": self._repository.type,
            "revision": self._repository.revision,
            "commit": head,
            "url": self._repository.url,
            "files": len(self._shipment.files),
            "sent_files": len(missing),
            "sent_bytes": sum(sizes.values()),
        }

    def _commit(
        self,
        names: Sequence[str],
        removals: Sequence[str],
        message: str,
        head: str,
        meter: ProgressMeter,
        sizes: dict[str, int],
    ) -> str:
        """Upload and commit ``names``, and remove others; return the new commit."""
        place = self._repository
        additions = [CommitOperationAdd(name, self._shipment.files[name]) for name in names]
        for part in _cut(additions, _UPLOAD_FILES):
            self._monitor.check("while files are sent")
            # free_memory would empty the operations, which the commit below still needs.
            self._api.preupload_lfs_files(
                place.name,
                part,
                repo_type=place.type,
                revision=place.revision,
                free_memory=False,
            )
            sent = sum(sizes[each.path_in_repo] for each in part)
            self._monitor.emit("progress", **meter.advance(sent, 0))
        made = self._api.create_commit(
            place.name,
            [*additions, *(CommitOperationDelete(name) for name in removals)],
            repo_type=place.type,
            revision=place.revision,
            commit_message=message,
            parent_commit=head,
        )
        return made.oid

    def _is_there(self, name: str, there: dict[str, RemoteFile]) -> bool:
        self._monitor.check("while files are compared")
        return name in there and there[name].is_equal(self._shipment.files[name])

    def _require_ours(self, there: dict[str, RemoteFile], head: str) -> None:
        """Raise ``HubError`` where the repository of a cache holds something else.

        Such files would make the pulled cache an unsound one, and nothing of others is removed.
        """
        if not self._shipment.fingerprint:
            return
        others = sorted(set(there) - set(self._shipment.files))
        if others:
            self._refuse(f"files that are not of this cache, such as {', '.join(others[:3])}")
        if MANIFEST in there and (found := self._read_fingerprint(head)) != (
            self._shipment.fingerprint
        ):
            self._refuse(f"the cache {found}")

    def _refuse(self, what: str) -> None:
        raise HubError(
            f"{self._repository} holds {what}.",
            "Push to a repository of its own: one repository holds one cache.",
        )

    def _read_fingerprint(self, head: str) -> str:
        """Read the fingerprint of the complete cache in the repository."""
        with TemporaryDirectory() as folder:
            path = Path(
                self._api.hf_hub_download(
                    self._repository.name,
                    MANIFEST,
                    repo_type=self._repository.type,
                    revision=head,
                    local_dir=folder,
                )
            )
            return Manifest.from_bytes(path.read_bytes(), str(path)).identity.fingerprint

    def _list_stale(self, there: dict[str, RemoteFile]) -> list[str]:
        """List weights and templates of an earlier student that this one does not have."""
        if self._shipment.fingerprint:
            return []
        return sorted(
            name for name in set(there) - set(self._shipment.files) if name.endswith(_STALE)
        )


def measure_content(content: Path | bytes) -> int:
    """The bytes of a file, or of its content."""
    return len(content) if isinstance(content, bytes) else content.stat().st_size


def _cut(items: Sequence[Any], size: int) -> Iterator[Sequence[Any]]:
    for start in range(0, len(items), size):
        yield items[start : start + size]
