"""Texts and chats -> token ids, and which of them are targets."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from cache.errors import PotstillError
from kd.config.data import DataConfig
from kd.errors import DataError
from kd.progress import SILENT, Monitor
from kd.text.chat.chat import Chat, Completion
from kd.text.chats import (
    TOKENIZER_OPTIONS,
    EncodedChat,
    NoteRow,
    encode_chats,
    encode_row,
    explain_untokenized,
)
from kd.text.packing import BLOCK_SEQUENCES, Document
from kd.text.pieces import BATCH_CHARACTERS, PIECE_CHARACTERS, Piece, TextEncoder, TextPart
from kd.text.reading.contents import TextFile
from kd.text.reading.notes import TextNotes
from kd.text.sources import FoundDocument
from kd.text.stored.places import TextPlace

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

#: Short texts that are tokenized at once, at most.
_TEXTS_AT_ONCE = 1024
#: Tokens on both sides of one that is refused, which the error shows.
_SHOWN = 8


def encode_documents(
    documents: Iterable[FoundDocument],
    tokenizer: PreTrainedTokenizerBase,
    config: DataConfig,
    size: int | None = None,
    monitor: Monitor = SILENT,
    notes: TextNotes | None = None,
) -> Iterator[Document]:
    """Tokenize each document; a plain text gets the tokenizer's end-of-sequence token at its end.

    A plain text that holds that token, or ``data.document_separator``, ends there, so that it
    becomes several documents. A long text becomes several documents, each of which continues the
    one before. Documents of a single token are dropped, because they have no target. Of a document
    whose place is not its beginning only the rest is yielded. Raises ``DataError`` for one that
    cannot be tokenized, or that holds an id which is not below ``size``, V. ``notes`` receives what
    was found in texts and chats.
    """
    notes = TextNotes() if notes is None else notes
    encoder = TextEncoder(tokenizer, monitor, choose_separator(config, tokenizer), notes)
    for group in _group_short_documents(documents, encoder.separator):
        encoded = _encode_together(group, encoder, config, notes)
        for found, known in zip(group, encoded, strict=True):
            try:
                yield from _encode_document(found, known, encoder, config, size, notes)
            except PotstillError:
                raise
            except Exception as error:  # half a surrogate pair raises TypeError
                raise explain_untokenized(found.where, error) from error


def choose_separator(config: DataConfig, tokenizer: PreTrainedTokenizerBase) -> str:
    """Choose what ends a document within a plain text; nothing if nothing does."""
    if config.document_separator is not None:
        return config.document_separator
    end = tokenizer.eos_token
    if not isinstance(end, str):
        return ""
    ids = tokenizer(end, add_special_tokens=False, **TOKENIZER_OPTIONS)["input_ids"]
    return end if tokenizer.eos_token_id in ids else ""


def _group_short_documents(
    documents: Iterable[FoundDocument], separator: str
) -> Iterator[list[FoundDocument]]:
    """Group short texts, or chats, that follow each other; every other document is alone.

    The groups grow, so that a stream of which little is wanted is read little further.
    """
    group = list[FoundDocument]()
    characters = 0
    most = 1
    for found in documents:
        length = _measure(found, separator)
        if group and (length is None or type(found.content) is not type(group[0].content)):
            yield group
            group, characters = [], 0
        if length is None:
            yield [found]
            continue
        group.append(found)
        characters += length
        if len(group) >= most or characters >= BATCH_CHARACTERS:
            yield group
            group, characters = [], 0
            most = min(2 * most, _TEXTS_AT_ONCE)
    if group:
        yield group


def _measure(found: FoundDocument, separator: str) -> int | None:
    """Return the characters of a short text or a chat; None of a document that is read alone."""
    content = found.content
    if isinstance(content, Chat):
        return content.count_characters()
    if not isinstance(content, str) or len(content) > PIECE_CHARACTERS:
        return None
    return None if separator and separator in content else len(content)


def _encode_together(
    group: list[FoundDocument], encoder: TextEncoder, config: DataConfig, notes: TextNotes
) -> Sequence[NDArray[np.uint32] | list[EncodedChat] | None]:
    """Tokenize a group in the threads of the library; None for a document that is read alone."""
    alone = [None] * len(group)
    if len(group) == 1:
        return alone
    contents = [found.content for found in group]
    try:
        if isinstance(contents[0], Chat):
            places = [found.where for found in group]
            answers_only = config.assistant_only_loss
            receivers = [_note_at(found, notes) for found in group]
            together = encode_chats(contents, places, encoder.tokenizer, answers_only, receivers)
            return together or alone
        return encoder.encode_short(contents) or alone
    except Exception:  # alone, the document that is at fault is found
        return alone


def _note_at(found: FoundDocument, notes: TextNotes) -> NoteRow:
    """Return what counts the notices of a document by its place."""
    return lambda notice: notes.add(notice, found.place)


def _encode_document(
    found: FoundDocument,
    known: NDArray[np.uint32] | list[EncodedChat] | None,
    encoder: TextEncoder,
    config: DataConfig,
    size: int | None,
    notes: TextNotes,
) -> Iterator[Document]:
    """Make the documents of one that was found; ``known`` is what its group was tokenized to."""
    tokenizer = encoder.tokenizer
    for part in _encode_parts(found, known, encoder, config, notes):
        if size is not None:
            _require_known_ids(part.ids, part.place.tokens, found.where, size, tokenizer)
        if len(part) > (1 if part.begins else 0):
            yield part


def _encode_parts(
    found: FoundDocument,
    known: NDArray[np.uint32] | list[EncodedChat] | None,
    encoder: TextEncoder,
    config: DataConfig,
    notes: TextNotes,
) -> Iterator[Document]:
    where, content, place = found
    tokenizer = encoder.tokenizer
    if isinstance(content, Chat | Completion):
        texts = known if isinstance(known, list) else encode_row(found, tokenizer, config, notes)
        # The texts of a chat are counted as the batches of a long text are.
        for number, each in enumerate(texts[place.batch :], place.batch):
            yield _take_rest(*each, place)
            place = place._replace(batch=number + 1, tokens=0)
    else:
        batches: Iterable[list[TextPart]] = ()
        if isinstance(known, np.ndarray):
            piece = (Piece(content, begins=True, ends=True), known)
            batches = [encoder.finish([piece] if content.strip() else [], where, place)]
        else:
            chunks = content.read_chunks() if isinstance(content, TextFile) else [content]
            batches = encoder.encode(chunks, where, place)
        yield from _cut_into_parts(batches, config, place)


def _take_rest(ids: np.ndarray, trained: np.ndarray | None, place: TextPlace) -> Document:
    """Make the document of all ids of a row, and return what ``place`` leaves of it."""
    skip = place.tokens
    rest = None if trained is None else trained[skip:]
    return Document(ids[skip:], rest, begins=skip == 0, place=place)


def _cut_into_parts(
    batches: Iterable[list[TextPart]], config: DataConfig, start: TextPlace
) -> Iterator[Document]:
    """Join the parts of each document of a text; a long one becomes several documents.

    They have a whole number of sequences, and the last one the rest. ``batches`` begin with that
    of ``start``, whose ids before ``start`` are left out.
    """
    enough = BLOCK_SEQUENCES * config.sequence_length
    held = list[NDArray[np.uint32]]()
    places = list[TextPlace]()  # of the batches that the held ids are from
    tokens = 0  # held
    done = start.tokens
    end = start.before  # of the part before
    begins = False
    for number, parts in enumerate(batches, start.batch):
        places.append(start._replace(batch=number, before=end))
        for part in parts:
            if part.begins and tokens:
                yield Document(np.concatenate(held), begins=begins, place=_find_place(places, done))
                done += tokens
                held, tokens = [], 0
            skipped = max(done + tokens - end, 0)
            begins = part.begins and skipped == 0 if tokens == 0 else begins
            end += len(part.ids)
            held.append(part.ids[skipped:])
            tokens += len(held[-1])
            if tokens > enough:
                joined = np.concatenate(held)
                whole = (tokens - 1) // config.sequence_length * config.sequence_length
                yield Document(joined[:whole], begins=begins, place=_find_place(places, done))
                held, begins = [joined[whole:].copy()], False
                tokens -= whole
                done += whole
    if tokens:
        yield Document(np.concatenate(held), begins=begins, place=_find_place(places, done))


def _find_place(begins: list[TextPlace], done: int) -> TextPlace:
    """Return the place after ``done`` tokens; drop the beginnings of batches before it."""
    while len(begins) > 1 and begins[1].before <= done:
        begins.pop(0)
    return begins[0]._replace(tokens=done)


def _require_known_ids(
    ids: np.ndarray, begin: int, place: str, size: int, tokenizer: PreTrainedTokenizerBase
) -> None:
    """Raise ``DataError`` that names the first of ``ids`` (N,) which is not below ``size``.

    ``begin`` tokens of the same document come before them.
    """
    unknown = np.flatnonzero(ids >= size)
    for first in unknown[:1].tolist():
        near = tokenizer.decode(ids[max(first - _SHOWN, 0) : first + _SHOWN].tolist())
        token = tokenizer.convert_ids_to_tokens(int(ids[first]))
        raise DataError(
            f"{place}, token {begin + first + 1}: {token!r} has the id {ids[first]}, but the model "
            f"knows the ids below {size} only. It stands in {near!r}.",
            "Remove it: no model of this job can read it.",
        )


def choose_pad_id(tokenizer: PreTrainedTokenizerBase, size: int | None = None) -> int:
    """Choose any id below ``size``: padding is a document of its own and has no target."""
    for candidate in (tokenizer.pad_token_id, tokenizer.eos_token_id):
        if candidate is not None and (size is None or candidate < size):
            return int(candidate)
    return 0
