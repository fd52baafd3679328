"""Restore a cache from its own export: Parquet files that also hold the records as stored.

The plain columns of an export (``kd.exchange.parquet``) are for other tools: they hold one sample
of a tail, at temperature 1. Beside them ``stored_*`` columns hold every integer of the records, and
the metadata of each file holds what describes them:

    potstill.manifest   the cache's manifest: identity, provenance and fidelity
    potstill.tokens     its token map: JSON of [id, token] pairs, compressed by zlib
    potstill.first      number of the file's first sequence
    potstill.shapes     JSON of the shape of a row of each stored column
    potstill.digest     sha256 of the file's sequences and stored columns
    potstill.rules      JSON of the rules of its tokenizer, if they are known
    potstill.tails      its mean tail, if it has one: compressed by zlib
    potstill.dither.*   each table of its dither, if it has them: little-endian, compressed by zlib

The mean tail and the tables are in the file of the first sequence, whose digest covers the tables:
the records are worth nothing without them.

So the import of an untouched export is the same cache, with the same fingerprint. An export with a
chosen number of entries has no stored columns: its records are imported like those of another tool.

Shapes: L tokens of a sequence.
"""

from __future__ import annotations

import hashlib
import json
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain, pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cache.codec import Codec
from cache.errors import CacheError
from cache.json_object import Json
from cache.layout import Arrays
from cache.manifest import Manifest
from cache.records import MEAN_ARRAYS, Records, Sequences, compute_offsets
from cache.store import Cache
from cache.units.dither import TABLE_ARRAYS, DitherTables, list_table_types
from cache.writing.writer import CacheWriter
from kd.capture.capturing import find_sealed_cache, summarise_cache
from kd.errors import DataError
from kd.exchange.foreign_files import read_parquet_metadata, read_table_batches
from kd.exchange.parquet import read_flat_column
from kd.exchange.sealing import seal_cache
from kd.models.tokenizing.token_map import TokenMap
from kd.progress import Monitor

#: The beginning of the names of stored columns.
PREFIX = "stored_"
_KEYS = ("manifest", "tokens", "first", "shapes", "digest")
_PER_SEQUENCE = {"input_ids": np.uint32, "document_start": np.bool_, "target_mask": np.bool_}
_UNTOUCHED = (
    "Import the files as they were exported, all of them. Records of profiles topk, dense and "
    "hidden can be changed and imported without their stored columns."
)


# ---------------------------------------------------------------------- writing


def make_stored_schema(codec: Codec) -> list[tuple[str, Any]]:
    """Return name and ``pyarrow`` type of each stored column of a cache with ``codec``."""
    import pyarrow

    return [
        (PREFIX + name, pyarrow.list_(pyarrow.from_numpy_dtype(dtype)))
        for name, (dtype, _) in codec.schema().items()
    ]


def cut_by_sequence(sequences: Sequences, records: Records) -> Iterator[Arrays]:
    """Yield the arrays of each sequence: its tokens and flags, and the rows of its records."""
    positions = compute_offsets(sequences.target_mask.sum(axis=1))
    for row, (start, stop) in enumerate(pairwise(positions.tolist())):
        own = dict(zip(_PER_SEQUENCE, (each[row] for each in sequences.arrays), strict=True))
        yield own | records.slice(start, stop).columns


class FileDescription:
    """The metadata of one file of an export, which is complete once all its sequences are added."""

    def __init__(self, store: Cache, first: int) -> None:
        self._store = store
        self._first = first
        self._shapes: dict[str, list[int]] = {}
        self._digest = hashlib.sha256()
        self._tables: Arrays = {}
        if first == 0 and store.codec.rules.dithered:
            self._tables = store.tables.to_arrays()
            _update(self._digest, self._tables)

    def add(self, sequences: Sequences, records: Records) -> None:
        """Count some sequences and their records."""
        self._shapes = {name: list(each.shape[1:]) for name, each in records.columns.items()}
        for arrays in cut_by_sequence(sequences, records):
            _update(self._digest, arrays)

    def to_metadata(self) -> dict[bytes, bytes]:
        """Return the keys and values of the file's metadata."""
        token_map = TokenMap.of_cache(self._store)
        pairs = [] if token_map is None else token_map.list_pairs()
        values = {
            "manifest": self._store.manifest.to_bytes(),
            "tokens": zlib.compress(json.dumps(pairs).encode()),
            "first": str(self._first).encode(),
            "shapes": json.dumps(self._shapes).encode(),
            "digest": self._digest.hexdigest().encode(),
            "rules": json.dumps({} if token_map is None else token_map.rules).encode(),
        }
        if (mean := self._store.tail_mean()) is not None and self._first == 0:
            stored = np.stack([mean[name] for name in MEAN_ARRAYS]).astype("<f4")
            values["tails"] = zlib.compress(stored.tobytes())
        for name, array in self._tables.items():
            values[f"dither.{name}"] = zlib.compress(_to_little_endian(array).tobytes())
        return {f"potstill.{name}".encode(): value for name, value in values.items()}


