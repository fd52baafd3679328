"""Is what a chat says in what its template writes? Templates cut, drop and rewrite in silence.

White space is not compared: templates trim it.
"""

from __future__ import annotations

import json
import re
from functools import lru_cache
from typing import Any

from kd.text.chat.calls import Call
from kd.text.chat.chat import REASONING, Message, list_texts

#: The tags around the reasoning in an answer; a template may write others in their place.
_TAGS = re.compile(r"</?think>")
#: A part of a content where a template expected a text.
_PART = re.compile(r"""['"]type['"]: ?['"]text['"]""")


@lru_cache(maxsize=8)
def squeeze(text: str) -> str:
    """Return ``text`` without white space."""
    return "".join(text.split())


def holds(shown: str, said: str) -> bool:
    """Return whether the text ``shown`` holds ``said``, but for white space."""
    return said.strip() in shown or squeeze(said) in squeeze(shown)


def read_content(message: Message) -> str:
    """Return the content of a message in any form as a text."""
    content = message.get("content") or ""
    return content if isinstance(content, str) else "".join(part["text"] for part in content)


def drop_reasoning(message: Message) -> Message:
    """Return a message without its reasoning, which templates leave out of earlier answers."""
    said = read_content(message).rpartition("</think>")[2]
    kept: Any = [{"type": "text", "text": said}] if isinstance(message["content"], list) else said
    return {key: each for key, each in message.items() if key not in REASONING} | {"content": kept}


def find_lost(message: Message, shown: str) -> str | None:
    """Name what a message says and the text ``shown`` does not, if there is anything."""
    for key in ("content", *REASONING):
        said = read_content(message) if key == "content" else message.get(key)
        for piece in _TAGS.split(said) if isinstance(said, str) else ():
            if not holds(shown, piece):
                return f"its {key} {shorten(piece)}"
    if isinstance(message.get("content"), list) and _PART.search(shown):
        return "its content as a text"
    for call in message.get("tool_calls") or ():
        if lost := _find_lost_in_call(call["function"], shown):
            return f"its call of the tool {call['function']['name']!r}, or {lost} in it"
    return None


def _find_lost_in_call(function: Call, shown: str) -> str | None:
    """Name what of a call the text does not hold, or holds as something other than JSON."""
    arguments = function["arguments"]
    if isinstance(arguments, str):  # a template that wants an object writes the text as a text
        if any(holds(shown, json.dumps(arguments, ensure_ascii=each)) for each in (False, True)):
            return "its arguments as an object"
        arguments = json.loads(arguments)
    elif arguments and holds(shown, str(arguments)):
        return "its arguments as JSON"
    for text in (function["name"], *list_texts(arguments)):
        forms = (text, *(json.dumps(text, ensure_ascii=each)[1:-1] for each in (False, True)))
        if not any(holds(shown, form) for form in forms):
            return shorten(text)
    return None


def is_open(message: Message, shown: str) -> bool:
    """Return whether nothing stands after the answer in ``shown``: no token ends the turn."""
    if message.get("tool_calls"):
        return re.search(r"[}\]]\s*$|</\w*(call|calls|function)>\s*$", shown) is not None
    said = squeeze(read_content(message).rpartition("</think>")[2])
    return bool(said) and squeeze(shown).endswith(said)


def shorten(text: str, most: int = 40) -> str:
    """Return the beginning of ``text`` in quotes."""
    text = text.strip()
    return repr(text if len(text) <= most else text[:most] + "…")
