"""Finished runs as points of a scaling law: size, tokens and held-out loss, from their reports.

A folder is a run, with its report.json, or holds runs. Imports no torch.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kd.errors import ConfigError, Problem
from kd.files import read_json

_REPORT = "report.json"


@dataclass(frozen=True)
class FinishedRun:
    """One run: N parameters, D tokens, and the held-out loss in nats a token."""

    folder: Path
    parameters: int
    tokens: int
    loss: float


def read_finished_runs(folders: Iterable[Path]) -> list[FinishedRun]:
    """Read the reports in ``folders``. Raises ``ConfigError`` that names each unreadable folder.

    Their held-out texts must be as long as each other: losses on different texts do not compare.
    """
    runs: list[FinishedRun] = []
    problems: list[Problem] = []
    texts: dict[int | None, Path] = {}
    for report in dict.fromkeys(_find_reports(folders, problems)):
        try:
            run, held_out = _read_run(report)
        except (OSError, ValueError, TypeError) as error:
            problems.append(_refuse(report, f"cannot be read as the report of a run: {error}"))
            continue
        runs.append(run)
        texts.setdefault(held_out, report)
    if len(texts) > 1:
        found = ", ".join(f"{count} in {report}" for count, report in texts.items())
        problems.append(
            Problem(
                "/runs",
                f"the runs were measured on different held-out texts (tokens: {found}).",
                "Give runs of one text: losses on different texts do not compare.",
            )
        )
    if problems:
        raise ConfigError(problems)
    return runs


def _find_reports(folders: Iterable[Path], problems: list[Problem]) -> Iterator[Path]:
    for folder in folders:
        found = [folder / _REPORT] if (folder / _REPORT).is_file() else []
        found = found or sorted(folder.glob(f"*/{_REPORT}"))
        if not found:
            problems.append(_refuse(folder, f"has no {_REPORT}, and no folder in it has one"))
        yield from found


def _refuse(path: Path, why: str) -> Problem:
    return Problem("/runs", f"{path} {why}.", "Give folders of finished runs, such as runs/NAME.")


def _read_run(report: Path) -> tuple[FinishedRun, int | None]:
    """The run of a report, and the tokens of its held-out text."""
    found = read_json(report)
    if not isinstance(found, dict):
        raise ValueError("it is not a JSON object")
    parameters, tokens, perplexity = (
        _read_number(found, name) for name in ("parameters", "tokens", "student_perplexity")
    )
    run = FinishedRun(report.parent, int(parameters), int(tokens), math.log(perplexity))
    held_out = found.get("held_out_tokens")
    return run, held_out if isinstance(held_out, int) else None


def _read_number(found: dict[str, Any], name: str) -> float:
    value = found.get(name)
    if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
        raise ValueError(f"its {name} is {value!r}")
    return float(value)
