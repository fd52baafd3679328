"""The mirror of one cache: what the bucket holds, as a folder of this disk.

    bucket                                 this disk
    {fingerprint}/manifest.json            manifest.json
    {fingerprint}/seals/000007.json        seals/000007.json
    {fingerprint}/shards/000007.{digest}/  shards/000007/

A bucket has no rename, so a shard is published in two steps. First its files are put below a name
that ends with the digest of its seal: writers with other bytes write other names, and those with
the same bytes write the same. Then the seal is put on condition that there is none: one writer
wins, and the others take its shard for theirs. The manifest is put last, on the same condition.
Seals and manifest have the bytes that they have in a folder.

The folder may lack files: they are fetched when they are read, and compared with their sha256.
"""

from __future__ import annotations

import functools
import hashlib
import os
import re
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from threading import Lock
from typing import NamedTuple, TypeVar

from cache.disk import list_file_sizes, make_folder, remove_path
from cache.errors import CacheCorrupt, CacheIncomplete, CacheNotFound, StoreError
from cache.reading.file_reads import DiskReads
from cache.remote.address import Binding, read_binding
from cache.remote.bucket import open_bucket
from cache.remote.room import MirrorRoom, write_copy
from cache.remote.uses import USES
from cache.shard import RECAPTURE_REMEDY, Seal, SealedFile
from cache.shards.names import MANIFEST, TAIL_SUMS, locate_seal

Found = TypeVar("Found")

_SHARD_SEAL = re.compile(r"/seals/([0-9]+)\.json$")
#: Digits of a seal's digest in the names of its files.
DIGEST_DIGITS = 32
#: Objects that one process gets or puts at the same time.
PARALLEL = 8
#: Seconds after which a shard is brought ahead again: it may have left the disk.
_AGAIN_SECONDS = 60.0
#: Times that a manifest is written anew because another writer was faster.
_ATTEMPTS = 5


class _Coming(NamedTuple):
    """Files of a shard that are brought ahead, and since when."""

    work: Future[None]
    begun: float


def open_mirror(folder: Path) -> Mirror | None:
    """Return the mirror of the cache in ``folder``; None if the folder is all there is."""
    binding = read_binding(folder.parent)
    return None if binding is None else Mirror(folder, binding)


@functools.lru_cache(maxsize=1)
def _open_pool(_process: int) -> ThreadPoolExecutor:
    """Make the threads of this process that get and put; a fork makes its own."""
    return ThreadPoolExecutor(PARALLEL, thread_name_prefix="bucket")


