"""Token ids in few bits, in plain arrays that a general compressor makes smaller still.

The ids of a record are a set, so they are put in order and only the gaps between them are kept.
Frequent tokens come first in that order, so the gaps are small. A gap d becomes a *symbol*, which
holds the leading binary digit and the three after it, and the *bits* below those, which are close
to random:

    d < 16                      symbol = d, no bits
    d = (8 + a) 2^e + b, e > 0  symbol = 8 (e + 1) + a, bits = the e binary digits of b

Symbols have few values and skewed counts: zstd's Huffman codes them close to their entropy. Bits
lie end to end, the lowest first. Those of a sequence begin at a whole byte, so that each sequence
can be read by itself.

The order: ``classes[id]`` is the bit length of the id's count in the shard; the highest class comes
first, and ids ascend within a class. The classes are stored instead of the order, because they
compress to a third of a byte for each id.

    V   vocabulary      N   records      S   sequences      E   entries of all records
    W   entries with bits
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cache.records import compute_offsets

_SYMBOLS = np.arange(256)
#: Number of bits that follow each symbol.
_BITS = np.where(_SYMBOLS < 16, 0, _SYMBOLS // 8 - 1).astype(np.uint8)
#: Smallest gap of each symbol. Symbols that no vocabulary needs would overflow: their shift is cut.
_BASE = np.where(_SYMBOLS < 16, _SYMBOLS, (8 + _SYMBOLS % 8) << np.minimum(_BITS, 20)).astype(
    np.uint32
)
#: At index n, the number whose lowest n bits are ones.
_MASK = ((np.uint64(1) << np.arange(33, dtype=np.uint64)) - np.uint64(1)).astype(np.uint32)


def compute_frequency_classes(ids: list[NDArray[Any]], vocabulary_size: int) -> NDArray[np.uint8]:
    """Compute the frequency class of every token, (V,), from the ids that will be stored."""
    counts = sum(
        (np.bincount(part, minlength=vocabulary_size) for part in ids),
        np.zeros(vocabulary_size, np.int64),
    )
    return np.ceil(np.log2(counts + 1)).astype(np.uint8)


def order_tokens(classes: NDArray[np.uint8]) -> NDArray[np.int64]:
    """Return the token at each rank, (V,)."""
    # ``~`` turns the order of bytes round; numpy sorts bytes by counting, and wider types slower.
    return np.argsort(~classes, kind="stable")


@dataclass(frozen=True, eq=False)
class PackedIds:
    """Coded ids: ``symbols`` (E,), ``bits`` as bytes, and ``starts`` (S + 1,) of the sequences.

    ``starts`` is the first byte of each sequence in ``bits``.
    """

    symbols: NDArray[np.uint8]
    bits: NDArray[np.uint8]
    starts: NDArray[np.int64]


def sort_by_rank(rank: NDArray[Any], ids: NDArray[Any], counts: NDArray[Any]) -> NDArray[np.int64]:
    """Return the order (E,) that sorts the ids of every record by their rank."""
    rows = np.repeat(np.arange(len(counts)), counts)
    return np.argsort(rows * np.int64(len(rank)) + rank[ids], kind="stable")


def sort_ranks(ranks: NDArray[Any], counts: NDArray[Any]) -> NDArray[np.int64]:
    """Return the ranks (E,) of every record, ascending.

    Numbers whose upper half is their record are sorted in a third of the time of an order of pairs.
    """
    keys: NDArray[np.int64] = np.repeat(np.arange(len(counts)) << 32, counts) + ranks
    keys.sort()
    keys &= (1 << 32) - 1
    return keys


def pack_ranks(ranks: NDArray[Any], counts: NDArray[Any], entries: NDArray[Any]) -> PackedIds:
    """Code ``ranks`` (E,), which ascend within each record.

    ``counts`` (N,) are the entries of each record, ``entries`` (S + 1,) the first of each sequence.
    """
    gaps = ranks.astype(np.int64)
    gaps[1:] -= ranks[:-1].astype(np.int64)
    # The first gap of a record counts from rank 0.
    first = compute_offsets(counts)[:-1][counts > 0]
    gaps[first] = ranks[first]
    symbols = _list_symbols(int(gaps.max(initial=0)).bit_length()).take(gaps)
    place, starts = _locate_bits(_BITS.take(symbols), entries)
    low = (gaps - _BASE.take(symbols)) << (place & 7)
    # Bits of different entries never overlap, so adding them is the same as or-ing them.
    bits = np.zeros(int(starts[-1]) + 3, np.int64)
    for byte in range(3):
        np.add.at(bits, (place >> 3) + byte, (low >> (8 * byte)) & 0xFF)
    return PackedIds(symbols, bits[: int(starts[-1])].astype(np.uint8), starts)


@functools.cache
def _list_symbols(length: int) -> NDArray[np.uint8]:
    """Return the symbol of every gap of at most ``length`` binary digits."""
    gap = np.arange(1 << length)
    # frexp returns the bit length of an integer; symbols hold the uppermost four bits.
    exponent = np.maximum(np.frexp(gap.astype(np.float64))[1].astype(np.int64) - 4, 0)
    symbols = np.where(exponent > 0, 8 * exponent + (gap >> exponent), gap)
    return symbols.astype(np.uint8)


def _locate_bits(
    exponent: NDArray[Any], entries: NDArray[Any]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the first bit of each entry, (E,), and the first byte of each sequence, (S + 1,)."""
    running = compute_offsets(exponent)
    starts = compute_offsets((np.diff(running[entries]) + 7) // 8)
    shift = 8 * starts[:-1] - running[entries[:-1]]
    return running[:-1] + np.repeat(shift, np.diff(entries)), starts


def unpack_ranks(
    symbols: NDArray[np.uint8], bits: NDArray[np.uint8], counts: NDArray[Any], entries: NDArray[Any]
) -> NDArray[np.uint32]:
    """Decode the ranks (E,) of whole sequences end to end, as ``pack_ranks`` coded them.

    They may be any sequences in any order.
    """
    # ``take`` is twice as fast as indexing, and so is the copy of ``words``.
    gaps = _BASE.take(symbols)
    # Three of four symbols have no bits.
    wide_W = np.flatnonzero(symbols > 15)
    length_W = _BITS.take(symbols.take(wide_W))
    place_W, _ = _locate_bits(length_W, np.searchsorted(wide_W, entries))
    padded = np.concatenate([bits, np.zeros(4, np.uint8)])
    # The four bytes from each byte on, as one word: at most 7 + 14 bits of it are used.
    words: NDArray[np.uint32] = np.ndarray(len(bits) + 1, "<u4", padded, strides=(1,)).copy()
    low_W = words.take(place_W >> 3) >> (place_W & 7).astype(np.uint32)
    gaps[wide_W] += low_W & _MASK.take(length_W)
    # Sums wrap at 32 bits, and so do their differences, which are right again.
    running = np.zeros(len(gaps) + 1, np.uint32)
    np.cumsum(gaps, out=running[1:])
    before_N = running.take(compute_offsets(counts)[:-1])
    ranks: NDArray[np.uint32] = running[1:] - before_N.repeat(counts)
    return ranks
