"""A row of a file or dataset -> its document: a text, a chat, or a prompt with its completion.

    format               columns                              document
    auto, jsonl, ...     text_column                          the text
    messages             messages; tools                      a chat
    sharegpt             conversations; system, tools         a chat
    alpaca               instruction, output; input, system   a chat of one question and its answer
    prompt_completion    prompt, completion; tools            two texts, or a chat in two parts

Every error names the row and the column.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from kd.config.data import DataConfig
from kd.errors import DataError
from kd.text.chats import Chat

#: The roles of messages by the names that ShareGPT files have for them.
SHAREGPT_ROLES = {
    "system": "system",
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "assistant": "assistant",
    "model": "assistant",
    "tool": "tool",
    "observation": "tool",
    "function_response": "tool",
}
#: The columns that show what a row holds, by the format that reads it.
COLUMNS = {
    "messages": ("messages",),
    "sharegpt": ("conversations",),
    "prompt_completion": ("prompt", "completion"),
    "alpaca": ("instruction", "output"),
}


#: What values are called in errors.
_TYPES: dict[type, str] = {
    bool: "true or false",
    int: "a number",
    float: "a number",
    str: "a text",
    list: "a list",
    dict: "an object with keys",
    type(None): "null",
}


def _name_type(value: Any) -> str:
    return _TYPES.get(type(value), f"of type {type(value).__name__}")


@dataclass(frozen=True)
class Completion:
    """Two texts, one after the other; only the second is learned."""

    prompt: str
    completion: str


@dataclass(frozen=True)
class TextRow:
    """A row, and its place in words."""

    cells: dict[str, Any]
    place: str
    format: str

    def read(self, column: str) -> Any:
        """Return what the row has in ``column``; raises ``DataError`` if there is nothing."""
        if column not in self.cells:
            known = ", ".join(sorted(self.cells))
            raise DataError(
                f"{self.place} has no {column!r}; its columns: {known}.", self.suggest_format()
            )
        if self.cells[column] is None:
            raise DataError(
                f"{self.place}: {column!r} is null.",
                f"Give it a value, or remove the row. {self.suggest_format()}",
            )
        return self.cells[column]

    def read_text(self, column: str) -> str:
        """Return the text in ``column``."""
        return self.require_text(self.read(column), repr(column))

    def read_optional_text(self, column: str) -> str:
        """Return the text in ``column``, empty if the row has none."""
        return "" if self.cells.get(column) is None else self.read_text(column)

    def read_list(self, column: str) -> list[Any]:
        """Return the list in ``column``."""
        found = self.read(column)
        if not isinstance(found, list):
            raise self.refuse_type(repr(column), found, "a list")
        return found

    def require_text(self, value: Any, what: str) -> str:
        """Return ``value`` if it is Unicode text; ``what`` names it in the error."""
        if value is None:
            raise DataError(f"{self.place}: {what} is null.", "Give it a text, or remove the row.")
        if not isinstance(value, str):
            raise self.refuse_type(what, value, "a text")
        try:
            value.encode()
        except UnicodeEncodeError as error:
            raise DataError(
                f"{self.place}: character {error.start + 1} of {what} is {value[error.start]!r}, "
                "half of a surrogate pair: it is not text.",
                "Write the text as UTF-8 again, or remove the row.",
            ) from None
        return value

    def refuse_type(self, what: str, value: Any, expected: str) -> DataError:
        """Return the error for a value that is not ``expected``, such as a text or a list."""
        return DataError(
            f"{self.place}: {what} must be {expected}, but is {_name_type(value)}.",
            f"Convert it. {self.suggest_format()}",
        )

    def suggest_format(self) -> str:
        """Return the remedy for a row that is not of its format: the one that its columns show."""
        shown = next(
            (
                name
                for name, columns in COLUMNS.items()
                if name != self.format and all(self.cells.get(each) for each in columns)
            ),
            None,
        )
        if shown is not None:
            return f"Set data.format: {shown}."
        columns = COLUMNS.get(self.format)
        if columns is None:
            return "Set data.text_column."
        need = " and ".join(columns)
        shape = " A chat is a list of {role, content}." if self.format == "messages" else ""
        return f"Format {self.format} reads the columns {need}: rename them.{shape}"


def drop_absent_fields(row: Any) -> Any:
    """Return a row of a table without the null fields of the objects in its columns.

    All objects of a column have the same fields there: a call of one tool has the arguments of
    every tool, and those of the others are null.
    """
    if not isinstance(row, dict):
        return row
    return {column: _drop_nulls(cell) for column, cell in row.items()}


def _drop_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _drop_nulls(each) for key, each in value.items() if each is not None}
    return [_drop_nulls(each) for each in value] if isinstance(value, list) else value


def read_cell(cells: Any, place: str, config: DataConfig) -> str | Chat | Completion:
    """Return the document in a row; raises ``DataError`` where it is not of the job's format."""
    if not isinstance(cells, dict):
        raise DataError(
            f"{place} is not a JSON object: {str(cells)[:40]}.",
            "Give one object with named columns per row.",
        )
    row = TextRow(cells, place, config.format)
    reader = _READERS.get(config.format)
    return row.read_text(config.text_column) if reader is None else reader(row)


