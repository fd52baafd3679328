"""Fewer points for a small picture of a long history: every point is real, and no spike is lost."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import groupby

#: Step and value.
Point = tuple[int, float]


def thin_points(points: Sequence[Point], limit: int) -> list[Point]:
    """Return at most ``limit`` (4 or more) of ``points``, which are in the order of their steps.

    The first and the last point stay. The steps between them are cut into spans of equal width,
    and the lowest and the highest point of each span stay. Averages, or the largest triangles
    (LTTB), could hide a single step that went wrong.
    """
    if len(points) <= limit:
        return list(points)
    first, *inner, last = points
    spans = (limit - 2) // 2
    width = (last[0] - first[0]) / spans or 1.0
    grouped = groupby(inner, key=lambda point: min(int((point[0] - first[0]) / width), spans - 1))
    return [first, *(kept for _, group in grouped for kept in _find_extremes(group)), last]


def _find_extremes(group: Iterable[Point]) -> list[Point]:
    """Return the lowest and the highest point, in the order of steps; one if they are equal."""
    points = list(group)
    return sorted(
        {min(points, key=lambda point: point[1]), max(points, key=lambda point: point[1])}
    )
