"""Sequences of tokens and the teacher's records for their positions, in memory.

S   sequences               L   tokens of a sequence
P   positions with a record, in sequence-major order: ``np.flatnonzero(target_mask_SL)``
H   head entries of all records, record after record
M   tail entries of all records, record after record
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, eq=False)
class Sequences:
    """Packed token sequences.

    ``tokens`` (S, L) uint32. ``document_start`` (S, L) bool: a new document, or a piece of one, begins here.
    ``target_mask`` (S, L) bool: the position has a record, that is, it predicts token t + 1 of the same document.
    Raises ``ValueError`` where shapes differ or a target would lie outside the sequence or in another document.
    """

    tokens: NDArray[np.uint32]
    document_start: NDArray[np.bool_]
    target_mask: NDArray[np.bool_]

    def __post_init__(self) -> None:
        _require_dtypes(self, tokens=np.uint32, document_start=np.bool_, target_mask=np.bool_)
        shapes = {name: getattr(self, name).shape for name in ("tokens", "document_start", "target_mask")}
        if len(set(shapes.values())) != 1 or self.tokens.ndim != 2 or self.length < 1:
            raise ValueError(f"Sequences need three arrays of one shape (S, L), but got {shapes}.")
        if self.target_mask[:, -1].any():
            raise ValueError("target_mask must be False at the last position: its target lies outside the sequence.")
        if (self.target_mask[:, :-1] & self.document_start[:, 1:]).any():
            raise ValueError("target_mask must be False where the next token begins a new document.")

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def length(self) -> int:
        """Tokens of one sequence, L."""
        return int(self.tokens.shape[1])

    @property
    def positions(self) -> int:
        """Positions with a record, P."""
        return int(np.count_nonzero(self.target_mask))

    def select(self, indices: Any) -> Sequences:
        """The sequences at ``indices`` (an index array, slice or mask), in that order."""
        return Sequences(self.tokens[indices], self.document_start[indices], self.target_mask[indices])

    def gold_ids(self) -> NDArray[np.uint32]:
        """The next token of every position with a record, (P,)."""
        return self.tokens[:, 1:][self.target_mask[:, :-1]]

    @staticmethod
    def concatenate(parts: Iterable[Sequences]) -> Sequences:
        """All sequences of ``parts`` (at least one), in order."""
        return Sequences(*_concatenated(parts, Sequences))


@dataclass(frozen=True, eq=False)
class Records:
    """What the teacher knows about P positions: an exact head and a sampled tail for each, as CSR arrays.

    ``head_count`` (P,) uint8, ``head_ids`` (H,) uint32 in descending probability within a record, ``head_logprobs``
    (H,) float32 in nats; ``tail_count`` (P,) uint8, ``tail_ids`` (M,) uint32 ascending within a record;
    ``gold_logprob`` (P,) float32 and ``entropy`` (P,) float32 in nats.
    Raises ``ValueError`` where the counts do not add up, tails are unsorted or a number is not finite.
    """

    head_count: NDArray[np.uint8]
    head_ids: NDArray[np.uint32]
    head_logprobs: NDArray[np.float32]
    tail_count: NDArray[np.uint8]
    tail_ids: NDArray[np.uint32]
    gold_logprob: NDArray[np.float32]
    entropy: NDArray[np.float32]

    def __post_init__(self) -> None:
        _require_dtypes(self, head_count=np.uint8, head_ids=np.uint32, head_logprobs=np.float32)
        _require_dtypes(self, tail_count=np.uint8, tail_ids=np.uint32, gold_logprob=np.float32, entropy=np.float32)
        self._require_lengths()
        for name in ("head_logprobs", "entropy"):
            if not np.isfinite(getattr(self, name)).all():
                raise ValueError(f"{name} must be finite.")
        if np.isnan(self.gold_logprob).any():
            raise ValueError("gold_logprob must not be NaN.")
        if not _ascending_within(self.tail_ids, self.tail_count):
            raise ValueError("tail_ids must be in ascending order within a record.")

    def _require_lengths(self) -> None:
        expected = {"tail_count": len(self), "gold_logprob": len(self), "entropy": len(self)}
        expected |= {"head_ids": int(self.head_count.sum(dtype=np.int64)), "head_logprobs": len(self.head_ids)}
        expected |= {"tail_ids": int(self.tail_count.sum(dtype=np.int64))}
        for name, length in expected.items():
            if getattr(self, name).shape != (length,):
                raise ValueError(f"{name} must have shape ({length},), but got {getattr(self, name).shape}.")

    def __len__(self) -> int:
        return len(self.head_count)

    @property
    def head_offsets(self) -> NDArray[np.int64]:
        """Where each record's head begins, and the end of the last, (P + 1,)."""
        return offsets_of(self.head_count)

    @property
    def tail_offsets(self) -> NDArray[np.int64]:
        """Where each record's tail begins, and the end of the last, (P + 1,)."""
        return offsets_of(self.tail_count)

    def head_rows(self) -> NDArray[np.int64]:
        """The record of each head entry, (H,)."""
        return np.repeat(np.arange(len(self)), self.head_count)

    def tail_rows(self) -> NDArray[np.int64]:
        """The record of each tail entry, (M,)."""
        return np.repeat(np.arange(len(self)), self.tail_count)

    def head_weights(self) -> NDArray[np.float32]:
        """The probability of each head entry, (H,)."""
        return np.exp(self.head_logprobs)

    def tail_weights(self) -> NDArray[np.float32]:
        """The weight of each tail entry, (M,): (1 - sum head) / m, so that a record's weights sum to 1.

        Slightly negative where rounding lifted the head above 1: clipping would bias it.
        """
        head_mass = np.bincount(self.head_rows(), np.exp(self.head_logprobs.astype(np.float64)), minlength=len(self))
        weight = (1.0 - head_mass) / np.maximum(self.tail_count, 1)
        return np.repeat(weight, self.tail_count).astype(np.float32)

    def slice(self, start: int, stop: int) -> Records:
        """Records ``start`` to ``stop`` as views; nothing is copied."""
        head = slice(*(int(self.head_count[:end].sum(dtype=np.int64)) for end in (start, stop)))
        tail = slice(*(int(self.tail_count[:end].sum(dtype=np.int64)) for end in (start, stop)))
        rows = slice(start, stop)
        return Records(
            head_count=self.head_count[rows],
            head_ids=self.head_ids[head],
            head_logprobs=self.head_logprobs[head],
            tail_count=self.tail_count[rows],
            tail_ids=self.tail_ids[tail],
            gold_logprob=self.gold_logprob[rows],
            entropy=self.entropy[rows],
        )

    @staticmethod
    def concatenate(parts: Iterable[Records]) -> Records:
        """All records of ``parts`` (at least one), in order."""
        return Records(*_concatenated(parts, Records))


def offsets_of(counts: NDArray[Any]) -> NDArray[np.int64]:
    """The CSR offsets of ``counts`` (N,): (N + 1,), from 0 to their sum."""
    return np.concatenate([np.zeros(1, np.int64), np.cumsum(counts, dtype=np.int64)])


def _concatenated(parts: Iterable[Any], kind: type[Any]) -> list[NDArray[Any]]:
    kept = list(parts)
    return [np.concatenate([getattr(part, field.name) for part in kept]) for field in fields(kind)]


def _require_dtypes(record: object, **dtypes: type[np.generic]) -> None:
    for name, dtype in dtypes.items():
        array = getattr(record, name)
        if not isinstance(array, np.ndarray) or array.dtype != dtype:
            got = getattr(array, "dtype", type(array).__name__)
            raise ValueError(f"{name} must be an array of {np.dtype(dtype)}, but got {got}.")


def _ascending_within(values: NDArray[Any], counts: NDArray[Any]) -> bool:
    """Whether ``values`` never fall, other than where the next record begins."""
    falls = values[1:] < values[:-1]
    begins = offsets_of(counts)[1:-1]
    falls[begins[(begins > 0) & (begins < len(values))] - 1] = False
    return not falls.any()
