"""The folder of a cache: capture it, open it, verify it, list all caches.

with open_writer(root, identity) as writer:         one writer at a time; others wait
    for index in writer.find_missing_shards():      sealed shards are checked, then skipped
        writer.write_shard(index, sequences, records)
    manifest = writer.finish(provenance)

store = open_cache(root / identity.fingerprint, identity)
sequences, records = store.read([7, 0, 3])          in any order
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cache.disk import (
    TEMPORARY_PREFIX,
    find_leftovers,
    link_folder,
    locked,
    make_folder,
    publish_folder,
    remove_path,
    storage_errors,
    sum_file_sizes,
    walk_files,
    write_file,
)
from cache.errors import CacheCorrupt, CacheError, CacheIncomplete, CacheMismatch, CacheNotFound
from cache.layout import Arrays, decode_arrays
from cache.manifest import (
    CacheIdentity,
    FidelityOverride,
    FidelityRow,
    FolderEntry,
    Manifest,
    Provenance,
    encode_canonical_json,
    list_differences,
)
from cache.reading.arrays import (
    MEMORY_BYTES,
    ArrayFolder,
    ChunkMemory,
    Shard,
    make_chunk_memory,
)
from cache.reading.disk import DiskReads
from cache.reading.memory import KeptValues
from cache.records import (
    MEAN_ARRAYS,
    SUM_ARRAYS,
    Records,
    Sequences,
    TailSums,
    decode_tail_mean,
    encode_tail_mean,
)
from cache.remote.mirror import Mirror, MirrorReads, open_mirror
from cache.remote.probe import require_fit
from cache.remote.upkeep import list_stored
from cache.remote.uses import held_in_bucket
from cache.shard import PER_SEQUENCE, RECAPTURE_REMEDY, Seal, make_shard_arrays, write_arrays
from cache.shards import entries as layout
from cache.shards.entries import PieceIndex, ShardEntries, ShardEntry
from cache.shards.pieces import EntryPieces, name_piece, open_entries, write_pieces
from cache.shards.runs import ShardRuns

MANIFEST = "manifest.json"
GROUP_FILE = "shards/zarr.json"
#: Name of the folder with the teacher's LM head.
LM_HEAD = "head"
#: Name of the folder with the tokens of all ids.
TOKEN_MAP = "token_map"  # noqa: S105 (no password)
#: The arrays in it.
TOKEN_ARRAYS = ("ids", "lengths", "text")
#: Name of the folder with the mean tail of profile threshold.
TAIL_MEAN = "tail_mean"
#: Name of the folder with the sums of each shard that it is made of, until the cache is sealed.
TAIL_SUMS = "tail_sums"
#: Name of the folder with the sums of the lasting shards, for a cache that extends this one.
FIRST_TAILS = "first_tails"
#: The largest part of a cache that these sums may be: 16 bytes for each token of the vocabulary.
#: A cache for which they are too many is captured again in little time.
FIRST_TAILS_SHARE = 0.0025
#: The metadata of the Zarr group that holds the shards.
_GROUP_METADATA = encode_canonical_json({"attributes": {}, "node_type": "group", "zarr_format": 3})
#: Name of the sums that an extending cache takes from another, among those of its own shards.
_FIRST_SUMS = f"{TAIL_SUMS}/first"
#: What to do about a cache that is not there.
MISSING_REMEDY = (
    "If the job captures its own cache (kind distill or search), retry it: it captures the cache "
    "again. Else capture the cache with a job of kind precompute, or restore a backup."
)
#: The name of a cache's folder.
FINGERPRINT = re.compile(r"[0-9a-f]{32}")
#: The name of a shard's seal, and the number in the name of a file of the cache.
_NUMBERED = re.compile(r"[0-9]+\.json")
_NUMBER = re.compile(r"[0-9]+")
#: Shards whose metadata an open cache keeps: some 30 kB each.
_OPEN_SHARDS = 512
#: Shards of which an open cache knows the files that were compared with their sha256: some 16 MB.
_SOUND_SHARDS = 1 << 16


@contextmanager
def open_writer(
    root: Path, identity: CacheIdentity, waiting: Callable[[], None] | None = None
) -> Iterator[CacheWriter]:
    """Begin or resume the cache of ``identity`` below ``root``, as its only writer.

    While another process captures the same cache, ``waiting`` is called five times a second; it may
    raise to give up. Raises ``StorageError`` where the disk is full or the folder is not writable.
    """
    with storage_errors(root):
        make_folder(root)
    folder = root / identity.fingerprint
    mirror = open_mirror(folder)
    if mirror is not None:
        require_fit(mirror.bucket)
    with locked(locate_lock(folder), waiting), held_in_bucket(folder):
        yield CacheWriter(folder, identity, mirror)


def locate_lock(folder: Path) -> Path:
    """Return the path of the lock file of the cache in ``folder``, which lies beside it."""
    return folder.with_name(f"{folder.name}.lock")


class CacheWriter:
    """Writes shards, each whole or not at all. ``open_writer`` makes it and holds the lock."""

    def __init__(self, folder: Path, identity: CacheIdentity, mirror: Mirror | None = None) -> None:
        self.folder = folder
        self.identity = identity
        #: What is put into a bucket; None where the folder is all there is.
        self.mirror = mirror
        self.codec = identity.record_codec()
        #: Seconds in which the disk took what was written so far, encoding and compression apart.
        self.disk_seconds = 0.0
        with storage_errors(folder):
            self._prepare()

    def find_missing_shards(self) -> ShardRuns:
        """Find the shards still to be written; read every byte of sealed ones to check them."""
        shards = range(self.identity.shard_count)
        return ShardRuns.of(index for index in shards if not self._is_sound(index))

    def write_shard(
        self, index: int, sequences: Sequences, records: Records, tails: TailSums | None = None
    ) -> int:
        """Write and seal shard ``index``; return its bytes on disk.

        It holds the sequences ``identity.shard_range(index)``; ``tails`` are the sums of its
        training sequences, from which ``finish`` makes the mean tail of the cache. Raises
        ``ValueError`` where the data does not fit the identity, ``StorageError`` where the disk is
        full or not writable.
        """
        self._require_fit(index, sequences, records)
        if tails is not None:
            # Before the shard: a sealed shard is not read again.
            with storage_errors(self.folder):
                make_folder(self.folder / TAIL_SUMS)
            self._publish(_name_tail_sums(index), tails.to_arrays(), Seal.of_folder)
        arrays = make_shard_arrays(sequences, records, self.codec)
        return self._publish(
            _name_shard(index), arrays, lambda folder: Seal.of(folder, sequences, records)
        ).bytes

    def adopt_shard(self, source: Cache, index: int) -> None:
        """Take shard ``index`` of ``source`` by links to its files, whose bytes stay in place.

        Every byte is checked. The caller knows that this cache has the same sequences there. Raises
        ``CacheCorrupt`` where the shard of ``source`` is damaged.
        """
        name = _name_shard(index)
        digest = source.entries[index].digest
        source.bring(name, digest)
        seal = _read_seal(source.folder, name, digest)
        if self._read_shard_seal(index) == seal:
            return
        source.bring(name, digest, whole=True)
        for problem in seal.find_problems(source.folder / name):
            raise CacheCorrupt(f"{source.folder / name}/{problem}.", RECAPTURE_REMEDY)

        def link(folder: Path) -> Seal:
            link_folder(source.folder / name, folder)
            return seal

        self._publish_folder(name, link)

    def adopt_tail_sums(self, source: Cache) -> None:
        """Take the sums of the tails of the lasting shards of ``source``, which has them."""
        entry = source.manifest.first_tails
        source.bring(FIRST_TAILS, entry.digest, whole=True)
        seal = _read_seal(source.folder, FIRST_TAILS, entry.digest)
        arrays = _read_arrays(source.folder / FIRST_TAILS, seal, SUM_ARRAYS)
        with storage_errors(self.folder):
            make_folder(self.folder / TAIL_SUMS)
        self._publish(_FIRST_SUMS, arrays, Seal.of_folder)

    def write_lm_head(self, arrays: Arrays) -> None:
        """Write and seal the teacher's LM head of a hidden cache, unless it is sealed already."""
        self._write_once(LM_HEAD, arrays)

    def write_token_map(self, arrays: Arrays) -> None:
        """Write and seal the tokens of all ids, unless they are sealed already."""
        self._write_once(TOKEN_MAP, arrays)

    def _write_once(self, name: str, arrays: Arrays) -> None:
        seal = self._read_own_seal(name)
        if seal is None or not self._is_whole(name, seal):
            self._publish(name, arrays, Seal.of_folder)

    def _publish(self, name: str, arrays: Arrays, make_seal: Callable[[Path], Seal]) -> Seal:
        """Write a folder of arrays whole or not at all, then its seal."""

        def fill(folder: Path) -> Seal:
            write_arrays(folder, arrays)
            return make_seal(folder)

        return self._publish_folder(name, fill)

    def _publish_folder(self, name: str, fill: Callable[[Path], Seal]) -> Seal:
        """Make a folder whole or not at all, then its seal, which ``fill`` returns."""
        temporary = self.folder / f"{TEMPORARY_PREFIX}{name.replace('/', '-')}"
        with storage_errors(self.folder):
            try:
                # Manifest and seal go first: after a crash, nothing vouches for the new content.
                remove_path(self.folder / MANIFEST)
                remove_path(_locate_seal(self.folder, name))
                seal = fill(temporary)
                began = time.perf_counter()
                publish_folder(temporary, self.folder / name)
                self.disk_seconds += time.perf_counter() - began
            finally:
                remove_path(temporary)
            write_file(_locate_seal(self.folder, name), seal.to_bytes())
            if self.mirror is not None:
                began = time.perf_counter()
                seal = self.mirror.publish(name, seal)
                self.disk_seconds += time.perf_counter() - began
        return seal

    def read_sealed_shape(self, name: str) -> tuple[int, ...] | None:
        """Read the shape of array ``name`` from the first sealed shard; None without one."""
        for index in range(self.identity.shard_count):
            if (seal := self._read_shard_seal(index)) is not None:
                reads = _open_reads(self.mirror)
                shard = ArrayFolder(self.folder / _name_shard(index), seal, reads=reads)
                return shard.shape(name)
        return None

    def finish(
        self,
        provenance: Provenance,
        fidelity: tuple[FidelityRow, ...] = (),
        overruled: FidelityOverride | None = None,
    ) -> Manifest:
        """Write the manifest; raise ``CacheIncomplete`` if a shard or the LM head is not sealed.

        The cache gets a mean tail if every shard was written with its sums.
        """
        manifest = self._make_manifest()  # raises before anything else is written
        self._write_tail_mean(manifest.totals.bytes)
        manifest = replace(
            manifest,
            provenance=provenance,
            fidelity=fidelity,
            overruled=overruled,
            tail_mean=self._make_folder_entry(TAIL_MEAN),
            first_tails=self._make_folder_entry(FIRST_TAILS),
        )
        with storage_errors(self.folder):
            if self.mirror is not None:
                manifest = self._publish_manifest(self.mirror, manifest)
            write_file(self.folder / MANIFEST, manifest.to_bytes())
        return manifest

    def _publish_manifest(self, mirror: Mirror, manifest: Manifest) -> Manifest:
        """Put the manifest last; return another writer's of the same shards if that was first."""
        if manifest.pieces is not None:
            mirror.publish_pieces(_list_pieces(manifest.pieces))

        def accepts(found: bytes) -> bool:
            theirs = Manifest.from_bytes(found, str(mirror))
            return (theirs.shards, theirs.pieces) == (manifest.shards, manifest.pieces)

        data = mirror.publish_manifest(manifest.to_bytes(), accepts)
        mirror.drop(TAIL_SUMS)
        return Manifest.from_bytes(data, str(mirror))

    def _write_tail_mean(self, cache_bytes: int) -> None:
        """Write and seal the mean tail, then remove the sums that it is made of.

        The sums of the lasting shards stay, where they are a small part of ``cache_bytes``.
        """
        first, whole = self._add_tail_sums()
        if whole is not None:
            mean = whole.compute_mean(self.identity.codec.threshold)
            self._write_once(TAIL_MEAN, encode_tail_mean(mean))
            if first is not None and first.nbytes <= FIRST_TAILS_SHARE * cache_bytes:
                self._write_once(FIRST_TAILS, first.to_arrays())
        with storage_errors(self.folder):
            remove_path(self.folder / TAIL_SUMS)

    def _add_tail_sums(self) -> tuple[TailSums | None, TailSums | None]:
        """Add up the sums of the lasting shards and those of all; None for what is not known.

        They are added in the order of the shards, so that a cache which extends another has the
        same sums as one that was captured whole.
        """
        sums = self._read_tail_sums(_FIRST_SUMS)
        begin = 0 if sums is None else sums.sequences // self.identity.codec.shard_sequences
        lasting = self.identity.lasting_shards
        first = None
        for index in range(begin, self.identity.shard_count):
            first = sums if index == lasting else first
            part = self._read_tail_sums(_name_tail_sums(index))
            if part is None:
                return None, None
            sums = part if sums is None else sums + part
        return first, sums

    def _read_tail_sums(self, name: str) -> TailSums | None:
        """Read sums of tails; None where they are missing or damaged."""
        seal = self._read_own_seal(name)
        if seal is None or not self._is_whole(name, seal):
            return None
        if self.mirror is not None:
            try:
                self.mirror.bring(name, seal.digest, whole=True)
            except CacheCorrupt:
                return None
        return TailSums.from_arrays(_read_arrays(self.folder / name, seal, SUM_ARRAYS))

    def open_sealed(self) -> Cache:
        """Open the complete cache before ``finish``; raise ``CacheIncomplete`` as that does."""
        return Cache(self.folder, self._make_manifest(), make_chunk_memory(), self.mirror)

    def _make_manifest(self) -> Manifest:
        """Make the manifest of what is sealed; the entries of many shards are written as pieces.

        Raises ``CacheIncomplete`` before it writes if a shard or the LM head is not sealed.
        """
        head = self._make_folder_entry(LM_HEAD)
        shards, pieces = self._collect_entries()
        if not head.digest and self.identity.codec.profile == "hidden":
            raise CacheIncomplete(
                f"{self.folder}: the teacher's LM head is not sealed.", "Run the job again."
            )
        return Manifest(
            identity=self.identity,
            provenance=Provenance(),
            shards=shards,
            head=head,
            token_map=self._make_folder_entry(TOKEN_MAP),
            tail_mean=self._make_folder_entry(TAIL_MEAN),
            pieces=pieces,
            first_tails=self._make_folder_entry(FIRST_TAILS),
        )

    def _collect_entries(self) -> tuple[tuple[ShardEntry, ...], PieceIndex | None]:
        if self.identity.shard_count <= layout.PIECE_SHARDS:
            return tuple(self._read_entries()), None
        with storage_errors(self.folder):
            # The pieces of an earlier manifest are replaced, so it must not vouch for them.
            remove_path(self.folder / MANIFEST)
            return (), write_pieces(self.folder, self._read_entries())

    def _read_entries(self) -> Iterator[ShardEntry]:
        """Yield the entry of each shard, from its seal; raise ``CacheIncomplete`` at the end."""
        count = self.identity.shard_count
        missing = 0
        first = 0
        for index in range(count):
            if (seal := self._read_shard_seal(index)) is not None:
                yield seal.to_entry()
                continue
            first = first if missing else index
            missing += 1
        if missing:
            raise CacheIncomplete(
                f"{self.folder}: {missing} of {count} shards are not sealed, the first is {first}.",
                "Run the job again: it continues after the sealed shards.",
            )

    def _make_folder_entry(self, name: str) -> FolderEntry:
        seal = self._read_own_seal(name)
        return FolderEntry() if seal is None else FolderEntry(seal.bytes, seal.digest)

    def _prepare(self) -> None:
        for name in ("shards", "seals"):
            make_folder(self.folder / name)
        self._remove_leftovers()
        # A crash may have left half of it, in a cache of this or of an earlier process.
        group = self.folder / GROUP_FILE
        if not group.exists() or group.read_bytes() != _GROUP_METADATA:
            write_file(group, _GROUP_METADATA)

    def _remove_leftovers(self) -> None:
        """Delete what an interrupted writer left behind."""
        for folder in (self.folder, self.folder / "shards", self.folder / "seals"):
            for leftover in list(find_leftovers(folder)):
                remove_path(leftover)

    def _is_sound(self, index: int) -> bool:
        seal = self._read_shard_seal(index)
        return seal is not None and self._is_whole(_name_shard(index), seal)

    def _is_whole(self, name: str, seal: Seal) -> bool:
        """Whether the files of a seal are as they were sealed.

        Every byte in a folder is read. Of those in a bucket the sizes are compared: they are
        compared with their sha256 when they are read.
        """
        if self.mirror is not None:
            return self.mirror.is_whole(name, seal)
        return not seal.find_problems(self.folder / name)

    def _read_shard_seal(self, index: int) -> Seal | None:
        seal = self._read_own_seal(_name_shard(index))
        return (
            seal
            if seal is not None and seal.sequences == len(self.identity.shard_range(index))
            else None
        )

    def _read_own_seal(self, name: str) -> Seal | None:
        path = _locate_seal(self.folder, name)
        try:
            if self.mirror is not None and self.mirror.get_seal(name) is None:
                return None
            return Seal.from_bytes(path.read_bytes(), str(path))
        except (FileNotFoundError, CacheCorrupt):
            return None

    def _require_fit(self, index: int, sequences: Sequences, records: Records) -> None:
        if not 0 <= index < self.identity.shard_count:
            raise ValueError(
                f"A shard must lie in [0, {self.identity.shard_count}), but got {index}."
            )
        expected = (len(self.identity.shard_range(index)), self.identity.data.sequence_length)
        if sequences.tokens.shape != expected:
            raise ValueError(
                f"Shard {index} must hold tokens of shape {expected}, "
                f"but got {sequences.tokens.shape}."
            )
        if len(records) != sequences.positions:
            got = f"{len(records)} records for {sequences.positions} positions of target_mask"
            raise ValueError(f"Shard {index} must hold one record for each target, but got {got}.")
        self.codec.require_ids("tokens", sequences.tokens)
        self.codec.require(records)


