"""Copies of objects of a bucket on this disk: each file whole, and all of them bounded.

    downloads/{name}/       the files of one address, in one version: its name has a digest of them
    downloads/{name}.used   locked by each process that reads them; its time is that of the last use
    downloads/{name}.lock   locked by the process that downloads

A version is what a listing shows: names, sizes and ETags. An address whose objects have changed is
another version, so that files in use stay as they are. A file that was cut goes on where it ended.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple

from cache import disk
from cache.errors import StoreError
from cache.remote.bucket import Bucket, StoredObject
from kd.buckets.counting import DownloadCount, Report, follow_download

#: Bytes of one request, and files that come at the same time.
_PART = 16 << 20
_PARALLEL = 8


class Listing(NamedTuple):
    """What a bucket holds at an address: the objects by their names below it.

    The object of an address that is a file has the file's own name.
    """

    url: str
    bucket: Bucket
    objects: Mapping[str, StoredObject]

    @property
    def name(self) -> str:
        """The name of the folder of this version: a readable part, and digests."""
        readable = re.sub(r"[^A-Za-z0-9.]+", "-", self.url).strip("-.")[-48:]
        content = sorted((name, each.bytes, each.tag) for name, each in self.objects.items())
        digest = hashlib.sha256(json.dumps([self.url, content]).encode()).hexdigest()
        return f"{readable}-{digest[:16]}"


@dataclass(frozen=True)
class Downloads:
    """The folder ``root`` of copies, of at most ``limit`` bytes beside those in use."""

    root: Path
    limit: int

    def hold(self, listing: Listing) -> int:
        """Let the files of a version stay until the returned handle is closed."""
        path = self.root / f"{listing.name}.used"
        with disk.storage_errors(self.root):
            disk.make_folder(self.root)
            handle = disk.share_lock(path)  # a removal holds it for the time of a rename only
            os.utime(handle)
            return handle

    def download(self, listing: Listing, names: list[str], report: Report) -> Path:
        """Download the files ``names`` that are not here; return the folder. Hold it before.

        Raises ``StoreError`` if the bucket does not give one as it was listed.
        """
        folder = self.root / listing.name
        with (
            disk.storage_errors(folder),
            disk.locked(
                self.root / f"{listing.name}.lock",
                lambda: report(f"waiting for another process that downloads {listing.url}"),
            ),
        ):
            disk.make_folder(folder)
            present = disk.list_file_sizes(folder)
            missing = [name for name in names if present.get(name) != listing.objects[name].bytes]
            if missing:
                download(listing, folder, missing, report)
        self.shrink(keep=listing.name)
        return folder

    def shrink(self, keep: str = "") -> None:
        """Remove the versions that were used the longest ago, until the rest is within the limit.

        Those in use stay, and the one named ``keep``.
        """
        used = sorted(
            (path.stat().st_mtime, path.stem, disk.sum_file_sizes(path.with_suffix("")))
            for path in self.root.glob("*.used")
        )
        left = sum(size for _, _, size in used)
        for _, name, size in used:
            if left <= self.limit:
                return
            if name != keep and self._remove(name):
                left -= size

    def _remove(self, name: str) -> bool:
        """Remove a version unless somebody uses it; return whether it is gone."""
        path = self.root / f"{name}.used"
        with suppress(FileNotFoundError), path.open("rb+") as file:
            if not disk.try_lock(file) or not disk.is_file_at(file.fileno(), path):
                return False
            folder = self.root / name
            aside = self.root / f"{disk.TEMPORARY_PREFIX}{os.getpid()}-{name}"
            if folder.exists():
                folder.rename(aside)
            (self.root / f"{name}.lock").unlink(missing_ok=True)
            path.unlink()
            disk.remove_path(aside)
        return True


def download(listing: Listing, folder: Path, names: list[str], report: Report) -> None:
    """Download files, some at a time; the first error ends all."""
    count = DownloadCount(listing.url, sum(listing.objects[name].bytes for name in names))
    tasks = [partial(_download_file, listing, name, folder / name, count.add) for name in names]
    follow_download(count, tasks, report, _PARALLEL)


def _download_file(listing: Listing, name: str, path: Path, count: Callable[[int], None]) -> None:
    """Download one file in parts, each on condition that the object is still the listed one."""
    about = listing.objects[name]
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"{disk.TEMPORARY_PREFIX}{path.name}")
    with partial.open("ab") as file:
        at = file.tell()
        if at > about.bytes:
            file.truncate(0)
            at = 0
        while at < about.bytes:
            stop = min(at + _PART, about.bytes)
            data = listing.bucket.get_part(about.name, at, stop, about.tag)
            if len(data) != stop - at:
                raise StoreError(
                    f"{listing.bucket.address}/{about.name}: expected {stop - at} bytes, "
                    f"got {len(data)}.",
                    "Run the job again.",
                )
            file.write(data)
            # On the disk before more comes: after a power cut the file has no holes.
            file.flush()
            os.fsync(file.fileno())
            at = stop
            count(len(data))
    partial.replace(path)
