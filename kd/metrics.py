"""metrics.jsonl: one line per report, the run's own history; every line also goes out as an event."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from kd.files import write_text
from kd.progress import Monitor, finite


class MetricsLog:
    """Appends to ``path``; lines of steps that a resumed run takes again are dropped first."""

    def __init__(self, path: Path, monitor: Monitor, step: int) -> None:
        self._path, self._monitor = path, monitor
        kept = [line for line in read_metrics(path) if line["step"] <= step]
        write_text(path, "".join(json.dumps(line) + "\n" for line in kept))

    def training(self, **values: Any) -> None:
        """A training step's metrics."""
        self._write("metrics", values)

    def evaluation(self, step: int, values: dict[str, Any]) -> None:
        """An evaluation's metrics."""
        self._write("evaluation", {"step": step, **values})

    def _write(self, kind: str, values: dict[str, Any]) -> None:
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(finite({"type": kind, **values})) + "\n")
        self._monitor.emit(kind, **values)


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The lines of ``path``, without a last one that a crash cut short; none if there is no file."""
    lines = []
    for text in path.read_text(encoding="utf-8").splitlines() if path.exists() else []:
        try:
            lines.append(json.loads(text))
        except json.JSONDecodeError:
            break
    return lines
