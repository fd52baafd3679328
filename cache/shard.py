"""One shard: a folder of plain Zarr arrays, and the seal that lists its files.

S   sequences        L   tokens of a sequence
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import zarr
from zarr.codecs import BloscCodec, Crc32cCodec

from cache.codec import Codec
from cache.disk import hash_file, list_file_sizes
from cache.errors import CacheCorrupt
from cache.layout import Arrays, encode_arrays
from cache.manifest import parse_as, sign_json, verify_json
from cache.records import Records, Sequences, compute_offsets
from cache.rounding import ENTROPY_STEP, KNOWN_STEP, PARTITION_STEP, TOP_STEP, choose_id_dtype
from cache.shards.entries import ShardEntry
from cache.units.dither import DitherTables

#: Arrays with one row for each sequence.
PER_SEQUENCE = ("tokens", "document_start", "target_mask")
#: Raw bytes of a chunk at most (one row at least). Reading a sequence decodes whole chunks.
CHUNK_BYTES = 1 << 20

#: Attribute ``scale`` of fixed-point arrays, for other readers: value in nats = scale * stored.
_SCALES = {
    "known": -KNOWN_STEP,
    "entropy": ENTROPY_STEP,
    "top_logprobs": -TOP_STEP,
    "residual": -TOP_STEP,
    "partition": PARTITION_STEP,
}
#: Reordering that blosc applies to bytes before zstd, where it is not the default of the type.
#: The two bytes of a token predict each other, so they stay together; fixed-point numbers have a
#: few smooth high bits above noise, so their bits are grouped (measured: docs/benchmarks).
_SHUFFLES: dict[str, Literal["noshuffle", "shuffle", "bitshuffle"]] = {
    "tokens": "noshuffle",
    "known": "bitshuffle",
}
_OWN_PIPELINE = "zarr.core.codec_pipeline.BatchedCodecPipeline"
#: Fixed settings, so that the bytes of a shard do not depend on the user's Zarr configuration. By
#: default Zarr omits chunks that hold only fill values, and a reader could not tell an omitted
#: chunk from a lost one.
_WRITE_SETTINGS = {
    "json_indent": None,
    "codec_pipeline.path": _OWN_PIPELINE,
    "array.write_empty_chunks": True,
}
#: The files that Zarr writes into a folder of arrays: metadata and chunks.
_WRITTEN = re.compile(r"(\w+/)?(zarr\.json|c(\.\d+)*)", re.ASCII)
RECAPTURE_REMEDY = "Run the job again: it captures the damaged shards again."


@dataclass(frozen=True)
class SealedFile:
    """The size and digest that one file of a shard must have."""

    bytes: int
    sha256: str


@dataclass(frozen=True)
class Seal:
    """The counts of one shard, and its files by name relative to the shard's folder."""

    sequences: int
    positions: int
    head_entries: int
    tail_entries: int
    files: dict[str, SealedFile]

    def to_bytes(self) -> bytes:
        """Encode the seal's file, with a digest of itself; ``from_bytes`` is the inverse."""
        return sign_json(asdict(self))

    @classmethod
    def from_bytes(cls, data: bytes, where: str) -> Seal:
        """Parse strictly; raise ``CacheCorrupt`` unless every byte is as it was written."""
        seal: Seal = parse_as(cls, verify_json(data, where), where)
        return seal

    @classmethod
    def of(cls, folder: Path, sequences: Sequences, records: Records) -> Seal:
        """Make the seal of the shard that was just written to ``folder``."""
        # Entries of topk have no count of their own: every record has K.
        heads = records["top_ids"].size if "top_ids" in records.columns else records.length("head")
        return cls(len(sequences), len(records), heads, records.length("tail"), _hash_files(folder))

    @classmethod
    def of_folder(cls, folder: Path) -> Seal:
        """Make the seal of a folder without records, that of the teacher's LM head."""
        return cls(0, 0, 0, 0, _hash_files(folder))

    def to_entry(self) -> ShardEntry:
        """Make the shard's entry in the manifest."""
        counts = (self.sequences, self.positions, self.head_entries, self.tail_entries)
        return ShardEntry(*counts, bytes=self.bytes, digest=self.digest)

    @property
    def bytes(self) -> int:
        """Bytes of all files and of the seal itself."""
        return len(self.to_bytes()) + sum(file.bytes for file in self.files.values())

    @property
    def digest(self) -> str:
        """sha256 of the seal's file."""
        return hashlib.sha256(self.to_bytes()).hexdigest()

    def find_problems(self, folder: Path) -> list[str]:
        """Read every sealed byte of ``folder``; return a line for each missing or wrong file.

        Other files are ignored: file managers and file servers put theirs into any folder.
        """

        def check(name: str) -> str:
            return self.check_file(name, _measure(folder / name), lambda: hash_file(folder / name))

        return [line for line in map(check, self.files) if line]

    def check_file(self, name: str, size: int | None, hash_content: Callable[[], str]) -> str:
        """Return a line that says what is wrong with a file; empty if nothing is.

        ``size`` is None for a file that is missing. The content is read last.
        """
        sealed = self.files[name]
        if size is None:
            return f"{name}: missing"
        if size != sealed.bytes:
            return f"{name}: expected {sealed.bytes} bytes, got {size}"
        return "" if hash_content() == sealed.sha256 else f"{name}: content differs from its sha256"

    def require_files(self, folder: Path) -> None:
        """Raise ``CacheCorrupt`` unless every file exists with its size; no content is read."""
        for name, file in self.files.items():
            if (found := _measure(folder / name)) != file.bytes:
                got = "the file is missing" if found is None else f"got {found}"
                raise CacheCorrupt(
                    f"{folder / name}: expected {file.bytes} bytes, but {got}.", RECAPTURE_REMEDY
                )


