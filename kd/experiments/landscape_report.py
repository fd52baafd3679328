"""What a survey of the loss found: the content of landscape.json."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from kd.progress import replace_nonfinite

Losses = dict[str, float]
"""The mean loss of a token in each split."""


@dataclass(frozen=True)
class LandscapeOptions:
    """What is measured: points on a side of the plane and on the line, and sequences of each split.

    ``radius`` is the reach of the plane in lengths of the student's rows.
    """

    points: int = 15
    line_points: int = 31
    radius: float = 1.0
    sequences: int = 16
    seed: int = 0


@dataclass(frozen=True)
class LossLine:
    """The losses at ``places`` from start (0) to end (1), and the barrier, by split."""

    places: list[float]
    losses: Mapping[str, list[float]]
    barrier: Mapping[str, float | None]


@dataclass(frozen=True)
class LossPlane:
    """The losses on a grid with ``places`` on both sides, by split, at its centre, and their rise.

    ``rise`` is the mean rise at half of the largest distance; None without a finite loss there.
    """

    places: list[float]
    losses: Mapping[str, list[list[float]]]
    centre: Losses
    rise: Mapping[str, float | None]


@dataclass(frozen=True)
class Landscape:
    """The landscape of the run in the folder ``run``; ``tokens`` are those of each split."""

    name: str
    run: str
    options: LandscapeOptions
    alpha: float
    temperature: float
    tokens: dict[str, int]
    line: LossLine
    plane: LossPlane

    def to_json(self) -> dict[str, Any]:
        """Return the content of landscape.json; a loss that is not finite is None."""
        line, plane = self.line, self.plane
        found = asdict(self)
        found["line"] = {"places": line.places, **line.losses, "barrier": line.barrier}
        ends = {"centre": plane.centre, "rise": plane.rise}
        found["plane"] = {"places": plane.places, **plane.losses, **ends}
        content: dict[str, Any] = replace_nonfinite(found)
        return content
