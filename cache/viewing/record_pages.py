"""Some records of one sequence, decoded and with the text of their tokens, for people to read.

N   records of the page      E   head entries of N records      V   vocabulary
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cache.codec import Codec
from cache.records import Records, compute_offsets
from cache.rounding import ENTROPY_STEP, KNOWN_STEP, UNKNOWN, UNKNOWN_ENTROPY
from cache.shard import PER_SEQUENCE
from cache.store import Cache
from cache.viewing.texts import TokenTexts

#: Entries of a record that are shown at most, the most probable first.
SHOWN_ENTRIES = 32
#: Tokens before the first record of a page that are shown with it.
CONTEXT = 32
#: Digits of a probability.
_DIGITS = 6

NameToken = Callable[[int], str]


@dataclass(frozen=True)
class ShownEntry:
    """A token that the record stores by itself, with its probability or with that of its units.

    ``text`` is empty if it is not known.
    """

    id: int
    text: str
    probability: float


@dataclass(frozen=True)
class ShownRecord:
    """One record: what the teacher expected after the token at ``position`` of the sequence.

    ``said`` is the next token of the text, and ``said_probability`` the teacher's for it. ``head``
    are the most probable of the ``entries`` stored probabilities, the said token's too. ``tail``
    is the mass outside all of them: ``tail_count`` tokens were drawn from it, of which
    ``tail_tokens`` are the first. ``entropy`` is in nats, and the mean of its sequence where the
    page says so. What a record does not hold is None.
    """

    position: int
    token: str
    said: str
    said_id: int
    said_probability: float | None
    entropy: float | None
    entries: int | None
    head: tuple[ShownEntry, ...]
    tail: float | None
    tail_count: int | None
    tail_tokens: tuple[str, ...]


@dataclass(frozen=True)
class RecordPage:
    """Records ``start`` to ``start + len(records)`` of the ``count`` of one sequence.

    ``text`` holds a text for each token from position ``text_start`` to the last one that is said
    on the page; ``document_starts`` are those of its positions where a document begins.
    ``texts_known``: the cache has a token map. ``entropy_of`` is that of ``Codec.entropy_of``.
    """

    sequence: int
    sequences: int
    split: str
    profile: str
    texts_known: bool
    entropy_of: str
    start: int
    count: int
    text_start: int
    text: tuple[str, ...]
    document_starts: tuple[int, ...]
    records: tuple[ShownRecord, ...]


def read_page(
    opened: Cache, texts: TokenTexts | None, sequence: int, start: int, limit: int
) -> RecordPage:
    """Read records ``start`` to ``start + limit`` of a sequence, as far as it has them.

    Raises ``IndexError`` for a sequence that the cache does not have, and as ``Cache.read`` does.
    """
    if not 0 <= sequence < len(opened):
        raise IndexError(f"sequence {sequence} of {len(opened)}")
    row = range(sequence, sequence + 1)
    tokens_1L, starts_1L, mask_1L = opened.read_columns(row, PER_SEQUENCE).values()
    places_N = np.flatnonzero(mask_1L[0])
    shown = range(min(start, len(places_N)), min(start + limit, len(places_N)))
    name: NameToken = texts.get_text if texts is not None else lambda token_id: ""
    tokens = tokens_1L[0].tolist()
    rules = opened.codec.rules
    if rules.sampled:
        # The ids of a sequence are coded together, so it is decoded whole.
        columns = opened.read(row)[1].slice(shown.start, shown.stop)
    else:
        columns = Records(opened.read_columns(row, ("known", "entropy", *rules.shown), shown))
    places = places_N[shown.start : shown.stop].tolist()
    records = (
        _show(opened.codec, columns, number, tokens[place : place + 2], place, name)
        for number, place in enumerate(places)
    )
    # A page without a record shows the beginning of the sequence.
    first, last = (max(places[0] - CONTEXT, 0), places[-1] + 2) if places else (0, CONTEXT)
    return RecordPage(
        sequence=sequence,
        sequences=len(opened),
        split="train" if sequence in opened.train else "validation",
        profile=opened.codec.profile,
        texts_known=texts is not None,
        entropy_of=opened.codec.entropy_of,
        start=shown.start,
        count=len(places_N),
        text_start=first,
        text=tuple(map(name, tokens[first:last])),
        document_starts=tuple((first + np.flatnonzero(starts_1L[0, first:last])).tolist()),
        records=tuple(records),
    )


def _show(
    codec: Codec, records: Records, number: int, pair: list[int], place: int, name: NameToken
) -> ShownRecord:
    token, said = pair
    entropy = int(records["entropy"][number])
    known = int(records["known"][number, 0])
    entries = codec.rules.list_entries(codec, records, number, said)
    ids_E, p_E = (np.empty(0, np.int64), np.empty(0)) if entries is None else entries
    top_E = np.argsort(-p_E, kind="stable")[:SHOWN_ENTRIES]
    tails: NDArray[Any] | None = None
    if codec.rules.sampled:
        # The tokens that were drawn from the tail, (M,).
        cut = slice(*compute_offsets(records["tail_count"])[number : number + 2].tolist())
        tails = records["tail_ids"][cut]
    return ShownRecord(
        position=place,
        token=name(token),
        said=name(said),
        said_id=said,
        said_probability=None if known == UNKNOWN else _round(float(np.exp(-KNOWN_STEP * known))),
        entropy=None if entropy == UNKNOWN_ENTROPY else entropy * ENTROPY_STEP,
        entries=None if entries is None else len(ids_E),
        head=tuple(
            ShownEntry(token_id, name(token_id), _round(p))
            for token_id, p in zip(ids_E[top_E].tolist(), p_E[top_E].tolist(), strict=True)
        ),
        tail=(None if entries is None else _round(codec.rules.measure_rest(records, number, p_E))),
        tail_count=None if tails is None else len(tails),
        tail_tokens=() if tails is None else tuple(map(name, tails[:SHOWN_ENTRIES].tolist())),
    )


def _round(probability: float) -> float:
    return float(f"{probability:.{_DIGITS}g}")
