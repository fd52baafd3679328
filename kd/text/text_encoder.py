"""A long text -> token ids, piece by piece, the same ids as of the whole text.

A tokenizer needs some 175 bytes for each character that it reads at once. So a long text is cut at
places where its ids cannot change (cut_points.py), a few pieces are tokenized at once in the
threads of the library, and only their ids are kept. If a tokenizer has no such places, the text
stays whole.

Shapes: N tokens.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from operator import itemgetter
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kd.progress import SILENT, Monitor, Notice
from kd.text.chat_tokens import TOKENIZER_OPTIONS
from kd.text.cut_points import CONTEXT, CutPoints, NoCutError, find_cut_points
from kd.text.reading.notes import TextNotes
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
        self._cuts: CutPoints | None = None
        self._before = self._after = _NOTHING
        self._is_special = np.zeros(1, bool)
        try:
            ends = _find_special_ids(tokenizer)
            self._before, self._after = (np.asarray(ids, np.uint32) for ids in ends)
            self._is_special = _mark_special_ids(tokenizer)
            self._cuts = find_cut_points(tokenizer)
        except NoCutError as error:
            self.why_whole = str(error)

    def encode(
        self, chunks: Iterable[str], where: str = "a text", place: TextPlace = BEGINNING
    ) -> Iterator[list[TextPart]]:
        """Yield the documents of the text that ``chunks`` make up, in batches of their parts.

        The batches before that of ``place`` are cut but not tokenized. ``where`` names the text in
        warnings.
        """
        pieces = _mark_ends(map(self._cut, separate_texts(chunks, self.separator)))
        for number, batch in enumerate(_group(pieces)):
            self._monitor.check("while reading the text")
            if number < place.batch:
                continue
            at = place._replace(batch=number, before=0, tokens=0)
            for piece in batch:
                self._warn_if_long(piece.text, where)
            ids = self.encode_pieces([each.text for each in batch])
            if ended := sum(each.begins for each in batch) - (number == 0):
                example = f"{self.separator!r} in {where}"
                self._notes.add(Notice(_ENDS, ended, example, _ENDS_REMEDY), at)
            yield self.finish(list(zip(batch, ids, strict=True)), where, at)

    def _cut(self, chunks: Iterator[str]) -> Iterator[str]:
        """Cut one document into pieces; it stays whole if the tokenizer has no cut points."""
        if self._cuts is None:
            return iter(["".join(chunks)])
        return cut_text(chunks, self._cuts, PIECE_CHARACTERS)

    def finish(
        self, pieces: list[tuple[Piece, NDArray[np.uint32]]], where: str, place: TextPlace
    ) -> list[TextPart]:
        """Return the parts of documents that ``pieces`` with their ids (N,) make, with their ends.

        What the tokenizer puts before and after every text is not put where the text has it. A text
        of only white space has no part: it is one piece, since no cut lies in white space.
        """
        said = [(piece, ids) for piece, ids in pieces if piece.text.strip()]
        self._note_special(said, where, place)
        return [TextPart(piece.begins, self._add_ends(piece, ids)) for piece, ids in said]

    def _add_ends(self, piece: Piece, ids: NDArray[np.uint32]) -> NDArray[np.uint32]:
        before = self._before if piece.begins else _NOTHING
        after = self._after if piece.ends else _NOTHING
        if np.array_equal(ids[: len(before)], before):
            before = _NOTHING
        if len(after) and np.array_equal(ids[-len(after) :], after):
            after = _NOTHING
        whole = np.concatenate([before, ids, after])
        end = self.tokenizer.eos_token_id
        if piece.ends and end is not None and len(whole) and whole[-1] != end:
            whole = np.append(whole, np.uint32(end))
        return whole

    def _note_special(
        self, pieces: list[tuple[Piece, NDArray[np.uint32]]], where: str, place: TextPlace
    ) -> None:
        """Note the special tokens within texts; those at their ends do what they are for."""
        found = list[int]()
        for piece, ids in pieces:
            special = ids[self._is_special.take(ids, mode="clip")].tolist()
            if special and piece.begins and special[0] == ids[0] and ids[0] in self._before:
                del special[0]
            if special and piece.ends and special[-1] == ids[-1] == self.tokenizer.eos_token_id:
                del special[-1]
            found += special
        if found:
            example = f"{self.tokenizer.convert_ids_to_tokens(found[0])!r} in {where}"
            self._notes.add(Notice(_SPECIAL, len(found), example, _SPECIAL_REMEDY), place)

    def encode_beginning(self, text: str) -> tuple[NDArray[np.uint32], NDArray[np.uint32]]:
        """Return the ids before every text, and the ids (N,) of one that another text goes on.

        Those of the text have the first ones before them, and no end.
        """
        (ids,) = self.encode_pieces([text])
        return self._before, np.concatenate([self._before, ids])

    def encode_short(self, texts: list[str]) -> list[NDArray[np.uint32]] | None:
        """Encode ``texts`` of at most ``PIECE_CHARACTERS`` characters each, at once; ids (N,) each.

        They are without what ``finish`` adds. None if each text has to be read by itself.
        """
        return None if self._cuts is None else self.encode_pieces(texts)

    def _warn_if_long(self, text: str, place: str) -> None:
        if len(text) > LONG_CHARACTERS:
            reason = "it has no white space at which to cut it"
            if self._cuts is None:
                reason = f"the tokenizer cannot be cut: {self.why_whole}"
            self._monitor.emit(
                "warning",
                message=f"{place}: {len(text):,} characters are tokenized at once, which takes "
                f"some {len(text) * BYTES_PER_CHARACTER / 2**30:.1f} GiB: {reason}. Split the text "
                "into several files or rows.",
            )

    def encode_pieces(self, pieces: list[str]) -> list[NDArray[np.uint32]]:
        """Encode ``pieces`` in the threads of the library; nothing but their ids is made."""
        if self._cuts is None:
            found = [self.tokenizer(text, **TOKENIZER_OPTIONS)["input_ids"] for text in pieces]
            begin, end = len(self._before), len(self._after)
            return [np.asarray(ids[begin : len(ids) - end], np.uint32) for ids in found]
        library = self.tokenizer.backend_tokenizer
        # Others may have called the tokenizer with padding since the last batch.
        library.no_truncation()
        library.no_padding()
        encoded = library.encode_batch_fast(pieces, add_special_tokens=False)
        return [np.asarray(each.ids, np.uint32) for each in encoded]


def separate_texts(chunks: Iterable[str], separator: str) -> Iterator[Iterator[str]]:
    """Yield the texts between separators, each as chunks, which are read before the next text."""
    for _, group in itertools.groupby(_number_texts(chunks, separator), itemgetter(0)):
        yield map(itemgetter(1), group)


def _number_texts(chunks: Iterable[str], separator: str) -> Iterator[tuple[int, str]]:
    """Yield each chunk with the number of its text; one that holds a separator is split."""
    number = 0
    held = ""
    for chunk in chunks:
        *whole, held = (held + chunk).split(separator) if separator else [held + chunk]
        for text in whole:
            yield number, text
            number += 1
        # A separator may begin in the last characters.
        sure = max(len(held) - max(len(separator) - 1, 0), 0)
        yield number, held[:sure]
        held = held[sure:]
    yield number, held


def _mark_ends(texts: Iterable[Iterator[str]]) -> Iterator[Piece]:
    """Yield the pieces of each text; the first and the last one are marked."""
    for pieces in texts:
        held = next(pieces, "")
        begins = True
        for piece in pieces:
            yield Piece(held, begins, False)
            held = piece
            begins = False
        yield Piece(held, begins, True)


def cut_text(chunks: Iterable[str], cut_points: CutPoints, size: int) -> Iterator[str]:
    """Cut the text that ``chunks`` make up into pieces of ``size`` characters or a little more."""
    held = ""
    searched = 0  # no cut lies in held[size:searched]
    for chunk in chunks:
        held += chunk
        begin = 0
        while True:
            place = cut_points.find(held, max(begin + size, searched))
            if place is None:
                break
            yield held[begin:place]
            begin = place + cut_points.drops_space
            searched = 0
        held = held[begin:]
        searched = max(len(held) - CONTEXT - 2, 0)
    if held:
        yield held


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

    Raises ``NoCutError`` if they cannot be told from those of the text.
    """
    plain = list(tokenizer("a", add_special_tokens=False, **TOKENIZER_OPTIONS)["input_ids"])
    whole = list(tokenizer("a", **TOKENIZER_OPTIONS)["input_ids"])
    size = len(plain)
    places = range(len(whole) - size + 1)
    found = [place for place in places if whole[place : place + size] == plain]
    if size == 0 or len(found) != 1:
        raise NoCutError("its special tokens cannot be told from those of a text")
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
