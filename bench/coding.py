"""How the ids of a cache could be stored: bytes a token of several codings, measured on the records of a sealed cache.

    python bench/coding.py FOLDER

FOLDER is a cache of profile threshold or tempered. Every coding ends in blosc's zstd, which any Zarr reader has; "bits"
are the digits that cache/idcode.py leaves uncoded. The floor is what the ids' frequencies allow where the order of a
record's ids is free: - sum log2 f(id) - sum log2 m! bits, without the table of f.

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

from cache.idcode import classes_of, order_of, pack, sort_within
from cache.records import offsets_of
from cache.store import open_cache

SHUFFLES = {"no shuffle": Blosc.NOSHUFFLE, "byte shuffle": Blosc.SHUFFLE, "bit shuffle": Blosc.BITSHUFFLE}


def compressed(array: NDArray[Any], shuffle: int = Blosc.NOSHUFFLE) -> int:
    """Bytes of ``array`` after zstd at the level that shards are written with."""
    return len(Blosc(cname="zstd", clevel=5, shuffle=shuffle).encode(np.ascontiguousarray(array)))


def gaps(values: NDArray[Any], counts: NDArray[Any]) -> NDArray[Any]:
    """Differences within records, the first value as it is."""
    found = np.diff(values.astype(np.int64), prepend=0)
    first = offsets_of(counts)[:-1][counts > 0]
    found[first] = values[first]
    return found.astype(values.dtype)


def symbols_and_bits(ranks: NDArray[Any], counts: NDArray[Any], by_place: bool = False) -> int:
    """The coding of cache/idcode.py; ``by_place`` puts the first symbol of every record first, then every second."""
    packed = pack(ranks, counts, np.array([0, len(ranks)]))
    place = np.arange(len(ranks)) - np.repeat(offsets_of(counts)[:-1], counts)
    symbols = packed.symbols[np.argsort(place, kind="stable")] if by_place else packed.symbols
    return compressed(symbols) + len(packed.bits)


def floor(ids: NDArray[Any], counts: NDArray[Any]) -> float:
    """Bytes that the ids' own frequencies allow."""
    seen = np.bincount(ids)
    seen = seen[seen > 0]
    orders = sum(lgamma(m + 1) * number for m, number in enumerate(np.bincount(counts))) / log(2)
    return float((-(seen * np.log2(seen / seen.sum())).sum() - orders) / 8)


def codings(ids: NDArray[Any], counts: NDArray[Any], vocabulary: int) -> dict[str, float]:
    """Bytes of the ids (E,) of records of ``counts`` (P,) entries, in several codings."""
    by_id = ids[sort_within(np.arange(vocabulary), ids, counts)]
    classes = classes_of([ids], vocabulary)
    rank = np.argsort(order_of(classes))
    by_rank = rank[ids[sort_within(rank, ids, counts)]]
    found = {f"ids in order, {name}": float(compressed(by_id, code)) for name, code in SHUFFLES.items()}
    found |= {f"gaps of ids, {name}": float(compressed(gaps(by_id, counts), code)) for name, code in SHUFFLES.items()}
    found["gaps of ids, symbols and bits"] = symbols_and_bits(by_id.astype(np.int64), counts)
    found["the order that frequent tokens come first in: V classes"] = compressed(classes)
    found["gaps in that order, symbols and bits (what shards hold)"] = symbols_and_bits(by_rank, counts)
    found["the same, symbols by their place in the record"] = symbols_and_bits(by_rank, counts, by_place=True)
    found["floor of the ids' frequencies"] = floor(ids, counts)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    store = open_cache(parser.parse_args().folder)
    _, records = store.read(range(len(store)))
    parts = {
        part: codings(records[f"{part}_ids"], records[f"{part}_count"], store.codec.vocabulary_size)
        for part in ("head", "tail")
    }
    entries = {part: len(records[f"{part}_ids"]) / len(records) for part in parts}
    print(
        f"{store.codec.profile} {store.codec.threshold:g}, {len(records):,} records, "
        f"V = {store.codec.vocabulary_size:,}"
    )
    print()
    print(f"| bytes a token | head, {entries['head']:.2f} ids | tail, {entries['tail']:.2f} ids |\n|---|--:|--:|")
    for name in parts["head"]:
        print(f"| {name} | {' | '.join(f'{parts[part][name] / len(records):.2f}' for part in parts)} |")


if __name__ == "__main__":
    main()
