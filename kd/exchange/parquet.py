"""Plain Parquet: one row per sequence, the entries of a position as lists.

Also reads columns of other Parquet formats.

    input_ids        list<uint32>            the L tokens
    document_start   list<bool>              a document, or a part of one, begins here; default:
                                             only at the first token
    target_mask      list<bool>              the position has a record; default: where ``ids`` has
                                             entries
    ids              list<list<uint32>>      the entries of the distribution of token t + 1
    logprobs         list<list<float>>       their log-probabilities at temperature 1, or else
    weights          list<list<float>>       their weights, if some entries are sampled: written,
                                             never read. Those of profile tempered sum to 1 in the
                                             mean over draws, and not in each position
    residual         list<float>             log of the mass outside the entries; null for none
    gold_logprob     list<float>             log-probability of token t + 1; null where it is not
                                             known
    entropy          list<float>             entropy of the whole distribution, in nats; null where
                                             it is not known. A cache of profile threshold has the
                                             mean of the sequence, unless it was captured for
                                             ``loss.entropy_weighting``

Lists have one item per token, or one fewer. An export may also hold the records as they are stored
(``kd.exchange.restoring``). The files can be read by any program that reads
Parquet.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kd.errors import DataError
from kd.exchange.foreign_files import read_table_batches
from kd.exchange.rows import Row, mark_one_document, pad_entries

NEEDED = ("input_ids", "ids")
OPTIONAL = (
    "logprobs", "weights", "document_start", "target_mask", "residual", "gold_logprob", "entropy",
)  # fmt: skip
_CORRECT = "Correct or remove the row."


def read_rows(path: Path) -> Iterator[Row]:
    """Yield the rows of one file.

    Raises ``DataError`` for the first row whose columns do not fit together.
    """
    for first, batch in read_table_batches(path, NEEDED, OPTIONAL):
        if "logprobs" not in batch.schema.names:
            sampled = "weights of sampled entries" if "weights" in batch.schema.names else "neither"
            remedy = "An export of sampled entries can only be imported whole, without options."
            raise DataError(f"{path} has no column logprobs, but {sampled}.", remedy)
        for index in range(len(batch)):
            yield _read_row(batch, index, f"{path}: row {first + index}")


def _read_row(batch: Any, index: int, where: str) -> Row:
    tokens = read_token_column(batch, index, where)
    flat_ids, counts = read_nested_column(batch, "ids", index, where)
    flat_logprobs, same = read_nested_column(batch, "logprobs", index, where)
    _require_numbers("ids", flat_ids, where, fractions=False)
    _require_numbers("logprobs", flat_logprobs, where)
    if len(counts) not in (len(tokens) - 1, len(tokens)) or not np.array_equal(counts, same):
        sizes = f"{len(tokens)} tokens, {len(counts)} positions of ids, {len(same)} of logprobs"
        raise DataError(
            f"{where}: {sizes}, or lists of unequal length.",
            "Give a list for each token, or one fewer, and as many log-probabilities as ids in "
            "each.",
        )
    ids, logprobs = pad_entries(counts, flat_ids, flat_logprobs)
    start = mark_one_document(len(tokens))
    starts = _read_per_position(batch, "document_start", index, where, len(tokens))
    if starts is not None:
        start |= np.nan_to_num(starts) != 0
    gold, residual, entropy = (
        _read_per_position(batch, name, index, where, len(counts))
        for name in ("gold_logprob", "residual", "entropy")
    )
    if entropy is not None and (entropy < 0).any():
        what = f"{where}: entropy must not be negative, but got {float(np.nanmin(entropy)):g}."
        raise DataError(what, "Give it in nats, or null.")
    mask = _read_per_position(batch, "target_mask", index, where, len(counts))
    row = Row(
        where, tokens, start, np.arange(len(counts)), ids, logprobs,
        np.full(len(counts), np.nan) if gold is None else gold,
        None if residual is None else np.where(np.isnan(residual), -np.inf, residual),
        entropy=entropy,
    )  # fmt: skip
    return row.keep((counts > 0) & (mask != 0) if mask is not None else counts > 0)


def _read_per_position(
    batch: Any, name: str, index: int, where: str, count: int
) -> NDArray[Any] | None:
    values = read_flat_column(batch, name, index, where)
    if values is None:
        return None
    if len(values) < count:
        what = f"{where}: {name} has {len(values)} items for {count} positions."
        raise DataError(what, "Give one for each position.")
    _require_numbers(name, values, where)
    return values[:count].astype(np.float64)


def _require_numbers(name: str, values: NDArray[Any], where: str, fractions: bool = True) -> None:
    """Raise ``DataError`` for the first of ``values`` that is not a number, or without
    ``fractions`` not a whole one.
    """
    wrong = values
    if values.dtype == object:  # null among flags makes objects of them
        wrong = values[[not isinstance(each, bool | None) for each in values]]
    elif values.dtype.kind in ("biuf" if fractions else "iuf"):
        wrong = values[:0] if fractions else values[values % 1 != 0]
    for each in wrong[:1].tolist():
        what = "numbers" if fractions else "whole numbers"
        raise DataError(f"{where}: {name} must hold {what}, but got {each!r}.", _CORRECT)


# ---------------------------------------------------------------------- columns


def read_flat_column(batch: Any, name: str, index: int, where: str) -> NDArray[Any] | None:
    """Return the list in row ``index`` of column ``name``; None if the column does not exist.

    Null numbers become NaN. Raises ``DataError`` if the cell is not a list.
    """
    if name not in batch.schema.names:
        return None
    cell = batch.column(name)[index]
    values = getattr(cell, "values", None)
    if values is None:
        what = f"{where}: {name} is not a list but {cell.type}, or null."
        raise DataError(what, "Give a list of numbers.")
    return np.asarray(values.to_numpy(zero_copy_only=False))


def read_token_column(batch: Any, index: int, where: str) -> NDArray[np.int64]:
    """Return the tokens of row ``index``; raises ``DataError`` if they are not whole numbers."""
    tokens = read_flat_column(batch, "input_ids", index, where)
    if tokens is None or (len(tokens) and not np.issubdtype(tokens.dtype, np.integer)):
        raise DataError(f"{where}: input_ids must be a list of token ids without null.", _CORRECT)
    return tokens.astype(np.int64)


def read_nested_column(
    batch: Any, name: str, index: int, where: str
) -> tuple[NDArray[Any], NDArray[np.int64]]:
    """Return the numbers of the lists in row ``index`` of column ``name``, and the length of each
    list.

    Raises ``DataError`` if the cell is not a list of lists, or if a number is null.
    """
    import pyarrow.compute
    import pyarrow.types

    values = getattr(batch.column(name)[index], "values", None)
    is_list = values is not None and (
        pyarrow.types.is_list(values.type)
        or pyarrow.types.is_large_list(values.type)
        or pyarrow.types.is_fixed_size_list(values.type)
    )
    if values is None or not is_list:
        what = f"{where}: {name} is not a list of lists."
        raise DataError(what, "Give a list of numbers for each position.")
    flat = values.flatten()
    if flat.null_count:
        raise DataError(f"{where}: {name} holds null.", "Leave out missing entries.")
    counts = pyarrow.compute.list_value_length(values).fill_null(0)
    numbers, lengths = (each.to_numpy(zero_copy_only=False) for each in (flat, counts))
    return np.asarray(numbers), lengths.astype(np.int64)


def make_schema(weights: bool) -> Any:
    """Return the ``pyarrow.Schema`` of an export, with ``weights`` or with log-probabilities."""
    import pyarrow

    number, flag, token = pyarrow.float32(), pyarrow.bool_(), pyarrow.uint32()
    kinds = {"input_ids": token, "document_start": flag, "target_mask": flag}
    kinds["ids"] = pyarrow.list_(token)
    kinds["weights" if weights else "logprobs"] = pyarrow.list_(number)
    kinds |= {} if weights else {"residual": number}
    kinds |= {"gold_logprob": number, "entropy": number}
    return pyarrow.schema([(name, pyarrow.list_(kind)) for name, kind in kinds.items()])
