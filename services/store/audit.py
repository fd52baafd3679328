"""The audit log: who created, changed, deleted and exported what (``KD_HOME/audit``).

    {"id": 1764057600123456, "time": "2026-11-25T08:00:00.123456+00:00", "actor": "alice",
     "action": "job.create", "target": "job_...", "outcome": "done", ...}

audit.jsonl      the newest entries; when it is large, it becomes audit.jsonl.1
audit.jsonl.N    older entries, the older the higher N; the oldest file is deleted
.lock            locked by a process while it writes

Lines are only added. A process holds the lock while it writes an entry, so that several may write,
and rotate, at once; an entry is one write and is on the disk (fsync) before the call returns. After
a crash the last line may be cut off: the next entry begins with a new line, and a line that is not
whole JSON counts as none. Ids are microseconds and grow with every entry, whatever the clocks of
the writers say, so that an id is a place in the log.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, Any

from cache.disk import make_folder, storage_errors, sync_path, wait_for_lock
from cache.errors import StorageError
from cache.json_object import Json
from services.settings import Settings
from services.store.appending import append_line

FILE = "audit.jsonl"
#: Bytes at the end of a file in which its last entry is looked for.
TAIL_BYTES = 1 << 16
#: Characters of a value; a longer one is cut, so that an entry stays far below ``TAIL_BYTES``.
VALUE_LENGTH = 200
#: Lines that one page of the log reads at most.
MAX_SCANNED = 20_000

log = logging.getLogger("potstill.audit")


@dataclass(frozen=True)
class AuditQuery:
    """The entries that a page shows. A field that is None excludes none.

    ``action`` is an action such as job.create, or the part before its dot.
    """

    actor: str | None = None
    action: str | None = None
    target: str | None = None
    after: datetime | None = None
    before: datetime | None = None

    def wants(self, entry: Json) -> bool:
        """Return whether an entry matches; ids decide the time."""
        action = entry.get("action", "")
        return (
            self.actor in (None, entry.get("actor"))
            and self.action in (None, action, action.partition(".")[0])
            and self.target in (None, entry.get("target"))
            and (self.after is None or entry["id"] > _to_microseconds(self.after))
            and (self.before is None or entry["id"] < _to_microseconds(self.before))
        )


@dataclass(frozen=True)
class AuditPage:
    """Entries, newest first. More may follow a short page, and even an empty one."""

    entries: list[Json]
    next_cursor: int | None


class AuditLog:
    """Writes and reads the audit log of a service. Several processes may do so at once."""

    def __init__(self, settings: Settings) -> None:
        self.folder = settings.home / "audit"
        self._most_bytes = settings.audit_bytes
        self._most_files = settings.audit_files

    def write(
        self, actor: str, action: str, target: str = "", outcome: str = "done", **more: Any
    ) -> None:
        """Add an entry; it is on the disk when this returns. Raises ``StorageError``.

        A value of None is left out, and a long one is cut. No value may be a secret.
        """
        facts = {"actor": actor, "action": action, "target": target, "outcome": outcome, **more}
        known = {
            name: value[:VALUE_LENGTH] if isinstance(value, str) else value
            for name, value in facts.items()
            if value not in (None, "")
        }
        with storage_errors(self.folder):
            make_folder(self.folder)
            with self._locked():
                path = self.folder / FILE
                ids = (_read_last_id(self._number(place)) for place in range(self._most_files))
                last = next(filter(None, ids), 0)
                number = max(_to_microseconds(datetime.now(UTC)), last + 1)
                moment = datetime.fromtimestamp(number / 1e6, UTC)
                time = moment.isoformat(timespec="microseconds")
                entry = {"id": number, "time": time, **known}
                size = len(json.dumps(entry)) + 1
                if path.exists() and path.stat().st_size + size > self._most_bytes:
                    self._rotate()
                append_line(path, entry)

    def record(self, actor: str, action: str, target: str, **more: Any) -> None:
        """Add an entry of what is done and cannot be undone; log an error if that fails."""
        try:
            self.write(actor, action, target, **more)
        except (StorageError, OSError) as error:
            log.error("no audit entry for %s %s of %s: %s", action, target, actor, error)

    @contextmanager
    def _locked(self, shared: bool = False) -> Iterator[None]:
        handle = os.open(self.folder / ".lock", os.O_RDWR | os.O_CREAT, 0o600)
        try:
            wait_for_lock(handle, shared)
            yield
        finally:
            os.close(handle)

    def _number(self, number: int) -> Path:
        return self.folder / (f"{FILE}.{number}" if number else FILE)

    def _rotate(self) -> None:
        """Give every file the next number. A crash in between leaves a gap, and loses no file."""
        last = self._most_files - 1
        while self._number(last + 1).exists():  # a smaller number of files was set
            last += 1
        for number in range(self._most_files - 1, last + 1):
            self._number(number).unlink(missing_ok=True)
        for number in range(self._most_files - 2, -1, -1):
            with suppress(FileNotFoundError):
                self._number(number).rename(self._number(number + 1))
        sync_path(self.folder)

    def read_page(self, query: AuditQuery, limit: int, cursor: int | None = None) -> AuditPage:
        """Up to ``limit`` entries, newest first, from the one before ``cursor``.

        Reads ``MAX_SCANNED`` lines at most, so that a rare actor cannot hold up the service.
        """
        found: list[Json] = []
        for scanned, entry in enumerate(self._read_backwards(cursor)):
            if query.after is not None and entry["id"] <= _to_microseconds(query.after):
                return AuditPage(found, None)
            if len(found) == limit or scanned == MAX_SCANNED:
                return AuditPage(found, cursor)
            cursor = entry["id"]
            if query.wants(entry):
                found.append(entry)
        return AuditPage(found, None)

    def _read_backwards(self, cursor: int | None) -> Iterator[Json]:
        """Every whole entry before ``cursor``, newest first."""
        with ExitStack() as stack:
            for file in self._open_files(stack):
                first = next(_parse_lines(file), None)
                if first is None or (cursor is not None and first["id"] >= cursor):
                    continue
                file.seek(0)
                for entry in reversed(list(_parse_lines(file))):
                    if cursor is None or entry["id"] < cursor:
                        yield entry

    def _open_files(self, stack: ExitStack) -> list[IO[bytes]]:
        """The files of the log, newest first, opened at one moment: no rotation comes between."""
        found = list[IO[bytes]]()
        if not self.folder.is_dir():
            return found
        with storage_errors(self.folder), self._locked(shared=True):
            for number in range(self._most_files):
                with suppress(FileNotFoundError):
                    found.append(stack.enter_context(self._number(number).open("rb")))
        return found


def _parse_lines(file: IO[bytes]) -> Iterator[Json]:
    """The whole entries of a file, oldest first. A line that a crash cut off is left out."""
    for line in file:
        try:
            entry = json.loads(line) if line.endswith(b"\n") else None
        except ValueError:
            continue
        if isinstance(entry, dict) and isinstance(entry.get("id"), int):
            yield entry


def _read_last_id(path: Path) -> int | None:
    """The id of the last whole entry of a file; None if there is none."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - TAIL_BYTES))
            entries = list(_parse_lines(file))
    except FileNotFoundError:
        return None
    return entries[-1]["id"] if entries else None


def _to_microseconds(moment: datetime) -> int:
    return int(moment.timestamp() * 1_000_000)
