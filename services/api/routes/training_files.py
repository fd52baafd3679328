"""Routes of the files to train on, which belong to the caller's team.

PUT    /files/{name}           upload a file: JSON lines, as they are
GET    /files                  list the files
GET    /files/{name}           show a file
GET    /files/{name}/content   download it
DELETE /files/{name}           delete it, unless a job that has not ended needs it

A file never changes. The id of a file names it, too: files of earlier versions may share a name.
"""

from __future__ import annotations

import re
from asyncio import to_thread
from datetime import UTC, datetime
from typing import Annotated, Any

from fastapi import APIRouter, Request, Response
from fastapi import Path as InPath
from fastapi.concurrency import run_in_threadpool
from starlette.requests import ClientDisconnect

from kd.client.wire.files import UploadedFile, UploadedFileList
from kd.files import format_bytes
from services.api.admission import make_bytes_problem, require_space
from services.api.answers.accounts import describe_account
from services.api.answers.byte_ranges import ByteSource, send_bytes
from services.api.answers.problems import Answers, ApiProblem
from services.api.answers.run_files import open_run_file
from services.api.guards.json_bodies import StrictRoute
from services.api.guards.json_lines import RowChecker
from services.api.routes.access import READ, WRITE, guard
from services.api.service import Service, TheCaller, TheService
from services.store.callers import Caller
from services.store.training_files import NameTaken, PendingFile, TrainingFile

#: The bytes that one step in a thread checks and writes.
STEP_BYTES = 1 << 20
#: The bytes between two looks at the room for the file: its length need not be known.
ROOM_BYTES = 8 << 20
JSON_LINES = "application/jsonl"
#: Media types that a body may be declared as; `curl -T` declares none.
_MEDIA_TYPES = (JSON_LINES, "application/x-ndjson", "application/octet-stream", "text/plain")
#: A name of a file: no path, no hidden name, nothing that a terminal would not print.
_PLAIN_NAME = re.compile(r"[^./\\\x00-\x1f\x7f][^/\\\x00-\x1f\x7f]{0,254}")

router = APIRouter(tags=["files to train on"], route_class=StrictRoute)

FileName = Annotated[str, InPath(description="The name of the file, or its id.")]
_BYTES: dict[str, Any] = {
    "content": {JSON_LINES: {"schema": {"type": "string", "format": "binary"}}}
}
_KNOWN: Answers = {200: {"model": UploadedFile, "description": "The team has this file already."}}
_DELETED: Answers = {204: {"description": "The file is deleted."}}
_CONTENT: Answers = {
    200: {"description": "The file.", **_BYTES},
    206: {"description": "The part that Range names.", **_BYTES},
}


@router.put(
    "/files/{name}",
    status_code=201,
    openapi_extra={"requestBody": {"required": True, **_BYTES}},
    **guard(WRITE, 400, 409, 413, 415, 422, 429, 507, answers=_KNOWN),
)
async def put_file(
    request: Request, name: FileName, service: TheService, caller: TheCaller, response: Response
) -> UploadedFile:
    """Upload JSON lines for the caller's team: messages, prompt and completion, or text.

    Every line is checked. The file is kept whole, or not at all. It never changes: a name that the
    team has is a conflict, unless the content is the same.
    """
    if _PLAIN_NAME.fullmatch(name) is None:
        remedy = "Choose 1 to 255 characters without folders; the first one is no dot."
        raise ApiProblem(400, f"{name!a} is not a plain name of a file.", remedy)
    declared = request.headers.get("content-type", JSON_LINES).partition(";")[0].strip().lower()
    if declared not in _MEDIA_TYPES:
        detail = f"The file is declared as {declared!a}, which is not JSON lines."
        remedy = f"Send its bytes as they are, without a form, as Content-Type: {JSON_LINES}."
        raise ApiProblem(415, detail, remedy)
    await run_in_threadpool(_admit, request, name, service, caller)
    checker = RowChecker()
    with service.files.receiving(caller.team) as pending:

        def publish() -> TrainingFile:
            form = checker.finish()
            # Others may have arrived meanwhile.
            return pending.publish(name, checker.rows, form, lambda: _require_room(service, caller))

        await _receive(request, pending, checker, service, caller)
        try:
            made = await to_thread(publish)
        except NameTaken:
            raise _make_taken_problem(name) from None
    if made.id != pending.id:
        response.status_code = 200
    else:
        await run_in_threadpool(
            service.audit.record, caller, "file.create", made.id, name=name, bytes=made.bytes
        )
    return _describe(made, service, caller)


def _admit(request: Request, name: str, service: Service, caller: Caller) -> None:
    """Refuse a file before it arrives, if its declared length suffices for that."""
    length = request.headers.get("content-length", "")
    coming = int(length) if length.isdecimal() else 0
    if coming > service.settings.file_bytes:
        raise _make_size_problem(service.settings.file_bytes)
    known = service.files.find(caller.team, name)
    if known is None:
        _require_room(service, caller, coming)
    elif length and coming != known.bytes:
        raise _make_taken_problem(name)


