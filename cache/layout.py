"""Records <-> the arrays of a shard.

Most columns are stored as they are. Ids are not: within a record they are put in the order of the shard's token table
and coded as gaps (``cache.idcode``), and their log-probabilities go with them.

    P   positions      S   sequences      H, M   head and tail entries      V   vocabulary      E   draws
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cache.codec import Codec, id_dtype
from cache.idcode import classes_of, order_of, pack, sort_within, unpack
from cache.profiles import PROFILES
from cache.records import Records, offsets_of

Arrays = dict[str, NDArray[Any]]
#: The frequency class of every token, which gives the order that ids are coded in: one for the whole shard.
TOKEN_CLASSES = "token_classes"  # noqa: S105 (no password)

_POSITIONS, _HEADS, _TAILS, _HEAD_BITS, _FIRST_TAIL_BITS = range(5)


def to_arrays(records: Records, positions: NDArray[np.int64], codec: Codec) -> Arrays:
    """The arrays to store, and ``offsets`` (S + 1, columns) that cut them; ``positions`` (S + 1,) cut records."""
    if not PROFILES[codec.profile].sampled:
        return {"offsets": positions[:, None].astype(np.uint32), **records.columns}
    classes = classes_of([records["head_ids"], records["tail_ids"].reshape(-1)], codec.vocabulary_size)
    rank = np.argsort(order_of(classes))
    heads, tails = (offsets_of(records[f"{part}_count"])[positions] for part in ("head", "tail"))
    coded = [_code("head", records["head_ids"], records["head_logprobs"], _Cut(rank, records["head_count"], heads))]
    for draw in range(codec.draws):
        values = records["tail_logprobs"][:, draw] if codec.profile == "tempered" else None
        cut = _Cut(rank, records["tail_count"], tails)
        coded.append(_code(f"tail_{draw}", records["tail_ids"][:, draw], values, cut))
    cuts = np.stack([positions, heads, tails, *(starts for _, starts in coded)], axis=1).astype(np.uint32)
    arrays = {name: records[name] for name in _plain(codec)}
    for added, _ in coded:
        arrays |= added
    return {TOKEN_CLASSES: classes, "offsets": cuts, **arrays}


@dataclass(frozen=True, eq=False)
class _Cut:
    """How to code ids: the rank of every token (V,), entries of each record (P,), and cuts of sequences (S + 1,)."""

    rank: NDArray[np.int64]
    counts: NDArray[Any]
    entries: NDArray[np.int64]


def _code(name: str, ids: NDArray[Any], logprobs: NDArray[Any] | None, cut: _Cut) -> tuple[Arrays, NDArray[np.int64]]:
    """The arrays of one column of ids, with their log-probabilities, and where each sequence's bytes begin."""
    order = sort_within(cut.rank, ids, cut.counts)
    packed = pack(cut.rank[ids[order]], cut.counts, cut.entries)
    arrays = {f"{name}_symbols": packed.symbols, f"{name}_bits": packed.bits}
    return arrays | ({} if logprobs is None else {f"{name}_logprobs": logprobs[order]}), packed.starts


def one_sequence(read: Callable[[str, int], NDArray[Any]], codec: Codec, draw: int) -> Arrays:
    """The arrays of one sequence as they are stored, with the tails of one draw.

    ``read(name, column)`` gives the sequence's rows of an array, cut by that column of ``offsets``.
    """
    found = {name: read(name, _POSITIONS) for name in _plain(codec)}
    if not PROFILES[codec.profile].sampled:
        return found
    tail = f"tail_{draw}"
    found |= {f"head_{name}": read(f"head_{name}", _HEADS) for name in ("symbols", "logprobs")}
    found |= {"head_bits": read("head_bits", _HEAD_BITS), "tail_bits": read(f"{tail}_bits", _FIRST_TAIL_BITS + draw)}
    values = ("symbols", "logprobs") if codec.profile == "tempered" else ("symbols",)
    return found | {f"tail_{name}": read(f"{tail}_{name}", _TAILS) for name in values}


def from_arrays(parts: list[Arrays], orders: list[NDArray[Any]], codec: Codec) -> Arrays:
    """The columns of sequences (at least one) from ``one_sequence`` of each, in their order.

    ``orders`` has for each the token at each rank, in the type of ids. They are decoded all at once: it is the number
    of calls that costs.
    """
    columns = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
    if not PROFILES[codec.profile].sampled:
        return columns
    for name in ("head", "tail"):
        cuts = offsets_of(np.array([len(part[f"{name}_symbols"]) for part in parts]))
        symbols, bits = columns.pop(f"{name}_symbols"), columns.pop(f"{name}_bits")
        ranks = np.split(unpack(symbols, bits, columns[f"{name}_count"], cuts), cuts[1:-1])
        columns[f"{name}_ids"] = np.concatenate([order[part] for order, part in zip(orders, ranks, strict=True)])
    return columns


def token_order(classes: NDArray[np.uint8], codec: Codec) -> NDArray[Any]:
    """The token at each rank, (V,), in the type of ids."""
    return order_of(classes).astype(id_dtype(codec.vocabulary_size))


@functools.cache
def _plain(codec: Codec) -> tuple[str, ...]:
    """The columns that are stored as they are, a row a position; asked for with every sequence."""
    coded = {"head_ids", "head_logprobs", "tail_ids", "tail_logprobs"}
    return tuple(name for name in codec.schema() if name not in coded)
