"""One shard: a folder of plain Zarr arrays, and the seal that says what must be in it.

S   sequences        L   tokens of a sequence
"""

from __future__ import annotations

import functools
import hashlib
import importlib.util
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import zarr
from numpy.typing import NDArray
from zarr.codecs import BloscCodec, Crc32cCodec

from cache.codec import ENTROPY_STEP, KNOWN_STEP, PARTITION_STEP, TOP_STEP, Codec, id_dtype
from cache.disk import file_sha256, files_below
from cache.errors import CacheCorrupt
from cache.layout import TOKEN_CLASSES, Arrays, one_sequence, to_arrays, token_order
from cache.manifest import ShardEntry, parse, signed_json, verified_json
from cache.profiles import PROFILES
from cache.records import Records, Sequences, offsets_of

#: Arrays with one row a sequence.
PER_SEQUENCE = ("tokens", "document_start", "target_mask")
#: Raw bytes of a chunk at most (one row at least): what has to be decoded to read one sequence.
CHUNK_BYTES = 1 << 20

#: How to read the fixed-point arrays without this program: value in nats = scale * stored.
_SCALES = {
    "known": -KNOWN_STEP,
    "entropy": ENTROPY_STEP,
    "top_logprobs": -TOP_STEP,
    "residual": -TOP_STEP,
    "partition": PARTITION_STEP,
}
#: What blosc does to the bytes before zstd. Single bytes have nothing to gain; in tokens both bytes of a word tell of
#: each other; fixed-point numbers have a few smooth high bits above noise (measured: docs/benchmarks).
_SHUFFLES: dict[str, Literal["noshuffle", "shuffle", "bitshuffle"]] = {"tokens": "noshuffle", "known": "bitshuffle"}
_OWN_PIPELINE = "zarr.core.codec_pipeline.BatchedCodecPipeline"
#: Fixed, so that a shard's bytes do not depend on how the user set up Zarr. By default Zarr leaves out chunks that
#: hold only fill values, and then nobody could tell them from lost ones.
_WRITE_SETTINGS = {
    "json_indent": None,
    "codec_pipeline.path": _OWN_PIPELINE,
    "array.write_empty_chunks": True,
}
_REMEDY = "Run the job again: damaged shards are captured anew."


@dataclass(frozen=True)
class SealedFile:
    """What one file of a shard must be."""

    bytes: int
    sha256: str


@dataclass(frozen=True)
class Seal:
    """What one shard must be: counts, and every file by name relative to the shard's folder."""

    sequences: int
    positions: int
    head_entries: int
    tail_entries: int
    files: dict[str, SealedFile]

    def to_bytes(self) -> bytes:
        """The seal's file, with a digest of itself; ``from_bytes`` is its inverse."""
        return signed_json(asdict(self))

    @classmethod
    def from_bytes(cls, data: bytes, where: str) -> Seal:
        """Parse strictly; raises ``CacheCorrupt`` unless every byte is as it was written."""
        seal: Seal = parse(cls, verified_json(data, where), where)
        return seal

    @classmethod
    def of(cls, folder: Path, sequences: Sequences, records: Records) -> Seal:
        """The seal of the shard just written to ``folder``."""
        files = {name: SealedFile(size, file_sha256(folder / name)) for name, size in files_below(folder).items()}
        heads = records["top_ids"].size if "top_ids" in records.columns else records.length("head")
        return cls(len(sequences), len(records), heads, records.length("tail"), files)

    @classmethod
    def of_folder(cls, folder: Path) -> Seal:
        """The seal of a folder that holds no records: the teacher's LM head."""
        files = {name: SealedFile(size, file_sha256(folder / name)) for name, size in files_below(folder).items()}
        return cls(0, 0, 0, 0, files)

    def entry(self) -> ShardEntry:
        """The shard's line in the manifest."""
        counts = (self.sequences, self.positions, self.head_entries, self.tail_entries)
        return ShardEntry(*counts, bytes=self.bytes, digest=self.digest)

    @property
    def bytes(self) -> int:
        """Bytes of all files, and of the seal itself."""
        return len(self.to_bytes()) + sum(file.bytes for file in self.files.values())

    @property
    def digest(self) -> str:
        """sha256 of the seal's file."""
        return hashlib.sha256(self.to_bytes()).hexdigest()

    def problems(self, folder: Path) -> list[str]:
        """One line for each file of ``folder`` that is missing, extra or differs; reads every byte."""
        found = files_below(folder)
        lines = [f"{name}: not part of the cache" for name in found if name not in self.files]
        for name, file in self.files.items():
            if name not in found:
                lines.append(f"{name}: missing")
            elif found[name] != file.bytes:
                lines.append(f"{name}: expected {file.bytes} bytes, got {found[name]}")
            elif file_sha256(folder / name) != file.sha256:
                lines.append(f"{name}: content differs from its sha256")
        return lines

    def require_files(self, folder: Path) -> None:
        """Raise ``CacheCorrupt`` unless every file is there in its size; reads no content."""
        found = files_below(folder)
        for name, file in self.files.items():
            if found.get(name) != file.bytes:
                got = f"got {found[name]}" if name in found else "the file is missing"
                raise CacheCorrupt(f"{folder / name}: expected {file.bytes} bytes, but {got}.", _REMEDY)


