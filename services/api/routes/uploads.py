"""Routes of the files of the caller's team, as OpenAI's clients call them.

POST   /files                upload a file: JSON lines to train on
GET    /files                list the files
GET    /files/{id}           show a file
GET    /files/{id}/content   download it
DELETE /files/{id}           delete it, unless a job that has not ended needs it

A job's metrics are such a file too: ``results-`` and the job's id.
"""

from __future__ import annotations

import operator
import os
from typing import Annotated, Any, Literal, get_args

from fastapi import APIRouter, Query, Request, Response
from fastapi import Path as InPath
from fastapi.concurrency import run_in_threadpool

from kd.client.wire.jobs import TERMINAL_STATUSES, Status
from kd.files import format_bytes
from services.api.admission import make_bytes_problem, require_space
from services.api.answers.accounts import describe_account
from services.api.answers.byte_ranges import ByteSource, send_bytes
from services.api.answers.problems import Answers, ApiProblem, describe_problems
from services.api.answers.run_files import open_run_file
from services.api.guards.json_bodies import StrictRoute
from services.api.openai.jobs import RESULTS_PREFIX, write_metrics
from services.api.openai.uploads import PURPOSE, receive_file
from services.api.openai.views import FileDeleted, FileList, FileObject
from services.api.routes.access import READ, WRITE
from services.api.service import Service, TheCaller, TheService, find_known_job
from services.store.callers import Caller
from services.store.jobs.listing import JobQuery
from services.store.jobs.records import JobRecord
from services.store.training_files import TrainingFile

router = APIRouter(tags=["files to train on"], route_class=StrictRoute)

FileId = Annotated[str, InPath(description="The file's id, from the answer of POST /files.")]
_OPEN_STATUSES: list[Status] = [
    status for status in get_args(Status) if status not in TERMINAL_STATUSES
]
_JSON_LINES = "application/jsonl"
_CSV = "text/csv"
_CONTENT: Answers = {
    status: {
        "description": description,
        "content": {
            media_type: {"schema": {"type": "string", "format": "binary"}}
            for media_type in (_JSON_LINES, _CSV)
        },
    }
    for status, description in ((200, "The file."), (206, "The part that Range names."))
}
_FORM: dict[str, Any] = {
    "requestBody": {
        "required": True,
        "content": {
            "multipart/form-data": {
                "schema": {
                    "type": "object",
                    "required": ["file", "purpose"],
                    "properties": {
                        "file": {"type": "string", "format": "binary"},
                        "purpose": {"type": "string", "enum": [PURPOSE]},
                    },
                }
            }
        },
    }
}


@router.post(
    "/files",
    dependencies=WRITE,
    openapi_extra=_FORM,
    responses=describe_problems(400, 413, 415, 429, 503, 507),
)
async def create_file(request: Request, service: TheService, caller: TheCaller) -> FileObject:
    """Upload JSON lines for the caller's team: messages, prompt and completion, or text.

    Every line is checked. The file is kept whole, or not at all.
    """
    declared = request.headers.get("content-length", "")
    coming = int(declared) if declared.isdecimal() else 0
    await run_in_threadpool(_require_room, service, caller, coming)
    made = await receive_file(
        request,
        service.files,
        caller.team,
        service.settings.file_bytes,
        # Others may have arrived meanwhile.
        lambda: _require_room(service, caller),
    )
    await run_in_threadpool(
        service.audit.record, caller, "file.create", made.id, name=made.filename, bytes=made.bytes
    )
    return _describe(made, service, caller)


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


def _describe(file: TrainingFile, service: Service, caller: Caller) -> FileObject:
    return FileObject(
        id=file.id,
        bytes=file.bytes,
        created_at=file.created_at,
        filename=file.filename,
        purpose=PURPOSE,
        rows=file.rows,
        format=file.form,
        path=str(service.files.locate(caller.team, file.id)),
    )


@router.get("/files", dependencies=READ, responses=describe_problems(400, 503))
def list_files(
    service: TheService,
    caller: TheCaller,
    purpose: Annotated[
        str | None, Query(max_length=64, description="Only files with this purpose.")
    ] = None,
    limit: Annotated[
        int, Query(ge=1, le=10_000, description="The most files of one page.")
    ] = 10_000,
    order: Annotated[
        Literal["asc", "desc"], Query(description="Order of the times of creation.")
    ] = "desc",
    after: Annotated[
        str | None, Query(max_length=64, description="The last_id of the page before.")
    ] = None,
) -> FileList:
    """List the files of the caller's team."""
    found = service.files.list_files(caller.team) if purpose in (None, PURPOSE) else []
    if order == "desc":
        found.reverse()
    if after is not None:
        # The ids sort by time. The file itself may have been deleted meanwhile.
        beyond = operator.lt if order == "desc" else operator.gt
        found = [file for file in found if beyond(file.id, after)]
    data = [_describe(file, service, caller) for file in found[:limit]]
    return FileList(
        data=data,
        has_more=len(found) > limit,
        first_id=data[0].id if data else None,
        last_id=data[-1].id if data else None,
    )


