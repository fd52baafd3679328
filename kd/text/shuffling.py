"""Random orders that are never listed: the sequence at any place of an epoch is computed by itself.

A cache that is larger than memory is read by *windows*. The shards are put in random order, every
``width`` of them in a row are one window, and the sequences of a window come in random order. So
the shards of one window are in memory at a time, and each is read from the disk once an epoch.
Where shards are too large for memory, a part of a shard takes the place of a shard.

    place      position in the epoch's order, 0 to count - 1
    sequence   number of a training sequence; a shard holds ``shard_size`` consecutive ones, and the
               last shard may hold fewer
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

#: Rounds of a permutation, each of which changes one of the two digits of a number.
_ROUNDS = 10
#: Constants of the hash splitmix64 (Steele and others, OOPSLA 2014).
_STEP = np.uint64(0x9E3779B97F4A7C15)
_FACTORS = (np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB))
_SHIFTS = (np.uint64(30), np.uint64(27), np.uint64(31))


@dataclass(frozen=True)
class KeyedPermutation:
    """A random permutation of 0 to ``count - 1``, computed for each number by itself.

    It is a Feistel network on the two digits of a number in a mixed base near sqrt(count). A result
    of ``count`` or more is permuted again until it is smaller, which keeps the map one to one
    (Black and Rogaway, CT-RSA 2002). ``keys`` are one 64-bit number for each round.
    """

    count: int
    keys: tuple[int, ...]

    @classmethod
    def draw(cls, count: int, seed: int, epoch: int, purpose: int) -> KeyedPermutation:
        """Draw the permutation of (seed, epoch, purpose)."""
        random = np.random.Philox(key=[seed, epoch], counter=[0, 0, 0, purpose])
        return cls(count, tuple(random.random_raw(_ROUNDS).tolist()))

    def __getitem__(self, numbers: NDArray[np.int64]) -> NDArray[np.int64]:
        """Permute each of ``numbers``."""
        return self._walk(numbers, inverse=False)

    def invert(self, numbers: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the numbers that are permuted to ``numbers``."""
        return self._walk(numbers, inverse=True)

    def _walk(self, numbers: NDArray[np.int64], inverse: bool) -> NDArray[np.int64]:
        found = self._turn(np.asarray(numbers, np.int64), inverse)
        while (outside := found >= self.count).any():
            found[outside] = self._turn(found[outside], inverse)
        return found

    def _turn(self, numbers: NDArray[np.int64], inverse: bool) -> NDArray[np.int64]:
        """Permute the numbers below the product of both bases."""
        # The least bases near sqrt(count) whose product is at least count.
        upper = math.isqrt(self.count - 1) + 1
        bases = upper, -(-self.count // upper)
        digits = list(np.divmod(numbers, bases[1]))
        rounds = list(enumerate(self.keys))
        for number, key in reversed(rounds) if inverse else rounds:
            changed = number % 2
            shift = _hash(digits[1 - changed], key) % np.uint64(bases[changed])
            step = -shift.astype(np.int64) if inverse else shift.astype(np.int64)
            digits[changed] = (digits[changed] + step) % bases[changed]
        return digits[0] * bases[1] + digits[1]


def _hash(values: NDArray[np.int64], key: int) -> NDArray[np.uint64]:
    """Hash each value to 64 bits; sums and products wrap round."""
    # The key is an array, because numpy warns where a single number wraps round.
    mixed = values.astype(np.uint64) * _STEP + np.full(1, key, np.uint64)
    for shift, factor in zip(_SHIFTS, _FACTORS, strict=False):
        mixed = (mixed ^ (mixed >> shift)) * factor
    return mixed ^ (mixed >> _SHIFTS[-1])


@dataclass(frozen=True)
class EpochWindows:
    """The order of one epoch by windows of ``width`` shards; index it with places.

    It is a pure function of its fields, and holds nothing for each sequence or shard.
    """

    count: int
    shard_size: int
    width: int
    seed: int
    epoch: int

    def __getitem__(self, places: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the sequences at ``places``."""
        places = np.asarray(places, np.int64)
        windows = self._pad(places) // (self.width * self.shard_size)
        found = np.empty_like(places)
        for window in np.unique(windows).tolist():
            inside = windows == window
            found[inside] = self._mix(window, places[inside])
        return found

    @cached_property
    def _shards(self) -> KeyedPermutation:
        """The order of the shards."""
        return KeyedPermutation.draw(-(-self.count // self.shard_size), self.seed, self.epoch, 0)

    @cached_property
    def _short(self) -> tuple[int, int]:
        """The place where the last shard of the file ends, and how many sequences it lacks."""
        last = self._shards.count - 1
        lacking = (last + 1) * self.shard_size - self.count
        turn = int(self._shards.invert(np.array([last]))[0])
        return (turn + 1) * self.shard_size - lacking, lacking

    def _pad(self, places: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the places as they would be if the last shard of the file were full."""
        end, lacking = self._short
        return places + np.where(places >= end, lacking, 0)

    def _locate_window(self, window: int) -> int:
        """Return the first place of ``window``."""
        end, lacking = self._short
        start = window * self.width * self.shard_size
        return min(start - lacking if start > end else start, self.count)

    def _mix(self, window: int, places: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the sequences at ``places`` of one window."""
        start = self._locate_window(window)
        size = self._locate_window(window + 1) - start
        mixing = KeyedPermutation.draw(size, self.seed, self.epoch, window + 1)
        turns, rows = np.divmod(self._pad(start + mixing[places - start]), self.shard_size)
        return self._shards[turns] * self.shard_size + rows
