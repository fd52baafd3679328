"""The perplexity of a text, with the number of its tokens and a 95 % interval.

Losses of tokens near each other depend on each other, so the interval is not made from single
tokens but from blocks of up to 64 successive targets of one sequence. The mean loss is a ratio,
R = sum c_b / sum n_b, of the blocks' losses c_b and tokens n_b, and its standard error is

    s = sqrt(B / (B - 1) * sum (c_b - R n_b)^2) / sum n_b        (Cochran 1977, section 6.4)

The interval of the loss is R +- t s, with Student's t of B - 1 degrees of freedom; that of the
perplexity is exp of its ends. It says how far another text of this length and kind may lie, not how
far another seed of the training may.

Shapes: N targets, S sequences, B blocks.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

#: Successive targets of a block.
BLOCK_TARGETS = 64
#: A perplexity of fewer tokens is shown with its interval.
FEW_TOKENS = 2000
#: An interval from fewer blocks would say nothing.
LEAST_BLOCKS = 4
#: The 97.5 % point of the normal distribution.
_NORMAL_POINT = 1.959963985
#: The 97.5 % points of Student's t, by degrees of freedom, where the expansion is too far off.
_T_POINTS = {1: 12.706205, 2: 4.302653}
#: exp of more than 709 overflows a float64.
_LARGEST_EXPONENT = 700.0


@dataclass(frozen=True)
class Interval:
    """The ends of a 95 % interval."""

    low: float
    high: float


@dataclass(frozen=True, eq=False)
class BlockLosses:
    """The losses of a text by blocks: sums in nats and tokens, (B,) each."""

    nats_B: NDArray[np.float64]
    tokens_B: NDArray[np.int64]

    @classmethod
    def none(cls) -> BlockLosses:
        """Return the losses of an empty text."""
        return cls(np.empty(0), np.empty(0, np.int64))

    @classmethod
    def of(
        cls, nats_N: NDArray[Any], targets_S: NDArray[Any], known_N: NDArray[np.bool_] | None = None
    ) -> BlockLosses:
        """Sum the losses ``nats_N`` of sequences with ``targets_S`` targets each, in their order.

        Only the tokens of ``known_N`` count; None counts all.
        """
        if not len(nats_N):
            return cls.none()
        first_S = np.cumsum(targets_S) - targets_S
        place_N = np.arange(len(nats_N)) - np.repeat(first_S, targets_S)
        begin_B = np.flatnonzero(place_N % BLOCK_TARGETS == 0)
        known_N = np.ones(len(nats_N), bool) if known_N is None else known_N
        nats_B = np.add.reduceat(np.where(known_N, nats_N, 0.0).astype(np.float64), begin_B)
        tokens_B = np.add.reduceat(known_N.astype(np.int64), begin_B)
        return cls(nats_B[tokens_B > 0], tokens_B[tokens_B > 0])

    def __add__(self, other: BlockLosses) -> BlockLosses:
        return BlockLosses(
            np.concatenate([self.nats_B, other.nats_B]),
            np.concatenate([self.tokens_B, other.tokens_B]),
        )

    def __sub__(self, other: BlockLosses) -> BlockLosses:
        """Return the differences to the losses of another model on the same text."""
        return replace(self, nats_B=self.nats_B - other.nats_B)

    @property
    def tokens(self) -> int:
        """The number of tokens."""
        return int(self.tokens_B.sum())

    @property
    def mean(self) -> float | None:
        """The mean loss in nats per token; None without tokens."""
        return float(self.nats_B.sum()) / self.tokens if len(self.tokens_B) else None

    @property
    def interval(self) -> Interval | None:
        """The 95 % interval of the mean loss; None from fewer than ``LEAST_BLOCKS`` blocks."""
        count = len(self.tokens_B)
        mean = self.mean
        if mean is None or count < LEAST_BLOCKS:
            return None
        reach = compute_ratio_reach(self.nats_B, self.tokens_B)
        return Interval(mean - reach, mean + reach)

    @property
    def perplexity(self) -> Perplexity | None:
        """The perplexity; None without tokens."""
        mean = self.mean
        return None if mean is None else Perplexity.of(mean, self.tokens, self.interval)


@dataclass(frozen=True)
class Perplexity:
    """A perplexity of ``tokens`` tokens; ``interval`` is None if there are too few for one."""

    value: float
    tokens: int
    interval: Interval | None

    @classmethod
    def of(cls, loss: float, tokens: int, interval: Interval | None) -> Perplexity:
        """Make it from a mean loss in nats and the interval of that loss."""
        ends = interval and Interval(raise_e(interval.low), raise_e(interval.high))
        return cls(raise_e(loss), tokens, ends)

    @property
    def shown_interval(self) -> Interval | None:
        """The interval, if the tokens are so few that it must be shown."""
        return self.interval if self.tokens < FEW_TOKENS else None

    def __str__(self) -> str:
        ends = self.shown_interval
        between = f", 95 % interval {ends.low:,.2f} to {ends.high:,.2f}" if ends else ""
        return f"{self.value:,.2f} ({self.tokens:,} tokens{between})"


def raise_e(loss: float) -> float:
    """Return exp of a loss, or the largest value that does not overflow."""
    return math.exp(min(loss, _LARGEST_EXPONENT))


def compute_ratio_reach(a_B: NDArray[Any], b_B: NDArray[Any]) -> float:
    """Return half of the 95 % interval of the ratio sum a / sum b of B >= 2 independent units.

    It is t s, with the formula at the top of this module.
    """
    count = len(a_B)
    whole = float(b_B.sum())
    # A student that diverged has infinite losses, and its interval is not a number.
    with np.errstate(invalid="ignore", over="ignore"):
        spread = float(((a_B - float(a_B.sum()) / whole * b_B) ** 2).sum())
    error = math.sqrt(count / (count - 1) * spread) / abs(whole)
    return compute_t_point(count - 1) * error


def compute_t_point(freedom: int) -> float:
    """Return the 97.5 % point of Student's t, to 1 %.

    The expansion of Abramowitz and Stegun 1964, 26.7.5, from 3 degrees of freedom on.
    """
    if freedom in _T_POINTS:
        return _T_POINTS[freedom]
    z = _NORMAL_POINT
    first = (z**3 + z) / 4
    second = (5 * z**5 + 16 * z**3 + 3 * z) / 96
    third = (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384
    fourth = (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / 92160
    return z + first / freedom + second / freedom**2 + third / freedom**3 + fourth / freedom**4
