"""Answers of a vLLM server, or of another that speaks OpenAI's completions, one JSON object a line.

Read are, at the top or in ``choices``:

    prompt_token_ids, prompt_logprobs   vLLM: asked for with ``prompt_logprobs: k, return_token_ids: true``. A list with
                                        an item for each token: null for the first, then {id: {logprob, rank, ...}}
    logprobs                            completions with ``echo: true, logprobs: k``: {tokens, token_logprobs,
                                        top_logprobs}, of which tokens are ids as "token_id:N" (vLLM:
                                        ``return_tokens_as_token_ids: true``)

Item t is the distribution *of* token t, so it becomes the record of position t - 1. It holds k entries, and one more
where token t is not among the k most probable; a smaller number, or a token t that is missing, is refused: it belongs
to another text. ``prompt_token_ids`` may also be called ``input_ids``.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from kd.errors import DataError
from kd.exchange.files import json_rows
from kd.exchange.rows import Row, one_document, rectangle

_TOKENS = ("prompt_token_ids", "input_ids")
_ASK = "Ask the server for prompt_logprobs and return_token_ids."
_LOWEST = -9999.0
Entries = dict[int, float]


def rows(path: Path) -> Iterator[Row]:
    """The rows of one JSON Lines file, one for each choice; raises ``DataError`` naming the line."""
    for where, answer in json_rows(path):
        for number, choice in enumerate(answer.get("choices") or [{}]):
            yield _choice({**answer, **choice}, f"{where}, choice {number}" if number else where)


def _choice(choice: dict[str, Any], where: str) -> Row:
    try:
        if choice.get("prompt_logprobs") is not None:
            tokens = next(choice[name] for name in _TOKENS if choice.get(name) is not None)
            return row_of(where, tokens, [_entries(item) for item in choice["prompt_logprobs"]])
        echoed = choice["logprobs"]
        tokens = [token_id(token) for token in echoed["tokens"]]
        items = [
            None if item is None else {token_id(t): _number(lp) for t, lp in item.items()}
            for item in echoed["top_logprobs"]
        ]
        return row_of(where, tokens, _with_own(items, tokens, echoed["token_logprobs"]))
    except StopIteration:
        raise DataError(f"{where} has prompt_logprobs, but none of {', '.join(_TOKENS)}.", _ASK) from None
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise DataError(f"{where} is no answer with prompt_logprobs: {type(error).__name__}: {error}", _ASK) from error


def token_id(token: str) -> int:
    """N of ``token_id:N``; raises ``ValueError`` for anything else, such as the token's text."""
    name, _, number = token.partition(":")
    if name != "token_id":
        raise ValueError(f"expected a token as token_id:N, got {token!r}")
    return int(number)


def _entries(item: dict[str, Any] | None) -> Entries | None:
    """{id: log-probability} of one item; a bare number in place of {logprob: ...} is taken too."""
    if item is None:
        return None
    return {int(t): _number(each["logprob"] if isinstance(each, dict) else each) for t, each in item.items()}


def _number(logprob: Any) -> float:
    """A log-probability; vLLM writes -9999 for -inf, which JSON has not."""
    value = float(logprob)
    return value if value > _LOWEST else -math.inf


def _with_own(items: list[Entries | None], tokens: Sequence[int], own: Sequence[float | None]) -> list[Entries | None]:
    """Add each token's own log-probability, which OpenAI gives apart from the most probable ones."""
    pairs = zip(items, tokens, own, strict=True)
    return [None if item is None or lp is None else {**item, t: _number(lp)} for item, t, lp in pairs]


def row_of(where: str, tokens: Sequence[int], items: Sequence[Entries | None]) -> Row:
    """The row of ``tokens`` (L,) and what the server says of each, an item a token.

    Raises ``DataError`` naming the first item that is missing, short, or about another token.
    """
    if len(items) != len(tokens):
        raise DataError(f"{where}: {len(items)} items of prompt_logprobs for {len(tokens)} tokens.", _ASK)
    records = []
    k = min((len(item) for item in items[1:] if item), default=1)
    for place, (token, item) in enumerate(zip(tokens[1:], items[1:], strict=True), 1):
        if not item or len(item) > k + 1:
            detail = f"{where}, token {place}: {len(item or ())} entries, where others of this row have {k} or {k + 1}."
            raise DataError(detail, "An answer must be whole: ask the server again.")
        if token not in item:
            detail = f"{where}, token {place}: id {token} is not among its own log-probabilities."
            raise DataError(detail, "The log-probabilities belong to another text, or are shifted.")
        records.append(_most_probable(item, k))
    ids, logprobs = rectangle(records)
    gold = np.array([item[token] for token, item in zip(tokens[1:], items[1:], strict=True) if item], np.float64)
    return Row(
        where, np.asarray(tokens, np.int64), one_document(len(tokens)), np.arange(len(gold)), ids, logprobs, gold
    )


def _most_probable(item: Entries, k: int) -> tuple[list[int], list[float]]:
    """The first k, ids and log-probabilities: without the token's own where that is not one of them."""
    pairs = sorted(item.items(), key=lambda pair: -pair[1])[:k]
    return [token for token, _ in pairs], [logprob for _, logprob in pairs]