# ---------------------------------------------------------------------- formats


def _read_messages(row: TextRow) -> Chat:
    return Chat(_read_chat(row, "messages"), Chat.read_tools(row.cells, row.place))


def _read_sharegpt(row: TextRow) -> Chat:
    messages = [
        _read_turn(row, turn, f"turn {number} of 'conversations'")
        for number, turn in enumerate(row.read_list("conversations"), 1)
    ]
    return Chat(_read_system(row) + messages, Chat.read_tools(row.cells, row.place))


def _read_alpaca(row: TextRow) -> Chat:
    question = row.read_text("instruction")
    context = row.read_optional_text("input")
    messages = [
        {"role": "user", "content": f"{question}\n\n{context}" if context else question},
        {"role": "assistant", "content": row.read_text("output")},
    ]
    return Chat(_read_system(row) + messages)


def _read_prompt_completion(row: TextRow) -> Chat | Completion:
    if isinstance(row.read("prompt"), str):
        return Completion(row.read_text("prompt"), row.read_text("completion"))
    prompt = _read_chat(row, "prompt")
    answer = _read_chat(row, "completion")
    tools = Chat.read_tools(row.cells, row.place)
    return Chat(prompt + answer, tools, learned_from=len(prompt))


_READERS: dict[str, Callable[[TextRow], str | Chat | Completion]] = {
    "messages": _read_messages,
    "sharegpt": _read_sharegpt,
    "alpaca": _read_alpaca,
    "prompt_completion": _read_prompt_completion,
}


# ---------------------------------------------------------------------- messages


def _read_system(row: TextRow) -> list[dict[str, Any]]:
    text = row.read_optional_text("system")
    return [{"role": "system", "content": text}] if text else []


def _read_turn(row: TextRow, turn: Any, what: str) -> dict[str, Any]:
    """Return a turn of ShareGPT, {from, value}, as a message."""
    if not isinstance(turn, dict):
        raise row.refuse_type(what, turn, "an object with keys")
    name = row.require_text(turn.get("from"), f"'from' in {what}")
    if name not in SHAREGPT_ROLES:
        raise DataError(
            f"{row.place}: {what} is from {name!r}, which is not known.",
            f"Use one of {', '.join(SHAREGPT_ROLES)}.",
        )
    content = _read_content(row, turn.get("value"), f"'value' in {what}")
    return {"role": SHAREGPT_ROLES[name], "content": content}


def _read_chat(row: TextRow, column: str) -> list[dict[str, Any]]:
    return [
        _read_message(row, message, f"message {number} of {column!r}")
        for number, message in enumerate(row.read_list(column), 1)
    ]


def _read_message(row: TextRow, message: Any, what: str) -> dict[str, Any]:
    """Return a message whose content is a text; only a call of tools may have none."""
    if not isinstance(message, dict):
        raise row.refuse_type(what, message, "an object with keys")
    row.require_text(message.get("role"), f"'role' in {what}")
    if message.get("weight") not in (None, 0, 1):
        raise DataError(
            f"{row.place}: 'weight' in {what} is {message['weight']!r}, but must be 0 or 1.",
            "0 = the message is not learned. Leave it out to learn the message.",
        )
    # Chat templates ask whether a message has a key, such as tool_calls, and do not expect null.
    message = {key: each for key, each in message.items() if each is not None or key == "content"}
    if message.get("content") is None and message.get("tool_calls"):
        return message
    return message | {"content": _read_content(row, message.get("content"), f"'content' in {what}")}


def _read_content(row: TextRow, content: Any, what: str) -> str:
    """Return the text of a content; one that is given in parts is joined."""
    if not isinstance(content, list):
        return row.require_text(content, what)
    return "".join(
        _read_part(row, part, f"part {number} of {what}") for number, part in enumerate(content, 1)
    )


def _read_part(row: TextRow, part: Any, what: str) -> str:
    if isinstance(part, str):
        return row.require_text(part, what)
    if not isinstance(part, dict):
        raise row.refuse_type(what, part, "an object with keys")
    kind = part.get("type") or "text"
    if kind != "text":
        raise DataError(
            f"{row.place}: {what} is of type {kind!r}: only text can be read.",
            "Remove the part or the row.",
        )
    return row.require_text(part.get("text"), f"'text' in {what}")
