"""Records in units as the arrays of a shard: ids by the tables of ``cache.units.dither``.

array           rows               meaning
known, entropy, cluster, head_count, other_count
                one a position     other_count: drawn tokens without a candidate
head_symbols    one a head         gaps between the ranks of heads, with head_bits
head_units      one a head         in the order of the ranks
gap_symbols     one a candidate    gaps between accepted candidates, with gap_bits
other_symbols   one a token        gaps between the ranks of tokens without a candidate, with
                                   other_bits

Gaps are coded as in ``cache.idcode``. The number of accepted candidates is not stored: each of the
units that heads and other tokens leave is one.

N   positions      S   sequences      H, E, O   heads, accepted candidates and other tokens
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from cache.codec import Codec
from cache.idcode import pack_ranks, unpack_ranks
from cache.profiles.threshold import count_rest, find_counted
from cache.records import Records, compute_offsets
from cache.units.dither import DitherTables, hash_positions

Arrays = dict[str, NDArray[Any]]
#: The parts of a record whose ids are coded. ``offsets`` has a column for the entries of each,
#: after that of the positions, and then one for the bits of each.
_PARTS = ("head", "gap", "other")
_PLAIN = ("known", "entropy", "cluster", "head_count")
#: Tokens that are decoded together: their arrays stay in the cache of a processor's core.
_TOGETHER = 4096


def list_unit_arrays() -> dict[str, tuple[str, int]]:
    """List the stored arrays, each with the column of ``offsets`` that cuts it into sequences."""
    found = {name: (name, 0) for name in (*_PLAIN, "other_count")}
    found["head_units"] = ("head_units", 1)
    for number, part in enumerate(_PARTS, 1):
        found[f"{part}_symbols"] = (f"{part}_symbols", number)
        found[f"{part}_bits"] = (f"{part}_bits", number + len(_PARTS))
    return found


def encode_units(
    records: Records, positions: NDArray[np.int64], tables: DitherTables
) -> tuple[NDArray[np.int64], Arrays]:
    """Encode records as the arrays to store, and their offsets (S + 1, columns).

    ``positions`` (S + 1,) is the first record of each sequence, and then the number of records.
    """
    cluster_N = records["cluster"]
    rows_N = np.arange(len(records))
    rows_H = np.repeat(rows_N, records["head_count"])
    ranks_H = tables.find_ranks(cluster_N[rows_H], records["head_ids"])
    order_H = np.lexsort((ranks_H, rows_H))
    rows_M = np.repeat(rows_N, records["tail_count"])
    came_M = records["tail_k"] > 0
    rows_E, rows_O = rows_M[came_M], rows_M[~came_M]
    k_E = records["tail_k"][came_M].astype(np.int64)
    ranks_O = tables.find_ranks(cluster_N[rows_O], records["tail_ids"][~came_M])
    ranks = (
        ranks_H[order_H],
        k_E[np.lexsort((k_E, rows_E))],
        ranks_O[np.lexsort((ranks_O, rows_O))],
    )
    counts = [np.bincount(rows, minlength=len(records)) for rows in (rows_H, rows_E, rows_O)]
    arrays = {name: records[name] for name in _PLAIN}
    arrays["other_count"] = counts[2].astype(records["tail_count"].dtype)
    arrays["head_units"] = records["head_units"][order_H]
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
    columns = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
    counts = _count_entries(columns, codec)
    ranks = {}
    for part in _PARTS:
        cuts = compute_offsets(np.array([len(each[f"{part}_symbols"]) for each in parts]))
        packed = columns.pop(f"{part}_symbols"), columns.pop(f"{part}_bits")
        ranks[part] = unpack_ranks(*packed, counts[part], cuts)
    cluster_N = columns["cluster"]
    sequence_N, position_N = np.nonzero(columns["target_mask"])
    starts_N = hash_positions(codec.seed, numbers[sequence_N], position_N)
    gaps_N, others_N = counts["gap"], counts["other"]
    # ``repeat`` is faster than an index of rows.
    cluster_E, starts_E = np.repeat(cluster_N, gaps_N), np.repeat(starts_N, gaps_N)
    ids_E = tables.name_candidates(cluster_E, starts_E, ranks["gap"])
    ids = {
        part: tables.name_ranks(np.repeat(cluster_N, counts[part]), ranks[part])
        for part in ("head", "other")
    }
    # Among all drawn tokens the accepted candidates of a record come after its others.
    places_E = np.arange(len(ids_E)) + np.repeat(np.cumsum(others_N), gaps_N)
    before_N = np.cumsum(gaps_N) - gaps_N
    places_O = np.arange(len(ids["other"])) + np.repeat(before_N, others_N)
    tail_M = np.empty(len(places_E) + len(places_O), ids_E.dtype)
    k_M = np.zeros(len(tail_M), np.uint16)
    tail_M[places_E], tail_M[places_O] = ids_E, ids["other"]
    k_M[places_E] = ranks["gap"]
    del columns["other_count"]
    tails_N = (gaps_N + others_N).astype(columns["head_count"].dtype)
    tails = {"tail_count": tails_N, "tail_ids": tail_M, "tail_k": k_M}
    return columns | {"head_ids": ids["head"]} | tails


def _count_entries(columns: Arrays, codec: Codec) -> dict[str, NDArray[np.int64]]:
    """Count the entries of each part of each record, (N,)."""
    gold_N = columns["tokens"][:, 1:][columns["target_mask"][:, :-1]]
    known_NK = columns["known"]
    _, units_N = count_rest(codec, known_NK, find_counted(codec, known_NK, gold_N))
    heads_N = columns["head_count"].astype(np.int64)
    given = compute_offsets(columns["head_units"] >> 1)[compute_offsets(heads_N)]
    others_N = columns["other_count"].astype(np.int64)
    return {"head": heads_N, "gap": units_N - np.diff(given) - others_N, "other": others_N}
