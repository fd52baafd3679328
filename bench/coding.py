"""Compare codings of a cache's ids: bytes a token, measured on the records of a sealed cache.

    python bench/coding.py FOLDER

FOLDER is a cache of profile threshold or tempered. Every coding ends with blosc's zstd, which any
Zarr reader has. "Bits" are the digits that cache/idcode.py leaves uncoded. The floor is the entropy
of the ids by their frequencies f, if the order of the m ids of a record is free:
- sum log2 f(id) - sum log2 m! bits, without the table of f.

    P   records      E   entries      V   vocabulary
"""

from __future__ import annotations

import argparse
from math import lgamma, log
from pathlib import Path
from typing import Any

import numpy as np
from numcodecs import Blosc
from numpy.typing import NDArray

from cache.idcode import compute_frequency_classes, order_tokens, pack_ranks, sort_by_rank
from cache.records import compute_offsets
from cache.store import open_cache

SHUFFLES = {
    "no shuffle": Blosc.NOSHUFFLE,
    "byte shuffle": Blosc.SHUFFLE,
    "bit shuffle": Blosc.BITSHUFFLE,
}


def count_compressed_bytes(array: NDArray[Any], shuffle: int = Blosc.NOSHUFFLE) -> int:
    """Count the bytes of ``array`` after zstd at the level that shards use."""
    return len(Blosc(cname="zstd", clevel=5, shuffle=shuffle).encode(np.ascontiguousarray(array)))


def compute_gaps(values: NDArray[Any], counts: NDArray[Any]) -> NDArray[Any]:
    """Differences between neighbours of a record; the first value stays as it is."""
    found = np.diff(values.astype(np.int64), prepend=0)
    first = compute_offsets(counts)[:-1][counts > 0]
    found[first] = values[first]
    return found.astype(values.dtype)


def count_coded_bytes(ranks: NDArray[Any], counts: NDArray[Any], by_place: bool = False) -> int:
    """Count the bytes of the coding of cache/idcode.py.

    ``by_place`` orders symbols by their place in the record: all first symbols, then all second.
    """
    packed = pack_ranks(ranks, counts, np.array([0, len(ranks)]))
    place = np.arange(len(ranks)) - np.repeat(compute_offsets(counts)[:-1], counts)
    symbols = packed.symbols[np.argsort(place, kind="stable")] if by_place else packed.symbols
    return count_compressed_bytes(symbols) + len(packed.bits)


def compute_floor(ids: NDArray[Any], counts: NDArray[Any]) -> float:
    """The fewest bytes that the frequencies of the ids allow."""
    seen = np.bincount(ids)
    seen = seen[seen > 0]
    orders = sum(lgamma(m + 1) * number for m, number in enumerate(np.bincount(counts))) / log(2)
    return float((-(seen * np.log2(seen / seen.sum())).sum() - orders) / 8)


def measure_codings(ids: NDArray[Any], counts: NDArray[Any], vocabulary: int) -> dict[str, float]:
    """Bytes of the ids (E,), in several codings, of records with ``counts`` (P,) entries."""
    by_id = ids[sort_by_rank(np.arange(vocabulary), ids, counts)]
    classes = compute_frequency_classes([ids], vocabulary)
    rank = np.argsort(order_tokens(classes))
    by_rank = rank[ids[sort_by_rank(rank, ids, counts)]]
    found = {
        f"ids in order, {name}": float(count_compressed_bytes(by_id, code))
        for name, code in SHUFFLES.items()
    }
    found |= {
        f"gaps of ids, {name}": float(count_compressed_bytes(compute_gaps(by_id, counts), code))
        for name, code in SHUFFLES.items()
    }
    found["gaps of ids, symbols and bits"] = count_coded_bytes(by_id.astype(np.int64), counts)
    found["the order that frequent tokens come first in: V classes"] = count_compressed_bytes(
        classes
    )
    found["gaps in that order, symbols and bits (what shards hold)"] = count_coded_bytes(
        by_rank, counts
    )
    found["the same, symbols by their place in the record"] = count_coded_bytes(
        by_rank, counts, by_place=True
    )
    found["floor of the ids' frequencies"] = compute_floor(ids, counts)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    store = open_cache(parser.parse_args().folder)
    _, records = store.read(range(len(store)))
    parts = {
        part: measure_codings(
            records[f"{part}_ids"], records[f"{part}_count"], store.codec.vocabulary_size
        )
        for part in ("head", "tail")
    }
    entries = {part: len(records[f"{part}_ids"]) / len(records) for part in parts}
    print(
        f"{store.codec.profile} {store.codec.threshold:g}, {len(records):,} records, "
        f"V = {store.codec.vocabulary_size:,}"
    )
    print()
    titles = [f"{part}, {count:.2f} ids" for part, count in entries.items()]
    print(f"| bytes a token | {' | '.join(titles)} |")
    print("|---|--:|--:|")
    for name in parts["head"]:
        cells = [f"{found[name] / len(records):.2f}" for found in parts.values()]
        print(f"| {name} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
