"""Receives the form of ``POST /files``: the file goes to the disk while it arrives, checked."""

from __future__ import annotations

import re
from asyncio import to_thread
from collections.abc import Callable
from dataclasses import dataclass, field

from fastapi import Request
from starlette.requests import ClientDisconnect
from werkzeug.exceptions import RequestEntityTooLarge
from werkzeug.http import parse_options_header
from werkzeug.sansio.multipart import Data, Field, File, MultipartDecoder, NeedData

from kd.errors import Problem
from services.api.answers.problems import ApiProblem
from services.api.openai.rows import RowChecker, make_file_problem
from services.store.training_files import PendingFile, TrainingFile, TrainingFiles

PURPOSE = "fine-tune"
#: The bytes that one step in a thread reads.
STEP_BYTES = 1 << 20
#: The bytes between two looks at the room for the file: its length need not be known.
ROOM_BYTES = 8 << 20
#: The bytes that may wait for the end of a part's headers.
_BUFFER_BYTES = 4 << 20
_MOST_PARTS = 16
_MOST_VALUE_BYTES = 1024
_MOST_NAME_LENGTH = 255
_NOT_PLAIN = re.compile(r"[/\\\x00-\x1f\x7f\ud800-\udfff]")


async def receive_file(
    request: Request,
    files: TrainingFiles,
    team: str,
    limit: int,
    require_room: Callable[[], None],
) -> TrainingFile:
    """Return the file that the request uploads, as a file of ``team``, whole on the disk.

    ``limit`` is in bytes. ``require_room`` is called while the file arrives and once it is whole;
    what it raises refuses the file. Raises ``ApiProblem`` for a form or a file that is not valid.
    Of a file that is refused nothing is kept.
    """
    boundary = _read_boundary(request)
    with files.receiving(team) as pending:
        form = UploadForm(boundary, pending, limit)
        waiting = bytearray()
        looked = 0
        try:
            async for piece in request.stream():
                waiting += piece
                if len(waiting) >= STEP_BYTES:
                    await to_thread(form.feed, bytes(waiting))
                    waiting.clear()
                if pending.bytes - looked >= ROOM_BYTES:
                    looked = pending.bytes
                    pending.flush()
                    await to_thread(require_room)
        except ClientDisconnect:
            raise ApiProblem(
                400, "The upload ended before the whole file had arrived.", "Send it again."
            ) from None
        await to_thread(form.feed, bytes(waiting))
        return await to_thread(form.finish, require_room)


def _read_boundary(request: Request) -> bytes:
    media_type, options = parse_options_header(request.headers.get("content-type", ""))
    boundary = options.get("boundary", "")
    if media_type != "multipart/form-data" or not boundary:
        raise ApiProblem(
            415,
            "The body is not a form with a file.",
            "Send multipart/form-data with the fields purpose and file, as OpenAI's clients do.",
        )
    return boundary.encode("latin-1", "replace")


@dataclass
class UploadForm:
    """The form while it is read; its file is written to ``pending``."""

    boundary: bytes
    pending: PendingFile
    limit: int
    checker: RowChecker = field(default_factory=RowChecker)
    filename: str | None = None
    values: dict[str, bytes] = field(default_factory=dict)
    #: The field whose value is being read; None inside the file.
    name: str | None = None

    def __post_init__(self) -> None:
        self._decoder = MultipartDecoder(self.boundary, _BUFFER_BYTES, max_parts=_MOST_PARTS)

    def feed(self, piece: bytes | None) -> None:
        """Read a piece of the body; None is its end."""
        try:
            self._decoder.receive_data(piece)
            while not isinstance(event := self._decoder.next_event(), NeedData):
                if isinstance(event, Data):
                    self._read(event.data)
                elif isinstance(event, File):
                    self._begin_file(event)
                elif isinstance(event, Field):
                    self._begin_value(event)
                elif piece is None:
                    break
        except RequestEntityTooLarge:
            raise ApiProblem(
                413, "The form has too many fields, or too long headers.", "Send purpose and file."
            ) from None
        except ValueError as error:
            raise ApiProblem(
                400, f"The form cannot be read: {error}.", "Send multipart/form-data."
            ) from None

    def finish(self, require_room: Callable[[], None]) -> TrainingFile:
        """Check that the form is whole and that there is room for its file, and publish it."""
        self.feed(None)
        self._require_purpose()
        if self.filename is None:
            raise make_file_problem("The form has no file.", "Send the field file.")
        form = self.checker.finish()
        return self.pending.publish(self.filename, self.checker.rows, form, require_room)

    def _begin_file(self, part: File) -> None:
        if part.name != "file" or self.filename is not None:
            raise _refuse_field(part.name)
        if not part.filename or len(part.filename) > _MOST_NAME_LENGTH:
            detail = f"The name of the file must have 1 to {_MOST_NAME_LENGTH} characters."
            raise make_file_problem(detail, "Send a shorter name.")
        if _NOT_PLAIN.search(part.filename) or part.filename in (".", ".."):
            detail = f"{part.filename!a} is not a plain name of a file."
            raise make_file_problem(detail, "Send the name without folders.")
        self.filename = part.filename
        self.name = None

    def _begin_value(self, part: Field) -> None:
        if part.name != "purpose" or part.name in self.values:
            raise _refuse_field(part.name)
        self.name = part.name
        self.values[part.name] = b""

    def _read(self, piece: bytes) -> None:
        if self.name is not None:
            self.values[self.name] += piece
            if len(self.values[self.name]) > _MOST_VALUE_BYTES:
                detail = f"The field {self.name} has more than {_MOST_VALUE_BYTES} bytes."
                raise ApiProblem(413, detail, "Give a shorter value.")
            return
        if self.pending.bytes + len(piece) > self.limit:
            detail = f"The file is larger than {self.limit} bytes."
            remedy = "Split it, or ask the operator for a higher KD_FILE_BYTES."
            raise ApiProblem(413, detail, remedy, errors=[Problem("/file", detail, remedy)])
        self.checker.feed(piece)
        self.pending.write(piece)

    def _require_purpose(self) -> None:
        purpose = self.values.get("purpose", b"").decode("utf-8", "replace")
        if purpose != PURPOSE:
            detail = f"The purpose is {purpose!a}." if purpose else "The form has no purpose."
            remedy = f"The only purpose is {PURPOSE}."
            raise ApiProblem(400, detail, remedy, errors=[Problem("/purpose", detail, remedy)])


def _refuse_field(name: str | None) -> ApiProblem:
    detail = f"The form has the field {name!a}, which is not known, or has it twice."
    remedy = "Send the fields purpose and file, each once."
    pointer = f"/{name}" if name else ""
    return ApiProblem(400, detail, remedy, errors=[Problem(pointer, detail, remedy)])
