"""The files that teams have uploaded to train on: ``KD_HOME/files/TEAM/file-.../``.

    data.jsonl    the content, byte for byte as it was sent
    record.json   what is known of it

Such a folder appears by one rename, once all of it is on the disk, and never changes. No database
knows of it: the folder is the record, so that a backup or a restart needs nothing else.
"""

from __future__ import annotations

import filecmp
import json
import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from pydantic import TypeAdapter

from cache import disk
from services.store.jobs.records import make_id

log = logging.getLogger(__name__)

CONTENT = "data.jsonl"
RECORD = "record.json"
#: Age of an unfinished upload that no process can still be writing.
ABANDONED_SECONDS = 86400.0

#: What the lines of a file hold; each is a value of the field ``data.format`` of a job.
RowForm = Literal["messages", "prompt_completion", "jsonl"]


@dataclass(frozen=True)
class TrainingFile:
    """The facts about one file. ``filename`` is the name that the team gave it, and no path."""

    id: str
    filename: str
    bytes: int
    rows: int
    form: RowForm
    created_at: int


_RECORD = TypeAdapter(TrainingFile)


class NameTaken(Exception):
    """The team has a file of this name with other content."""


class PendingFile:
    """A file that is being received; ``publish`` makes it one of the team's files."""

    def __init__(self, files: TrainingFiles, team: str) -> None:
        self.id = make_id("file-")
        self._files = files
        self._team = team
        self._place = files.locate(team, self.id).parent
        self._temporary = self._place.with_name(disk.TEMPORARY_PREFIX + self.id)
        self._temporary.mkdir()
        self._file = (self._temporary / CONTENT).open("wb")
        self.bytes = 0

    def write(self, piece: bytes | bytearray) -> None:
        """Append to the content."""
        self._file.write(piece)
        self.bytes += len(piece)

    def flush(self) -> None:
        """Hand what was written to the disk, whose sizes then count it."""
        self._file.flush()

    def publish(
        self, filename: str, rows: int, form: RowForm, require_room: Callable[[], None]
    ) -> TrainingFile:
        """Put the file in its place, durably. What ``require_room`` raises refuses it.

        If the team has a file of this name, nothing is published: the record of that file is
        returned if it has the same content, and ``NameTaken`` is raised if not.

        One file at a time: two may have one name, and a walk over the files of the team would miss
        one that moves.
        """
        self._file.close()
        record = TrainingFile(self.id, filename, self.bytes, rows, form, int(time.time()))
        (self._temporary / RECORD).write_text(json.dumps(asdict(record)), encoding="utf-8")
        with self._files.publishing:
            known = self._files.find(self._team, filename)
            if known is not None:
                content = self._files.locate(self._team, known.id)
                if filecmp.cmp(content, self._temporary / CONTENT, shallow=False):
                    return known
                raise NameTaken(filename)
            require_room()
            disk.publish_folder(self._temporary, self._place)
        return record

    def discard(self) -> None:
        """Remove what was received, unless it was published."""
        with suppress(OSError):  # on a full disk the last bytes cannot be written
            self._file.close()
        disk.remove_path(self._temporary)


class TrainingFiles:
    """The files of all teams, in ``folder``. The names of teams are those that key files allow."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.publishing = threading.Lock()

    @contextmanager
    def receiving(self, team: str) -> Iterator[PendingFile]:
        """Yield a file to write to. What is not published by the end of the block is removed.

        Raises ``StorageError`` if the disk is full or not writable.
        """
        team_folder = self._folder / team
        with disk.storage_errors(team_folder):
            disk.make_folder(team_folder)
            # What uploads and deletions left behind whose process has died.
            for path in team_folder.glob(f"{disk.TEMPORARY_PREFIX}*"):
                with suppress(FileNotFoundError):
                    if time.time() - path.stat().st_mtime > ABANDONED_SECONDS:
                        disk.remove_path(path)
            pending = PendingFile(self, team)
            try:
                yield pending
            finally:
                pending.discard()

    def list_files(self, team: str) -> list[TrainingFile]:
        """The files of ``team``, oldest first."""
        folders = sorted((self._folder / team).glob("file-*"))
        return [file for file in map(_read_record, folders) if file is not None]

    def find(self, team: str, name: str) -> TrainingFile | None:
        """The file of this name or id, or None if ``team`` has none.

        Earlier versions took several files of one name: the name means the newest of them. A client
        may have sent the name, so it becomes no part of a path.
        """
        found = [file for file in self.list_files(team) if name in (file.filename, file.id)]
        return found[-1] if found else None

    def locate(self, team: str, file_id: str) -> Path:
        """The path of the content of a file."""
        return self._folder / team / file_id / CONTENT

    def remove(self, team: str, file_id: str) -> None:
        """Delete a file. It is gone at once, even if the process ends before the disk is free."""
        folder = self._folder / team / file_id
        with suppress(FileNotFoundError), disk.storage_errors(folder):
            disk.discard_path(folder)

    def measure(self) -> dict[str, int]:
        """Bytes of the files of each team, with those that are being received."""
        folders = self._folder.iterdir() if self._folder.is_dir() else ()
        return {folder.name: disk.sum_file_sizes(folder) for folder in folders if folder.is_dir()}

    def measure_team(self, team: str) -> int:
        """Bytes of the files of one team, with those that are being received."""
        folder = self._folder / team
        return disk.sum_file_sizes(folder) if folder.is_dir() else 0


def _read_record(folder: Path) -> TrainingFile | None:
    """The record in the folder of a file; None if it is gone or damaged."""
    try:
        return _RECORD.validate_json((folder / RECORD).read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        pass
    except (OSError, ValueError) as error:
        log.warning("%s cannot be read, and its file is left out: %s", folder.name, error)
    return None
