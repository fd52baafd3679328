"""The files of a token store.

    inputs.json               what the text was made of; written first
    shards/000/000000.tokens  packed sequences: tokens, then boundaries, then the mask, as bits
    shards/000/000000.json    the seal of that shard: its counts and its sha256
    progress.json             how far the text is read; gone when the store is complete
    manifest.json             counts of the whole; written last, so that its presence means complete

Each file appears whole or not at all. Shards have an equal number of sequences, so that the shard
of a sequence is found by division; no file lists all shards.

Shapes: S sequences of a shard, L positions of a sequence.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cache import disk
from cache.errors import CacheError
from cache.json_object import Json
from cache.reading.usage import exclude_readers, locate_use, read_last_use
from cache.records import Sequences
from kd.errors import DataError
from kd.progress import Notice
from kd.text.stored.places import Cursor

#: The version of the format. A store of another version is refused. Raise it, too, if a change to
#: the packing gives the same text other sequences, or if ``SHARD_TOKENS`` or the constants of
#: ``kd.text.text_encoder`` change: a store that is half written then has other places.
FORMAT = 1
#: Tokens of a shard, about: what an interruption loses, and what is in memory at once.
SHARD_TOKENS = 1 << 22
INPUTS = "inputs.json"
PROGRESS = "progress.json"
MANIFEST = "manifest.json"
#: Ids below this number are stored in two bytes.
_TWO_BYTES = 1 << 16
#: Shards of a folder.
_SHARDS_OF_FOLDER = 1000


@dataclass(frozen=True)
class Layout:
    """How the sequences of a store lie in its files; ``dtype`` is that of the tokens."""

    sequence_length: int
    dtype: str
    shard_sequences: int

    @classmethod
    def choose(cls, sequence_length: int, vocabulary_size: int | None) -> Layout:
        """Choose the smallest type that holds every id below ``vocabulary_size``."""
        small = vocabulary_size is not None and vocabulary_size <= _TWO_BYTES
        shard_sequences = count_shard_sequences(sequence_length)
        return cls(sequence_length, "<u2" if small else "<u4", shard_sequences)

    @property
    def bytes_per_token(self) -> float:
        """Bytes of a token on the disk, its two bits included."""
        return self.count_bytes(1) / self.sequence_length

    def count_bytes(self, sequences: int) -> int:
        """Count the bytes of a shard of ``sequences`` sequences."""
        tokens = self.sequence_length * np.dtype(self.dtype).itemsize
        return sequences * (tokens + 2 * self._count_bit_bytes())

    def _count_bit_bytes(self) -> int:
        return -(-self.sequence_length // 8)

    def encode(self, sequences: Sequences) -> bytes:
        """Return the bytes of a shard; the inverse of ``map_shard``."""
        bits = (sequences.document_start, sequences.target_mask)
        parts = [sequences.tokens.astype(self.dtype), *(np.packbits(each, axis=1) for each in bits)]
        return b"".join(part.tobytes() for part in parts)

    def map_shard(self, path: Path, sequences: int) -> ShardArrays:
        """Map the file of a shard into memory."""
        whole = np.memmap(path, np.uint8, mode="r")
        cut = sequences * self.sequence_length * np.dtype(self.dtype).itemsize
        starts, mask = whole[cut:].reshape(2, sequences, self._count_bit_bytes())
        tokens = whole[:cut].view(self.dtype).reshape(sequences, self.sequence_length)
        return ShardArrays(tokens, starts, mask)


@dataclass(frozen=True)
class ShardArrays:
    """The arrays of a shard: tokens (S, L), and the bits of boundaries and mask (S, L / 8)."""

    tokens: NDArray[Any]
    starts: NDArray[np.uint8]
    mask: NDArray[np.uint8]

    def read(self, rows: Any) -> Sequences:
        """Return the sequences at ``rows`` (an index array or a slice), in that order."""
        starts, mask = (
            np.unpackbits(bits[rows], axis=1, count=self.tokens.shape[1]).view(bool)
            for bits in (self.starts, self.mask)
        )
        return Sequences(self.tokens[rows].astype(np.uint32), starts, mask)


@dataclass(frozen=True)
class TokenSeal:
    """The counts of a finished shard, and the bytes and the hash of its file."""

    sequences: int
    targets: int
    size: int
    sha256: str

    @classmethod
    def of(cls, data: bytes, sequences: Sequences) -> TokenSeal:
        """Seal a shard whose file holds ``data``."""
        return cls(len(sequences), sequences.positions, len(data), hashlib.sha256(data).hexdigest())

    @classmethod
    def read(cls, folder: Path, index: int) -> TokenSeal:
        """Read the seal of shard ``index``. Raises ``DataError`` if it is missing or damaged."""
        value = read_object(folder, locate_seal(folder, index))
        try:
            return cls(**value)
        except TypeError as error:
            raise damaged(folder, f"the seal of shard {index} is none: {error}") from None


@dataclass(frozen=True)
class StoreProgress:
    """The sums of the first ``shards`` shards, and where the text goes on after them.

    ``sha256`` is a chain: the hash of the one before it and of the next shard's. ``notes`` is what
    was found up to there (``TextNotes.to_json``).
    """

    shards: int
    sequences: int
    targets: int
    sha256: str
    cursor: Cursor
    notes: list[Any] = field(default_factory=list)

    @classmethod
    def read(cls, folder: Path) -> StoreProgress | None:
        """Read how far the store in ``folder`` is written; None if it has no shard."""
        if not (folder / PROGRESS).is_file():
            return None
        value = read_object(folder, folder / PROGRESS)
        try:
            return cls(**{**value, "cursor": Cursor.from_json(value["cursor"])})
        except (TypeError, KeyError, ValueError) as error:
            raise damaged(folder, f"{PROGRESS} lacks a field: {error}") from None

    def add(self, seal: TokenSeal, cursor: Cursor, notes: list[Any]) -> StoreProgress:
        """Return the progress after one more shard."""
        return StoreProgress(
            self.shards + 1,
            self.sequences + seal.sequences,
            self.targets + seal.targets,
            hashlib.sha256(bytes.fromhex(self.sha256 + seal.sha256)).hexdigest(),
            cursor,
            notes,
        )

    def to_json(self) -> Json:
        """Return the content of the file."""
        return {**asdict(self), "cursor": self.cursor.to_json()}


@dataclass(frozen=True)
class TextManifest:
    """The counts of a complete store.

    ``sha256`` is that of ``StoreProgress`` after the last shard. ``ended``: the number of the text
    that ended a mixture. ``notices``: what was found in the text and left out or changed.
    """

    layout: Layout
    sequences: int
    targets: int
    sha256: str
    ended: int | None
    notices: tuple[Notice, ...] = ()

    @classmethod
    def read(cls, folder: Path) -> TextManifest:
        """Read the manifest in ``folder``. Raises ``DataError`` for another version or damage."""
        value = read_object(folder, folder / MANIFEST)
        require_format(folder, value)
        try:
            layout = Layout(**value.pop("layout"))
            notices = tuple(Notice(**each) for each in value.pop("notices", ()))
            counts = {name: value[name] for name in value if name != "format"}
            return cls(layout, **counts, notices=notices)
        except (TypeError, KeyError) as error:
            raise damaged(folder, f"{MANIFEST} lacks a field: {error}") from None

    def to_json(self) -> Json:
        """Return the content of the manifest's file."""
        return {"format": FORMAT, **asdict(self)}


