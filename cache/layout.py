"""Conversion between records and the arrays of a shard.

Most columns are stored unchanged. Ids are not: within a record they are put in the order of the
shard's token table and coded as gaps (``cache.idcode``); their log-probabilities follow that order.
``cache.units.layout`` has what records in units do.

    N   positions      S   sequences      H, M   head and tail entries      V   vocabulary
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cache import idcode
from cache.codec import Codec
from cache.errors import CacheError
from cache.records import Records, compute_offsets
from cache.units.dither import DitherTables
from cache.units.layout import encode_units, list_unit_arrays

Arrays = dict[str, NDArray[Any]]
#: Array with the frequency class of every token, which gives the order of ids in the whole shard.
TOKEN_CLASSES = "token_classes"  # noqa: S105 (no password)

#: Columns of ``offsets``. The bits of each further draw add a column after the first tail's.
_POSITIONS, _HEADS, _TAILS, _HEAD_BITS, _FIRST_TAIL_BITS = range(5)


def encode_arrays(
    records: Records, positions: NDArray[np.int64], codec: Codec, tables: DitherTables | None = None
) -> Arrays:
    """Encode records as the arrays to store, with ``offsets`` (S + 1, columns) of the sequences.

    ``positions`` (S + 1,) is the first record of each sequence, and then the number of records.
    Records with dither need the cache's ``tables``. Raises ``CacheError`` for more records or
    entries than offsets can count.
    """
    if codec.rules.dithered:
        assert tables is not None, "a writer makes the tables before the first shard"
        offsets, arrays = encode_units(records, positions, codec, tables)
        return {"offsets": _narrow_offsets(offsets), **arrays}
    if not codec.rules.sampled:
        return {"offsets": _narrow_offsets(positions[:, None]), **records.columns}
    ids = [records["head_ids"], records["tail_ids"].reshape(-1)]
    classes = idcode.compute_frequency_classes(ids, codec.vocabulary_size)
    # The inverse of the permutation: the rank of each token.
    rank = np.argsort(idcode.order_tokens(classes))
    heads, tails = (
        compute_offsets(records[f"{part}_count"])[positions] for part in ("head", "tail")
    )
    counts = records["head_count"]
    coded = [_code_ids("head", records["head_ids"], records["head_logprobs"], rank, counts, heads)]
    for draw in range(codec.draws):
        values = records["tail_logprobs"][:, draw] if codec.rules.keeps_partition else None
        drawn = records["tail_ids"][:, draw]
        counts = records["tail_count"]
        coded.append(_code_ids(f"tail_{draw}", drawn, values, rank, counts, tails))
    starts = (each for _, each in coded)
    cuts = _narrow_offsets(np.stack([positions, heads, tails, *starts], axis=1))
    arrays = {name: records[name] for name in _list_plain_columns(codec)}
    for added, _ in coded:
        arrays |= added
    return {TOKEN_CLASSES: classes, "offsets": cuts, **arrays}


def _narrow_offsets(offsets: NDArray[np.int64]) -> NDArray[np.uint32]:
    """Return ``offsets`` in the stored type, which would wrap larger ones."""
    largest = int(offsets.max(initial=0))
    if largest > np.iinfo(np.uint32).max:
        raise CacheError(
            f"A shard may hold 2^32 - 1 records and as many entries, but got {largest:,}.",
            "Lower cache.shard_sequences.",
        )
    return offsets.astype(np.uint32)


def _code_ids(
    name: str,
    ids: NDArray[Any],
    logprobs: NDArray[Any] | None,
    rank: NDArray[np.int64],
    counts: NDArray[Any],
    entries: NDArray[np.int64],
) -> tuple[Arrays, NDArray[np.int64]]:
    """Code one column of ids with its log-probabilities; also return each sequence's first byte.

    ``rank`` (V,) is that of each token, ``counts`` (N,) the entries of each record, and ``entries``
    (S + 1,) the first one of each sequence.
    """
    arrays = {}
    if logprobs is None:
        ranks = idcode.sort_ranks(rank.take(ids), counts)
    else:
        order = idcode.sort_by_rank(rank, ids, counts)
        ranks = rank[ids[order]]
        arrays[f"{name}_logprobs"] = logprobs[order]
    packed = idcode.pack_ranks(ranks, counts, entries)
    coded = {f"{name}_symbols": packed.symbols, f"{name}_bits": packed.bits}
    return coded | arrays, packed.starts


# Cached, because reading a sequence needs it every time.
@functools.cache
def list_arrays(codec: Codec, draw: int) -> dict[str, tuple[str, int]]:
    """List the stored arrays of each part of the records, with the tails of one draw.

    Each comes with the column of ``offsets`` that cuts it into sequences.
    """
    if codec.rules.dithered:
        return list_unit_arrays(codec)
    found = {name: (name, _POSITIONS) for name in _list_plain_columns(codec)}
    if not codec.rules.sampled:
        return found
    tail = f"tail_{draw}"
    found |= {f"head_{name}": (f"head_{name}", _HEADS) for name in ("symbols", "logprobs")}
    found |= {
        "head_bits": ("head_bits", _HEAD_BITS),
        "tail_bits": (f"{tail}_bits", _FIRST_TAIL_BITS + draw),
    }
    values = ("symbols", "logprobs") if codec.rules.keeps_partition else ("symbols",)
    return found | {f"tail_{name}": (f"{tail}_{name}", _TAILS) for name in values}


def decode_arrays(parts: list[Arrays], orders: list[NDArray[Any]], codec: Codec) -> Arrays:
    """Decode the columns of sequences (at least one), in order, from their stored arrays.

    ``parts`` hold the arrays of ``list_arrays`` of each, ``orders`` the token at each rank of its
    shard. All are decoded at once, because the time depends on the number of calls.
    """
    columns = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
    if not codec.rules.sampled:
        return columns
    for name in ("head", "tail"):
        cuts = compute_offsets(np.array([len(part[f"{name}_symbols"]) for part in parts]))
        symbols = columns.pop(f"{name}_symbols")
        bits = columns.pop(f"{name}_bits")
        ranks = np.split(
            idcode.unpack_ranks(symbols, bits, columns[f"{name}_count"], cuts), cuts[1:-1]
        )
        ids = [order[part] for order, part in zip(orders, ranks, strict=True)]
        columns[f"{name}_ids"] = np.concatenate(ids)
    return columns


def _list_plain_columns(codec: Codec) -> tuple[str, ...]:
    """List the columns that are stored unchanged, one row for each position."""
    coded = {"head_ids", "head_logprobs", "tail_ids", "tail_logprobs"}
    return tuple(name for name in codec.schema() if name not in coded)
