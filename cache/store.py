"""The folder of one cache: capture it, open it, verify it, list what there is.

with capture(root, identity) as writer:             one writer at a time; others wait
    for index in writer.missing_shards():           sealed shards are checked, then skipped
        writer.write_shard(index, sequences, records)
    manifest = writer.finish(provenance)

store = open_cache(root / identity.fingerprint, identity)
sequences, records = store.read([7, 0, 3])          in any order
"""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from threading import Lock
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cache.codec import id_dtype
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
from cache.manifest import CacheIdentity, Manifest, Provenance, ShardEntry, canonical_json, differences
from cache.records import Records, Sequences
from cache.shard import Seal, Shard, shard_arrays, write_arrays

MANIFEST = "manifest.json"
GROUP = "shards/zarr.json"
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
        with storage_errors(folder):
            self._prepare()

    def missing_shards(self) -> list[int]:
        """The shards still to be written; sealed ones are read in full and count only if every byte is as sealed."""
        return [index for index in range(self.identity.shard_count) if not self._sound(index)]

    def write_shard(self, index: int, sequences: Sequences, records: Records) -> None:
        """Write and seal shard ``index``, which holds the sequences ``identity.shard_range(index)``.

        Raises ``ValueError`` where the data does not fit the identity, ``StorageError`` where the disk refuses.
        """
        self._require_fit(index, sequences, records)
        rows, position_P = np.nonzero(sequences.target_mask)
        sequence_P = rows + self.identity.shard_range(index).start
        encoded = self.identity.record_codec().encode(records, sequence_P, position_P)
        arrays = shard_arrays(sequences, encoded, id_dtype(self.identity.tokenizer.vocabulary_size))
        temporary = self.folder / f"{TEMPORARY}{index:06d}"
        with storage_errors(self.folder):
            try:
                self._unseal(index)
                write_arrays(temporary, arrays)
                seal = Seal.of(temporary, sequences, records)
                publish_folder(temporary, _shard_folder(self.folder, index))
            finally:
                remove(temporary)
            write_file(_seal_file(self.folder, index), seal.to_bytes())

    def finish(self, provenance: Provenance) -> Manifest:
        """Write the manifest, last; raises ``CacheIncomplete`` if a shard has not been sealed."""
        entries = [self._entry(index) for index in range(self.identity.shard_count)]
        missing = [index for index, entry in enumerate(entries) if entry is None]
        if missing:
            detail = (
                f"{self.folder}: {len(missing)} of {len(entries)} shards are not sealed, the first is {missing[0]}."
            )
            raise CacheIncomplete(detail, "Run the job again: it goes on from the sealed shards.")
        manifest = Manifest(self.identity, provenance, tuple(entry for entry in entries if entry))
        with storage_errors(self.folder):
            write_file(self.folder / MANIFEST, manifest.to_bytes())
        return manifest

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

    def _unseal(self, index: int) -> None:
        """From here on the cache is incomplete, and the shard is not trusted, until written again."""
        remove(self.folder / MANIFEST)
        remove(_seal_file(self.folder, index))

    def _sound(self, index: int) -> bool:
        seal = self._seal(index)
        return seal is not None and not seal.problems(_shard_folder(self.folder, index))

    def _entry(self, index: int) -> ShardEntry | None:
        seal = self._seal(index)
        return seal.entry() if seal is not None else None

    def _seal(self, index: int) -> Seal | None:
        path = _seal_file(self.folder, index)
        try:
            seal = Seal.from_bytes(path.read_bytes(), str(path))
        except (FileNotFoundError, CacheCorrupt):
            return None
        return seal if seal.sequences == len(self.identity.shard_range(index)) else None

    def _require_fit(self, index: int, sequences: Sequences, records: Records) -> None:
        if not 0 <= index < self.identity.shard_count:
            raise ValueError(f"A shard must lie in [0, {self.identity.shard_count}), but got {index}.")
        expected = (len(self.identity.shard_range(index)), self.identity.data.sequence_length)
        if sequences.tokens.shape != expected:
            raise ValueError(f"Shard {index} must hold tokens of shape {expected}, but got {sequences.tokens.shape}.")
        if len(records) != sequences.positions:
            got = f"{len(records)} records for {sequences.positions} positions of target_mask"
            raise ValueError(f"Shard {index} must hold one record for each target, but got {got}.")
        self.identity.record_codec().require_ids("tokens", sequences.tokens)