class Cache:
    """A complete cache, open for reading. ``open_cache`` makes it; threads may share it.

    Decoded chunks stay in ``memory``, which several caches may share; the least recently used is
    dropped first. Threads decode different chunks at the same time, and each chunk that is in
    memory once.
    """

    def __init__(
        self,
        folder: Path,
        manifest: Manifest,
        memory: ChunkMemory,
        mirror: Mirror | None = None,
    ) -> None:
        self.folder = folder
        self.mirror = mirror
        self.manifest = manifest
        #: The manifest's entries of all shards.
        self.entries = open_entries(folder, manifest)
        self.codec = manifest.identity.record_codec()
        #: What ``read`` took from the disk so far.
        self.disk_reads = _open_reads(mirror)
        self._memory = memory
        self._shards: KeptValues[Shard] = KeptValues(_OPEN_SHARDS, lambda _: 1)
        # Flags of the files whose sha256 was checked, of dropped shards too, so that few are hashed
        # twice.
        self._sound: KeptValues[bytearray] = KeptValues(_SOUND_SHARDS, lambda _: 1)
        #: Whether the files of all shards can stay on the disk: then those of one come together.
        self.brings_whole = mirror is not None and mirror.room.limit >= manifest.totals.bytes

    def __len__(self) -> int:
        return self.identity.data.sequences

    @property
    def identity(self) -> CacheIdentity:
        """All that the bytes of this cache depend on."""
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
        """All bytes on disk divided by the positions with a record."""
        with reading(self.folder):
            size = measure_cache_bytes(self.folder, self.manifest)
        return size / max(self.manifest.positions, 1)

    def measure_decoded_sequence(self) -> int:
        """Measure the bytes of a sequence in decoded chunks, on average over the first shard.

        One sample of its tails counts, because an epoch reads one. The metadata of the arrays tells
        it, so no chunk of them is decoded. Raises as ``read`` does.
        """
        with reading(self.folder):
            shard = self._open_shard(0)
            return -(-shard.count_decoded_bytes() // shard.shape("tokens")[0])

    def read(
        self, indices: Iterable[int], draws: int | NDArray[Any] = 0
    ) -> tuple[Sequences, Records]:
        """Read the sequences numbered ``indices`` (at least one) and their records, in that order.

        ``draws`` selects the tail sample, for each sequence or for all, modulo the number of
        samples. Raises ``IndexError`` for a number outside the cache, ``CacheCorrupt`` where bytes
        differ from what was sealed, ``CacheNotFound`` if the cache was removed meanwhile.
        """
        numbers = np.fromiter(indices, np.int64)
        chosen = np.broadcast_to(np.asarray(draws) % self.codec.draws, numbers.shape)
        with reading(self.folder):
            parts, orders = self._read_stored(numbers.tolist(), chosen.tolist())
        stored = decode_arrays(parts, orders, self.codec)
        tokens, starts, targets = (stored.pop(name) for name in PER_SEQUENCE)
        return Sequences(tokens.astype(np.uint32), starts, targets), Records(stored)

    def bring(self, name: str, digest: str, whole: bool = False) -> None:
        """Make a folder of arrays ready for reading where the cache lies in a bucket.

        Its seal comes now, and its files when they are read, or now if it is to be ``whole``.
        """
        if self.mirror is not None:
            self.mirror.bring(name, digest, whole)

    def bring_ahead(self, numbers: NDArray[np.int64]) -> None:
        """Begin to fetch the shards of the sequences ``numbers``, which are read soon.

        Nothing is done where the cache lies on this disk.
        """
        if self.mirror is None:
            return
        for index in np.unique(numbers // self.identity.codec.shard_sequences).tolist():
            self.mirror.bring_ahead(_name_shard(index), self.entries[index].digest)

    def teacher_head(self) -> dict[str, NDArray[Any]]:
        """Read the teacher's LM head of a hidden cache.

        ``weight`` (V, D) is float32, or the bits of bfloat16 in uint16; ``bias`` is (V,) or (0,);
        ``transform`` (2,) is scale and soft cap (0 = none).
        """
        return self._read_folder(LM_HEAD, self.manifest.head, ("weight", "bias", "transform"))

    def token_map(self) -> Arrays | None:
        """Read the tokens of all ids; None in a cache that was written before caches kept them.

        ``ids`` (E,) of the tokens, their ``lengths`` (E,) in bytes, and their ``text`` in UTF-8.
        """
        entry = self.manifest.token_map
        return self._read_folder(TOKEN_MAP, entry, TOKEN_ARRAYS) if entry.digest else None

    def tail_mean(self) -> Arrays | None:
        """Read the mean tail: ``mean`` and ``share`` (V,) in float32; None in a cache without.

        Caches of profile threshold have it whose records a local teacher made.
        """
        entry = self.manifest.tail_mean
        if not entry.digest:
            return None
        return dict(decode_tail_mean(self._read_folder(TAIL_MEAN, entry, MEAN_ARRAYS)))

    def _read_folder(self, name: str, entry: FolderEntry, arrays: tuple[str, ...]) -> Arrays:
        with reading(self.folder):
            self.bring(name, entry.digest)
            seal = _read_seal(self.folder, name, entry.digest)
            return _read_arrays(self.folder / name, seal, arrays, self.disk_reads)

    def _read_stored(
        self, numbers: list[int], draws: list[int]
    ) -> tuple[list[Arrays], list[NDArray[Any]]]:
        """Read the arrays of each sequence as stored, and the token order of its shard."""
        for number in numbers:
            if not 0 <= number < len(self):
                raise IndexError(
                    f"A sequence number must lie in [0, {len(self)}), but got {number}."
                )
        parts: list[Arrays] = [{} for _ in numbers]
        orders = [np.empty(0) for _ in numbers]
        # In the order of the file, so that sequences of one chunk follow one another: the chunk is
        # decoded once even where memory is too small for the chunks of all of them.
        for place in np.argsort(numbers, kind="stable").tolist():
            index, row = divmod(numbers[place], self.identity.codec.shard_sequences)
            shard = self._open_shard(index)
            parts[place] = shard.read_sequence(row, draws[place])
            orders[place] = shard.read_order()
        return parts, orders

    def _open_shard(self, index: int) -> Shard:
        return self._shards.get(index, lambda: self._make_shard(index))

    def _make_shard(self, index: int) -> Shard:
        name = _name_shard(index)
        digest = self.entries[index].digest
        self.bring(name, digest, self.brings_whole)
        seal = _read_seal(self.folder, name, digest)
        sound = self._sound.get(index, bytearray, len(seal.files))
        return Shard(self.folder / name, seal, self.codec, sound, self._memory, self.disk_reads)


@contextmanager
def reading(folder: Path) -> Iterator[None]:
    """Raise errors of the disk as ``storage_errors`` does, and name a cache that vanished.

    The block reads the cache in ``folder``. Any error of it becomes ``CacheNotFound`` if the folder
    is gone, and a missing file of a folder that is there becomes ``CacheIncomplete``.
    """
    try:
        with storage_errors(folder):
            yield
    except (CacheError, FileNotFoundError) as error:
        if not folder.is_dir():
            raise CacheNotFound(
                f"The cache {folder} was removed while it was in use: {error}",
                MISSING_REMEDY,
            ) from error
        if isinstance(error, CacheError):
            raise
        raise CacheIncomplete(
            f"{error.filename} is missing, but it is part of a complete cache.", RECAPTURE_REMEDY
        ) from error


def open_cache(
    folder: Path,
    expected: CacheIdentity | None = None,
    memory_bytes: int = MEMORY_BYTES,
    shared: ChunkMemory | None = None,
) -> Cache:
    """Open a complete cache for reading; it keeps decoded chunks of ``memory_bytes`` at most.

    Several caches can keep theirs in one ``shared`` memory, which has a limit of its own.

    Presence and size of every file are checked now, content when it is read. Where the manifest is
    in pieces, there are too many files for that: then the files of a shard are checked when it is
    read. Raises ``CacheNotFound``; ``CacheIncomplete`` without a manifest or a shard;
    ``CacheMismatch`` for another version, or an identity other than ``expected``; ``CacheCorrupt``
    where a file is missing or has another size.
    """
    manifest = read_manifest(folder)
    if expected is not None and expected != manifest.identity:
        differences = "; ".join(list_differences(expected, manifest.identity))
        raise CacheMismatch(
            f"{folder} was captured for other inputs: {differences}.",
            "Capture a cache for this job, or give the job the inputs of this cache.",
        )
    with reading(folder):
        memory = shared or make_chunk_memory(memory_bytes)
        if (mirror := open_mirror(folder)) is not None:
            return _open_mirrored(mirror, manifest, memory)
        for problem in _check_group(folder):
            raise CacheCorrupt(f"{folder}: {problem}.", RECAPTURE_REMEDY)
        opened = Cache(folder, manifest, memory)
        for name, digest in _list_folders(manifest):
            _read_seal(folder, name, digest).require_files(folder / name)
        if isinstance(opened.entries, EntryPieces):
            opened.entries.require_files()
        else:
            for index, entry in enumerate(opened.entries):
                name = _name_shard(index)
                _read_seal(folder, name, entry.digest).require_files(folder / name)
    return opened


def _open_mirrored(mirror: Mirror, manifest: Manifest, memory: ChunkMemory) -> Cache:
    """Open a cache in a bucket: the seals that the manifest names must be there."""
    folder = mirror.folder
    if manifest.pieces is not None:
        mirror.fetch_pieces(_list_pieces(manifest.pieces))
    for name, digest in _list_folders(manifest):
        mirror.bring(name, digest)
        _read_seal(folder, name, digest)
    count = manifest.totals.shards
    mirror.require_seals({_name_shard(index) for index in range(count)})
    return Cache(folder, manifest, memory, mirror)


def read_manifest(folder: Path) -> Manifest:
    """Read the manifest of the cache in ``folder``; raises as ``open_cache`` does."""
    if (mirror := open_mirror(folder)) is not None:
        return _parse_manifest(folder, mirror.get_manifest(), str(mirror))
    if not folder.is_dir():
        raise CacheNotFound(f"No cache at {folder}.", f"Check the path. {MISSING_REMEDY}")
    try:
        with storage_errors(folder):
            data = (folder / MANIFEST).read_bytes()
    except FileNotFoundError:
        data = None
    return _parse_manifest(folder, data, str(folder))


def _parse_manifest(folder: Path, data: bytes | None, where: str) -> Manifest:
    if data is None:
        raise CacheIncomplete(
            f"{where} has no {MANIFEST}: its capture has not finished.",
            "Run the job again: it continues after the sealed shards.",
        )
    manifest = Manifest.from_bytes(data, f"{where}/{MANIFEST}")
    if FINGERPRINT.fullmatch(folder.name) and folder.name != manifest.identity.fingerprint:
        raise CacheMismatch(
            f"{folder} holds the cache {manifest.identity.fingerprint}: the folder was renamed, "
            "or the identity was edited.",
            "Give the folder its own name, or capture the cache again.",
        )
    return manifest


def has_manifest(folder: Path) -> bool:
    """Whether the cache in ``folder`` has a manifest, so that its capture has finished."""
    if (mirror := open_mirror(folder)) is None:
        return (folder / MANIFEST).is_file()
    try:
        return mirror.get_manifest() is not None
    except CacheNotFound:
        return False


def find_missing(opened: Cache, waiting: Callable[[], None] | None = None) -> list[str]:
    """Return a line for each file that is missing, or damaged, as ``verify_cache`` does.

    Of a cache in a bucket no byte is read: its files are compared with their sha256 when they are
    read, and now their sizes alone.
    """
    if (mirror := opened.mirror) is None:
        return verify_cache(opened.folder, waiting)
    lines = []
    for index, entry in enumerate(opened.entries):
        if waiting is not None:
            waiting()
        name = _name_shard(index)
        mirror.bring(name, entry.digest)
        if not mirror.is_whole(name, _read_seal(opened.folder, name, entry.digest)):
            lines.append(f"{name}: a file is missing")
    return lines


def replace_fidelity(folder: Path, fidelity: tuple[FidelityRow, ...]) -> Manifest:
    """Replace the fidelity rows in the manifest of a complete cache; raises as ``open_cache`` does.

    The rows were found good, so that an overruled verdict of the capture is taken out. The
    modification time of the file is kept, because it is shown as the time of the capture.
    """
    path = folder / MANIFEST
    if (mirror := open_mirror(folder)) is not None:
        return _replace_mirrored_fidelity(mirror, fidelity)
    with locked(locate_lock(folder)), storage_errors(folder):
        manifest = replace(read_manifest(folder), fidelity=fidelity, overruled=None)
        times = path.stat()
        write_file(path, manifest.to_bytes())
        os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
    return manifest


def _replace_mirrored_fidelity(mirror: Mirror, fidelity: tuple[FidelityRow, ...]) -> Manifest:
    def change(found: bytes | None) -> bytes:
        manifest = _parse_manifest(mirror.folder, found, str(mirror))
        return replace(manifest, fidelity=fidelity, overruled=None).to_bytes()

    return Manifest.from_bytes(mirror.change_manifest(change), str(mirror))


def verify_cache(folder: Path, waiting: Callable[[], None] | None = None) -> list[str]:
    """Read every byte of a cache; return one line for each file that is missing, extra or damaged.

    A sound cache gives no line. ``waiting`` is called before each shard, and may raise to give up.
    Raises ``CacheNotFound`` where there is no folder.
    """
    try:
        manifest = read_manifest(folder)
    except (CacheIncomplete, CacheMismatch, CacheCorrupt) as error:
        return [f"{MANIFEST}: {error.detail}"]
    if (mirror := open_mirror(folder)) is not None:
        return _verify_mirrored(mirror, manifest, waiting)
    with storage_errors(folder):
        lines = _check_group(folder)
        entries = open_entries(folder, manifest)
        if isinstance(entries, EntryPieces):
            lines += entries.find_problems()
        for index in range(len(entries)):
            if waiting is not None:
                waiting()
            lines += _check_shard(folder, entries, index)
        for name, digest in _list_folders(manifest):
            lines += _check_folder(folder, name, digest)
        return lines + _find_unknown_files(folder, manifest)


def _verify_mirrored(
    mirror: Mirror, manifest: Manifest, waiting: Callable[[], None] | None
) -> list[str]:
    """Read every byte in the bucket, as ``verify_cache`` does in a folder."""
    if manifest.pieces is not None:
        mirror.fetch_pieces(_list_pieces(manifest.pieces))
    lines: list[str] = []
    entries = open_entries(mirror.folder, manifest)
    shards = ((_name_shard(index), entry.digest) for index, entry in enumerate(entries))
    for name, digest in chain(shards, _list_folders(manifest)):
        if waiting is not None:
            waiting()
        try:
            mirror.bring(name, digest)
            seal = _read_seal(mirror.folder, name, digest)
        except (CacheCorrupt, CacheIncomplete) as error:
            lines.append(error.detail)
            continue
        lines += [f"{name}/{line}" for line in mirror.find_problems(name, seal)]
    return lines


def measure_cache_bytes(folder: Path, manifest: Manifest) -> int:
    """Return all bytes of a complete cache, from its manifest."""
    sealed = manifest.totals.bytes + (manifest.pieces.bytes if manifest.pieces else 0)
    sealed += manifest.head.bytes + manifest.token_map.bytes
    sealed += manifest.tail_mean.bytes + manifest.first_tails.bytes
    return sealed + len(_GROUP_METADATA) + (folder / MANIFEST).stat().st_size


@dataclass(frozen=True)
class CacheSummary:
    """One line of a listing; ``problem`` is the reason why a cache cannot be used, or empty.

    ``tokens`` counts positions with a record. Numbers that only a manifest contains are None
    without one.
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
        """Return the summary as plain JSON values."""
        return asdict(self)


def list_caches(root: Path) -> list[CacheSummary]:
    """List every cache below ``root``, newest first, and unfinished or damaged ones after them."""
    summaries = [summarise_cache(folder) for folder in list_folders(root)]
    return sorted(summaries, key=lambda summary: summary.created or "", reverse=True)


def list_folders(root: Path) -> list[Path]:
    """List the folders of all caches below ``root``, or in the bucket that it mirrors."""
    here = (path for path in root.glob("*") if FINGERPRINT.fullmatch(path.name) and path.is_dir())
    return sorted({*here, *list_stored(root)})


def summarise_cache(folder: Path) -> CacheSummary:
    """Summarise the cache in ``folder``, from its manifest alone where it has one."""
    try:
        return _summarise_complete(folder, read_manifest(folder))
    except (CacheError, OSError) as error:
        problem = error.detail if isinstance(error, CacheError) else str(error)
    if (mirror := open_mirror(folder)) is not None:
        return CacheSummary(folder.name, str(folder), False, problem, *mirror.measure())
    sealed = sum(1 for name, _ in walk_files(folder / "seals") if _NUMBERED.fullmatch(name))
    return CacheSummary(folder.name, str(folder), False, problem, sum_file_sizes(folder), sealed)


def _summarise_complete(folder: Path, manifest: Manifest) -> CacheSummary:
    size = measure_cache_bytes(folder, manifest)
    totals = manifest.totals
    mirror = open_mirror(folder)
    modified = mirror.modified if mirror else (folder / MANIFEST).stat().st_mtime
    return CacheSummary(
        fingerprint=folder.name,
        path=str(folder),
        complete=True,
        problem="",
        bytes=size,
        shards=totals.shards,
        tokens=totals.positions,
        bytes_per_token=round(size / max(totals.positions, 1), 3),
        sequences=manifest.identity.data.sequences,
        sequence_length=manifest.identity.data.sequence_length,
        teacher=manifest.provenance.teacher_name,
        profile=manifest.identity.codec.profile,
        threshold=manifest.identity.codec.threshold,
        created=datetime.fromtimestamp(modified, UTC).isoformat(timespec="seconds"),
    )


def _name_shard(index: int) -> str:
    return f"shards/{index:06d}"


def _name_tail_sums(index: int) -> str:
    return f"{TAIL_SUMS}/tails-{index:06d}"


def _open_reads(mirror: Mirror | None) -> DiskReads:
    return DiskReads() if mirror is None else MirrorReads(mirror)


def _list_pieces(index: PieceIndex) -> dict[str, str]:
    """Map the names of the pieces to their sha256."""
    return {name_piece(number): sha256 for number, sha256 in enumerate(index.sha256)}


def _read_arrays(
    folder: Path, seal: Seal, arrays: tuple[str, ...], reads: DiskReads | None = None
) -> Arrays:
    """Read arrays of a sealed folder."""
    opened = ArrayFolder(folder, seal, reads=reads)
    return {array: opened.read_array(array) for array in arrays}


def _locate_seal(folder: Path, name: str) -> Path:
    room, _, last = name.rpartition("/")
    # The sums of tails are removed together with their seals.
    return folder / (TAIL_SUMS if room == TAIL_SUMS else "seals") / f"{last}.json"


def _list_folders(manifest: Manifest) -> list[tuple[str, str]]:
    """List the sealed folders beside the shards, each with the digest of its seal."""
    folders = {
        LM_HEAD: manifest.head,
        TOKEN_MAP: manifest.token_map,
        TAIL_MEAN: manifest.tail_mean,
        FIRST_TAILS: manifest.first_tails,
    }
    return [(name, entry.digest) for name, entry in folders.items() if entry.digest]


def _read_seal(folder: Path, name: str, digest: str) -> Seal:
    """Read the seal of a folder of arrays; raise unless it is the one that the manifest names."""
    path = _locate_seal(folder, name)
    if not (folder / name).is_dir():
        raise CacheIncomplete(
            f"{folder / name} is missing, but the manifest names it.", RECAPTURE_REMEDY
        )
    if not path.is_file():
        raise CacheCorrupt(f"{path} is missing, but the manifest names it.", RECAPTURE_REMEDY)
    seal = Seal.from_bytes(path.read_bytes(), str(path))
    if seal.digest != digest:
        raise CacheCorrupt(f"{path} is not the seal that the manifest names.", RECAPTURE_REMEDY)
    return seal


def _check_shard(folder: Path, entries: ShardEntries, index: int) -> list[str]:
    try:
        digest = entries[index].digest
    except CacheCorrupt:
        return []  # its piece of the manifest has a line already
    return _check_folder(folder, _name_shard(index), digest)


def _check_folder(folder: Path, name: str, digest: str) -> list[str]:
    try:
        seal = _read_seal(folder, name, digest)
    except (CacheCorrupt, CacheIncomplete) as error:
        return [error.detail]
    return [f"{name}/{line}" for line in seal.find_problems(folder / name)]


def _check_group(folder: Path) -> list[str]:
    group = folder / GROUP_FILE
    if not group.is_file():
        return [f"{GROUP_FILE}: missing"]
    return (
        []
        if group.read_bytes() == _GROUP_METADATA
        else [f"{GROUP_FILE}: content differs from what was written"]
    )


def _find_unknown_files(folder: Path, manifest: Manifest) -> list[str]:
    """Return a line for each file outside the sealed folders that no cache has."""
    names = [name for name, _ in _list_folders(manifest)]
    known = {MANIFEST, GROUP_FILE} | {_locate_seal(Path(), name).as_posix() for name in names}
    inside = tuple(f"{name}/" for name in names)
    shards = manifest.totals.shards
    pieces = len(manifest.pieces.sha256) if manifest.pieces else 0
    found = (
        name
        for name, _ in walk_files(folder)
        if name not in known
        and not name.startswith(inside)
        and not _is_numbered(name, shards, pieces)
    )
    return [f"{name}: not part of the cache" for name in sorted(found)]


def _is_numbered(name: str, shards: int, pieces: int) -> bool:
    """Whether a file belongs to a shard or is a piece, by arithmetic: there may be a million."""
    found = _NUMBER.search(name)
    number = int(found[0]) if found else -1
    if 0 <= number < pieces and name == name_piece(number):
        return True
    shard = _name_shard(number)
    return 0 <= number < shards and (
        name.startswith(f"{shard}/") or name == _locate_seal(Path(), shard).as_posix()
    )