def shard_arrays(sequences: Sequences, records: Records, codec: Codec) -> Arrays:
    """The arrays of a shard: records, their sequences, and the offsets that let one be read alone."""
    positions = offsets_of(sequences.target_mask.sum(axis=1))
    return {
        "tokens": sequences.tokens.astype(id_dtype(codec.vocabulary_size)),
        "document_start": sequences.document_start,
        "target_mask": sequences.target_mask,
        **to_arrays(records, positions, codec),
    }


def write_arrays(folder: Path, arrays: Arrays) -> None:
    """Write a new Zarr group at ``folder``; the same arrays give the same bytes."""
    with zarr.config.set(_WRITE_SETTINGS):
        group = zarr.create_group(store=folder, zarr_format=3)
        for name, values in arrays.items():
            _write_array(group, name, values)


def _write_array(group: zarr.Group, name: str, values: NDArray[Any]) -> None:
    array = group.create_array(
        name,
        shape=values.shape,
        dtype=values.dtype,
        chunks=_chunk_shape(values),
        filters=None,
        compressors=[BloscCodec(cname="zstd", clevel=5, shuffle=_shuffle(name, values)), Crc32cCodec()],
        chunk_key_encoding={"name": "default", "separator": "."},
        fill_value=0,
        attributes={"scale": _SCALES[name]} if name in _SCALES else {},
    )
    if values.size:
        array[...] = values


@functools.cache
def _read_settings() -> dict[str, str]:
    """The pipeline that decodes chunks: zarrs where it is installed, which is faster, else zarr's own."""
    if importlib.util.find_spec("zarrs") is None:
        return {"codec_pipeline.path": _OWN_PIPELINE}
    importlib.import_module("zarrs")  # registers the pipeline
    return {"codec_pipeline.path": "zarrs.ZarrsCodecPipeline"}


def _shuffle(name: str, values: NDArray[Any]) -> Literal["noshuffle", "shuffle", "bitshuffle"]:
    return _SHUFFLES.get(name, "noshuffle" if values.itemsize == 1 else "shuffle")