class Cache:
    """A complete cache, open for reading. Made by ``open_cache``; safe to share between threads.

    Decoded shards are kept up to ``memory_bytes``, the least recently used go first.
    """

    def __init__(self, folder: Path, manifest: Manifest, memory_bytes: int) -> None:
        self.folder = folder
        self.manifest = manifest
        self._memory_bytes = memory_bytes
        self._codec = manifest.identity.record_codec()
        self._shards: OrderedDict[int, Shard] = OrderedDict()
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

    def read(self, indices: Iterable[int]) -> tuple[Sequences, Records]:
        """The sequences numbered ``indices`` (at least one) and their records, in that order.

        Raises ``IndexError`` for a number outside the cache, ``CacheCorrupt`` where bytes differ from what was sealed.
        """
        with self._lock, storage_errors(self.folder):
            parts = [self._stored(int(number)) for number in indices]
        stored = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
        sequences = Sequences(stored["tokens"].astype(np.uint32), stored["document_start"], stored["target_mask"])
        return sequences, self._codec.decode(stored)

    def _stored(self, number: int) -> dict[str, NDArray[Any]]:
        if not 0 <= number < len(self):
            raise IndexError(f"A sequence number must lie in [0, {len(self)}), but got {number}.")
        index, row = divmod(number, self.identity.codec.shard_sequences)
        return self._shard(index).sequence(row)

    def _shard(self, index: int) -> Shard:
        if index not in self._shards:
            seal = _read_seal(self.folder, index, self.manifest.shards[index])
            self._shards[index] = Shard(_shard_folder(self.folder, index), seal)
        self._shards.move_to_end(index)
        while len(self._shards) > 1 and sum(shard.nbytes for shard in self._shards.values()) > self._memory_bytes:
            self._shards.popitem(last=False)
        return self._shards[index]


def open_cache(folder: Path, expected: CacheIdentity | None = None, memory_bytes: int = 1 << 29) -> Cache:
    """Open a complete cache for reading; every file is looked for, content is checked when it is read.

    Raises ``CacheNotFound``, ``CacheIncomplete`` without manifest or shard, ``CacheMismatch`` for a newer version or
    an identity other than ``expected``, ``CacheCorrupt`` where a file is missing or not of its size.
    """
    manifest = read_manifest(folder)
    if expected is not None and expected != manifest.identity:
        detail = f"{folder} was captured for other inputs: {'; '.join(differences(expected, manifest.identity))}."
        raise CacheMismatch(detail, "Capture a cache for this job, or give the job the inputs of this cache.")
    with storage_errors(folder):
        for index, entry in enumerate(manifest.shards):
            _read_seal(folder, index, entry).require_files(_shard_folder(folder, index))
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
    return Manifest.from_bytes(data, str(folder / MANIFEST))


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
        for index, entry in enumerate(manifest.shards):
            lines += _shard_problems(folder, index, entry)
        return lines + _strangers(folder, len(manifest.shards))


def bytes_on_disk(folder: Path, manifest: Manifest) -> int:
    """All bytes of a complete cache, without walking its folder."""
    shards = sum(shard.bytes for shard in manifest.shards)
    return shards + len(_GROUP_METADATA) + (folder / MANIFEST).stat().st_size


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


def _shard_folder(folder: Path, index: int) -> Path:
    return folder / "shards" / f"{index:06d}"


def _seal_file(folder: Path, index: int) -> Path:
    return folder / "seals" / f"{index:06d}.json"


def _read_seal(folder: Path, index: int, entry: ShardEntry) -> Seal:
    """The seal of a shard, if it is the one that the manifest names."""
    path = _seal_file(folder, index)
    if not _shard_folder(folder, index).is_dir():
        raise CacheIncomplete(f"{_shard_folder(folder, index)} is missing, but the manifest names it.", _REMEDY)
    if not path.is_file():
        raise CacheCorrupt(f"{path} is missing, but the manifest names it.", _REMEDY)
    seal = Seal.from_bytes(path.read_bytes(), str(path))
    if seal.entry() != entry:
        raise CacheCorrupt(f"{path} is not the seal that the manifest names.", _REMEDY)
    return seal


def _shard_problems(folder: Path, index: int, entry: ShardEntry) -> list[str]:
    try:
        seal = _read_seal(folder, index, entry)
    except (CacheCorrupt, CacheIncomplete) as error:
        return [error.detail]
    return [f"shards/{index:06d}/{line}" for line in seal.problems(_shard_folder(folder, index))]


def _group_problems(folder: Path) -> list[str]:
    group = folder / GROUP
    if not group.is_file():
        return [f"{GROUP}: missing"]
    return [] if group.read_bytes() == _GROUP_METADATA else [f"{GROUP}: content differs from what was written"]


def _strangers(folder: Path, shard_count: int) -> list[str]:
    """Files outside the shards that no cache has."""
    known = {MANIFEST, GROUP} | {f"seals/{index:06d}.json" for index in range(shard_count)}
    within = {f"{index:06d}" for index in range(shard_count)}
    names = (name for name in files_below(folder) if name not in known)
    return [f"{name}: not part of the cache" for name in names if not _in_shard(name, within)]


def _in_shard(name: str, shards: set[str]) -> bool:
    parts = name.split("/")
    return len(parts) > 2 and parts[0] == "shards" and parts[1] in shards
