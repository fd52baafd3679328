"""Random numbers that are a pure function of what they are for: Philox4x32-10.

The counter is (sequence, position, rank, purpose) and the key is the seed, so that a draw is the same for every batch
size, device count and resume. Source: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011; the
constants and known answers are Random123's.

    N   draws, of any shape that the arguments broadcast to
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

#: Purposes keep draws apart that share a seed, a sequence and a position. Numbers on record never change.
PURPOSE_TAIL = 0  # start of the systematic sample of a position's tail
PURPOSE_TAIL_ORDER = 1  # order in which the blocks of a sequence's tails are laid out before sampling
PURPOSE_ROUNDING = 2  # stochastic rounding of head log-probabilities
PURPOSE_KNOWN_ROUNDING = 3  # of the log-probabilities of gold and forced tokens
PURPOSE_ENTROPY_ROUNDING = 4  # of entropies
PURPOSE_TAIL_ROUNDING = 5  # of tail log-probabilities

_MULTIPLIERS = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
_LOW_WORD = np.uint64(0xFFFFFFFF)
_WORD_BITS = np.uint64(32)


def philox(counter_4N: NDArray[np.uint64], key: tuple[int, int]) -> NDArray[np.uint64]:
    """The ten rounds of Philox4x32: (4, N) counter words and two key words to (4, N) random words, all below 2^32."""
    words = counter_4N
    for round_ in range(10):
        key_words = [np.uint64((word + round_ * step) & 0xFFFFFFFF) for word, step in zip(key, _KEY_STEPS, strict=True)]
        product_0, product_1 = words[0] * _MULTIPLIERS[0], words[2] * _MULTIPLIERS[1]
        words = np.stack(
            [
                (product_1 >> _WORD_BITS) ^ words[1] ^ key_words[0],
                product_1 & _LOW_WORD,
                (product_0 >> _WORD_BITS) ^ words[3] ^ key_words[1],
                product_0 & _LOW_WORD,
            ]
        )
    return words


def uniforms(seed: int, purpose: int, sequence_N: Any, position_N: Any, rank_N: Any = 0) -> NDArray[np.float64]:
    """Uniform numbers in [0, 1) with 53 random bits, one for each counter.

    ``seed`` is below 2^64, the rest below 2^32; the three counters broadcast to (N,). ``rank_N`` is the extra axis
    for one draw per entry of a record.
    """
    words = philox(_counters(sequence_N, position_N, rank_N, purpose), _key(seed))
    high, low = words[0] >> np.uint64(5), words[1] >> np.uint64(6)
    bits: NDArray[np.uint64] = (high << np.uint64(26)) | low
    return bits.astype(np.float64) * 2.0**-53


def permutation(seed: int, sequence: int, size: int) -> NDArray[np.int64]:
    """A permutation of ``range(size)``, (size,), that depends on (seed, sequence) alone.

    A stable argsort of 64-bit Philox words: the same in every numpy version.
    """
    pairs = np.arange((size + 1) // 2)
    words = philox(_counters(sequence, pairs, 0, PURPOSE_TAIL_ORDER), _key(seed))
    sort_keys = (words[0::2] << _WORD_BITS) | words[1::2]
    return np.argsort(sort_keys.T.reshape(-1)[:size], kind="stable")


def _counters(*axes: Any) -> NDArray[np.uint64]:
    """The counter axes broadcast to one (4, N) array; raises ``ValueError`` where a counter leaves 32 bits."""
    words = np.stack(np.broadcast_arrays(*(np.atleast_1d(np.asarray(axis, np.int64)) for axis in axes)))
    if words.size and (words.min() < 0 or words.max() >> 32):
        raise ValueError(f"Random counters must lie in [0, 2^32), but got {words.min()} to {words.max()}.")
    return words.astype(np.uint64)


def _key(seed: int) -> tuple[int, int]:
    if not 0 <= seed < 2**64:
        raise ValueError(f"A seed must lie in [0, 2^64), but got {seed}.")
    return seed & 0xFFFFFFFF, seed >> 32
