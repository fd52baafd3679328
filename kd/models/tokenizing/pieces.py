"""The bytes that the tokens of a vocabulary stand for, by their names alone.

So a cache can teach another tokenizer without that of its teacher: it holds the name of each token.
Byte-level vocabularies write each byte as a character of GPT-2's alphabet, those of SentencePiece a
space as U+2581 and a byte as <0x0A>. A special token has a name and no bytes.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from transformers import PreTrainedTokenizerBase
from transformers.convert_slow_tokenizer import bytes_to_unicode

from cache.manifest import TokenizerProbe
from cache.store import Cache
from kd.errors import ModelError
from kd.models.tokenizers import PROBE_TEXTS, encode_probes, get_special_tokens
from kd.models.tokenizing.token_map import TokenMap

_SPACE = "\u2581"
_BYTE = re.compile(r"<0x([0-9A-F]{2})>")
#: Names of tokens that are special in every tokenizer which has them.
_SPECIAL = re.compile(
    r"<\|[^|]*\|>|<｜[^｜]*｜>|</?s>|<(unk|pad|bos|eos|mask|(start|end)_of_turn)>"
)
#: The byte of each character of GPT-2's alphabet.
_ALPHABET = {character: byte for byte, character in bytes_to_unicode().items()}
#: Characters of the alphabet that are tokens of a vocabulary which uses it, at least.
_LEAST_LETTERS = 128
#: The share of the tokens that are written in one way, from which on a vocabulary is of that kind.
_TELLING_SHARE = 0.02


@dataclass(frozen=True, eq=False)
class TokenPieces:
    """The bytes of the ordinary tokens, and the names of the special ones, by their ids below V.

    ``roles`` are the ids of bos, eos and pad. ``prefixed``: a text begins with a space that it does
    not have.
    """

    size: int
    bytes_of: dict[int, bytes]
    special: dict[int, str]
    roles: dict[str, int]
    prefixed: bool = False

    @classmethod
    def of_names(
        cls,
        names: Mapping[int, str],
        size: int,
        roles: dict[str, int],
        special: Iterable[int] = (),
        probes: Sequence[TokenizerProbe] = (),
    ) -> TokenPieces:
        """Read the names of the ids. Raises ``ModelError`` where they tell no bytes.

        The text of the first of ``probes`` begins with a letter.
        """
        known = {*roles.values(), *special}
        apart = {
            number: name
            for number, name in names.items()
            if number < size and (number in known or _SPECIAL.fullmatch(name))
        }
        plain = {i: name for i, name in names.items() if i < size and i not in apart}
        enough = _TELLING_SHARE * len(plain)
        marked = sum(_SPACE in name for name in plain.values()) > enough
        letters = sum(name in _ALPHABET for name in plain.values())
        ends = sum(name[:2] == "##" and name[2:].isalpha() for name in plain.values())
        if not marked and (letters < _LEAST_LETTERS or ends > enough):
            raise ModelError(
                "the names of a tokenizer's tokens do not tell their bytes: it is neither "
                "byte-level nor made by SentencePiece.",
                "Use a student whose tokenizer is that of the teacher, or one of these two kinds.",
            )
        read = _read_marked if marked else _read_byte_level
        bytes_of = {number: read(name) for number, name in plain.items()}
        ids = probes[0].ids if probes else ()
        first = next((bytes_of[number] for number in ids if number in bytes_of), b"")
        return cls(size, bytes_of, apart, roles, first.startswith(b" "))

    @classmethod
    def of_tokenizer(cls, tokenizer: PreTrainedTokenizerBase, size: int) -> TokenPieces:
        """Read the tokens of ``tokenizer`` below ``size``, V."""
        names = {number: name for name, number in tokenizer.get_vocab().items()}
        added = tokenizer.added_tokens_decoder
        special = [*tokenizer.all_special_ids, *(each for each in added if added[each].special)]
        probes = encode_probes(tokenizer, PROBE_TEXTS[:1])
        return cls.of_names(names, size, get_special_tokens(tokenizer), special, probes)

    @classmethod
    def of_cache(cls, store: Cache) -> TokenPieces:
        """Read the tokens of a cache. Raises ``ModelError`` for one that does not hold them."""
        tokens = TokenMap.of_cache(store)
        if tokens is None:
            raise ModelError(
                "the cache was captured before caches kept their tokens, so that its records "
                "cannot teach another tokenizer.",
                "Capture it again.",
            )
        names = {number: each[0] for number, each in tokens.tokens.items()}
        known = store.manifest.provenance
        size = store.identity.tokenizer.vocabulary_size
        return cls.of_names(names, size, known.special_tokens, probes=known.probes)

    @cached_property
    def id_of(self) -> dict[bytes, int]:
        """The id of each ordinary token's bytes; of several, the one with the plainest name."""
        # The tokens <0x41> and A have the same byte. Those of SentencePiece with plain names have
        # the larger ids, and come last.
        return {text: number for number, text in sorted(self.bytes_of.items()) if text}

    @cached_property
    def _longest(self) -> int:
        return max(map(len, self.id_of), default=0)

    def find_longest(self, text: bytes) -> int | None:
        """Find the longest token with which ``text`` begins."""
        ends = range(min(len(text), self._longest), 0, -1)
        return next((self.id_of[text[:end]] for end in ends if text[:end] in self.id_of), None)

    @cached_property
    def names(self) -> dict[str, int]:
        """The id of each special token's name."""
        return {name: number for number, name in self.special.items()}

    def find_special(self, number: int, other: TokenPieces) -> int | None:
        """Find the special token of ``other`` that ``number`` is: of its name, or of its role."""
        if (found := other.names.get(self.special[number])) is not None:
            return found
        roles = (role for role in ("bos", "eos") if self.roles.get(role) == number)
        return next((other.roles[role] for role in roles if role in other.roles), None)


def _read_byte_level(name: str) -> bytes:
    if all(character in _ALPHABET for character in name):
        return bytes(_ALPHABET[character] for character in name)
    return name.encode(errors="surrogatepass")  # a token that was added is written as it is


def _read_marked(name: str) -> bytes:
    if found := _BYTE.fullmatch(name):
        return bytes([int(found[1], 16)])
    return name.replace(_SPACE, " ").encode(errors="surrogatepass")
