"""The rows of a table: what a student is told, by name.

cross-entropy only               plain training; the lower end of the gap
all of p                         profile hidden, the upper end
threshold T                      profile threshold
tempered T                       profile tempered, four samples; for --set loss.temperature=2
topk K                           the K most probable tokens, renormalised
topk K and a ghost               the same tokens, and one bucket for the rest: profile topk
N draws with replacement         RS-KD
draws like threshold T           RS-KD, with as many distinct tokens as that row has entries
distillkit budget                DistillKit's format: 50 entries, one of them exact
distillkit recommended           DistillKit's format: 128 entries, 16 of them exact
distillkit K exact entries       DistillKit's format: K entries in 4 bytes each, all of them exact
threshold T, P% by entropy       records of the P% of each sequence with the largest entropies alone
threshold T, first P%            records of the first P% of each sequence alone
threshold T, P% at random        records of P% of each sequence alone
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from bench.support.quality.methods import (
    DISTILLKIT,
    DRAWN_TOKEN_BYTES,
    AlteredCache,
    choose_draws,
    count_entries,
    make_compression,
    make_distillkit_rounding,
    make_exact_settings,
    make_hidden_draws,
    make_renormalisation,
)
from bench.support.quality.selection import BY_ENTROPY, RULES, SelectedCache
from cache.store import Cache
from kd.errors import DataError
from kd.text.batches import Source

PLAIN = "cross-entropy only"
FULL = "all of p"
#: The rows of a table unless others are asked for.
DEFAULT_ROWS = (
    PLAIN,
    FULL,
    "threshold 0.04",
    "threshold 0.02",
    "threshold 0.01",
    "threshold 0.005",
    "topk 50",
    "topk 50 and a ghost",
    "draws like threshold 0.04",
    "distillkit budget",
    "distillkit recommended",
)


@dataclass(frozen=True)
class Told:
    """The records that a row's students read.

    ``bytes_per_token`` is what the row's format takes where that is not what its cache takes; None
    means measured on the disk.
    """

    source: Source
    bytes_per_token: float | None = None


#: Makes the records of a row from its caches.
Open = Callable[[list[Cache]], Told]


@dataclass(frozen=True)
class Row:
    """One row: its name, the ``cache`` sections of the caches that it needs, and its records.

    The first cache is the one that the students read; a row without a cache has no teacher.
    ``entropies``: its caches keep the teacher's entropy at each position.
    """

    name: str
    caches: tuple[dict[str, Any], ...] = ()
    open: Open = lambda caches: Told(caches[0])
    entropies: bool = False

    @property
    def plain(self) -> bool:
        """Whether students of this row learn from the text alone."""
        return not self.caches


HIDDEN: dict[str, Any] = {"profile": "hidden"}


def _make_plain(name: str) -> Row:
    return Row(name)


def _make_full(name: str) -> Row:
    return Row(name, (HIDDEN,))


def _make_threshold(name: str, threshold: str) -> Row:
    return Row(name, ({"profile": "threshold", "threshold": float(threshold)},))


def _make_tempered(name: str, threshold: str) -> Row:
    section = {"profile": "tempered", "threshold": float(threshold), "draws": 4}
    return Row(name, (section,))


def _make_top(name: str, k: str, ghost: str | None) -> Row:
    section = {"profile": "topk", "k": int(k)}
    if ghost:
        return Row(name, (section,))
    alter = make_renormalisation(int(k))
    return Row(name, (section,), lambda caches: Told(AlteredCache(caches[0], alter, name)))


def _make_draws(name: str, draws: str) -> Row:
    return Row(name, (HIDDEN,), lambda caches: _open_draws(caches[0], int(draws)))


def _make_like(name: str, threshold: str) -> Row:
    section = {"profile": "threshold", "threshold": float(threshold)}

    # To choose takes some seconds, and the students of all seeds have the same caches.
    chosen: dict[str, int] = {}

    def open_like(caches: list[Cache]) -> Told:
        hidden, sampled = caches
        if sampled.fingerprint not in chosen:
            chosen[sampled.fingerprint] = choose_draws(hidden, count_entries(sampled))
        return _open_draws(hidden, chosen[sampled.fingerprint])

    return Row(name, (HIDDEN, section), open_like)


def _open_draws(hidden: Cache, draws: int) -> Told:
    name = f"{draws} draws with replacement"
    source = AlteredCache(hidden, make_hidden_draws(draws, hidden), name)
    return Told(source, DRAWN_TOKEN_BYTES * count_entries(source))


def _make_distillkit(name: str, which: str | None, exact: str | None) -> Row:
    settings = DISTILLKIT[which] if which else make_exact_settings(int(exact or 0))

    def open_compressed(caches: list[Cache]) -> Told:
        compression = make_compression(settings, caches[0].codec.vocabulary_size)
        source = AlteredCache(caches[0], make_distillkit_rounding(compression), name)
        return Told(source, float(compression.logprob_bytes + compression.id_bytes))

    return Row(name, ({"profile": "topk", "k": settings["k"]},), open_compressed)


def _make_selected(
    name: str, threshold: str, first: str | None, some: str, chosen: str, text: str | None
) -> Row:
    rule, percent = ("first", first) if first else (chosen, some)
    section = {"profile": "threshold", "threshold": float(threshold)}

    def open_selected(caches: list[Cache]) -> Told:
        (whole,) = caches
        source = SelectedCache(whole, RULES[rule], float(percent) / 100, bool(text), name)
        return Told(source, source.count_share() * whole.bytes_per_token)

    return Row(name, (section,), open_selected, entropies=rule == BY_ENTROPY)


NUMBER = r"(\d*\.?\d+)"
SELECTION = rf"(?:first {NUMBER}%|{NUMBER}% (by entropy|at random))"
#: Each form of a name, and what makes its row from the name and the groups of the form.
FORMS: tuple[tuple[str, Callable[..., Row]], ...] = (
    (PLAIN, _make_plain),
    (FULL, _make_full),
    (rf"threshold {NUMBER}", _make_threshold),
    (rf"tempered {NUMBER}", _make_tempered),
    (rf"threshold {NUMBER}, {SELECTION}( and the text)?", _make_selected),
    (r"topk (\d+)( and a ghost)?", _make_top),
    (r"([1-9]\d*) draws with replacement", _make_draws),
    (rf"draws like threshold {NUMBER}", _make_like),
    (r"distillkit (?:(budget|recommended)|([1-9]\d*) exact entries)", _make_distillkit),
)


def parse_rows(names: list[str]) -> list[Row]:
    """Return the rows of these names, each once. Raises ``DataError`` for an unknown name."""
    return [_parse_row(name) for name in dict.fromkeys(" ".join(name.split()) for name in names)]


def _parse_row(name: str) -> Row:
    for form, make in FORMS:
        if found := re.fullmatch(form, name):
            return make(name, *found.groups())
    assert __doc__ is not None
    forms = [line.split("   ")[0] for line in __doc__.splitlines() if "   " in line]
    raise DataError(f"--rows: there is no row {name!r}.", f"A row is one of: {'; '.join(forms)}.")
