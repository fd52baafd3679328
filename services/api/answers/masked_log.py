"""A job's log as clients may see it: stars replace the secrets, and every byte keeps its place.

The file grows while it is read, so its size is read only once. A part is read together with the
bytes around it, so that a secret across an edge of the part is found.
"""

from __future__ import annotations

import os
import re
from functools import partial
from pathlib import Path

from services.api.answers.run_files import open_run_file
from services.process.logs import MASK, SECRETS

#: Bytes that are read before and after a part: more than the longest secret.
AROUND_BYTES = 4096
#: Bytes of one read in the search for the beginning of a line.
BLOCK_BYTES = 1 << 12


class MaskedLog:
    """The open log at ``path`` below ``runs``, which is empty if there is no such file.

    ``hidden`` are secrets that are known word by word; patterns find the others.
    """

    def __init__(self, runs: Path, path: Path, hidden: tuple[str, ...] = ()) -> None:
        self._hidden = tuple(word.encode().decode("latin-1") for word in hidden)
        try:
            self._handle = open_run_file(runs, path)
        except OSError:  # there is no log yet, or a part of its path is a link, which none is
            self._handle = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
        # Read once: an answer must not promise one length and send another.
        self.size = os.fstat(self._handle).st_size

    def read(self, start: int, stop: int) -> bytes:
        """Return the bytes from ``start`` to ``stop``, with the secrets masked."""
        first = max(0, start - AROUND_BYTES)
        last = min(self.size, stop + AROUND_BYTES)
        # Latin-1 makes one character of each byte, so that places in the text are those of bytes.
        text = os.pread(self._handle, last - first, first).decode("latin-1")
        text = mask_secrets(text, self._hidden)
        return text.encode("latin-1")[start - first : stop - first]

    def find_tail(self, lines: int) -> int:
        """Return the place at which the last ``lines`` lines begin."""
        place = self.size - 1  # before the newline that ends the last line
        for _ in range(lines):
            place = self._find_newline_before(place)
            if place < 0:
                return 0
        return place + 1

    def _find_newline_before(self, stop: int) -> int:
        while stop > 0:
            start = max(0, stop - BLOCK_BYTES)
            found = os.pread(self._handle, stop - start, start).rfind(b"\n")
            if found >= 0:
                return start + found
            stop = start
        return -1

    def close(self) -> None:
        """Close the file."""
        os.close(self._handle)


def mask_secrets(text: str, hidden: tuple[str, ...] = ()) -> str:
    """Mask secrets as ``services.process.logs.redact`` does, but keep the length of the text."""
    for word in hidden:
        text = text.replace(word, "*" * len(word))
    for pattern, shown in SECRETS:
        text = pattern.sub(partial(_mask_match, shown), text)
    return text


def _mask_match(shown: str, match: re.Match[str]) -> str:
    """Return the replacement of a match, with as many stars as give it the length of the match."""
    before, _, after = match.expand(shown).rpartition(MASK)
    return before + "*" * (len(match[0]) - len(before) - len(after)) + after
