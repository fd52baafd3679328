"""The files of a job: its checkpoints and what it has produced, each whole or in part.

GET /jobs/{id}/checkpoints                  every one that is kept, oldest first
GET /jobs/{id}/checkpoints/{step}           one of them
GET /jobs/{id}/checkpoints/{step}/{file}    a file of it
GET /jobs/{id}/artifacts                    every file that the job has produced
GET /jobs/{id}/artifacts/{name}             one of them

What there is is listed first, and a name is looked up in that list: no path is made of what a client says.
"""

from __future__ import annotations

import mimetypes
import os
import re
import stat
from collections.abc import Iterator
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

from fastapi import APIRouter, Request, Response
from fastapi import Path as InPath

from cache.disk import TEMPORARY, file_sha256, files_below
from cache.errors import CacheCorrupt
from cache.manifest import verified_json
from services.api.access import READ
from services.api.digests import Digests
from services.api.problems import Answers, ApiProblem, responses
from services.api.sending import Ranged, send
from services.api.service import KnownJob, Service, TheService
from services.api.views import Artifact, ArtifactList, Checkpoint, CheckpointFile, CheckpointList
from services.schemas import Job

STATE = "state.json"
BINARY = "application/octet-stream"
_MARKDOWN, _LINES = "text/markdown; charset=utf-8", "application/x-ndjson"
_KNOWN_TYPES = {".md": _MARKDOWN, ".jsonl": _LINES, ".jinja": "text/plain; charset=utf-8", ".safetensors": BINARY}

router = APIRouter(tags=["files"])

_BYTES: dict[str, Any] = {
    "content": {BINARY: {"schema": {"type": "string", "format": "binary"}}},
    "headers": {"ETag": {"description": "The file's sha256.", "schema": {"type": "string"}}},
}
_FILE: Answers = {
    200: {"description": "The file.", **_BYTES},
    206: {"description": "The part of it that Range names.", **_BYTES},
    304: {"description": "If-None-Match names its ETag: the client has it already."},
}
_AS_FILE: dict[str, Any] = {
    "dependencies": READ,
    "response_class": Response,
    "responses": _FILE | responses(404, 416, 422, 503),
}
ArtifactName = Annotated[str, InPath(description="As the list names it; may hold slashes.")]
FileName = Annotated[str, InPath(description="A file of the checkpoint, as its list names it.")]
Step = Annotated[int, InPath(ge=0, le=99_999_999, description="Optimiser step of a checkpoint.")]


# ---------------------------------------------------------------------- checkpoints


@router.get("/jobs/{job_id}/checkpoints", dependencies=READ, responses=responses(404, 422, 503))
def list_checkpoints(job: KnownJob, service: TheService) -> CheckpointList:
    """The checkpoints that the job has kept, oldest first; damaged ones are left out."""
    return CheckpointList(data=_checkpoints(job, service))


@router.get("/jobs/{job_id}/checkpoints/{step}", dependencies=READ, responses=responses(404, 422, 503))
def get_checkpoint(job: KnownJob, step: Step, service: TheService) -> Checkpoint:
    """One checkpoint."""
    found = [one for one in _checkpoints(job, service) if one.step == step]
    if not found:
        raise _no_checkpoint(job, step)
    return found[0]


@router.head("/jobs/{job_id}/checkpoints/{step}/{file}", include_in_schema=False, **_AS_FILE)
@router.get("/jobs/{job_id}/checkpoints/{step}/{file}", **_AS_FILE)
def get_checkpoint_file(request: Request, job: KnownJob, step: Step, file: FileName, service: TheService) -> Response:
    """A file of a checkpoint, or the part of it that Range names."""
    folder = _checkpoint_folder(service, job, step)
    names = [each.name for each in _checkpoint_files(folder, job, step)] if folder.is_dir() else []
    if file not in names:
        raise _no_checkpoint(job, step)
    return _send_file(request, folder / file, f"{job.id}-{step}-{file}", service.digests)


def _checkpoint_folder(service: Service, job: Job, step: int) -> Path:
    return service.settings.run_dir(job.id) / "checkpoints" / f"step-{step:08d}"


def _no_checkpoint(job: Job, step: int) -> ApiProblem:
    return ApiProblem(404, f"{job.id} has no such checkpoint of step {step}.", f"See {job.links.checkpoints}.")


def _checkpoints(job: Job, service: Service) -> list[Checkpoint]:
    folders = sorted((service.settings.run_dir(job.id) / "checkpoints").glob("step-????????"))
    read = [(folder, state) for folder in folders if (state := _state(folder)) is not None]
    best = read[-1][1]["progress"].get("best_step") if read else None
    last = read[-1][0] if read else None
    found = []
    for folder, state in read:
        with suppress(FileNotFoundError):  # pruned meanwhile
            found.append(_checkpoint(folder, state, job, best, folder == last))
    return found


