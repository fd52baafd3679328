"""A chat: messages and tools in one form, whatever form their row has."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from kd.text.chat.calls import write_arguments

#: A message of a chat, {role, content, ...}, as templates take it.
Message = dict[str, Any]
#: The keys that may hold the reasoning before an answer; transformers takes each for the others.
REASONING = ("reasoning_content", "thinking", "reasoning")


@dataclass(frozen=True)
class Chat:
    """The messages of a chat ({role, content, ...}), and the JSON schemas of its tools, if any.

    ``learned_from``: the number of messages before the first that may be learned. A message of the
    assistant with ``weight`` 0 is not learned either, as in OpenAI's files for fine-tuning.
    ``unread_keys`` of messages may be read by a template; nothing reads ``unread_columns``.
    """

    messages: list[Any]
    tools: list[Any] | None = None
    learned_from: int = 0
    unread_keys: tuple[str, ...] = ()
    unread_columns: tuple[str, ...] = ()

    def is_learned(self, number: int) -> bool:
        """Return whether message ``number`` is one of the assistant that may be learned."""
        message = self.messages[number]
        weighs = message.get("role") == "assistant" and message.get("weight", 1)
        return number >= self.learned_from and bool(weighs)

    def list_learned(self) -> list[int]:
        """Return the numbers of the messages that may be learned."""
        return [number for number in range(len(self.messages)) if self.is_learned(number)]

    def take_first(self, count: int) -> Chat:
        """Return the chat's first ``count`` messages."""
        return replace(self, messages=self.messages[:count])

    def count_characters(self) -> int:
        """Return the characters of the messages that are texts."""
        contents = (each.get("content") for each in self.messages if isinstance(each, dict))
        return sum(len(content) for content in contents if isinstance(content, str))


@dataclass(frozen=True)
class Completion:
    """Two texts, one after the other; only the second is learned."""

    prompt: str
    completion: str
    unread_columns: tuple[str, ...] = ()


def list_texts(value: Any) -> Iterator[str]:
    """Yield the keys and the texts in ``value``, which JSON can hold."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        yield from value
    inner = list(value.values()) if isinstance(value, dict) else value
    for each in inner if isinstance(inner, list) else ():
        yield from list_texts(each)


# ---------------------------------------------------------------------- forms


class Form(NamedTuple):
    """How a chat is given to a template: some templates can only read one of two forms.

    ``as_text``: the arguments of a call are JSON text, and not an object. ``in_parts``: a content
    is a list of parts. ``as_null``: the empty content of a message that calls tools is null.
    """

    as_text: bool = False
    in_parts: bool = False
    as_null: bool = False

    def shape(self, chat: Chat) -> Chat:
        """Return ``chat`` in this form."""
        return replace(chat, messages=list(map(self._shape_message, chat.messages)))

    def _shape_message(self, message: Message) -> Message:
        content = message["content"]
        calls = message.get("tool_calls")
        if calls and self.as_null and not content:
            content = None
        elif self.in_parts:
            content = [{"type": "text", "text": content}]
        shaped = message | {"content": content}
        if calls and self.as_text:
            shaped["tool_calls"] = [
                call | {"function": function | {"arguments": write_arguments(function)}}
                for call in calls
                for function in (call["function"],)
            ]
        return shaped


def list_forms(chat: Chat) -> Iterator[Form]:
    """Yield the forms of ``chat`` that differ, the usual one first."""
    yield Form()
    calls = any(message.get("tool_calls") for message in chat.messages)
    if calls:
        yield from (Form(as_text=True), Form(as_null=True), Form(as_text=True, as_null=True))
    yield Form(in_parts=True)
    if calls:
        yield Form(as_text=True, in_parts=True)
