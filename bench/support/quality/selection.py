"""Records of some positions of each sequence alone: the others take no bytes.

A corpus token then costs as many bytes as the kept records, divided by all positions. The others
have no target, or they are told the text's next token alone, which every cache has.

Shapes: S sequences, L positions of a sequence, N positions with a record.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bench.support.quality.methods import COUNTED_SEQUENCES
from bench.support.quality.wrapped import WrappedSource
from cache.records import Records, Sequences, find_axis
from cache.rounding import UNKNOWN

#: Returns a number for each of a sequence's records: those with the largest are kept.
Rule = Callable[[NDArray[np.float64], np.random.Generator], NDArray[np.float64]]
BY_ENTROPY = "by entropy"
RULES: dict[str, Rule] = {
    BY_ENTROPY: lambda entropy_n, _: entropy_n,
    "at random": lambda entropy_n, rng: rng.random(len(entropy_n)),
    "first": lambda entropy_n, _: -np.arange(len(entropy_n), dtype=np.float64),
}


@dataclass(frozen=True)
class SelectedCache(WrappedSource):
    """A cache of which each sequence keeps ``share`` of its records, those that ``rule`` prefers.

    ``text``: the other positions learn from the text; without it they have no target. ``name``
    tells the method: sources of one cache that keep others differ in their identity.
    """

    rule: Rule
    share: float
    text: bool
    name: str

    fingerprint = property(lambda self: f"{self.source.fingerprint}, {self.name}")

    def tail_mean(self) -> None:
        """None: the mean tail is that of all positions."""

    def read(
        self, indices: NDArray[Any], draws: int | NDArray[Any] = 0
    ) -> tuple[Sequences, Records]:
        """Read the sequences of ``indices`` with their targets, and their records."""
        sequences, records = self.source.read(indices, draws)
        assert records is not None, "a cache has records"
        kept_N = self.choose(indices, sequences, records)
        if self.text:
            return sequences, tell_text(records, kept_N)
        mask_SL = sequences.target_mask.copy()
        mask_SL[mask_SL] = kept_N
        kept = Sequences(sequences.tokens, sequences.document_start, mask_SL)
        return kept, select_records(records, kept_N)

    def choose(
        self, indices: NDArray[Any], sequences: Sequences, records: Records
    ) -> NDArray[np.bool_]:
        """Choose the records that are kept, (N,)."""
        entropies_N = records["entropy"].astype(np.float64)
        kept_N = np.zeros(len(records), bool)
        start = 0
        counts_S = sequences.target_mask.sum(1)
        for index, count in zip(np.asarray(indices).tolist(), counts_S.tolist(), strict=True):
            part = slice(start, start + count)
            values_n = self.rule(entropies_N[part], np.random.default_rng(index))
            best_n = np.argsort(-values_n, kind="stable")[: round(self.share * count)]
            kept_N[start + best_n] = True
            start += count
        return kept_N

    def count_share(self) -> float:
        """Count the share of the entries that are kept, over the first training sequences."""
        some = np.arange(min(COUNTED_SEQUENCES, self.train_count))
        sequences, records = self.source.read(some)
        kept_N = self.choose(some, sequences, records)
        return count_rows(select_records(records, kept_N)) / count_rows(records)


def count_rows(records: Records) -> int:
    """Return the number of all next tokens, heads and tails."""
    return sum(records.length(axis) for axis in ("position", "head", "tail"))


def select_records(records: Records, kept_N: NDArray[np.bool_]) -> Records:
    """Return the records that ``kept_N`` marks, each with its own entries."""
    kept = {"position": kept_N} | mark_entries(records, kept_N)
    return Records({name: each[kept[find_axis(name)]] for name, each in records.columns.items()})


def tell_text(records: Records, kept_N: NDArray[np.bool_]) -> Records:
    """Put all mass of the records that ``kept_N`` does not mark on the next token of the text."""
    kept = mark_entries(records, kept_N)
    columns = {
        name: each[kept[axis]] if (axis := find_axis(name)) in kept else each.copy()
        for name, each in records.columns.items()
    }
    for name in ("entropy", "head_count", "tail_count"):
        columns[name][~kept_N] = 0
    columns["known"][~kept_N] = UNKNOWN
    # A log-probability of 0: all of the mass.
    columns["known"][~kept_N, 0] = 0
    return Records(columns)


def mark_entries(records: Records, kept_N: NDArray[np.bool_]) -> dict[str, NDArray[np.bool_]]:
    """Mark the heads and tails of the records that ``kept_N`` marks."""
    return {
        axis: np.repeat(kept_N, records[f"{axis}_count"].astype(np.int64))
        for axis in ("head", "tail")
    }
