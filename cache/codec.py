"""Records as small integers, and back.

A head log-probability becomes one of 256 levels, even steps from log(threshold) up to 0. Rounding is random between
the two neighbouring levels, in proportion to *probability*, so that E[exp(decoded)] is exactly p: the error of a
record is noise that averages out over positions, not bias. Gold log-probability and entropy feed reports and a
constant of the loss, so they take the nearest step of a fixed-point grid.

    P   positions with a record        H   head entries        M   tail entries
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cache.random import PURPOSE_ROUNDING, uniforms
from cache.records import Records, offsets_of

#: Counts are stored in a byte and a record has at most 1/threshold heads and 1/threshold tails.
SMALLEST_THRESHOLD = 1 / 255
#: Nats a step: gold log-probabilities saturate just under 32 nats, entropies just under 16 (log 262,144 is 12.5).
GOLD_STEP = 2.0**-11
ENTROPY_STEP = 2.0**-12

_LEVELS = 256
_LARGEST_CODE = 65535
#: How far below log(threshold) a head entry may lie, in nats: float32 noise at the boundary, not another threshold.
_SLACK = 1e-3


def id_dtype(vocabulary_size: int) -> np.dtype[Any]:
    """The smallest stored type for token ids: uint16 up to 65,536 words, uint32 above."""
    return np.dtype(np.uint16 if vocabulary_size <= 1 << 16 else np.uint32)


def level_logprobs(threshold: float) -> NDArray[np.float64]:
    """The log-probability of each of the 256 levels, (256,): from log(threshold) to 0 in nats."""
    return np.linspace(math.log(threshold), 0.0, _LEVELS)


@dataclass(frozen=True)
class Codec:
    """How records are stored: ``threshold`` sets the levels, ``seed`` the rounding, ``vocabulary_size`` the id type."""

    threshold: float
    seed: int
    vocabulary_size: int

    def encode(self, records: Records, sequence_P: NDArray[Any], position_P: NDArray[Any]) -> dict[str, NDArray[Any]]:
        """The arrays to store for ``records``, whose positions lie at (sequence, position).

        Raises ``ValueError`` for an id outside the vocabulary or a head entry below the threshold.
        """
        ids = id_dtype(self.vocabulary_size)
        for name in ("head_ids", "tail_ids"):
            self.require_ids(name, getattr(records, name))
        return {
            "head_count": records.head_count,
            "head_ids": records.head_ids.astype(ids),
            "head_logprobs": self._head_levels(records, sequence_P, position_P),
            "tail_count": records.tail_count,
            "tail_ids": records.tail_ids.astype(ids),
            "gold_logprob": _fixed_point(-records.gold_logprob, GOLD_STEP),
            "entropy": _fixed_point(records.entropy, ENTROPY_STEP),
        }

    def decode(self, stored: dict[str, NDArray[Any]]) -> Records:
        """The records in ``stored`` arrays: exactly the grid values that ``encode`` chose."""
        levels = level_logprobs(self.threshold).astype(np.float32)
        return Records(
            head_count=stored["head_count"],
            head_ids=stored["head_ids"].astype(np.uint32),
            head_logprobs=levels[stored["head_logprobs"]],
            tail_count=stored["tail_count"],
            tail_ids=stored["tail_ids"].astype(np.uint32),
            gold_logprob=stored["gold_logprob"].astype(np.float32) * np.float32(-GOLD_STEP),
            entropy=stored["entropy"].astype(np.float32) * np.float32(ENTROPY_STEP),
        )

    def require_ids(self, name: str, ids: NDArray[Any]) -> None:
        """Raise ``ValueError`` where an id lies outside the vocabulary."""
        if ids.size and ids.max() >= self.vocabulary_size:
            raise ValueError(f"{name} must be below the vocabulary size {self.vocabulary_size}, but got {ids.max()}.")

    def _head_levels(self, records: Records, sequence_P: NDArray[Any], position_P: NDArray[Any]) -> NDArray[np.uint8]:
        rows_H = records.head_rows()
        rank_H = np.arange(len(rows_H)) - offsets_of(records.head_count)[rows_H]
        draws_H = uniforms(self.seed, PURPOSE_ROUNDING, sequence_P[rows_H], position_P[rows_H], rank_H)
        return stochastic_levels(records.head_logprobs, self.threshold, draws_H)


def stochastic_levels(logprobs_H: NDArray[Any], threshold: float, draws_H: NDArray[np.float64]) -> NDArray[np.uint8]:
    """The level of each log-probability, (H,) uint8: the upper neighbour with chance (p - p_lo) / (p_hi - p_lo).

    ``draws_H`` are uniform in [0, 1). Raises ``ValueError`` outside [log(threshold), 0].
    """
    bottom = math.log(threshold)
    if logprobs_H.size and (logprobs_H.min() < bottom - _SLACK or logprobs_H.max() > _SLACK):
        got = f"{logprobs_H.min():.4f} to {logprobs_H.max():.4f}"
        raise ValueError(f"head_logprobs must lie in [log(threshold), 0] = [{bottom:.4f}, 0], but got {got}.")
    logprobs = np.clip(logprobs_H.astype(np.float64), bottom, 0.0)
    lower = np.clip(((logprobs - bottom) / -bottom * (_LEVELS - 1)).astype(np.int64), 0, _LEVELS - 2)
    probabilities = np.exp(level_logprobs(threshold))
    below, above = probabilities[lower], probabilities[lower + 1]
    rises: NDArray[np.bool_] = draws_H < (np.exp(logprobs) - below) / (above - below)
    return (lower + rises).astype(np.uint8)


def _fixed_point(values: NDArray[Any], step: float) -> NDArray[np.uint16]:
    """The nearest step, (P,) uint16; values beyond the grid take its last step."""
    return np.clip(np.rint(values.astype(np.float64) / step), 0, _LARGEST_CODE).astype(np.uint16)
