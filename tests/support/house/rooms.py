"""The table of rooms in docs/architecture.md, which says which room may import which."""

from __future__ import annotations

import re
from dataclasses import dataclass

from bench.support.paths import ROOT

PAGE = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
#: A row: number, name, part, what it holds, the numbers of what it may import, where to start.
_ROW = re.compile(
    r"^\| (\d+) \| `([\w.]+)` \| (core|border|door) \| (.+?) \| (-|[\d, -]+) \| `(.+?)` \|$", re.M
)


@dataclass(frozen=True)
class Room:
    """One row. ``part``: a core room never imports a border room; a door may."""

    number: int
    name: str
    part: str
    allowed: frozenset[int]
    start: str


def read_rooms() -> tuple[Room, ...]:
    """Return the rooms in the order of the table."""
    return tuple(
        Room(int(number), name, part, _read_numbers(allowed), start)
        for number, name, part, _, allowed, start in _ROW.findall(PAGE)
    )


def _read_numbers(text: str) -> frozenset[int]:
    """Read numbers and ranges, such as ``1-3, 7``; a dash alone is none."""
    if text == "-":
        return frozenset()
    ends = [part.split("-") for part in text.split(", ")]
    return frozenset(number for end in ends for number in range(int(end[0]), int(end[-1]) + 1))
