"""The folder of one cache: capture it, open it, verify it, list what there is.

with capture(root, identity) as writer:             one writer at a time; others wait
    for index in writer.missing_shards():           sealed shards are checked, then skipped
        writer.write_shard(index, sequences, records)
    manifest = writer.finish(provenance)

store = open_cache(root / identity.fingerprint, identity)
sequences, records = store.read([7, 0, 3])          in any order
"""

from __future__ import annotations

import os
import re
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from threading import Lock
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cache.disk import (
    TEMPORARY,
    files_below,
    locked,
    make_folder,
    publish_folder,
    remove,
    storage_errors,
    write_file,
)
from cache.errors import CacheCorrupt, CacheError, CacheIncomplete, CacheMismatch, CacheNotFound
from cache.layout import Arrays, from_arrays
from cache.manifest import (
    CacheIdentity,
    FidelityRow,
    FolderEntry,
    Manifest,
    Provenance,
    ShardEntry,
    canonical_json,
    differences,
)
from cache.records import Records, Sequences
from cache.shard import PER_SEQUENCE, Folder, Seal, Shard, shard_arrays, write_arrays

MANIFEST = "manifest.json"
GROUP = "shards/zarr.json"
HEAD = "head"
#: The metadata of the Zarr group that holds the shards.
_GROUP_METADATA = canonical_json({"attributes": {}, "node_type": "group", "zarr_format": 3})
_REMEDY = "Run the job again: damaged shards are captured anew."
_FINGERPRINT = re.compile(r"[0-9a-f]{32}")


@contextmanager
def capture(root: Path, identity: CacheIdentity, waiting: Callable[[], None] | None = None) -> Iterator[CacheWriter]:
    """Begin or resume the cache of ``identity`` below ``root``, as its only writer.

    While another process captures the same cache, ``waiting`` is called five times a second; it may raise to give up.
    Raises ``StorageError`` where the disk is full or the folder is not writable.
    """
    with storage_errors(root):
        make_folder(root)
    with locked(root / f"{identity.fingerprint}.lock", waiting):
        yield CacheWriter(root / identity.fingerprint, identity)


