"""Profile topk: the k most probable tokens, and the rest as one bucket.

column          type      meaning
top_ids         id        (N, K), most probable first
top_logprobs    uint16    steps of 2^-11 nats
residual        uint16    log of the mass outside the K: steps of 2^-11 nats

N   positions      K   entries
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cache.profiles.profile import WORD, CodecNumbers, Profile, ReadColumn, Reading, Schema
from cache.records import Records
from cache.rounding import (
    TOP_STEP,
    UNKNOWN,
    RecordPositions,
    choose_id_dtype,
    decode_masses,
    round_to_nearest_step,
)


@dataclass(frozen=True, eq=False, kw_only=True)
class TopReading(Reading):
    """Ids and log-probabilities (N, K), most probable first; -inf: there is no entry.

    ``residual`` (N,): log of the mass outside the K.
    """

    ids: NDArray[Any]
    logprobs: NDArray[Any]
    residual: NDArray[Any]


@dataclass(frozen=True)
class TopK(Profile):
    """The rules of profile topk."""

    name = "topk"
    reading = TopReading
    options = frozenset({"k"})
    shown = ("top_ids", "top_logprobs", "residual")
    measured = ("entropy", "top_logprobs")
    shard_bytes = 8_000

    def find_fault(self, numbers: CodecNumbers) -> str | None:
        """Refuse records without an entry."""
        return None if numbers.k >= 1 else f"codec.k must be at least 1, but got {numbers.k}."

    def schema(self, numbers: CodecNumbers) -> Schema:
        """Return the columns of entries and bucket."""
        ids = choose_id_dtype(numbers.vocabulary_size)
        return {"top_ids": (ids, 2), "top_logprobs": (WORD, 2), "residual": (WORD, 1)}

    def encode(
        self, numbers: CodecNumbers, reading: TopReading, places: RecordPositions
    ) -> dict[str, NDArray[Any]]:
        """Encode entries and bucket."""
        ids = np.where(np.isfinite(reading.logprobs), reading.ids, 0)
        return {
            "top_ids": numbers.narrow_ids("top_ids", ids),
            "top_logprobs": round_to_nearest_step(reading.logprobs),
            "residual": round_to_nearest_step(reading.residual),
        }

    def find_step(self, numbers: CodecNumbers) -> float:
        """Return the step of the entries."""
        return TOP_STEP

    def estimate_position(self, numbers: CodecNumbers, width: int) -> float:
        """Count the bytes of entries and bucket; compression makes them fewer."""
        entry = choose_id_dtype(numbers.vocabulary_size).itemsize + 2
        return float(numbers.common_bytes + numbers.k * entry + 2)

    def measure(self, numbers: CodecNumbers, read: ReadColumn) -> tuple[NDArray[Any], NDArray[Any]]:
        """Add up the entries."""
        codes = read("top_logprobs")
        return decode_masses(TOP_STEP, codes).sum(axis=1), (codes != UNKNOWN).sum(axis=1)

    def bound_entries(self, numbers: CodecNumbers) -> int:
        """Return K."""
        return numbers.k

    def list_entries(
        self, numbers: CodecNumbers, records: Records, number: int, said: int
    ) -> tuple[NDArray[Any], NDArray[np.float64]]:
        """List the entries that there are."""
        codes = records["top_logprobs"][number]
        kept = codes != UNKNOWN
        ids = records["top_ids"][number][kept].astype(np.int64)
        return ids, decode_masses(TOP_STEP, codes[kept])

    def measure_rest(self, records: Records, number: int, p_E: NDArray[np.float64]) -> float:
        """Return the mass of the bucket."""
        code = int(records["residual"][number])
        return 0.0 if code == UNKNOWN else float(np.exp(-TOP_STEP * code))
