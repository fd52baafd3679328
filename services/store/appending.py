"""Files of JSON lines to which lines are only added: the audit log and the file of API keys."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path

from cache.disk import wait_for_lock
from cache.json_object import Json


def append_line(path: Path, entry: Json) -> None:
    """Add ``entry`` as a line in one write; it is on the disk when this returns.

    Only the owner can read the file. A line that a crash cut off is ended first. If the disk takes
    only a part of the new line, nothing is added, and ``OSError`` is raised.
    """
    handle = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o600)
    try:
        wait_for_lock(handle)
        size = os.fstat(handle).st_size
        torn = size > 0 and os.pread(handle, 1, size - 1) != b"\n"
        line = b"\n" * torn + json.dumps(entry).encode() + b"\n"
        if os.write(handle, line) < len(line):
            os.ftruncate(handle, size)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        os.fsync(handle)
    finally:
        os.close(handle)
