"""The files of a job in the bucket of the service: of jobs whose worker has another disk."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import PurePath
from typing import NamedTuple

from cache.errors import CacheCorrupt
from cache.json_object import Json
from cache.manifest import verify_json
from cache.remote.bucket import Bucket, StoredObject
from kd.buckets.runs import HISTORY, RUNS, STATE, StoredFile, StoredRun
from services.settings import Settings


class StoredArtifact(NamedTuple):
    """A result of a job in the bucket, and the run that it is of."""

    run: StoredRun
    file: StoredFile


class CheckpointState(NamedTuple):
    """A checkpoint: the bytes of its state.json, what they say, and the sizes of its files.

    ``stored`` are its files in the bucket, by name; empty for a checkpoint on the disk.
    """

    step: int
    modified: float
    data: bytes
    content: Json
    sizes: Mapping[str, int]
    stored: Mapping[str, StoredObject]


def find_stored_artifacts(
    settings: Settings, runs: list[str], artifacts: Mapping[str, str]
) -> dict[str, StoredArtifact]:
    """Find the results that a job's record names in the bucket, by name, of the jobs ``runs``.

    The record has the paths of a worker's disk: what counts is the part after ``runs``. Raises
    ``StoreError`` where the bucket does not answer.
    """
    found = {}
    lists: dict[str, tuple[StoredRun, dict[str, StoredFile]]] = {}
    for name, text in sorted(artifacts.items()):
        job_id, inner = _split_path(text, runs)
        if job_id not in lists:
            run = settings.find_stored_run(job_id) if job_id else None
            if run is None:
                continue
            lists[job_id] = (run, run.read_files())
        run, files = lists[job_id]
        for path, file in files.items():
            if path == inner:
                found[name] = StoredArtifact(run, file)
            elif path.startswith(f"{inner}/"):
                found[f"{name}/{path.removeprefix(f'{inner}/')}"] = StoredArtifact(run, file)
    return found


def _split_path(text: str, runs: list[str]) -> tuple[str, str]:
    """Return the id of a run and the rest of a path in its folder; empty for another path."""
    parts = PurePath(text).parts
    for at in reversed(range(len(parts) - 2)):
        if parts[at] == RUNS and parts[at + 1] in runs:
            return parts[at + 1], "/".join(parts[at + 2 :])
    return "", ""


def read_stored_states(settings: Settings, job_id: str) -> Iterator[CheckpointState]:
    """Yield the checkpoints of a job in the bucket, oldest first, without damaged ones.

    Of a step that was saved twice the newest alone is yielded. Raises ``StoreError`` where the
    bucket does not answer.
    """
    run = settings.find_stored_run(job_id)
    if run is None:
        return
    newest = {each.step: each for each in run.list_checkpoints()}
    for found in newest.values():
        try:
            data = run.bucket.get(found.files[STATE].name)
            content = verify_json(data, STATE)
        except (FileNotFoundError, CacheCorrupt):
            continue
        files = {name: found.files[name] for name in sorted(found.files) if name != HISTORY}
        sizes = {name: file.bytes for name, file in files.items()}
        yield CheckpointState(found.step, found.modified, data, content, sizes, files)


def read_part(bucket: Bucket, name: str, start: int, stop: int) -> bytes:
    """Return a part of an object; empty where it is gone, which ends the answer."""
    try:
        return bucket.get_part(name, start, stop) if stop > start else b""
    except FileNotFoundError:
        return b""
