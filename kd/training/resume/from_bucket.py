"""A run goes on on another machine: what it needs comes from the run's bucket into the run folder.

It is the newest whole checkpoint, unless the folder has a newer one, with early stopping the best
one too, the history of the run, and the summary of its cache.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from cache.disk import remove_path
from cache.errors import CacheCorrupt, StorageError
from kd.buckets.counting import Report
from kd.buckets.runs import (
    HISTORY,
    STATE,
    StoredCheckpoint,
    StoredRun,
    find_other_run,
    find_own_run,
)
from kd.config.job import JobConfig
from kd.config.kinds import TRAIN
from kd.errors import Interrupted
from kd.files import whole_folder, write_text
from kd.progress import Monitor
from kd.training import checkpoint
from kd.training.saved.uploads import describe_failed_upload

#: The file of a run folder that names its cache.
CACHE_SUMMARY = "cache.json"


def fetch_run(
    config: JobConfig, run_dir: Path, stage: str, monitor: Monitor, apart: bool = False
) -> None:
    """Bring what ``stage`` of a run needs into its folder; nothing where it has no bucket.

    ``apart``: other hosts that share no folder do the same, so a checkpoint of this one alone is
    deleted. Raises ``StoreError`` where the bucket does not answer.
    """
    run = find_own_run(run_dir)
    if run is None:
        return

    def report(line: str) -> None:
        monitor.emit("stage", stage=stage, phase=line)
        monitor.check("before the run was continued here")

    summary = run_dir / CACHE_SUMMARY
    if not summary.exists() and (found := run.read_files().get(CACHE_SUMMARY)) is not None:
        write_text(summary, run.bucket.get(found.object).decode())
    if stage != TRAIN.name:
        return
    keep_best = config.require_train().early_stopping_patience is not None
    for path in checkpoint.list_checkpoints(run_dir / "checkpoints") if apart else []:
        if not (path / STATE).exists() or not run.has_checkpoint(path):
            remove_path(path)
    _fetch_checkpoints(run, run_dir, keep_best, report, monitor)
    continued = None if config.resume is None else config.resume.run
    if continued is not None and not (run_dir.parent / continued).exists():
        other = find_other_run(continued)
        assert other is not None, "this run has a bucket, so the other one does"
        _fetch_checkpoints(other, run_dir.parent / continued, keep_best, report, monitor)


@contextmanager
def keeping_checkpoint(
    config: JobConfig, run_dir: Path, stage: str, monitor: Monitor
) -> Iterator[None]:
    """Put the newest checkpoint if the block is interrupted, unless it has arrived already.

    Where several processes trained, they were ended before the one that puts checkpoints was done.
    """
    try:
        yield
    except Interrupted:
        run = find_own_run(run_dir) if stage == TRAIN.name else None
        newest = checkpoint.find_newest_checkpoint(run_dir / "checkpoints")
        if run is not None and newest is not None:
            _put_newest(run, newest, config.require_train().checkpoints_kept, monitor)
        raise


def _put_newest(run: StoredRun, newest: Path, limit: int, monitor: Monitor) -> None:
    monitor.report_alive(stepping=False)
    folder = newest.parent
    history = folder.parent / HISTORY
    try:
        if run.has_checkpoint(newest):
            return
        run.put_checkpoint(newest, history.read_bytes() if history.exists() else b"")
        run.prune_checkpoints(limit, checkpoint.read_best_step(folder))
    except (StorageError, OSError) as error:
        monitor.emit("warning", message=describe_failed_upload(newest, error))


def _fetch_checkpoints(
    run: StoredRun, run_dir: Path, keep_best: bool, report: Report, monitor: Monitor
) -> None:
    folder = run_dir / "checkpoints"
    newest = checkpoint.read_newest_state(folder)
    known = -1 if newest is None else newest.progress.step
    stored = run.list_checkpoints()
    for found in reversed(stored):
        if found.step <= known:
            return
        try:
            _fetch_checkpoint(run, found, folder, report)
        except CacheCorrupt as error:
            monitor.emit("warning", message=f"{error.detail} An older checkpoint is taken.")
            continue
        write_text(run_dir / HISTORY, run.read_history(found).decode())
        break
    best = checkpoint.read_best_step(folder) if keep_best else None
    for found in stored:
        if found.step == best and not checkpoint.locate_checkpoint(folder, found.step).exists():
            _fetch_checkpoint(run, found, folder, report)


def bring_checkpoint(run: StoredRun, folder: Path, step: int | None = None) -> None:
    """Bring the newest checkpoint, or that of ``step``, into ``folder``; nothing if it is there.

    Raises ``StoreError`` and ``CacheCorrupt``.
    """
    for found in reversed(run.list_checkpoints()):
        if step in (None, found.step):
            if not checkpoint.locate_checkpoint(folder, found.step).exists():
                _fetch_checkpoint(run, found, folder, lambda line: None)
            return


def _fetch_checkpoint(
    run: StoredRun, found: StoredCheckpoint, folder: Path, report: Report
) -> None:
    final = checkpoint.locate_checkpoint(folder, found.step)
    with whole_folder(final) as partial:
        run.fetch_checkpoint(found, partial, report)
