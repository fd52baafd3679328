"""Some records of one sequence, decoded and with the text of their tokens, for people to read.

N   records of the page      E   head entries of N records      V   vocabulary
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cache.codec import ENTROPY_STEP, KNOWN_STEP, TOP_STEP, UNKNOWN, UNKNOWN_ENTROPY, Codec
from cache.inspection import decode_masses
from cache.profiles import PROFILES
from cache.records import Records, compute_offsets
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
    """A token whose probability the record stores. ``text`` is empty where it is not known."""

    id: int
    text: str
    probability: float


@dataclass(frozen=True)
class ShownRecord:
    """One record: what the teacher expected after the token at ``position`` of the sequence.

    ``said`` is the next token of the text, and ``said_probability`` the teacher's for it. ``head``
    are the most probable of the ``entries`` stored probabilities, the said token's too. ``tail``
    is the mass outside all of them: ``tail_count`` tokens were drawn from it, of which
    ``tail_tokens`` are the first. ``entropy`` is in nats. What a record does not hold is None.
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
    ``texts_known``: the cache has a token map.
    """

    sequence: int
    sequences: int
    split: str
    profile: str
    texts_known: bool
    start: int
    count: int
    text_start: int
    text: tuple[str, ...]
    document_starts: tuple[int, ...]
    records: tuple[ShownRecord, ...]

    def to_json(self) -> dict[str, Any]:
        """Return the page as plain JSON values."""
        return asdict(self)


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
    name = _make_namer(texts)
    tokens = tokens_1L[0].tolist()
    columns = _read_columns(opened, row, shown)
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
        start=shown.start,
        count=len(places_N),
        text_start=first,
        text=tuple(map(name, tokens[first:last])),
        document_starts=tuple((first + np.flatnonzero(starts_1L[0, first:last])).tolist()),
        records=tuple(records),
    )


def _make_namer(texts: TokenTexts | None) -> NameToken:
    return (lambda token_id: "") if texts is None else texts.get_text


def _read_columns(opened: Cache, row: range, shown: range) -> Records:
    """Read the columns of the records ``shown`` of one sequence."""
    codec = opened.codec
    if PROFILES[codec.profile].sampled:
        # The ids of a sequence are coded together, so it is decoded whole.
        return opened.read(row)[1].slice(shown.start, shown.stop)
    own = {"topk": ("top_ids", "top_logprobs", "residual"), "dense": ("logprobs",)}
    names = ("known", "entropy", *own.get(codec.profile, ()))
    return Records(opened.read_columns(row, names, shown))


def _show(
    codec: Codec, records: Records, number: int, pair: list[int], place: int, name: NameToken
) -> ShownRecord:
    token, said = pair
    entropy = int(records["entropy"][number])
    known = int(records["known"][number, 0])
    ids_E, p_E = _list_entries(codec, records, number, said)
    top_E = np.argsort(-p_E, kind="stable")[:SHOWN_ENTRIES]
    tails = _list_tail(codec, records, number)
    return ShownRecord(
        position=place,
        token=name(token),
        said=name(said),
        said_id=said,
        said_probability=None if known == UNKNOWN else _round(float(np.exp(-KNOWN_STEP * known))),
        entropy=None if entropy == UNKNOWN_ENTROPY else entropy * ENTROPY_STEP,
        entries=None if codec.profile == "hidden" else len(ids_E),
        head=tuple(
            ShownEntry(token_id, name(token_id), _round(p))
            for token_id, p in zip(ids_E[top_E].tolist(), p_E[top_E].tolist(), strict=True)
        ),
        tail=_measure_tail(codec, records, number, p_E),
        tail_count=None if tails is None else len(tails),
        tail_tokens=() if tails is None else tuple(map(name, tails[:SHOWN_ENTRIES].tolist())),
    )


def _list_entries(
    codec: Codec, records: Records, number: int, said: int
) -> tuple[NDArray[Any], NDArray[np.float64]]:
    """List the tokens of a record whose probability it stores, each once: ids and p, (E,)."""
    if codec.profile == "topk":
        codes = records["top_logprobs"][number]
        kept = codes != UNKNOWN
        return records["top_ids"][number][kept].astype(np.int64), decode_masses(
            TOP_STEP, codes[kept]
        )
    if codec.profile == "dense":
        logp_V = records["logprobs"][number].astype(np.float64)
        return np.arange(len(logp_V)), np.exp(logp_V)
    if codec.profile == "hidden":
        return np.empty(0, np.int64), np.empty(0)
    ids = [said, *codec.always_keep]
    codes = records["known"][number]
    # A said token that is always kept is stored twice.
    kept = (codes != UNKNOWN) & (np.arange(len(ids)) == [ids.index(each) for each in ids])
    head = slice(*compute_offsets(records["head_count"])[number : number + 2].tolist())
    return (
        np.concatenate([np.array(ids)[kept], records["head_ids"][head].astype(np.int64)]),
        np.concatenate(
            [
                decode_masses(KNOWN_STEP, codes[kept]),
                decode_masses(codec.head_step, records["head_logprobs"][head]),
            ]
        ),
    )


def _list_tail(codec: Codec, records: Records, number: int) -> NDArray[Any] | None:
    """List the tokens that were drawn from the tail, (M,); None in a profile that draws none."""
    if not PROFILES[codec.profile].sampled:
        return None
    cut = slice(*compute_offsets(records["tail_count"])[number : number + 2].tolist())
    drawn: NDArray[Any] = records["tail_ids"][cut]
    return drawn


def _measure_tail(
    codec: Codec, records: Records, number: int, p_E: NDArray[np.float64]
) -> float | None:
    """Measure the mass outside the entries; rounding can take it a little below 0."""
    if codec.profile == "hidden":
        return None
    if codec.profile == "topk":
        code = int(records["residual"][number])
        return 0.0 if code == UNKNOWN else _round(float(np.exp(-TOP_STEP * code)))
    return _round(max(1.0 - float(p_E.sum()), 0.0))


def _round(probability: float) -> float:
    return float(f"{probability:.{_DIGITS}g}")
