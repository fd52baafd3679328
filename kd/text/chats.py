"""Chats -> token ids, and which of them the assistant wrote.

The tokenizer's chat template renders a chat as one text. The template's {% generation %} markers
show which characters the assistant wrote; without markers, they are what an answer adds to its
prompt. A token is the assistant's if it holds at least one of these characters.

Shapes: N tokens of one chat.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from kd.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

#: The first character of a piece of text, and the one after its last.
Span = tuple[int, int]
#: The ids (N,) of a chat, and which of them are targets, (N,); None = all.
EncodedChat = tuple[np.ndarray, np.ndarray | None]

#: No warning for texts that are longer than the model's context: they are cut when they are packed.
TOKENIZER_OPTIONS = {"verbose": False}

#: The marker as transformers recognises it; text from here to {% endgeneration %} is the
#: assistant's.
_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
#: The remedy for every chat whose answers cannot be found.
_WHOLE_CHAT = "set data.assistant_only_loss: false to learn whole chats"

# A template that writes today's date (strftime_now) would make other tokens of the same chats every
# day, and so another cache. It gets a fixed day, the one that Llama's templates write without a
# clock.
_DAY = {
    "d": "26",
    "-d": "26",
    "m": "07",
    "b": "Jul",
    "B": "July",
    "Y": "2024",
    "y": "24",
    "a": "Fri",
    "A": "Friday",
}
_TIME = {"H": "00", "M": "00", "S": "00"}
_REPLACED = "".join(f" | replace('%{code}', '{text}')" for code, text in (_DAY | _TIME).items())
_NO_CLOCK = "{% macro strftime_now(format) %}{{ format" + _REPLACED + " }}{% endmacro %}{{ '' }}"


@dataclass(frozen=True)
class Chat:
    """The messages of a chat ({role, content, ...}), and the JSON schemas of its tools, if any.

    ``learned_from``: the number of messages before the first that may be learned. A message of the
    assistant with ``weight`` 0 is not learned either, as in OpenAI's files for fine-tuning.
    """

    messages: list[Any]
    tools: list[Any] | None = None
    learned_from: int = 0

    @staticmethod
    def read_tools(row: dict[str, Any], place: str) -> list[Any] | None:
        """Read the optional column tools of a row: a list, or the JSON text of one."""
        tools = row.get("tools")
        with contextlib.suppress(json.JSONDecodeError):
            tools = json.loads(tools) if isinstance(tools, str) and tools.strip() else tools
        if tools and not (
            isinstance(tools, list) and all(isinstance(tool, dict) for tool in tools)
        ):
            raise DataError(
                f"{place}: 'tools' must be a list of JSON schemas, but is {str(tools)[:40]!r}.",
                "Convert it, or remove the column.",
            )
        return tools or None

    def is_learned(self, number: int) -> bool:
        """Whether message ``number`` is one of the assistant that may be learned."""
        message = self.messages[number]
        return bool(
            message.get("role") == "assistant"
            and number >= self.learned_from
            and message.get("weight", 1)
        )

    def take_first(self, count: int) -> Chat:
        """Return the chat's first ``count`` messages."""
        return Chat(self.messages[:count], self.tools)

    def count_characters(self) -> int:
        """Return the characters of the messages that are texts."""
        contents = (each.get("content") for each in self.messages if isinstance(each, dict))
        return sum(len(content) for content in contents if isinstance(content, str))


def encode_chat(
    chat: Chat, place: str, tokenizer: PreTrainedTokenizerBase, assistant_only: bool
) -> EncodedChat:
    """Return the token ids (N,) uint32 of the chat, and which are targets, (N,) bool; None = all.

    Raises ``DataError`` if the assistant's tokens cannot be told from the others, or there are
    none.
    """
    text, spans = _render_for_training(chat, place, tokenizer, assistant_only)
    if spans is None:
        encoded = tokenizer(text, add_special_tokens=False, **TOKENIZER_OPTIONS)
        return np.asarray(encoded["input_ids"], np.uint32), None
    ids, trained = _tokenize(text, spans, tokenizer)
    _require_learned(trained, place)
    return ids, trained


def encode_chats(
    chats: Sequence[Chat],
    places: Sequence[str],
    tokenizer: PreTrainedTokenizerBase,
    assistant_only: bool,
) -> list[EncodedChat] | None:
    """Return what ``encode_chat`` returns of each chat; all are tokenized at once.

    It takes half of the time on one core, and the threads of the library use the others. None for a
    tokenizer that is not of the library tokenizers. Raises what ``encode_chat`` raises.
    """
    library = getattr(tokenizer, "backend_tokenizer", None)
    if library is None:
        return None
    rendered = [
        _render_for_training(chat, place, tokenizer, assistant_only)
        for chat, place in zip(chats, places, strict=True)
    ]
    # Others may have called the tokenizer with padding since the last batch.
    library.no_truncation()
    library.no_padding()
    encode = library.encode_batch if assistant_only else library.encode_batch_fast
    encoded = encode([text for text, _ in rendered], add_special_tokens=False)
    found = list[EncodedChat]()
    for each, (_, spans), place in zip(encoded, rendered, places, strict=True):
        trained = None if spans is None else _mark(each.offsets, spans)
        if trained is not None:
            _require_learned(trained, place)
        found.append((np.asarray(each.ids, np.uint32), trained))
    return found