def count_shard_sequences(sequence_length: int) -> int:
    """Count the sequences of a shard."""
    return max(SHARD_TOKENS // sequence_length, 1)


def locate_lock(folder: Path) -> Path:
    """Return the path of the lock that the writer of the store in ``folder`` holds."""
    return folder.with_name(f"{folder.name}.lock")


def locate_shard(folder: Path, index: int) -> Path:
    """Return the path of shard ``index``; its seal has the suffix ``.json``."""
    return folder / "shards" / f"{index // _SHARDS_OF_FOLDER:03d}" / f"{index:06d}.tokens"


def locate_seal(folder: Path, index: int) -> Path:
    """Return the path of the seal of shard ``index``."""
    return locate_shard(folder, index).with_suffix(".json")


def read_object(folder: Path, path: Path) -> Json:
    """Read the JSON object at ``path`` in a store. Raises ``DataError`` if missing or damaged."""
    name = path.relative_to(folder)
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise damaged(folder, f"{name} is missing") from None
    except ValueError as error:
        raise damaged(folder, f"{name} is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise damaged(folder, f"{name} is not a JSON object")
    return value


def require_format(folder: Path, value: Json) -> None:
    """Raise ``DataError`` if a file of the store has another version than this program."""
    if (found := value.get("format")) != FORMAT:
        detail = f"{folder}: the token store has version {found}, but this program reads {FORMAT}."
        remedy = "Upgrade Potstill, or delete the folder: the text is then tokenized again."
        raise DataError(detail, remedy)


def damaged(folder: Path, what: str) -> DataError:
    """Return the error for a store that is damaged."""
    detail = f"The token store {folder} is damaged: {what}."
    return DataError(detail, "Delete that folder and run again: the text is then tokenized again.")


@dataclass(frozen=True)
class StoreSummary:
    """A token store on the disk: its bytes, and the time of its last use, in seconds since 1970."""

    folder: Path
    size: int
    used: float
    complete: bool


def list_stores(texts: Path) -> Iterator[StoreSummary]:
    """List the token stores below ``texts``; the last use is the last reading or writing."""
    for folder in sorted(texts.iterdir()) if texts.is_dir() else ():
        if folder.name.startswith(disk.TEMPORARY_PREFIX) or not (folder / INPUTS).is_file():
            continue
        size = disk.sum_file_sizes(folder)
        used = max(disk.find_last_change(folder), read_last_use(folder) or 0.0)
        yield StoreSummary(folder, size, used, (folder / MANIFEST).is_file())


def remove_store(folder: Path, require_free: Callable[[], None]) -> None:
    """Remove a token store; raise ``CacheError`` while it is written or read.

    Before that ``require_free`` is called, when no reader can begin any more; it may raise to keep
    the store. A run that needs it again makes it again.
    """

    def refuse() -> None:
        raise CacheError(f"{folder} is being written by a run.", "Wait until the run has ended.")

    with disk.locked(locate_lock(folder), refuse):
        with exclude_readers(folder):
            require_free()
            aside = disk.set_aside(folder)
            disk.remove_path(locate_use(folder))
        disk.remove_path(aside)
        disk.remove_path(locate_lock(folder))
