"""A sealed cache -> a dataset of another tool: plain Parquet, or DistillKit's.

    sequences and entries, a few at a time -> a table of rows -> train-*.parquet, validation-*.parquet

S sequences    L tokens of a sequence    P positions with a record    k entries of a position
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from cache.profiles import PROFILES
from cache.records import Sequences, offsets_of
from cache.store import Cache
from kd.errors import DataError
from kd.exchange import distillkit, parquet
from kd.exchange.distillkit import INDICES, LOGPROBS, Compression
from kd.exchange.entries import Entries, entries_of, entry_count
from kd.files import whole_folder
from kd.progress import SILENT, Meter, Monitor

#: Sequences of a file.
FILE_SEQUENCES = 2048
#: Log-probability of what fills a record up to k in DistillKit's format, which has no place for fewer. Its own sampler
#: leaves -inf there, which its loss turns into NaN; exp(-100) is 0 to it, and finite.
FILLING = -100.0


class Layout(Protocol):
    """How rows of another tool are made of sequences and their entries."""

    @property
    def schema(self) -> Any:
        """The ``pyarrow.Schema`` of its rows."""
        ...

    def table(self, sequences: Sequences, entries: Entries) -> Any:
        """A ``pyarrow.Table`` of them."""
        ...

    def finish(self, folder: Path) -> dict[str, Any]:
        """Write what belongs beside the rows; returns what is worth saying."""
        ...


def export_records(
    store: Cache, format: str, folder: Path, k: int | None = None, monitor: Monitor = SILENT
) -> dict[str, Any]:
    """Write the records of a cache as a new dataset in ``folder``; returns a summary.

    Of profiles topk, dense and hidden ``k`` entries are written as they are; of threshold and tempered all entries
    with their weights (Parquet), or the ``k`` most probable of those that are not sampled (DistillKit). Raises
    ``DataError`` where ``format`` or ``k`` does not fit the cache, or ``folder`` is not empty.
    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise DataError(f"{folder} is not empty.", "Name a new folder.")
    layout, files = _layout(store, format, k), dict(_files(store))
    meter = Meter(len(store), "sequences")
    with whole_folder(folder) as temporary:
        for name, numbers in files.items():
            _write(temporary / name, layout, entries_of(store, numbers, k))
            monitor.emit("progress", **meter.advance(len(numbers), 0))
            monitor.check(f"after {name}; nothing of it is kept")
        said = layout.finish(temporary)
    return {"path": str(folder), "files": list(files), "sequences": len(store), **said}


def _layout(store: Cache, format: str, k: int | None) -> Layout:
    profile = store.codec.profile
    most = entry_count(store, k)
    if format == "distillkit":
        return DistillKitLayout(profile, most, store.codec.vocabulary_size)
    if format != "parquet":
        raise DataError(f"There is no format {format!r}.", "Use parquet or distillkit.")
    if k is not None and PROFILES[profile].sampled:
        raise DataError(f"The entries of profile {profile} are right only together.", "Leave out k.")
    return PlainLayout(PROFILES[profile].sampled)


def _files(store: Cache) -> Iterator[tuple[str, range]]:
    """The files of an export, named so that ``datasets`` finds the splits, and the sequences in each."""
    for split, numbers in (("train", store.train), ("validation", store.validation)):
        for index, first in enumerate(range(0, len(numbers), FILE_SEQUENCES)):
            yield f"{split}-{index:05d}.parquet", numbers[first : first + FILE_SEQUENCES]


def _write(path: Path, layout: Layout, parts: Iterator[tuple[Sequences, Entries]]) -> None:
    import pyarrow.parquet

    with pyarrow.parquet.ParquetWriter(path, layout.schema) as file:
        for sequences, entries in parts:
            file.write_table(layout.table(sequences, entries))


# ---------------------------------------------------------------------- plain Parquet


@dataclass(frozen=True)
class PlainLayout:
    """Plain Parquet, one row a sequence (``kd.exchange.parquet``); ``weights`` in place of log-probabilities."""

    weights: bool

    @property
    def schema(self) -> Any:
        """The ``pyarrow.Schema`` of its rows."""
        return parquet.schema(self.weights)

    def table(self, sequences: Sequences, entries: Entries) -> Any:
        """A ``pyarrow.Table`` of S rows."""
        import pyarrow

        flags, length = sequences.target_mask.reshape(-1), sequences.length
        counts = np.zeros(flags.size, np.int64)
        counts[flags] = entries.counts
        named = "weights" if self.weights else "logprobs"
        columns = {
            "input_ids": pyarrow.array(sequences.tokens.reshape(-1)),
            "document_start": pyarrow.array(sequences.document_start.reshape(-1)),
            "target_mask": pyarrow.array(flags),
            "ids": _lists(counts, entries.ids.astype(np.uint32)),
            named: _lists(counts, getattr(entries, named).astype(np.float32)),
            "residual": _placed(flags, entries.residual),
            "gold_logprob": _placed(flags, entries.gold),
            "entropy": _placed(flags, entries.entropy),
        }
        per_row = np.full(len(sequences), length)
        rows = {name: _of_offsets(per_row, columns[name]) for name in self.schema.names}
        return pyarrow.table(rows).cast(self.schema)

    def finish(self, folder: Path) -> dict[str, Any]:
        """There is nothing beside the rows."""
        return {}


