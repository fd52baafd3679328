"""Counter-based random numbers: Philox4x32-10.

The counter is (sequence, position, rank, purpose) and the key is the seed. A random number is
therefore the same for every batch size, device count and resume. Source: Salmon et al., "Parallel
random numbers: as easy as 1, 2, 3", SC 2011; the constants and known answers are Random123's.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

# A purpose separates random numbers that share a seed, a sequence and a position. A number that is
# in use never changes: a capture that a later version resumes must give the same bytes.

#: Start of the systematic sample of a position's tail.
PURPOSE_TAIL = 0
#: Order in which the blocks of a sequence's tails are laid out before sampling.
PURPOSE_TAIL_ORDER = 1
#: Stochastic rounding of head log-probabilities.
PURPOSE_ROUNDING = 2
#: Stochastic rounding of the log-probabilities of gold and always_keep tokens.
PURPOSE_KNOWN_ROUNDING = 3
#: Stochastic rounding of entropies.
PURPOSE_ENTROPY_ROUNDING = 4
#: Stochastic rounding of tail log-probabilities.
PURPOSE_TAIL_ROUNDING = 5
#: Start of the systematic sample of the ids that a server scores.
PURPOSE_PROPOSAL = 6

#: Sequences that have random numbers of their own: a counter has 32 bits.
SEQUENCES = 1 << 32

_MULTIPLIERS = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
_LOW_WORD = np.uint64(0xFFFFFFFF)
_WORD_BITS = np.uint64(32)


def apply_philox(counters: NDArray[np.uint64], key: tuple[int, int]) -> NDArray[np.uint64]:
    """Apply ten rounds of Philox4x32 to (4, ...) counter words; return as many random words.

    All words, the two of ``key`` too, are below 2^32.
    """
    words = counters.copy()
    # All is written in place: new memory for each step would cost three times the arithmetic.
    product_0, product_1 = np.empty((2, *words.shape[1:]), np.uint64)
    for round_ in range(10):
        key_words = [
            np.uint64((word + round_ * step) & 0xFFFFFFFF)
            for word, step in zip(key, _KEY_STEPS, strict=True)
        ]
        # Words are below 2^32, so their products fit into 64 bits.
        np.multiply(words[0], _MULTIPLIERS[0], out=product_0)
        np.multiply(words[2], _MULTIPLIERS[1], out=product_1)
        _mix_high_word(product_1, words[1], key_words[0], words[0])
        _mix_high_word(product_0, words[3], key_words[1], words[2])
        np.bitwise_and(product_1, _LOW_WORD, out=words[1])
        np.bitwise_and(product_0, _LOW_WORD, out=words[3])
    return words


def _mix_high_word(
    product: NDArray[np.uint64], word: NDArray[np.uint64], key: np.uint64, out: NDArray[np.uint64]
) -> None:
    """Mix the product's high word with a word of the counter and one of the key, into ``out``."""
    np.right_shift(product, _WORD_BITS, out=out)
    np.bitwise_xor(out, word, out=out)
    np.bitwise_xor(out, key, out=out)


def draw_uniforms(
    seed: int, purpose: int, sequence: Any, position: Any, rank: Any = 0
) -> NDArray[np.float64]:
    """Draw uniform numbers in [0, 1) with 53 random bits, one for each counter.

    ``seed`` is below 2^64, all else below 2^32. ``sequence``, ``position`` and ``rank`` broadcast
    to the shape of the result; ``rank`` tells the entries of one record apart.
    """
    words = apply_philox(_stack_counters(sequence, position, rank, purpose), _split_seed(seed))
    # 27 and 26 bits: a float64 holds 53.
    high = words[0] >> np.uint64(5)
    low = words[1] >> np.uint64(6)
    bits: NDArray[np.uint64] = (high << np.uint64(26)) | low
    return bits.astype(np.float64) * 2.0**-53


def draw_permutations(seed: int, sequences: NDArray[Any], size: int) -> NDArray[np.int64]:
    """Draw a permutation of ``range(size)`` for each of ``sequences`` (S,), (S, size).

    Each depends only on (seed, sequence). It is a stable argsort of 64-bit Philox words, so it is
    the same in every numpy version.
    """
    pairs = np.arange((size + 1) // 2)
    counters = _stack_counters(sequences[:, None], pairs, 0, PURPOSE_TAIL_ORDER)
    words = apply_philox(counters, _split_seed(seed))
    sort_keys = (words[0::2] << _WORD_BITS) | words[1::2]
    sort_keys = np.moveaxis(sort_keys, 0, -1).reshape(len(sequences), -1)
    return np.argsort(sort_keys[:, :size], axis=1, kind="stable")


def _stack_counters(*axes: Any) -> NDArray[np.uint64]:
    """Broadcast the counter axes to one (4, ...) array; raise ``ValueError`` beyond 32 bits."""
    given = [np.atleast_1d(np.asarray(axis, np.int64)) for axis in axes]
    words = np.empty((len(given), *np.broadcast_shapes(*(axis.shape for axis in given))), np.uint64)
    for word, axis in zip(words, given, strict=True):
        # Checked before it is broadcast, which may repeat it many times.
        if axis.size and (axis.min() < 0 or axis.max() >> 32):
            raise ValueError(
                f"Random counters must lie in [0, 2^32), but got {axis.min()} to {axis.max()}."
            )
        word[...] = axis
    return words


def _split_seed(seed: int) -> tuple[int, int]:
    if not 0 <= seed < 2**64:
        raise ValueError(f"A seed must lie in [0, 2^64), but got {seed}.")
    return seed & 0xFFFFFFFF, seed >> 32
