"""Shares of the gap between plain training and full distillation, with their intervals.

With c, d and x the held-out cross-entropy of a student of cross-entropy only, of one that sees all
of p, and of a row's student, each in nats a token,

    share = sum_k (c_k - x_k) / sum_k (c_k - d_k)

over the seeds k. Students of one seed begin alike and see the same tokens in the same order, so
differences of one seed vary less than the losses do. A share is a ratio sum a_i / sum b_i of
independent units i, with the interval of ``cache.perplexity.compute_ratio_reach``. There are two
intervals, which answer two questions and are not added:

    over seeds    i = seed k, a = c_k - x_k, b = c_k - d_k: where the share of other seeds would
                  lie, on the same held-out text
    over text     i = block of up to 64 successive held-out targets, a and b = the same differences
                  summed over the block's tokens and over the seeds: where the share of these
                  students would lie, on another held-out text of this kind

Shapes: K seeds, N held-out targets, S held-out sequences, B blocks.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from cache.perplexity import BlockLosses, compute_ratio_reach

#: The ranges of the teacher's probability of the next word: names, and their lower ends.
DECADES = (
    ("0.1 to 1", 0.1),
    ("0.01 to 0.1", 0.01),
    ("0.001 to 0.01", 0.001),
    ("0.0001 to 0.001", 0.0001),
    ("below 0.0001", 0.0),
)
#: The ranges of the count of the next word in the training text: names, and their lower ends.
FREQUENCIES = (
    ("1,000 and more", 1000),
    ("100 to 999", 100),
    ("10 to 99", 10),
    ("1 to 9", 1),
    ("0", 0),
)


@dataclass(frozen=True)
class Ratio:
    """An estimated ratio; ``reach`` is half of its 95 % interval, None from a single unit."""

    value: float
    reach: float | None

    @classmethod
    def of(cls, a_i: NDArray[np.float64], b_i: NDArray[np.float64]) -> Ratio:
        """Estimate sum a / sum b and its interval from units of shape (n,) each."""
        value = float(a_i.sum()) / float(b_i.sum())
        return cls(value, compute_ratio_reach(a_i, b_i) if len(a_i) > 1 else None)


@dataclass(frozen=True)
class Share:
    """A row's share of the gap, once with its interval over seeds and once with that over text."""

    over_seeds: Ratio
    over_text: Ratio

    @classmethod
    def of(
        cls,
        plain_KN: NDArray[np.float64],
        full_KN: NDArray[np.float64],
        row_KN: NDArray[np.float64],
        targets_S: NDArray[np.int64],
    ) -> Share | None:
        """Compute the share from losses in nats of the same seeds and the same targets.

        ``targets_S`` counts the targets of each held-out sequence. Returns None where the student
        that sees all of p is not better than the one of cross-entropy only: there is no gap then.
        """
        gained_KN = plain_KN - row_KN
        gap_KN = plain_KN - full_KN
        if not gap_KN.sum() > 0:
            return None
        gained = BlockLosses.of(gained_KN.sum(0), targets_S)
        gap = BlockLosses.of(gap_KN.sum(0), targets_S)
        return cls(Ratio.of(gained_KN.mean(1), gap_KN.mean(1)), Ratio.of(gained.nats_B, gap.nats_B))


@dataclass(frozen=True)
class Part:
    """The held-out targets of one range, and what a row loses on them against all of p, in nats.

    ``within`` is the mean difference on these targets, NaN without any; ``added`` is their part of
    the mean difference over all targets, so that the parts of all ranges sum to it.
    """

    name: str
    targets: int
    within: float
    added: float


def split_difference(
    row_KN: NDArray[np.float64],
    full_KN: NDArray[np.float64],
    values_N: NDArray[np.float64],
    ranges: tuple[tuple[str, float], ...],
) -> list[Part]:
    """Split the mean difference of a row to all of p by ranges of ``values_N``.

    ``ranges`` gives names and lower ends, the highest first; the last one takes all that is left.
    """
    difference_N = (row_KN - full_KN).mean(0)
    free_N = np.ones(len(values_N), bool)
    parts = []
    for name, lowest in ranges:
        inside_N = free_N & (values_N >= lowest)
        free_N &= ~inside_N
        count = int(inside_N.sum())
        total = float(difference_N[inside_N].sum())
        parts.append(Part(name, count, total / count if count else math.nan, total / len(values_N)))
    return parts
