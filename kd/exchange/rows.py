"""One sequence with teacher records of another tool: the result of every reader, and its checks.

A record at position t is the distribution of token t + 1, as everywhere in Potstill. Readers of
formats that count differently shift their records. Probabilities have temperature 1.

Shapes: L tokens of a row, N positions with a record, K entries of a record.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kd.capture.log_mass import FITTED_SLACK, RESIDUAL_SLACK, log1mexp, log_sum_exp
from kd.errors import DataError

#: The most by which rounding may lift the probabilities of a record above 1; beyond it the record
#: is refused.
MASS_TOLERANCE = 1e-3
#: Sums this close to 1 leave no residual: float32 is not more precise.
_WHOLE = 1e-6
#: Tokens after the right one to which records are compared, in order.
SHIFTS = (-2, -1, 0, 1, 2)
#: Records whose alignment is proven together.
PART = 64
#: The nats by which another alignment must be more probable before it is believed, and in how many
#: more places the entries must contain the token.
BEYOND_DOUBT = 18.0
LEAST_PROOF = 5
#: The least log-mass outside a record's entries that is believed, and the share of one token.
_SMALLEST_REST = 1e-3
_SHARE_OF_REST = -9.0
_OTHER_CONFIGURATION = (
    "The records are damaged, or were encoded with another configuration or tokenizer "
    "than the one given."
)


@dataclass(frozen=True, eq=False)
class Row:
    """One sequence with its records.

    where            the file and the row, for errors
    tokens           (L,)
    document_start   (L,) bool
    positions        (N,)     ascending
    ids              (N, K)
    logprobs         (N, K)   in nats; -inf if there is no entry
    gold             (N,)     log-probability of the next token if the source has it apart from the
                              entries, else NaN
    residual         (N,)     log of the mass outside the entries; None if the source does not have
                              it
    rounding         the most by which rounding in the source may change a sum of probabilities
    fitted           whether entries lie on a curve through the teacher's values
    entropy          (N,)     in nats, NaN if it is not known; None if the source does not have
                              it
    kept             ids that stand in every record, however rare they are
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
    kept: tuple[int, ...] = ()

    @classmethod
    def of(
        cls,
        where: str,
        tokens: Sequence[int],
        positions: NDArray[Any],
        records: Sequence[tuple[Sequence[int], Sequence[float]]],
        gold: NDArray[Any],
    ) -> Row:
        """Make the row of one document from the ids and log-probabilities of each record."""
        ids = np.asarray(tokens, np.int64)
        return cls(where, ids, mark_one_document(len(ids)), positions, *pad_records(records), gold)

    def keep(self, mask: NDArray[np.bool_]) -> Row:
        """Return the row with only the records where ``mask`` (N,) is true."""
        names = ("positions", "ids", "logprobs", "gold", "residual", "entropy")
        kept: dict[str, Any] = {
            name: found[mask] for name in names if (found := getattr(self, name)) is not None
        }
        return replace(self, **kept)

    def refuse(self, place: Any, what: str, remedy: str) -> DataError:
        """Return the error for the record with index ``place``."""
        return DataError(f"{self.where}, position {int(self.positions[place])}: {what}", remedy)


def mark_one_document(length: int) -> NDArray[np.bool_]:
    """Return ``document_start`` of a row that is a single document."""
    return np.arange(length) == 0


def require_token_id(token: Any) -> int:
    """Return a token id from JSON.

    Raises ``ValueError`` for fractions, flags and text, which int() accepts.
    """
    is_number = isinstance(token, int | float) and not isinstance(token, bool)
    if not is_number or token % 1 or abs(token) >= 1 << 63:
        raise ValueError(f"expected a whole number as a token id, got {token!r}")
    return int(token)


def pad_records(
    records: Sequence[tuple[Sequence[int], Sequence[float]]],
) -> tuple[NDArray[Any], NDArray[Any]]:
    """Join records of unequal length into ids and log-probabilities (N, K).

    -inf if there is no entry.
    """
    counts = np.array([len(ids) for ids, _ in records], np.int64)
    ids = [each for entry, _ in records for each in entry]
    return pad_entries(counts, ids, [each for _, entry in records for each in entry])


def pad_entries(
    counts: NDArray[np.int64], flat_ids: Any, flat_logprobs: Any, least: int = 1
) -> tuple[NDArray[Any], NDArray[Any]]:
    """Return the entries of records, of which each has ``counts``, as (N, K); K is ``least`` or
    more.
    """
    there = np.arange(counts.max(initial=least)) < counts[:, None]
    ids = np.zeros(there.shape, np.int64)
    ids[there] = flat_ids
    logprobs = np.full(there.shape, -np.inf)
    logprobs[there] = flat_logprobs
    return ids, logprobs


