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
from kd.text.chats import Chat, EncodedChat, encode_chat, encode_chats, encode_completion
from kd.text.files import TextFile
from kd.text.packing import BLOCK_SEQUENCES, Document
from kd.text.pieces import BATCH_CHARACTERS, PIECE_CHARACTERS, TextEncoder
from kd.text.rows import Completion
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
) -> Iterator[Document]:
    """Tokenize each document; a plain text gets the tokenizer's end-of-sequence token at its end.

    A long text becomes several documents, each of which continues the one before. Documents of a
    single token are dropped, because they have no target. Of a document whose place is not its
    beginning only the rest is yielded. Raises ``DataError`` for one that cannot be tokenized, or
    that holds an id which is not below ``size``, V.
    """
    encoder = TextEncoder(tokenizer, monitor)
    for group in _group_short_documents(documents):
        for found, known in zip(group, _encode_together(group, encoder, config), strict=True):
            try:
                yield from _encode_document(found, known, encoder, config, size)
            except PotstillError:
                raise
            # A chat template may raise anything; half a surrogate pair raises TypeError.
            except Exception as error:
                raise DataError(
                    f"{found.where} cannot be tokenized: {type(error).__name__}: {error}",
                    "Correct or remove it; messages need a tokenizer with a chat template.",
                ) from error


def _group_short_documents(documents: Iterable[FoundDocument]) -> Iterator[list[FoundDocument]]:
    """Group short texts, or chats, that follow each other; every other document is alone.

    The groups grow, so that a stream of which little is wanted is read little further.
    """
    group = list[FoundDocument]()
    characters = 0
    most = 1
    for found in documents:
        length = _measure(found)
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


def _measure(found: FoundDocument) -> int | None:
    """Return the characters of a short text or a chat; None of a document that is read alone."""
    content = found.content
    if isinstance(content, Chat):
        return content.count_characters()
    return len(content) if isinstance(content, str) and len(content) <= PIECE_CHARACTERS else None


def _encode_together(
    group: list[FoundDocument], encoder: TextEncoder, config: DataConfig
) -> Sequence[NDArray[np.uint32] | EncodedChat | None]:
    """Tokenize a group in the threads of the library; None for a document that is read alone."""
    alone = [None] * len(group)
    if len(group) == 1:
        return alone
    contents = [found.content for found in group]
    try:
        if isinstance(contents[0], Chat):
            places = [found.where for found in group]
            answers_only = config.assistant_only_loss
            return encode_chats(contents, places, encoder.tokenizer, answers_only) or alone
        return encoder.encode_short(contents) or alone
    except Exception:  # alone, the document that is at fault is found
        return alone


def _encode_document(
    found: FoundDocument,
    known: NDArray[np.uint32] | EncodedChat | None,
    encoder: TextEncoder,
    config: DataConfig,
    size: int | None,
) -> Iterator[Document]:
    """Make the documents of one that was found; ``known`` is what its group was tokenized to."""
    tokenizer = encoder.tokenizer
    for part in _encode_parts(found, known, encoder, config):
        if size is not None:
            _require_known_ids(part.ids, part.place.tokens, found.where, size, tokenizer)
        if len(part) > (1 if part.begins else 0):
            yield part


def _encode_parts(
    found: FoundDocument,
    known: NDArray[np.uint32] | EncodedChat | None,
    encoder: TextEncoder,
    config: DataConfig,
) -> Iterator[Document]:
    where, content, place = found
    tokenizer = encoder.tokenizer
    answers_only = config.assistant_only_loss
    if isinstance(content, Chat):
        encoded = known if isinstance(known, tuple) else None
        encoded = encoded or encode_chat(content, where, tokenizer, answers_only)
        yield _take_rest(*encoded, place)
    elif isinstance(content, Completion):
        texts = (content.prompt, content.completion)
        yield _take_rest(*encode_completion(*texts, where, tokenizer, not answers_only), place)
    else:
        chunks = content.read_chunks() if isinstance(content, TextFile) else [content]
        ids = known if isinstance(known, np.ndarray) else None
        batches = encoder.encode(chunks, where, place.batch) if ids is None else [ids]
        yield from _cut_into_parts(_add_end(batches, tokenizer), config, place)


def _take_rest(ids: np.ndarray, trained: np.ndarray | None, place: TextPlace) -> Document:
    """Make the document of all ids of a row, and return what ``place`` leaves of it."""
    skip = place.tokens
    rest = None if trained is None else trained[skip:]
    return Document(ids[skip:], rest, begins=skip == 0, place=place)


def _add_end(
    parts: Iterable[NDArray[np.uint32]], tokenizer: PreTrainedTokenizerBase
) -> Iterator[NDArray[np.uint32]]:
    """Pass the ids of a text on, and its end-of-sequence token if it has not got it."""
    end = tokenizer.eos_token_id
    last = None
    for ids in parts:
        yield ids
        last = ids[-1] if len(ids) else last
    if end is not None and last is not None and last != end:
        yield np.asarray([end], np.uint32)


def _cut_into_parts(
    batches: Iterable[NDArray[np.uint32]], config: DataConfig, start: TextPlace
) -> Iterator[Document]:
    """Join the ids of a text to documents of a whole number of sequences; the last has the rest.

    ``batches`` begin with that of ``start``, whose ids before ``start`` are left out.
    """
    enough = BLOCK_SEQUENCES * config.sequence_length
    held = list[NDArray[np.uint32]]()
    begins = list[TextPlace]()  # of the batches that the held ids are from
    tokens = 0
    done = start.tokens
    end = start.before
    for number, ids in enumerate(batches, start.batch):
        begins.append(start._replace(batch=number, before=end))
        end += len(ids)
        some = ids[max(done + tokens - begins[-1].before, 0) :]
        held.append(some)
        tokens += len(some)
        if tokens > enough:
            joined = np.concatenate(held)
            whole = (tokens - 1) // config.sequence_length * config.sequence_length
            yield Document(joined[:whole], begins=done == 0, place=_find_place(begins, done))
            held = [joined[whole:].copy()]
            tokens -= whole
            done += whole
    if tokens:
        yield Document(np.concatenate(held), begins=done == 0, place=_find_place(begins, done))


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