def _chunk_shape(values: NDArray[Any]) -> tuple[int, ...]:
    row_bytes = values.itemsize * int(np.prod(values.shape[1:]))
    rows = max(1, min(len(values), CHUNK_BYTES // max(row_bytes, 1)))
    return (rows, *values.shape[1:])


class Folder:
    """A sealed folder of arrays, open for reading: chunks are decoded when first needed and then kept.

    A file is compared with the seal's sha256 before it is first decoded: a chunk's crc32c says that its bytes are
    whole, not that they belong here, and Zarr reads a missing chunk as zeros. ``sound`` holds the files that were found
    right, so that whoever opens a folder again does not pay for that twice. Any failure is a ``CacheCorrupt`` naming
    the array.
    """

    def __init__(self, folder: Path, seal: Seal, sound: set[Path] | None = None) -> None:
        self.folder = folder
        self.seal = seal
        self._sound = set() if sound is None else sound
        self.nbytes = 0
        self._arrays: dict[str, Any] = {}
        self._rows: dict[str, int] = {}
        self._chunks: dict[tuple[str, int], NDArray[Any]] = {}

    def whole(self, name: str) -> NDArray[Any]:
        """All rows of array ``name``."""
        return self.rows(name, 0, self._array(name).shape[0])

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of array ``name``."""
        return tuple(self._array(name).shape)

    def rows(self, name: str, start: int, stop: int) -> NDArray[Any]:
        """Rows ``start`` to ``stop`` of array ``name`` as stored; a copy only where they lie in several chunks."""
        if start == stop:
            return np.empty((0, *self._array(name).shape[1:]), self._array(name).dtype)
        size = self._chunk_rows(name)
        first, last = start // size, (stop - 1) // size
        if first == last:
            return self._chunk(name, first)[start - first * size : stop - first * size]
        joined = np.concatenate([self._chunk(name, number) for number in range(first, last + 1)])
        return joined[start - first * size : stop - first * size]

    def _array(self, name: str) -> Any:
        if name not in self._arrays:
            self._arrays[name] = self._open(name)
        return self._arrays[name]

    def _chunk_rows(self, name: str) -> int:
        """Rows of a chunk; asked for with every slice, so not left to zarr, which works it out anew."""
        if name not in self._rows:
            self._rows[name] = int(self._array(name).chunks[0])
        return self._rows[name]

    def _open(self, name: str) -> Any:
        try:
            self._require_sealed(f"{name}/zarr.json")
            with zarr.config.set(_read_settings()):
                return zarr.open_array(store=self.folder / name, mode="r", zarr_format=3)
        except (FileNotFoundError, KeyError, ValueError) as error:
            raise self._corrupt(name, error) from error

    def _chunk(self, name: str, number: int) -> NDArray[Any]:
        if (name, number) not in self._chunks:
            chunk = self._decode(name, number)
            self._chunks[name, number] = chunk
            self.nbytes += chunk.nbytes
        return self._chunks[name, number]

    def _decode(self, name: str, number: int) -> NDArray[Any]:
        array, size = self._array(name), self._chunk_rows(name)
        key = ".".join(["c", str(number), *["0"] * (array.ndim - 1)])
        try:
            self._require_sealed(f"{name}/{key}")
            chunk = np.asarray(array[number * size : (number + 1) * size])
        except (FileNotFoundError, ValueError, RuntimeError, TypeError, LookupError) as error:
            raise self._corrupt(f"{name}, chunk {key}", error) from error
        chunk.flags.writeable = False
        return chunk

    def _require_sealed(self, path: str) -> None:
        """Raise unless the file is there and was, when it was first read, byte for byte the one that was sealed."""
        file = self.folder / path
        file.stat()
        if file in self._sound:
            return
        if file_sha256(file) != self.seal.files[path].sha256:
            raise ValueError(f"{path} differs from its sha256")
        self._sound.add(file)

    def _corrupt(self, what: str, error: Exception) -> CacheCorrupt:
        return CacheCorrupt(f"{self.folder}: array {what} cannot be read: {error}.", _REMEDY)


class Shard(Folder):
    """One sealed shard, open for reading."""

    def __init__(self, folder: Path, seal: Seal, codec: Codec, sound: set[Path]) -> None:
        super().__init__(folder, seal, sound)
        self.codec = codec
        self.offsets = self.whole("offsets").astype(np.int64)
        sampled = PROFILES[codec.profile].sampled
        self.order = token_order(self.whole(TOKEN_CLASSES), codec) if sampled else np.empty(0)

    def sequence(self, row: int, draw: int = 0) -> Arrays:
        """Tokens, boundaries, mask and record arrays of sequence ``row`` as stored, with the tails of ``draw``."""
        first, last = self.offsets[row].tolist(), self.offsets[row + 1].tolist()
        parts = {name: self.rows(name, row, row + 1) for name in PER_SEQUENCE}
        return parts | one_sequence(lambda name, cut: self.rows(name, first[cut], last[cut]), self.codec, draw)