def _render_for_training(
    chat: Chat, place: str, tokenizer: PreTrainedTokenizerBase, assistant_only: bool
) -> tuple[str, list[Span] | None]:
    """Render the chat; return its text and the spans that are learned, None = all of it."""
    if not assistant_only:
        return _render(chat, tokenizer)[0], None
    if _GENERATION.search(_get_template(chat, tokenizer)):
        text, spans = _render(chat, tokenizer, marked=True)
        if not all(message.get("weight", 1) for message in chat.messages):
            spans = _drop_unlearned(chat, spans, tokenizer)
        elif chat.learned_from:
            _, known = _render(chat.take_first(chat.learned_from), tokenizer, marked=True)
            spans = spans[len(known) :]
    else:
        text, _ = _render(chat, tokenizer)
        spans = [
            _find_answer(chat, number, text, place, tokenizer)
            for number in range(len(chat.messages))
            if chat.is_learned(number)
        ]
    return text, spans


def _drop_unlearned(
    chat: Chat, spans: list[Span], tokenizer: PreTrainedTokenizerBase
) -> list[Span]:
    """Leave out the spans between markers of the messages that are not learned.

    A message has the spans that it adds to those of the messages before it.
    """
    kept: list[Span] = []
    before = 0
    for number, message in enumerate(chat.messages):
        if message["role"] == "assistant":
            _, known = _render(chat.take_first(number + 1), tokenizer, marked=True)
            kept += spans[before : len(known)] if chat.is_learned(number) else []
            before = len(known)
    return kept


def _require_learned(trained: np.ndarray, place: str) -> None:
    """Raise ``DataError`` where no token of ``trained`` (N,) is a target."""
    if not trained[1:].any():
        raise DataError(
            f"{place} has no token of the assistant to learn: it has no message of the role "
            "assistant, or only an empty one.",
            f"Remove it, or {_WHOLE_CHAT}.",
        )


def encode_completion(
    prompt: str, completion: str, place: str, tokenizer: PreTrainedTokenizerBase, whole: bool
) -> tuple[np.ndarray, np.ndarray | None]:
    """Return the token ids (N,) uint32 of two texts that follow each other, and an end.

    Also returns which of them are targets, (N,) bool: those with a character of ``completion``,
    and the end; None = all, if ``whole``. Raises ``DataError`` if there is none.
    """
    text = prompt + completion
    ids, trained = _tokenize(text, [(len(prompt), len(text))], tokenizer, special=True)
    end = tokenizer.eos_token_id
    if end is not None and (len(ids) == 0 or ids[-1] != end):
        ids = np.append(ids, np.uint32(end))
        trained = np.append(trained, True)
    elif end is not None:
        trained[-1] = True
    if not completion.strip():
        raise DataError(
            f"{place}: 'completion' is empty: there is nothing to learn.", "Remove the row."
        )
    return ids, None if whole else trained


def _render(
    chat: Chat, tokenizer: PreTrainedTokenizerBase, marked: bool = False, prompt: bool = False
) -> tuple[str, list[Span]]:
    """Render the chat; return its text and the spans between markers, if they are ``marked``.

    With ``prompt`` the text ends where an answer would begin.
    """
    from transformers.utils.chat_template_utils import render_jinja_template

    special: dict[str, Any] = dict(tokenizer.special_tokens_map)
    rendered: Any = render_jinja_template(
        conversations=[chat.messages],
        tools=chat.tools,
        chat_template=_get_template(chat, tokenizer),
        return_assistant_tokens_mask=marked,
        add_generation_prompt=prompt,
        **special,
    )
    (text,), spans = rendered
    return text, spans[0] if marked else []


def _get_template(chat: Chat, tokenizer: PreTrainedTokenizerBase) -> str:
    own = str(tokenizer.get_chat_template(tools=chat.tools))
    return _NO_CLOCK + own if "strftime_now" in own else own


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
    return np.asarray(encoded["input_ids"], np.uint32), _mark(encoded["offset_mapping"], spans)


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


def _find_answer(
    chat: Chat, number: int, text: str, place: str, tokenizer: PreTrainedTokenizerBase
) -> Span:
    """Find message ``number`` in ``text``, the whole chat: what it adds to its prompt."""
    remedy = f"Use a chat template with {{% generation %}} markers, or {_WHOLE_CHAT}."
    if number == 0:
        raise DataError(
            f"{place} begins with a message of the assistant: there is no prompt before it.",
            remedy,
        )
    prompt, _ = _render(chat.take_first(number), tokenizer, prompt=True)
    answered, _ = _render(chat.take_first(number + 1), tokenizer)
    if not (answered.startswith(prompt) and text.startswith(answered)):
        raise DataError(
            f"{place}: the assistant's part of message {number + 1} cannot be told from its "
            "context: the chat template renders the messages before it differently in the whole "
            "chat and in the prompt.",
            remedy,
        )
    return len(prompt), len(answered)
