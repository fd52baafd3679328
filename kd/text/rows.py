"""A row of a file or dataset -> its document: a text, a chat, or a prompt with its completion.

    format               columns                      document
    auto, jsonl, ...     text_column                  the text
    messages             messages                     a chat
    sharegpt             conversations                a chat
    alpaca               instruction, output; input   a chat of one question and its answer, after
                         and history                  earlier ones
    prompt_completion    prompt, completion           two texts, or a chat in two parts

A row with a chat may have its system text under system, and schemas of tools under tools or
functions. Every error names the row and the column. A column or key of a message that changes what
is learned is read or refused; others are named as unread.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from kd.config.data import DataConfig
from kd.errors import DataError
from kd.text.chat.calls import read_calls, read_tools
from kd.text.chat.chat import REASONING, Chat, Completion, Message

#: A row of a file or dataset: its cells by column.
Row = dict[str, Any]
#: The names in ShareGPT files for messages whose value is the JSON text of calls of tools.
_CALLS = ("function_call", "tool_call")
#: The roles of messages by the names that ShareGPT files have for them.
SHAREGPT_ROLES = {
    name: role
    for role, names in {
        "system": ("system",),
        "user": ("human", "user"),
        "assistant": ("gpt", "chatgpt", "assistant", "model", *_CALLS),
        "tool": ("tool", "observation", "function_response", "tool_response"),
    }.items()
    for name in names
}
#: The columns that show what a row holds, by the format that reads it.
COLUMNS = {
    "messages": ("messages",),
    "sharegpt": ("conversations",),
    "prompt_completion": ("prompt", "completion"),
    "alpaca": ("instruction", "output"),
}
#: The columns that a row with a chat may have besides.
_BESIDES = frozenset({"system", "tools", "functions", "input", "history"})
#: The keys of a message that say whether it is learned, and other keys that are read.
_WEIGHTS = ("weight", "train", "loss")
_KEYS = frozenset(
    ["role", "content", "tool_calls", "function_call", "tool_call_id", "name", *_WEIGHTS,
     *REASONING]
)  # fmt: skip
#: Columns, and keys of messages, that others read as a change of what is learned.
_TELLING = frozenset(
    {"system_prompt", "system_message", "chat_template_kwargs", "train_detail", "loss_mask",
     "mask", "trainable", "refusal", "from", "value", *_WEIGHTS}
)  # fmt: skip


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


class RowWithoutText(DataError):
    """A row lacks the column that holds its text or chat, or has null in it."""


@dataclass(frozen=True)
class TextRow:
    """A row, and its place in words."""

    cells: Row
    place: str
    format: str

    def read(self, column: str) -> Any:
        """Return what the row has in ``column``; raises ``RowWithoutText`` if it is nothing."""
        if column not in self.cells:
            known = ", ".join(sorted(self.cells))
            detail = f"{self.place} has no {column!r}; its columns: {known}."
            raise RowWithoutText(detail, self.suggest_format())
        if self.cells[column] is None:
            remedy = f"Give it a value, or remove the row. {self.suggest_format()}"
            raise RowWithoutText(f"{self.place}: {column!r} is null.", remedy)
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
        found = _TYPES.get(type(value), f"of type {type(value).__name__}")
        detail = f"{self.place}: {what} must be {expected}, but is {found}."
        return DataError(detail, f"Convert it. {self.suggest_format()}")

    def suggest_format(self) -> str:
        """Return the remedy for a row that is not of its format: the one that its columns show."""
        for name, columns in COLUMNS.items():
            if name != self.format and all(self.cells.get(each) for each in columns):
                return f"Set data.format: {name}."
        if self.format not in COLUMNS:
            return "Set data.text_column."
        need = " and ".join(COLUMNS[self.format])
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
    """Return the document in a row; raises ``DataError`` if it is not of the job's format."""
    row = TextRow(require_object(cells, place), place, config.format)
    reader = _READERS.get(config.format)
    return row.read_text(config.text_column) if reader is None else reader(row)


def require_object(cells: Any, place: str) -> Row:
    """Return the cells of a row; raise ``DataError`` if it is no object."""
    if not isinstance(cells, dict):
        detail = f"{place} is not a JSON object: {str(cells)[:40]}."
        raise DataError(detail, "Give one object with named columns per row.")
    return cells


# ---------------------------------------------------------------------- formats


def _read_sharegpt(row: TextRow) -> Chat:
    turns = enumerate(row.read_list("conversations"), 1)
    said = [_read_turn(row, turn, f"turn {number} of 'conversations'") for number, turn in turns]
    return _make_chat(row, said)


def _read_alpaca(row: TextRow) -> Chat:
    question = row.read_text("instruction")
    context = row.read_optional_text("input")
    pairs = row.read_list("history") if row.cells.get("history") else []
    if not all(isinstance(pair, list) and len(pair) == 2 for pair in pairs):
        raise row.refuse_type("'history'", pairs, "a list of pairs [question, answer]")
    earlier = [
        {"role": role, "content": row.require_text(text, "a text in 'history'")}
        for pair in pairs
        for role, text in zip(("user", "assistant"), pair, strict=True)
    ]
    messages = [
        *earlier,
        {"role": "user", "content": f"{question}\n\n{context}" if context else question},
        {"role": "assistant", "content": row.read_text("output")},
    ]
    return _make_chat(row, messages, learned_from=len(earlier))


