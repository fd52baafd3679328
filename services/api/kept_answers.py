"""Answers that were computed from files, kept while those files stay as they are."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, TypeVar

from cache.reading.memory import KeptValues

#: Answers that are kept at most. Each has a few hundred bytes.
MOST_ANSWERS = 256

T = TypeVar("T")


class KeptAnswers:
    """The newest answers, by their question and by path, size and time of the files."""

    def __init__(self) -> None:
        self._answers: KeptValues[Any] = KeptValues(MOST_ANSWERS)

    def recall(self, question: Any, files: Iterable[Path], compute: Callable[[], T]) -> T:
        """Return the kept answer, or compute it; ``question`` is JSON. Errors are not kept."""
        digest = hashlib.sha256(json.dumps(question, sort_keys=True).encode())
        for file in sorted(set(files)):
            found = file.stat()
            # The number of the file and the time of its change too: the time of its last writing
            # may be set back, and a file that was put in its place may have the same.
            state = [str(file), found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns]
            digest.update(json.dumps(state).encode())
        answer: T = self._answers.get(digest.hexdigest(), compute)
        return answer
