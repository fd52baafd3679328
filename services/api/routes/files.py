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
from pathlib import Path
from typing import Annotated, Any

from fastapi import APIRouter, Request, Response
from fastapi import Path as InPath

from cache.disk import TEMPORARY_PREFIX, hash_file, list_file_sizes
from cache.errors import CacheCorrupt
from cache.manifest import verify_json
from kd.buckets.runs import StoredRun
from kd.client.wire.files import Artifact, ArtifactList, Checkpoint, CheckpointFile, CheckpointList
from kd.client.wire.jobs import Job
from kd.config.kinds import SEARCH
from services.api.answers.byte_ranges import ByteSource, send_bytes
from services.api.answers.problems import Answers, ApiProblem, describe_problems
from services.api.answers.run_files import open_run_file
from services.api.answers.stored_run import (
    StoredArtifact,
    StoredState,
    find_stored_artifacts,
    read_part,
    read_stored_states,
)
from services.api.guards.json_bodies import StrictRoute
from services.api.routes.access import READ
from services.api.service import KnownJob, Service, TheCaller, TheService

STATE = "state.json"
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
_AS_FILE: dict[str, Any] = {
    "dependencies": READ,
    "response_class": Response,
    "responses": _FILE | describe_problems(404, 416, 422, 503),
}
ArtifactName = Annotated[
    str, InPath(description="A name of the artifact list; it may hold slashes.")
]
FileName = Annotated[str, InPath(description="A name of the checkpoint's file list.")]
Step = Annotated[
    int, InPath(ge=0, le=99_999_999, description="The optimiser step of a checkpoint.")
]


# ---------------------------------------------------------------------- checkpoints


@router.get(
    "/jobs/{job_id}/checkpoints", dependencies=READ, responses=describe_problems(404, 422, 503)
)
def list_checkpoints(job: KnownJob, service: TheService) -> CheckpointList:
    """List the job's checkpoints, oldest first; damaged ones are left out."""
    return CheckpointList(data=read_checkpoints(job, service))


@router.get(
    "/jobs/{job_id}/checkpoints/{step}",
    dependencies=READ,
    responses=describe_problems(404, 422, 503),
)
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
    folder = _find_checkpoint_folder(service, job, step)
    names = (
        [each.name for each in _list_checkpoint_files(folder, job, step)]
        if folder.is_dir() and _is_real(folder, service)
        else []
    )
    name = f"{job.id}-{step}-{file}"
    if file in names:
        answer = _send_file(request, folder / file, name, service)
    else:
        answer = _send_stored_checkpoint_file(request, job, step, file, service)
    if _begins_download(request, answer):
        service.audit.record(caller, "checkpoint.download", job.id, file=f"{step}/{file}")
    return answer


def _find_checkpoint_folder(service: Service, job: Job, step: int) -> Path:
    return _find_checkpoints(job, service) / f"step-{step:08d}"


def _find_checkpoints(job: Job, service: Service) -> Path:
    return service.settings.run_dir(job.id) / "checkpoints"


def _is_real(folder: Path, service: Service) -> bool:
    """Whether no part of the path below the folder of all runs is a link."""
    runs = service.settings.runs
    return folder.resolve() == runs.resolve() / folder.relative_to(runs)


def _make_no_checkpoint_problem(job: Job, step: int) -> ApiProblem:
    return ApiProblem(
        404, f"{job.id} has no such checkpoint at step {step}.", f"See {job.links.checkpoints}."
    )


def read_checkpoints(job: Job, service: Service) -> list[Checkpoint]:
    """Return the job's checkpoints, oldest first, without damaged ones.

    Those of the bucket are shown too. The bucket may have newer ones than this disk.
    """
    here = _read_own_checkpoints(job, service)
    steps = {each.step for each in here}
    stored = [
        each
        for each in read_stored_states(service.settings, job.id)
        if each.found.step not in steps
    ]
    if not stored:
        return here
    found = [*here, *(_describe_stored_checkpoint(each, job) for each in stored)]
    found.sort(key=lambda each: each.step)
    newest = stored[-1].content["progress"].get("best_step")
    best = (
        newest
        if found[-1].step not in steps
        else next((each.step for each in here if each.is_best), None)
    )
    return [
        each.model_copy(update={"is_best": each.step == best, "is_last": each is found[-1]})
        for each in found
    ]


