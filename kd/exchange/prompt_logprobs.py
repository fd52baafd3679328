"""Read answers of vLLM, or of another server with OpenAI's completions API, one JSON object per
line.

These fields are read, at the top of an object or in its ``choices``:

    prompt_token_ids, prompt_logprobs   vLLM, for requests with ``prompt_logprobs: K,
                                        return_token_ids: true``. A list with one item per token:
                                        null for the first, then {id: {logprob, rank, ...}}
    logprobs                            completions with ``echo: true, logprobs: K``: {tokens,
                                        token_logprobs, top_logprobs}, with tokens as "token_id:N"
                                        (vLLM: ``return_tokens_as_token_ids: true``)

Item t is the distribution *of* token t, so it becomes the record of position t - 1. It has K
entries, and one more if token t is not among the K most probable. An item with fewer entries, or
without token t, belongs to another text and is refused. ``prompt_token_ids`` may also be called
``input_ids``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from kd.errors import DataError
from kd.exchange.foreign_files import read_named_rows
from kd.exchange.rows import Row, require_token_id

_TOKENS = ("prompt_token_ids", "input_ids")
_ASK = "Ask the server for prompt_logprobs and return_token_ids."
#: The number that vLLM writes for -inf.
_LOWEST = -9999.0
#: The entries of one item: log-probabilities by token id.
TokenLogprobs = dict[int, float]


def read_rows(path: Path) -> Iterator[Row]:
    """Yield the rows of one JSON Lines file, one for each choice.

    Raises ``DataError`` with the line.
    """
    for where, answer in read_named_rows(path):
        choices = answer.get("choices") or [{}]
        if not isinstance(choices, list) or not all(isinstance(each, dict) for each in choices):
            got = str(choices)[:40]
            detail = f"{where}: choices must be a list of JSON objects, but got {got}."
            raise DataError(detail, _ASK)
        for number, choice in enumerate(choices):
            place = f"{where}, choice {number}" if number else where
            yield _read_choice({**answer, **choice}, place)


def _read_choice(choice: Mapping[str, Any], where: str) -> Row:
    try:
        if choice.get("prompt_logprobs") is not None:
            given = next(choice[name] for name in _TOKENS if choice.get(name) is not None)
            items = _read_items(choice["prompt_logprobs"], _read_entries, where)
            return make_row(where, [require_token_id(token) for token in given], items)
        echoed = choice["logprobs"]
        tokens = [parse_token_id(token) for token in echoed["tokens"]]
        items = _read_items(echoed["top_logprobs"], _read_echoed_entries, where)
        # OpenAI's API returns each token's own log-probability apart from the most probable ones.
        whole = [
            None if item is None or lp is None else {**item, token: _parse_logprob(lp)}
            for item, token, lp in zip(items, tokens, echoed["token_logprobs"], strict=True)
        ]
        return make_row(where, tokens, whole)
    except StopIteration:
        detail = f"{where} has prompt_logprobs, but none of {', '.join(_TOKENS)}."
        raise DataError(detail, _ASK) from None
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise _make_answer_error(where, error) from error


def _make_answer_error(where: str, error: Exception) -> DataError:
    detail = f"{where} is not an answer with prompt_logprobs: {type(error).__name__}: {error}"
    return DataError(detail, _ASK)


def _read_items(
    items: list[Any], read: Callable[[Mapping[str, Any]], TokenLogprobs], where: str
) -> list[TokenLogprobs | None]:
    """Read the item of each token; raises ``DataError`` for the first one that cannot be read."""
    found: list[TokenLogprobs | None] = []
    for place, item in enumerate(items):
        try:
            found.append(None if item is None else read(item))
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise _make_answer_error(f"{where}, token {place}", error) from error
    return found


def parse_token_id(token: str) -> int:
    """Return N of ``token_id:N``.

    Raises ``ValueError`` for anything else, such as the token's text.
    """
    name, _, number = token.partition(":")
    if name != "token_id":
        raise ValueError(f"expected a token as token_id:N, got {token!r}")
    return require_token_id(int(number))


def _read_entries(item: Mapping[str, Any]) -> TokenLogprobs:
    """Read one item of prompt_logprobs; an entry may be {logprob: ...} or a bare number."""
    bare = {t: each["logprob"] if isinstance(each, dict) else each for t, each in item.items()}
    return {require_token_id(int(t)): _parse_logprob(logprob) for t, logprob in bare.items()}


def _read_echoed_entries(item: Mapping[str, Any]) -> TokenLogprobs:
    """Read one item of top_logprobs in a completions answer."""
    return {parse_token_id(t): _parse_logprob(logprob) for t, logprob in item.items()}


def _parse_logprob(logprob: Any) -> float:
    """Return a log-probability; -9999 means -inf, which JSON does not have.

    Raises ``ValueError`` for NaN and +inf.
    """
    value = float(logprob)
    if not value < math.inf:
        raise ValueError(f"expected a log-probability, got {logprob!r}")
    return value if value > _LOWEST else -math.inf


def make_row(where: str, tokens: Sequence[int], items: Sequence[TokenLogprobs | None]) -> Row:
    """Build the row of ``tokens`` (L,) from one item per token.

    Raises ``DataError`` for the first item that is missing, too short, or about another token.
    """
    if len(items) != len(tokens):
        raise DataError(
            f"{where}: {len(items)} items of prompt_logprobs for {len(tokens)} tokens.", _ASK
        )
    records = []
    gold = []
    k = min((len(item) for item in items[1:] if item), default=1)
    # Nothing predicts the first token, so its item is skipped.
    for place, (token, item) in enumerate(zip(tokens[1:], items[1:], strict=True), 1):
        if not item or len(item) > k + 1:
            detail = (
                f"{where}, token {place}: {len(item or ())} entries, "
                f"but others of this row have {k} or {k + 1}."
            )
            raise DataError(detail, "An answer must be complete: ask the server again.")
        if token not in item:
            detail = f"{where}, token {place}: id {token} is not among its own log-probabilities."
            raise DataError(detail, "The log-probabilities belong to another text, or are shifted.")
        # The token's own entry is left out unless it is one of the most probable.
        pairs = sorted(item.items(), key=lambda pair: -pair[1])[:k]
        records.append(([token for token, _ in pairs], [logprob for _, logprob in pairs]))
        gold.append(item[token])
    return Row.of(where, tokens, np.arange(len(gold)), records, np.array(gold, np.float64))