class Mirror:
    """One cache in a bucket, and its folder on this disk. Threads may share it."""

    def __init__(self, folder: Path, binding: Binding) -> None:
        self.folder = folder
        self.address = binding.address
        self.bucket = open_bucket(binding.address)
        self.room = MirrorRoom(folder.parent, binding.mirror_bytes)
        #: Seconds of putting objects.
        self.seconds = 0.0
        # Seals that this process has put or seen: nobody replaces the seal of a whole shard.
        self._known: set[str] = set()
        self._coming: dict[str, _Coming] = {}
        self._lock = Lock()

    def __str__(self) -> str:
        return f"{self.address}/{self.folder.name}"

    # ------------------------------------------------------------------ reading

    def get_manifest(self) -> bytes | None:
        """Return the bytes of the manifest, which are kept in the folder; None without one.

        Raises ``CacheNotFound`` if the bucket has no object of the cache.
        """
        try:
            data = self.bucket.get(self._name(MANIFEST))
        except FileNotFoundError:
            if not next(self.bucket.walk(self.folder.name), None):
                raise CacheNotFound(
                    f"No cache at {self}.", "See `kd cache ls`, or capture the cache."
                ) from None
            return None
        make_folder(self.folder)
        path = self.folder / MANIFEST
        if not path.is_file() or path.read_bytes() != data:
            write_copy(path, data)
        return data

    def get_seal(self, name: str) -> bytes | None:
        """Return the seal of a folder of arrays in the bucket, and keep it; None without one."""
        path = self.folder / locate_seal(name)
        if name in self._known and path.is_file():
            return path.read_bytes()
        try:
            data = self.bucket.get(self._name(locate_seal(name)))
        except FileNotFoundError:
            remove_path(path)
            return None
        self._keep_seal(name, data)
        return data

    def open_folder(self, name: str, digest: str | None = None, whole: bool = False) -> None:
        """Make a folder of arrays ready for reading: its seal now, its files when they are read.

        A seal with ``digest`` that the folder has is not fetched again. ``whole``: all files come
        now.
        """
        path = self.folder / locate_seal(name)
        known = path.read_bytes() if path.is_file() else None
        if known is None or digest is None or hashlib.sha256(known).hexdigest() != digest:
            known = self.get_seal(name)
        if known is None:
            self._require_cache()
            raise CacheIncomplete(
                f"{self}/{locate_seal(name)} is missing, but the manifest names it.",
                RECAPTURE_REMEDY,
            )
        folder = self.folder / name
        if not folder.is_dir():
            make_folder(folder)
        self.room.touch(folder)
        if whole:
            coming = self._coming.get(name)
            if coming and not coming.work.cancel():
                coming.work.result()
            seal = Seal.from_bytes(known, str(path))
            try:
                self._each(
                    lambda file: self.fetch(f"{name}/{file}", seal.files[file], seal.digest),
                    self._list_missing(name, seal),
                )
            except ValueError as error:
                raise CacheCorrupt(f"{error}.", RECAPTURE_REMEDY) from error

    def prefetch(self, name: str, digest: str) -> None:
        """Begin to bring a shard whole, unless that has begun; what fails is tried when read."""
        now = time.monotonic()
        with self._lock:
            known = self._coming.get(name)
            if known and (not known.work.done() or now - known.begun < _AGAIN_SECONDS):
                return
            work = _open_pool(os.getpid()).submit(self._prefetch_shard, name, digest)
            self._coming[name] = _Coming(work, now)

    def _prefetch_shard(self, name: str, digest: str) -> None:
        # The reader meets the error and reports it.
        with suppress(Exception):
            self.open_folder(name, digest)
            seal = Seal.from_bytes((self.folder / locate_seal(name)).read_bytes(), name)
            for file in self._list_missing(name, seal):
                self.fetch(f"{name}/{file}", seal.files[file], seal.digest)

    def _list_missing(self, name: str, seal: Seal) -> list[str]:
        """List the files of ``seal`` that the folder lacks."""
        present = list_file_sizes(self.folder / name)
        return [file for file, about in seal.files.items() if present.get(file) != about.bytes]

    def fetch(self, path: str, sealed: SealedFile, digest: str | None = None) -> bytes:
        """Get one file of a sealed folder, compare it with its sha256, and keep it.

        Raises ``ValueError`` if it has other bytes, ``CacheNotFound`` if the cache is gone.
        """
        name, file = split_path(path)
        if digest is None:
            digest = hashlib.sha256((self.folder / locate_seal(name)).read_bytes()).hexdigest()
        try:
            data = self.bucket.get(self._name(f"{name_data(name, digest)}/{file}"))
        except FileNotFoundError:
            self._require_cache()
            raise ValueError(f"{self}/{path} is missing in the bucket") from None
        if len(data) != sealed.bytes or hashlib.sha256(data).hexdigest() != sealed.sha256:
            raise ValueError(f"{self}/{path} differs from its sha256")
        self.room.keep(self.folder / path, data)
        return data

    def require_seals(self, names: set[str]) -> None:
        """Raise ``CacheIncomplete`` unless the bucket has a seal of each folder of ``names``."""
        wanted = {self._name(locate_seal(name)) for name in names}
        for each in self.bucket.walk(self._name("seals")):
            wanted.discard(each.name)
        if wanted:
            raise CacheIncomplete(
                f"{self.address}/{min(wanted)} is missing, but the manifest names it.",
                RECAPTURE_REMEDY,
            )

    def fetch_pieces(self, pieces: dict[str, str]) -> None:
        """Get the pieces of a manifest that the folder lacks; ``pieces`` maps names to sha256."""

        def get(name: str) -> None:
            path = self.folder / name
            if path.is_file() and hashlib.sha256(path.read_bytes()).hexdigest() == pieces[name]:
                return
            data = self.bucket.get(self._name(name_data(name, pieces[name])))
            make_folder(path.parent)
            write_copy(path, data)

        try:
            self._each(get, pieces)
        except FileNotFoundError as error:
            raise CacheCorrupt(
                f"A piece of the manifest of {self} is missing.", RECAPTURE_REMEDY
            ) from error

    def _require_cache(self) -> None:
        """Raise ``CacheNotFound`` if the cache was removed from the bucket."""
        if not next(self.bucket.walk(self.folder.name), None):
            raise CacheNotFound(
                f"The cache {self} was removed while it was in use.", "Capture the cache again."
            )

    # ------------------------------------------------------------------ writing

    def publish(self, name: str, seal: Seal) -> Seal:
        """Put the folder ``name`` and its seal; return the seal that is valid from now on.

        It is another writer's if that one was first: then this disk drops its own files. A seal
        whose files are damaged is replaced, and the manifest goes before it.
        """
        began = time.perf_counter()
        data = seal.to_bytes()
        target = name_data(name, seal.digest)
        self._each(lambda file: self._put(f"{target}/{file}", f"{name}/{file}"), seal.files)
        winner = self._put_seal(name, data)
        self.seconds += time.perf_counter() - began
        self._keep_seal(name, winner)
        self.room.grow(sum(file.bytes for file in seal.files.values()))
        return Seal.from_bytes(winner, f"{self}/{locate_seal(name)}")

    def _put_seal(self, name: str, data: bytes) -> bytes:
        """Put a seal; return the bytes of the one that is in the bucket afterwards."""
        key = self._name(locate_seal(name))
        for _ in range(_ATTEMPTS):
            if self.bucket.create(key, data):
                return data
            found = self.bucket.find_tagged(key)
            if found is None:
                continue
            # Ours, whose answer was lost, or one with the same bytes.
            if found.data == data:
                return data
            theirs = _parse_seal(found.data)
            if theirs is not None and self.is_whole(name, theirs):
                return found.data
            self.bucket.delete([self._name(MANIFEST)])
            if self.bucket.replace(key, data, found.tag):
                return data
        raise StoreError(f"{self}/{locate_seal(name)} changes all the time.", "Run the job again.")

    def publish_pieces(self, pieces: dict[str, str]) -> None:
        """Put the pieces of a manifest; ``pieces`` maps their names to their sha256."""
        self._each(lambda name: self._put(name_data(name, pieces[name]), name), pieces)

    def _put(self, name: str, path: str) -> None:
        """Put the file ``path`` of the folder as the object ``name`` of the cache."""
        self.bucket.put(self._name(name), (self.folder / path).read_bytes())

    def change_manifest(self, change: Callable[[bytes | None], bytes]) -> bytes:
        """Replace the manifest by ``change`` of it; return what is in the bucket afterwards.

        Others may change it at the same time. ``change`` gets None where there is no manifest.
        """
        key = self._name(MANIFEST)
        for _ in range(_ATTEMPTS):
            found = self.bucket.find_tagged(key)
            wanted = change(found.data if found else None)
            if self.bucket.replace_found(key, wanted, found):
                return wanted
        raise StoreError(f"{self}/{MANIFEST} changes all the time.", "Run the job again.")

    def is_whole(self, name: str, seal: Seal) -> bool:
        """Return whether every file of ``seal`` is in the bucket with its size; read no content."""
        found = self._list_files(name, seal.digest)
        return all(found.get(file) == about.bytes for file, about in seal.files.items())

    def find_problems(self, name: str, seal: Seal) -> list[str]:
        """Read every byte in the bucket, as ``Seal.find_problems`` does in a folder."""
        found = self._list_files(name, seal.digest)

        def hash_object(file: str) -> str:
            data = self.bucket.get(self._name(f"{name_data(name, seal.digest)}/{file}"))
            return hashlib.sha256(data).hexdigest()

        def check(file: str) -> str:
            return seal.check_file(file, found.get(file), lambda: hash_object(file))

        return [line for line in self._each(check, seal.files) if line]

    def _list_files(self, name: str, digest: str) -> dict[str, int]:
        prefix = self._name(name_data(name, digest))
        return {
            each.name.removeprefix(f"{prefix}/"): each.bytes for each in self.bucket.walk(prefix)
        }

    def drop(self, folder: str) -> None:
        """Delete what the bucket holds below ``folder`` of the cache."""
        self.bucket.delete(each.name for each in self.bucket.walk(self._name(folder)))

    def measure(self) -> tuple[int, int]:
        """Measure the bytes of all objects of the cache, and count the shards that are sealed."""
        size = sealed = 0
        for each in self.bucket.walk(self.folder.name):
            size += each.bytes
            sealed += bool(_SHARD_SEAL.search(each.name))
        return size, sealed

    def list_names(self) -> Iterator[str]:
        """Yield the names of all objects of the cache but those of its users."""
        for each in self.bucket.walk(self.folder.name):
            name = each.name.removeprefix(self._name(""))
            if not name.startswith(f"{USES}/"):
                yield name

    def find_sealed(self) -> set[int]:
        """Find the numbers of the shards that have a seal in the bucket."""
        names = (each.name for each in self.bucket.walk(self._name("seals")))
        return {int(found[1]) for name in names if (found := _SHARD_SEAL.search(name))}

    @property
    def modified(self) -> float:
        """The time of the manifest by the server's clock, in seconds since 1970."""
        return self.bucket.find(self._name(MANIFEST)).modified

    # ------------------------------------------------------------------ names

    def _name(self, path: str) -> str:
        return f"{self.folder.name}/{path}"

    def _keep_seal(self, name: str, data: bytes) -> None:
        """Write a seal into the folder, and remove files that another seal describes."""
        path = self.folder / locate_seal(name)
        with self._lock:  # the thread that reads ahead does the same
            if not path.is_file() or path.read_bytes() != data:
                folder = self.folder / name
                # A folder that was just written has no seal yet: it stays if it is the sealed one.
                found = None if path.is_file() else _parse_seal(data)
                if folder.is_dir() and (found is None or found.find_problems(folder)):
                    remove_path(folder)
                write_copy(path, data)
            self._known.add(name)

    def _each(self, work: Callable[[str], Found], names: Iterable[str]) -> list[Found]:
        """Do ``work`` for each name, some at a time; raises the first error."""
        pool = _open_pool(os.getpid())
        futures = [pool.submit(work, name) for name in names]
        try:
            return [future.result() for future in futures]
        finally:
            for future in futures:
                future.cancel()