def _describe_stored_checkpoint(state: StoredState, job: Job) -> Checkpoint:
    step = state.found.step
    files = [
        CheckpointFile(
            name=name,
            bytes=each.bytes,
            sha256=state.content["sha256"].get(name),
            url=f"{job.links.checkpoints}/{step}/{name}",
        )
        for name, each in sorted(state.files.items())
    ]
    return Checkpoint(
        step=step,
        created_at=datetime.fromtimestamp(state.found.modified, UTC),
        bytes=sum(file.bytes for file in files),
        sha256=hashlib.sha256(state.data).hexdigest(),
        metrics=_select_metrics(state.content),
        is_best=False,
        is_last=False,
        files=files,
    )


def _select_metrics(state: dict[str, Any]) -> dict[str, float]:
    evaluation = state["progress"].get("last_evaluation") or {}
    return {name: value for name, value in evaluation.items() if isinstance(value, int | float)}


def _read_own_checkpoints(job: Job, service: Service) -> list[Checkpoint]:
    folders = [
        folder
        for folder in sorted(_find_checkpoints(job, service).glob("step-????????"))
        if _is_real(folder, service)
    ]
    read = [(folder, state) for folder in folders if (state := _read_state(folder)) is not None]
    best = read[-1][1]["progress"].get("best_step") if read else None
    last = read[-1][0] if read else None
    found = []
    for folder, state in read:
        with suppress(FileNotFoundError):  # the running job may prune it at any time
            found.append(_describe_checkpoint(folder, state, job, best, folder == last))
    return found


def _read_state(folder: Path) -> dict[str, Any] | None:
    """Read the checkpoint's state file; return None if it is gone by now, or damaged."""
    try:
        return verify_json((folder / STATE).read_bytes(), STATE)
    except (OSError, CacheCorrupt):
        return None


def _describe_checkpoint(
    folder: Path, state: dict[str, Any], job: Job, best: int | None, is_last: bool
) -> Checkpoint:
    step = int(folder.name.removeprefix("step-"))
    files = list(_list_checkpoint_files(folder, job, step, state["sha256"]))
    return Checkpoint(
        step=step,
        created_at=_read_modified_at(folder / STATE),
        bytes=sum(file.bytes for file in files),
        sha256=hash_file(folder / STATE),
        metrics=_select_metrics(state),
        is_best=step == best,
        is_last=is_last,
        files=files,
    )


def _list_checkpoint_files(
    folder: Path, job: Job, step: int, digests: dict[str, str] | None = None
) -> Iterator[CheckpointFile]:
    for name, size in list_file_sizes(folder).items():
        if not name.startswith(TEMPORARY_PREFIX):
            url = f"{job.links.checkpoints}/{step}/{name}"
            yield CheckpointFile(name=name, bytes=size, sha256=(digests or {}).get(name), url=url)


# ---------------------------------------------------------------------- artifacts


@router.get(
    "/jobs/{job_id}/artifacts", dependencies=READ, responses=describe_problems(404, 422, 503)
)
def list_artifacts(job: KnownJob, service: TheService) -> ArtifactList:
    """List the files that the job produced, including every file of its folders."""
    found = []
    for name, path in _find_artifacts(job, service).items():
        with suppress(FileNotFoundError):  # the running job may replace it at any time
            found.append(_describe_artifact(job, name, path, service))
    here = {each.name for each in found}
    stored = _find_stored_artifacts(job, service).items()
    found += [_describe_stored(job, name, each) for name, each in stored if name not in here]
    return ArtifactList(data=found)


