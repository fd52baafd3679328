"""The files of one run in a bucket: another machine goes on with it, or shows its results.

    runs/{id}/checkpoints/step-00000120.{digest}/   a checkpoint: state.json is put last
    runs/{id}/files.{digest}/                       results: the student, reports, cache.json
    runs/{id}/files.json                            their names, folders, bytes and sha256; put last

A bucket has no rename. So every version is put below a name of its own, and one small object that
is put last makes it count: two processes that write the same run never mix their files. The digest
of a checkpoint is that of its state.json, and the digest of results that of files.json.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from cache.disk import hash_file
from cache.errors import CacheCorrupt, StoreError
from cache.json_object import Json
from cache.manifest import verify_json
from cache.remote.address import StoreAddress
from cache.remote.bucket import Bucket, StoredObject, Tagged, open_bucket
from kd.buckets.counting import Report
from kd.buckets.downloads import Listing, download

#: The address of the files of the run that this process works on; a worker sets it.
RUN_STORE_VARIABLE = "KD_RUN_STORE"
#: The folder of all runs in a bucket.
RUNS = "runs"
#: The file of a checkpoint that names the others, and the history that is kept beside it.
STATE = "state.json"
HISTORY = "metrics.jsonl"
INDEX = "files.json"
RESULTS = "files"
_FORMAT = 1
_DIGITS = 32
#: Times that the list of results is written anew because another process was faster.
_ATTEMPTS = 5
_CHECKPOINT = re.compile(r"checkpoints/(?P<name>step-(?P<step>\d{8})\.[0-9a-f]{32})/(?P<file>.+)")
#: Seconds for which files without the one that is put last may still be on their way.
_UNFINISHED_SECONDS = 3600.0


class StoredCheckpoint(NamedTuple):
    """A checkpoint in a bucket: its step, the name of its folder, and its files by name.

    ``modified`` is when its state.json was put, in seconds since 1970 by the server's clock.
    """

    step: int
    name: str
    modified: float
    files: Mapping[str, StoredObject]


class StoredFile(NamedTuple):
    """A file of the results: the name of its object, its size and sha256.

    ``modified`` is when the machine that wrote it did so, in seconds since 1970.
    """

    object: str
    bytes: int
    sha256: str
    modified: float


#: The fields of a file in the list of results, besides its folder.
_ABOUT = StoredFile._fields[1:]


@dataclass(frozen=True)
class StoredRun:
    """The files of the run whose objects have names that begin with ``folder``."""

    bucket: Bucket
    folder: str

    def __str__(self) -> str:
        return f"{self.bucket.address}/{self.folder}"

    # ------------------------------------------------------------------ checkpoints

    def put_checkpoint(self, folder: Path, history: bytes = b"") -> None:
        """Put the checkpoint in ``folder``, and the history up to it; its state.json comes last."""
        self.put_parts(folder)
        self.complete_checkpoint(folder, history)

    def put_parts(self, folder: Path) -> None:
        """Put the files of the checkpoint in ``folder`` but state.json; others may put more."""
        place = self._locate_checkpoint(folder.name, (folder / STATE).read_bytes())
        for path in sorted(folder.iterdir()):
            if path.name != STATE:
                self.bucket.put(f"{place}/{path.name}", path)

    def complete_checkpoint(self, folder: Path, history: bytes) -> None:
        """Put the history and state.json of the checkpoint in ``folder``, whose parts are put."""
        state = (folder / STATE).read_bytes()
        place = self._locate_checkpoint(folder.name, state)
        if history:
            self.bucket.put(f"{place}/{HISTORY}", history)
        self.bucket.put(f"{place}/{STATE}", state)

    def has_checkpoint(self, folder: Path) -> bool:
        """Return whether the bucket has the checkpoint in ``folder``, whole."""
        place = self._locate_checkpoint(folder.name, (folder / STATE).read_bytes())
        return any(each.name == f"{place}/{STATE}" for each in self.bucket.walk(place))

    def _locate_checkpoint(self, name: str, state: bytes) -> str:
        return f"{self.folder}/checkpoints/{name}.{hashlib.sha256(state).hexdigest()[:_DIGITS]}"

    def list_checkpoints(self) -> list[StoredCheckpoint]:
        """List the checkpoints by step; of a step that was put twice the newest comes last."""
        whole = [
            StoredCheckpoint(_read_step(name), name, files[STATE].modified, files)
            for name, files in self._group_checkpoints().items()
            if STATE in files
        ]
        return sorted(whole, key=lambda each: (each.step, each.modified))

    def _group_checkpoints(self) -> dict[str, dict[str, StoredObject]]:
        found: dict[str, dict[str, StoredObject]] = defaultdict(dict)
        for each in self.bucket.walk(f"{self.folder}/checkpoints"):
            if parts := _CHECKPOINT.fullmatch(each.name.removeprefix(f"{self.folder}/")):
                found[parts["name"]][parts["file"]] = each
        return found

    def prune_checkpoints(self, limit: int, keep_step: int | None) -> None:
        """Delete the oldest until ``limit`` are left, but never the newest nor ``keep_step``'s.

        What a process that died left behind goes too.
        """
        whole = self.list_checkpoints()
        newest = {each.step: each for each in whole}
        spare = [step for step in sorted(newest)[:-1] if step != keep_step]
        dropped = set(spare[: max(len(newest) - limit, 0)])
        gone = [each for each in whole if each.step in dropped or each is not newest[each.step]]
        for each in gone:
            self._drop(each.files)
        last = max((each.modified for each in whole), default=0.0) - _UNFINISHED_SECONDS
        for files in self._group_checkpoints().values():
            if STATE not in files and all(each.modified < last for each in files.values()):
                self._drop(files)

    def _drop(self, files: Mapping[str, StoredObject]) -> None:
        # The one that makes the others count goes first.
        if STATE in files:
            self.bucket.delete([files[STATE].name])
        self.bucket.delete(each.name for each in files.values())

    def fetch_checkpoint(self, found: StoredCheckpoint, folder: Path, report: Report) -> None:
        """Download the files of a checkpoint into ``folder``, and compare them with their sha256.

        Raises ``CacheCorrupt`` if one is missing or has other bytes.
        """
        names = [name for name in found.files if name != HISTORY]
        download(Listing(f"{self}/{found.name}", self.bucket, found.files), folder, names, report)
        state = verify_json((folder / STATE).read_bytes(), f"{self}/{found.name}/{STATE}")
        for name, digest in state["sha256"].items():
            if not (folder / name).is_file() or hash_file(folder / name) != digest:
                detail = f"{self}/{found.name}/{name} differs from what was saved."
                remedy = f"Delete the checkpoint {self}/{found.name}: an older one is taken."
                raise CacheCorrupt(detail, remedy)

    def read_history(self, found: StoredCheckpoint) -> bytes:
        """Read the history of the run up to a checkpoint; empty where there is none."""
        about = found.files.get(HISTORY)
        return b"" if about is None else self.bucket.get(about.name)

    # ------------------------------------------------------------------ results

    def publish_files(self, run_dir: Path, names: Iterable[str], report: Report) -> None:
        """Put the files ``names`` of the run folder, in place of earlier ones and their folders.

        Other results stay: a process that ends late, after another one went on, has fewer.
        """
        found = {name: _describe_file(run_dir / name) for name in sorted(names)}
        digest = hashlib.sha256(json.dumps(found, sort_keys=True).encode()).hexdigest()
        place = f"{RESULTS}.{digest[:_DIGITS]}"
        for name in found:
            report(f"putting {name} into {self}")
            self.bucket.put(f"{self.folder}/{place}/{name}", run_dir / name)
        new = {name: each | {"folder": place} for name, each in found.items()}
        replaced = {name.partition("/")[0] for name in new}
        for _ in range(_ATTEMPTS):
            before = self.bucket.find_tagged(f"{self.folder}/{INDEX}")
            old = {} if before is None else self._parse_index(before.data)
            kept = {name: old[name] for name in old if name.partition("/")[0] not in replaced}
            if self._replace_index(before, kept | new):
                gone = {self._locate(old, name) for name in old}
                gone -= {self._locate(kept | new, name) for name in kept | new}
                self.bucket.delete(sorted(gone))
                return
        raise StoreError(f"{self}/{INDEX} changes all the time.", "Run the job again.")

    def _replace_index(self, before: Tagged | None, files: dict[str, Json]) -> bool:
        """Put the index, unless another process has put one since ``before`` was read."""
        data = json.dumps({"format": _FORMAT, "files": files}, indent=1, sort_keys=True).encode()
        return self.bucket.replace_found(f"{self.folder}/{INDEX}", data, before)

    def read_files(self) -> dict[str, StoredFile]:
        """Read the list of the results, by name; empty where there are none.

        Raises ``StoreError`` for a list that cannot be read.
        """
        found = self.bucket.find_tagged(f"{self.folder}/{INDEX}")
        files = {} if found is None else self._parse_index(found.data)
        return {
            name: StoredFile(self._locate(files, name), *(each[key] for key in _ABOUT))
            for name, each in files.items()
        }

    def _parse_index(self, data: bytes) -> dict[str, Json]:
        try:
            files = json.loads(data)["files"]
            if all({"folder", *_ABOUT} <= set(each) for each in files.values()):
                return dict(files)
            problem = "a file lacks a field"
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            problem = repr(error)
        detail = f"{self}/{INDEX} cannot be read: {problem}."
        raise StoreError(detail, "Delete it, and run the job again.")

    def _locate(self, files: Mapping[str, Json], name: str) -> str:
        return f"{self.folder}/{files[name]['folder']}/{name}"

    def remove(self) -> None:
        """Remove all files of the run, those first that make others count."""
        objects = list(self.bucket.walk(self.folder))
        last = [each.name for each in objects if each.name.endswith((f"/{INDEX}", f"/{STATE}"))]
        self.bucket.delete(last)
        self.bucket.delete(each.name for each in objects)


def open_stored_run(url: str, patient: bool = True) -> StoredRun:
    """Open the run at the address ``url``, whose last part is the id of the run.

    One that is not ``patient`` gives up soon where the bucket does not answer.
    """
    address = StoreAddress.parse(url)
    above, _, name = address.prefix.rpartition("/")
    # The bucket is that of all runs, so that its connections are kept.
    return StoredRun(open_bucket(replace(address, prefix=above), patient), name)


def find_own_run(run_dir: Path) -> StoredRun | None:
    """Return where the files of the run in ``run_dir`` are kept besides; None for no such place.

    A run inside of another one, such as that of a baseline, has none.
    """
    url = os.environ.get(RUN_STORE_VARIABLE)
    if not url or url.rstrip("/").rpartition("/")[2] != run_dir.name:
        return None
    return open_stored_run(url)


def find_other_run(name: str) -> StoredRun | None:
    """Return where the files of the run ``name`` are, beside those of this process's run."""
    url = os.environ.get(RUN_STORE_VARIABLE)
    return open_stored_run(f"{url.rstrip('/').rpartition('/')[0]}/{name}") if url else None


def _read_step(name: str) -> int:
    return int(name.partition(".")[0].removeprefix("step-"))


def _describe_file(path: Path) -> dict[str, int | float | str]:
    about = path.stat()
    return {"bytes": about.st_size, "sha256": hash_file(path), "modified": about.st_mtime}
