"""Tools and their calls in the one form that templates know, whatever form a row has.

    a call    {"type": "function", "function": {"name": ..., "arguments": {...}}}
    a tool    {"type": "function", "function": {"name": ..., "parameters": {...}}}

Also read: a call or a schema without the object around it, arguments and lists as JSON text.
"""

from __future__ import annotations

import json
from typing import Any

from kd.errors import DataError

#: A call or a tool, or the object in it that is named function.
Call = dict[str, Any]


def read_tools(tools: Any, place: str) -> list[Any] | None:
    """Return the tools of a row: those of a list, or of the JSON text of one."""
    tools = _parse(tools)
    if tools and not (isinstance(tools, list) and all(isinstance(tool, dict) for tool in tools)):
        detail = f"{place}: 'tools' must be a list of JSON schemas, but is {str(tools)[:40]!r}."
        raise DataError(detail, "Convert it, or remove the column.")
    return [_wrap(tool) if _is_bare(tool) else tool for tool in tools or ()] or None


def read_calls(calls: Any, what: str) -> list[Call]:
    """Return the calls of a message; ``what`` names it. Each has its arguments as an object."""
    calls = _parse(calls)
    several = calls if isinstance(calls, list) else [calls]
    return [_read_call(_parse(call), what) for call in several]


def write_arguments(function: Call) -> str:
    """Return the arguments of a call as the JSON text that OpenAI's servers send."""
    return json.dumps(function["arguments"], ensure_ascii=False)


def _read_call(call: Any, what: str) -> Call:
    wrapped = _wrap(call) if _is_bare(call) else call
    function = wrapped.get("function") if isinstance(wrapped, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        detail = f"{what} calls a tool without a name: {str(call)[:60]}."
        raise DataError(detail, 'A call is {"function": {"name": ..., "arguments": {...}}}.')
    arguments = _parse(function.get("arguments"))
    if arguments in (None, ""):
        arguments = {}
    if not isinstance(arguments, dict):
        raise DataError(
            f"{what} calls {function['name']!r} with arguments that are no JSON object: "
            f"{str(arguments)[:60]!r}.",
            "Correct them, or remove the row.",
        )
    return wrapped | {"function": function | {"arguments": arguments}}


def _is_bare(value: Any) -> bool:
    """Return whether a call or a schema lacks the object around it."""
    return isinstance(value, dict) and "name" in value and "function" not in value


def _wrap(function: Call) -> Call:
    outer = {"id": function["id"]} if "id" in function else {}
    inner = {key: each for key, each in function.items() if key not in ("id", "type")}
    return outer | {"type": "function", "function": inner}


def _parse(value: Any) -> Any:
    """Return what a JSON text holds; any other value and text as it is."""
    try:
        return json.loads(value) if isinstance(value, str) else value
    except json.JSONDecodeError:
        return value
