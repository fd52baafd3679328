"""A long text -> token ids, piece by piece, the same ids as of the whole text.

A tokenizer needs some 175 bytes for each character that it reads at once. So a long text is cut at
places where its ids cannot change (seams.py), a few pieces are tokenized at once in the threads of
the library, and only their ids are kept. Where a tokenizer has no such places, the text stays
whole.

Shapes: N tokens.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from kd.progress import SILENT, Monitor
from kd.text.chats import TOKENIZER_OPTIONS
from kd.text.seams import CONTEXT, NoSeamError, Seams, find_seams

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

#: Least characters of a piece. Shorter pieces keep more cores busy, longer ones need fewer cuts.
PIECE_CHARACTERS = 2**14
#: Characters of the pieces that are tokenized at once.
BATCH_CHARACTERS = 2**18
#: A longer text that is tokenized at once is a warning.
LONG_CHARACTERS = 2**22
#: Bytes that a tokenizer takes for each character that it reads at once.
BYTES_PER_CHARACTER = 175


class TextEncoder:
    """Encodes texts of any length with one tokenizer; ``monitor`` receives its warnings.

    ``why_whole`` says why texts are not cut; None if they are.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, monitor: Monitor = SILENT) -> None:
        self.tokenizer = tokenizer
        self.why_whole: str | None = None
        self._monitor = monitor
        self._seams: Seams | None = None
        self._before: list[int] = []
        self._after: list[int] = []
        try:
            self._before, self._after = _find_special_ids(tokenizer)
            self._seams = find_seams(tokenizer)
        except NoSeamError as error:
            self.why_whole = str(error)

    def encode(
        self, chunks: Iterable[str], place: str = "a text", first: int = 0
    ) -> Iterator[NDArray[np.uint32]]:
        """Yield the ids of the text that ``chunks`` make up, in parts (N,): batches of pieces.

        The first ``first`` batches are cut but not tokenized. Text of white space alone has no ids.
        ``place`` names the text in warnings.
        """
        found = _skip_blank(chunks)
        if self._seams is None:
            text = "".join(found)
            self._warn_if_long(text, place, f"the tokenizer cannot be cut: {self.why_whole}")
            if text:
                yield np.asarray(self._encode_whole(text), np.uint32)
            return
        begun = False
        for number, batch in enumerate(_group(cut_text(found, self._seams, PIECE_CHARACTERS))):
            self._monitor.check("while reading the text")
            begun = True
            if number < first:
                continue
            for piece in batch:
                self._warn_if_long(piece, place, "it has no white space at which to cut it")
            before = [np.asarray(self._before, np.uint32)] if number == 0 else []
            yield np.concatenate([*before, *self._encode_pieces(batch)])
        if begun:
            yield np.asarray(self._after, np.uint32)

    def encode_short(self, texts: list[str]) -> list[NDArray[np.uint32]] | None:
        """Encode ``texts`` of at most ``PIECE_CHARACTERS`` characters each, at once; ids (N,) each.

        None where the tokenizer's special tokens cannot be told from those of a text.
        """
        if self._seams is None:
            return None
        before, after = (np.asarray(ids, np.uint32) for ids in (self._before, self._after))
        return [
            np.concatenate([before, ids, after]) if text.strip() else ids[:0]
            for text, ids in zip(texts, self._encode_pieces(texts), strict=True)
        ]

    def _warn_if_long(self, text: str, place: str, reason: str) -> None:
        if len(text) > LONG_CHARACTERS:
            self._monitor.emit(
                "warning",
                message=f"{place}: {len(text):,} characters are tokenized at once, which takes "
                f"some {len(text) * BYTES_PER_CHARACTER / 2**30:.1f} GiB: {reason}. Split the text "
                "into several files or rows.",
            )

    def _encode_whole(self, text: str) -> list[int]:
        return list(self.tokenizer(text, **TOKENIZER_OPTIONS)["input_ids"])

    def _encode_pieces(self, pieces: list[str]) -> list[NDArray[np.uint32]]:
        """Encode ``pieces`` in the threads of the library; nothing but their ids is made."""
        library = self.tokenizer.backend_tokenizer
        # Others may have called the tokenizer with padding since the last batch.
        library.no_truncation()
        library.no_padding()
        encoded = library.encode_batch_fast(pieces, add_special_tokens=False)
        return [np.asarray(each.ids, np.uint32) for each in encoded]


def cut_text(chunks: Iterable[str], seams: Seams, size: int) -> Iterator[str]:
    """Cut the text that ``chunks`` make up into pieces of ``size`` characters or a little more."""
    held = ""
    searched = 0  # no cut lies in held[size:searched]
    for chunk in chunks:
        held += chunk
        begin = 0
        while True:
            place = seams.find(held, max(begin + size, searched))
            if place is None:
                break
            yield held[begin:place]
            begin = place + seams.drops_space
            searched = 0
        held = held[begin:]
        searched = max(len(held) - CONTEXT - 2, 0)
    if held:
        yield held


def _skip_blank(chunks: Iterable[str]) -> Iterator[str]:
    """Pass the chunks on from the first that is not white space, with the white space before it."""
    blank = list[str]()
    seen = False
    for chunk in chunks:
        if seen:
            yield chunk
        elif chunk.strip():
            seen = True
            yield "".join([*blank, chunk])
        else:
            blank.append(chunk)


def _group(pieces: Iterable[str]) -> Iterator[list[str]]:
    """Group ``pieces`` into batches of at least ``BATCH_CHARACTERS``."""
    batch = list[str]()
    characters = 0
    for piece in pieces:
        batch.append(piece)
        characters += len(piece)
        if characters >= BATCH_CHARACTERS:
            yield batch
            batch = []
            characters = 0
    if batch:
        yield batch


def _find_special_ids(tokenizer: PreTrainedTokenizerBase) -> tuple[list[int], list[int]]:
    """Return the ids that the tokenizer puts before and after every text.

    Raises ``NoSeamError`` if they cannot be told from those of the text.
    """
    plain = list(tokenizer("a", add_special_tokens=False, **TOKENIZER_OPTIONS)["input_ids"])
    whole = list(tokenizer("a", **TOKENIZER_OPTIONS)["input_ids"])
    size = len(plain)
    found = [
        place for place in range(len(whole) - size + 1) if whole[place : place + size] == plain
    ]
    if size == 0 or len(found) != 1:
        raise NoSeamError("its special tokens cannot be told from those of a text")
    return whole[: found[0]], whole[found[0] + size :]
