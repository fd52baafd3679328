"""Chats -> token ids, and which of them the assistant wrote.

The tokenizer's chat template writes a chat as one text. Which of its characters are the assistant's is told by the
template's own {% generation %} markers, or else by the prompts before the answers; a token is if it holds one of them.

Shapes: N tokens of one chat.
"""

from __future__ import annotations

import contextlib
import json
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from kd.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Span = tuple[int, int]

QUIET = {"verbose": False}  # no warning for texts longer than the model's context: they are packed

# As transformers looks for it: what a template writes between this and {% endgeneration %} is the assistant's.
_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
_WHOLE_CHAT = "set data.assistant_only_loss: false to learn whole chats"

# Templates that write the day they are read (strftime_now) would make other tokens, and so another cache, of the same
# chats every day. They are told one day, which is the one that Llama's templates write where there is no clock.
_DAY = {"d": "26", "-d": "26", "m": "07", "b": "Jul", "B": "July", "Y": "2024", "y": "24", "a": "Fri", "A": "Friday"}
_TIME = {"H": "00", "M": "00", "S": "00"}
_REPLACED = "".join(f" | replace('%{code}', '{text}')" for code, text in (_DAY | _TIME).items())
_NO_CLOCK = "{% macro strftime_now(format) %}{{ format" + _REPLACED + " }}{% endmacro %}{{ '' }}"


@dataclass(frozen=True)
class Chat:
    """Messages ({role, content, ...}), and the JSON schemas of the tools that may be called, if there are any."""

    messages: list[Any]
    tools: list[Any] | None = None

    @classmethod
    def of(cls, row: dict[str, Any], place: str) -> Chat:
        """The chat in a row with the columns messages and, it may be, tools: a list, or the JSON text of one."""
        tools = row.get("tools")
        with contextlib.suppress(json.JSONDecodeError):
            tools = json.loads(tools) if isinstance(tools, str) and tools.strip() else tools
        if tools and not (isinstance(tools, list) and all(isinstance(tool, dict) for tool in tools)):
            raise DataError(
                f"{place}: 'tools' must be a list of JSON schemas, but is {str(tools)[:40]!r}.",
                "Convert it, or remove the column.",
            )
        return cls(row["messages"], tools or None)

    def upto(self, count: int) -> Chat:
        """The first ``count`` messages."""
        return Chat(self.messages[:count], self.tools)


def encode_chat(
    chat: Chat, place: str, tokenizer: PreTrainedTokenizerBase, assistant_only: bool
) -> tuple[np.ndarray, np.ndarray | None]:
    """Token ids (N,) uint32 of the rendered chat, and which of them are to be learned, (N,) bool; None = all.

    Raises ``DataError`` where the assistant's tokens cannot be told from the others, or there are none.
    """
    if not assistant_only:
        text, _ = _rendered(chat, tokenizer)
        return np.asarray(tokenizer(text, add_special_tokens=False, **QUIET)["input_ids"], np.uint32), None
    if _GENERATION.search(_template(chat, tokenizer)):
        text, spans = _rendered(chat, tokenizer, marked=True)
    else:
        text, _ = _rendered(chat, tokenizer)
        spans = [
            _answer(chat, number, text, place, tokenizer)
            for number, message in enumerate(chat.messages)
            if message["role"] == "assistant"
        ]
    ids, trained = _tokens(text, spans, tokenizer)
    if not trained[1:].any():
        raise DataError(
            f"{place} has no token of the assistant's to learn: it has no message of the role assistant, or an empty "
            "one.",
            f"Remove it, or {_WHOLE_CHAT}.",
        )
    return ids, trained


def _rendered(
    chat: Chat, tokenizer: PreTrainedTokenizerBase, marked: bool = False, prompt: bool = False
) -> tuple[str, list[Span]]:
    """What the template writes, and the spans between its markers; a ``prompt`` ends where an answer begins."""
    from transformers.utils.chat_template_utils import render_jinja_template

    special: dict[str, Any] = dict(tokenizer.special_tokens_map)
    rendered: Any = render_jinja_template(
        conversations=[chat.messages],
        tools=chat.tools,
        chat_template=_template(chat, tokenizer),
        return_assistant_tokens_mask=marked,
        add_generation_prompt=prompt,
        **special,
    )
    (text,), spans = rendered
    return text, spans[0] if marked else []


def _template(chat: Chat, tokenizer: PreTrainedTokenizerBase) -> str:
    own = str(tokenizer.get_chat_template(tools=chat.tools))
    return _NO_CLOCK + own if "strftime_now" in own else own


def _tokens(text: str, spans: list[Span], tokenizer: PreTrainedTokenizerBase) -> tuple[np.ndarray, np.ndarray]:
    """The ids of ``text``, and which of them hold a character of ``spans``; both (N,).

    Not by ``return_assistant_tokens_mask`` of transformers, which asks for the tokens at the ends of a span: a space
    there belongs to no token where a tokenizer trims its offsets, a last character may be several tokens, and a wrong
    end runs on into the user's next message.
    """
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, **QUIET)
    begin, end = np.asarray(encoded["offset_mapping"], np.int64).reshape(-1, 2).T
    begin = np.where(begin < end, begin, np.concatenate([begin[:1], end[:-1]]))  # a token of trimmed spaces alone
    trained = np.zeros(len(begin), bool)
    for first, last in spans:
        trained |= (begin < last) & (end > first)
    return np.asarray(encoded["input_ids"], np.uint32), trained


def _answer(chat: Chat, number: int, text: str, place: str, tokenizer: PreTrainedTokenizerBase) -> Span:
    """Where in ``text``, the whole chat, message ``number`` lies: what the chat up to it has beyond its prompt."""
    remedy = f"Use a chat template with {{% generation %}} markers, or {_WHOLE_CHAT}."
    if number == 0:
        raise DataError(f"{place} begins with the assistant's message: there is no prompt to tell it from.", remedy)
    prompt, _ = _rendered(chat.upto(number), tokenizer, prompt=True)
    answered, _ = _rendered(chat.upto(number + 1), tokenizer)
    if not (answered.startswith(prompt) and text.startswith(answered)):
        raise DataError(
            f"{place}: the assistant's part of message {number + 1} cannot be told from its context: the chat template "
            "writes what comes before it otherwise in the whole chat than in the prompt.",
            remedy,
        )
    return len(prompt), len(answered)
