"""Shared dither: the ids of a tail as gaps between candidates that writer and reader both draw.

Candidate k = 1, 2, ... of a position is the token in slot hash(seed, sequence, position, k) of a
table, so candidates are draws from the prior b of the table. The writer accepts some of them
(``kd.capture.units.drawing``), and a record holds the gaps between the accepted k. An entry costs
what the prior does not know of the teacher's p, and not the randomness of the draw, which the
reader makes anew. Each position belongs to a cluster, and each cluster has a table of its own.

Tokens without a candidate are kept by their rank in the cluster, heads too. First come the L tokens
of ``leading_CL``, then all others by their number of slots, the highest first. Among equals, and
from rank R on, the order is that of ``classes_V``: the highest class first, and ids ascend within a
class. From rank R on all tokens are counted, those with a lower rank too.

C   clusters      Z   slots of a table      L, R   leading and ranked tokens      V   vocabulary
N   positions     E   entries               D   width of the teacher's hidden states
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cache.idcode import order_tokens
from cache.rounding import choose_id_dtype

#: Slots of a table of at most 65,536 tokens, a power of two. More would halve the quarter of a bit
#: that an entry costs because slots are whole, and double the bytes of the tables.
SLOTS = 1 << 15
#: Leading tokens of a cluster, which are stored: they are those of most heads.
LEADING = 64
#: Tokens that have a rank in their cluster, R.
RANKED = 4096
#: Candidates for each token that is drawn. Tokens that arrive later are kept by their rank.
PATIENCE = 64
#: The arrays of the tables, as they are stored.
TABLE_ARRAYS = ("slots", "leading", "classes", "centres")

#: The distance between the states of SplitMix64, 2^64 / golden ratio, as a signed number.
_STEP = 0x9E3779B97F4A7C15 - (1 << 64)
_FACTORS = ((30, 0xBF58476D1CE4E5B9 - (1 << 64)), (27, 0x94D049BB133111EB - (1 << 64)))


@dataclass(frozen=True, eq=False)
class DitherTables:
    """The tables of a cache. ``centres_CD`` are needed only to find the cluster of a state."""

    slots_CZ: NDArray[Any]
    leading_CL: NDArray[Any]
    classes_V: NDArray[np.uint8]
    centres_CD: NDArray[np.float32]

    @classmethod
    def from_arrays(cls, arrays: dict[str, NDArray[Any]]) -> DitherTables:
        """Make the tables from ``TABLE_ARRAYS``; the inverse of ``to_arrays``."""
        bits = arrays["centres"].astype(np.uint32) << np.uint32(16)
        slots, leading, classes = (arrays[name] for name in TABLE_ARRAYS[:3])
        return cls(slots, leading, classes, bits.view(np.float32))

    def to_arrays(self) -> dict[str, NDArray[Any]]:
        """Return the arrays to store; centres must be representable in bfloat16."""
        centres = np.ascontiguousarray(self.centres_CD).view(np.uint32) >> np.uint32(16)
        arrays = (self.slots_CZ, self.leading_CL, self.classes_V, centres)
        types = list_table_types(self.vocabulary_size)
        pairs = zip(types.items(), arrays, strict=True)
        return {name: array.astype(dtype) for (name, dtype), array in pairs}

    @property
    def vocabulary_size(self) -> int:
        """The number of tokens, V."""
        return len(self.classes_V)

    @cached_property
    def order_V(self) -> NDArray[np.int64]:
        """The tokens in the order of their classes."""
        return order_tokens(self.classes_V)

    @cached_property
    def ranked_CR(self) -> NDArray[Any]:
        """The tokens of the first R ranks of each cluster."""
        size = self.vocabulary_size
        most = min(RANKED, size)
        place_V = np.argsort(self.order_V)
        ranked = np.empty((len(self.slots_CZ), most), choose_id_dtype(size))
        for row_R, slots_Z, leading_L in zip(ranked, self.slots_CZ, self.leading_CL, strict=True):
            counts_V = np.bincount(slots_Z, minlength=size)
            counts_V[leading_L] = -1
            found = np.flatnonzero(counts_V > 0)
            # One number that ascends in the order of the ranks is sorted faster than a pair.
            keys = np.sort(place_V[found] - counts_V[found] * size)
            row = [leading_L, self.order_V.take(keys % size)]
            if len(leading_L) + len(found) < most:
                row.append(self.order_V[counts_V[self.order_V] == 0])
            row_R[:] = np.concatenate(row)[:most]
        return ranked

    def name_candidates(
        self, cluster_E: NDArray[Any], starts_E: NDArray[np.int64], k_E: NDArray[Any]
    ) -> NDArray[Any]:
        """Return the tokens of candidates, (E,)."""
        size = self.slots_CZ.shape[1]
        places_E = hash_slots(starts_E, k_E.astype(np.int64), size)
        places_E += cluster_E.astype(np.int64) * size
        tokens_E: NDArray[Any] = self.slots_CZ.reshape(-1).take(places_E)
        return tokens_E

    def name_ranks(self, cluster_E: NDArray[Any], rank_E: NDArray[Any]) -> NDArray[Any]:
        """Return the tokens at ranks, (E,)."""
        ranked = self.ranked_CR.shape[1]
        places_E = cluster_E.astype(np.int64) * ranked + np.minimum(rank_E, ranked - 1)
        ids_E: NDArray[Any] = self.ranked_CR.reshape(-1).take(places_E)
        # Few tokens have no rank in their cluster.
        late = np.flatnonzero(rank_E >= ranked)
        ids_E[late] = self.order_V.take(rank_E.take(late) - ranked)
        return ids_E

    def find_ranks(self, cluster_E: NDArray[Any], ids_E: NDArray[Any]) -> NDArray[np.int64]:
        """Return the ranks of tokens, (E,); the inverse of ``name_ranks``."""
        keys, ranks, later_V = self._lookup
        wanted_E = cluster_E.astype(np.int64) * self.vocabulary_size + ids_E
        places_E = np.minimum(np.searchsorted(keys, wanted_E), len(keys) - 1)
        found_E = keys.take(places_E) == wanted_E
        return np.where(found_E, ranks.take(places_E), later_V.take(ids_E))

    @cached_property
    def _lookup(self) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
        """Keys of cluster and ranked token in order, the rank of each, and the later ranks."""
        clusters, ranked = self.ranked_CR.shape
        keys = np.arange(clusters)[:, None] * self.vocabulary_size + self.ranked_CR.astype(np.int64)
        order = np.argsort(keys, axis=None)
        later_V = np.argsort(self.order_V) + ranked
        return keys.reshape(-1)[order], order % ranked, later_V


def list_table_types(vocabulary_size: int) -> dict[str, np.dtype[Any]]:
    """List the types of ``TABLE_ARRAYS``, as they are stored."""
    ids = choose_id_dtype(vocabulary_size)
    types = (ids, ids, np.dtype(np.uint8), np.dtype(np.uint16))
    return dict(zip(TABLE_ARRAYS, types, strict=True))


def choose_leading(vocabulary_size: int) -> int:
    """Return the number of leading tokens of a cluster, L."""
    return min(LEADING, vocabulary_size)


def share_slots(prior_V: NDArray[Any], size: int | None = None) -> NDArray[Any]:
    """Return the token in each slot, (Z,): whole slots by the largest remainders, ids ascending.

    By default there are ``SLOTS``, or four times as many where those would leave too many of more
    than 65,536 tokens without one.
    """
    size = size or (SLOTS if len(prior_V) <= 1 << 16 else 4 * SLOTS)
    ideal_V = prior_V / prior_V.sum() * size
    counts_V = np.floor(ideal_V).astype(np.int64)
    left = size - int(counts_V.sum())
    counts_V[np.argsort(counts_V - ideal_V, kind="stable")[:left]] += 1
    return np.repeat(np.arange(len(prior_V)), counts_V)


def hash_positions(seed: int, sequence_N: Any, position_N: Any) -> Any:
    """Hash positions to the starts of their candidates, (N,) in int64, of numpy or of torch.

    The hash is the last step of SplitMix64 (Steele, Lea, Flood, "Fast splittable pseudorandom
    number generators", 2014). Numbers wrap at 64 bits. Philox takes nine times as long, more than
    a reader of a million tokens a second has.
    """
    signed = (seed + (1 << 63)) % (1 << 64) - (1 << 63)
    return _mix(_mix(sequence_N * _STEP + signed) ^ position_N)


def hash_slots(starts: Any, k: Any, size: int) -> Any:
    """Return the slots of candidates; ``size``, the slots of a table, is a power of two."""
    return _mix(starts + k * _STEP) & (size - 1)


def begin_tokens(starts: Any) -> Any:
    """Hash the starts of candidates to those of tokens, which no candidate depends on."""
    return _mix(starts ^ _STEP)


def hash_tokens(begins: Any, ids: Any) -> Any:
    """Return a uniform number of 52 bits for each token; ``begins`` are of ``begin_tokens``."""
    return (_mix(begins + ids * _STEP) >> 12) & ((1 << 52) - 1)


def _mix(words: Any) -> Any:
    """Apply the last step of SplitMix64; a mask makes the shifts those of unsigned numbers."""
    for shift, factor in _FACTORS:
        words = (words ^ ((words >> shift) & ((1 << (64 - shift)) - 1))) * factor
    return words ^ ((words >> 31) & ((1 << 33) - 1))