class CacheWriter:
    """Writes shards, each published whole or not at all. Made by ``capture``, which holds the lock."""

    def __init__(self, folder: Path, identity: CacheIdentity) -> None:
        self.folder = folder
        self.identity = identity
        self.codec = identity.record_codec()
        with storage_errors(folder):
            self._prepare()

    def missing_shards(self) -> list[int]:
        """The shards still to be written; sealed ones are read in full and count only if every byte is as sealed."""
        return [index for index in range(self.identity.shard_count) if not self._sound(index)]

    def write_shard(self, index: int, sequences: Sequences, records: Records) -> int:
        """Write and seal shard ``index``, which holds the sequences ``identity.shard_range(index)``; returns its bytes.

        Raises ``ValueError`` where the data does not fit the identity, ``StorageError`` where the disk refuses.
        """
        self._require_fit(index, sequences, records)
        arrays = shard_arrays(sequences, records, self.codec)
        return self._publish(_shard_name(index), arrays, lambda folder: Seal.of(folder, sequences, records)).bytes

    def write_head(self, arrays: Arrays) -> None:
        """Write and seal the teacher's LM head, which a hidden cache keeps once; one that lies sealed is left alone."""
        seal = self._seal(HEAD)
        if seal is None or seal.problems(self.folder / HEAD):
            self._publish(HEAD, arrays, Seal.of_folder)

    def _publish(self, name: str, arrays: Arrays, sealed: Callable[[Path], Seal]) -> Seal:
        """Write a folder of arrays whole or not at all, then its seal; until then the cache is incomplete."""
        temporary = self.folder / f"{TEMPORARY}{name.replace('/', '-')}"
        with storage_errors(self.folder):
            try:
                remove(self.folder / MANIFEST)
                remove(_seal_file(self.folder, name))
                write_arrays(temporary, arrays)
                seal = sealed(temporary)
                publish_folder(temporary, self.folder / name)
            finally:
                remove(temporary)
            write_file(_seal_file(self.folder, name), seal.to_bytes())
        return seal

    def sealed_shape(self, name: str) -> tuple[int, ...] | None:
        """The shape of array ``name`` in the first sealed shard; None where no shard is sealed."""
        for index in range(self.identity.shard_count):
            if (seal := self._shard_seal(index)) is not None:
                return Folder(self.folder / _shard_name(index), seal).shape(name)
        return None

    def finish(self, provenance: Provenance, fidelity: tuple[FidelityRow, ...] = ()) -> Manifest:
        """Write the manifest, last; raises ``CacheIncomplete`` if a shard, or a needed head, has not been sealed."""
        manifest = self._manifest(provenance, fidelity)
        with storage_errors(self.folder):
            write_file(self.folder / MANIFEST, manifest.to_bytes())
        return manifest

    def readable(self) -> Cache:
        """What is sealed, to be looked at before ``finish``; raises ``CacheIncomplete`` as that does."""
        return Cache(self.folder, self._manifest(Provenance(), ()), 1 << 29)

    def _manifest(self, provenance: Provenance, fidelity: tuple[FidelityRow, ...]) -> Manifest:
        entries = [self._entry(index) for index in range(self.identity.shard_count)]
        missing = [index for index, entry in enumerate(entries) if entry is None]
        if missing:
            detail = (
                f"{self.folder}: {len(missing)} of {len(entries)} shards are not sealed, the first is {missing[0]}."
            )
            raise CacheIncomplete(detail, "Run the job again: it goes on from the sealed shards.")
        seal = self._seal(HEAD)
        if seal is None and self.identity.codec.profile == "hidden":
            raise CacheIncomplete(f"{self.folder}: the teacher's LM head is not sealed.", "Run the job again.")
        head = FolderEntry() if seal is None else FolderEntry(seal.bytes, seal.digest)
        return Manifest(self.identity, provenance, tuple(entry for entry in entries if entry), head, fidelity)

    def _prepare(self) -> None:
        for name in ("shards", "seals"):
            make_folder(self.folder / name)
        self._sweep()
        group = self.folder / GROUP
        if not group.exists() or group.read_bytes() != _GROUP_METADATA:
            write_file(group, _GROUP_METADATA)

    def _sweep(self) -> None:
        """Delete what an interrupted writer left behind."""
        for folder in (self.folder, self.folder / "shards", self.folder / "seals"):
            for leftover in folder.glob(f"{TEMPORARY}*"):
                remove(leftover)

    def _sound(self, index: int) -> bool:
        seal = self._shard_seal(index)
        return seal is not None and not seal.problems(self.folder / _shard_name(index))

    def _entry(self, index: int) -> ShardEntry | None:
        seal = self._shard_seal(index)
        return seal.entry() if seal is not None else None

    def _shard_seal(self, index: int) -> Seal | None:
        seal = self._seal(_shard_name(index))
        return seal if seal is not None and seal.sequences == len(self.identity.shard_range(index)) else None

    def _seal(self, name: str) -> Seal | None:
        path = _seal_file(self.folder, name)
        try:
            return Seal.from_bytes(path.read_bytes(), str(path))
        except (FileNotFoundError, CacheCorrupt):
            return None

    def _require_fit(self, index: int, sequences: Sequences, records: Records) -> None:
        if not 0 <= index < self.identity.shard_count:
            raise ValueError(f"A shard must lie in [0, {self.identity.shard_count}), but got {index}.")
        expected = (len(self.identity.shard_range(index)), self.identity.data.sequence_length)
        if sequences.tokens.shape != expected:
            raise ValueError(f"Shard {index} must hold tokens of shape {expected}, but got {sequences.tokens.shape}.")
        if len(records) != sequences.positions:
            got = f"{len(records)} records for {sequences.positions} positions of target_mask"
            raise ValueError(f"Shard {index} must hold one record for each target, but got {got}.")
        self.codec.require_ids("tokens", sequences.tokens)
        self.codec.require(records)


