"""metrics.jsonl: one line per report, the run's own history; every line also goes out as an event."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from kd.checks.verdict import Verdict
from kd.files import write_text
from kd.progress import Monitor, finite


class MetricsLog:
    """Appends to ``path``; lines of steps that a resumed run takes again are dropped first."""

    def __init__(self, path: Path, monitor: Monitor, step: int) -> None:
        self._path, self._monitor = path, monitor
        self.forget(step)

    def forget(self, step: int) -> None:
        """Drop what is of steps after ``step``: the run goes on from there."""
        kept = [line for line in read_metrics(self._path) if line["step"] <= step]
        write_text(self._path, "".join(json.dumps(line) + "\n" for line in kept))

    def training(self, **values: Any) -> None:
        """A training step's metrics."""
        self._write("metrics", values)

    def evaluation(self, step: int, values: dict[str, Any]) -> None:
        """An evaluation's metrics."""
        self._write("evaluation", {"step": step, **values})

    def temperature(self, step: int, values: dict[str, float | None]) -> None:
        """Where a learned temperature stands, at every step."""
        self._write("temperature", {"step": step, **values})

    def layers(self, step: int, norms: dict[str, float]) -> None:
        """The norm of the gradient in each group of layers."""
        self._write("layers", {"step": step, "grad_norms": norms})

    def verdicts(self, step: int, verdicts: Iterable[Verdict]) -> None:
        """What checks found; as events, these are the checks'."""
        for verdict in verdicts:
            self._write("check", {"step": step, **verdict.to_json()})

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
