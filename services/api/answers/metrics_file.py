"""The metrics of some steps, in full, from the file that a run writes.

The store thins a long history out. The file has every step, in order, so that its lines are found
by bisection: 20 looks into a file of a million steps.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import IO

from cache.json_object import Json
from services.api.answers.run_files import open_run_file

#: The file in a run folder.
METRICS = "metrics.jsonl"
#: Types of the lines whose numbers are metrics.
_TYPES = ("metrics", "evaluation", "temperature", "scalars")
#: Lines that are read at most.
MOST_LINES = 100_000


def read_metrics_file(runs: Path, run_dir: Path, after: int, before: int) -> list[Json] | None:
    """Read the points of the steps between ``after`` and ``before``, in order, without the two.

    None where the file is not on this machine, or the range has more than ``MOST_LINES`` lines.
    """
    try:
        handle = open_run_file(runs, run_dir / METRICS)
    except OSError:
        return None
    with os.fdopen(handle, "rb") as file:
        file.seek(_find_begin(file, after))
        points: dict[int, Json] = {}
        for number, line in enumerate(file):
            found = _parse(line)
            if found is None:
                continue
            if found["step"] >= before:
                break
            if number >= MOST_LINES:
                return None
            if found["step"] > after and found.pop("type") in _TYPES:
                points.setdefault(found["step"], {}).update(found)
    return [points[step] for step in sorted(points)]


def _find_begin(file: IO[bytes], after: int) -> int:
    """Find the place of a line not far before the first one with a step above ``after``."""
    low, high = 0, os.fstat(file.fileno()).st_size
    while high - low > 1 << 16:
        middle = (low + high) // 2
        file.seek(middle)
        file.readline()  # the rest of a line
        place = file.tell()
        found = _parse(file.readline())
        if found is not None and found["step"] <= after and place < high:
            low = place
        else:
            high = middle
    return low


def _parse(line: bytes) -> Json | None:
    """Parse a line; None for one that a crash cut short, and at the end of the file."""
    try:
        found = json.loads(line)
    except ValueError:
        return None
    return found if isinstance(found, dict) and isinstance(found.get("step"), int) else None
