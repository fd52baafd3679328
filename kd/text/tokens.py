"""Texts and chats -> token ids, and which of them are targets."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from kd.config.data import DataConfig
from kd.errors import DataError
from kd.text.chats import TOKENIZER_OPTIONS, encode_chat
from kd.text.packing import Document

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

#: Tokens on both sides of one that is refused, which the error shows.
_SHOWN = 8


def encode_documents(
    documents: Iterable[tuple[str, Any]],
    tokenizer: PreTrainedTokenizerBase,
    config: DataConfig,
    size: int | None = None,
) -> Iterator[Document]:
    """Tokenize each document; a plain text gets the tokenizer's end-of-sequence token at its end.

    Documents of a single token are dropped, because they have no target. Raises ``DataError`` for
    one that cannot be tokenized, or that holds an id which is not below ``size``, V.
    """
    for place, content in documents:
        try:
            document = _encode_document(content, place, tokenizer, config)
        except DataError:
            raise
        # A chat template may raise anything; half a surrogate pair raises TypeError.
        except Exception as error:
            raise DataError(
                f"{place} cannot be tokenized: {type(error).__name__}: {error}",
                "Correct or remove it; messages need a tokenizer with a chat template.",
            ) from error
        if len(document) > 1:
            if size is not None:
                _require_known_ids(document.ids, place, size, tokenizer)
            yield document


def _encode_document(
    content: Any, place: str, tokenizer: PreTrainedTokenizerBase, config: DataConfig
) -> Document:
    if config.format == "messages":
        return Document(*encode_chat(content, place, tokenizer, config.assistant_only_loss))
    ids = encode_text(content, tokenizer)
    if tokenizer.eos_token_id is not None and ids and ids[-1] != tokenizer.eos_token_id:
        ids.append(tokenizer.eos_token_id)
    return Document(np.asarray(ids, np.uint32))


def encode_text(text: str, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Return the token ids of ``text``."""
    return list(tokenizer(text, **TOKENIZER_OPTIONS)["input_ids"]) if text.strip() else []


def _require_known_ids(
    ids: np.ndarray, place: str, size: int, tokenizer: PreTrainedTokenizerBase
) -> None:
    """Raise ``DataError`` that names the first of ``ids`` (N,) which is not below ``size``."""
    unknown = np.flatnonzero(ids >= size)
    for first in unknown[:1].tolist():
        near = tokenizer.decode(ids[max(first - _SHOWN, 0) : first + _SHOWN].tolist())
        raise DataError(
            f"{place}, token {first + 1}: {tokenizer.convert_ids_to_tokens(int(ids[first]))!r} has "
            f"the id {ids[first]}, but the model knows the ids below {size} only. It stands in "
            f"{near!r}.",
            "Remove it: no model of this job can read it.",
        )


def choose_pad_id(tokenizer: PreTrainedTokenizerBase, size: int | None = None) -> int:
    """Choose any id below ``size``: padding is a document of its own and has no target."""
    for candidate in (tokenizer.pad_token_id, tokenizer.eos_token_id):
        if candidate is not None and (size is None or candidate < size):
            return int(candidate)
    return 0
