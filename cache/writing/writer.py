"""Capture a cache: shard by shard, and the manifest last.

with open_writer(root, identity) as writer:         one at a time; others wait
    for index in writer.find_missing_shards():      sealed shards are checked, then skipped
        writer.write_shard(index, sequences, records)
    manifest = writer.finish(provenance)

Where several processes capture one cache, one of them holds ``open_writer`` and writes the
manifest. The others hold ``open_helper``, and write only shards. A shard that two of them write
appears once: the first one counts.
"""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

from cache import disk
from cache.errors import CacheCorrupt, CacheIncomplete
from cache.layout import Arrays
from cache.manifest import (
    CacheIdentity,
    FidelityOverride,
    FidelityRow,
    FolderEntry,
    Manifest,
    Provenance,
    ServedTest,
)
from cache.reading.arrays import ArrayFolder
from cache.reading.sealed import GROUP_METADATA, list_pieces, open_reads, read_arrays
from cache.records import SUM_ARRAYS, Records, Sequences, TailSums, encode_tail_mean
from cache.remote.mirror import Mirror, open_mirror
from cache.remote.probe import require_fit
from cache.remote.uses import held_in_bucket
from cache.shard import RECAPTURE_REMEDY, Seal, make_shard_arrays, write_arrays
from cache.shards import entries as layout
from cache.shards.entries import PieceIndex, ShardEntry
from cache.shards.manifest_pieces import write_pieces
from cache.shards.names import (
    DITHER,
    FIRST_TAILS,
    GROUP_FILE,
    LM_HEAD,
    MANIFEST,
    TAIL_MEAN,
    TAIL_SUMS,
    TOKEN_MAP,
    locate_seal,
    name_shard,
    name_tail_sums,
)
from cache.shards.shard_runs import ShardRuns
from cache.store import Cache, locate_lock, locate_writers
from cache.units.dither import TABLE_ARRAYS, DitherTables

#: The largest part of a cache that the sums of its first tails may be: 16 bytes for each token of
#: the vocabulary. A cache for which they are too many is captured again in little time.
FIRST_TAILS_SHARE = 0.004
#: Name of the sums that an extending cache takes from another, among those of its own shards.
_FIRST_SUMS = f"{TAIL_SUMS}/first"
#: Locked while a folder and its seal get their places.
_PUBLISHING = f"{disk.TEMPORARY_PREFIX}publishing"
#: Time between two attempts to take that lock, which is held for a few renames.
_PUBLISHING_POLL_SECONDS = 0.005


@contextmanager
def open_writer(
    root: Path,
    identity: CacheIdentity,
    on_wait: Callable[[], None] | None = None,
    shared: bool = False,
) -> Iterator[CacheWriter]:
    """Begin or resume the cache of ``identity`` below ``root``, as its only writer.

    While another process captures the same cache, ``on_wait`` is called five times a second; it may
    raise to give up. ``shared``: helpers write some of the shards. Raises ``StorageError`` if
    the disk is full or the folder is not writable.
    """
    with disk.storage_errors(root):
        disk.make_folder(root)
    folder = root / identity.fingerprint
    mirror = open_mirror(folder)
    if mirror is not None:
        require_fit(mirror.bucket)
    with disk.locked(locate_lock(folder), on_wait), held_in_bucket(folder), _writing(folder):
        yield CacheWriter(folder, identity, mirror, shared=shared)


@contextmanager
def open_helper(root: Path, identity: CacheIdentity) -> Iterator[CacheWriter]:
    """Write shards of the cache of ``identity`` beside the holder of ``open_writer``.

    That one need not be on this host. Raises ``StorageError`` as ``open_writer`` does.
    """
    folder = root / identity.fingerprint
    mirror = open_mirror(folder)
    if mirror is not None:
        require_fit(mirror.bucket)
    with held_in_bucket(folder), _writing(folder):
        yield CacheWriter(folder, identity, mirror, shared=True)


