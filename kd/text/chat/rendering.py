"""Render a chat with the template of a tokenizer, as transformers does."""

from __future__ import annotations

import datetime
import re
import threading
import time
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from kd.text.chat.chat import Chat

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

#: The first character of a piece of text, and the one after its last.
Span = tuple[int, int]

#: The marker as transformers recognises it; text from here to {% endgeneration %} is the
#: assistant's.
_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")

# A template that writes today's date (strftime_now) would make other tokens of the same chats every
# day, and so another cache. It gets a fixed day, the one that Llama's templates write without a
# clock.
_DAY = datetime.date(2024, 7, 26)
_CODES = ("d", "-d", "m", "b", "B", "Y", "y", "a", "A", "H", "M", "S")
_REPLACED = "".join(f" | replace('%{each}', '{_DAY.strftime(f'%{each}')}')" for each in _CODES)
_NO_CLOCK = "{% macro strftime_now(format) %}{{ format" + _REPLACED + " }}{% endmacro %}{{ '' }}"

#: The seconds of a processor that the template may take for one chat, however busy the machine is,
#: and the characters that it may write.
MOST_SECONDS = 20.0
MOST_TEXT = 1 << 26
#: When the template that this thread renders has taken too long.
_clock = threading.local()
#: The begin of a loop, and the sign by which its tag takes the white space behind it.
_LOOP = re.compile(r"\{%[-+]?\s*for\b(?:[^%]|%(?!\}))*?([-+]?)%\}")


def render(
    chat: Chat, tokenizer: PreTrainedTokenizerBase, marked: bool = False, prompt: bool = False
) -> tuple[str, list[Span]]:
    """Render the chat; return its text and the spans between markers, if they are ``marked``.

    With ``prompt`` the text ends where an answer would begin.
    """
    from transformers.utils import chat_template_utils as templates

    # Each turn of a loop looks at the clock: nothing else can end a template that loops.
    bounded = _LOOP.sub(r"\g<0>{% set _ = look_at_clock() \1%}", get_template(chat, tokenizer))
    # transformers hands only plain values to a template, and keeps a template that it compiled.
    templates._compile_jinja_template(bounded).globals["look_at_clock"] = _look_at_clock
    _clock.end = time.thread_time() + MOST_SECONDS
    write: Callable[..., Any] = templates.render_jinja_template
    (text,), spans = write(
        conversations=[chat.messages],
        tools=chat.tools,
        chat_template=bounded,
        return_assistant_tokens_mask=marked,
        add_generation_prompt=prompt,
        **tokenizer.special_tokens_map,
    )
    if len(text) > MOST_TEXT:
        raise ValueError(f"the chat template wrote more than {MOST_TEXT} characters for one chat")
    return text, spans[0] if marked else []


def _look_at_clock() -> str:
    if time.thread_time() > _clock.end:
        raise ValueError(f"the chat template took more than {MOST_SECONDS:g} s for one chat")
    return ""


def marks_answers(chat: Chat, tokenizer: PreTrainedTokenizerBase) -> bool:
    """Return whether the template has markers around what the assistant writes."""
    return _GENERATION.search(get_template(chat, tokenizer)) is not None


def list_unread(chat: Chat, tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """Name the keys of messages that neither are read nor stand in the template, and columns."""
    template = get_template(chat, tokenizer) if chat.unread_keys else ""
    keys = [key for key in chat.unread_keys if not re.search(rf"\b{re.escape(key)}\b", template)]
    return [f"the key {key!r} in a message" for key in keys] + name_columns(chat.unread_columns)


def name_columns(columns: Iterable[str]) -> list[str]:
    """Name columns that are not read."""
    return [f"the column {column!r}" for column in columns]


def get_template(chat: Chat, tokenizer: PreTrainedTokenizerBase) -> str:
    """Return the template that renders ``chat``."""
    own = str(tokenizer.get_chat_template(tools=chat.tools))
    return _NO_CLOCK + own if "strftime_now" in own else own
