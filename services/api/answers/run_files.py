"""Opens a file of a run without following any link: a run may write links into its folder."""

from __future__ import annotations

import errno
import os
from pathlib import Path

#: A pipe must not make the open wait.
_FILE_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_FOLDER_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_DIRECTORY | os.O_CLOEXEC


def open_run_file(runs: Path, path: Path) -> int:
    """Open the file at ``path`` for reading and return its descriptor.

    ``runs`` is the folder of all runs; the operator may have made it a link. Below it every folder
    is opened from the one above it, so that no link is followed, whenever it appears. Raises
    ``OSError`` for a link, and for a path that is not below ``runs``.
    """
    if not path.is_relative_to(runs) or ".." in path.parts:
        raise PermissionError(errno.EACCES, f"not below {runs}", str(path))
    *folders, name = path.relative_to(runs).parts
    handle = os.open(runs, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        for folder in folders:
            inner = os.open(folder, _FOLDER_FLAGS, dir_fd=handle)
            os.close(handle)
            handle = inner
        return os.open(name, _FILE_FLAGS, dir_fd=handle)
    finally:
        os.close(handle)
