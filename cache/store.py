"""A complete cache: open it and read it, by its folder or by the mirror of its bucket.

store = open_cache(root / identity.fingerprint, identity)
sequences, records = store.read([7, 0, 3])          in any order

``cache.writing.writer`` captures a cache, ``cache.checking`` verifies and lists caches.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cache.disk import locked, storage_errors, write_file
from cache.errors import CacheCorrupt, CacheError, CacheIncomplete, CacheMismatch, CacheNotFound
from cache.layout import Arrays, decode_arrays
from cache.manifest import CacheIdentity, FidelityRow, FolderEntry, Manifest, list_differences
from cache.reading.arrays import MEMORY_BYTES, Shard, make_chunk_memory
from cache.reading.memory import KeptValues
from cache.reading.sealed import (
    GROUP_METADATA,
    check_group,
    list_pieces,
    list_sealed_folders,
    open_reads,
    read_arrays,
    read_seal,
)
from cache.records import MEAN_ARRAYS, Records, Sequences, decode_tail_mean
from cache.remote.mirror import Mirror, open_mirror
from cache.shard import PER_SEQUENCE, RECAPTURE_REMEDY, Seal
from cache.shards.manifest_pieces import EntryPieces, open_entries
from cache.shards.names import (
    DITHER,
    FINGERPRINT,
    LM_HEAD,
    MANIFEST,
    TAIL_MEAN,
    TOKEN_MAP,
    name_shard,
)
from cache.units.dither import TABLE_ARRAYS, DitherTables
from cache.units.layout import decode_units

#: The arrays of the tokens of all ids.
TOKEN_ARRAYS = ("ids", "lengths", "text")
#: What to do about a cache that is not there.
MISSING_REMEDY = (
    "If the job captures its own cache (kind distill or search), retry it: it captures the cache "
    "again. Else capture the cache with a job of kind precompute, or restore a backup."
)
#: Shards whose metadata an open cache keeps: some 30 kB each.
_OPEN_SHARDS = 512
#: Shards of which an open cache knows the files that were compared with their sha256: some 16 MB.
_SOUND_SHARDS = 1 << 16


def locate_lock(folder: Path) -> Path:
    """Return the path of the lock file of the cache in ``folder``, which lies beside it."""
    return folder.with_name(f"{folder.name}.lock")


def locate_writers(folder: Path) -> Path:
    """Return the path of the file that all processes lock which write the cache in ``folder``.

    It lies beside the cache while there are any.
    """
    return folder.with_name(f"{folder.name}.writers")


class Cache:
    """A complete cache, open for reading. ``open_cache`` makes it; threads may share it.

    Decoded chunks of ``memory_bytes`` at most stay in memory; the least recently used is dropped
    first. Threads decode different chunks at the same time, and each chunk that is in memory once.
    """

    def __init__(
        self,
        folder: Path,
        manifest: Manifest,
        mirror: Mirror | None = None,
        memory_bytes: int = MEMORY_BYTES,
    ) -> None:
        self.folder = folder
        self.mirror = mirror
        self.manifest = manifest
        #: The manifest's entries of all shards.
        self.entries = open_entries(folder, manifest)
        self.codec = manifest.identity.record_codec()
        #: What ``read`` took from the disk so far.
        self.disk_reads = open_reads(mirror)
        self._memory = make_chunk_memory(memory_bytes)
        self._shards: KeptValues[Shard] = KeptValues(_OPEN_SHARDS)
        # Flags of the files whose sha256 was checked, of dropped shards too, so that few are hashed
        # twice.
        self._sound: KeptValues[bytearray] = KeptValues(_SOUND_SHARDS)
        #: Whether the files of all shards can stay on the disk: then those of one come together.
        self.brings_whole = mirror is not None and mirror.room.limit >= manifest.totals.bytes

    def __len__(self) -> int:
        return self.identity.data.sequences

    @property
    def identity(self) -> CacheIdentity:
        """All that the bytes of this cache depend on."""
        return self.manifest.identity

    @property
    def fingerprint(self) -> str:
        """The name of the content: a hash of the identity."""
        return self.identity.fingerprint

    @property
    def train_count(self) -> int:
        """Number of training sequences; their numbers come first."""
        return self.identity.data.train_sequences

    @property
    def validation_count(self) -> int:
        """Number of held-out sequences."""
        return self.identity.data.validation_sequences

    @property
    def shard_sequences(self) -> int:
        """Sequences of a shard."""
        return self.identity.codec.shard_sequences

    @property
    def train(self) -> range:
        """The numbers of the training sequences."""
        return range(self.train_count)

    @property
    def validation(self) -> range:
        """The numbers of the validation sequences."""
        return range(self.train_count, len(self))

    @property
    def bytes_per_token(self) -> float:
        """All bytes on disk divided by the positions with a record."""
        with reading(self.folder):
            size = measure_cache_bytes(self.folder, self.manifest)
        return size / max(self.manifest.positions, 1)

    @property
    def sequence_bytes(self) -> int:
        """Bytes of a sequence in decoded chunks, on average over the first shard.

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
        samples. Raises ``IndexError`` for a number outside the cache, ``CacheCorrupt`` if bytes
        differ from what was sealed, ``CacheNotFound`` if the cache was removed meanwhile.
        """
        numbers = np.fromiter(indices, np.int64).tolist()
        chosen = np.broadcast_to(np.asarray(draws) % self.codec.draws, len(numbers)).tolist()
        for number in numbers:
            if not 0 <= number < len(self):
                raise IndexError(
                    f"A sequence number must lie in [0, {len(self)}), but got {number}."
                )
        parts: list[Arrays] = [{} for _ in numbers]
        orders = [np.empty(0) for _ in numbers]
        with reading(self.folder):
            # In the order of the file, so that sequences of one chunk follow one another: the chunk
            # is decoded once even where memory is too small for the chunks of all of them.
            for place in np.argsort(numbers, kind="stable").tolist():
                index, row = divmod(numbers[place], self.shard_sequences)
                shard = self._open_shard(index)
                parts[place] = shard.read_sequence(row, chosen[place])
                orders[place] = shard.read_order()
        if self.codec.rules.dithered:
            stored = decode_units(parts, np.array(numbers), self.codec, self.tables)
        else:
            stored = decode_arrays(parts, orders, self.codec)
        tokens, starts, targets = (stored.pop(name) for name in PER_SEQUENCE)
        return Sequences(tokens.astype(np.uint32), starts, targets), Records(stored)

    def read_columns(
        self, numbers: range, names: Iterable[str], positions: range | None = None
    ) -> Arrays:
        """Read columns of consecutive sequences of one shard, as ``Shard.read_columns`` does.

        Raises as ``read`` does.
        """
        size = self.shard_sequences
        index, row = divmod(numbers.start, size)
        if not 0 <= numbers.start < numbers.stop <= min((index + 1) * size, len(self)):
            raise IndexError(f"{numbers} are not sequences of one shard of {len(self)} sequences.")
        with reading(self.folder):
            shard = self._open_shard(index)
            return shard.read_columns(range(row, row + len(numbers)), names, positions)

    def open_seal(self, name: str, digest: str, whole: bool = False) -> Seal:
        """Return the seal of a folder of arrays, which must be the one with this digest.

        Of a cache in a bucket the files come when they are read, or now if they are to be
        ``whole``. Raises as ``read`` does.
        """
        if self.mirror is not None:
            self.mirror.open_folder(name, digest, whole)
        return read_seal(self.folder, name, digest)

    def prefetch(self, numbers: NDArray[np.int64]) -> None:
        """Begin to fetch the shards of the sequences ``numbers``, which are read soon.

        Nothing is done if the cache lies on this disk.
        """
        if self.mirror is None:
            return
        for index in np.unique(numbers // self.shard_sequences).tolist():
            self.mirror.prefetch(name_shard(index), self.entries[index].digest)

    def teacher_head(self) -> dict[str, NDArray[Any]]:
        """Read the teacher's LM head of a hidden cache.

        ``weight`` (V, D) is float32, or the bits of bfloat16 in uint16; ``bias`` is (V,) or (0,);
        ``transform`` (2,) is scale and soft cap (0 = none).
        """
        return self._read_folder(LM_HEAD, self.manifest.head, ("weight", "bias", "transform"))

    def token_map(self) -> Arrays | None:
        """Read the tokens of all ids; None in a cache that was written before caches kept them.

        ``ids`` (E,) of the tokens, their ``lengths`` (E,) in bytes, and their ``text`` in UTF-8.
        Newer caches also keep ``rules`` of the tokenizer, as JSON in UTF-8.
        """
        entry = self.manifest.token_map
        if not entry.digest:
            return None
        with reading(self.folder):
            seal = self.open_seal(TOKEN_MAP, entry.digest)
        rules = ("rules",) if "rules" in {Path(name).parts[0] for name in seal.files} else ()
        return self._read_folder(TOKEN_MAP, entry, (*TOKEN_ARRAYS, *rules))

    @cached_property
    def tables(self) -> DitherTables:
        """The tables of the dither of profile threshold. Raises as ``read`` does."""
        arrays = self._read_folder(DITHER, self.manifest.dither, TABLE_ARRAYS)
        return DitherTables.from_arrays(arrays)

    def tail_mean(self) -> Arrays | None:
        """Read the mean tail: ``mean`` and ``share`` (V,) in float32; None in a cache without.

        Caches of profile threshold have it whose records a local teacher made.
        """
        entry = self.manifest.tail_mean
        if not entry.digest:
            return None
        return dict(decode_tail_mean(self._read_folder(TAIL_MEAN, entry, MEAN_ARRAYS)))

    def projection(self) -> None:
        """Return None: the records are in the tokens of the sequences."""

    def _read_folder(self, name: str, entry: FolderEntry, arrays: tuple[str, ...]) -> Arrays:
        with reading(self.folder):
            seal = self.open_seal(name, entry.digest)
            return read_arrays(self.folder / name, seal, arrays, self.disk_reads)

    def _open_shard(self, index: int) -> Shard:
        return self._shards.get(index, lambda: self._make_shard(index))

    def _make_shard(self, index: int) -> Shard:
        name = name_shard(index)
        seal = self.open_seal(name, self.entries[index].digest, self.brings_whole)
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
                f"The cache {folder} was removed while it was in use: {error}", MISSING_REMEDY
            ) from error
        if isinstance(error, CacheError):
            raise
        raise CacheIncomplete(
            f"{error.filename} is missing, but it is part of a complete cache.", RECAPTURE_REMEDY
        ) from error


def open_cache(
    folder: Path, expected: CacheIdentity | None = None, memory_bytes: int = MEMORY_BYTES
) -> Cache:
    """Open a complete cache for reading; it keeps decoded chunks of ``memory_bytes`` at most.

    Presence and size of every file are checked now, content when it is read. Where the manifest is
    in pieces, there are too many files for that: then the files of a shard are checked when it is
    read. Raises ``CacheNotFound``; ``CacheIncomplete`` without a manifest or a shard;
    ``CacheMismatch`` for another version, or an identity other than ``expected``; ``CacheCorrupt``
    if a file is missing or has another size.
    """
    opened = open_unchecked(folder, memory_bytes)
    if expected is not None and expected != opened.identity:
        differences = "; ".join(list_differences(expected, opened.identity))
        raise CacheMismatch(
            f"{folder} was captured for other inputs: {differences}.",
            "Capture a cache for this job, or give the job the inputs of this cache.",
        )
    if opened.mirror is not None:
        return opened  # its seals are there, and a file is checked when it is fetched
    with reading(folder):
        for problem in check_group(folder):
            raise CacheCorrupt(f"{folder}: {problem}.", RECAPTURE_REMEDY)
        for name, sealed in list_sealed_folders(opened.manifest).items():
            read_seal(folder, name, sealed.digest).require_files(folder / name)
        if isinstance(opened.entries, EntryPieces):
            opened.entries.require_files()
        else:
            for index, entry in enumerate(opened.entries):
                name = name_shard(index)
                read_seal(folder, name, entry.digest).require_files(folder / name)
    return opened


def open_unchecked(folder: Path, memory_bytes: int = MEMORY_BYTES) -> Cache:
    """Open a complete cache at once, whatever its size: a file is checked when it is read.

    So the sound part of a damaged cache can be read. Of a cache in a bucket the seals that the
    manifest names must be there. Raises as ``open_cache`` does for the manifest and for these.
    """
    manifest = read_manifest(folder)
    mirror = open_mirror(folder)
    with reading(folder):
        if mirror is not None:
            if manifest.pieces is not None:
                mirror.fetch_pieces(list_pieces(manifest.pieces))
            for name, sealed in list_sealed_folders(manifest).items():
                mirror.open_folder(name, sealed.digest)
                read_seal(folder, name, sealed.digest)
            mirror.require_seals({name_shard(index) for index in range(manifest.totals.shards)})
        return Cache(folder, manifest, mirror, memory_bytes)


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
    """Return whether the cache in ``folder`` has a manifest, so that its capture has finished."""
    if (mirror := open_mirror(folder)) is None:
        return (folder / MANIFEST).is_file()
    try:
        return mirror.get_manifest() is not None
    except CacheNotFound:
        return False


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


def measure_cache_bytes(folder: Path, manifest: Manifest) -> int:
    """Return all bytes of a complete cache, from its manifest."""
    sealed = manifest.totals.bytes + (manifest.pieces.bytes if manifest.pieces else 0)
    sealed += sum(entry.bytes for entry in list_sealed_folders(manifest).values())
    return sealed + len(GROUP_METADATA) + (folder / MANIFEST).stat().st_size
