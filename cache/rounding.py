"""How numbers become small integers: the step of each, and rounding without bias.

A log-probability l <= 0 is stored as a number of steps below 0. It is rounded at random to one of
the two neighbouring steps, in proportion to *probability*, so that E[exp(decoded)] is exactly p:
the error of a record is noise that averages out over positions, not bias. Entropies are rounded at
random too, in proportion to their values.

    N   positions      A   always_keep ids      D   width of a hidden state
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cache.random import PURPOSE_ENTROPY_ROUNDING, PURPOSE_KNOWN_ROUNDING, draw_uniforms

# Steps are in nats, the derivative in ``partition`` too.
KNOWN_STEP = 2.0**-8
ENTROPY_STEP = 2.0**-4
TOP_STEP = 2.0**-11
PARTITION_STEP = 2.0**-10
TEMPERED_HEAD_STEP = 2.0**-6
TAIL_STEP = 2.0**-3

#: A log-probability that is absent: an import did not contain it, or the record has no such entry.
UNKNOWN = 65535
#: An entropy that an import did not contain.
UNKNOWN_ENTROPY = 255


@dataclass(frozen=True, eq=False)
class RecordPositions:
    """The positions of N records: number of the sequence, and place in it, (N,) each.

    The random numbers of rounding depend on them.
    """

    sequence_N: NDArray[Any]
    position_N: NDArray[Any]


def choose_id_dtype(vocabulary_size: int) -> np.dtype[Any]:
    """Choose the stored type of token ids: uint16 up to 65,536 words, uint32 above."""
    return np.dtype(np.uint16 if vocabulary_size <= 1 << 16 else np.uint32)


def round_known(seed: int, known: NDArray[Any], places: RecordPositions) -> NDArray[np.uint16]:
    """Round the log-probabilities (N, 1 + A) of known tokens; NaN gives ``UNKNOWN``."""
    rows = (places.sequence_N[:, None], places.position_N[:, None])
    draws = draw_uniforms(seed, PURPOSE_KNOWN_ROUNDING, *rows, np.arange(known.shape[1])[None])
    # The largest code means "unknown", so that a known value takes at most the one before it.
    steps = np.minimum(round_stochastically(known, KNOWN_STEP, draws), UNKNOWN - 1)
    return np.where(np.isnan(known), UNKNOWN, steps).astype(np.uint16)


def round_entropy(seed: int, entropy: NDArray[Any], places: RecordPositions) -> NDArray[np.uint8]:
    """Round entropies (N,) at random, in proportion; NaN gives ``UNKNOWN_ENTROPY``."""
    floats = entropy.astype(np.float64) / ENTROPY_STEP
    draws = draw_uniforms(seed, PURPOSE_ENTROPY_ROUNDING, places.sequence_N, places.position_N)
    codes = np.minimum(np.floor(floats) + (draws < floats % 1.0), UNKNOWN_ENTROPY - 1)
    return np.where(np.isnan(entropy), UNKNOWN_ENTROPY, codes).astype(np.uint8)


def spread_entropy(entropy: NDArray[Any], places: RecordPositions) -> NDArray[np.uint8]:
    """Round the sum of the entropies of each sequence, and spread it evenly over its positions.

    So the mean of a sequence is right to half a step, and the column takes no space.
    """
    _, row_N, count_S = np.unique(places.sequence_N, return_inverse=True, return_counts=True)
    total_S = np.rint(np.bincount(row_N, entropy) / ENTROPY_STEP).astype(np.int64)
    order = np.argsort(row_N, kind="stable")
    rank_N = np.empty(len(row_N), np.int64)
    rank_N[order] = np.arange(len(row_N)) - (np.cumsum(count_S) - count_S)[row_N[order]]
    codes_N = total_S[row_N] // count_S[row_N] + (rank_N < (total_S % count_S)[row_N])
    spread: NDArray[np.uint8] = np.minimum(codes_N, UNKNOWN_ENTROPY - 1).astype(np.uint8)
    return spread


def round_stochastically(
    logprobs: NDArray[Any], step: float, draws: NDArray[np.float64]
) -> NDArray[np.int64]:
    """Round log-probabilities to steps below 0, without bias in probability.

    The upper neighbour is taken with chance (p - p_lower) / (p_upper - p_lower). ``draws`` are
    uniform in [0, 1), of the same shape. -inf and NaN give a number above every code.
    """
    steps = np.nan_to_num(np.maximum(-logprobs.astype(np.float64), 0.0) / step, nan=1e9, posinf=1e9)
    upper = np.floor(steps)
    # Divided by p_upper, so that no probability underflows.
    bottom = math.exp(-step)
    takes_upper = draws < (np.exp((upper - steps) * step) - bottom) / (1.0 - bottom)
    below: NDArray[np.int64] = (upper + ~takes_upper).astype(np.int64)
    return below


def round_to_nearest_step(logprobs: NDArray[Any]) -> NDArray[np.uint16]:
    """Round to steps of ``TOP_STEP`` below 0; -inf, an absent entry, gives ``UNKNOWN``."""
    steps = np.rint(np.maximum(-logprobs.astype(np.float64), 0.0) / TOP_STEP)
    codes = np.where(np.isfinite(logprobs), np.minimum(steps, UNKNOWN - 1), UNKNOWN)
    return codes.astype(np.uint16)


def round_to_fixed_point(values: NDArray[Any]) -> NDArray[np.int16]:
    """Round to multiples of ``PARTITION_STEP``, as integers; clip values to the range of int16."""
    limits = np.iinfo(np.int16)
    steps = np.rint(values.astype(np.float64) / PARTITION_STEP)
    return np.clip(steps, limits.min, limits.max).astype(np.int16)


def round_to_bfloat16(values: NDArray[Any]) -> NDArray[np.uint16]:
    """Return the upper halves of float32 numbers, rounded to nearest even."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def decode_masses(step: float, codes: NDArray[Any]) -> NDArray[np.float64]:
    """Decode steps of ``step`` nats below 0 to probabilities, by a table; ``UNKNOWN`` gives 0."""
    table: NDArray[np.float64] = np.exp(-step * np.arange(np.iinfo(codes.dtype).max + 1))
    table[UNKNOWN:] = 0.0
    masses: NDArray[np.float64] = table[codes]
    return masses


def make_cosine_basis(width: int) -> NDArray[np.float64]:
    """Make C, (D, D): the orthonormal DCT-II, whose rows are cosines along the width.

    z = h C^T, and h = z C. A coordinate of h that is far larger than the others is spread over all
    of z. A random or a Hadamard rotation (QuaRot, arXiv 2404.00456) does the same, but its error is
    no smaller here, and it needs a seed or a width that is a power of two.
    """
    k = np.arange(width)[:, None]
    n = np.arange(width)[None]
    return np.sqrt(np.where(k == 0, 1.0, 2.0) / width) * np.cos(np.pi * k * (n + 0.5) / width)
