"""Sequences of tokens and the teacher's records for their positions, in memory.

S   sequences               L   tokens of a sequence
N   positions with a record, in sequence-major order: ``np.flatnonzero(target_mask_SL)``
H   head entries of all records, record after record
M   tail entries of all records, record after record
V   vocabulary
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

#: The arrays of the sums of one shard.
SUM_ARRAYS = ("counts", "sums", "squares")
#: The arrays of the whole cache.
MEAN_ARRAYS = ("mean", "share")
#: Step of the logarithm of a mean, and the code of a mean of 0.
_MEAN_STEP = 2.0**-8
_NO_MEAN = 2**16 - 1
#: Sequences that are checked at once, so that a check needs little memory beside them.
_ROWS_AT_ONCE = 4096


@dataclass(frozen=True, eq=False)
class Sequences:
    """Packed token sequences.

    ``tokens`` (S, L) uint32. ``document_start`` (S, L) bool: a new document, or a piece of one,
    begins here. ``target_mask`` (S, L) bool: the position has a record, that is, it predicts the
    next token of the same document. Raises ``ValueError`` if shapes differ, or if a target
    would lie outside the sequence or in another document.
    """

    tokens: NDArray[np.uint32]
    document_start: NDArray[np.bool_]
    target_mask: NDArray[np.bool_]

    def __post_init__(self) -> None:
        dtypes = {"tokens": np.uint32, "document_start": np.bool_, "target_mask": np.bool_}
        for name, dtype in dtypes.items():
            array = getattr(self, name)
            if not isinstance(array, np.ndarray) or array.dtype != dtype:
                got = getattr(array, "dtype", type(array).__name__)
                raise ValueError(f"{name} must be an array of {np.dtype(dtype)}, but got {got}.")
        shapes = {name: getattr(self, name).shape for name in dtypes}
        if len(set(shapes.values())) != 1 or self.tokens.ndim != 2 or self.length < 1:
            raise ValueError(f"Sequences need three arrays of one shape (S, L), but got {shapes}.")
        if self.target_mask[:, -1].any():
            raise ValueError(
                "target_mask must be False at the last position: "
                "its target lies outside the sequence."
            )
        if any(map(self._has_target_outside, range(0, len(self), _ROWS_AT_ONCE))):
            raise ValueError(
                "target_mask must be False where the next token begins a new document."
            )

    def _has_target_outside(self, first: int) -> bool:
        """Return whether a target of the next ``_ROWS_AT_ONCE`` sequences begins a document."""
        rows = slice(first, first + _ROWS_AT_ONCE)
        return bool((self.target_mask[rows, :-1] & self.document_start[rows, 1:]).any())

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def arrays(self) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any]]:
        """Its three arrays, in the order of the fields."""
        return self.tokens, self.document_start, self.target_mask

    @property
    def length(self) -> int:
        """Number of tokens of one sequence, L."""
        return int(self.tokens.shape[1])

    @property
    def positions(self) -> int:
        """Number of positions with a record, N."""
        return int(np.count_nonzero(self.target_mask))

    def select(self, indices: Any) -> Sequences:
        """Return the sequences at ``indices`` (an index array, slice or mask), in that order.

        A pair of ``indices`` and a slice returns these columns of them.
        """
        return Sequences(*(each[indices] for each in self.arrays))

    def find_gold_ids(self) -> NDArray[np.uint32]:
        """Return the next token of every position with a record, (N,)."""
        return self.tokens[:, 1:][self.target_mask[:, :-1]]

    @staticmethod
    def concatenate(parts: Iterable[Sequences]) -> Sequences:
        """Join all sequences of ``parts`` (at least one), in order."""
        return Sequences(*map(np.concatenate, zip(*(each.arrays for each in parts), strict=True)))


def find_axis(column: str) -> str:
    """Return the axis along which ``column`` has its rows: "position", "head" or "tail".

    A record has ``head_count`` rows of heads and ``tail_count`` rows of tails, and records follow
    each other. The codec decides which columns a profile has, and their types.
    """
    axis, _, what = column.partition("_")
    return axis if axis in ("head", "tail") and what != "count" else "position"


@dataclass(frozen=True, eq=False)
class Records:
    """The teacher's records of N positions: columns of small integers.

    Files and batches hold the same integers; ``cache.profiles`` defines their meaning, and
    ``cache.codec.Codec.require`` refuses columns of another profile. Raises ``ValueError`` if a
    column has a wrong number of rows.
    """

    columns: dict[str, NDArray[Any]]

    def __post_init__(self) -> None:
        lengths = {axis: self.length(axis) for axis in ("position", "head", "tail")}
        for name, column in self.columns.items():
            rows = lengths[find_axis(name)]
            if len(column) != rows:
                raise ValueError(f"{name} must have {rows} rows, but got {len(column)}.")

    def __len__(self) -> int:
        return len(self.columns["entropy"])

    def __getitem__(self, name: str) -> NDArray[Any]:
        return self.columns[name]

    @property
    def nbytes(self) -> int:
        """Bytes of all columns in memory."""
        return sum(column.nbytes for column in self.columns.values())

    def length(self, axis: str) -> int:
        """Return the number of rows of ``axis``: "position", "head" or "tail"."""
        if axis == "position":
            return len(self)
        counts = self.columns.get(f"{axis}_count")
        return 0 if counts is None else int(counts.sum(dtype=np.int64))

    def slice(self, start: int, stop: int) -> Records:
        """Return records ``start`` to ``stop`` as views; nothing is copied."""
        # Counts may be uint8: their sums need a wider type.
        cuts = {"position": slice(start, stop)}
        for axis in ("head", "tail"):
            if (count := self.columns.get(f"{axis}_count")) is not None:
                first = int(count[:start].sum(dtype=np.int64))
                cuts[axis] = slice(first, first + int(count[start:stop].sum(dtype=np.int64)))
        return Records(
            {name: column[cuts[find_axis(name)]] for name, column in self.columns.items()}
        )

    @staticmethod
    def concatenate(parts: Iterable[Records]) -> Records:
        """Join all records of ``parts`` (at least one, of one profile), in order."""
        kept = [part.columns for part in parts]
        return Records(
            {name: np.concatenate([columns[name] for columns in kept]) for name in kept[0]}
        )


def compute_offsets(counts: NDArray[Any]) -> NDArray[np.int64]:
    """Return the offsets of rows with ``counts`` entries: one more than rows, from 0 to the sum."""
    return np.concatenate([np.zeros(1, np.int64), np.cumsum(counts, dtype=np.int64)])


@dataclass(frozen=True, eq=False)
class TailSums:
    """Sums over training sequences of s, and of its squares, (V,) in float64 each.

    s is the sum over the positions of a sequence of the probabilities of tail tokens: those that a
    record of profile threshold samples. The sampled weights of a batch scatter around such a sum,
    token by token. The mean of a whole cache, which ``compute_mean`` computes, is what training
    needs to take out most of that scatter (``kd.loss.tail_control``):

        mean    b = sum s / positions
        share   c = tau b / (tau b + v), v = the variance of s over the sequences, for one position

    tau b bounds the variance that sampling adds to one position, v is what the text itself adds; c
    is the part of the scatter that sampling makes: the best weight of a control variate.
    """

    sequences: int
    positions: int
    sum_V: NDArray[np.float64]
    square_V: NDArray[np.float64]

    def __add__(self, other: TailSums) -> TailSums:
        return TailSums(
            self.sequences + other.sequences,
            self.positions + other.positions,
            self.sum_V + other.sum_V,
            self.square_V + other.square_V,
        )

    @property
    def nbytes(self) -> int:
        """Bytes of the sums."""
        return self.sum_V.nbytes + self.square_V.nbytes

    @classmethod
    def from_arrays(cls, arrays: dict[str, NDArray[Any]]) -> TailSums:
        """Make the sums from ``SUM_ARRAYS``; the inverse of ``to_arrays``."""
        sequences, positions = arrays["counts"].tolist()
        return cls(sequences, positions, arrays["sums"], arrays["squares"])

    def to_arrays(self) -> dict[str, NDArray[Any]]:
        """Return the arrays to store, ``SUM_ARRAYS``."""
        counts = np.array([self.sequences, self.positions], np.int64)
        return {"counts": counts, "sums": self.sum_V, "squares": self.square_V}

    def compute_mean(self, threshold: float) -> dict[str, NDArray[np.float32]]:
        """Compute b and c of a cache with this threshold, tau above, under ``MEAN_ARRAYS``.

        The variance of s needs two sequences: with fewer every share is 0.
        """
        mean_V = self.sum_V / max(self.positions, 1)
        share_V = np.zeros_like(mean_V)
        if self.sequences > 1 and self.positions > 0:
            spread_V = self.square_V - self.sum_V**2 / self.sequences
            apart = self.positions * (self.sequences - 1) / self.sequences
            text_V = spread_V.clip(min=0.0) / apart
            sampled_V = threshold * mean_V
            np.divide(sampled_V, sampled_V + text_V, out=share_V, where=mean_V > 0)
        return {"mean": mean_V.astype(np.float32), "share": share_V.astype(np.float32)}


def encode_tail_mean(mean: dict[str, NDArray[np.float32]]) -> dict[str, NDArray[Any]]:
    """Encode the result of ``TailSums.compute_mean`` in three bytes a token.

    ``mean`` is in steps of its logarithm of 2^-8 nats, which is 0.2 % at the most; a mean of 0 has
    the largest code. ``share`` is in steps of 1/255.
    """
    logs_V = np.log(mean["mean"], out=np.full(len(mean["mean"]), -np.inf), where=mean["mean"] > 0)
    steps_V = np.minimum(np.rint(logs_V / -_MEAN_STEP), _NO_MEAN)
    shares_V = np.rint(mean["share"] * 255)
    return {"mean": steps_V.astype(np.uint16), "share": shares_V.astype(np.uint8)}


def decode_tail_mean(stored: dict[str, NDArray[Any]]) -> dict[str, NDArray[np.float32]]:
    """Decode what ``encode_tail_mean`` returns."""
    mean_V = np.exp(stored["mean"].astype(np.float64) * -_MEAN_STEP)
    mean_V[stored["mean"] == _NO_MEAN] = 0.0
    return {"mean": mean_V.astype(np.float32), "share": (stored["share"] / 255).astype(np.float32)}
