"""A measured loss landscape, and its page: the line from start to end, the plane around the end."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from cache.json_object import Json
from kd.experiments.drawing import INK, QUIET, draw_svg, style_line
from kd.experiments.page import make_element, make_plots, make_table, render_page
from kd.progress import replace_nonfinite

_SPLITS = {"train": "training text", "held_out": "held-out text"}
_ABOUT_LINE = (
    "The loss on the straight line from the first weights (0) to the trained ones (1). A line that "
    "falls all the way has no barrier. Beyond 1 the held-out loss shows whether the training "
    "stopped early or late in this direction."
)
_ABOUT_PLANE = (
    "The loss along two random directions, each row of each matrix as long as that of the student "
    "(filter normalisation). 1 is a step as long as the weights themselves. A wide bowl is a flat "
    "minimum. Other directions look alike, but not the same."
)
#: Levels of the contours.
_LEVELS = 14


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
    centre: Mapping[str, float]
    rise: Mapping[str, float | None]


@dataclass(frozen=True)
class Landscape:
    """The landscape of the run in the folder ``run``; ``tokens`` are those of each split."""

    name: str
    run: str
    options: Mapping[str, float]
    alpha: float
    temperature: float
    tokens: dict[str, int]
    line: LossLine
    plane: LossPlane

    def to_json(self) -> Json:
        """Return the content of landscape.json; a loss that is not finite is None."""
        line, plane = self.line, self.plane
        found = asdict(self)
        found["line"] = {"places": line.places, **line.losses, "barrier": line.barrier}
        ends = {"centre": plane.centre, "rise": plane.rise}
        found["plane"] = {"places": plane.places, **plane.losses, **ends}
        return replace_nonfinite(found)


def render_landscape(found: Landscape) -> str:
    """Render a measured landscape as one HTML page."""
    splits = {name: title for name, title in _SPLITS.items() if name in found.line.losses}
    planes = [_draw_plane(found, name, title) for name, title in splits.items()]
    weight = f"alpha {found.alpha:g}, T {found.temperature:g}"
    tokens = ", ".join(f"{found.tokens[name]:,} tokens of {splits[name]}" for name in splits)
    about = (
        f"The loss is the job's loss at the end of its training ({weight}), in nats per token, on "
        f"{tokens}, without dropout."
    )
    return render_page(
        f"Loss landscape of {found.name}",
        [
            make_element("p", about),
            "<h2>From start to end</h2>",
            make_element("p", _ABOUT_LINE, "quiet"),
            make_plots([_draw_line(found, splits)]),
            "<h2>Around the trained student</h2>",
            make_element("p", _ABOUT_PLANE, "quiet"),
            make_plots(filter(None, planes)),
            _make_facts(found, splits),
        ],
    )


def _draw_line(found: Landscape, splits: dict[str, str]) -> str:
    line = found.line

    def draw(figure: Any) -> None:
        axes = figure.subplots()
        for number, (name, title) in enumerate(splits.items()):
            axes.plot(line.places, _fill(line.losses[name]), label=title, **style_line(number))
        for place, text in ((0, "start"), (1, "end")):
            axes.axvline(place, color=QUIET, linewidth=0.8, linestyle=":")
            axes.annotate(
                text, (place, 1.0), xycoords=("data", "axes fraction"), xytext=(3, -10),
                textcoords="offset points", fontsize=8, color=QUIET,
            )  # fmt: skip
        axes.set(xlabel="share of the way", ylabel="nats per token")
        axes.legend()

    return draw_svg(draw, "Loss from start to end", 6.4, 3.4)


def _draw_plane(found: Landscape, name: str, title: str) -> str:
    """Draw contours of the loss; empty where fewer than two values are finite."""
    places = found.plane.places
    grid = [_fill(row) for row in found.plane.losses[name]]
    finite = sorted({value for row in grid for value in row if math.isfinite(value)})
    if len(finite) < 2:
        return ""
    low, high = finite[0], finite[-1]
    # The levels are close near the minimum and wide above.
    levels = [low + (high - low) * (number / _LEVELS) ** 2 for number in range(_LEVELS + 1)]

    def draw(figure: Any) -> None:
        axes = figure.subplots()
        filled = axes.contourf(places, places, grid, levels=levels, cmap="viridis_r")
        axes.contour(places, places, grid, levels=levels, colors=[INK], linewidths=0.3, alpha=0.5)
        axes.plot([0], [0], "+", color="#000000", markersize=8)
        bar = figure.colorbar(filled, ax=axes, format="%.4g", ticks=levels[:: max(_LEVELS // 5, 1)])
        bar.set_label("nats per token", color=QUIET)
        bar.outline.set_visible(False)
        axes.set(title=f"Loss on {title}", xlabel="first direction", ylabel="second direction")
        axes.set_box_aspect(1)
        axes.grid(visible=False)

    return draw_svg(draw, f"Loss on {title} around the trained student", 5.4, 4.2)


def _make_facts(found: Landscape, splits: dict[str, str]) -> str:
    half = found.options["radius"] / 2
    parts = (found.plane.centre, found.plane.rise, found.line.barrier)
    rows = [[title, *(_format(part[name]) for part in parts)] for name, title in splits.items()]
    rise = f"mean rise at distance {half:g}"
    return make_table(["", "loss of the student", rise, "barrier from start to end"], rows)


def _fill(values: list[float]) -> list[float]:
    """Return the values with NaN, which is not drawn, in place of those that are not finite."""
    return [value if math.isfinite(value) else math.nan for value in values]


def _format(value: float | None) -> str:
    return "–" if value is None or not math.isfinite(value) else f"{value:.4f}"
