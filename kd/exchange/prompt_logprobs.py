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
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from kd.errors import DataError
from kd.exchange.files import json_rows
from kd.exchange.rows import Row, one_document, rectangle, whole

_TOKENS = ("prompt_token_ids", "input_ids")
_ASK = "Ask the server for prompt_logprobs and return_token_ids."
_LOWEST = -9999.0
Entries = dict[int, float]


def rows(path: Path) -> Iterator[Row]:
    """The rows of one JSON Lines file, one for each choice; raises ``DataError`` naming the line."""
    for where, answer in json_rows(path):
        for number, choice in enumerate(_choices(answer, where)):
            yield _choice({**answer, **choice}, f"{where}, choice {number}" if number else where)


def _choices(answer: dict[str, Any], where: str) -> list[dict[str, Any]]:
    """What an answer gives under ``choices``, or one that adds nothing to its top; raises ``DataError``."""
    choices = answer.get("choices") or [{}]
    if isinstance(choices, list) and all(isinstance(choice, dict) for choice in choices):
        return choices
    raise DataError(f"{where}: choices must be a list of JSON objects, but got {str(choices)[:40]}.", _ASK)


def _choice(choice: dict[str, Any], where: str) -> Row:
    try:
        if choice.get("prompt_logprobs") is not None:
            tokens = [whole(t) for t in next(choice[name] for name in _TOKENS if choice.get(name) is not None)]
            return row_of(where, tokens, _items(choice["prompt_logprobs"], _entries, where))
        echoed = choice["logprobs"]
        tokens = [token_id(token) for token in echoed["tokens"]]
        items = _items(echoed["top_logprobs"], _echoed_entries, where)
        return row_of(where, tokens, _with_own(items, tokens, echoed["token_logprobs"]))
    except StopIteration:
        raise DataError(f"{where} has prompt_logprobs, but none of {', '.join(_TOKENS)}.", _ASK) from None
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise _no_answer(where, error) from error


def _no_answer(where: str, error: Exception) -> DataError:
    return DataError(f"{where} is no answer with prompt_logprobs: {type(error).__name__}: {error}", _ASK)


def _items(items: list[Any], read: Callable[[dict[str, Any]], Entries], where: str) -> list[Entries | None]:
    """What each token's item says; raises ``DataError`` naming the first one that cannot be read."""
    found: list[Entries | None] = []
    for place, item in enumerate(items):
        try:
            found.append(None if item is None else read(item))
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise _no_answer(f"{where}, token {place}", error) from error
    return found


def token_id(token: str) -> int:
    """N of ``token_id:N``; raises ``ValueError`` for anything else, such as the token's text."""
    name, _, number = token.partition(":")
    if name != "token_id":
        raise ValueError(f"expected a token as token_id:N, got {token!r}")
    return whole(int(number))


def _entries(item: dict[str, Any]) -> Entries:
    """{id: log-probability} of one item; a bare number in place of {logprob: ...} is taken too."""
    return {whole(int(t)): _number(each["logprob"] if isinstance(each, dict) else each) for t, each in item.items()}


def _echoed_entries(item: dict[str, Any]) -> Entries:
    """The same of completions."""
    return {token_id(t): _number(logprob) for t, logprob in item.items()}


def _number(logprob: Any) -> float:
    """A log-probability; vLLM writes -9999 for -inf, which JSON has not. Raises ``ValueError`` for NaN and +inf."""
    value = float(logprob)
    if not value < math.inf:
        raise ValueError(f"expected a log-probability, got {logprob!r}")
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
