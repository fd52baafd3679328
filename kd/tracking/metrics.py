"""metrics.jsonl: the history of a run, one line for each report.

Every line is also emitted as an event.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from cache.disk import storage_errors
from cache.json_object import Json
from kd.checks.verdict import Verdict
from kd.files import write_text
from kd.progress import Monitor, replace_nonfinite


class MetricsLog:
    """Appends lines to ``path``.

    It first drops the lines of steps after ``step``, because a resumed run takes those steps again.
    Without a ``path`` it only emits the events.
    """

    def __init__(self, path: Path | None, monitor: Monitor, step: int) -> None:
        self._path = path
        self._monitor = monitor
        #: The first step whose lines come now.
        self.first = step + 1
        self.drop_after(step)

    def drop_after(self, step: int) -> None:
        """Drop the lines of steps after ``step``, from which the run goes on."""
        if self._path is None:
            return
        kept = [line for line in read_metrics(self._path) if line["step"] <= step]
        write_text(self._path, "".join(json.dumps(line) + "\n" for line in kept))

    def write_line(self, kind: str, step: int, **values: Any) -> None:
        """Write a line of this ``kind``, which is also the type of its event.

        Raises ``StorageError`` if the disk is full.
        """
        line = {"step": step, **values}
        if self._path is not None:
            folder = self._path.parent
            with storage_errors(folder), self._path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(replace_nonfinite({"type": kind, **line})) + "\n")
        self._monitor.emit(kind, **line)

    def write_verdicts(self, step: int, verdicts: Iterable[Verdict]) -> None:
        """Write the results of checks; the type of their events is ``check``."""
        for verdict in verdicts:
            self.write_line("check", step, **verdict.to_json())


def read_metrics(path: Path) -> list[Json]:
    """The lines of ``path`` up to one that a crash cut short; none if there is no file."""
    lines = []
    for text in path.read_text(encoding="utf-8").splitlines() if path.exists() else []:
        try:
            lines.append(json.loads(text))
        except json.JSONDecodeError:
            break
    return lines
