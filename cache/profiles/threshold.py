"""Profile threshold: a sample of the teacher's p in units, right at temperature 1.

column       type    meaning
cluster      uint8   the position's table of ``cache.units.dither``
head_count   uint8, or uint16  entries of the head
head_ids     id      tokens that are sampled by themselves: all with p above a unit, few others
head_units   uint16  twice the units of the token, and 1 more if it is marked: it is the teacher's
                     best token although a reader expects another one, or the other way round
tail_count   uint8, or uint16  sampled from all others; each weighs a unit
tail_ids     id
tail_k       uint16  the candidate that brought the token, or 0 for a token without one

The next token and the always_keep ids have log-probabilities in steps of 2^-5 nats. What they leave
of the mass, as it is stored, is cut into n units of at most ``threshold``. One systematic sample of
the rest of p gives each token floor or ceil of its share of the n units. So the weights of a record
sum to 1, and the mean of each is p.

N   positions      H, M   head and tail entries      K   1 and the always_keep ids
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from cache.profiles.profile import BYTE, WORD, CodecNumbers, Profile, ReadColumn, Reading, Schema
from cache.profiles.sampled import ExactHeads, Sampled
from cache.records import Records, compute_offsets
from cache.rounding import KNOWN_STEP, UNKNOWN, RecordPositions, choose_id_dtype, decode_masses

#: Steps of ``KNOWN_STEP`` to which the log-probabilities of known tokens are rounded. More of them
#: cost a bit for each factor of two, and none is needed: the mean of their p is right.
KNOWN_STEPS = 8
#: The mass of a record, in the integers in which reader and writer count units alike.
WHOLE = 1 << 40
#: The most probable tokens that a server returns beside the ids that it scores.
SCORED_TOP = 20
#: The largest number of clusters: a position keeps its cluster in one byte.
MOST_CLUSTERS = 256
#: The clusters of a cache, and the bits by which an entry is longer than with 16 of them.
_CLUSTER_BITS = ((1, 16, 256), (1.15, 0.0, -0.59))
#: Bytes of the table of a cluster, and of the order of the tokens, once a cache.
_TABLE_BYTES = 7_650
_ORDER_BYTES = 57_000


@functools.cache
def list_known_masses() -> NDArray[np.int64]:
    """List the mass of each code of ``known``, in parts of ``WHOLE``; that of ``UNKNOWN`` is 0."""
    exact = np.exp(-KNOWN_STEP * np.arange(UNKNOWN + 1)) * WHOLE
    masses: NDArray[np.int64] = np.rint(exact).astype(np.int64)
    masses[UNKNOWN] = 0
    return masses


def count_units(known_mass: Any, threshold: float) -> tuple[Any, Any]:
    """Return the mass beside the known tokens, and the number of units that it is cut into.

    ``known_mass`` (N,) is the sum of the known tokens, in parts of ``WHOLE``; int64 of numpy or of
    torch. Without such a mass there are no units.
    """
    rest = WHOLE - known_mass
    return rest, (-(-rest // round(threshold * WHOLE))).clip(min=0)


@dataclass(frozen=True, eq=False, kw_only=True)
class UnitSample(Reading):
    """A sample of the teacher at N positions, in the columns of the records.

    ``head_units`` counts each unit twice, plus 1 for a marked head.
    """

    cluster: NDArray[Any]
    head_count: NDArray[Any]
    head_ids: NDArray[Any]
    head_units: NDArray[Any]
    tail_count: NDArray[Any]
    tail_ids: NDArray[Any]
    tail_k: NDArray[Any]


@dataclass(frozen=True)
class Threshold(Sampled):
    """Heads and tails in units, and tails by shared dither."""

    name = "threshold"
    reading = UnitSample
    sums_tails = True
    dithered = True
    shard_bytes = 9_000
    gold_steps = 1
    options = frozenset({"threshold", "always_keep", "k"})
    measured: ClassVar[tuple[str, ...]] = ("entropy", "known", "head_count", "head_units")
    #: Measured with 16 clusters, on 2,044 positions in sequences of 512.
    measured_bytes = {  # noqa: RUF012 (a constant)
        0.25: (3.9, 2.2, 3.1),
        0.125: (4.8, 3.7, 5.4),
        0.08: (5.7, 5.1, 7.8),
        0.04: (7.8, 8.3, 13.1),
        0.02: (11.4, 13.4, 22.3),
        0.01: (17.6, 21.3, 37.6),
        0.004: (33.0, 38.7, 73.7),
        0.001: (88.0, 88.9, 194.8),
    }

    def choose(self, numbers: CodecNumbers) -> Profile:
        """Return the rules of earlier caches where there is no cluster, or those of scored ids."""
        if not numbers.clusters:
            return ExactHeads()
        return Scored() if numbers.k else self

    def look_up_bytes(self, numbers: CodecNumbers) -> tuple[float, float, float]:
        """Correct the measured bytes for the number of clusters."""
        rest, tail, entries = super().look_up_bytes(numbers)
        places, bits = _CLUSTER_BITS
        longer = float(np.interp(math.log2(numbers.clusters), np.log2(places), bits))
        return rest, tail + longer / 8 * entries, entries

    def estimate_once(self, numbers: CodecNumbers, width: int) -> float:
        """Estimate the bytes of the tables, with centres of width 576."""
        return float(_TABLE_BYTES * numbers.clusters + _ORDER_BYTES)

    def find_fault(self, numbers: CodecNumbers) -> str | None:
        """Refuse what does not fit the types, too."""
        if fault := super().find_fault(numbers):
            return fault
        if not 1 <= numbers.clusters <= MOST_CLUSTERS:
            return f"codec.clusters must lie in [1, {MOST_CLUSTERS}], but got {numbers.clusters}."
        return None if numbers.draws == 1 else f"codec.draws must be 1, but got {numbers.draws}."

    def find_step(self, numbers: CodecNumbers) -> float:
        """Return the step of known tokens: no other log-probability is stored."""
        return KNOWN_STEPS * KNOWN_STEP

    def schema(self, numbers: CodecNumbers) -> Schema:
        """Return the columns of head and tail."""
        ids = choose_id_dtype(numbers.vocabulary_size)
        # A threshold of 1/255 cuts a whole into 256 units.
        _, most = count_units(np.zeros((), np.int64), numbers.threshold)
        counts = BYTE if most <= np.iinfo(BYTE).max else WORD
        return {
            "cluster": (BYTE, 1),
            "head_count": (counts, 1),
            "head_ids": (ids, 1),
            "head_units": (WORD, 1),
            "tail_count": (counts, 1),
            "tail_ids": (ids, 1),
            "tail_k": (WORD, 1),
        }

    def encode(
        self, numbers: CodecNumbers, reading: Any, places: RecordPositions
    ) -> dict[str, NDArray[Any]]:
        """Narrow the columns: a sample is made of units already."""
        found = {}
        for name, (dtype, _) in self.schema(numbers).items():
            column = getattr(reading, name)
            if name.endswith("_ids"):
                numbers.require_ids(name, column)
            found[name] = column.astype(dtype)
        return found

    # ------------------------------------------------------------------ what people see of them

    def measure(self, numbers: CodecNumbers, read: ReadColumn) -> tuple[NDArray[Any], NDArray[Any]]:
        """Add up known tokens and the units of heads; a drawn token counts as an entry."""
        gold_N = read("tokens")[:, 1:][read("target_mask")[:, :-1]]
        counted_NK = find_counted(numbers, read("known"), gold_N)
        rest_N, number_N = count_rest(numbers, read("known"), counted_NK)
        heads = read("head_count").astype(np.int64)
        rows_H = np.repeat(np.arange(len(heads)), heads)
        units_N = np.bincount(rows_H, read("head_units") // 2, len(heads)).astype(np.int64)
        mass_N = 1.0 - rest_N / WHOLE + units_N * (rest_N / WHOLE / np.maximum(number_N, 1))
        return mass_N, counted_NK.sum(axis=1) + heads + number_N - units_N

    def list_entries(
        self, numbers: CodecNumbers, records: Records, number: int, said: int
    ) -> tuple[NDArray[Any], NDArray[np.float64]]:
        """List the known tokens, and the head by its units."""
        known_1K = records["known"][number : number + 1]
        counted_1K = find_counted(numbers, known_1K, np.array([said]))
        rest_1, number_1 = count_rest(numbers, known_1K, counted_1K)
        head = slice(*compute_offsets(records["head_count"])[number : number + 2].tolist())
        share = float(rest_1[0]) / WHOLE / max(int(number_1[0]), 1)
        ids = np.array([said, *numbers.always_keep])[counted_1K[0]]
        ids_E = np.concatenate([ids, records["head_ids"][head].astype(np.int64)])
        p_K = decode_masses(KNOWN_STEP, known_1K[counted_1K])
        return ids_E, np.concatenate([p_K, records["head_units"][head] // 2 * share])


@dataclass(frozen=True)
class Scored(Threshold):
    """Records of a served teacher that scored ``k`` ids, which were drawn before it was asked.

    The weights of such ids sum to 1 only in the mean, and so do those of a record: the number of
    its units is random, and ``tail_count`` is stored.
    """

    counts_units = True
    measured = (*Threshold.measured, "tail_count")

    def schema(self, numbers: CodecNumbers) -> Schema:
        """Return the columns with types that hold any number of units."""
        counts = dict.fromkeys(("head_count", "tail_count"), (WORD, 1))
        return {**super().schema(numbers), **counts, "head_units": (np.dtype(np.uint32), 1)}

    def measure(self, numbers: CodecNumbers, read: ReadColumn) -> tuple[NDArray[Any], NDArray[Any]]:
        """Count the drawn tokens by their column."""
        mass_N, _ = super().measure(numbers, read)
        heads_N = read("head_count").astype(np.int64)
        return mass_N, 1 + heads_N + read("tail_count")

    def bound_entries(self, numbers: CodecNumbers) -> int:
        """Bound them by the ids that are scored, and the most probable tokens of an answer."""
        return 1 + SCORED_TOP + numbers.k


def find_counted(
    numbers: CodecNumbers, known_NK: NDArray[Any], gold_N: NDArray[Any]
) -> NDArray[np.bool_]:
    """Return which known tokens count, (N, K): a next token that is always kept counts once."""
    counted_NK: NDArray[np.bool_] = known_NK != UNKNOWN
    counted_NK[:, 1:] &= gold_N[:, None] != np.array(numbers.always_keep, np.int64)
    return counted_NK


def count_rest(
    numbers: CodecNumbers, known_NK: NDArray[Any], counted_NK: NDArray[np.bool_]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the mass beside the known tokens, in parts of ``WHOLE``, and the number of units."""
    mass_N = (list_known_masses().take(known_NK) * counted_NK).sum(axis=1)
    return count_units(mass_N, numbers.threshold)
