"""Routes of a job's files: its checkpoints and its artifacts, each whole or in part.

GET /jobs/{id}/checkpoints                  list the checkpoints, oldest first
GET /jobs/{id}/checkpoints/{step}           show one checkpoint
GET /jobs/{id}/checkpoints/{step}/{file}    download a file of a checkpoint
GET /jobs/{id}/artifacts                    list the files that the job produced
GET /jobs/{id}/artifacts/{name}             download one of them

No path is ever built from a client's input: the server lists its files and looks the name up.
"""

from __future__ import annotations

import hashlib
import os
import re
import stat
from collections.abc import Iterator
from contextlib import suppress
from datetime import UTC, datetime
from functools import partial
from pathlib import Path, PurePath
from typing import Annotated, Any

from fastapi import APIRouter, Request, Response
from fastapi import Path as InPath

from cache.disk import TEMPORARY_PREFIX, list_file_sizes
from cache.errors import CacheCorrupt
from cache.manifest import verify_json
from kd.buckets.runs import STATE, StoredRun
from kd.client.wire.files import Artifact, ArtifactList, Checkpoint, CheckpointFile, CheckpointList
from kd.client.wire.jobs import Job
from kd.config.kinds import SEARCH
from services.api.answers.byte_ranges import ByteSource, send_bytes
from services.api.answers.problems import Answers, ApiProblem
from services.api.answers.run_files import open_run_file
from services.api.answers.stored_run import (
    CheckpointState,
    StoredArtifact,
    find_stored_artifacts,
    read_part,
    read_stored_states,
)
from services.api.guards.json_bodies import StrictRoute
from services.api.routes.access import READ, guard
from services.api.service import KnownJob, Service, TheCaller, TheService

BINARY = "application/octet-stream"
#: Media types by suffix; any other file is ``BINARY``. The list is fixed, because ``mimetypes``
#: differs between machines, and the OpenAPI document names every type.
_MEDIA_TYPES = {
    ".csv": "text/csv; charset=utf-8",
    ".jinja": "text/plain; charset=utf-8",
    ".json": "application/json",
    ".jsonl": "application/x-ndjson",
    ".md": "text/markdown; charset=utf-8",
    ".png": "image/png",
    ".py": "text/plain; charset=utf-8",
    ".svg": "image/svg+xml",
    ".txt": "text/plain; charset=utf-8",
    ".yaml": "application/yaml",
    ".yml": "application/yaml",
}

#: Files that `kd landscape` and `kd ablate --out` may add to a run folder after the job has ended.
_ADDED_LATER = (
    "ablation/index.html", "ablation/report.json", "landscape/index.html",
    "landscape/landscape.json",
)  # fmt: skip

router = APIRouter(tags=["files"], route_class=StrictRoute)

_BYTES: dict[str, Any] = {
    "content": {
        media_type: {"schema": {"type": "string", "format": "binary"}}
        for media_type in dict.fromkeys(
            (BINARY, *(text.partition(";")[0] for text in _MEDIA_TYPES.values()))
        )
    },
    "headers": {"ETag": {"description": "The file's sha256.", "schema": {"type": "string"}}},
}
_FILE: Answers = {
    200: {"description": "The file.", **_BYTES},
    206: {"description": "The part that Range names.", **_BYTES},
    304: {"description": "If-None-Match names the ETag: the client has the file already."},
}
_AS_FILE: dict[str, Any] = {"response_class": Response, **guard(READ, 404, 416, 422, answers=_FILE)}
ArtifactName = Annotated[
    str, InPath(description="A name of the artifact list; it may hold slashes.")
]
FileName = Annotated[str, InPath(description="A name of the checkpoint's file list.")]
Step = Annotated[
    int, InPath(ge=0, le=99_999_999, description="The optimiser step of a checkpoint.")
]


# ---------------------------------------------------------------------- checkpoints


@router.get("/jobs/{job_id}/checkpoints", **guard(READ, 404, 422))
def list_checkpoints(job: KnownJob, service: TheService) -> CheckpointList:
    """List the job's checkpoints, oldest first; damaged ones are left out."""
    return CheckpointList(data=read_checkpoints(job, service))


@router.get("/jobs/{job_id}/checkpoints/{step}", **guard(READ, 404, 422))
def get_checkpoint(job: KnownJob, step: Step, service: TheService) -> Checkpoint:
    """Show one checkpoint."""
    found = [each for each in read_checkpoints(job, service) if each.step == step]
    if not found:
        raise _make_no_checkpoint_problem(job, step)
    return found[0]


