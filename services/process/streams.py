"""An output stream for a process whose output is a file on a disk that may be full."""

from __future__ import annotations

import io
from contextlib import suppress
from typing import IO, cast


class UnfailingStream(io.TextIOWrapper):
    """A text stream to a file descriptor that loses what cannot be written, and never raises.

    It takes the place of stdout and stderr in a process whose output is a file, so that a full disk
    does not end what prints.
    """

    def __init__(self, descriptor: int) -> None:
        file = io.FileIO(descriptor, "w", closefd=False)
        super().__init__(
            cast(IO[bytes], file), encoding="utf-8", errors="backslashreplace", write_through=True
        )

    def write(self, text: str) -> int:
        """Write ``text``, or as much of it as the file takes."""
        with suppress(OSError):
            super().write(text)
        return len(text)

    def flush(self) -> None:
        """Do nothing: every write goes through at once."""