def check_row(
    row: Row,
    vocabulary: int,
    tolerance: float | None = None,
    remedies: Mapping[str, str] | None = None,
) -> Row:
    """Check ``row``; return it with entries in descending order, ``gold`` and ``residual``.

    Records beyond the row's end, or of the first token of another document, are left out. Raises
    ``DataError`` with row and position for: ids outside the vocabulary, ids twice in a record,
    numbers that are not finite, probabilities that sum to more than 1 + ``tolerance``, and more
    missing mass than the tokens outside the entries can have. Where that is because records belong
    to other tokens, it says so, with ``remedies`` as ``Alignment.require`` takes them.
    """
    strange = row.tokens[(row.tokens < 0) | (row.tokens >= vocabulary)]
    if len(strange):
        where = f"{row.where}: token id {int(strange[0])}"
        detail = f"{where} lies outside the tokenizer's {vocabulary} tokens."
        raise DataError(detail, "Name the folder of the tokenizer that the records were made with.")
    # Kept are records before the row's end, whose next token is of the same document.
    following = np.minimum(row.positions + 1, len(row.tokens) - 1)
    row = row.keep((row.positions < len(row.tokens) - 1) & ~row.document_start[following])
    _require_ids(row, vocabulary)
    # A stable sort keeps equal entries in the order of the source.
    order = np.argsort(-row.logprobs, axis=1, kind="stable")
    ids, logprobs = (np.take_along_axis(each, order, axis=1) for each in (row.ids, row.logprobs))
    row = replace(row, ids=ids, logprobs=logprobs)
    row = _normalise_row(row, row.rounding if tolerance is None else tolerance)
    _require_room(row, vocabulary, remedies)
    # The next token's log-probability: from the entries, or the source, or NaN.
    found = (row.ids == row.tokens[row.positions + 1][:, None]) & np.isfinite(row.logprobs)
    among = np.where(found, row.logprobs, -np.inf).max(axis=1, initial=-np.inf)
    apart = np.where(np.isnan(row.gold), np.nan, np.minimum(row.gold, 0.0))
    return replace(row, gold=np.where(found.any(axis=1), among, apart))


def _require_ids(row: Row, vocabulary: int) -> None:
    """Require that every record has an entry, with finite numbers and distinct ids of the
    vocabulary.
    """
    there = np.isfinite(row.logprobs)
    wrong = np.isnan(row.logprobs) | (row.logprobs == np.inf)
    for place in np.flatnonzero((wrong | ~there.any(axis=1, keepdims=True)).any(axis=1))[:1]:
        what = "the log-probabilities are not finite numbers."
        raise row.refuse(place, what, _OTHER_CONFIGURATION)
    outside = there & ((row.ids < 0) | (row.ids >= vocabulary))
    for place in np.flatnonzero(outside.any(axis=1))[:1]:
        worst = int(row.ids[place][outside[place]][0])
        what = f"id {worst} lies outside the tokenizer's {vocabulary} tokens."
        raise row.refuse(place, what, _OTHER_CONFIGURATION)
    # Equal ids stand side by side after a sort; places without an entry get -1.
    sorted_ids = np.sort(np.where(there, row.ids, -1), axis=1)
    twice = (sorted_ids[:, 1:] == sorted_ids[:, :-1]) & (sorted_ids[:, 1:] >= 0)
    for place in np.flatnonzero(twice.any(axis=1))[:1]:
        worst = int(sorted_ids[place, 1:][twice[place]][0])
        raise row.refuse(place, f"id {worst} is named twice.", _OTHER_CONFIGURATION)


def _normalise_row(row: Row, tolerance: float) -> Row:
    """Return the row with a residual.

    Probabilities that sum to slightly more than 1 are scaled to 1. A residual of the source is
    kept: it is more precise than 1 minus a sum near 1.
    """
    mass = log_sum_exp(row.logprobs)
    total = mass if row.residual is None else np.logaddexp(mass, row.residual)
    lowest = -np.inf if row.residual is None else np.log1p(-row.rounding)
    for place in np.flatnonzero((total > np.log1p(tolerance)) | (total < lowest))[:1]:
        more = f"more than 1 + {tolerance:g}"
        limit = more if total[place] > 0 else f"less than 1 - {row.rounding:g}"
        what = f"the probabilities sum to {np.exp(min(total[place], 99.0)):.5g}, {limit}."
        remedy = "If a lossy format explains this error, raise the mass tolerance."
        raise row.refuse(place, what, f"{_OTHER_CONFIGURATION} {remedy}")
    if row.residual is not None:
        return row
    whole = mass > -_WHOLE
    outside = np.where(whole, -np.inf, log1mexp(np.where(whole, -1.0, mass)))
    return replace(row, logprobs=row.logprobs - np.maximum(mass, 0.0)[:, None], residual=outside)


def _require_room(row: Row, vocabulary: int, remedies: Mapping[str, str] | None) -> None:
    """Raise ``DataError`` if more mass is missing than the tokens outside the entries can have.

    Each of them is at most as probable as the last entry.
    """
    assert row.residual is not None
    counts = np.isfinite(row.logprobs).sum(axis=1)
    # The next token and those that are kept may stand beside the most probable ones, however rare
    # they are: they do not count as the last.
    ranked = np.isfinite(row.logprobs) & (row.ids != row.tokens[row.positions + 1][:, None])
    ranked &= ~np.isin(row.ids, row.kept)
    last = np.where(ranked, row.logprobs, 0.0).min(axis=1)
    slack = FITTED_SLACK if row.fitted else RESIDUAL_SLACK
    with np.errstate(divide="ignore"):
        room = last + slack + np.log(np.maximum(vocabulary - counts, 0))
    missing = np.exp(row.residual)
    for place in np.flatnonzero(missing > np.exp(np.minimum(room, 0.0)) + row.rounding)[:1]:
        # A rare token that is the next one of another record looks like a last entry.
        Alignment().add(row, remedies)
        what = "of the probability is missing, and cannot lie below the last entry."
        raise row.refuse(place, f"{missing[place]:.4f} {what}", _OTHER_CONFIGURATION)