@router.get("/files/{file_id}", dependencies=READ, responses=describe_problems(400, 404, 503))
def get_file(file_id: FileId, service: TheService, caller: TheCaller) -> FileObject:
    """Show a file of the caller's team."""
    if file_id.startswith(RESULTS_PREFIX):
        job, content = _read_results(file_id, service, caller)
        finished = job.finished_at or job.created_at
        return FileObject(
            id=file_id,
            bytes=len(content),
            created_at=int(finished.timestamp()),
            filename=f"{job.name}.csv",
            purpose="fine-tune-results",
        )
    return _describe(_find_file(file_id, service, caller), service, caller)


@router.get(
    "/files/{file_id}/content",
    dependencies=READ,
    response_class=Response,
    responses=_CONTENT | describe_problems(400, 404, 416, 503),
)
def get_file_content(
    request: Request, file_id: FileId, service: TheService, caller: TheCaller
) -> Response:
    """Download a file of the caller's team, or the part of it that Range names."""
    if file_id.startswith(RESULTS_PREFIX):
        _, content = _read_results(file_id, service, caller)
        source = ByteSource(len(content), _CSV, lambda start, stop: content[start:stop])
        return send_bytes(request, source)
    file = _find_file(file_id, service, caller)
    path = service.files.locate(caller.team, file.id)
    try:
        handle = open_run_file(service.settings.files, path)
    except FileNotFoundError:  # it was deleted meanwhile
        raise _make_no_file_problem(file_id) from None
    return send_bytes(
        request,
        ByteSource(
            file.bytes,
            _JSON_LINES,
            lambda start, stop: os.pread(handle, stop - start, start),
            close=lambda: os.close(handle),
        ),
    )


@router.delete(
    "/files/{file_id}", dependencies=WRITE, responses=describe_problems(400, 404, 409, 429, 503)
)
def delete_file(file_id: FileId, service: TheService, caller: TheCaller) -> FileDeleted:
    """Delete a file of the caller's team; 409 while a job that has not ended needs it."""
    file = _find_file(file_id, service, caller)
    path = str(service.files.locate(caller.team, file.id))
    if (user := _find_user(path, service)) is not None:
        # Another key of the team may own the job, whose id is not shown then.
        which = user.id if caller.sees_all or user.owner == caller.name else "of another key"
        raise ApiProblem(
            409,
            f"The job {which} needs the file {file_id} and has not ended; it is {user.status}.",
            "Wait for its end, or cancel it.",
            "in-use",
        )
    service.files.remove(caller.team, file.id)
    service.audit.record(caller, "file.delete", file.id, name=file.filename)
    return FileDeleted(id=file_id)


def _find_file(file_id: str, service: Service, caller: Caller) -> TrainingFile:
    """Return the file with this id; raise 404 if the caller's team has none."""
    file = service.files.find(caller.team, file_id)
    if file is None:
        raise _make_no_file_problem(file_id)
    return file


def _make_no_file_problem(file_id: str) -> ApiProblem:
    return ApiProblem(404, f"There is no file {file_id}.", "GET /files lists the files.")


def _find_user(path: str, service: Service) -> JobRecord | None:
    """Return a job of anybody that has not ended and whose text is the file at ``path``."""
    for status in _OPEN_STATUSES:
        cursor = None
        while True:
            page = service.store.read_page(JobQuery(status=status), 100, cursor)
            for job in page.jobs:
                data = job.config.get("data") or {}
                if path in (*data.get("train", ()), *data.get("validation", ())):
                    return job
            cursor = page.next_cursor
            if cursor is None:
                break
    return None


def _read_results(file_id: str, service: Service, caller: Caller) -> tuple[JobRecord, bytes]:
    """Return the job of a file of metrics, and its content; raise 404 if there is no such job."""
    try:
        job = find_known_job(file_id.removeprefix(RESULTS_PREFIX), service, caller)
    except ApiProblem:
        raise _make_no_file_problem(file_id) from None
    return job, write_metrics(service.store.read_metrics(job.id))
