"""axolotl's distillation columns, as JSON Lines or Parquet.

    logprobs                            a list for each token of [{"token": "token_id:N", "logprob": x}, ...]
    target_token_ids + logprobs         v2: ids and log-probabilities as lists of lists
    target_token_ids, target_logprobs,  a prepared dataset: the same for every token of ``input_ids``; entries with
    target_mask                         ``target_mask`` 0 are padding
    input_ids, or messages              the tokens, or a chat that the tokenizer's template renders
    labels                              -100 where a token is not a target, if there is such a column

Alignment (axolotl, integrations/kd/chat_template.py): the lists belong to the *last* tokens of the row, and item p,
counted from the row's first token, is the distribution that token p was drawn from: it is masked by ``labels[p]``, and
made of a server's log-probabilities of its own answer. So it becomes the record of position p - 1. ``ahead=True`` reads
item p as the distribution of token p + 1 instead, as axolotl's trainer does since 0.10, which no longer shifts (its
online teacher shifts the items itself). Which of the two a dataset follows shows in the data, and is checked.

Log-probabilities must be of temperature 1. A prepared dataset has the temperature of its configuration applied, and its
entries are scaled to sum to 1: it can only be imported as that.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from kd.errors import DataError
from kd.exchange.files import dict_rows
from kd.exchange.prompt_logprobs import token_id
from kd.exchange.rows import Row, one_document, rectangle, whole

Pairs = tuple[list[int], list[float]]


def rows(path: Path, tokenizer: Any, ahead: bool = False) -> Iterator[Row]:
    """The rows of one file; ``tokenizer`` renders chats. Raises ``DataError`` naming the row that does not fit."""
    for where, cells in dict_rows(path):
        try:
            row = _row(where, _tokens(cells, tokenizer), _items(cells), cells.get("labels"), ahead)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            detail = f"{where} has not axolotl's columns: {type(error).__name__}: {error}"
            raise DataError(detail, "Give logprobs, or target_token_ids and logprobs or target_logprobs.") from error
        yield row


def _tokens(cells: dict[str, Any], tokenizer: Any) -> list[int]:
    if cells.get("input_ids") is not None:
        return [whole(token) for token in cells["input_ids"]]
    return list(tokenizer.apply_chat_template(cells["messages"], tokenize=True, return_dict=False))


def _items(cells: dict[str, Any]) -> list[Pairs]:
    """Ids and log-probabilities of each token that the row has any for; empty where it has none."""
    if "target_logprobs" in cells:
        masks = cells.get("target_mask") or [None] * len(cells["target_logprobs"])
        triples = zip(cells["target_token_ids"], cells["target_logprobs"], masks, strict=True)
        return [_unmasked(ids, logprobs, mask) for ids, logprobs, mask in triples]
    if "target_token_ids" in cells:
        pairs = zip(cells["target_token_ids"], cells["logprobs"], strict=True)
        return [_unmasked(ids or (), logprobs or (), None) for ids, logprobs in pairs]
    return [
        ([token_id(each["token"]) for each in item or ()], [float(each["logprob"]) for each in item or ()])
        for item in cells["logprobs"]
    ]


def _unmasked(ids: Any, logprobs: Any, mask: Any) -> Pairs:
    flags = [1] * len(ids) if mask is None else mask
    kept = [(whole(t), float(lp)) for t, lp, flag in zip(ids, logprobs, flags, strict=True) if flag and lp != -np.inf]
    return [t for t, _ in kept], [lp for _, lp in kept]


def _is_target(place: int, labels: list[int] | None) -> bool:
    """Whether the token at ``place``, which a list is about, follows another and is not left out."""
    return place > 0 and (labels is None or (place < len(labels) and labels[place] != -100))


def _row(where: str, tokens: list[int], items: list[Pairs], labels: list[int] | None, ahead: bool) -> Row:
    before = len(tokens) - len(items)
    if before < 0 or (labels is not None and len(labels) != len(tokens)):
        counts = f"{len(items)} lists of log-probabilities and {len(labels or tokens)} labels"
        detail = f"{where} has {len(tokens)} tokens, {counts}."
        raise DataError(detail, "The lists belong to the last tokens: there must not be more of them than tokens.")
    places = [
        before + number for number, (ids, _) in enumerate(items) if ids and _is_target(before + number + ahead, labels)
    ]
    ids, logprobs = rectangle([items[place - before] for place in places])
    positions = np.array(places, np.int64) - (not ahead)
    gold = np.full(len(places), np.nan)
    return Row(where, np.asarray(tokens, np.int64), one_document(len(tokens)), positions, ids, logprobs, gold)
