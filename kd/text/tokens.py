"""Texts and chats -> token ids, and which of them are targets."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from cache.errors import PotstillError
from kd.config.data import DataConfig
from kd.errors import DataError
from kd.progress import SILENT, Monitor
from kd.text.chats import Chat, encode_chat, encode_completion
from kd.text.files import TextFile
from kd.text.packing import BLOCK_SEQUENCES, Document
from kd.text.pieces import TextEncoder
from kd.text.rows import Completion

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

#: Tokens on both sides of one that is refused, which the error shows.
_SHOWN = 8


def encode_documents(
    documents: Iterable[tuple[str, Any]],
    tokenizer: PreTrainedTokenizerBase,
    config: DataConfig,
    size: int | None = None,
    monitor: Monitor = SILENT,
) -> Iterator[Document]:
    """Tokenize each document; a plain text gets the tokenizer's end-of-sequence token at its end.

    A long text becomes several documents, each of which continues the one before. Documents of a
    single token are dropped, because they have no target. Raises ``DataError`` for one that cannot
    be tokenized, or that holds an id which is not below ``size``, V.
    """
    encoder = TextEncoder(tokenizer, monitor)
    for place, content in documents:
        try:
            yield from _encode_document(content, place, encoder, config, size)
        except PotstillError:
            raise
        # A chat template may raise anything; half a surrogate pair raises TypeError.
        except Exception as error:
            raise DataError(
                f"{place} cannot be tokenized: {type(error).__name__}: {error}",
                "Correct or remove it; messages need a tokenizer with a chat template.",
            ) from error


def _encode_document(
    content: Any, place: str, encoder: TextEncoder, config: DataConfig, size: int | None
) -> Iterator[Document]:
    tokenizer = encoder.tokenizer
    answers_only = config.assistant_only_loss
    if isinstance(content, Chat):
        parts = iter([Document(*encode_chat(content, place, tokenizer, answers_only))])
    elif isinstance(content, Completion):
        texts = (content.prompt, content.completion)
        parts = iter([Document(*encode_completion(*texts, place, tokenizer, not answers_only))])
    else:
        chunks = content.read_chunks() if isinstance(content, TextFile) else [content]
        parts = _cut_into_parts(_add_end(encoder.encode(chunks, place), tokenizer), config)
    begin = 0
    for part in parts:
        if size is not None:
            _require_known_ids(part.ids, begin, place, size, tokenizer)
        begin += len(part)
        if len(part) > 1 or not part.begins:
            yield part


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


def _cut_into_parts(ids: Iterable[NDArray[np.uint32]], config: DataConfig) -> Iterator[Document]:
    """Join the ids of a text to documents of a whole number of sequences; the last has the rest."""
    enough = BLOCK_SEQUENCES * config.sequence_length
    held = list[NDArray[np.uint32]]()
    tokens = 0
    begins = True
    for some in ids:
        held.append(some)
        tokens += len(some)
        if tokens > enough:
            joined = np.concatenate(held)
            whole = (tokens - 1) // config.sequence_length * config.sequence_length
            yield Document(joined[:whole], begins=begins)
            held = [joined[whole:].copy()]
            tokens -= whole
            begins = False
    if tokens:
        yield Document(np.concatenate(held), begins=begins)


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
