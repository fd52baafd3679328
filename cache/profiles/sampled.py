"""Profile tempered, and threshold of version 0.2.0: heavy tokens exact, the tail sampled.

profile     column          type              meaning
both        head_count      uint8, or uint16  entries of the head; uint16 if the threshold is
below 1/255; tail_count has the same type
head_ids        id                most probable tokens, without those that are known
head_logprobs   uint8 / uint16    steps of log(1 / threshold) / 127, or of 2^-6 nats
tail_ids        id                sampled from all others. threshold: each has the
weight (1 - rest) / m. tempered: p_T R / (m g),
see ``kd.loss.sparse_targets``
tempered    tail_logprobs   uint8             steps of 2^-3 nats
partition       int16             log sum exp(b l) over the tail at knots b = 1 / T,
and its derivative in b: steps of 2^-10

N   positions      H, M   head and tail entries      R   draws      J   knots
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from cache.profiles.profile import BYTE, WORD, CodecNumbers, Profile, ReadColumn, Reading, Schema
from cache.random import PURPOSE_ROUNDING, PURPOSE_TAIL_ROUNDING, draw_uniforms
from cache.records import Records, compute_offsets
from cache.rounding import (
    KNOWN_STEP,
    TAIL_STEP,
    TEMPERED_HEAD_STEP,
    UNKNOWN,
    RecordPositions,
    choose_id_dtype,
    decode_masses,
    round_stochastically,
    round_to_fixed_point,
)

#: A record has at most 1/threshold heads and as many tails: fewer than ``_RANKS_PER_DRAW``.
SMALLEST_THRESHOLD = 1 / 1000
#: Number of steps from log(threshold) to 0 in the head of profile threshold.
_HEAD_LEVELS = 127
#: Stride of the rank counter between the draws of a position, so that they share no random number.
_RANKS_PER_DRAW = 1024
#: V of the teacher that the bytes of sampled records were measured on: SmolLM2-135M-Instruct (mean
#: entropy 3.5 nats), reading 16,384 tokens of *Persuasion* in sequences of 256.
MEASURED_VOCABULARY = 49_152
#: Bits that an entry grows by when the vocabulary doubles; less than 1, because ids are coded by
#: their frequency. Measured between that vocabulary and the example's 2,048 (19.4 bytes per token).
_BITS_PER_DOUBLING = 0.43
#: Bytes of a shard's frequency table, for each token of the vocabulary.
_TABLE_BYTES = 0.15
#: How far below log(threshold) a head entry may lie, in nats: it allows for float32 noise.
_HEAD_SLACK = 1e-3


@dataclass(frozen=True, eq=False, kw_only=True)
class Sample(Reading):
    """A sample of the teacher at N positions.

    ``head_count`` (N,), ``head_ids`` and ``head_logprobs`` (H,); ``tail_count`` (N,), ``tail_ids``
    (M, R), one column for each draw; for tempered also ``tail_logprobs`` (M, R) and ``partition``
    (N, J, 2).
    """

    head_count: NDArray[Any]
    head_ids: NDArray[Any]
    head_logprobs: NDArray[Any]
    tail_count: NDArray[Any]
    tail_ids: NDArray[Any]
    tail_logprobs: NDArray[Any] | None = None
    partition: NDArray[Any] | None = None


@dataclass(frozen=True)
class Sampled(Profile):
    """The rules that both profiles share."""

    reading: ClassVar[type[Reading]] = Sample
    sampled = True
    #: The type of ``head_logprobs``.
    head_dtype: ClassVar[np.dtype[Any]] = BYTE
    options = frozenset({"threshold", "always_keep", "draws"})
    measured: ClassVar[tuple[str, ...]] = (
        *("entropy", "known", "head_count", "head_logprobs", "tail_count"),
    )
    #: For each threshold: bytes per position without its tails, bytes of the tails of one draw,
    #: entries. They depend on the teacher's entropy. Each is the difference between shards of 64
    #: and of 32 sequences, so it counts every byte that grows with the number of positions.
    measured_bytes: ClassVar[dict[float, tuple[float, float, float]]]

    def find_fault(self, numbers: CodecNumbers) -> str | None:
        """Refuse a threshold that is too small for its counts, or no probability."""
        if SMALLEST_THRESHOLD <= numbers.threshold < 1:
            return None
        return f"codec.threshold must lie in [1/1000, 1), but got {numbers.threshold:g}."

    def lowest_head(self, numbers: CodecNumbers) -> float:
        """Return the smallest log-probability that the head can store."""
        return math.log(numbers.threshold)

    def find_step(self, numbers: CodecNumbers) -> float:
        """Return the larger step of known tokens and of the head."""
        return max(KNOWN_STEP, self.head_step(numbers))

    def schema(self, numbers: CodecNumbers) -> Schema:
        """Return the columns of head and tail."""
        ids = choose_id_dtype(numbers.vocabulary_size)
        counts = choose_count_dtype(numbers)
        return {
            "head_count": (counts, 1),
            "head_ids": (ids, 1),
            "head_logprobs": (self.head_dtype, 1),
            "tail_count": (counts, 1),
            "tail_ids": (ids, 2),
        }

    def encode(
        self, numbers: CodecNumbers, reading: Sample, places: RecordPositions
    ) -> dict[str, NDArray[Any]]:
        """Encode head and tail. Raises ``ValueError`` for a head entry too small for its type."""
        counts = choose_count_dtype(numbers)
        logprobs = reading.head_logprobs
        lowest = self.lowest_head(numbers)
        if logprobs.size and (
            logprobs.min() < lowest - _HEAD_SLACK or logprobs.max() > _HEAD_SLACK
        ):
            got = f"{logprobs.min():.4f} to {logprobs.max():.4f}"
            raise ValueError(f"head_logprobs must lie in [{lowest:.4f}, 0], but got {got}.")
        draws = draw_for_entries(numbers.seed, PURPOSE_ROUNDING, reading.head_count, places)
        steps = round_stochastically(logprobs, self.head_step(numbers), draws)
        return {
            "head_count": reading.head_count.astype(counts),
            "head_ids": numbers.narrow_ids("head_ids", reading.head_ids),
            "head_logprobs": steps.astype(self.head_dtype),
            "tail_count": reading.tail_count.astype(counts),
            "tail_ids": numbers.narrow_ids("tail_ids", reading.tail_ids),
        }

    # ------------------------------------------------------------------ bytes on disk

    def estimate_position(self, numbers: CodecNumbers, width: int) -> float:
        """Estimate them from the measured bytes; a larger vocabulary has longer entries."""
        rest, tail, entries = self.look_up_bytes(numbers)
        doublings = math.log2(numbers.vocabulary_size / MEASURED_VOCABULARY)
        longer = _BITS_PER_DOUBLING * doublings / 8 * entries
        return max(rest + tail * numbers.draws + longer, 1.0) + 2 * len(numbers.always_keep)

    def look_up_bytes(self, numbers: CodecNumbers) -> tuple[float, float, float]:
        """Interpolate the measured bytes linearly in the logarithm of the threshold.

        Thresholds beyond the ends of the table get the values of the ends.
        """
        rows = sorted(self.measured_bytes.items())
        places = np.log([row[0] for row in rows])
        rest, tail, entries = (
            float(np.interp(math.log(numbers.threshold), places, [row[1][column] for row in rows]))
            for column in range(3)
        )
        return rest, tail, entries

    def estimate_shard(self, numbers: CodecNumbers) -> float:
        """Add the table of frequencies, which records with dither do not have."""
        classes = 0 if self.dithered else numbers.vocabulary_size
        return super().estimate_shard(numbers) + _TABLE_BYTES * classes

    # ------------------------------------------------------------------ what people see of them

    def measure(self, numbers: CodecNumbers, read: ReadColumn) -> tuple[NDArray[Any], NDArray[Any]]:
        """Add up known tokens and heads; a drawn token counts as an entry."""
        known = read("known")
        gold_N = read("tokens")[:, 1:][read("target_mask")[:, :-1]]
        counted = known != UNKNOWN
        # A gold token that is always kept counts once.
        counted[:, 1:] &= gold_N[:, None] != np.array(numbers.always_keep, np.int64)
        heads = read("head_count").astype(np.int64)
        row_E = np.repeat(np.arange(len(heads)), heads)
        masses_E = decode_masses(self.head_step(numbers), read("head_logprobs"))
        head_N = np.bincount(row_E, masses_E, minlength=len(heads))
        mass_N = (decode_masses(KNOWN_STEP, known) * counted).sum(axis=1) + head_N
        return mass_N, counted.sum(axis=1) + heads + read("tail_count")

    def bound_entries(self, numbers: CodecNumbers) -> int:
        """Bound them by the threshold.

        Probabilities sum to 1, so at most 1 / threshold are above it, and as many are drawn.
        """
        return 1 + len(numbers.always_keep) + 2 * math.ceil(1.0 / numbers.threshold)

    def list_entries(
        self, numbers: CodecNumbers, records: Records, number: int, said: int
    ) -> tuple[NDArray[Any], NDArray[np.float64]]:
        """List the known tokens and the head."""
        ids = [said, *numbers.always_keep]
        codes = records["known"][number]
        # A said token that is always kept is stored twice.
        kept = (codes != UNKNOWN) & (np.arange(len(ids)) == [ids.index(each) for each in ids])
        head = slice(*compute_offsets(records["head_count"])[number : number + 2].tolist())
        known_E = decode_masses(KNOWN_STEP, codes[kept])
        head_E = decode_masses(self.head_step(numbers), records["head_logprobs"][head])
        ids_E = np.concatenate([np.array(ids)[kept], records["head_ids"][head].astype(np.int64)])
        return ids_E, np.concatenate([known_E, head_E])


@dataclass(frozen=True)
class ExactHeads(Sampled):
    """Profile threshold of version 0.2.0, which is read and not written: heads by logarithms."""

    name = "threshold"
    sums_tails = True

    def head_step(self, numbers: CodecNumbers) -> float:
        """Return a step of which the levels of a byte reach down to the threshold."""
        return -math.log(numbers.threshold) / _HEAD_LEVELS


@dataclass(frozen=True)
class Tempered(Sampled):
    """The tail is drawn for all temperatures of a range, and keeps what their weights need."""

    name = "tempered"
    any_temperature = True
    keeps_partition = True
    head_dtype = WORD  # it holds small probabilities: a token may be heavy at only one T
    gold_steps = 1  # the normaliser adds the rounding of the head
    options = Sampled.options | {"temperatures"}
    shard_bytes = 45_000
    measured_bytes = {  # noqa: RUF012 (a constant)
        0.25: (18.5, 4.9, 2.5),
        0.125: (18.7, 10.0, 5.0),
        0.08: (20.3, 15.2, 7.6),
        0.04: (21.2, 28.3, 14.1),
        0.02: (24.6, 51.4, 26.1),
        0.01: (29.1, 92.4, 48.1),
        0.004: (44.3, 197.3, 108.1),
        0.001: (104.0, 617.0, 362.9),
    }

    def find_fault(self, numbers: CodecNumbers) -> str | None:
        """Refuse what is no range of temperatures too."""
        if fault := super().find_fault(numbers):
            return fault
        ends = numbers.temperatures
        if len(ends) == 2 and 0 < ends[0] < ends[1]:
            return None
        return f"codec.temperatures must be a range above 0, but got {ends}."

    def head_step(self, numbers: CodecNumbers) -> float:
        """Return a step that does not depend on the threshold."""
        return TEMPERED_HEAD_STEP

    def lowest_head(self, numbers: CodecNumbers) -> float:
        """Return the end of the type's range."""
        return -np.iinfo(self.head_dtype).max * TEMPERED_HEAD_STEP

    def schema(self, numbers: CodecNumbers) -> Schema:
        """Add the columns of the tail's log-probabilities and partition."""
        own: Schema = {"tail_logprobs": (BYTE, 2), "partition": (np.dtype(np.int16), 3)}
        return super().schema(numbers) | own

    def encode(
        self, numbers: CodecNumbers, reading: Sample, places: RecordPositions
    ) -> dict[str, NDArray[Any]]:
        """Encode head, tail and partition."""
        columns = super().encode(numbers, reading, places)
        if reading.tail_logprobs is None or reading.partition is None:
            return columns  # ``Codec.require`` names the columns that are missing
        chance = (numbers.seed, PURPOSE_TAIL_ROUNDING, reading.tail_count, places)
        steps = [
            round_stochastically(logprobs_M, TAIL_STEP, draw_for_entries(*chance, draw))
            for draw, logprobs_M in enumerate(reading.tail_logprobs.T)
        ]
        columns["tail_logprobs"] = np.minimum(np.stack(steps, axis=1), 255).astype(np.uint8)
        columns["partition"] = round_to_fixed_point(reading.partition)
        return columns


def draw_for_entries(
    seed: int, purpose: int, count: NDArray[Any], places: RecordPositions, draw: int = 0
) -> NDArray[np.float64]:
    """Draw a uniform number for each entry of records with ``count`` entries."""
    rows = np.repeat(np.arange(len(count)), count)
    rank = np.arange(len(rows)) - compute_offsets(count)[rows]
    rank += _RANKS_PER_DRAW * draw
    return draw_uniforms(seed, purpose, places.sequence_N[rows], places.position_N[rows], rank)


def choose_count_dtype(numbers: CodecNumbers) -> np.dtype[Any]:
    """Choose the type of counts of entries, of which there are at most 1 / threshold."""
    return BYTE if numbers.threshold >= 1 / 255 else WORD
