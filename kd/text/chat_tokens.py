"""Chats -> token ids, and which of them the assistant wrote.

The tokenizer's chat template renders a chat as one text, or as one for each answer
(``kd.text.chat.turns``). A token is the assistant's if it holds at least one character of an
answer.

Shapes: N tokens of one text.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from kd.errors import DataError
from kd.progress import Notice
from kd.text.chat.chat import Chat, Completion, list_texts
from kd.text.chat.markers import compile_markers, find_forged
from kd.text.chat.rendering import Span, list_unread, name_columns
from kd.text.chat.turns import WHOLE_CHAT, Rendered, TurnFinder
from kd.text.reading.notes import TextNotes
from kd.text.sources import FoundDocument

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

#: The ids (N,) of a text of a chat, and which of them are targets, (N,); None = all.
EncodedChat = tuple[np.ndarray, np.ndarray | None]
#: No warning for texts that are longer than the model's context: they are cut when they are packed.
TOKENIZER_OPTIONS = {"verbose": False}
#: What is noted of a row in which a control token is written as text.
_MARKED = "rows that hold control tokens of the tokenizer as text"
_MARKERS_REMEDY = (
    "They become these tokens, and are not learned within an answer: write them otherwise."
)


def encode_chats(
    found: Sequence[FoundDocument],
    tokenizer: PreTrainedTokenizerBase,
    assistant_only: bool,
    notes: TextNotes,
) -> list[list[EncodedChat]]:
    """Return the texts of each chat; all are tokenized at once.

    It takes half of the time on one core, and the threads of the library use the others. ``notes``
    count what is not as it seems. Raises ``DataError`` if the assistant's tokens cannot be told
    from the others, or there are none, or the template leaves out what is learned.
    """
    rendered = [_render(each, tokenizer, assistant_only, notes) for each in found]
    texts = [each for several in rendered for each in several]
    spans = [each.spans for each in texts] if assistant_only else None
    encoded = _tokenize([each.text for each in texts], spans, tokenizer)
    return [
        [_require_learned(next(encoded), each.where) for _ in several]
        for each, several in zip(found, rendered, strict=True)
    ]


def _render(
    found: FoundDocument, tokenizer: PreTrainedTokenizerBase, assistant_only: bool, notes: TextNotes
) -> list[Rendered]:
    chat: Chat = found.content
    texts, notices = TurnFinder.find(chat, found.where, tokenizer, assistant_only)
    for each in notices:
        notes.add(each, found.place)
    unread = list_unread(chat, tokenizer)
    if _note_row(unread, [chat.messages, chat.tools], found, tokenizer, notes):
        for text in texts:
            for hole in list(find_forged(text, tokenizer)):
                text.cut_out(hole)
    return texts


def _note_row(
    unread: Iterable[str],
    held: list[Any],
    found: FoundDocument,
    tokenizer: PreTrainedTokenizerBase,
    notes: TextNotes,
) -> bool:
    """Note what a row has that is not read, and control tokens; return whether there are such."""
    for name in unread:
        notes.add(Notice(f"rows with {name}, which is not read", 1, found.where), found.place)
    marker = next(filter(None, map(compile_markers(tokenizer).search, list_texts(held))), None)
    if marker is not None:
        example = f"{marker[0]!r} in {found.where}"
        notes.add(Notice(_MARKED, 1, example, _MARKERS_REMEDY), found.place)
    return marker is not None


def _require_learned(encoded: EncodedChat, where: str) -> EncodedChat:
    """Return ``encoded``; raise ``DataError`` if no token is a target."""
    _, trained = encoded
    if trained is not None and not trained[1:].any():
        raise DataError(
            f"{where} has no token of the assistant to learn: it has no message of the role "
            "assistant, or only an empty one.",
            f"Remove it, or {WHOLE_CHAT}.",
        )
    return encoded


def encode_completion(
    found: FoundDocument, tokenizer: PreTrainedTokenizerBase, whole: bool, notes: TextNotes
) -> EncodedChat:
    """Return the token ids (N,) uint32 of two texts that follow each other, and an end.

    Also returns which of them are targets, (N,) bool: those with a character of the completion,
    and the end; None = all, if ``whole``. Raises ``DataError`` if there is none.
    """
    pair: Completion = found.content
    unread = name_columns(pair.unread_columns)
    _note_row(unread, [pair.prompt, pair.completion], found, tokenizer, notes)
    if not pair.completion.strip():
        detail = f"{found.where}: 'completion' is empty: there is nothing to learn."
        raise DataError(detail, "Remove the row.")
    text = pair.prompt + pair.completion
    spans = None if whole else [[(len(pair.prompt), len(text))]]
    ((ids, trained),) = _tokenize([text], spans, tokenizer, special=True)
    end = tokenizer.eos_token_id
    if end is not None:
        has_end = len(ids) > 0 and ids[-1] == end
        ids = ids if has_end else np.append(ids, np.uint32(end))
        trained = None if trained is None else np.append(trained[: len(ids) - 1], True)
    return ids, trained


def _tokenize(
    texts: list[str],
    spans: list[list[Span]] | None,
    tokenizer: PreTrainedTokenizerBase,
    special: bool = False,
) -> Iterator[EncodedChat]:
    """Yield the ids of each text, and which of them hold a character of its ``spans``; both (N,).

    Without ``spans`` all are learned. ``special``: whether the tokenizer adds its special tokens; a
    chat template writes its own.

    ``return_assistant_tokens_mask`` of transformers is not used. It looks up the tokens at the two
    ends of a span. But a space there belongs to no token if the tokenizer trims its offsets, the
    last character may be several tokens, and with a wrong end the span reaches into the user's next
    message.
    """
    library = getattr(tokenizer, "backend_tokenizer", None)
    if library is None:
        for number, text in enumerate(texts):
            ids = tokenizer(text, add_special_tokens=special, **TOKENIZER_OPTIONS)["input_ids"]
            offsets = _find_byte_offsets(ids, text, tokenizer) if spans else []
            yield np.asarray(ids, np.uint32), _mark(offsets, spans[number]) if spans else None
        return
    # Others may have called the tokenizer with padding since the last batch.
    library.no_truncation()
    library.no_padding()
    encode = library.encode_batch if spans else library.encode_batch_fast
    for number, encoded in enumerate(encode(texts, add_special_tokens=special)):
        trained = _mark(encoded.offsets, spans[number]) if spans else None
        yield np.asarray(encoded.ids, np.uint32), trained


def _find_byte_offsets(ids: list[int], text: str, tokenizer: PreTrainedTokenizerBase) -> list[Span]:
    """Find the characters of each token if Python computes the tokens, such as ByT5's.

    Raises ``DataError`` unless each token is a byte of ``text``, or an added token that stands
    there. Special tokens at the ends of a text have no characters.
    """
    data = text.encode()
    places = [place for place, each in enumerate(text) for _ in each.encode()] + [len(text)]
    found = list[Span]()
    at = 0
    for number in ids:
        token = str(tokenizer.convert_ids_to_tokens(number))
        is_added = number in tokenizer.added_tokens_decoder
        part = token.encode() if is_added else token.encode("latin-1", errors="replace")
        if not data.startswith(part, at):  # an added token may take the white space around it
            at += len(data[at:]) - len(data[at:].lstrip())
        if data.startswith(part, at) and (is_added or len(part) == 1):
            found.append((places[at], places[at + len(part) - 1] + 1))
            at += len(part)
        elif is_added and at in (0, len(data)):
            found.append((places[at], places[at]))
        else:
            raise DataError(
                f"{type(tokenizer).__name__} does not tell which characters a token holds, so that "
                "the tokens of an answer cannot be told from those of its prompt.",
                "Use a model whose tokenizer has a tokenizer.json, or learn whole texts.",
            )
    return found


def _mark(offsets: list[Span], spans: list[Span]) -> np.ndarray:
    """Return which tokens hold a character of ``spans``, (N,); ``offsets`` are their characters."""
    begin, end = np.asarray(offsets, np.int64).reshape(-1, 2).T
    # A token that consists only of trimmed spaces has no width: it begins where the one before
    # ends.
    begin = np.where(begin < end, begin, np.concatenate([begin[:1], end[:-1]]))
    trained = np.zeros(len(begin), bool)
    for first, last in spans:
        trained |= (begin < last) & (end > first)
    return trained
