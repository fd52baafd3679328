"""A long text -> token ids, piece by piece, the same ids as of the whole text.

A tokenizer needs some 175 bytes for each character that it reads at once. So a long text is cut at
places where its ids cannot change (seams.py), a few pieces are tokenized at once in the threads of
the library, and only their ids are kept. Where a tokenizer has no such places, the text stays
whole.

Shapes: N tokens.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from operator import itemgetter
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kd.progress import SILENT, Monitor, Notice
from kd.text.chats import TOKENIZER_OPTIONS
from kd.text.reading.notes import TextNotes
from kd.text.seams import CONTEXT, NoSeamError, Seams, find_seams
from kd.text.stored.places import BEGINNING, TextPlace

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
_NOTHING = np.zeros(0, np.uint32)
_ENDS = "end tokens in plain text, at which documents end"
_ENDS_REMEDY = 'Set data.document_separator to "" where they are no ends.'
_SPECIAL = "special tokens in plain text, learned as such"
_SPECIAL_REMEDY = (
    "Take them out of the text; if one ends each document, set data.document_separator to it."
)


class TextPart(NamedTuple):
    """The ids (N,) of a part of a document, and whether it is the first part."""

    begins: bool
    ids: NDArray[np.uint32]


class Piece(NamedTuple):
    """A piece of a document's text, and whether it is the first and the last one."""

    text: str
    begins: bool
    ends: bool


