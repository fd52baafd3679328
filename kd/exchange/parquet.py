"""Plain Parquet: one row a sequence, the entries of a position as lists. Also the columns of every Parquet file.

    input_ids        list<uint32>            the tokens, L of them
    document_start   list<bool>              a document, or a piece of one, begins here; default: at the first
    target_mask      list<bool>              the position has a record; default: where ``ids`` names any
    ids              list<list<uint32>>      the entries of the distribution of token t + 1
    logprobs         list<list<float>>       their log-probabilities at temperature 1; or
    weights          list<list<float>>       ... what they weigh, where some of them are sampled: written, never read
    residual         list<float>             log of the mass outside the entries; null for none
    gold_logprob     list<float>             log-probability of token t + 1; null where it is not known
    entropy          list<float>             of the whole distribution, in nats; null where it is not known

Lists have one item for each token, or one fewer. What is written can be read by anything that reads Parquet.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kd.errors import DataError
from kd.exchange.files import parquet_batches
from kd.exchange.rows import Row, one_document

NEEDED = ("input_ids", "ids")
OPTIONAL = ("logprobs", "weights", "document_start", "target_mask", "residual", "gold_logprob", "entropy")


def rows(path: Path) -> Iterator[Row]:
    """The rows of one file; raises ``DataError`` naming what does not fit together."""
    for first, batch in parquet_batches(path, NEEDED, OPTIONAL):
        if "logprobs" not in batch.schema.names:
            sampled = "weights of sampled entries" if "weights" in batch.schema.names else "neither"
            detail = f"{path} has no column logprobs, but {sampled}."
            raise DataError(detail, "A cache of profile topk needs log-probabilities: export topk, dense or hidden.")
        for index in range(len(batch)):
            yield _row(batch, index, f"{path}: row {first + index}")


def _row(batch: Any, index: int, where: str) -> Row:
    tokens = token_column(batch, index, where)
    flat_ids, counts = nested_column(batch, "ids", index, where)
    flat_logprobs, same = nested_column(batch, "logprobs", index, where)
    _require_numbers("ids", flat_ids, where, fractions=False)
    _require_numbers("logprobs", flat_logprobs, where)
    if len(counts) not in (len(tokens) - 1, len(tokens)) or not np.array_equal(counts, same):
        detail = (
            f"{where}: {len(tokens)} tokens, {len(counts)} positions of ids, {len(same)} of logprobs, or unequal ones."
        )
        raise DataError(
            detail, "Give a list for each token, or one fewer, and as many log-probabilities as ids in each."
        )
    there = np.arange(counts.max(initial=1)) < counts[:, None]
    ids, logprobs = np.zeros(there.shape, np.int64), np.full(there.shape, -np.inf)
    ids[there], logprobs[there] = flat_ids, flat_logprobs
    starts = _per_position(batch, "document_start", index, where, len(tokens))
    start = one_document(len(tokens)) | (False if starts is None else np.nan_to_num(starts) != 0)
    gold, residual, entropy = (
        _per_position(batch, name, index, where, len(counts)) for name in ("gold_logprob", "residual", "entropy")
    )
    if entropy is not None and (entropy < 0).any():
        least = float(np.nanmin(entropy))
        raise DataError(f"{where}: entropy must not be negative, but got {least:g}.", "Give it in nats, or null.")
    mask = _per_position(batch, "target_mask", index, where, len(counts))
    row = Row(
        where, tokens, start, np.arange(len(counts)), ids, logprobs,
        np.full(len(counts), np.nan) if gold is None else gold,
        None if residual is None else np.where(np.isnan(residual), -np.inf, residual),
        entropy=entropy,
    )  # fmt: skip
    return row.keep((counts > 0) & (mask != 0) if mask is not None else counts > 0)


def _per_position(batch: Any, name: str, index: int, where: str, count: int) -> NDArray[Any] | None:
    values = flat_column(batch, name, index, where)
    if values is not None and len(values) < count:
        raise DataError(
            f"{where}: {name} has {len(values)} items for {count} positions.", "Give one for each position."
        )
    if values is not None and values.dtype != object:  # null among flags makes objects of them, and null of all
        _require_numbers(name, values, where)
    elif values is not None and (strange := [each for each in values if not isinstance(each, bool | None)]):
        raise DataError(f"{where}: {name} must hold numbers, but got {strange[0]!r}.", "Correct or remove the row.")
    return None if values is None else values[:count].astype(np.float64)


def _require_numbers(name: str, values: NDArray[Any], where: str, fractions: bool = True) -> None:
    """Raise ``DataError`` naming the first of ``values`` that is no number, or none without a fraction."""
    if values.dtype.kind not in ("biuf" if fractions else "iuf"):
        wrong = values
    else:
        wrong = values[:0] if fractions else values[values % 1 != 0]
    for each in wrong[:1].tolist():
        what = "numbers" if fractions else "whole numbers"
        raise DataError(f"{where}: {name} must hold {what}, but got {each!r}.", "Correct or remove the row.")


# ---------------------------------------------------------------------- columns


def flat_column(batch: Any, name: str, index: int, where: str) -> NDArray[Any] | None:
    """The list in row ``index`` of column ``name``, None where there is no such column; null numbers become NaN.

    Raises ``DataError`` where there is no list.
    """
    if name not in batch.schema.names:
        return None
    cell = batch.column(name)[index]
    values = getattr(cell, "values", None)
    if values is None:
        raise DataError(f"{where}: {name} is not a list but {cell.type}, or null.", "Give a list of numbers.")
    return np.asarray(values.to_numpy(zero_copy_only=False))


def token_column(batch: Any, index: int, where: str) -> NDArray[np.int64]:
    """The tokens of row ``index``; raises ``DataError`` where they are not whole numbers."""
    tokens = flat_column(batch, "input_ids", index, where)
    if tokens is None or (len(tokens) and not np.issubdtype(tokens.dtype, np.integer)):
        raise DataError(f"{where}: input_ids must be a list of token ids without null.", "Correct or remove the row.")
    return tokens.astype(np.int64)


def nested_column(batch: Any, name: str, index: int, where: str) -> tuple[NDArray[Any], NDArray[np.int64]]:
    """All numbers of the list of lists in row ``index`` of column ``name``, and how many each list holds.

    Raises ``DataError`` where there is no list of lists, or a number is null.
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
        raise DataError(f"{where}: {name} is not a list of lists.", "Give a list of numbers for each position.")
    flat = values.flatten()
    if flat.null_count:
        raise DataError(f"{where}: {name} holds null.", "Leave an entry out where there is none.")
    counts = pyarrow.compute.list_value_length(values).fill_null(0)
    return np.asarray(flat.to_numpy(zero_copy_only=False)), counts.to_numpy(zero_copy_only=False).astype(np.int64)


def schema(weights: bool) -> Any:
    """The ``pyarrow.Schema`` of what is written; ``weights`` in place of log-probabilities."""
    import pyarrow

    def per_token(kind: Any) -> Any:
        return pyarrow.list_(kind)

    number, flag, token = pyarrow.float32(), pyarrow.bool_(), pyarrow.uint32()
    columns = {"input_ids": token, "document_start": flag, "target_mask": flag, "ids": pyarrow.list_(token)}
    columns["weights" if weights else "logprobs"] = pyarrow.list_(number)
    columns |= {} if weights else {"residual": number}
    columns |= {"gold_logprob": number, "entropy": number}
    return pyarrow.schema([(name, per_token(kind)) for name, kind in columns.items()])