class Cache:
    """A complete cache, open for reading. Made by ``open_cache``; safe to share between threads.

    Decoded shards are kept up to ``memory_bytes``, the least recently used go first.
    """

    def __init__(self, folder: Path, manifest: Manifest, memory_bytes: int) -> None:
        self.folder = folder
        self.manifest = manifest
        self._memory_bytes = memory_bytes
        self.codec = manifest.identity.record_codec()
        self._shards: OrderedDict[int, Shard] = OrderedDict()
        self._sound: set[Path] = set()  # files found as sealed, also of shards that memory has no room for any more
        self._lock = Lock()

    def __len__(self) -> int:
        return self.identity.data.sequences

    @property
    def identity(self) -> CacheIdentity:
        """What the bytes of this cache depend on."""
        return self.manifest.identity

    @property
    def train(self) -> range:
        """The numbers of the training sequences."""
        return range(self.identity.data.train_sequences)

    @property
    def validation(self) -> range:
        """The numbers of the validation sequences."""
        return range(self.identity.data.train_sequences, len(self))

    @property
    def bytes_per_token(self) -> float:
        """All bytes on disk for each position with a record."""
        return bytes_on_disk(self.folder, self.manifest) / max(self.manifest.positions, 1)

    def read(self, indices: Iterable[int], draws: int | NDArray[Any] = 0) -> tuple[Sequences, Records]:
        """The sequences numbered ``indices`` (at least one) and their records, in that order.

        ``draws`` says which of a cache's independent tail samples, of each sequence or of all, modulo their number.
        Raises ``IndexError`` for a number outside the cache, ``CacheCorrupt`` where bytes differ from what was sealed.
        """
        numbers = np.fromiter(indices, np.int64)
        chosen = np.broadcast_to(np.asarray(draws) % self.codec.draws, numbers.shape)
        with self._lock, storage_errors(self.folder):
            found = [self._stored(*pair) for pair in zip(numbers.tolist(), chosen.tolist(), strict=True)]
        stored = from_arrays([part for part, _ in found], [order for _, order in found], self.codec)
        tokens, starts, targets = (stored.pop(name) for name in PER_SEQUENCE)
        return Sequences(tokens.astype(np.uint32), starts, targets), Records(stored)

    def teacher_head(self) -> dict[str, NDArray[Any]]:
        """The teacher's LM head of a hidden cache: ``weight`` (V, D), ``bias`` (V,) or (0,), ``transform`` (2,).

        ``weight`` is float32 or the bits of bfloat16 in uint16; ``transform`` is scale and soft cap (0 = none).
        """
        with self._lock, storage_errors(self.folder):
            seal = _read_seal(self.folder, HEAD, self.manifest.head.digest)
            folder = Folder(self.folder / HEAD, seal)
            return {name: folder.whole(name) for name in ("weight", "bias", "transform")}

    def _stored(self, number: int, draw: int) -> tuple[Arrays, NDArray[Any]]:
        if not 0 <= number < len(self):
            raise IndexError(f"A sequence number must lie in [0, {len(self)}), but got {number}.")
        index, row = divmod(number, self.identity.codec.shard_sequences)
        shard = self._shard(index)
        return shard.sequence(row, draw), shard.order

    def _shard(self, index: int) -> Shard:
        if index not in self._shards:
            seal = _read_seal(self.folder, _shard_name(index), self.manifest.shards[index].digest)
            self._shards[index] = Shard(self.folder / _shard_name(index), seal, self.codec, self._sound)
        self._shards.move_to_end(index)
        while len(self._shards) > 1 and sum(shard.nbytes for shard in self._shards.values()) > self._memory_bytes:
            self._shards.popitem(last=False)
        return self._shards[index]


