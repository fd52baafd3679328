"""Records of some positions of each sequence alone: the others have no target, and take no bytes.

A corpus token then costs as many bytes as the kept records, divided by all positions.

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

    ``name`` tells the method: sources of one cache that keep others differ in their identity.
    """

    rule: Rule
    share: float
    name: str

    fingerprint = property(lambda self: f"{self.source.fingerprint}, {self.name}")

    def read(
        self, indices: NDArray[Any], draws: int | NDArray[Any] = 0
    ) -> tuple[Sequences, Records]:
        """Read the sequences of ``indices`` with the kept targets, and their records."""
        sequences, records = self.source.read(indices, draws)
        assert records is not None, "a cache has records"
        mask_SL = sequences.target_mask.copy()
        entropies_N = records["entropy"].astype(np.float64)
        kept_N = np.zeros(len(records), bool)
        start = 0
        for index, count in zip(np.asarray(indices).tolist(), mask_SL.sum(1).tolist(), strict=True):
            part = slice(start, start + count)
            values_n = self.rule(entropies_N[part], np.random.default_rng(index))
            best_n = np.argsort(-values_n, kind="stable")[: round(self.share * count)]
            kept_N[start + best_n] = True
            start += count
        mask_SL[mask_SL] = kept_N
        kept = Sequences(sequences.tokens, sequences.document_start, mask_SL)
        return kept, select_records(records, kept_N)

    def count_share(self) -> float:
        """Count the share of the records that are kept, over the first training sequences."""
        some = np.arange(min(COUNTED_SEQUENCES, self.train_count))
        return self.read(some)[0].positions / self.source.read(some)[0].positions


def select_records(records: Records, kept_N: NDArray[np.bool_]) -> Records:
    """Return the records that ``kept_N`` marks, each with its own entries."""
    kept = {"position": kept_N}
    for axis in ("head", "tail"):
        if (counts_N := records.columns.get(f"{axis}_count")) is not None:
            kept[axis] = np.repeat(kept_N, counts_N.astype(np.int64))
    return Records({name: each[kept[find_axis(name)]] for name, each in records.columns.items()})
