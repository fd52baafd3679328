"""Long histories for small pictures: fewer points, none of which is made up, and no spike lost."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import groupby

Point = tuple[int, float]  #: step, value


def thin(points: Sequence[Point], limit: int) -> list[Point]:
    """At most ``limit`` (4 or more) of ``points``, which are in the order of their steps.

    The steps between the first and the last point, which are both kept, are cut into equally wide spans; the lowest and
    the highest point of each are kept. Averages, or the largest triangles, would hide a single step that went wrong.
    """
    if len(points) <= limit:
        return list(points)
    first, last, inner = points[0], points[-1], points[1:-1]
    spans = (limit - 2) // 2
    width = (last[0] - first[0]) / spans or 1.0
    grouped = groupby(inner, key=lambda point: min(int((point[0] - first[0]) / width), spans - 1))
    return [first, *(kept for _, group in grouped for kept in _extremes(group)), last]


def _extremes(group: Iterable[Point]) -> list[Point]:
    """The lowest and the highest point, in the order of their steps; one of them where they are the same."""
    points = list(group)
    return sorted({min(points, key=lambda point: point[1]), max(points, key=lambda point: point[1])})