def _update(digest: Any, arrays: Arrays) -> None:
    for name in sorted(arrays):
        little = _to_little_endian(arrays[name])
        # Lengths are hashed too, so that the borders of arrays count.
        digest.update(f"{name} {little.size} ".encode() + little.tobytes())


def _to_little_endian(array: NDArray[Any]) -> NDArray[Any]:
    array = np.ascontiguousarray(array)
    return array.astype(array.dtype.newbyteorder("<"))


# ---------------------------------------------------------------------- reading


@dataclass(frozen=True)
class Origin:
    """The cache that a file was exported from; ``shapes`` is None without stored columns."""

    path: Path
    manifest: Manifest
    token_map: TokenMap | None
    first: int
    digest: str
    shapes: dict[str, list[int]] | None
    tail_mean: Arrays | None = None
    tables: DitherTables | None = None

    @classmethod
    def read(cls, path: Path) -> Origin | None:
        """Read the metadata of a Parquet file; None if it is no export of a cache.

        Raises ``CacheError`` if its manifest is damaged or of another version.
        """
        found, columns = read_parquet_metadata(path)
        keys = {name: f"potstill.{name}".encode() for name in _KEYS}
        if not found.keys() >= set(keys.values()):
            return None
        values = {name: found[key] for name, key in keys.items()}
        pairs = json.loads(zlib.decompress(values["tokens"]))
        stored = any(name.startswith(PREFIX) for name in columns)
        # Files of earlier versions have neither.
        rules = json.loads(found.get(b"potstill.rules", b"{}"))
        tails = zlib.decompress(found.get(b"potstill.tails", zlib.compress(b"")))
        mean = np.frombuffer(tails, "<f4").reshape(len(MEAN_ARRAYS), -1)
        ids = [(int(number), token) for number, token in pairs]
        manifest = Manifest.from_bytes(values["manifest"], str(path))
        return cls(
            path,
            manifest,
            TokenMap.from_pairs(ids, rules) if ids else None,
            int(values["first"]),
            values["digest"].decode("ascii"),
            json.loads(values["shapes"]) if stored else None,
            dict(zip(MEAN_ARRAYS, mean, strict=True)) if tails else None,
            _read_tables(found, manifest.identity.record_codec()),
        )

    def read_sequences(self) -> Iterator[tuple[Sequences, Records]]:
        """Yield each sequence with its records; raises ``DataError`` unless all are as exported."""
        digest = hashlib.sha256()
        if self.tables is not None:
            _update(digest, self.tables.to_arrays())
        schema = self.manifest.identity.record_codec().schema()
        columns = (*_PER_SEQUENCE, *(PREFIX + name for name in schema))
        for first, batch in read_table_batches(self.path, columns):
            for index in range(len(batch)):
                where = f"{self.path}: row {first + index}"
                arrays = {
                    name: _read_cell(batch, name, index, where, np.dtype(kind))
                    for name, kind in _PER_SEQUENCE.items()
                }
                arrays |= {
                    name: self._shape(name, _read_cell(batch, PREFIX + name, index, where, dtype))
                    for name, (dtype, _) in schema.items()
                }
                _update(digest, arrays)
                yield _make_sequence(arrays, where)
        if digest.hexdigest() != self.digest:
            raise DataError(f"{self.path} was changed since its export.", _UNTOUCHED)

    def _shape(self, name: str, flat: NDArray[Any]) -> NDArray[Any]:
        shape = (self.shapes or {}).get(name, [])
        width = int(np.prod(shape, dtype=np.int64))
        return flat[: len(flat) // width * width].reshape(-1, *shape)


def _read_tables(metadata: dict[bytes, bytes], codec: Codec) -> DitherTables | None:
    """Read the tables of the dither; None if the metadata of a file does not hold all of them.

    Raises ``ValueError`` or ``zlib.error`` for damaged ones.
    """
    keys = {name: f"potstill.dither.{name}".encode() for name in TABLE_ARRAYS}
    if not codec.rules.dithered or not metadata.keys() >= set(keys.values()):
        return None
    types = list_table_types(codec.vocabulary_size)
    found = {
        name: np.frombuffer(zlib.decompress(metadata[key]), types[name].newbyteorder("<"))
        for name, key in keys.items()
    }
    # All but the classes have a row for each cluster.
    rows = {name: found[name].reshape(codec.clusters, -1) for name in keys.keys() - {"classes"}}
    return DitherTables.from_arrays(found | rows)


def _read_cell(batch: Any, name: str, index: int, where: str, dtype: np.dtype[Any]) -> NDArray[Any]:
    found = read_flat_column(batch, name, index, where)
    if found is None or found.dtype.kind not in "biuf":
        raise DataError(f"{where}: {name} must hold numbers without null.", _UNTOUCHED)
    return found.astype(dtype)


def _make_sequence(arrays: Arrays, where: str) -> tuple[Sequences, Records]:
    try:
        sequences = Sequences(*(arrays[name][None] for name in _PER_SEQUENCE))
        return sequences, Records({key: arrays[key] for key in arrays if key not in _PER_SEQUENCE})
    except ValueError as error:
        raise DataError(f"{where}: {error}", _UNTOUCHED) from error


def read_origins(files: Sequence[Path]) -> list[Origin]:
    """Read the origin of each file, in the order of their sequences; empty if one has none.

    Raises ``DataError`` if a cache that they name cannot be read by this program.
    """
    found = []
    for path in files:
        try:
            origin = Origin.read(path)
        except (CacheError, ValueError, zlib.error) as error:
            raise DataError(f"{path} cannot be imported: {error}", _UNTOUCHED) from error
        if origin is None:
            return []
        found.append(origin)
    return sorted(found, key=lambda origin: origin.first)


def restore_cache(
    origins: Sequence[Origin], root: Path, teacher_name: str, monitor: Monitor
) -> Json:
    """Seal the cache of ``origins`` again below ``root``, unless it is sealed; return its summary.

    Raises ``DataError`` if a file is missing, of another cache or changed, before it writes.
    """
    manifest = origins[0].manifest
    identity = manifest.identity
    if (sealed := find_sealed_cache(root / identity.fingerprint, identity)) is not None:
        return summarise_cache(sealed, reused=True)
    monitor.emit("stage", stage="import", phase="checking")
    _require_whole(origins, monitor)
    name = teacher_name or manifest.provenance.teacher_name
    provenance = replace(manifest.provenance, teacher_name=name)

    def begin(writer: CacheWriter) -> None:
        if origins[0].tables is not None:
            writer.write_tables(origins[0].tables)

    def finish(writer: CacheWriter) -> None:
        if origins[0].token_map is not None:
            writer.write_token_map(origins[0].token_map.to_arrays())
        if origins[0].tail_mean is not None:
            writer.write_tail_mean(origins[0].tail_mean)
        writer.finish(provenance, manifest.fidelity, manifest.overruled)

    rows = chain.from_iterable(origin.read_sequences() for origin in origins)
    return seal_cache(root, identity, rows, lambda row, _: row, finish, monitor, begin)


def _require_whole(origins: Sequence[Origin], monitor: Monitor) -> None:
    """Raise ``DataError`` unless the files hold every sequence of one cache, in order."""
    identity = origins[0].manifest.identity
    done = 0
    for origin in origins:
        if origin.manifest.identity != identity:
            raise DataError(f"{origin.path} was exported from another cache.", _UNTOUCHED)
        if origin.first != done:
            detail = f"{origin.path} begins at sequence {origin.first}, but expected {done}."
            raise DataError(detail, _UNTOUCHED)
        for _ in origin.read_sequences():
            done += 1
            monitor.check("while checking the records")
    if done != identity.data.sequences:
        detail = f"{origins[-1].path} ends at sequence {done} of {identity.data.sequences}."
        raise DataError(detail, _UNTOUCHED)
