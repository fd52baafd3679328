"""What a profile is: one kind of record, from the teacher's floats to what a person reads of it.

N   positions with a record      V   vocabulary size      E   entries of one record
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from cache.records import Records
from cache.rounding import RecordPositions

if TYPE_CHECKING:
    from cache.codec import Codec

#: Type and number of dimensions of each column.
Schema = dict[str, tuple[np.dtype[Any], int]]
#: Reads one stored column of some sequences by its name.
ReadColumn = Callable[[str], NDArray[Any]]

BYTE = np.dtype(np.uint8)
WORD = np.dtype(np.uint16)


@dataclass(frozen=True, eq=False, kw_only=True)
class Reading:
    """What was read of the teacher at N positions, in floats; each profile adds its own.

    ``known_logprobs`` (N, 1 + A) in nats: of the next token, then of each always_keep id.
    ``entropy`` (N,) in nats.
    """

    known_logprobs: NDArray[Any]
    entropy: NDArray[Any]


@dataclass(frozen=True)
class Profile(ABC):
    """The rules of one profile. It has no state: the numbers of a cache are in its codec.

    Divergences other than forward KL need the whole distribution: they would miss a token that the
    student finds probable and that the record leaves out.
    """

    name: ClassVar[str]
    reading: ClassVar[type[Reading]]
    #: It serves temperatures other than 1; profile tempered only those of its range.
    any_temperature: ClassVar[bool] = False
    #: It serves divergences other than forward KL: a record gives the probability of every token.
    any_divergence: ClassVar[bool] = False
    #: A record has a head and a sampled tail.
    sampled: ClassVar[bool] = False
    #: A record has the log-partition of its tail at knots of 1 / T.
    keeps_partition: ClassVar[bool] = False
    #: The tails of all positions are added up beside the records (``cache.records.TailSums``).
    sums_tails: ClassVar[bool] = False
    #: A record is a hidden state, so that the cache keeps the teacher's LM head.
    needs_lm_head: ClassVar[bool] = False
    #: The fields of a job's section ``cache`` that the profile has.
    options: ClassVar[frozenset[str]] = frozenset()
    #: Bits of each stored number by the name of ``cache.dtype``, if there is a choice.
    dtypes: ClassVar[Mapping[str, int]] = {}
    #: Steps by which the next token's probability may differ, beside its own rounding.
    gold_steps: ClassVar[int] = 0

    # ------------------------------------------------------------------ records

    @abstractmethod
    def find_fault(self, codec: Codec) -> str | None:
        """Say which number of ``codec`` this profile cannot have; None if all are right."""

    @abstractmethod
    def schema(self, codec: Codec) -> Schema:
        """Return the profile's own columns as they are written; a reader picks one draw."""

    @abstractmethod
    def encode(
        self, codec: Codec, reading: Any, places: RecordPositions
    ) -> dict[str, NDArray[Any]]:
        """Encode the profile's own columns. ``reading`` is of its class ``reading``."""

    @abstractmethod
    def find_step(self, codec: Codec) -> float:
        """Return the largest error of a stored log-probability, in nats."""

    def head_step(self, codec: Codec) -> float:
        """Return the nats of a step of ``head_logprobs``; 0 for records without a head."""
        return 0.0

    @abstractmethod
    def make_example(
        self, rng: np.random.Generator, codec: Codec, known: NDArray[Any], logp_NV: NDArray[Any]
    ) -> Reading:
        """Make a reading of the distributions ``logp_NV``, for tests; ``known`` (N, 1 + A)."""

    # ------------------------------------------------------------------ what people see of them

    #: The columns that a page of records shows, if it needs no ids that are coded together.
    shown: ClassVar[tuple[str, ...]] = ()
    #: The columns that ``measure`` reads: few of them, and none with ids.
    measured: ClassVar[tuple[str, ...]] = ("entropy",)

    def measure(self, codec: Codec, read: ReadColumn) -> tuple[NDArray[Any], NDArray[Any]]:
        """Measure the kept mass and the number of entries of every record, (N,) each."""
        positions = len(read("entropy"))
        return np.ones(positions), np.full(positions, codec.vocabulary_size)

    def bound_entries(self, codec: Codec) -> int:
        """Return a number of entries that no record exceeds."""
        return codec.vocabulary_size

    def list_entries(
        self, codec: Codec, records: Records, number: int, said: int
    ) -> tuple[NDArray[Any], NDArray[np.float64]] | None:
        """List the tokens of record ``number`` whose probability it stores: ids and p, (E,).

        Each token comes once; ``said`` is the next one of the text. None if a record has no tokens.
        """
        return None

    def measure_rest(self, records: Records, number: int, p_E: NDArray[np.float64]) -> float:
        """Measure the mass outside the entries of record ``number``."""
        # Rounding can take it a little below 0.
        return max(1.0 - float(p_E.sum()), 0.0)


def copy_known(known: NDArray[Any], logp_NV: NDArray[Any]) -> dict[str, NDArray[Any]]:
    """Return the floats that a reading of every profile has."""
    return {"known_logprobs": known, "entropy": -(np.exp(logp_NV) * logp_NV).sum(1)}