def resize_row(row: Row, k: int) -> Row:
    """Return the row with exactly ``k`` entries per record.

    The mass of entries that are cut off moves to the residual; missing entries become -inf.
    """
    assert row.residual is not None
    short = max(0, k - row.ids.shape[1])
    ids = np.pad(row.ids, ((0, 0), (0, short)))[:, :k]
    logprobs = np.pad(row.logprobs, ((0, 0), (0, short)), constant_values=-np.inf)[:, :k]
    residual = np.logaddexp(row.residual, log_sum_exp(row.logprobs[:, k:]))
    return replace(row, ids=ids, logprobs=logprobs, residual=residual)


def score_tokens(
    ids: NDArray[Any], logprobs: NDArray[Any], tokens: NDArray[Any]
) -> NDArray[np.float64]:
    """Return the log-probability of token n under record n, (N,), of records (N, K).

    A token outside the entries shares the mass outside them with all others, of which there are
    some ten thousand.
    """
    own = np.where(ids == tokens[:, None], logprobs, -np.inf).max(axis=1, initial=-np.inf)
    mass = np.minimum(log_sum_exp(logprobs), -_SMALLEST_REST)
    return np.maximum(own, log1mexp(mass) + _SHARE_OF_REST)


@dataclass
class Alignment:
    """Checks that records belong to the right token.

    Records that are off by one are a common defect. For each of ``SHIFTS``: ``gains`` holds by how
    many nats the text is more probable if record t belongs to that token after t + 1, and ``found``
    in how many places its entries contain it. They expect to in ``mass`` places.
    """

    gains: NDArray[np.float64] = field(default_factory=lambda: np.zeros(len(SHIFTS)))
    found: NDArray[np.int64] = field(default_factory=lambda: np.zeros(len(SHIFTS), np.int64))
    mass: float = 0.0
    records: int = 0

    def add(self, row: Row, remedies: Mapping[str, str] | None = None) -> None:
        """Count the records of ``row``; raise ``DataError`` as ``require`` does for it alone.

        Every part of ``PART`` records is looked at, because an answer may be shifted from one token
        on.
        """
        places = row.positions + 1
        row = row.keep((places + SHIFTS[0] >= 0) & (places + SHIFTS[-1] < len(row.tokens)))
        places = row.positions + 1
        shifted = [row.tokens[places + shift] for shift in SHIFTS]
        scores = np.stack([score_tokens(row.ids, row.logprobs, each) for each in shifted])
        there = np.where(np.isfinite(row.logprobs), row.ids, -1)
        hits = np.stack([(there == each[:, None]).any(axis=1) for each in shifted])
        for first in range(0, len(places), PART):
            part = slice(first, first + PART)
            one = Alignment(
                (scores[:, part] - scores[SHIFTS.index(0), part]).sum(axis=1),
                hits[:, part].sum(axis=1),
                float(np.exp(row.logprobs[part]).sum()),
                len(places[part]),
            )
            one.require([f"{row.where}, position {places[first] - 1}"], remedies)
            self.gains = self.gains + one.gains
            self.found = self.found + one.found
            self.mass += one.mass
            self.records += one.records

    def require(self, names: Iterable[str], remedies: Mapping[str, str] | None = None) -> None:
        """Raise ``DataError`` if shifting the records makes the text beyond doubt more probable.

        ``remedies`` = what to do, by the token that the records of position t belong to: "t" or
        "t + 2". Without one, the caller is to give records of the following token.
        """
        best = int(self.gains.argmax())
        own, other = (int(self.found[each]) for each in (SHIFTS.index(0), best))
        # A text that the teacher does not know may fit by chance, and one of repetitions one place
        # too late. So another place must also contain what the entries expect, and far more than
        # this one: three times or, in many records, by six standard errors of the difference.
        more = other - own >= LEAST_PROOF and other >= max(3 * own, 0.8 * self.mass)
        more = more or other - own > 6 * np.sqrt(other + own + 1)
        if self.gains[best] > BEYOND_DOUBT and more:
            place = f"t + {SHIFTS[best] + 1}".replace(" + 0", "").replace("+ -", "- ")
            count = "one" if abs(SHIFTS[best]) == 1 else str(abs(SHIFTS[best]))
            remedy = "Give the records of the token that follows each position."
            raise DataError(
                f"{', '.join(names)}: the records are off by {count}. The record of position t "
                f"belongs to token t + 1, but contains it in only {own / self.records:.0%} of all "
                f"places, and token {place} in {other / self.records:.0%}.",
                (remedies or {}).get(place, remedy),
            )