@contextmanager
def _writing(folder: Path) -> Iterator[None]:
    """Hold the lock of all writers. Where no other holds it, what they left behind is deleted."""
    with disk.storage_errors(folder):
        for inner in (folder, folder / "shards", folder / "seals"):
            disk.make_folder(inner)
        path = locate_writers(folder)
        lock = _join_writers(path, folder)
    try:
        yield
    finally:
        if disk.try_lock(lock):  # nobody else writes: what is unfinished is of those that died
            _remove_leftovers(folder)
            path.unlink(missing_ok=True)  # the next writer makes another file
        os.close(lock)


def _join_writers(path: Path, folder: Path) -> int:
    """Return the open lock file at ``path``, with a shared lock."""
    while True:
        lock = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        only_writer = disk.try_lock(lock)
        if not only_writer:
            disk.wait_for_lock(lock, shared=True)
        if not disk.is_file_at(lock, path):  # the last writer deleted it meanwhile
            os.close(lock)
            continue
        if only_writer:
            _remove_leftovers(folder)
            disk.wait_for_lock(lock, shared=True)
        return lock


def _remove_leftovers(folder: Path) -> None:
    """Delete what interrupted writers left behind."""
    for place in (folder, folder / "shards", folder / "seals"):
        for leftover in list(disk.find_leftovers(place)):
            disk.remove_path(leftover)


