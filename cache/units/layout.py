"""Records in units as the arrays of a shard: ids by the tables of ``cache.units.dither``.

array           rows               meaning
known, entropy, cluster, head_count, other_count
                one a position     other_count: drawn tokens without a candidate
head_symbols    one a head         gaps between the ranks of heads, with head_bits
head_units      one a head         in the order of the ranks
gap_symbols     one a candidate    gaps between accepted candidates, with gap_bits
other_symbols   one a token        gaps between the ranks of tokens without a candidate, with
                                   other_bits
tail_count         one a position     only if records count their units (``Profile.counts_units``)

Gaps are coded as in ``cache.idcode``. The number of accepted candidates is not stored: each of the
units that heads and other tokens leave is one, unless records count their units.

N   positions      S   sequences      H, E, O   heads, accepted candidates and other tokens
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from cache.codec import Codec
from cache.idcode import pack_ranks, sort_ranks, unpack_ranks
from cache.profiles.threshold import count_rest, find_counted
from cache.records import Records, compute_offsets
from cache.units.dither import DitherTables, hash_positions

Arrays = dict[str, NDArray[Any]]
#: The parts of a record whose ids are coded. ``offsets`` has a column for the entries of each,
#: after that of the positions, and then one for the bits of each.
_PARTS = ("head", "gap", "other")
_PLAIN = ("known", "entropy", "cluster", "head_count")
#: Tokens that are decoded together: fewer make a call longer than its arithmetic, more take memory.
_TOGETHER = 16_384


def list_unit_arrays(codec: Codec) -> dict[str, tuple[str, int]]:
    """List the stored arrays, each with the column of ``offsets`` that cuts it into sequences."""
    counts = ("other_count", "tail_count") if codec.rules.counts_units else ("other_count",)
    found = {name: (name, 0) for name in (*_PLAIN, *counts)}
    found["head_units"] = ("head_units", 1)
    for number, part in enumerate(_PARTS, 1):
        found[f"{part}_symbols"] = (f"{part}_symbols", number)
        found[f"{part}_bits"] = (f"{part}_bits", number + len(_PARTS))
    return found


def encode_units(
    records: Records, positions: NDArray[np.int64], codec: Codec, tables: DitherTables
) -> tuple[NDArray[np.int64], Arrays]:
    """Encode records as the arrays to store, and their offsets (S + 1, columns).

    ``positions`` (S + 1,) is the first record of each sequence, and then the number of records.
    """
    cluster_N = records["cluster"]
    rows_N = np.arange(len(records))
    rows_H = np.repeat(rows_N, records["head_count"])
    ranks_H = tables.find_ranks(cluster_N[rows_H], records["head_ids"])
    order_H = np.argsort((rows_H << 32) + ranks_H)
    rows_M = np.repeat(rows_N, records["tail_count"])
    came_M = records["tail_k"] > 0
    rows_E, rows_O = rows_M[came_M], rows_M[~came_M]
    k_E = records["tail_k"][came_M]
    ranks_O = tables.find_ranks(cluster_N[rows_O], records["tail_ids"][~came_M])
    counts = [np.bincount(rows, minlength=len(records)) for rows in (rows_H, rows_E, rows_O)]
    ranks = ranks_H[order_H], sort_ranks(k_E, counts[1]), sort_ranks(ranks_O, counts[2])
    arrays = {name: records[name] for name in _PLAIN}
    arrays["other_count"] = counts[2].astype(records["tail_count"].dtype)
    arrays["head_units"] = records["head_units"][order_H]
    if codec.rules.counts_units:
        arrays["tail_count"] = records["tail_count"]
    entries = [compute_offsets(counts_N)[positions] for counts_N in counts]
    bits = []
    for part, ranks_X, counts_N, cuts in zip(_PARTS, ranks, counts, entries, strict=True):
        packed = pack_ranks(ranks_X, counts_N, cuts)
        arrays |= {f"{part}_symbols": packed.symbols, f"{part}_bits": packed.bits}
        bits.append(packed.starts)
    return np.stack([positions, *entries, *bits], axis=1), arrays


def decode_units(
    parts: list[Arrays], numbers: NDArray[np.int64], codec: Codec, tables: DitherTables
) -> Arrays:
    """Decode the columns of sequences (at least one), in order, from their stored arrays.

    ``parts`` hold the arrays of each sequence, ``numbers`` (S,) its number in the cache. Within a
    record tokens with a candidate come last, in the order of their candidates.
    """
    size = max(_TOGETHER // parts[0]["tokens"].shape[1], 1)
    groups = [slice(start, start + size) for start in range(0, len(parts), size)]
    found = [_decode_group(parts[each], numbers[each], codec, tables) for each in groups]
    return {name: np.concatenate([each[name] for each in found]) for name in found[0]}


def _decode_group(
    parts: list[Arrays], numbers: NDArray[np.int64], codec: Codec, tables: DitherTables
) -> Arrays:
    halves = [[f"{part}_{half}" for part in _PARTS] for half in ("symbols", "bits")]
    plain = [name for name in parts[0] if not name.endswith(("_symbols", "_bits"))]
    columns = {name: np.concatenate([part[name] for part in parts]) for name in plain}
    counts_3N = _count_entries(columns, codec)
    heads_N, gaps_N, others_N = counts_3N
    # Of all parts of all sequences at once, because a call takes long beside its arithmetic.
    symbols, bits = ([part[name] for name in names for part in parts] for names in halves)
    cuts = compute_offsets(np.array([len(each) for each in symbols]))
    ranks = unpack_ranks(np.concatenate(symbols), np.concatenate(bits), counts_3N.ravel(), cuts)
    rank_H, k_E, rank_O = np.split(ranks, cuts[[len(parts), 2 * len(parts)]])
    cluster_N = columns["cluster"]
    sequence_N, position_N = np.nonzero(columns["target_mask"])
    starts_N = hash_positions(codec.seed, numbers[sequence_N], position_N)
    # ``repeat`` is faster than an index of rows.
    ids_E = tables.name_candidates(cluster_N.repeat(gaps_N), starts_N.repeat(gaps_N), k_E)
    # Within a record tokens without a candidate come first: few, so only their places are counted.
    before_N = np.cumsum(gaps_N) - gaps_N
    places_O = np.arange(len(rank_O)) + before_N.repeat(others_N)
    tail_M = np.empty(len(k_E) + len(rank_O), ids_E.dtype)
    came_M = np.ones(len(tail_M), np.bool_)
    came_M[places_O] = False
    k_M = np.zeros(len(tail_M), np.uint16)
    tail_M[came_M], k_M[came_M] = ids_E, k_E
    tail_M[places_O] = tables.name_ranks(cluster_N.repeat(others_N), rank_O)
    del columns["other_count"]
    return columns | {
        "head_ids": tables.name_ranks(cluster_N.repeat(heads_N), rank_H),
        "tail_count": (gaps_N + others_N).astype(columns["head_count"].dtype),
        "tail_ids": tail_M,
        "tail_k": k_M,
    }


def _count_entries(columns: Arrays, codec: Codec) -> NDArray[np.int64]:
    """Count the entries of each part of each record, (3, N)."""
    heads_N = columns["head_count"].astype(np.int64)
    others_N = columns["other_count"].astype(np.int64)
    if codec.rules.counts_units:
        return np.stack([heads_N, columns["tail_count"] - others_N, others_N])
    gold_N = columns["tokens"][:, 1:][columns["target_mask"][:, :-1]]
    known_NK = columns["known"]
    _, units_N = count_rest(codec, known_NK, find_counted(codec, known_NK, gold_N))
    given = compute_offsets(columns["head_units"] >> 1)[compute_offsets(heads_N)]
    return np.stack([heads_N, units_N - np.diff(given) - others_N, others_N])