def _require_room(service: Service, caller: Caller, coming: int = 0) -> None:
    """Raise 507 if the disk is nearly full, or 429 if the team would have too many bytes.

    ``coming`` are bytes that are not on the disk yet. The team's files are counted now: the quota
    is measured once a minute, in which many files can come.
    """
    require_space(service.settings, coming)
    account = describe_account(service.store.read_accounts(caller.team)[0])
    limit = account.bytes.limit
    if limit is None:
        return
    more = service.files.measure_team(caller.team) - account.disk.files
    used = max(account.bytes.used + more, 0.0)
    if used + coming > limit:
        now = account.bytes.model_copy(update={"used": used, "left": max(limit - used, 0.0)})
        needed = f"The file needs about {format_bytes(coming)}." if coming else ""
        raise make_bytes_problem(account.model_copy(update={"bytes": now}), needed)


async def _receive(
    request: Request, pending: PendingFile, checker: RowChecker, service: Service, caller: Caller
) -> None:
    """Write the body to ``pending`` while it arrives, and check its lines and its room."""
    limit = service.settings.file_bytes
    waiting = bytearray()
    looked = 0

    def write() -> None:
        if pending.bytes + len(waiting) > limit:
            raise _make_size_problem(limit)
        checker.feed(bytes(waiting))
        pending.write(waiting)
        waiting.clear()

    try:
        async for piece in request.stream():
            waiting += piece
            if len(waiting) >= STEP_BYTES:
                await to_thread(write)
            if pending.bytes - looked >= ROOM_BYTES:
                looked = pending.bytes
                pending.flush()
                await to_thread(_require_room, service, caller)
    except ClientDisconnect:
        detail = "The upload ended before the whole file had arrived."
        raise ApiProblem(400, detail, "Send it again.") from None
    await to_thread(write)


def _make_size_problem(limit: int) -> ApiProblem:
    detail = f"The file is larger than {limit} bytes."
    return ApiProblem(413, detail, "Split it, or ask the operator for a higher KD_FILE_BYTES.")


def _make_taken_problem(name: str) -> ApiProblem:
    detail = f"Your team has a file {name} with other content, and a file never changes."
    return ApiProblem(409, detail, "Delete it first, or choose another name.")


def _describe(file: TrainingFile, service: Service, caller: Caller) -> UploadedFile:
    return UploadedFile(
        name=file.filename,
        id=file.id,
        bytes=file.bytes,
        rows=file.rows,
        format=file.form,
        path=str(service.files.locate(caller.team, file.id)),
        created_at=datetime.fromtimestamp(file.created_at, UTC),
    )


@router.get("/files", **guard(READ))
def list_files(service: TheService, caller: TheCaller) -> UploadedFileList:
    """List the files of the caller's team, newest first."""
    found = reversed(service.files.list_files(caller.team))
    return UploadedFileList(data=[_describe(file, service, caller) for file in found])


@router.get("/files/{name}", **guard(READ, 404, 422))
def get_file(name: FileName, service: TheService, caller: TheCaller) -> UploadedFile:
    """Show a file of the caller's team."""
    return _describe(_find_file(name, service, caller), service, caller)


@router.get(
    "/files/{name}/content", response_class=Response, **guard(READ, 404, 416, 422, answers=_CONTENT)
)
def get_file_content(
    request: Request, name: FileName, service: TheService, caller: TheCaller
) -> Response:
    """Download a file of the caller's team, or the part of it that Range names."""
    file = _find_file(name, service, caller)
    try:
        handle = open_run_file(service.settings.files, service.files.locate(caller.team, file.id))
    except FileNotFoundError:  # it was deleted meanwhile
        raise _make_no_file_problem(name) from None
    return send_bytes(request, ByteSource.of_file(handle, file.bytes, JSON_LINES))


@router.delete(
    "/files/{name}", status_code=204, **guard(WRITE, 404, 409, 422, 429, answers=_DELETED)
)
def delete_file(name: FileName, service: TheService, caller: TheCaller) -> Response:
    """Delete a file of the caller's team; 409 while a job that has not ended needs it."""
    file = _find_file(name, service, caller)
    if users := service.store.find_open_users(file.id):
        # Another key of the team may own the job, whose id is not shown then.
        visible = (each for each in users if service.store.get(each, caller) is not None)
        user = next(visible, "of another key")
        detail = f"The job {user} needs the file {name} and has not ended."
        raise ApiProblem(409, detail, "Wait for its end, or cancel it.", "in-use")
    service.files.remove(caller.team, file.id)
    service.audit.record(caller, "file.delete", file.id, name=file.filename)
    return Response(status_code=204)


def _find_file(name: str, service: Service, caller: Caller) -> TrainingFile:
    """Return the file of this name or id; raise 404 if the caller's team has none."""
    file = service.files.find(caller.team, name)
    if file is None:
        raise _make_no_file_problem(name)
    return file


def _make_no_file_problem(name: str) -> ApiProblem:
    return ApiProblem(404, f"There is no file {name}.", "GET /files lists the files.")