class CacheWriter:
    """Writes shards, each whole or not at all. ``open_writer`` makes it and holds the lock.

    ``shared``: other processes write shards of the same cache.
    """

    def __init__(
        self,
        folder: Path,
        identity: CacheIdentity,
        mirror: Mirror | None = None,
        shared: bool = False,
    ) -> None:
        self.folder = folder
        self.identity = identity
        #: What is put into a bucket; None if the folder is all there is.
        self.mirror = mirror
        self._shared = shared
        self._unique = f"{os.getpid()}-{secrets.token_hex(4)}"
        self.codec = identity.record_codec()
        #: Seconds in which the disk took what was written so far, encoding and compression apart.
        self.disk_seconds = 0.0
        self._begun: list[Path] = []
        self._tables: DitherTables | None = None
        group = folder / GROUP_FILE
        with disk.storage_errors(folder):
            # A crash may have left half of it, in a cache of this or of an earlier process.
            if not group.exists() or group.read_bytes() != GROUP_METADATA:
                disk.write_file(group, GROUP_METADATA)

    def find_missing_shards(self, shards: Iterable[int] | None = None) -> ShardRuns:
        """Find those of ``shards`` (all) still to be written; check every byte of sealed ones.

        All are missing where the tables of their dither are damaged or lost, as in
        ``write_tables``.
        """
        self._renounce_unnamed()
        among = range(self.identity.shard_count) if shards is None else shards
        with disk.storage_errors(self.folder):
            return ShardRuns.of(index for index in among if not self._is_sound(index))

    def has_every_seal(self) -> bool:
        """Return whether all shards are sealed; their bytes are not read."""
        shards = range(self.identity.shard_count)
        return all(self._read_shard_seal(index) is not None for index in shards)

    def write_shard(
        self, index: int, sequences: Sequences, records: Records, tails: TailSums | None = None
    ) -> int:
        """Write and seal shard ``index``; return its bytes on disk.

        It holds the sequences ``identity.shard_range(index)``; ``tails`` are the sums of its
        training sequences, from which ``finish`` makes the mean tail of the cache. Raises
        ``ValueError`` if the data does not fit the identity, ``StorageError`` if the disk is
        full or not writable.
        """
        self._require_fit(index, sequences, records)
        if tails is not None:
            # Before the shard: a sealed shard is not read again.
            with disk.storage_errors(self.folder):
                disk.make_folder(self.folder / TAIL_SUMS)
            self._publish(name_tail_sums(index), tails.to_arrays(), Seal.of_folder)
        tables = self.read_tables() if self.codec.rules.dithered else None
        arrays = make_shard_arrays(sequences, records, self.codec, tables)
        return self._publish(
            name_shard(index), arrays, lambda folder: Seal.of(folder, sequences, records)
        ).bytes

    def begin_shard(self, index: int) -> None:
        """Show on the disk that shard ``index`` is in work, until it is written.

        Its records may take long to be made. Nothing depends on it, so a full disk is no error yet.
        """
        begun = self._locate_temporary(name_shard(index))
        # The shards before may still be encoded, or written.
        self._begun = [*filter(Path.exists, self._begun), begun]
        with suppress(OSError):
            begun.mkdir(exist_ok=True)

    def clear_unfinished(self) -> None:
        """Take away what shows shards in work that were not written."""
        for begun in self._begun:
            with suppress(OSError):
                begun.rmdir()

    def adopt_shard(self, source: Cache, index: int) -> None:
        """Take shard ``index`` of ``source`` by links to its files, whose bytes stay in place.

        Every byte is checked. The caller knows that this cache has the same sequences there. Raises
        ``CacheCorrupt`` if the shard of ``source`` is damaged.
        """
        name = name_shard(index)
        digest = source.entries[index].digest
        seal = source.open_seal(name, digest)
        if self._read_shard_seal(index) == seal:
            return
        source.open_seal(name, digest, whole=True)
        for problem in seal.find_problems(source.folder / name):
            raise CacheCorrupt(f"{source.folder / name}/{problem}.", RECAPTURE_REMEDY)

        def link(folder: Path) -> Seal:
            disk.link_folder(source.folder / name, folder, seal.files)
            return seal

        self._publish_folder(name, link)

    def adopt_tail_sums(self, source: Cache) -> None:
        """Take the sums of the tails of the lasting shards of ``source``, which has them."""
        seal = source.open_seal(FIRST_TAILS, source.manifest.first_tails.digest, whole=True)
        arrays = read_arrays(source.folder / FIRST_TAILS, seal, SUM_ARRAYS)
        with disk.storage_errors(self.folder):
            disk.make_folder(self.folder / TAIL_SUMS)
        self._publish(_FIRST_SUMS, arrays, Seal.of_folder)

    def write_lm_head(self, arrays: Arrays) -> None:
        """Write and seal the teacher's LM head of a hidden cache, unless it is sealed already."""
        self._write_once(LM_HEAD, arrays)

    def write_tables(self, tables: DitherTables) -> DitherTables:
        """Write and seal the tables of the dither, unless they are sealed; return the sealed ones.

        Every shard needs them, so they are written before the first. Shards that were written with
        damaged or lost ones are missing from then on: no other tables name their tokens.
        """
        self._renounce_unnamed()
        self._write_once(DITHER, tables.to_arrays())
        found = self.read_tables()
        assert found is not None, "just written"
        return found

    def _renounce_unnamed(self) -> None:
        """Renounce all shards if no sound tables name their tokens."""
        if self.codec.rules.dithered and self.read_tables() is None:
            for index in range(self.identity.shard_count):
                self._renounce(name_shard(index))

    def read_tables(self) -> DitherTables | None:
        """Read the sealed tables of the dither; None if there are none, or damaged ones."""
        if self._tables is None and (arrays := self._read_own_arrays(DITHER, TABLE_ARRAYS)):
            self._tables = DitherTables.from_arrays(arrays)
        return self._tables

    def write_token_map(self, arrays: Arrays) -> None:
        """Write and seal the tokens of all ids, unless they are sealed already."""
        self._write_once(TOKEN_MAP, arrays)

    def write_tail_mean(self, mean: Arrays) -> None:
        """Write and seal the mean tail that another cache of the same records has."""
        self._write_once(TAIL_MEAN, encode_tail_mean(mean))

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
        temporary = self._locate_temporary(name)
        with disk.storage_errors(self.folder):
            try:
                # A damaged folder is renounced first: after a crash, nothing vouches for it.
                if not self._shared or self._find_whole(name) is None:
                    self._renounce(name)
                seal = self._put_in_place(name, temporary, fill(temporary))
            finally:
                disk.remove_path(temporary)
            if self.mirror is not None:
                began = time.perf_counter()
                seal = self.mirror.publish(name, seal)
                self.disk_seconds += time.perf_counter() - began
        return seal

    def _locate_temporary(self, name: str) -> Path:
        """Return the place of a folder that this writer makes; no other writer has the same."""
        return self.folder / f"{disk.TEMPORARY_PREFIX}{self._unique}-{name.replace('/', '-')}"

    def _put_in_place(self, name: str, temporary: Path, seal: Seal) -> Seal:
        """Give a finished folder its name and its seal; return the seal that is valid then.

        It is another writer's if that one was faster.
        """
        began = time.perf_counter()
        lock = self.folder / _PUBLISHING
        with disk.locked(lock, poll_seconds=_PUBLISHING_POLL_SECONDS):
            try:
                if self._shared and (known := self._find_whole(name, seal)) is not None:
                    return known
                self._renounce(name)
                disk.publish_folder(temporary, self.folder / name)
                self.disk_seconds += time.perf_counter() - began
                disk.write_file(self.folder / locate_seal(name), seal.to_bytes())
            finally:
                lock.unlink(missing_ok=True)  # a sealed cache has no lock file
        return seal

    def _renounce(self, name: str) -> None:
        """Delete the manifest and the seal of a folder, so that nothing vouches for it."""
        disk.remove_path(self.folder / MANIFEST)
        disk.remove_path(self.folder / locate_seal(name))

    def _find_whole(self, name: str, seal: Seal | None = None) -> Seal | None:
        """Return the seal of the folder that is in place, if it is whole; else None.

        Beside a bucket it must be ``seal``, if that is given: the bucket decides which is valid.
        """
        path = self.folder / locate_seal(name)
        try:
            known = Seal.from_bytes(path.read_bytes(), str(path))
        except (FileNotFoundError, CacheCorrupt):
            return None
        if self.mirror is not None and seal is not None and known != seal:
            return None
        return None if known.find_problems(self.folder / name) else known

    def read_sealed_shape(self, name: str) -> tuple[int, ...] | None:
        """Read the shape of array ``name`` from the first sealed shard; None without one."""
        for index in range(self.identity.shard_count):
            if (seal := self._read_shard_seal(index)) is not None:
                reads = open_reads(self.mirror)
                return ArrayFolder(self.folder / name_shard(index), seal, reads=reads).shape(name)
        return None

    def finish(
        self,
        provenance: Provenance,
        fidelity: tuple[FidelityRow, ...] = (),
        overruled: FidelityOverride | None = None,
        served: ServedTest | None = None,
    ) -> Manifest:
        """Write the manifest; raise ``CacheIncomplete`` if a shard or the LM head is not sealed.

        The cache gets a mean tail if every shard was written with its sums.
        """
        manifest = self._make_manifest()  # raises before anything else is written
        first, whole = self._add_tail_sums()
        if whole is not None:
            self.write_tail_mean(whole.compute_mean(self.identity.codec.threshold))
            if first is not None and first.nbytes <= FIRST_TAILS_SHARE * manifest.totals.bytes:
                self._write_once(FIRST_TAILS, first.to_arrays())
        with disk.storage_errors(self.folder):
            disk.remove_path(self.folder / TAIL_SUMS)
        manifest = replace(
            manifest,
            provenance=provenance,
            fidelity=fidelity,
            overruled=overruled,
            served=served,
            tail_mean=self._make_folder_entry(TAIL_MEAN),
            first_tails=self._make_folder_entry(FIRST_TAILS),
        )
        with disk.storage_errors(self.folder):
            if self.mirror is not None:
                manifest = self._publish_manifest(self.mirror, manifest)
            disk.write_file(self.folder / MANIFEST, manifest.to_bytes())
        return manifest

    def _publish_manifest(self, mirror: Mirror, manifest: Manifest) -> Manifest:
        """Put the manifest last; return another writer's of the same shards if that was first."""
        if manifest.pieces is not None:
            mirror.publish_pieces(list_pieces(manifest.pieces))

        def choose(found: bytes | None) -> bytes:
            if found:  # an empty object is replaced
                theirs = Manifest.from_bytes(found, str(mirror))
                if (theirs.shards, theirs.pieces) == (manifest.shards, manifest.pieces):
                    return found
            return manifest.to_bytes()

        data = mirror.change_manifest(choose)
        mirror.drop(TAIL_SUMS)
        return Manifest.from_bytes(data, str(mirror))

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
            part = self._read_tail_sums(name_tail_sums(index))
            if part is None:
                return None, None
            sums = part if sums is None else sums + part
        return first, sums

    def _read_tail_sums(self, name: str) -> TailSums | None:
        """Read sums of tails; None if they are missing or damaged."""
        arrays = self._read_own_arrays(name, SUM_ARRAYS)
        return None if arrays is None else TailSums.from_arrays(arrays)

    def _read_own_arrays(self, name: str, arrays: tuple[str, ...]) -> Arrays | None:
        """Read arrays of a sealed folder; None if they are missing or damaged."""
        seal = self._read_own_seal(name)
        if seal is None or not self._is_whole(name, seal):
            return None
        if self.mirror is not None:
            try:
                self.mirror.open_folder(name, seal.digest, whole=True)
            except CacheCorrupt:
                return None
        return read_arrays(self.folder / name, seal, arrays)

    def open_sealed(self) -> Cache:
        """Open the complete cache before ``finish``; raise ``CacheIncomplete`` as that does."""
        return Cache(self.folder, self._make_manifest(), self.mirror)

    def _make_manifest(self) -> Manifest:
        """Make the manifest of what is sealed; the entries of many shards are written as pieces.

        Raises ``CacheIncomplete`` before it writes if a shard or the LM head is not sealed.
        """
        rules = self.codec.rules
        shards, pieces = self._collect_entries()
        return Manifest(
            identity=self.identity,
            provenance=Provenance(),
            shards=shards,
            head=self._require_folder(LM_HEAD, "the teacher's LM head is", rules.needs_lm_head),
            token_map=self._make_folder_entry(TOKEN_MAP),
            tail_mean=self._make_folder_entry(TAIL_MEAN),
            pieces=pieces,
            first_tails=self._make_folder_entry(FIRST_TAILS),
            dither=self._require_folder(DITHER, "the tables of the dither are", rules.dithered),
        )

    def _require_folder(self, name: str, what: str, needed: bool) -> FolderEntry:
        entry = self._make_folder_entry(name)
        if needed and not entry.digest:
            raise CacheIncomplete(f"{self.folder}: {what} not sealed.", "Run the job again.")
        return entry

    def _collect_entries(self) -> tuple[tuple[ShardEntry, ...], PieceIndex | None]:
        if self.identity.shard_count <= layout.PIECE_SHARDS:
            return tuple(self._read_entries()), None
        with disk.storage_errors(self.folder):
            # The pieces of an earlier manifest are replaced, so it must not vouch for them.
            disk.remove_path(self.folder / MANIFEST)
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

    def _is_sound(self, index: int) -> bool:
        seal = self._read_shard_seal(index)
        return seal is not None and self._is_whole(name_shard(index), seal)

    def _is_whole(self, name: str, seal: Seal) -> bool:
        """Return whether the files of a seal are as they were sealed.

        Every byte in a folder is read. Of those in a bucket the sizes are compared: they are
        compared with their sha256 when they are read.
        """
        if self.mirror is not None:
            return self.mirror.is_whole(name, seal)
        return not seal.find_problems(self.folder / name)

    def _read_shard_seal(self, index: int) -> Seal | None:
        seal = self._read_own_seal(name_shard(index))
        if seal is None or seal.sequences != len(self.identity.shard_range(index)):
            return None
        return seal

    def _read_own_seal(self, name: str) -> Seal | None:
        path = self.folder / locate_seal(name)
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
