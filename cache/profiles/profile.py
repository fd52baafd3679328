"""A profile: one kind of record, from the teacher's floats to what a person reads of it.

N   positions with a record      V   vocabulary size      E   entries of one record
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from cache.records import Records
from cache.rounding import RecordPositions, choose_id_dtype

#: Type and number of dimensions of each column.
Schema = dict[str, tuple[np.dtype[Any], int]]
#: Reads one stored column of some sequences by its name.
ReadColumn = Callable[[str], NDArray[Any]]

BYTE = np.dtype(np.uint8)
WORD = np.dtype(np.uint16)


@dataclass(frozen=True, eq=False, kw_only=True)
class Reading:
    """The teacher's numbers at N positions, in floats; each profile adds its own.

    ``known_logprobs`` (N, 1 + A) in nats: of the next token, then of each always_keep id.
    ``entropy`` (N,) in nats.
    """

    known_logprobs: NDArray[Any]
    entropy: NDArray[Any]


@dataclass(frozen=True)
class CodecNumbers:
    """The numbers of a cache's records; a field that the profile lacks is 0 or empty.

    ``k`` is the entries of topk, or the ids that a server scored for profile threshold.
    ``clusters`` is 0 too in caches of profile threshold that an earlier version captured.
    """

    profile: str
    vocabulary_size: int
    seed: int = 0
    threshold: float = 0.0
    temperatures: tuple[float, ...] = ()
    always_keep: tuple[int, ...] = ()
    draws: int = 1
    k: int = 0
    bits: int = 0
    clusters: int = 0
    entropies: bool = False

    def narrow_ids(self, name: str, ids: NDArray[Any]) -> NDArray[Any]:
        """Check ``ids`` and return them in the stored type, which would wrap larger ones."""
        self.require_ids(name, ids)
        return ids.astype(choose_id_dtype(self.vocabulary_size))

    @property
    def common_bytes(self) -> int:
        """Bytes that every record has: next token, its log-probability (2) and the entropy (1)."""
        return choose_id_dtype(self.vocabulary_size).itemsize + 3

    def require_ids(self, name: str, ids: NDArray[Any]) -> None:
        """Raise ``ValueError`` if an id lies outside the vocabulary."""
        if ids.size and ids.max() >= self.vocabulary_size:
            raise ValueError(
                f"{name} must be below the vocabulary size {self.vocabulary_size}, "
                f"but got {ids.max()}."
            )
        if ids.size and ids.min() < 0:
            raise ValueError(f"{name} must not be negative, but got {ids.min()}.")


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
    #: Heads and tails are counted in units, and ids of tails are coded by ``cache.units.dither``.
    dithered: ClassVar[bool] = False
    #: A record counts its units, because its weights sum to 1 only in the mean.
    counts_units: ClassVar[bool] = False
    #: A record is a hidden state, so that the cache keeps the teacher's LM head.
    needs_lm_head: ClassVar[bool] = False
    #: The fields of a job's section ``cache`` that the profile has.
    options: ClassVar[frozenset[str]] = frozenset()
    #: Bits of each stored number by the name of ``cache.dtype``, if there is a choice.
    dtypes: ClassVar[Mapping[str, int]] = {}
    #: Steps by which the next token's probability may differ, beside its own rounding.
    gold_steps: ClassVar[int] = 0
    #: Bytes of a shard that do not depend on its content: metadata, seal, manifest line, and the
    #: start of each compressed stream.
    shard_bytes: ClassVar[int]

    # ------------------------------------------------------------------ records

    def choose(self, numbers: CodecNumbers) -> Profile:
        """Return the rules of records with these numbers: an earlier version's may be others."""
        return self

    @abstractmethod
    def find_fault(self, numbers: CodecNumbers) -> str | None:
        """Say which of the numbers this profile cannot have; None if all are right."""

    @abstractmethod
    def schema(self, numbers: CodecNumbers) -> Schema:
        """Return the profile's own columns as they are written; a reader picks one draw."""

    @abstractmethod
    def encode(
        self, numbers: CodecNumbers, reading: Any, places: RecordPositions
    ) -> dict[str, NDArray[Any]]:
        """Encode the profile's own columns. ``reading`` is of its class ``reading``."""

    @abstractmethod
    def find_step(self, numbers: CodecNumbers) -> float:
        """Return the largest error of a stored log-probability, in nats."""

    def head_step(self, numbers: CodecNumbers) -> float:
        """Return the nats of a step of ``head_logprobs``; 0 for records without them."""
        return 0.0

    # ------------------------------------------------------------------ bytes on disk

    @abstractmethod
    def estimate_position(self, numbers: CodecNumbers, width: int) -> float:
        """Estimate the bytes of a position; ``width`` is D of the teacher, for hidden states."""

    def estimate_shard(self, numbers: CodecNumbers) -> float:
        """Estimate the bytes of a shard besides its positions."""
        return float(self.shard_bytes)

    def estimate_once(self, numbers: CodecNumbers, width: int) -> float:
        """Estimate the bytes that a cache has once; ``width`` as for a position."""
        return 0.0

    # ------------------------------------------------------------------ what people see of them

    #: The columns that a page of records shows, if it needs no ids that are coded together.
    shown: ClassVar[tuple[str, ...]] = ()
    #: The columns that ``measure`` reads: few of them, and none with ids.
    measured: ClassVar[tuple[str, ...]] = ("entropy",)

    def measure(self, numbers: CodecNumbers, read: ReadColumn) -> tuple[NDArray[Any], NDArray[Any]]:
        """Measure the kept mass and the number of entries of every record, (N,) each."""
        positions = len(read("entropy"))
        return np.ones(positions), np.full(positions, numbers.vocabulary_size)

    def bound_entries(self, numbers: CodecNumbers) -> int:
        """Return a number of entries that no record exceeds."""
        return numbers.vocabulary_size

    def list_entries(
        self, numbers: CodecNumbers, records: Records, number: int, said: int
    ) -> tuple[NDArray[Any], NDArray[np.float64]] | None:
        """List the tokens of record ``number`` whose probability it stores: ids and p, (E,).

        Each token comes once; ``said`` is the next one of the text. None if a record has no tokens.
        """
        return None

    def measure_rest(self, records: Records, number: int, p_E: NDArray[np.float64]) -> float:
        """Measure the mass outside the entries of record ``number``."""
        # Rounding can take it a little below 0.
        return max(1.0 - float(p_E.sum()), 0.0)