@router.head("/jobs/{job_id}/artifacts/{name:path}", include_in_schema=False, **_AS_FILE)
@router.get("/jobs/{job_id}/artifacts/{name:path}", **_AS_FILE)
def get_artifact(
    request: Request,
    job: KnownJob,
    name: ArtifactName,
    service: TheService,
    caller: TheCaller,
) -> Response:
    """Download a file that the job produced, or the part of it that Range names."""
    path = _find_artifacts(job, service).get(name)
    if path is not None:
        answer = _send_file(request, path, path.name, service)
    elif (stored := _find_stored_artifacts(job, service).get(name)) is not None:
        file = stored.file
        answer = _send_object(request, stored.run, file.object, file.bytes, file.sha256)
    else:
        raise ApiProblem(
            404,
            f"{job.id} has no artifact {name!r}.",
            f"{job.links.artifacts} lists the artifacts.",
        )
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
    added = {name: folders[0] / name for name in _ADDED_LATER}
    found = {name: path for name, path in added.items() if path.is_file()}
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


def _describe_stored(job: Job, name: str, stored: StoredArtifact) -> Artifact:
    return Artifact(
        name=name,
        bytes=stored.file.bytes,
        media_type=_guess_media_type(Path(name)),
        modified_at=datetime.fromtimestamp(stored.file.modified, UTC),
        sha256=stored.file.sha256,
        url=f"{job.links.artifacts}/{name}",
    )


def _describe_artifact(job: Job, name: str, path: Path, service: Service) -> Artifact:
    return Artifact(
        name=name,
        bytes=path.stat().st_size,
        media_type=_guess_media_type(path),
        modified_at=_read_modified_at(path),
        sha256=service.digests.look_up(path),
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
        raise ApiProblem(
            404, f"{name} no longer exists: {error.strerror}.", "Read the list again."
        ) from None
    state = os.fstat(handle)
    if not stat.S_ISREG(state.st_mode):
        os.close(handle)
        raise ApiProblem(404, f"{name} is not a regular file.", "Read the list again.")
    content = ByteSource(
        state.st_size,
        _guess_media_type(path),
        lambda start, stop: os.pread(handle, stop - start, start),
        tag=f'"{service.digests.compute(handle)}"',
        headers={"Content-Disposition": f'attachment; filename="{_sanitise_name(name)}"'},
        close=lambda: os.close(handle),
    )
    return send_bytes(request, content)


def _send_stored_checkpoint_file(
    request: Request, job: Job, step: int, file: str, service: Service
) -> Response:
    """Answer with a file of a checkpoint in the bucket; 404 where there is none."""
    run = service.settings.find_stored_run(job.id)
    for state in read_stored_states(service.settings, job.id) if run is not None else ():
        if run is None or state.found.step != step or file not in state.files:
            continue
        about = state.files[file]
        digest = state.content["sha256"].get(file) or hashlib.sha256(state.data).hexdigest()
        return _send_object(
            request, run, about.name, about.bytes, digest, f"{job.id}-{step}-{file}"
        )
    raise _make_no_checkpoint_problem(job, step)


def _send_object(
    request: Request, run: StoredRun, name: str, size: int, digest: str, shown: str = ""
) -> Response:
    """Answer with an object of a run in the bucket, which is read in parts as it is sent."""
    shown = _sanitise_name(shown or name.rpartition("/")[2])
    content = ByteSource(
        size,
        _guess_media_type(Path(name)),
        partial(read_part, run.bucket, name),
        tag=f'"{digest}"',
        headers={"Content-Disposition": f'attachment; filename="{shown}"'},
    )
    return send_bytes(request, content)


def _begins_download(request: Request, answer: Response) -> bool:
    """Whether the answer holds the beginning of a file: a download in parts counts once."""
    wanted = request.headers.get("range", "bytes=0-")
    return request.method == "GET" and (
        answer.status_code == 200 or (answer.status_code == 206 and "=0-" in wanted)
    )


def _sanitise_name(name: str) -> str:
    # A quote or a line end in the name would break the header.
    return re.sub(r"[^A-Za-z0-9._-]", "_", name)


def _guess_media_type(path: Path) -> str:
    return _MEDIA_TYPES.get(path.suffix, BINARY)


def _read_modified_at(path: Path) -> datetime:
    return datetime.fromtimestamp(path.stat().st_mtime, UTC)
