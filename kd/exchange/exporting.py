"""Export a sealed cache as a dataset for another tool: plain Parquet, or the format of DistillKit.

    sequences and entries, a few at a time -> a table of rows
                                           -> train-*.parquet, validation-*.parquet

Shapes: B sequences, L positions of a sequence, N positions with a record, K entries of a position.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cache.codec import Codec
from cache.json_object import Json
from cache.profiles.table import PROFILES
from cache.records import Records, Sequences, compute_offsets
from cache.store import Cache
from kd.errors import DataError
from kd.exchange import distillkit, parquet
from kd.exchange.distillkit import FILL_LOGPROB, INDICES, LOGPROBS, Compression
from kd.exchange.entries import EntryTable, choose_entry_count, read_entries
from kd.exchange.restoring import PREFIX, FileDescription, cut_by_sequence, make_stored_schema
from kd.files import whole_folder
from kd.progress import SILENT, Monitor, ProgressMeter

#: Sequences in one file.
FILE_SEQUENCES = 2048


def export_records(
    store: Cache,
    format: str,
    folder: Path,
    k: int | None = None,
    monitor: Monitor = SILENT,
    lossy: bool = False,
) -> Json:
    """Write the records of a cache as a new dataset in ``folder``; returns a summary.

    Profiles topk, dense and hidden export ``k`` entries per position. Profiles threshold and
    tempered export all entries with their weights (Parquet), or with ``lossy`` the ``k`` most
    probable entries beside the sampled tail (DistillKit). Parquet without ``k`` also holds the
    records as stored, so that an import gives the same cache. Raises ``DataError`` if ``format`` or
    ``k`` does not fit the cache, if the format cannot hold the cache and ``lossy`` is not set, or
    if ``folder`` is not empty.
    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise DataError(f"{folder} is not empty.", "Name a new folder.")
    import pyarrow.parquet

    layout = _choose_layout(store, format, k, lossy)
    # ``datasets`` finds splits by these names.
    files = {
        f"{split}-{index:05d}.parquet": numbers[first : first + FILE_SEQUENCES]
        for split, numbers in (("train", store.train), ("validation", store.validation))
        for index, first in enumerate(range(0, len(numbers), FILE_SEQUENCES))
    }
    meter = ProgressMeter(len(store), "sequences")
    with whole_folder(folder) as temporary:
        for name, numbers in files.items():
            description = FileDescription(store, numbers.start)
            with pyarrow.parquet.ParquetWriter(temporary / name, layout.schema) as file:
                for sequences, records, entries in read_entries(store, numbers, k):
                    monitor.check(f"in {name}; no file is kept")
                    description.add(sequences, records)
                    file.write_table(layout.make_table(sequences, records, entries))
                file.add_key_value_metadata(description.to_metadata())
            monitor.emit("progress", **meter.advance(len(numbers), 0))
            monitor.check(f"after {name}; no file is kept")
        summary = layout.finish(temporary)
    return {"path": str(folder), "files": list(files), "sequences": len(store), **summary}


def _choose_layout(store: Cache, format: str, k: int | None, lossy: bool) -> ExportLayout:
    profile = store.codec.profile
    most = choose_entry_count(store, k)
    if format == "distillkit":
        if PROFILES[profile].sampled and not lossy:
            what = f"DistillKit has no place for the sampled tail of profile {profile}."
            raise DataError(what, "Export Parquet, or set --lossy to leave the tail out.")
        return DistillKitLayout(store.codec, most)
    if format != "parquet":
        raise DataError(f"There is no format {format!r}.", "Use parquet or distillkit.")
    if k is not None and PROFILES[profile].sampled:
        what = f"The entries of profile {profile} are unbiased only all together."
        raise DataError(what, "Leave out k.")
    # A user who chooses k wants other records than the cache's.
    return PlainLayout(PROFILES[profile].sampled, store.codec if k is None else None)


# ---------------------------------------------------------------------- plain Parquet


@dataclass(frozen=True)
class PlainLayout:
    """Plain Parquet with one row per sequence (``kd.exchange.parquet``).

    ``weights`` replace log-probabilities. With ``stored``, the codec of the cache, a row also holds
    the records as stored.
    """

    weights: bool
    stored: Codec | None = None

    @property
    def schema(self) -> Any:
        """The ``pyarrow.Schema`` of its rows."""
        import pyarrow

        plain = parquet.make_schema(self.weights)
        more = [] if self.stored is None else make_stored_schema(self.stored)
        return pyarrow.schema([*plain, *(pyarrow.field(*each) for each in more)])

    def make_table(self, sequences: Sequences, records: Records, entries: EntryTable) -> Any:
        """Return a ``pyarrow.Table`` of B rows."""
        import pyarrow

        flags = sequences.target_mask.reshape(-1)
        counts = np.zeros(flags.size, np.int64)
        counts[flags] = entries.counts
        values = "weights" if self.weights else "logprobs"
        columns = {
            "input_ids": pyarrow.array(sequences.tokens.reshape(-1)),
            "document_start": pyarrow.array(sequences.document_start.reshape(-1)),
            "target_mask": pyarrow.array(flags),
            "ids": _make_lists(counts, entries.ids.astype(np.uint32)),
            values: _make_lists(counts, getattr(entries, values).astype(np.float32)),
            "residual": _place_values(flags, entries.residual),
            "gold_logprob": _place_values(flags, entries.gold),
            "entropy": _place_values(flags, entries.entropy),
        }
        per_row = np.full(len(sequences), sequences.length)
        rows = {name: _split_into_lists(per_row, values) for name, values in columns.items()}
        if self.stored is not None:
            # The columns of the records as stored, a flat list for each sequence.
            parts = list(cut_by_sequence(sequences, records))
            for name, column in records.columns.items():
                sizes = np.array([part[name].size for part in parts])
                rows[PREFIX + name] = _split_into_lists(sizes, pyarrow.array(column.reshape(-1)))
        return pyarrow.table(rows).select(self.schema.names).cast(self.schema)

    def finish(self, folder: Path) -> dict[str, float | str]:
        """Write nothing: this format has only rows."""
        return {}


