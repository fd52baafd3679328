"""Checks the lines of an uploaded file while they arrive.

Each line is a JSON object of one of three forms, the same for all lines of a file:

    {"messages": [{"role": ..., "content": ...}, ...]}
    {"prompt": ..., "completion": ...}      two texts, or two lists of messages
    {"text": ...}
"""

from __future__ import annotations

import json
from codecs import BOM_UTF8
from typing import Any, NoReturn, get_args

from kd.config.data import DataConfig
from kd.config.jobfile import find_unusable_text
from kd.errors import DataError
from kd.text.chat.chat import Chat, Completion
from kd.text.rows import read_cell
from services.api.answers.problems import ApiProblem
from services.store.training_files import RowForm

#: The longest line, in bytes: a line is held in memory.
MOST_LINE_BYTES = 16 << 20
_FORMS = (
    '{"messages": [{"role": ..., "content": ...}]}, {"prompt": ..., "completion": ...} or'
    ' {"text": ...}'
)
_DATA = {form: DataConfig(format=form) for form in get_args(RowForm)}
_REMEDY = f"Each line is a JSON object: {_FORMS}."


class RowChecker:
    """Reads a file piece by piece; raises 400 with the number of the first line that is wrong."""

    def __init__(self) -> None:
        self.rows = 0
        self.form: RowForm | None = None
        self._line = 0
        self._rest = b""

    def feed(self, piece: bytes) -> None:
        """Check the lines that end in ``piece``."""
        *lines, self._rest = (self._rest + piece).split(b"\n")
        for line in lines:
            self._check(line)
        if len(self._rest) > MOST_LINE_BYTES:
            self._line += 1
            self._refuse(f"it is longer than {MOST_LINE_BYTES} bytes.", "Split the example.")

    def finish(self) -> RowForm:
        """Check the last line, and return the form of all lines."""
        self._check(self._rest)
        self._rest = b""
        if self.form is None:
            raise _make_file_problem("The file holds no example.", _REMEDY)
        return self.form

    def _check(self, line: bytes) -> None:
        self._line += 1
        if not line.removeprefix(BOM_UTF8).strip():
            return
        form = self._find_form(self._parse(line))
        if self.form not in (None, form):
            self._refuse(
                f"it has the form {form}, and the lines before it have {self.form}.",
                "Send lines of one form; put the others into a file of their own.",
            )
        self.form = form
        self.rows += 1

    def _find_form(self, row: Any) -> RowForm:
        """Return the form of a row; refuse one that no job can read."""
        fields = row if isinstance(row, dict) else {}
        form: RowForm = "jsonl"
        if "messages" in fields:
            form = "messages"
        elif "prompt" in fields or "completion" in fields:
            form = "prompt_completion"
        elif "text" not in fields:
            self._refuse("it has none of the forms that a line may have.", _REMEDY)
        try:
            content = read_cell(row, "the row", _DATA[form])
        except DataError as error:
            self._refuse(error.detail, f"{error.remedy} {_REMEDY}")
        if isinstance(content, Chat) and not content.messages:
            self._refuse("it has no messages.", _REMEDY)
        if isinstance(content, Completion) and not content.completion.strip():
            self._refuse("its completion is empty: there is nothing to learn.", "Remove it.")
        return form

    def _parse(self, line: bytes) -> Any:
        if self._line == 1:
            line = line.removeprefix(BOM_UTF8)  # a job passes over it, too
        try:
            row = json.loads(line.decode("utf-8"), parse_constant=_refuse_constant)
        except UnicodeDecodeError as error:
            self._refuse(f"it is not UTF-8 at byte {error.start}.", "Save the file as UTF-8.")
        except RecursionError:
            self._refuse("it is nested too deeply.", _REMEDY)
        except ValueError as error:
            self._refuse(f"it is not JSON: {error}.", _REMEDY)
        if b"\\u" in line and (found := next(find_unusable_text(row), None)):
            self._refuse(found.detail, found.remedy)
        return row

    def _refuse(self, why: str, remedy: str) -> NoReturn:
        raise _make_file_problem(f"Line {self._line} of the file is not valid: {why}", remedy)


def _make_file_problem(detail: str, remedy: str) -> ApiProblem:
    return ApiProblem(400, detail, remedy, "invalid-file")


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON number")
