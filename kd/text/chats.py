"""Chats -> token ids, and which of them the assistant wrote.

The tokenizer's chat template renders a chat as one text, or as one for each answer
(``kd.text.chat.turns``). A token is the assistant's if it holds at least one character of an
answer.

Shapes: N tokens of one text.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from cache.errors import PotstillError
from kd.config.data import DataConfig
from kd.errors import DataError
from kd.progress import Notice, ignore_notice
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
#: Receives what is found in a row, by the place of the row.
NoteRow = Callable[[Notice], None]

#: No warning for texts that are longer than the model's context: they are cut when they are packed.
TOKENIZER_OPTIONS = {"verbose": False}
#: What is noted of a row in which a control token is written as text.
_MARKED = "rows that hold control tokens of the tokenizer as text"
_MARKERS_REMEDY = (
    "They become these tokens, and are not learned within an answer: write them otherwise."
)


def encode_row(
    found: FoundDocument,
    tokenizer: PreTrainedTokenizerBase,
    config: DataConfig,
    notes: TextNotes,
) -> list[EncodedChat]:
    """Tokenize a chat, or a prompt and its completion; ``notes`` count what is not as it seems.

    Raises ``DataError`` where it cannot be done.
    """
    where, content, place = found
    answers_only = config.assistant_only_loss

    def note(notice: Notice) -> None:
        notes.add(notice, place)

    try:
        if isinstance(content, Completion):
            return [encode_completion(content, where, tokenizer, not answers_only, note)]
        return encode_chat(content, where, tokenizer, answers_only, note)
    except PotstillError:
        raise
    # A chat template may raise anything; half a surrogate pair raises TypeError.
    except Exception as error:
        raise explain_untokenized(where, error) from error


def explain_untokenized(where: str, error: Exception) -> DataError:
    """Return the error for a document that a library refuses."""
    return DataError(
        f"{where} cannot be tokenized: {type(error).__name__}: {error}",
        "Correct or remove it; messages need a tokenizer with a chat template.",
    )


def encode_chat(
    chat: Chat,
    place: str,
    tokenizer: PreTrainedTokenizerBase,
    assistant_only: bool,
    note: NoteRow = ignore_notice,
) -> list[EncodedChat]:
    """Return the token ids (N,) uint32 of the chat's texts, and which are targets; None = all.

    ``note`` receives what is not as it seems. Raises ``DataError`` if the assistant's tokens cannot
    be told from the others, or there are none, or the template leaves out what is learned.
    """
    return [
        _encode(each, place, tokenizer, assistant_only)
        for each in _render(chat, place, tokenizer, assistant_only, note)
    ]


def encode_chats(
    chats: Sequence[Chat],
    places: Sequence[str],
    tokenizer: PreTrainedTokenizerBase,
    assistant_only: bool,
    notes: Sequence[NoteRow] | None = None,
) -> list[list[EncodedChat]] | None:
    """Return what ``encode_chat`` returns of each chat; all are tokenized at once.

    It takes half of the time on one core, and the threads of the library use the others. None for a
    tokenizer that is not of the library tokenizers. Raises what ``encode_chat`` raises.
    """
    library = getattr(tokenizer, "backend_tokenizer", None)
    if library is None:
        return None
    rendered = [
        _render(chat, place, tokenizer, assistant_only, note)
        for chat, place, note in zip(
            chats, places, notes or [ignore_notice] * len(chats), strict=True
        )
    ]
    # Others may have called the tokenizer with padding since the last batch.
    library.no_truncation()
    library.no_padding()
    encode = library.encode_batch if assistant_only else library.encode_batch_fast
    texts = [each.text for several in rendered for each in several]
    encoded = iter(encode(texts, add_special_tokens=False))
    found = list[list[EncodedChat]]()
    for several, place in zip(rendered, places, strict=True):
        found.append([])
        for each, tokens in zip(several, encoded, strict=False):
            trained = _mark(tokens.offsets, each.spans) if assistant_only else None
            found[-1].append((np.asarray(tokens.ids, np.uint32), _require_learned(trained, place)))
    return found


def _encode(
    rendered: Rendered, place: str, tokenizer: PreTrainedTokenizerBase, assistant_only: bool
) -> EncodedChat:
    if assistant_only:
        ids, trained = _tokenize(rendered.text, rendered.spans, tokenizer)
        return ids, _require_learned(trained, place)
    encoded = tokenizer(rendered.text, add_special_tokens=False, **TOKENIZER_OPTIONS)
    return np.asarray(encoded["input_ids"], np.uint32), None


def _render(
    chat: Chat, place: str, tokenizer: PreTrainedTokenizerBase, assistant_only: bool, note: NoteRow
) -> list[Rendered]:
    found, notices = TurnFinder.find(chat, place, tokenizer, assistant_only)
    for each in notices:
        note(each)
    if _note_row(list_unread(chat, tokenizer), [chat.messages, chat.tools], place, tokenizer, note):
        for text in found:
            text.cut_out(list(find_forged(text, tokenizer)))
    return found


def _note_row(
    unread: Iterable[str],
    held: list[Any],
    place: str,
    tokenizer: PreTrainedTokenizerBase,
    note: NoteRow,
) -> bool:
    """Note what a row has that is not read, and control tokens; return whether there are such."""
    for name in unread:
        note(Notice(f"rows with {name}, which is not read", 1, place))
    pattern = compile_markers(tokenizer)
    marker = next(filter(None, map(pattern.search, list_texts(held))), None)
    if marker is not None:
        note(Notice(_MARKED, 1, f"{marker[0]!r} in {place}", _MARKERS_REMEDY))
    return marker is not None


def _require_learned(trained: np.ndarray | None, place: str) -> np.ndarray | None:
    """Return ``trained`` (N,); raise ``DataError`` where no token is a target."""
    if trained is not None and not trained[1:].any():
        raise DataError(
            f"{place} has no token of the assistant to learn: it has no message of the role "
            "assistant, or only an empty one.",
            f"Remove it, or {WHOLE_CHAT}.",
        )
    return trained


def encode_completion(
    pair: Completion,
    place: str,
    tokenizer: PreTrainedTokenizerBase,
    whole: bool,
    note: NoteRow = ignore_notice,
) -> EncodedChat:
    """Return the token ids (N,) uint32 of two texts that follow each other, and an end.

    Also returns which of them are targets, (N,) bool: those with a character of the completion,
    and the end; None = all, if ``whole``. Raises ``DataError`` if there is none.
    """
    _note_row(
        name_columns(pair.unread_columns), [pair.prompt, pair.completion], place, tokenizer, note
    )
    text = pair.prompt + pair.completion
    ids, trained = _tokenize(text, [(len(pair.prompt), len(text))], tokenizer, special=True)
    end = tokenizer.eos_token_id
    if end is not None and (len(ids) == 0 or ids[-1] != end):
        ids = np.append(ids, np.uint32(end))
        trained = np.append(trained, True)
    elif end is not None:
        trained[-1] = True
    if not pair.completion.strip():
        raise DataError(
            f"{place}: 'completion' is empty: there is nothing to learn.", "Remove the row."
        )
    return ids, None if whole else trained


def _tokenize(
    text: str, spans: list[Span], tokenizer: PreTrainedTokenizerBase, special: bool = False
) -> tuple[np.ndarray, np.ndarray]:
    """Return the ids of ``text``, and which of them hold a character of ``spans``; both (N,).

    ``special``: whether the tokenizer adds its special tokens; a chat template writes its own.

    ``return_assistant_tokens_mask`` of transformers is not used. It looks up the tokens at the two
    ends of a span. But a space there belongs to no token if the tokenizer trims its offsets, the
    last character may be several tokens, and with a wrong end the span reaches into the user's next
    message.
    """
    encoded = tokenizer(
        text, add_special_tokens=special, return_offsets_mapping=True, **TOKENIZER_OPTIONS
    )
    ids = encoded["input_ids"]
    offsets = encoded.get("offset_mapping") or _find_byte_offsets(ids, text, tokenizer)
    return np.asarray(ids, np.uint32), _mark(offsets, spans)


def _find_byte_offsets(ids: list[int], text: str, tokenizer: PreTrainedTokenizerBase) -> list[Span]:
    """Find the characters of each token where Python computes the tokens, such as ByT5's.

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
