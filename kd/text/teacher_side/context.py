"""``teacher.system`` and ``teacher.context``: a document as the teacher reads it.

    a chat                         the context replaces the user's message before the first answer
                                   that is learned, and ``system`` the system message
    a prompt with its completion   the context replaces the prompt
    a text                         the context comes before it

``{column}`` in the context is a column of the row, and ``{prompt}`` what it replaces.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from kd.config.fields.contexts import read_context
from kd.config.job import JobConfig
from kd.errors import DataError
from kd.text.chat.chat import Chat, Completion
from kd.text.rows import Row, TextRow

#: The name in a context for what it replaces.
_PROMPT = "prompt"


@dataclass(frozen=True)
class TeacherContext:
    """What replaces the system message and the prompt; each may be empty.

    ``length``: the most tokens of a sequence that the teacher reads.
    """

    system: str
    context: str
    length: int

    @classmethod
    def of(cls, job: JobConfig) -> TeacherContext | None:
        """Return the context of a job; None if its teacher reads what the student reads."""
        found = job.teacher_context
        return None if found is None else cls(*found)

    def apply(self, content: Any, cells: Row, place: str) -> tuple[Any, Any]:
        """Return the document of a row, and what the teacher reads in its place.

        The columns that the context names count as read. Raises ``DataError`` for a row that lacks
        one of them, or what is replaced.
        """
        row = TextRow(cells, place, "")
        if isinstance(content, Chat):
            return self._mark_read(content), self._apply_to_chat(content, row)
        if isinstance(content, Completion):
            if self.system:
                detail = f"{place}: teacher.system needs a chat, but the prompt is a text."
                raise DataError(detail, "Write it into teacher.context, before {prompt}.")
            theirs = replace(content, prompt=self._fill(row, content.prompt))
            return self._mark_read(content), theirs
        return content, self._fill(row, None)

    def _mark_read(self, content: Any) -> Any:
        names = [name for _, name in read_context(self.context)]
        unread = tuple(each for each in content.unread_columns if each not in names)
        return replace(content, unread_columns=unread)

    def _apply_to_chat(self, chat: Chat, row: TextRow) -> Chat:
        messages = list(chat.messages)
        if self.context:
            end = min(chat.list_learned(), default=len(messages))
            asked = [place for place in range(end) if messages[place]["role"] == "user"]
            if not asked:
                raise DataError(
                    f"{row.place}: no message of the user comes before the first answer, so that "
                    "there is none that teacher.context replaces.",
                    "Add one, remove the row, or give the teacher its words in teacher.system.",
                )
            message = messages[asked[-1]]
            messages[asked[-1]] = message | {"content": self._fill(row, message["content"])}
        learned_from = chat.learned_from
        if self.system:
            has_system = messages[0]["role"] == "system"
            messages[:has_system] = [{"role": "system", "content": self.system}]
            learned_from += learned_from > 0 and not has_system
        return replace(chat, messages=messages, learned_from=learned_from)

    def _fill(self, row: TextRow, prompt: str | None) -> str:
        """Return the context of a row whose prompt is ``prompt``; a text has none."""
        parts = list[str]()
        for text, name in read_context(self.context or "{prompt}"):
            parts.append(text)
            if name is not None:
                known = prompt if name == _PROMPT else None
                parts.append(_read_column(row, name) if known is None else known)
        return "".join(parts)


def _read_column(row: TextRow, name: str) -> str:
    found = row.cells.get(name)
    if isinstance(found, int | float) and not isinstance(found, bool):
        return str(found)
    if name in row.cells and found is not None:
        return row.require_text(found, f"{name!r}, which teacher.context names,")
    columns = ", ".join(sorted(row.cells)) or "none, because it is a plain text"
    what = f"has no {name!r}" if name not in row.cells else f"has null in {name!r}"
    raise DataError(
        f"{row.place} {what}, which teacher.context names; its columns: {columns}.",
        "Correct teacher.context or the row.",
    )