@router.head("/jobs/{job_id}/checkpoints/{step}/{file}", include_in_schema=False, **_AS_FILE)
@router.get("/jobs/{job_id}/checkpoints/{step}/{file}", **_AS_FILE)
def get_checkpoint_file(
    request: Request,
    job: KnownJob,
    step: Step,
    file: FileName,
    service: TheService,
    caller: TheCaller,
) -> Response:
    """Download a file of a checkpoint, or the part of it that Range names."""
    folder = service.settings.run_dir(job.id) / "checkpoints" / f"step-{step:08d}"
    name = f"{job.id}-{step}-{file}"
    if folder.is_dir() and _is_real(folder, service) and file in _list_own_sizes(folder):
        answer = _send_file(request, folder / file, name, service)
    else:
        answer = _send_stored_checkpoint_file(request, job, step, file, service)
    if _begins_download(request, answer):
        service.audit.record(caller, "checkpoint.download", job.id, file=f"{step}/{file}")
    return answer


def _is_real(folder: Path, service: Service) -> bool:
    """Whether no part of the path below the folder of all runs is a link."""
    runs = service.settings.runs
    return folder.resolve() == runs.resolve() / folder.relative_to(runs)


def _make_no_checkpoint_problem(job: Job, step: int) -> ApiProblem:
    detail = f"{job.id} has no such checkpoint at step {step}."
    return ApiProblem(404, detail, f"See {job.links.checkpoints}.")


def read_checkpoints(job: Job, service: Service) -> list[Checkpoint]:
    """Return the job's checkpoints, oldest first, without damaged ones.

    Those of the bucket are shown too. The bucket may have newer ones than this disk.
    """
    found = [*read_stored_states(service.settings, job.id), *_read_own_states(job, service)]
    by_step = {state.step: state for state in found}  # the disk has the last word
    states = [by_step[step] for step in sorted(by_step)]
    return [_describe_checkpoint(state, states[-1], job) for state in states]


def _read_own_states(job: Job, service: Service) -> Iterator[CheckpointState]:
    """Yield the checkpoints of a job on the disk, oldest first, without damaged ones."""
    run = service.settings.run_dir(job.id)
    for folder in sorted(run.glob("checkpoints/step-????????")):
        if not _is_real(folder, service):
            continue
        # The running job may prune it at any time.
        with suppress(OSError, CacheCorrupt):
            data = (folder / STATE).read_bytes()
            content = verify_json(data, STATE)
            modified = (folder / STATE).stat().st_mtime
            step = int(folder.name.removeprefix("step-"))
            yield CheckpointState(step, modified, data, content, _list_own_sizes(folder), {})


def _list_own_sizes(folder: Path) -> dict[str, int]:
    sizes = list_file_sizes(folder).items()
    return {name: size for name, size in sizes if not name.startswith(TEMPORARY_PREFIX)}


def _describe_checkpoint(state: CheckpointState, last: CheckpointState, job: Job) -> Checkpoint:
    evaluation = state.content["progress"].get("last_evaluation") or {}
    return Checkpoint(
        step=state.step,
        created_at=datetime.fromtimestamp(state.modified, UTC),
        bytes=sum(state.sizes.values()),
        sha256=hashlib.sha256(state.data).hexdigest(),
        metrics={
            name: value for name, value in evaluation.items() if isinstance(value, int | float)
        },
        is_best=state.step == last.content["progress"].get("best_step"),
        is_last=state is last,
        files=[
            CheckpointFile(
                name=name,
                bytes=size,
                sha256=state.content["sha256"].get(name),
                url=f"{job.links.checkpoints}/{state.step}/{name}",
            )
            for name, size in state.sizes.items()
        ],
    )


# ---------------------------------------------------------------------- artifacts


@router.get("/jobs/{job_id}/artifacts", **guard(READ, 404, 422))
def list_artifacts(job: KnownJob, service: TheService) -> ArtifactList:
    """List the files that the job produced, including every file of its folders."""
    found: dict[str, Artifact] = {}
    for name, path in _find_artifacts(job, service).items():
        with suppress(FileNotFoundError):  # the running job may replace it at any time
            state = path.stat()
            digest = service.digests.look_up(path)
            found[name] = _describe_artifact(job, name, state.st_size, state.st_mtime, digest)
    for name, (_, file) in _find_stored_artifacts(job, service).items():
        if name not in found:
            found[name] = _describe_artifact(job, name, file.bytes, file.modified, file.sha256)
    return ArtifactList(data=list(found.values()))


@router.head("/jobs/{job_id}/artifacts/{name:path}", include_in_schema=False, **_AS_FILE)
@router.get("/jobs/{job_id}/artifacts/{name:path}", **_AS_FILE)
def get_artifact(
    request: Request, job: KnownJob, name: ArtifactName, service: TheService, caller: TheCaller
) -> Response:
    """Download a file that the job produced, or the part of it that Range names."""
    path = _find_artifacts(job, service).get(name)
    if path is not None:
        answer = _send_file(request, path, path.name, service)
    elif (stored := _find_stored_artifacts(job, service).get(name)) is not None:
        file = stored.file
        answer = _send_object(request, stored.run, file.object, file.bytes, file.sha256)
    else:
        remedy = f"{job.links.artifacts} lists the artifacts."
        raise ApiProblem(404, f"{job.id} has no artifact {name!r}.", remedy)
    # A file in a folder is one of the student. The others are reports, which a page shows.
    if "/" in name and name not in _ADDED_LATER and _begins_download(request, answer):
        service.audit.record(caller, "student.download", job.id, file=name)
    return answer