def _state(folder: Path) -> dict[str, Any] | None:
    """What the checkpoint says of itself; None where it is gone by now, or damaged."""
    try:
        return verified_json((folder / STATE).read_bytes(), STATE)
    except (OSError, CacheCorrupt):
        return None


def _checkpoint(folder: Path, state: dict[str, Any], job: Job, best: int | None, is_last: bool) -> Checkpoint:
    step = int(folder.name.removeprefix("step-"))
    files = list(_checkpoint_files(folder, job, step, state["sha256"]))
    evaluation = state["progress"].get("last_evaluation") or {}
    return Checkpoint(
        step=step,
        created_at=_modified(folder / STATE),
        bytes=sum(file.bytes for file in files),
        sha256=file_sha256(folder / STATE),
        metrics={name: value for name, value in evaluation.items() if isinstance(value, int | float)},
        is_best=step == best,
        is_last=is_last,
        files=files,
    )


def _checkpoint_files(
    folder: Path, job: Job, step: int, digests: dict[str, str] | None = None
) -> Iterator[CheckpointFile]:
    for name, size in files_below(folder).items():
        if not name.startswith(TEMPORARY):
            url = f"{job.links.checkpoints}/{step}/{name}"
            yield CheckpointFile(name=name, bytes=size, sha256=(digests or {}).get(name), url=url)


# ---------------------------------------------------------------------- artifacts


@router.get("/jobs/{job_id}/artifacts", dependencies=READ, responses=responses(404, 422, 503))
def list_artifacts(job: KnownJob, service: TheService) -> ArtifactList:
    """The files that the job has produced; of a folder, every file in it."""
    found = []
    for name, path in _artifacts(job, service).items():
        with suppress(FileNotFoundError):  # written anew meanwhile
            found.append(_artifact(job, name, path, service))
    return ArtifactList(data=found)


@router.head("/jobs/{job_id}/artifacts/{name:path}", include_in_schema=False, **_AS_FILE)
@router.get("/jobs/{job_id}/artifacts/{name:path}", **_AS_FILE)
def get_artifact(request: Request, job: KnownJob, name: ArtifactName, service: TheService) -> Response:
    """A file that the job has produced, or the part of it that Range names."""
    path = _artifacts(job, service).get(name)
    if path is None:
        raise ApiProblem(404, f"{job.id} has no artifact {name!r}.", f"{job.links.artifacts} lists what there is.")
    return _send_file(request, path, path.name, service.digests)


def _artifacts(job: Job, service: Service) -> dict[str, Path]:
    """Every file of what the record names, by name; what does not lie in a run folder of the job's is left out."""
    found: dict[str, Path] = {}
    folders = _run_folders(job, service)
    for name, text in sorted(job.artifacts.items()):
        path = Path(text)
        if not any(path.resolve().is_relative_to(folder) for folder in folders):
            continue
        if path.is_dir():
            found |= {f"{name}/{inner}": path / inner for inner in files_below(path)}
        elif path.is_file():
            found[name] = path
    return {name: path for name, path in found.items() if not path.is_symlink()}


def _run_folders(job: Job, service: Service) -> list[Path]:
    """The job's own, and those of a search's trials."""
    trials = service.store.trials(job.id).values() if job.kind == "search" else ()
    return [service.settings.run_dir(each).resolve() for each in (job.id, *trials)]


def _artifact(job: Job, name: str, path: Path, service: Service) -> Artifact:
    return Artifact(
        name=name,
        bytes=path.stat().st_size,
        media_type=_media_type(path),
        modified_at=_modified(path),
        sha256=service.digests.known(path),
        url=f"{job.links.artifacts}/{name}",
    )


# ---------------------------------------------------------------------- one file


def _send_file(request: Request, path: Path, name: str, digests: Digests) -> Response:
    """The file, opened once, so that what is told of it is of what is sent; its ETag is its sha256."""
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        raise ApiProblem(404, f"{name} is not there any more: {error.strerror}.", "List what there is again.") from None
    state = os.fstat(handle)
    if not stat.S_ISREG(state.st_mode):
        os.close(handle)
        raise ApiProblem(404, f"{name} is no file.", "List what there is again.")
    content = Ranged(
        state.st_size,
        _media_type(path),
        lambda start, stop: os.pread(handle, stop - start, start),
        tag=f'"{digests.of(handle)}"',
        headers={"Content-Disposition": f'attachment; filename="{_plain(name)}"'},
        close=lambda: os.close(handle),
    )
    return send(request, content)


def _plain(name: str) -> str:
    return re.sub(r"[^A-Za-z0-9._-]", "_", name)


def _media_type(path: Path) -> str:
    return _KNOWN_TYPES.get(path.suffix) or mimetypes.guess_type(path.name)[0] or BINARY


def _modified(path: Path) -> datetime:
    return datetime.fromtimestamp(path.stat().st_mtime, UTC)
