"""Token ids in few bits, in plain arrays that a general compressor can finish.

The ids of a record are a set, so they are put in order and only the gaps between them are kept; and frequent tokens
come first in that order, so the gaps are small. A gap d becomes a *symbol*, which holds its size to three binary digits
behind the leading one, and the *bits* below those, which are as good as random:

    d < 16                      symbol = d, no bits
    d = (8 + a) 2^e + b, e > 0  symbol = 8 (e + 1) + a, bits = the e binary digits of b

Symbols have few values and skewed counts: zstd's Huffman codes them close to their entropy. Bits lie end to end, the
lowest first, and begin at a whole byte with every sequence, so that each sequence is read alone.

The order: ``classes[id]`` is the bit length of the id's count in the shard, most frequent first, then by id. It is
stored in place of the order, because it compresses to a third of a byte for each id.

    V   vocabulary      P   records      S   sequences      E   entries of all records
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cache.records import offsets_of

_SYMBOLS = np.arange(256)
_BITS = np.where(_SYMBOLS < 16, 0, _SYMBOLS // 8 - 1).astype(np.uint8)
_BASE = np.where(_SYMBOLS < 16, _SYMBOLS, (8 + _SYMBOLS % 8) << np.minimum(_BITS, 20)).astype(np.uint32)
_MASK = ((np.uint64(1) << np.arange(33, dtype=np.uint64)) - np.uint64(1)).astype(np.uint32)  # so many ones


def classes_of(ids: list[NDArray[Any]], vocabulary_size: int) -> NDArray[np.uint8]:
    """The frequency class of every token, (V,), from the ids that will be stored."""
    counts = sum((np.bincount(part, minlength=vocabulary_size) for part in ids), np.zeros(vocabulary_size, np.int64))
    return np.ceil(np.log2(counts + 1)).astype(np.uint8)


def order_of(classes: NDArray[np.uint8]) -> NDArray[np.int64]:
    """The token at each rank, (V,)."""
    return np.argsort(-classes.astype(np.int64), kind="stable")


@dataclass(frozen=True, eq=False)
class Packed:
    """Coded ids: ``symbols`` (E,) uint8, ``bits`` as bytes, and where each sequence's bytes begin, (S + 1,)."""

    symbols: NDArray[np.uint8]
    bits: NDArray[np.uint8]
    starts: NDArray[np.int64]


def sort_within(rank: NDArray[Any], ids: NDArray[Any], counts: NDArray[Any]) -> NDArray[np.int64]:
    """The order (E,) that sorts every record's ids by their rank."""
    rows = np.repeat(np.arange(len(counts)), counts)
    return np.argsort(rows * np.int64(len(rank)) + rank[ids], kind="stable")


def pack(ranks: NDArray[Any], counts: NDArray[Any], entries: NDArray[Any]) -> Packed:
    """Code ``ranks`` (E,), ascending within records of ``counts`` (P,) entries; ``entries`` (S + 1,) cut sequences."""
    gaps = ranks.astype(np.int64)
    gaps[1:] -= ranks[:-1].astype(np.int64)
    first = offsets_of(counts)[:-1][counts > 0]
    gaps[first] = ranks[first]
    exponent = np.maximum(np.frexp(gaps.astype(np.float64))[1].astype(np.int64) - 4, 0)
    symbols = np.where(exponent > 0, 8 * exponent + (gaps >> exponent), gaps)
    place, starts = _bit_places(exponent, entries)
    low = (gaps & ((1 << exponent) - 1)) << (place & 7)
    bits = np.zeros(int(starts[-1]) + 3, np.int64)  # bits of different entries never overlap: adding is or-ing
    for byte in range(3):
        np.add.at(bits, (place >> 3) + byte, (low >> (8 * byte)) & 0xFF)
    return Packed(symbols.astype(np.uint8), bits[: int(starts[-1])].astype(np.uint8), starts)


def _bit_places(exponent: NDArray[Any], entries: NDArray[Any]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Where each entry's bits begin, (E,), and the first byte of each sequence, (S + 1,)."""
    running = offsets_of(exponent)
    used = np.diff(running[entries])
    starts = offsets_of((used + 7) // 8)
    shift = 8 * starts[:-1] - running[entries[:-1]]
    return running[:-1] + np.repeat(shift, np.diff(entries)), starts


def unpack(
    symbols: NDArray[np.uint8], bits: NDArray[np.uint8], counts: NDArray[Any], entries: NDArray[Any]
) -> NDArray[np.int64]:
    """The ranks (E,) of whole sequences end to end; the inverse of ``pack``, for any sequences in any order."""
    length = _BITS.take(symbols)  # take, and words of their own: either is twice as fast as what indexing does here
    place, _ = _bit_places(length, entries)
    padded = np.concatenate([bits, np.zeros(4, np.uint8)])
    words: NDArray[np.uint32] = np.ndarray(len(bits) + 1, "<u4", padded, strides=(1,)).copy()  # four bytes from each on
    low = (words.take(place >> 3) >> (place & 7).astype(np.uint32)) & _MASK.take(length)
    running = np.cumsum(_BASE.take(symbols) + low, dtype=np.int64)
    first = offsets_of(counts)[:-1]
    before = np.concatenate([np.zeros(1, np.int64), running])[first]
    ranks: NDArray[np.int64] = running - np.repeat(before, counts)
    return ranks
