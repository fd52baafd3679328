"""Checkpoints that are written beside the training: a slow disk does not stop the loop.

The state is copied into this machine's memory, and a thread writes the copy. If memory has no room
for one, the loop waits until the state is written. The next checkpoint waits for the one before.
What follows a checkpoint, such as the end of the oldest ones, is done when it is whole.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from pathlib import Path

from torch import Tensor

from kd.buckets.runs import HISTORY, StoredRun
from kd.errors import is_out_of_memory
from kd.memory.auto_batch import saving_errors
from kd.memory.host import read_free_bytes
from kd.parallel.group import Group
from kd.progress import Monitor
from kd.training import checkpoint
from kd.training.resume.from_bucket import bring_checkpoint
from kd.training.saved.state import TrainState
from kd.training.saved.uploads import CheckpointUploads

#: The part of the free memory that the copy may take.
COPY_SHARE = 0.5
#: Seconds that a checkpoint has which is being written when the training fails.
CLOSE_SECONDS = 60.0


@dataclass
class _Writing:
    """A thread that writes a checkpoint of ``step``, and its error.

    ``history`` is that of the run so far, for a bucket.
    """

    step: int
    kept: int
    best_step: int | None
    history: bytes = b""
    thread: threading.Thread | None = None
    error: BaseException | None = None


@dataclass
class CheckpointSaver:
    """Writes the checkpoints of a run into ``folder``. All ranks call each method at one step.

    ``memory`` are the bytes that the job may have on this machine; None for all. Hosts that share
    no folder keep the checkpoints in the bucket of ``stored``, and nowhere else.
    """

    folder: Path
    group: Group
    monitor: Monitor
    memory: int | None = None
    uploads: CheckpointUploads | None = None
    stored: StoredRun | None = None
    _channel: Group | None = None
    _kept: dict[str, Tensor] = field(default_factory=dict, repr=False)
    _writing: _Writing | None = field(default=None, repr=False)

    def save(self, state: TrainState, identity: str, kept: int, best_step: int | None) -> None:
        """Begin to write a checkpoint, after the one before it.

        When it is whole, the oldest are deleted until ``kept`` are left, but never that of
        ``best_step``. Raises the error of the one before, and ``OutOfMemory``.
        """
        self.finish()
        if self._channel is None:
            self._channel = self.group.open_channel()
        self._writing = writing = _Writing(state.progress.step, kept, best_step)
        if self.stored is not None and self.group.leads:
            writing.history = (self.folder.parent / HISTORY).read_bytes()
        with saving_errors(f"the checkpoint of step {writing.step}"):
            snapshot = checkpoint.take_snapshot(state, identity)
            copied = self._copy(snapshot)
            given = (writing, copied or snapshot, self._channel)
            writing.thread = threading.Thread(
                target=self._write, args=given, name="checkpoint", daemon=True
            )
            writing.thread.start()
        if copied is None:
            self.finish()

    def poll(self) -> None:
        """Do what follows a checkpoint if it is whole by now. Raises as ``finish`` does."""
        if self._writing is not None and not self._is_busy():
            self.finish()

    def finish(self) -> None:
        """Wait until the checkpoint is written. Raises its error."""
        writing, self._writing = self._writing, None
        if writing is None or writing.thread is None:
            return
        if writing.thread.is_alive():
            self.monitor.report_alive(stepping=False)
        writing.thread.join()
        with saving_errors(f"the checkpoint of step {writing.step}"):
            if writing.error is not None:
                raise writing.error
        path = checkpoint.locate_checkpoint(self.folder, writing.step)
        if self.stored is None:
            if self.group.leads:
                checkpoint.prune_checkpoints(self.folder, writing.kept, writing.best_step)
            if self.uploads is not None:
                self.uploads.offer(path, writing.kept, writing.best_step)
        self.monitor.emit("checkpoint", step=writing.step, path=str(path))

    def find_newest(self) -> Path | None:
        """Return the newest checkpoint, once it is written; None if there is none."""
        self.bring(None)
        return checkpoint.find_newest_checkpoint(self.folder)

    def bring(self, step: int | None) -> Path:
        """Wait until all is written, and let this host have the checkpoint of ``step``.

        None is the newest. Returns the place of that of ``step``. Raises ``StoreError``.
        """
        self.finish()
        if self.stored is not None:
            if self.group.leads_host:
                bring_checkpoint(self.stored, self.folder, step)
            self.group.wait()
        return checkpoint.locate_checkpoint(self.folder, step or 0)

    def close(self) -> None:
        """Wait for a checkpoint that is being written when the training fails."""
        writing = self._writing
        if writing is None or writing.thread is None:
            return
        # The other ranks may be gone, for which it would wait.
        writing.thread.join(None if self.group.alone else CLOSE_SECONDS)
        if writing.error is None and not self._is_busy():
            self.finish()

    def _is_busy(self) -> bool:
        thread = None if self._writing is None else self._writing.thread
        return thread is not None and thread.is_alive()

    def _copy(self, snapshot: checkpoint.Snapshot) -> checkpoint.Snapshot | None:
        """Copy the snapshot; None if memory has no room."""
        room = COPY_SHARE * read_free_bytes(self.memory, self.group.per_host)
        if not self._kept and snapshot.size > room:
            return None
        try:
            return snapshot.copy_to_host(self._kept)
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            self._kept.clear()
            return None

    def _write(self, writing: _Writing, snapshot: checkpoint.Snapshot, group: Group) -> None:
        try:
            if self.stored is None:
                checkpoint.write_snapshot(self.folder, snapshot, group)
                return
            checkpoint.put_snapshot(self.folder, snapshot, group, self.stored, writing.history)
            if group.leads:
                self.stored.prune_checkpoints(writing.kept, writing.best_step)
        except BaseException as error:  # the loop raises it
            writing.error = error