def _measure(path: Path) -> int | None:
    """Return the bytes of a file, or None if there is none."""
    try:
        return path.stat().st_size
    except (FileNotFoundError, NotADirectoryError):
        return None


def _hash_files(folder: Path) -> dict[str, SealedFile]:
    return {
        name: SealedFile(size, hash_file(folder / name))
        for name, size in list_file_sizes(folder).items()
        if _WRITTEN.fullmatch(name)
    }


def make_shard_arrays(
    sequences: Sequences, records: Records, codec: Codec, tables: DitherTables | None = None
) -> Arrays:
    """Make the arrays of a shard: sequences, records, and the offsets of each sequence."""
    positions = compute_offsets(sequences.target_mask.sum(axis=1))
    return {
        "tokens": sequences.tokens.astype(choose_id_dtype(codec.vocabulary_size)),
        "document_start": sequences.document_start,
        "target_mask": sequences.target_mask,
        **encode_arrays(records, positions, codec, tables),
    }


def write_arrays(folder: Path, arrays: Arrays) -> None:
    """Write a new Zarr group at ``folder``; the same arrays give the same bytes."""
    with zarr.config.set(_WRITE_SETTINGS):
        group = zarr.create_group(store=folder, zarr_format=3)
        for name, values in arrays.items():
            row_bytes = values.itemsize * int(np.prod(values.shape[1:]))
            chunk_rows = max(1, min(len(values), CHUNK_BYTES // max(row_bytes, 1)))
            shuffle = _SHUFFLES.get(name, "noshuffle" if values.itemsize == 1 else "shuffle")
            array = group.create_array(
                name,
                shape=values.shape,
                dtype=values.dtype,
                chunks=(chunk_rows, *values.shape[1:]),
                filters=None,
                compressors=[BloscCodec(cname="zstd", clevel=5, shuffle=shuffle), Crc32cCodec()],
                chunk_key_encoding={"name": "default", "separator": "."},
                fill_value=0,
                attributes={"scale": _SCALES[name]} if name in _SCALES else {},
            )
            if values.size:
                array[...] = values
