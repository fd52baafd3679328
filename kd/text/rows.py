"""A row of a file or dataset -> its document: a text or a chat."""

from __future__ import annotations

from typing import Any

from kd.config.data import DataConfig
from kd.errors import DataError
from kd.text.chats import Chat


def read_cell(row: Any, where: str, config: DataConfig) -> Any:
    """Return the document in a row: a string, or a chat."""
    column, kind = ("messages", list) if config.format == "messages" else (config.text_column, str)
    if not isinstance(row, dict):
        raise DataError(
            f"{where} is not a JSON object: {str(row)[:40]}.",
            "Give one object with named columns per row.",
        )
    if row.get(column) is None:
        known = ", ".join(sorted(row))
        raise DataError(
            f"{where} has no {column!r}; its columns: {known}.", _suggest_column(row, config)
        )
    if not isinstance(row[column], kind):
        detail = (
            f"{where}: {column!r} must be a {kind.__name__}, but is a {type(row[column]).__name__}."
        )
        raise DataError(detail, f"Convert it. {_suggest_column(row, config)}")
    return Chat.of(row, where) if config.format == "messages" else row[column]


def _suggest_column(row: dict[str, Any], config: DataConfig) -> str:
    """Return the remedy for a row without a document in the expected column; it may be a chat."""
    chat = (
        "A chat is a list of {role, content} under messages: rename the column, and its keys if "
        "they differ."
    )
    if config.format == "messages":
        return chat
    if isinstance(row.get("messages"), list):
        return "Set data.format: messages."
    if isinstance(row.get("conversations"), list):  # the column that ShareGPT uses
        return f"Set data.format: messages. {chat}"
    return "Set data.text_column."