def _read_prompt_completion(row: TextRow) -> Chat | Completion:
    if isinstance(row.read("prompt"), str):
        texts = (row.read_text("prompt"), row.read_text("completion"))
        return Completion(*texts, _find_unread(row, frozenset()))
    prompt = _read_chat(row, "prompt")
    return _make_chat(row, prompt + _read_chat(row, "completion"), learned_from=len(prompt))


_READERS: dict[str, Callable[[TextRow], str | Chat | Completion]] = {
    "messages": lambda row: _make_chat(row, _read_chat(row, "messages")),
    "sharegpt": _read_sharegpt,
    "alpaca": _read_alpaca,
    "prompt_completion": _read_prompt_completion,
}


def _make_chat(row: TextRow, messages: list[Message], learned_from: int = 0) -> Chat:
    """Make the chat of a row, with what its other columns say."""
    besides = _BESIDES if row.format == "alpaca" else _BESIDES - {"input", "history"}
    columns = _find_unread(row, besides)
    text = row.read_optional_text("system")
    system = {"role": "system", "content": text}
    if text and system not in messages[:1]:
        messages = [system, *messages]
        learned_from += learned_from > 0
    tools = read_tools(row.cells.get("tools") or row.cells.get("functions"), row.place)
    keys = dict.fromkeys(key for each in messages for key in each if key not in _KEYS)
    return Chat(messages, tools, learned_from, tuple(keys), columns)


def _find_unread(row: TextRow, besides: frozenset[str]) -> tuple[str, ...]:
    """Return the columns that are not read; raise ``DataError`` for one that changes a chat."""
    read = {*COLUMNS[row.format], *besides}
    unread = [name for name, cell in row.cells.items() if name not in read and not _is_empty(cell)]
    for name in unread:
        if name in _TELLING | _BESIDES - {"input"}:
            raise DataError(
                f"{row.place} has {name!r} beside {' and '.join(map(repr, COLUMNS[row.format]))}, "
                "which changes what is learned and is not read here.",
                "Write it into the messages, or remove the column.",
            )
    return tuple(unread)


def _is_empty(cell: Any) -> bool:
    return cell is None or (isinstance(cell, str | list | dict) and not cell)


# ---------------------------------------------------------------------- messages


def _read_turn(row: TextRow, turn: Any, what: str) -> Message:
    """Return a turn of ShareGPT, {from, value}, as a message."""
    if not isinstance(turn, dict):
        raise row.refuse_type(what, turn, "an object with keys")
    name = row.require_text(turn.get("from"), f"'from' in {what}")
    if name not in SHAREGPT_ROLES:
        detail = f"{row.place}: {what} is from {name!r}, which is not known."
        raise DataError(detail, f"Use one of {', '.join(SHAREGPT_ROLES)}.")
    value = turn.get("value")
    said = {"tool_calls": value} if name in _CALLS else {"content": value}
    rest = {key: each for key, each in turn.items() if key not in ("from", "value")}
    return _read_message(row, rest | {"role": SHAREGPT_ROLES[name]} | said, what, "value")


def _read_chat(row: TextRow, column: str) -> list[Message]:
    return [
        _read_message(row, message, f"message {number} of {column!r}")
        for number, message in enumerate(row.read_list(column), 1)
    ]


def _read_message(row: TextRow, message: Any, what: str, content: str = "content") -> Message:
    """Return a message whose content is a text; one that calls tools may have none."""
    if not isinstance(message, dict):
        raise row.refuse_type(what, message, "an object with keys")
    role = row.require_text(message.get("role"), f"'role' in {what}")
    # Chat templates ask whether a message has a key, such as tool_calls, and do not expect null.
    kept = {key: each for key, each in message.items() if key == "content" or not _is_empty(each)}
    for key in kept.keys() & _TELLING - {*_WEIGHTS}:
        detail = f"{row.place}: {what} has {key!r}, which changes what is learned and is not read."
        raise DataError(detail, "Write it into the content or as weight 0 or 1, or remove it.")
    weight = _read_weight(row, {key: kept.pop(key) for key in _WEIGHTS if key in kept}, role, what)
    calls = kept.pop("function_call", None) or kept.get("tool_calls")
    if calls:
        kept["tool_calls"] = read_calls(calls, f"{row.place}: {what}")
    if calls and kept.get("content") is None:
        kept["content"] = ""
    kept["content"] = _read_content(row, kept.get("content"), f"{content!r} in {what}")
    return kept | weight | {"role": "tool" if role == "function" else role}


def _read_weight(row: TextRow, said: Message, role: str, what: str) -> dict[str, int]:
    """Return the weight of a message: 0 = it is not learned, nothing = it is."""
    for key, value in said.items():
        if value not in (0, 1):
            detail = f"{row.place}: {key!r} in {what} is {value!r}, but must be 0 or 1."
            remedy = "0 = the message is not learned. Leave it out to learn the message."
            raise DataError(detail, remedy)
        if value and key != "weight" and role != "assistant":
            raise DataError(
                f"{row.place}: {key!r} in {what} is {value!r}, but only messages of the assistant "
                "are learned.",
                "Set data.assistant_only_loss: false to learn whole chats, or remove it.",
            )
    return {} if all(said.values()) else {"weight": 0}


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
        detail = f"{row.place}: {what} is of type {kind!r}: only text can be read."
        raise DataError(detail, "Remove the part or the row.")
    return row.require_text(part.get("text"), f"'text' in {what}")
