"""The text of single tokens, from the token map of a cache and without its tokenizer.

A token map holds tokens as the tokenizer's file does. Byte-level tokenizers (GPT-2, Llama 3, Qwen)
write each byte as one printable character; SentencePiece writes a space as U+2581 and a byte as
``<0x0A>``. Other tokens stand for themselves.
"""

from __future__ import annotations

import re

import numpy as np

from cache.layout import Arrays
from cache.records import compute_offsets

#: How a byte-level tokenizer writes a space, and how SentencePiece does.
_BYTE_SPACE = "\u0120"
_PIECE_SPACE = "\u2581"
_PIECE_BYTE = re.compile(r"<0x([0-9A-F]{2})>")
#: The bytes that the characters of a byte-level vocabulary stand for. Printable bytes of Latin-1
#: are themselves, the others follow from U+0100 on (Radford et al., GPT-2, ``bytes_to_unicode``).
_PRINTABLE = (*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100))
_OTHERS = sorted({*range(0x100)} - {*_PRINTABLE})
_BYTES = {chr(byte): byte for byte in _PRINTABLE} | {
    chr(0x100 + place): byte for place, byte in enumerate(_OTHERS)
}


class TokenTexts:
    """The text of each id; ``arrays`` are those of ``cache.store.Cache.token_map``."""

    def __init__(self, arrays: Arrays) -> None:
        self._ids = arrays["ids"]
        self._cuts = compute_offsets(arrays["lengths"])
        self._text = arrays["text"].tobytes()
        spaces = (_BYTE_SPACE, _PIECE_SPACE)
        byte_level, pieces = (self._text.count(space.encode()) for space in spaces)
        self._byte_level = byte_level > pieces
        self._pieces = pieces >= max(byte_level, 1)

    def get_text(self, token_id: int) -> str:
        """Return the text of a token; empty for an id without one.

        A byte that is no text alone becomes U+FFFD, as it does in a decoded text.
        """
        place = int(np.searchsorted(self._ids, token_id))
        if place == len(self._ids) or self._ids[place] != token_id:
            return ""
        raw = self._text[self._cuts[place] : self._cuts[place + 1]].decode(errors="replace")
        if self._byte_level and all(character in _BYTES for character in raw):
            return bytes(_BYTES[character] for character in raw).decode(errors="replace")
        if self._pieces:
            if found := _PIECE_BYTE.fullmatch(raw):
                return bytes([int(found[1], 16)]).decode(errors="replace")
            return raw.replace(_PIECE_SPACE, " ")
        return raw