def open_cache(folder: Path, expected: CacheIdentity | None = None, memory_bytes: int = 1 << 29) -> Cache:
    """Open a complete cache for reading; every file is looked for, content is checked when it is read.

    Raises ``CacheNotFound``, ``CacheIncomplete`` without manifest or shard, ``CacheMismatch`` for another version or
    an identity other than ``expected``, ``CacheCorrupt`` where a file is missing or not of its size.
    """
    manifest = read_manifest(folder)
    if expected is not None and expected != manifest.identity:
        detail = f"{folder} was captured for other inputs: {'; '.join(differences(expected, manifest.identity))}."
        raise CacheMismatch(detail, "Capture a cache for this job, or give the job the inputs of this cache.")
    with storage_errors(folder):
        for name, digest in _sealed_folders(manifest):
            _read_seal(folder, name, digest).require_files(folder / name)
    return Cache(folder, manifest, memory_bytes)


def read_manifest(folder: Path) -> Manifest:
    """The manifest of the cache in ``folder``; raises as ``open_cache`` does."""
    if not folder.is_dir():
        raise CacheNotFound(f"No cache at {folder}.", "Check the path, or capture the cache with a precompute job.")
    try:
        with storage_errors(folder):
            data = (folder / MANIFEST).read_bytes()
    except FileNotFoundError as error:
        detail = f"{folder} has no {MANIFEST}: its capture has not finished."
        raise CacheIncomplete(detail, "Run the job again: it goes on from the sealed shards.") from error
    manifest = Manifest.from_bytes(data, str(folder / MANIFEST))
    if _FINGERPRINT.fullmatch(folder.name) and folder.name != manifest.identity.fingerprint:
        detail = f"{folder} holds the cache {manifest.identity.fingerprint}: it was renamed, or its identity edited."
        raise CacheMismatch(detail, "Give the folder its own name, or capture the cache again.")
    return manifest


def replace_fidelity(folder: Path, fidelity: tuple[FidelityRow, ...]) -> Manifest:
    """Put other fidelity rows into the manifest of a complete cache; raises as ``open_cache`` does.

    The file's time stays: it is when the cache was captured.
    """
    path = folder / MANIFEST
    with locked(folder.parent / f"{folder.name}.lock"), storage_errors(folder):
        manifest = replace(read_manifest(folder), fidelity=fidelity)
        times = path.stat()
        write_file(path, manifest.to_bytes())
        os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
    return manifest


def verify(folder: Path) -> list[str]:
    """Read every byte of a cache; one line for each file that is missing, extra or damaged, none if all is well.

    Raises ``CacheNotFound`` where there is no folder.
    """
    try:
        manifest = read_manifest(folder)
    except (CacheIncomplete, CacheMismatch, CacheCorrupt) as error:
        return [f"{MANIFEST}: {error.detail}"]
    with storage_errors(folder):
        lines = _group_problems(folder)
        for name, digest in _sealed_folders(manifest):
            lines += _folder_problems(folder, name, digest)
        return lines + _strangers(folder, manifest)


def bytes_on_disk(folder: Path, manifest: Manifest) -> int:
    """All bytes of a complete cache, without walking its folder."""
    sealed = sum(shard.bytes for shard in manifest.shards) + manifest.head.bytes
    return sealed + len(_GROUP_METADATA) + (folder / MANIFEST).stat().st_size


@dataclass(frozen=True)
class CacheSummary:
    """One line of a listing; ``problem`` says why a cache cannot be used, and is empty for a usable one.

    ``tokens`` counts positions with a record. Numbers that only a manifest knows are None without one.
    """

    fingerprint: str
    path: str
    complete: bool
    problem: str
    bytes: int
    shards: int
    tokens: int | None = None
    bytes_per_token: float | None = None
    sequences: int | None = None
    sequence_length: int | None = None
    teacher: str | None = None
    profile: str | None = None
    threshold: float | None = None
    created: str | None = None

    def to_json(self) -> dict[str, Any]:
        """The summary as plain JSON values."""
        return asdict(self)


