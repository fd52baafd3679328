"""One sequence of somebody else's teacher records: what every reader gives, and what is checked of it.

A record at position t is the distribution of token t + 1, as everywhere in Potstill; readers of formats that count
otherwise shift. Probabilities are those of temperature 1.

L tokens of a row    P positions with a record    k entries of a record
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kd.errors import DataError

#: How far above 1 the probabilities of a record may add up before it is refused; below that it is rounding.
MASS_TOLERANCE = 1e-3
#: Sums this close to 1 leave no residual: float32 says no more.
_WHOLE = 1e-6
#: Nats that the last entry may be too low before the mass that is missing cannot lie below it; by far, where a
#: fitted curve stands for the entries.
SLACK, _FITTED_SLACK = 3.0, 20.0
_OTHER_CONFIGURATION = (
    "The records are damaged, or were encoded with another configuration or tokenizer than the one given."
)


@dataclass(frozen=True, eq=False)
class Row:
    """One sequence with its records; ``where`` names its file and row in errors.

    ``tokens`` (L,) and ``document_start`` (L,) bool; ``positions`` (P,) ascending; ``ids`` and ``logprobs`` (P, k) in
    nats, -inf where there is no entry. ``gold`` (P,) is the log-probability of the next token where the source says
    it apart from the entries, else NaN; ``residual`` (P,) the log of the mass outside the entries where the source
    says it. ``rounding`` is how far rounding in the source may move a sum of probabilities; ``fitted`` says
    that entries are a curve through the teacher's, not its own.
    """

    where: str
    tokens: NDArray[Any]
    document_start: NDArray[np.bool_]
    positions: NDArray[Any]
    ids: NDArray[Any]
    logprobs: NDArray[Any]
    gold: NDArray[Any]
    residual: NDArray[Any] | None = None
    rounding: float = MASS_TOLERANCE
    fitted: bool = False
    entropy: NDArray[Any] | None = None

    def keep(self, mask: NDArray[np.bool_]) -> Row:
        """The row with only those records where ``mask`` (P,) is true."""
        residual = None if self.residual is None else self.residual[mask]
        records = (each[mask] for each in (self.positions, self.ids, self.logprobs, self.gold))
        positions, ids, logprobs, gold = records
        entropy = None if self.entropy is None else self.entropy[mask]
        kept = replace(self, positions=positions, ids=ids, logprobs=logprobs, gold=gold)
        return replace(kept, residual=residual, entropy=entropy)

    def refuse(self, place: Any, what: str, remedy: str) -> DataError:
        """The error for what is wrong at the record with index ``place``."""
        return DataError(f"{self.where}, position {int(self.positions[place])}: {what}", remedy)


def one_document(length: int) -> NDArray[np.bool_]:
    """``document_start`` of a row that is a single document."""
    start = np.zeros(length, bool)
    start[:1] = True
    return start


def whole(token: Any) -> int:
    """A token id as JSON gives it; raises ``ValueError`` for a fraction, a flag or a text, which int() would take."""
    if isinstance(token, bool) or not isinstance(token, int | float) or token % 1 or abs(token) >= 1 << 63:
        raise ValueError(f"expected a whole number as a token id, got {token!r}")
    return int(token)


def rectangle(records: Sequence[tuple[Sequence[int], Sequence[float]]]) -> tuple[NDArray[Any], NDArray[Any]]:
    """Ids and log-probabilities (P, k) of records of unequal length; -inf where there is no entry."""
    counts = np.array([len(ids) for ids, _ in records], np.int64)
    there = np.arange(counts.max(initial=1)) < counts[:, None]
    ids, logprobs = np.zeros(there.shape, np.int64), np.full(there.shape, -np.inf)
    ids[there] = [each for entry, _ in records for each in entry]
    logprobs[there] = [each for _, entry in records for each in entry]
    return ids, logprobs


def checked(row: Row, vocabulary: int, tolerance: float | None = None) -> Row:
    """``row`` with entries in descending order, its gold log-probabilities and its residual, all of it checked.

    Records that predict nothing (beyond the row, or the first token of another document) are left out. Raises
    ``DataError`` naming row and position for ids outside the vocabulary or twice in a record, numbers that are not
    finite, probabilities that sum to more than 1 + ``tolerance``, and mass that is missing where none can be.
    """
    _require_tokens(row, vocabulary)
    row = row.keep(_predicts(row))
    _require_ids(row, vocabulary)
    order = np.argsort(-row.logprobs, axis=1, kind="stable")
    ids, logprobs = (np.take_along_axis(each, order, axis=1) for each in (row.ids, row.logprobs))
    row = _normalised(replace(row, ids=ids, logprobs=logprobs), row.rounding if tolerance is None else tolerance)
    _require_room(row, vocabulary)
    return replace(row, gold=_gold(row))


def _predicts(row: Row) -> NDArray[np.bool_]:
    within = row.positions < len(row.tokens) - 1
    following = np.minimum(row.positions + 1, len(row.tokens) - 1)
    return within & ~row.document_start[following]


def _require_tokens(row: Row, vocabulary: int) -> None:
    strange = row.tokens[(row.tokens < 0) | (row.tokens >= vocabulary)]
    if len(strange):
        detail = f"{row.where}: token id {int(strange[0])} lies outside the tokenizer's {vocabulary} tokens."
        raise DataError(detail, "Name the folder of the tokenizer that the records were made with.")


def _require_ids(row: Row, vocabulary: int) -> None:
    """Every record has an entry; entries are finite, their ids in the vocabulary and distinct."""
    there = np.isfinite(row.logprobs)
    wrong = np.isnan(row.logprobs) | (row.logprobs == np.inf)
    for place in np.flatnonzero((wrong | ~there.any(axis=1, keepdims=True)).any(axis=1))[:1]:
        raise row.refuse(place, "the log-probabilities are not finite numbers.", _OTHER_CONFIGURATION)
    outside = there & ((row.ids < 0) | (row.ids >= vocabulary))
    for place in np.flatnonzero(outside.any(axis=1))[:1]:
        worst = int(row.ids[place][outside[place]][0])
        raise row.refuse(place, f"id {worst} lies outside the tokenizer's {vocabulary} tokens.", _OTHER_CONFIGURATION)
    sorted_ids = np.sort(np.where(there, row.ids, -1), axis=1)
    twice = (sorted_ids[:, 1:] == sorted_ids[:, :-1]) & (sorted_ids[:, 1:] >= 0)
    for place in np.flatnonzero(twice.any(axis=1))[:1]:
        worst = int(sorted_ids[place, 1:][twice[place]][0])
        raise row.refuse(place, f"id {worst} is named twice.", _OTHER_CONFIGURATION)


def _normalised(row: Row, tolerance: float) -> Row:
    """The row with a residual; probabilities that sum to a little more than 1 are scaled to 1, and leave none.

    Where the source says the residual, it is taken at its word: it knows more than a sum near 1 can tell.
    """
    mass = log_sum_exp(row.logprobs)
    total = mass if row.residual is None else np.logaddexp(mass, row.residual)
    lowest = -np.inf if row.residual is None else np.log1p(-row.rounding)
    for place in np.flatnonzero((total > np.log1p(tolerance)) | (total < lowest))[:1]:
        limit = f"more than 1 + {tolerance:g}" if total[place] > 0 else f"less than 1 - {row.rounding:g}"
        what = f"the probabilities sum to {np.exp(min(total[place], 99.0)):.5g}, {limit}."
        remedy = f"{_OTHER_CONFIGURATION} Where a lossy format is known to be so far off, raise the mass tolerance."
        raise row.refuse(place, what, remedy)
    if row.residual is not None:
        return row
    whole = mass > -_WHOLE
    outside = np.where(whole, -np.inf, log1mexp(np.where(whole, -1.0, mass)))
    return replace(row, logprobs=row.logprobs - np.maximum(mass, 0.0)[:, None], residual=outside)


def _require_room(row: Row, vocabulary: int) -> None:
    """Every token outside the entries is at most as probable as the last of them, so that much can be missing."""
    assert row.residual is not None
    counts = np.isfinite(row.logprobs).sum(axis=1)
    # The text's own token may be named beside the most probable ones, however rare it is.
    ranked = np.isfinite(row.logprobs) & (row.ids != row.tokens[row.positions + 1][:, None])
    last = np.where(ranked, row.logprobs, 0.0).min(axis=1)
    slack = _FITTED_SLACK if row.fitted else SLACK
    with np.errstate(divide="ignore"):
        room = last + slack + np.log(np.maximum(vocabulary - counts, 0))
    for place in np.flatnonzero(np.exp(row.residual) > np.exp(np.minimum(room, 0.0)) + row.rounding)[:1]:
        what = f"{np.exp(row.residual[place]):.4f} of the probability is missing, and cannot lie below the last entry."
        raise row.refuse(place, what, _OTHER_CONFIGURATION)


def _gold(row: Row) -> NDArray[Any]:
    """Log-probability of the next token: as the source says, or found among the entries, or NaN."""
    found = (row.ids == row.tokens[row.positions + 1][:, None]) & np.isfinite(row.logprobs)
    among = np.where(found, row.logprobs, -np.inf).max(axis=1, initial=-np.inf)
    said = np.where(np.isnan(row.gold), np.nan, np.minimum(row.gold, 0.0))
    return np.where(found.any(axis=1), among, said)


def resized(row: Row, k: int) -> Row:
    """The row with exactly ``k`` entries a record: what is cut off goes to the residual, what lacks is -inf."""
    assert row.residual is not None
    short = max(0, k - row.ids.shape[1])
    ids = np.pad(row.ids, ((0, 0), (0, short)))[:, :k]
    logprobs = np.pad(row.logprobs, ((0, 0), (0, short)), constant_values=-np.inf)[:, :k]
    residual = np.logaddexp(row.residual, log_sum_exp(row.logprobs[:, k:]))
    return replace(row, ids=ids, logprobs=logprobs, residual=residual)


def log_sum_exp(logprobs: NDArray[Any]) -> NDArray[Any]:
    """log Σ exp over the last axis; -inf for nothing."""
    top = logprobs.max(axis=-1, initial=-np.inf)
    base = np.where(np.isfinite(top), top, 0.0)
    with np.errstate(divide="ignore"):
        return np.log(np.exp(logprobs - base[..., None]).sum(axis=-1)) + base


def log1mexp(values: NDArray[Any]) -> NDArray[Any]:
    """log(1 - exp(x)) for x < 0, without cancellation at either end (Mächler, 2012)."""
    near = values > -np.log(2.0)
    return np.where(near, np.log(-np.expm1(np.where(near, values, -1.0))), np.log1p(-np.exp(np.minimum(values, -0.1))))


@dataclass
class Alignment:
    """Whether the records are about the token that they are said to be about: the field's commonest defect.

    Counts how often the entries of position t hold token t, t + 1 and t + 2.
    """

    found: tuple[int, int, int] = (0, 0, 0)
    records: int = 0

    def add(self, row: Row) -> None:
        """Count the records of ``row``."""
        inner = row.positions[row.positions + 2 < len(row.tokens)]
        ids = np.where(np.isfinite(row.logprobs), row.ids, -1)[: len(inner)]
        hits = [int((ids == row.tokens[inner + shift][:, None]).any(axis=1).sum()) for shift in range(3)]
        self.found = (self.found[0] + hits[0], self.found[1] + hits[1], self.found[2] + hits[2])
        self.records += len(inner)

    def require(self, names: Iterable[str]) -> None:
        """Raise ``DataError`` where the text is clearly better predicted one position earlier or later."""
        before, here, after = self.found
        worst = max(before, after)
        if worst - here > 6 * np.sqrt(worst + here + 1):
            place, shares = ("t", "t + 2")[worst == after], [f"{each / self.records:.0%}" for each in self.found]
            raise DataError(
                f"{', '.join(names)}: the records are off by one. That of position t, which is about token t + 1, "
                f"names it in {shares[1]} of all places, but token {place} in {shares[0 if place == 't' else 2]}.",
                "Give the records of the token that follows each position.",
            )