def _make_lists(counts: NDArray[Any], values: NDArray[Any]) -> Any:
    import pyarrow

    return _split_into_lists(counts, pyarrow.array(values))


def _split_into_lists(counts: NDArray[Any], values: Any) -> Any:
    """Split ``values`` into consecutive lists of ``counts`` items."""
    import pyarrow

    offsets = pyarrow.array(compute_offsets(counts), pyarrow.int32())
    return pyarrow.ListArray.from_arrays(offsets, values)


def _place_values(flags: NDArray[np.bool_], values: NDArray[Any]) -> Any:
    """Place ``values`` (N,) where ``flags`` are set.

    Null at other places and for values that are not finite.
    """
    import pyarrow

    placed = np.full(flags.size, np.nan, np.float32)
    placed[flags] = values
    return pyarrow.array(placed, mask=~np.isfinite(placed))


# ---------------------------------------------------------------------- DistillKit


@dataclass
class DistillKitLayout:
    """DistillKit's dataset with one row per document; every log-probability is stored as a float32.

    The format has a record for every position, so a document with a position without one is
    refused.
    """

    codec: Codec
    k: int
    rows: int = 0
    records: int = 0
    filled: int = 0
    mass: float = 0.0
    compression: Compression = field(init=False)

    def __post_init__(self) -> None:
        self.compression = Compression(
            d=max(self.codec.vocabulary_size, 2),
            k=self.k,
            exact_k=self.k,
            residual_bins=(),
            delta_encoding=False,
        )

    @property
    def schema(self) -> Any:
        """The ``pyarrow.Schema`` of its rows."""
        return distillkit.make_schema()

    def make_table(self, sequences: Sequences, records: Records, entries: EntryTable) -> Any:
        """Return a ``pyarrow.Table`` with a row for each document that has records."""
        import pyarrow

        ids, logprobs = entries.take_top(self.k)
        self.filled += int(np.isneginf(logprobs).any(axis=1).sum())
        self.mass += float(np.exp(logprobs).sum())
        # Records with fewer entries get other tokens, from the start of the vocabulary.
        there = np.isfinite(logprobs)
        # Among the first 2 K tokens at least K are not entries of the record.
        free = np.ones((len(ids), min(2 * ids.shape[1], self.codec.vocabulary_size)), bool)
        rows, places = np.nonzero(there & (ids < free.shape[1]))
        free[rows, ids[rows, places]] = False
        others = np.argsort(~free, axis=1, kind="stable")
        nth = np.maximum(np.arange(ids.shape[1]) - there.sum(axis=1, keepdims=True), 0)
        complete = (
            np.where(there, ids, np.take_along_axis(others, nth, axis=1)),
            np.where(there, logprobs, FILL_LOGPROB),
        )
        stored = distillkit.encode_entries(self.compression, *complete)
        lengths, tokens = _find_documents(sequences)
        self.rows += len(lengths)
        self.records += len(ids)
        columns = {"input_ids": _split_into_lists(lengths, pyarrow.array(tokens.astype(np.uint64)))}
        for name, content in zip((LOGPROBS, INDICES), stored, strict=True):
            per_position = _make_lists(np.full(len(ids), content.shape[1]), content.reshape(-1))
            # The last token of a document has no record.
            columns[name] = _split_into_lists(lengths - 1, per_position)
        return pyarrow.table(columns).cast(self.schema)

    def finish(self, folder: Path) -> dict[str, float | str]:
        """Write the configuration; return counts, and a warning if a sampled tail was left out."""
        (folder / distillkit.CONFIG).write_text(self.compression.to_yaml(), encoding="utf-8")
        kept = self.mass / max(self.records, 1)
        counts = {"rows": self.rows, "records": self.records, "k": self.k}
        summary: dict[str, float | str] = {**counts, "kept_mass": round(kept, 6)}
        rules = self.codec.rules
        if not rules.sampled:
            return summary
        warning = (
            f"DistillKit has no place for the sampled tail of profile {rules.name}: "
            f"{1 - kept:.1%} of the probability is left out, and {self.filled:,} of "
            f"{self.records:,} records are filled up to {self.k} entries with tokens of "
            f"log-probability {FILL_LOGPROB:g}."
        )
        if rules.dithered:
            unit = self.codec.threshold
            warning += f" Heads were rounded at random to units of {unit:g} at most."
        return summary | {"warning": warning}


def _find_documents(sequences: Sequences) -> tuple[NDArray[np.int64], NDArray[np.uint32]]:
    """Return the lengths of the documents that have records, and their tokens joined together."""
    start = sequences.document_start.copy()
    # A document may go on from the sequence before; here each sequence begins a row.
    start[:, 0] = True
    begins = np.flatnonzero(start)
    lengths = np.diff(np.append(begins, start.size))
    records = np.add.reduceat(sequences.target_mask.reshape(-1).astype(np.int64), begins)
    wanted = records > 0
    if (records[wanted] != lengths[wanted] - 1).any():
        raise DataError(
            "DistillKit has a record for every position, but a document has positions without one, "
            "such as those that a completion-only mask leaves out.",
            "Export Parquet instead.",
        )
    return lengths[wanted], sequences.tokens.reshape(-1)[np.repeat(wanted, lengths)]


#: The format of another tool: it turns sequences and their entries into rows.
ExportLayout = PlainLayout | DistillKitLayout