def list_caches(root: Path) -> list[CacheSummary]:
    """Every cache below ``root``, newest first; those being captured, or broken, are listed as such."""
    if not root.is_dir():
        return []
    folders = [folder for folder in root.iterdir() if _FINGERPRINT.fullmatch(folder.name) and folder.is_dir()]
    summaries = [summarise(folder) for folder in sorted(folders)]
    return sorted(summaries, key=lambda summary: summary.created or "", reverse=True)


def summarise(folder: Path) -> CacheSummary:
    """The summary of the cache in ``folder``, from its manifest alone where it has one."""
    try:
        return _complete_summary(folder, read_manifest(folder))
    except (CacheError, OSError) as error:
        problem = error.detail if isinstance(error, CacheError) else str(error)
    sealed = sum(1 for _ in (folder / "seals").glob("[0-9]*.json"))
    return CacheSummary(folder.name, str(folder), False, problem, sum(files_below(folder).values()), sealed)


def _complete_summary(folder: Path, manifest: Manifest) -> CacheSummary:
    size = bytes_on_disk(folder, manifest)
    modified = (folder / MANIFEST).stat().st_mtime
    return CacheSummary(
        fingerprint=folder.name,
        path=str(folder),
        complete=True,
        problem="",
        bytes=size,
        shards=len(manifest.shards),
        tokens=manifest.positions,
        bytes_per_token=round(size / max(manifest.positions, 1), 3),
        sequences=manifest.identity.data.sequences,
        sequence_length=manifest.identity.data.sequence_length,
        teacher=manifest.provenance.teacher_name,
        profile=manifest.identity.codec.profile,
        threshold=manifest.identity.codec.threshold,
        created=datetime.fromtimestamp(modified, UTC).isoformat(timespec="seconds"),
    )


def _shard_name(index: int) -> str:
    return f"shards/{index:06d}"


def _seal_file(folder: Path, name: str) -> Path:
    return folder / "seals" / f"{name.rpartition('/')[2]}.json"


def _sealed_folders(manifest: Manifest) -> list[tuple[str, str]]:
    """The folders of a complete cache, each with the digest of its seal."""
    shards = [(_shard_name(index), shard.digest) for index, shard in enumerate(manifest.shards)]
    return shards + ([(HEAD, manifest.head.digest)] if manifest.head.digest else [])


def _read_seal(folder: Path, name: str, digest: str) -> Seal:
    """The seal of a folder of arrays, if it is the one that the manifest names."""
    path = _seal_file(folder, name)
    if not (folder / name).is_dir():
        raise CacheIncomplete(f"{folder / name} is missing, but the manifest names it.", _REMEDY)
    if not path.is_file():
        raise CacheCorrupt(f"{path} is missing, but the manifest names it.", _REMEDY)
    seal = Seal.from_bytes(path.read_bytes(), str(path))
    if seal.digest != digest:
        raise CacheCorrupt(f"{path} is not the seal that the manifest names.", _REMEDY)
    return seal


def _folder_problems(folder: Path, name: str, digest: str) -> list[str]:
    try:
        seal = _read_seal(folder, name, digest)
    except (CacheCorrupt, CacheIncomplete) as error:
        return [error.detail]
    return [f"{name}/{line}" for line in seal.problems(folder / name)]


def _group_problems(folder: Path) -> list[str]:
    group = folder / GROUP
    if not group.is_file():
        return [f"{GROUP}: missing"]
    return [] if group.read_bytes() == _GROUP_METADATA else [f"{GROUP}: content differs from what was written"]


def _strangers(folder: Path, manifest: Manifest) -> list[str]:
    """Files outside the sealed folders that no cache has."""
    names = [name for name, _ in _sealed_folders(manifest)]
    known = {MANIFEST, GROUP} | {_seal_file(Path(), name).as_posix() for name in names}
    inside = tuple(f"{name}/" for name in names)
    found = (name for name in files_below(folder) if name not in known and not name.startswith(inside))
    return [f"{name}: not part of the cache" for name in found]
