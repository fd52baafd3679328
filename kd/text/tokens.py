"""Texts and chats -> token ids, and which of them are targets."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from cache.errors import PotstillError
from kd.config.data import DataConfig
from kd.errors import DataError
from kd.progress import SILENT, Monitor
from kd.text.chat.chat import Chat, Completion
from kd.text.chat_tokens import TOKENIZER_OPTIONS, EncodedChat, encode_chats, encode_completion
from kd.text.packing import BLOCK_SEQUENCES, Document
from kd.text.reading.contents import TextFile
from kd.text.reading.notes import TextNotes
from kd.text.sources import FoundDocument
from kd.text.stored.places import TextPlace
from kd.text.teacher_side.context import TeacherContext
from kd.text.teacher_side.prompts import match_prompts, require_room
from kd.text.teacher_side.sequences import TeacherPrompt
from kd.text.text_encoder import BATCH_CHARACTERS, PIECE_CHARACTERS, Piece, TextEncoder, TextPart

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

#: What a document was tokenized to in its group; None if it is read by itself.
Known = NDArray[np.uint32] | list[EncodedChat] | None

#: Short texts that are tokenized at once, at most.
_TEXTS_AT_ONCE = 1024
#: Tokens on both sides of one that is refused, which the error shows.
_SHOWN = 8


@dataclass(frozen=True)
class DocumentEncoder:
    """Makes token ids of documents; ``notes`` receives what is found in texts and chats.

    A plain text gets the tokenizer's end-of-sequence token at its end. One that holds that token,
    or ``data.document_separator``, ends there, so that it becomes several documents. A long text
    becomes several documents, each of which continues the one before. Documents of a single token
    are dropped, because they have no target. Of a document whose place is not its beginning only
    the rest is made. Raises ``DataError`` for one that cannot be tokenized, or that holds an id
    which is not below ``size``, V, or that the teacher cannot read in ``context``.
    """

    tokenizer: PreTrainedTokenizerBase
    config: DataConfig
    size: int | None = None
    monitor: Monitor = SILENT
    notes: TextNotes = field(default_factory=TextNotes)
    context: TeacherContext | None = None

    @cached_property
    def texts(self) -> TextEncoder:
        """The encoder of plain texts, which ends a document at the separator, if there is one."""
        separator = self.config.document_separator
        end = self.tokenizer.eos_token
        if separator is None and isinstance(end, str):
            ids = self.tokenizer(end, add_special_tokens=False, **TOKENIZER_OPTIONS)["input_ids"]
            separator = end if self.tokenizer.eos_token_id in ids else None
        return TextEncoder(self.tokenizer, self.monitor, separator or "", self.notes)

    def encode(self, documents: Iterable[FoundDocument]) -> Iterator[Document]:
        """Tokenize each document; short ones that follow each other are tokenized at once."""
        for group in _group_short_documents(documents, self.texts.separator):
            for found, known in zip(group, self._encode_together(group), strict=True):
                yield from self.encode_one(found, known)

    def encode_one(self, found: FoundDocument, known: Known = None) -> Iterator[Document]:
        """Tokenize a document; ``known`` is what it was tokenized to in its group."""
        try:
            for part in self._encode_parts(found, known):
                for read in (part,) if part.prompt is None else (part, part.as_teacher_reads()):
                    if self.size is not None:
                        _require_known_ids(read, found.where, self.size, self.tokenizer)
                if len(part) > (1 if part.begins else 0):
                    yield part
        except PotstillError:
            raise
        # A chat template may raise anything; half a surrogate pair raises TypeError.
        except Exception as error:
            detail = f"{found.where} cannot be tokenized: {type(error).__name__}: {error}"
            remedy = "Correct or remove it; messages need a tokenizer with a chat template."
            raise DataError(detail, remedy) from error

    def _encode_together(self, group: list[FoundDocument]) -> Sequence[Known]:
        """Tokenize a group in the threads of the library; None for a document read by itself."""
        apart = [None] * len(group)
        if len(group) == 1:
            return apart
        try:
            if isinstance(group[0].content, Chat):
                return self._encode_rows(group)
            return self.texts.encode_short([found.content for found in group]) or apart
        except Exception:  # read by itself, the document at fault is found
            return apart

    def _encode_rows(self, found: list[FoundDocument]) -> list[list[EncodedChat]]:
        """Tokenize the texts of chats, or those of prompts with their completions."""
        answers = self.config.assistant_only_loss
        if isinstance(found[0].content, Chat):
            return encode_chats(found, self.tokenizer, answers, self.notes)
        return [
            [encode_completion(each, self.tokenizer, not answers, self.notes)] for each in found
        ]

    def _make_documents(self, texts: list[EncodedChat], found: FoundDocument) -> list[Document]:
        """Make the document of each text of a row, with what the teacher reads before it."""
        if self.context is None:
            return [Document(*each) for each in texts]
        theirs = found._replace(
            where=f"{found.where}, as the teacher reads it", content=found.teacher
        )
        # What is worth noting of a row is noted of the student's side.
        (read,) = replace(self, notes=TextNotes())._encode_rows([theirs])
        prompts = match_prompts(texts, read, found.where, self.tokenizer)
        for (ids, _), prompt in zip(texts, prompts, strict=True):
            require_room(prompt, len(ids), self.context.length, found.where)
        return [Document(*each, prompt=prompt) for each, prompt in zip(texts, prompts, strict=True)]

    def _put_after_context(
        self, documents: Iterable[Document], found: FoundDocument
    ) -> Iterator[Document]:
        """Cut the documents of a text into sequences, each of which comes after the context."""
        if self.context is None:
            yield from documents
            return
        length = self.config.sequence_length
        before, ids = self.texts.encode_beginning(found.teacher)
        for document in documents:
            rest = document
            while len(rest):
                part, rest = rest.split(length)
                is_same = part.begins and np.array_equal(part.ids[: len(before)], before)
                prompt = TeacherPrompt(ids, len(before) if is_same else 0)
                require_room(prompt, len(part), self.context.length, found.where)
                yield replace(part, prompt=prompt)
                rest = replace(rest, begins=False)

    def _encode_parts(self, found: FoundDocument, known: Known) -> Iterator[Document]:
        where, content, place, _ = found
        if isinstance(content, Chat | Completion):
            (texts,) = [known] if isinstance(known, list) else self._encode_rows([found])
            documents = self._make_documents(texts, found)
            # The texts of a chat are counted as the batches of a long text are.
            for number, each in enumerate(documents[place.batch :], place.batch):
                yield _take_rest(each, place)
                place = place._replace(batch=number + 1, tokens=0)
            return
        if isinstance(known, np.ndarray):
            piece = Piece(content, begins=True, ends=True)
            batches = iter([self.texts.finish([(piece, known)], where, place)])
        else:
            chunks = content.read_chunks() if isinstance(content, TextFile) else [content]
            batches = self.texts.encode(chunks, where, place)
        documents_of_text = _cut_into_parts(batches, self.config, place)
        yield from self._put_after_context(documents_of_text, found)


def _group_short_documents(
    documents: Iterable[FoundDocument], separator: str
) -> Iterator[list[FoundDocument]]:
    """Group short texts, or chats, that follow each other; every other document is a group.

    The groups grow, so that a stream of which little is wanted is read little further.
    """
    group = list[FoundDocument]()
    characters = 0
    most = 1
    for found in documents:
        length = _measure(found, separator)
        if group and (length is None or type(found.content) is not type(group[0].content)):
            yield group
            group = []
            characters = 0
        group.append(found)
        characters += BATCH_CHARACTERS if length is None else length
        if len(group) >= most or characters >= BATCH_CHARACTERS:
            yield group
            group = []
            characters = 0
            most = min(2 * most, _TEXTS_AT_ONCE)
    if group:
        yield group


def _measure(found: FoundDocument, separator: str) -> int | None:
    """Return the characters of a short text or a chat; None of one that is read by itself."""
    content = found.content
    if isinstance(content, Chat):
        return content.count_characters()
    if not isinstance(content, str) or len(content) > PIECE_CHARACTERS:
        return None
    return None if separator and separator in content else len(content)


def _take_rest(whole: Document, place: TextPlace) -> Document:
    """Return what ``place`` leaves of the document of a whole text of a row."""
    _, rest = whole.split(place.tokens)
    return replace(rest, begins=place.tokens == 0, place=place)


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
                held = []
                tokens = 0
            skipped = max(done + tokens - end, 0)
            begins = part.begins and skipped == 0 if tokens == 0 else begins
            end += len(part.ids)
            held.append(part.ids[skipped:])
            tokens += len(held[-1])
            if tokens > enough:
                joined = np.concatenate(held)
                whole = (tokens - 1) // config.sequence_length * config.sequence_length
                yield Document(joined[:whole], begins=begins, place=_find_place(places, done))
                held = [joined[whole:].copy()]
                begins = False
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
    part: Document, where: str, size: int, tokenizer: PreTrainedTokenizerBase
) -> None:
    """Raise ``DataError`` that names the first id of ``part`` which is not below ``size``."""
    ids = part.ids
    for first in np.flatnonzero(ids >= size)[:1].tolist():
        near = tokenizer.decode(ids[max(first - _SHOWN, 0) : first + _SHOWN].tolist())
        token = tokenizer.convert_ids_to_tokens(int(ids[first]))
        raise DataError(
            f"{where}, token {part.place.tokens + first + 1}: {token!r} has the id {ids[first]}, "
            f"but the model knows the ids below {size} only. It stands in {near!r}.",
            "Remove it: no model of this job can read it.",
        )


def choose_pad_id(tokenizer: PreTrainedTokenizerBase, size: int | None = None) -> int:
    """Choose any id below ``size``: padding is a document of its own and has no target."""
    for candidate in (tokenizer.pad_token_id, tokenizer.eos_token_id):
        if candidate is not None and (size is None or candidate < size):
            return int(candidate)
    return 0
