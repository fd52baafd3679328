"""Read the distillation columns of axolotl, from JSON Lines or Parquet.

    logprobs                            for each token a list [{"token": "token_id:N", "logprob":
                                        x}, ...]
    target_token_ids + logprobs         version 2: ids and log-probabilities as lists of lists
    target_token_ids, target_logprobs,  a prepared dataset: ids and log-probabilities for every
                                        token of
    target_mask                         ``input_ids``; entries with ``target_mask`` 0 are padding
    input_ids, or messages              the tokens, or a chat that the tokenizer's template renders
    labels                              optional; -100 where a token is not a target

Alignment (axolotl, integrations/kd/chat_template.py): the lists belong to the *last* tokens of the
row. Item p, counted from the row's first token, is the distribution that token p was drawn from: it
is masked by ``labels[p]``, and contains a server's log-probabilities of its own answer. So it
becomes the record of position p - 1. ``ahead=True`` reads item p as the distribution of token p + 1
instead, like axolotl's trainer since version 0.10, which no longer shifts (its online teacher
shifts the items itself). The data shows which of the two a dataset follows; ``kd.exchange.rows``
checks it. Where a template has written tokens after an answer that a server made, the lists belong
to earlier ones: ``_find_place`` finds them.

Log-probabilities must have temperature 1. A prepared dataset has another temperature already
applied, and its entries are scaled to sum to 1; it can be imported only as it is.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from kd.errors import DataError
from kd.exchange.foreign_files import read_dict_rows
from kd.exchange.prompt_logprobs import parse_token_id
from kd.exchange.rows import Row, pad_records, require_token_id, score_tokens

#: Tokens that a template may write after an answer.
_AFTER = 64
#: The most that all other places may be as probable as the one that is believed.
_DOUBT = 1e-3
#: The ids of a token's entries, and their log-probabilities.
Pairs = tuple[list[int], list[float]]


def read_rows(path: Path, tokenizer: Any, ahead: bool = False) -> Iterator[Row]:
    """Yield the rows of one file; ``tokenizer`` renders chats.

    Raises ``DataError`` for a row of another form.
    """
    for where, cells in read_dict_rows(path):
        try:
            if (tokens := cells.get("input_ids")) is None:
                chat = cells["messages"]
                tokens = tokenizer.apply_chat_template(chat, tokenize=True, return_dict=False)
            tokens = [require_token_id(token) for token in tokens]
            row = _make_row(where, tokens, _read_items(cells), cells.get("labels"), ahead)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            detail = f"{where} does not have axolotl's columns: {type(error).__name__}: {error}"
            remedy = "Give logprobs, or target_token_ids and logprobs or target_logprobs."
            raise DataError(detail, remedy) from error
        yield row


def _read_items(cells: Mapping[str, Any]) -> list[Pairs]:
    """Return the entries of each token that has an item in the row; an item may be empty."""
    if "target_logprobs" in cells:
        masks = cells.get("target_mask") or [None] * len(cells["target_logprobs"])
        triples = zip(cells["target_token_ids"], cells["target_logprobs"], masks, strict=True)
        return [_drop_masked(ids, logprobs, mask) for ids, logprobs, mask in triples]
    if "target_token_ids" in cells:
        pairs = zip(cells["target_token_ids"], cells["logprobs"], strict=True)
        return [_drop_masked(ids or (), logprobs or (), None) for ids, logprobs in pairs]
    return [
        (
            [parse_token_id(each["token"]) for each in item or ()],
            [float(each["logprob"]) for each in item or ()],
        )
        for item in cells["logprobs"]
    ]


def _drop_masked(ids: Any, logprobs: Any, mask: Any) -> Pairs:
    kept = [
        (require_token_id(t), float(lp))
        for t, lp, flag in zip(ids, logprobs, [1] * len(ids) if mask is None else mask, strict=True)
        if flag and lp != -np.inf
    ]
    return [t for t, _ in kept], [lp for _, lp in kept]


def _find_place(where: str, tokens: list[int], items: list[Pairs]) -> int:
    """Return the number of the token that the first list is about, as the lists themselves show it.

    A template writes tokens after an answer that a server did not make. Raises ``DataError`` if
    there is no proof.
    """
    ids, logprobs = pad_records(items)
    expected = np.exp(logprobs) * np.where(np.isfinite(logprobs), logprobs, 0.0)
    last = len(tokens) - len(items) + 1
    places = range(max(1, last - _AFTER), last + 1)
    scores = []
    hits = []
    for place in places:
        own = np.asarray(tokens[place : place + len(items)], np.int64)
        there = np.isfinite(logprobs[: len(own)])
        scored = score_tokens(ids[: len(own)], logprobs[: len(own)], own)
        # The list of a token that is not there is as probable as it expects.
        scores.append(scored[there.any(axis=1)].sum() + expected[len(own) :].sum())
        hits.append(int(((ids[: len(own)] == own[:, None]) & there).sum()))
    best = int(np.argmax(scores))
    doubt = np.exp(np.asarray(scores) - scores[best]).sum() - 1
    if doubt > _DOUBT or hits[best] < np.exp(logprobs).sum() / 2:
        raise DataError(
            f"{where}: the {len(items)} lists of log-probabilities cannot be shown to belong to "
            f"certain ones of the {len(tokens)} tokens. From token {places[best]} on they fit best,"
            f" and {hits[best]} of them contain their token.",
            "Use the chat template of the server, or give input_ids with a list for each token.",
        )
    return places[best]


def _make_row(
    where: str, tokens: list[int], items: list[Pairs], labels: list[int] | None, ahead: bool
) -> Row:
    # The lists belong to the last tokens: those before have none.
    before = len(tokens) - len(items)
    if before < 0 or (labels is not None and len(labels) != len(tokens)):
        counts = f"{len(items)} lists of log-probabilities and {len(labels or tokens)} labels"
        remedy = "The lists belong to the last tokens: there must not be more of them than tokens."
        raise DataError(f"{where} has {len(tokens)} tokens, {counts}.", remedy)
    if before > 1:
        before = _find_place(where, tokens, items)
        ahead = False
    # An item is about the token of its own place or of the next. The first token is no target.
    about = [*(labels or [0] * len(tokens)), -100]
    places = [
        before + number
        for number, (ids, _) in enumerate(items)
        if ids and before + number + ahead > 0 and about[before + number + ahead] != -100
    ]
    records = [items[place - before] for place in places]
    # A record of position t is about token t + 1.
    positions = np.array(places, np.int64) - (not ahead)
    return Row.of(where, tokens, positions, records, np.full(len(places), np.nan))