class MirrorReads(DiskReads):
    """Reads files of a mirror, and gets those that it lacks from the bucket."""

    def __init__(self, mirror: Mirror) -> None:
        super().__init__()
        self._mirror = mirror
        self._root = f"{mirror.folder}{os.sep}"

    def read(self, path: Path, sealed: SealedFile | None = None) -> bytes:
        """Return the content of the file; raises as ``Mirror.fetch`` does."""
        try:
            return super().read(path)
        except FileNotFoundError:
            if sealed is None:
                raise
            return self.restore(path, sealed)

    def restore(self, path: Path, sealed: SealedFile) -> bytes:
        """Get a file that the mirror lacks, or has damaged."""
        began = time.perf_counter()
        data = self._mirror.fetch(str(path).removeprefix(self._root), sealed)
        self.count(len(data), time.perf_counter() - began)
        return data


def name_data(name: str, digest: str) -> str:
    """Return the name in the bucket of what has ``digest``: the files of a seal, or a piece.

    Another writer's may have another digest.
    """
    return f"{name}.{digest[:DIGEST_DIGITS]}"


def split_path(path: str) -> tuple[str, str]:
    """Split the path of a file into its sealed folder and its name in that."""
    parts = Path(path).parts
    count = 2 if parts[0] in ("shards", TAIL_SUMS) else 1
    return "/".join(parts[:count]), "/".join(parts[count:])


def _parse_seal(data: bytes) -> Seal | None:
    try:
        return Seal.from_bytes(data, "seal")
    except CacheCorrupt:
        return None