def _lists(counts: NDArray[Any], values: NDArray[Any]) -> Any:
    import pyarrow

    return _of_offsets(counts, pyarrow.array(values))


def _of_offsets(counts: NDArray[Any], values: Any) -> Any:
    """``values`` as consecutive lists of ``counts`` items."""
    import pyarrow

    return pyarrow.ListArray.from_arrays(pyarrow.array(offsets_of(counts), pyarrow.int32()), values)


def _placed(flags: NDArray[np.bool_], values: NDArray[Any]) -> Any:
    """``values`` (P,) where ``flags`` are set, null elsewhere and where a value is not finite."""
    import pyarrow

    placed = np.full(flags.size, np.nan, np.float32)
    placed[flags] = values
    return pyarrow.array(placed, mask=~np.isfinite(placed))


# ---------------------------------------------------------------------- DistillKit


@dataclass
class DistillKitLayout:
    """DistillKit's dataset, one row a document, in which every log-probability is a float32 of its own.

    A position without a record inside a document has no place in it and is refused.
    """

    profile: str
    k: int
    vocabulary: int
    rows: int = 0
    records: int = 0
    filled: int = 0
    mass: float = 0.0
    compression: Compression = field(init=False)

    def __post_init__(self) -> None:
        self.compression = Compression(
            d=max(self.vocabulary, 2), k=self.k, exact_k=self.k, residual_bins=(), delta_encoding=False
        )

    @property
    def schema(self) -> Any:
        """The ``pyarrow.Schema`` of its rows."""
        return distillkit.schema()

    def table(self, sequences: Sequences, entries: Entries) -> Any:
        """A ``pyarrow.Table`` with a row for each document that has records."""
        import pyarrow

        ids, logprobs = entries.top(self.k)
        self.filled += int(np.isneginf(logprobs).any(axis=1).sum())
        self.mass += float(np.exp(logprobs).sum())
        stored = distillkit.encode(self.compression, *_filled(ids, logprobs, self.vocabulary))
        lengths, tokens = _documents(sequences)
        self.rows, self.records = self.rows + len(lengths), self.records + len(ids)
        columns = {"input_ids": _of_offsets(lengths, pyarrow.array(tokens.astype(np.uint64)))}
        for name, content in zip((LOGPROBS, INDICES), stored, strict=True):
            per_position = _lists(np.full(len(ids), content.shape[1]), content.reshape(-1))
            columns[name] = _of_offsets(lengths - 1, per_position)
        return pyarrow.table(columns).cast(self.schema)

    def finish(self, folder: Path) -> dict[str, Any]:
        """Write the configuration; says how much of the cache had no place."""
        (folder / distillkit.CONFIG).write_text(self.compression.to_yaml(), encoding="utf-8")
        kept = self.mass / max(self.records, 1)
        said = {"rows": self.rows, "records": self.records, "k": self.k, "kept_mass": round(kept, 6)}
        if not PROFILES[self.profile].sampled:
            return said
        warning = (
            f"DistillKit has no place for the sampled tail of profile {self.profile}: {1 - kept:.1%} of the "
            f"probability is left out, and {self.filled:,} of {self.records:,} records are filled up to {self.k} "
            f"entries with tokens of log-probability {FILLING:g}."
        )
        return said | {"warning": warning}


def _filled(ids: NDArray[Any], logprobs: NDArray[Any], vocabulary: int) -> tuple[NDArray[Any], NDArray[Any]]:
    """The records (P, k) with other tokens, the first of the vocabulary, where they have no entry."""
    there = np.isfinite(logprobs)
    free = np.ones((len(ids), min(2 * ids.shape[1], vocabulary)), bool)
    rows, places = np.nonzero(there & (ids < free.shape[1]))
    free[rows, ids[rows, places]] = False
    others = np.argsort(~free, axis=1, kind="stable")
    nth = np.maximum(np.arange(ids.shape[1]) - there.sum(axis=1, keepdims=True), 0)
    return np.where(there, ids, np.take_along_axis(others, nth, axis=1)), np.where(there, logprobs, FILLING)


def _documents(sequences: Sequences) -> tuple[NDArray[np.int64], NDArray[np.uint32]]:
    """The lengths of the documents that have records, and their tokens one after the other."""
    start = sequences.document_start.copy()
    start[:, 0] = True
    begins = np.flatnonzero(start)
    lengths = np.diff(np.append(begins, start.size))
    records = np.add.reduceat(sequences.target_mask.reshape(-1).astype(np.int64), begins)
    wanted = records > 0
    if (records[wanted] != lengths[wanted] - 1).any():
        detail = "a document has positions without a record, such as those that a completion-only mask leaves out."
        raise DataError(f"DistillKit has a record for every position, but {detail}", "Export Parquet instead.")
    return lengths[wanted], sequences.tokens.reshape(-1)[np.repeat(wanted, lengths)]
