"""Read what the folder of a run says about its job: enough to restore a lost record."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from cache.disk import discard_path, find_interrupted, is_lock_free, storage_errors
from cache.errors import PotstillError
from cache.json_object import Json
from kd.config.job import JobConfig
from kd.config.jobfile import read_record
from kd.config.placement import JOB_ID_PATTERN
from kd.files import LOCK, read_json, require_known_run
from services.settings import Settings

#: The name of a folder that belongs to a job. Folders of `kd run` have names that people choose.
JOB_ID = re.compile(JOB_ID_PATTERN)
#: What a stage writes beside the file that comes last.
ARTIFACTS = (
    "student", "report.md", "report.json", "metrics.jsonl", "profile.json", "tokens.json",
    "verify.json", "fidelity.json",
)  # fmt: skip
#: Why a temporary file or folder lies there.
INTERRUPTED = "a save or a removal was interrupted"
#: Folders of checkpoints in a run: of the student, of a baseline, of a search's trials.
CHECKPOINTS = ("checkpoints", "*/checkpoints", "*/*/checkpoints")


class RunFolderError(PotstillError):
    """A folder holds no run of a job, or a process writes to it."""

    type = "run_folder"


@dataclass(frozen=True)
class FoundRun:
    """A run as its folder describes it. ``error`` is None if the run has ended well."""

    id: str
    config: JobConfig
    stage: str
    turn: int
    fingerprint: str | None
    fingerprints: list[str]
    artifacts: dict[str, Path]
    error: dict[str, str] | None


def read_run(folder: Path) -> FoundRun:
    """Read the folder of a run.

    Raises ``RunFolderError``, ``ConfigError`` for its job, or ``TrainingError`` for a folder that a
    newer version wrote.
    """
    if not JOB_ID.fullmatch(folder.name):
        detail = f"{folder} is not the folder of a job: its name is not a job id."
        remedy = "Name a folder below KD_HOME/runs whose name begins with job_."
        raise RunFolderError(detail, remedy)
    if is_held(folder):
        remedy = "Wait until its run has ended."
        raise RunFolderError(f"{folder} is in use: a process writes to it.", remedy)
    require_known_run(folder)
    written = read_json(folder / "config.json")
    if written is None:
        raise RunFolderError(
            f"{folder} has no config.json: its run had not started, and nothing can be restored.",
            "Remove it with `kd gc`, and submit the job again.",
        )
    config = read_record(written)
    summary = read_json(folder / "cache.json") or {}
    ended = has_ended(folder, config)
    turns = list(config.own_kind.list_turns())
    # A stage that has been done is done again, and finds its work.
    stage, turn = turns[-1] if ended else turns[1] if summary and len(turns) > 1 else turns[0]
    names = [*ARTIFACTS, *sorted(path.name for path in folder.glob("*.png"))]
    error = {
        "type": "record_lost",
        "detail": "The record of this job was lost before its run had ended, and was restored.",
        "remedy": f"`kd jobs retry {folder.name}` continues the run from what its folder holds.",
    }
    return FoundRun(
        id=folder.name,
        config=config,
        stage=stage.name,
        turn=turn,
        fingerprint=summary.get("fingerprint") or config.cache.fingerprint,
        fingerprints=summary.get("fingerprints", []),
        artifacts={name: folder / name for name in names if (folder / name).exists()},
        error=None if ended else error,
    )


def has_ended(folder: Path, config: JobConfig) -> bool:
    """Return whether the run wrote the file that comes last."""
    last: Json | None = read_json(folder / config.own_kind.last_file)
    return last is not None and not (config.checks_cache and last["problems"])


def is_held(folder: Path) -> bool:
    """Return whether a process has locked the run folder."""
    return not is_lock_free(folder / LOCK)


def remove_run_files(settings: Settings, job_id: str) -> None:
    """Remove the files of a job whose record is gone: its run folder, and its files in a bucket."""
    folder = settings.run_dir(job_id)
    with suppress(FileNotFoundError), storage_errors(folder):
        discard_path(folder)
    if (stored := settings.find_stored_run(job_id)) is not None:
        stored.remove()


def list_spare_checkpoints(folder: Path, keep: int, may_go_on: bool) -> Iterator[tuple[Path, str]]:
    """Yield the checkpoints of a run beyond the newest ``keep``, each with the reason.

    What a kill left beside them is spare too. A run that may go on also keeps its best checkpoint,
    whose weights become the student's.
    """
    reason = f"older than the newest {keep}" if keep else "the student is saved"
    for place in sorted(place for pattern in CHECKPOINTS for place in folder.glob(pattern)):
        paths = sorted(place.glob("step-*"))
        best = _read_best_step(paths) if may_go_on else None
        yield from ((path, reason) for path in paths[: -keep or None] if path.name != best)
        yield from ((path, INTERRUPTED) for path in find_interrupted(place))


def _read_best_step(paths: list[Path]) -> str | None:
    """Return the name of the best checkpoint, by the newest one whose state can be read."""
    for path in reversed(paths):
        with suppress(OSError, ValueError, LookupError, TypeError):
            progress = json.loads((path / "state.json").read_bytes())["progress"]
            return f"step-{int(progress['best_step']):08d}"
    return None
