"""A job's log as others may see it: secrets are blotted out, and every byte stays at its place.

The file grows while it is read: its size is taken once. A part is read with some bytes around it, so that a secret
that lies across an edge is found.
"""

from __future__ import annotations

import os
import re
from functools import partial
from pathlib import Path

from services.logs import HIDDEN, SECRETS

AROUND_BYTES = 4096  #: longer than any secret
BLOCK_BYTES = 1 << 12


class LogFile:
    """The log at ``path``, open; empty where there is none. ``hidden`` are secrets that are known word by word."""

    def __init__(self, path: Path, hidden: tuple[str, ...] = ()) -> None:
        self._hidden = tuple(word.encode().decode("latin-1") for word in hidden)
        try:
            self._handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError:  # there is none yet; or it is a link, which no log is
            self._handle = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
        self.size = os.fstat(self._handle).st_size

    def read(self, start: int, stop: int) -> bytes:
        """The bytes from ``start`` to ``stop``, without secrets."""
        first, last = max(0, start - AROUND_BYTES), min(self.size, stop + AROUND_BYTES)
        text = blotted(os.pread(self._handle, last - first, first).decode("latin-1"), self._hidden)
        return text.encode("latin-1")[start - first : stop - first]

    def tail(self, lines: int) -> int:
        """Where the last so many lines begin."""
        place = self.size - 1  # what ends there is the last line
        for _ in range(lines):
            place = self._newline_before(place)
            if place < 0:
                return 0
        return place + 1

    def _newline_before(self, stop: int) -> int:
        while stop > 0:
            start = max(0, stop - BLOCK_BYTES)
            found = os.pread(self._handle, stop - start, start).rfind(b"\n")
            if found >= 0:
                return start + found
            stop = start
        return -1

    def close(self) -> None:
        """Let go of the file."""
        os.close(self._handle)


def blotted(text: str, hidden: tuple[str, ...] = ()) -> str:
    """``services.logs.redact``, but as long as it was."""
    for word in hidden:
        text = text.replace(word, "*" * len(word))
    for pattern, shown in SECRETS:
        text = pattern.sub(partial(_filled, shown), text)
    return text


def _filled(shown: str, match: re.Match[str]) -> str:
    """What is shown in place of a match, with as many stars as make it as long."""
    before, _, after = match.expand(shown).rpartition(HIDDEN)
    return f"{before}{'*' * (len(match[0]) - len(before) - len(after))}{after}"
