"""The rules of ended jobs: their runs, checkpoints, events and logs."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from cache.disk import ASIDE_PREFIX, TEMPORARY_PREFIX, remove_path, storage_errors, sum_file_sizes
from services.store.retention.ended import EndedJob
from services.store.retention.items import Item, Kept, Scene, describe_age, holding_run, set_aside
from services.store.run_folder import is_held

#: Folders of checkpoints in a run: of the student, of a baseline, of a search's trials.
CHECKPOINTS = ("checkpoints", "*/checkpoints", "*/*/checkpoints")
LOG = "log.txt"


class Runs:
    """Removes the record and the run folder of an ended job, with its student."""

    def find(self, scene: Scene) -> Iterator[Item]:
        """Yield the jobs that ended longer ago than the limit."""
        for job in scene.store.list_ended():
            if scene.is_older(job.ended, scene.limits.runs):
                folder = scene.settings.run_dir(job.id)
                yield _make_item("runs", job, folder, sum_file_sizes(folder), scene)

    def remove(self, item: Item, scene: Scene) -> None:
        """Delete the record, which one call of the script decides, and then the folder."""
        folder = scene.settings.run_dir(item.name)
        if folder.is_dir() and is_held(folder):
            raise Kept("a process writes to it")
        if not scene.store.retire(item.name, scene.limits.runs or 0.0, scene.force):
            raise Kept("it has not ended, or an open job names it")
        if folder.is_dir():
            with storage_errors(folder):
                remove_path(set_aside(folder))
        if (stored := scene.settings.find_stored_run(item.name)) is not None:
            stored.remove()


class Checkpoints:
    """Removes checkpoints of ended jobs, except the newest, and what a kill left beside them."""

    def find(self, scene: Scene) -> Iterator[Item]:
        """Yield each checkpoint that is beyond the number to keep."""
        for job in scene.store.list_ended():
            if not scene.is_older(job.ended, scene.limits.checkpoints_after):
                continue
            folder = scene.settings.run_dir(job.id)
            for place in _find_places(folder):
                keep = _count_to_keep(job, folder, scene)
                if keep is None:
                    continue
                for path, reason in _list_spare(place, keep, job.status != "succeeded"):
                    yield Item(
                        kind="checkpoints",
                        name=job.id,
                        path=path,
                        bytes=sum_file_sizes(path),
                        reason=reason,
                        age=scene.now - job.ended,
                        kept_by=scene.in_use.find_holder(job.id),
                    )

    def remove(self, item: Item, scene: Scene) -> None:
        """Remove one checkpoint while no stage can begin in its run."""
        assert item.path is not None, "find gives a path"
        with holding_run(scene.settings.run_dir(item.name)):
            scene.require_unnamed(item.name)
            passing = item.path.name.startswith(TEMPORARY_PREFIX)
            aside = item.path if passing else set_aside(item.path)
            remove_path(aside)


class Events:
    """Removes the events and metrics of ended jobs from Redis."""

    def find(self, scene: Scene) -> Iterator[Item]:
        """Yield the jobs that ended longer ago than the limit, and that have a history."""
        old = {
            job.id: job
            for job in scene.store.list_ended()
            if scene.is_older(job.ended, scene.limits.events)
        }
        for job_id, size in scene.store.measure_histories(old).items():
            yield _make_item("events", old[job_id], None, size, scene)

    def remove(self, item: Item, scene: Scene) -> None:
        """Remove one history."""
        if not scene.store.forget_history(item.name, scene.limits.events or 0.0):
            raise Kept("the job goes on")


class Logs:
    """Removes the logs of ended jobs."""

    def find(self, scene: Scene) -> Iterator[Item]:
        """Yield the logs of jobs that ended longer ago than the limit."""
        for job in scene.store.list_ended():
            path = scene.settings.run_dir(job.id) / LOG
            if scene.is_older(job.ended, scene.limits.logs) and path.is_file():
                yield _make_item("logs", job, path, path.stat().st_size, scene)

    def remove(self, item: Item, scene: Scene) -> None:
        """Remove one log while no stage can begin to write to it."""
        assert item.path is not None, "find gives a path"
        with holding_run(item.path.parent):
            scene.require_unnamed(item.name)
            remove_path(item.path)


def _make_item(kind: str, job: EndedJob, path: Path | None, size: int, scene: Scene) -> Item:
    age = scene.now - job.ended
    return Item(
        kind=kind,
        name=job.id,
        path=path,
        bytes=size,
        reason=f"{job.status} {describe_age(age)} ago",
        age=age,
        kept_by=scene.in_use.find_holder(job.id),
    )


def _find_places(folder: Path) -> list[Path]:
    return [path for pattern in CHECKPOINTS for path in sorted(folder.glob(pattern))]


def _count_to_keep(job: EndedJob, folder: Path, scene: Scene) -> int | None:
    """How many checkpoints a job keeps; None = all.

    Only a job that has succeeded cannot be retried, and needs none beside its student.
    """
    saved = job.status == "succeeded" and (folder / "student").is_dir()
    if saved and not scene.limits.student_checkpoints:
        return 0
    return scene.limits.checkpoints


def _list_spare(place: Path, keep: int, may_go_on: bool) -> Iterator[tuple[Path, str]]:
    """The checkpoints in a folder that can go, with the reasons.

    A job that may be retried also keeps its best checkpoint, whose weights become the student's.
    """
    paths = sorted(place.glob("step-*"))
    best = _read_best_step(paths) if may_go_on else None
    for path in paths[: len(paths) - keep]:
        if path.name != best:
            yield path, f"older than the newest {keep}" if keep else "the student is saved"
    for path in sorted(place.glob(f"{TEMPORARY_PREFIX}*")):
        if not path.name.startswith(ASIDE_PREFIX):  # a whole one, which a retry puts back
            yield path, "a save or a removal was interrupted"


def _read_best_step(paths: list[Path]) -> str | None:
    """The name of the best checkpoint, by the newest one whose state can be read."""
    for path in reversed(paths):
        try:
            progress = json.loads((path / "state.json").read_bytes())["progress"]
            return f"step-{int(progress['best_step']):08d}"
        except (OSError, ValueError, LookupError, TypeError):
            continue
    return None
