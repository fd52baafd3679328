"""Checkpoints to the bucket of the run, beside the training: a slow bucket does not stop the loop.

A checkpoint that was saved is linked into a folder of its own, where no pruning reaches it, and a
thread puts it into the bucket. While one is on its way the newest of the others waits, so that at
most two are kept besides. What a machine that is lost takes with it is what had not arrived.
"""

from __future__ import annotations

import threading
from pathlib import Path
from types import TracebackType
from typing import NamedTuple, Self

from cache.disk import TEMPORARY_PREFIX, link_folder, remove_path
from cache.errors import StorageError
from kd.buckets.runs import HISTORY, StoredRun, find_own_run
from kd.progress import Monitor

#: The folder of what waits, in the run folder, and that of a checkpoint in it.
_WAITING = f"{TEMPORARY_PREFIX}uploads"
#: Seconds between two heartbeats while the last checkpoint is put.
_HEARTBEAT_SECONDS = 1.0


class _Upload(NamedTuple):
    """A checkpoint that waits, and which ones the bucket keeps when it has come.

    ``history_bytes`` is the beginning of metrics.jsonl that counts: more was appended meanwhile.
    """

    folder: Path
    history_bytes: int
    limit: int
    keep_step: int | None


class CheckpointUploads:
    """Puts the checkpoints of the run in ``run_dir`` into its bucket; does nothing without one.

    The end of its block waits for the last checkpoint.
    """

    def __init__(self, run_dir: Path, monitor: Monitor, leads: bool = True) -> None:
        self._run = find_own_run(run_dir) if leads else None
        self._folder = run_dir / _WAITING
        self._history = run_dir / HISTORY
        self._monitor = monitor
        self._changed = threading.Condition()
        self._waiting: _Upload | None = None
        self._count = 0
        self._ended = False
        self._problem = ""
        self._thread: threading.Thread | None = None

    def __enter__(self) -> Self:
        if self._run is not None:
            remove_path(self._folder)  # a killed process may have left it
            self._thread = threading.Thread(
                target=self._work, args=(self._run,), name="checkpoint-uploads", daemon=True
            )
            self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        if self._thread is None:
            return
        with self._changed:
            self._ended = True
            self._changed.notify()
        while self._thread.is_alive():
            self._monitor.report_alive(stepping=False)
            self._thread.join(_HEARTBEAT_SECONDS)
        self._report_problem()
        remove_path(self._folder)

    def offer(self, path: Path, limit: int, keep_step: int | None) -> None:
        """Let the checkpoint at ``path`` be put soon, in place of one that still waits.

        Then the bucket keeps ``limit`` checkpoints, among them the newest and ``keep_step``'s.
        """
        if self._run is None:
            return
        self._report_problem()
        with self._changed:
            if self._waiting is not None:
                remove_path(self._waiting.folder.parent)
                self._waiting = None
            # A step that is saved again must not meet its own earlier links.
            self._count += 1
            place = self._folder / str(self._count)
            link_folder(path, place / path.name)
            size = 0
            # It is only appended to or replaced, so its size tells what belongs to the checkpoint.
            if self._history.exists():
                link_folder(self._history.parent, place, [HISTORY])
                size = (place / HISTORY).stat().st_size
            self._waiting = _Upload(place / path.name, size, limit, keep_step)
            self._changed.notify()

    def _work(self, run: StoredRun) -> None:
        while (upload := self._take()) is not None:
            try:
                history = b""
                if upload.history_bytes:
                    with (upload.folder.parent / HISTORY).open("rb") as file:
                        history = file.read(upload.history_bytes)
                run.put_checkpoint(upload.folder, history)
                run.prune_checkpoints(upload.limit, upload.keep_step)
                self._problem = ""
            except (StorageError, OSError) as error:
                self._problem = describe_failed_upload(upload.folder, error)
            remove_path(upload.folder.parent)

    def _take(self) -> _Upload | None:
        """Wait for the next checkpoint; None where the training has ended."""
        with self._changed:
            while self._waiting is None and not self._ended:
                self._changed.wait()
            upload, self._waiting = self._waiting, None
            return upload

    def _report_problem(self) -> None:
        if self._problem:
            self._monitor.emit("warning", message=self._problem)
            self._problem = ""


def describe_failed_upload(folder: Path, error: Exception) -> str:
    """Say that the checkpoint in ``folder`` is on this disk alone."""
    return f"The checkpoint {folder.name} could not be copied to the bucket: {error}"
