"""The runs on this machine, as one list: those of ``kd run``, of ``import kd`` and of the service.

A run is a folder. Its report and its job say what it is. Imports no torch.
"""

from __future__ import annotations

import os
from collections.abc import Container
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path

from cache.disk import is_lock_free, locked, remove_path, set_aside, storage_errors, sum_file_sizes
from cache.json_object import Json
from kd.config.kinds import KINDS, TRAIN
from kd.errors import ModelError
from kd.files import LOCK, read_json


@dataclass(frozen=True)
class RunSummary:
    """A run, and what it has measured. None = not known.

    ``state`` is running, finished or stopped. ``parameters`` are those of the student, and
    ``seconds`` those of its training. ``bits_per_byte`` and ``kl`` (nats per token) are of the
    held-out text. ``bytes`` are those of the folder.
    """

    name: str
    folder: Path
    kind: str | None
    state: str
    teacher: str | None
    student: str | None
    parameters: int | None
    bits_per_byte: float | None
    kl: float | None
    seconds: float | None
    bytes: int
    began: datetime

    def to_json(self) -> Json:
        """Return it as plain JSON values."""
        return {**asdict(self), "folder": str(self.folder), "began": self.began.isoformat()}


def list_runs(home: str | os.PathLike[str] | None = None) -> list[RunSummary]:
    """List all runs below the data folder ``home``, the newest first."""
    from kd.python.inputs import find_home

    return sort_runs(find_home(home) / "runs")


def sort_runs(runs: Path, names: Container[str] | None = None) -> list[RunSummary]:
    """List the runs in ``runs``, or those of these names, the newest first."""
    found = []
    for folder in runs.glob("[!.]*"):
        if folder.is_dir() and (names is None or folder.name in names):
            with suppress(FileNotFoundError):  # it is removed meanwhile
                found.append(summarise_run(folder))
    return sorted(found, key=lambda run: run.began, reverse=True)


def summarise_run(folder: Path) -> RunSummary:
    """Read what the folder of a run says. A file that cannot be read says nothing."""
    job, report = (_read(folder / name) for name in ("config.json", TRAIN.last_file))
    kind = job.get("kind")
    ended = (folder / KINDS.get(str(kind), KINDS["distill"]).last_file).is_file()
    student = job.get("student") or {}
    start = student.get("model") or ("from the teacher" if student.get("from_teacher") else None)
    began = folder / "config.json" if job else folder
    return RunSummary(
        name=folder.name,
        folder=folder,
        kind=kind,
        state="running" if not is_lock_free(folder / LOCK) else "finished" if ended else "stopped",
        teacher=report.get("teacher") or (job.get("teacher") or {}).get("model"),
        student=start or ("new" if student else None),
        parameters=report.get("parameters"),
        bits_per_byte=report.get("student_bits_per_byte"),
        kl=report.get("validation_kl"),
        seconds=report.get("train_seconds"),
        bytes=sum_file_sizes(folder),
        began=datetime.fromtimestamp(began.stat().st_mtime, UTC),
    )


def find_makers(runs: Path, names: Container[str] | None = None) -> dict[str, dict[str, str]]:
    """Find ``text`` and ``made_by`` of caches, by fingerprint: what was read, and by which run.

    It is the run that captured the cache or, where that is gone, one that found it there. With
    ``names`` no other run is told.
    """
    found: dict[str, dict[str, str]] = {}
    known = [
        (_read(folder / "cache.json"), folder.name)
        for folder in sorted(runs.glob("[!.]*"))
        if names is None or folder.name in names
    ]
    for made, run in sorted(known, key=lambda each: bool(each[0].get("reused"))):
        if "fingerprint" in made:
            # Earlier versions kept no inputs.
            train = ((made.get("inputs") or {}).get("data") or {}).get("train") or ()
            text = ", ".join(each if isinstance(each, str) else each["path"] for each in train)
            found.setdefault(made["fingerprint"], {"text": text, "made_by": run})
    return found


def remove_run(folder: Path) -> None:
    """Remove the folder of a run, or the link to it. Raises ``ModelError`` while it is in use."""

    def refuse() -> None:
        raise ModelError(f"{folder} is in use: a process writes to it.", "Stop that run first.")

    with storage_errors(folder), locked(folder / LOCK, refuse):
        # Renamed first: a kill leaves no half that would be taken for a run.
        remove_path(set_aside(folder))


def _read(path: Path) -> Json:
    try:
        found = read_json(path)
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
