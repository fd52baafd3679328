"""The tokens of a vocabulary by their ids, whole: it shows where two tokenizers number otherwise.

A cache holds it as arrays (``cache.store.Cache.token_map``).

V   vocabulary size      E   tokens, in the order of their ids      B   bytes of their text
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby, pairwise
from operator import itemgetter

import numpy as np

from cache.layout import Arrays
from cache.records import compute_offsets
from cache.store import Cache

#: Tokens are text, but nothing stops a tokenizer from holding half of a surrogate pair.
_ERRORS = "surrogatepass"
#: Differences that a message names.
_NAMED = 5


@dataclass(frozen=True)
class TokenDifference:
    """An id with other tokens in two maps; a map without a token of that id has none."""

    token_id: int
    expected: tuple[str, ...]
    got: tuple[str, ...]

    def __str__(self) -> str:
        return f"id {self.token_id}: expected {_name(self.expected)}, got {_name(self.got)}"


@dataclass(frozen=True)
class TokenMap:
    """The tokens of each id below V; usually one, but an id may have none, or several.

    ``rules`` are those of its tokenizer (``kd.models.tokenizing.rules``); empty = not known.
    """

    tokens: dict[int, tuple[str, ...]]
    rules: dict[str, str] = field(default_factory=dict)

    @classmethod
    def of(
        cls, vocabulary: Mapping[str, int], size: int, rules: dict[str, str] | None = None
    ) -> TokenMap:
        """Make the map of the ids below ``size``, V, from a map of tokens to ids."""
        pairs = sorted((number, token) for token, number in vocabulary.items() if number < size)
        return cls.from_pairs(pairs, rules)

    @classmethod
    def from_pairs(
        cls, pairs: Iterable[tuple[int, str]], rules: dict[str, str] | None = None
    ) -> TokenMap:
        """Make the map of ``pairs`` of an id and a token, in the order of the ids."""
        groups = groupby(pairs, key=itemgetter(0))
        tokens = {number: tuple(token for _, token in held) for number, held in groups}
        return cls(tokens, rules or {})

    def list_pairs(self) -> list[tuple[int, str]]:
        """List each id with each of its tokens; the inverse of ``from_pairs``."""
        return [(number, token) for number, held in self.tokens.items() for token in held]

    def to_arrays(self) -> Arrays:
        """Return ids (E,), lengths in bytes (E,) and the text (B,) of all tokens, as UTF-8.

        Also the rules as JSON, where they are known.
        """
        pairs = self.list_pairs()
        texts = [token.encode(errors=_ERRORS) for _, token in pairs]
        rules = {"rules": np.frombuffer(json.dumps(self.rules).encode(), np.uint8)}
        return {
            "ids": np.array([number for number, _ in pairs], np.uint32),
            "lengths": np.array([len(text) for text in texts], np.uint32),
            "text": np.frombuffer(b"".join(texts), np.uint8),
            **(rules if self.rules else {}),
        }

    @classmethod
    def from_arrays(cls, arrays: Arrays) -> TokenMap:
        """Read the map from its arrays; the inverse of ``to_arrays``."""
        text = arrays["text"].tobytes()
        cuts = compute_offsets(arrays["lengths"]).tolist()
        tokens = [text[start:stop].decode(errors=_ERRORS) for start, stop in pairwise(cuts)]
        rules = json.loads(arrays["rules"].tobytes()) if "rules" in arrays else {}
        return cls.from_pairs(zip(arrays["ids"].tolist(), tokens, strict=True), rules)

    @classmethod
    def of_cache(cls, store: Cache) -> TokenMap | None:
        """Read the map of a cache; None if it was written before caches kept one."""
        arrays = store.token_map()
        return None if arrays is None else cls.from_arrays(arrays)

    def find_differences(self, other: TokenMap) -> list[TokenDifference]:
        """List the ids with other tokens in ``other``, in order."""
        return [
            TokenDifference(number, ours, theirs)
            for number in sorted(self.tokens.keys() | other.tokens.keys())
            if (ours := self.tokens.get(number, ())) != (theirs := other.tokens.get(number, ()))
        ]


def describe_differences(differences: Sequence[TokenDifference]) -> str:
    """Return a sentence that counts the differing ids and names the first five."""
    first = "; ".join(map(str, differences[:_NAMED]))
    more = "; ..." if len(differences) > _NAMED else ""
    return f"{len(differences):,} id(s) with other tokens: {first}{more}."


def _name(tokens: tuple[str, ...]) -> str:
    return " and ".join(map(repr, tokens)) or "no token"