class TextEncoder:
    """Encodes texts of any length with one tokenizer; ``monitor`` receives its warnings.

    A document ends at each ``separator`` in a text, unless that is empty, and at the text's end; it
    gets the tokenizer's end token there if it has not got it. ``notes`` receives which tokens with
    a meaning of their own stand in the texts. ``why_whole`` says why texts are not cut; None if
    they are.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        monitor: Monitor = SILENT,
        separator: str = "",
        notes: TextNotes | None = None,
    ) -> None:
        self.tokenizer = tokenizer
        self.separator = separator
        self.why_whole: str | None = None
        self._monitor = monitor
        self._notes = TextNotes() if notes is None else notes
        self._seams: Seams | None = None
        self._before = self._after = _NOTHING
        self._is_special = np.zeros(1, bool)
        try:
            self._before, self._after = map(_to_array, _find_special_ids(tokenizer))
            self._is_special = _mark_special_ids(tokenizer)
            self._seams = find_seams(tokenizer)
        except NoSeamError as error:
            self.why_whole = str(error)

    def encode(
        self, chunks: Iterable[str], where: str = "a text", place: TextPlace = BEGINNING
    ) -> Iterator[list[TextPart]]:
        """Yield the documents of the text that ``chunks`` make up, in batches of their parts.

        The batches before that of ``place`` are cut but not tokenized. Text of white space alone
        has no ids. ``where`` names the text in warnings.
        """
        texts = SeparatedTexts(chunks, self.separator)
        noted = number = 0
        for number, batch in enumerate(_group(_mark_ends(map(self._cut, texts)))):
            self._monitor.check("while reading the text")
            at = place._replace(batch=number, before=0, tokens=0)
            noted = self._note_separators(texts.ended, noted, where, at)
            if number < place.batch:
                continue
            for piece in batch:
                self._warn_if_long(piece.text, where)
            encoded = zip(batch, self.encode_pieces([each.text for each in batch]), strict=True)
            yield self.finish([(piece, ids) for piece, ids in encoded], where, at)
        at = place._replace(batch=number + 1, before=0, tokens=0)
        self._note_separators(texts.ended, noted, where, at)

    def _cut(self, chunks: Iterable[str]) -> Iterator[str]:
        """Cut one document into pieces; it stays whole where the tokenizer has no seams."""
        found = _skip_blank(chunks)
        if self._seams is not None:
            yield from cut_text(found, self._seams, PIECE_CHARACTERS)
        elif text := "".join(found):
            yield text

    def finish(
        self, pieces: list[tuple[Piece, NDArray[np.uint32]]], where: str, place: TextPlace
    ) -> list[TextPart]:
        """Return the parts of documents that ``pieces`` with their ids (N,) make, with their ends.

        What the tokenizer puts before and after every text is not put where the text has it.
        """
        parts = list[TextPart]()
        for piece, ids in pieces:
            before = self._before if piece.begins else _NOTHING
            after = self._after if piece.ends else _NOTHING
            if len(before) and np.array_equal(ids[: len(before)], before):
                before = _NOTHING
            if len(after) and np.array_equal(ids[-len(after) :], after):
                after = _NOTHING
            whole = np.concatenate([before, ids, after])
            end = self.tokenizer.eos_token_id
            if piece.ends and end is not None and len(whole) and whole[-1] != end:
                whole = np.append(whole, np.uint32(end))
            parts.append(TextPart(piece.begins, whole))
        self._note_special(pieces, where, place)
        return parts

    def _note_special(
        self, pieces: list[tuple[Piece, NDArray[np.uint32]]], where: str, place: TextPlace
    ) -> None:
        """Note the special tokens within texts; those at their ends do what they are for."""
        count, first = 0, 0
        for piece, ids in pieces:
            found = ids[self._is_special.take(ids, mode="clip")]
            if len(found) == 0:
                continue
            begin = piece.begins and found[0] == ids[0] and ids[0] in self._before
            end = piece.ends and found[-1] == ids[-1] and ids[-1] == self.tokenizer.eos_token_id
            first = first if count else int(found[0])
            count += len(found) - int(begin) - int(end)
        if count > 0:
            token = self.tokenizer.convert_ids_to_tokens(first)
            example = f"{token!r} in {where}"
            self._notes.add(Notice(_SPECIAL, count, example, _SPECIAL_REMEDY), place)

    def _note_separators(self, ended: int, noted: int, where: str, place: TextPlace) -> int:
        if ended > noted:
            example = f"{self.separator!r} in {where}"
            self._notes.add(Notice(_ENDS, ended - noted, example, _ENDS_REMEDY), place)
        return ended

    def encode_short(self, texts: list[str]) -> list[NDArray[np.uint32]] | None:
        """Encode ``texts`` of at most ``PIECE_CHARACTERS`` characters each, at once; ids (N,) each.

        They are without what ``finish`` adds. None where a text has to be read alone.
        """
        return None if self._seams is None else self.encode_pieces(texts)

    def _warn_if_long(self, text: str, place: str) -> None:
        if len(text) > LONG_CHARACTERS:
            reason = "it has no white space at which to cut it"
            if self._seams is None:
                reason = f"the tokenizer cannot be cut: {self.why_whole}"
            self._monitor.emit(
                "warning",
                message=f"{place}: {len(text):,} characters are tokenized at once, which takes "
                f"some {len(text) * BYTES_PER_CHARACTER / 2**30:.1f} GiB: {reason}. Split the text "
                "into several files or rows.",
            )

    def encode_pieces(self, pieces: list[str]) -> list[NDArray[np.uint32]]:
        """Encode ``pieces`` in the threads of the library; nothing but their ids is made."""
        if self._seams is None:
            return [self._encode_whole(text) for text in pieces]
        library = self.tokenizer.backend_tokenizer
        # Others may have called the tokenizer with padding since the last batch.
        library.no_truncation()
        library.no_padding()
        encoded = library.encode_batch_fast(pieces, add_special_tokens=False)
        return [_to_array(each.ids) for each in encoded]

    def _encode_whole(self, text: str) -> NDArray[np.uint32]:
        ids = _to_array(self.tokenizer(text, **TOKENIZER_OPTIONS)["input_ids"])
        return ids[len(self._before) : len(ids) - len(self._after)]


class SeparatedTexts:
    """The texts between separators, each as chunks, which are read before the next text.

    ``ended``: how many separators have come so far.
    """

    def __init__(self, chunks: Iterable[str], separator: str) -> None:
        self.ended = 0
        self._chunks = chunks
        self._separator = separator

    def __iter__(self) -> Iterator[Iterator[str]]:
        for _, group in itertools.groupby(self._number(), itemgetter(0)):
            yield map(itemgetter(1), group)

    def _number(self) -> Iterator[tuple[int, str]]:
        """Yield each chunk with the number of its text; one that holds a separator is split."""
        if not self._separator:
            yield from ((0, chunk) for chunk in self._chunks)
            return
        held = ""
        for chunk in self._chunks:
            *whole, held = (held + chunk).split(self._separator)
            for text in whole:
                yield self.ended, text
                self.ended += 1
            # A separator may begin in the last characters.
            sure = max(len(held) - len(self._separator) + 1, 0)
            yield self.ended, held[:sure]
            held = held[sure:]
        yield self.ended, held


def _mark_ends(texts: Iterable[Iterator[str]]) -> Iterator[Piece]:
    """Yield the pieces of each text; the first and the last one are marked."""
    for pieces in texts:
        held = next(pieces, None)
        begins = True
        for piece in pieces:
            yield Piece(held or "", begins, False)
            held, begins = piece, False
        if held is not None:
            yield Piece(held, begins, True)


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


def _group(pieces: Iterable[Piece]) -> Iterator[list[Piece]]:
    """Group ``pieces`` into batches of at least ``BATCH_CHARACTERS``."""
    batch = list[Piece]()
    characters = 0
    for piece in pieces:
        batch.append(piece)
        characters += len(piece.text)
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


def _mark_special_ids(tokenizer: PreTrainedTokenizerBase) -> NDArray[np.bool_]:
    """Mark the ids of tokens with a meaning of their own; the last one, of no id, is not marked.

    Unknown text has the id of the unknown token without that being written in it.
    """
    added = tokenizer.added_tokens_decoder.items()
    ids = {*tokenizer.all_special_ids, *(number for number, token in added if token.special)}
    ids -= {tokenizer.unk_token_id}
    marked = np.zeros(max(ids, default=0) + 2, bool)
    marked[list(ids)] = True
    return marked


def _to_array(ids: Any) -> NDArray[np.uint32]:
    return np.asarray(ids, np.uint32)