def _find_artifacts(job: Job, service: Service) -> dict[str, Path]:
    """Return every file that the job's record names, and those that were added later, by name.

    Links, and paths outside of the job's run folders, are left out.
    """
    runs = service.settings.runs.resolve()
    folders = [runs / each for each in _list_runs(job, service)]
    found = {name: path for name in _ADDED_LATER if (path := folders[0] / name).is_file()}
    for name, text in sorted(job.artifacts.items()):
        path = Path(text)
        if not any(path.resolve().is_relative_to(folder) for folder in folders):
            continue
        if path.is_dir():
            found |= {f"{name}/{inner}": path / inner for inner in list_file_sizes(path)}
        elif path.is_file():
            found[name] = path
    return {name: path for name, path in found.items() if not path.is_symlink()}


def _list_runs(job: Job, service: Service) -> list[str]:
    """Return the id of the job, and for a search also those of its trials."""
    trials = service.store.list_trials(job.id).values() if job.kind == SEARCH.name else ()
    return [job.id, *trials]


def _find_stored_artifacts(job: Job, service: Service) -> dict[str, StoredArtifact]:
    """Return the files in the bucket that the record names and this disk lacks, by name."""
    if service.settings.locate_stored_run(job.id) is None:
        return {}
    runs = service.settings.runs
    in_bucket = {
        name: path
        for name, path in job.artifacts.items()
        if not (Path(path).is_relative_to(runs) and Path(path).exists())
    }
    return find_stored_artifacts(service.settings, _list_runs(job, service), in_bucket)


def _describe_artifact(
    job: Job, name: str, size: int, modified: float, digest: str | None
) -> Artifact:
    return Artifact(
        name=name,
        bytes=size,
        media_type=_guess_media_type(name),
        modified_at=datetime.fromtimestamp(modified, UTC),
        sha256=digest,
        url=f"{job.links.artifacts}/{name}",
    )


# ---------------------------------------------------------------------- one file


def _send_file(request: Request, path: Path, name: str, service: Service) -> Response:
    """Answer with the file at ``path``; its ETag is its sha256.

    The file is opened once, so that size and digest are those of the bytes that are sent.
    """
    try:
        handle = open_run_file(service.settings.runs, path)
    except OSError as error:
        detail = f"{name} no longer exists: {error.strerror}."
        raise ApiProblem(404, detail, "Read the list again.") from None
    state = os.fstat(handle)
    if not stat.S_ISREG(state.st_mode):
        os.close(handle)
        raise ApiProblem(404, f"{name} is not a regular file.", "Read the list again.")
    about = _describe_download(name, service.digests.compute(handle))
    content = ByteSource.of_file(handle, state.st_size, _guess_media_type(path.name), **about)
    return send_bytes(request, content)


def _send_stored_checkpoint_file(
    request: Request, job: Job, step: int, file: str, service: Service
) -> Response:
    """Answer with a file of a checkpoint in the bucket; 404 where there is none."""
    states = read_stored_states(service.settings, job.id)
    state = next((each for each in states if each.step == step and file in each.stored), None)
    run = service.settings.find_stored_run(job.id)
    if run is None or state is None:
        raise _make_no_checkpoint_problem(job, step)
    about = state.stored[file]
    digest = state.content["sha256"].get(file) or hashlib.sha256(state.data).hexdigest()
    return _send_object(request, run, about.name, about.bytes, digest, f"{job.id}-{step}-{file}")


def _send_object(
    request: Request, run: StoredRun, name: str, size: int, digest: str, shown: str = ""
) -> Response:
    """Answer with an object of a run in the bucket, which is read in parts as it is sent."""
    about = _describe_download(shown or name.rpartition("/")[2], digest)
    read = partial(read_part, run.bucket, name)
    return send_bytes(request, ByteSource(size, _guess_media_type(name), read, **about))


def _begins_download(request: Request, answer: Response) -> bool:
    """Whether the answer holds the beginning of a file: a download in parts counts once."""
    wanted = request.headers.get("range", "bytes=0-")
    return request.method == "GET" and (
        answer.status_code == 200 or (answer.status_code == 206 and "=0-" in wanted)
    )


def _describe_download(name: str, digest: str) -> dict[str, Any]:
    """Return the tag and the headers of a file that is saved under ``name``."""
    # A quote or a line end in the name would break the header.
    plain = re.sub(r"[^A-Za-z0-9._-]", "_", name)
    headers = {"Content-Disposition": f'attachment; filename="{plain}"'}
    return {"tag": f'"{digest}"', "headers": headers}


def _guess_media_type(name: str) -> str:
    return _MEDIA_TYPES.get(PurePath(name).suffix, BINARY)
