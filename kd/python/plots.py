"""The curves of a run as a figure of matplotlib, without pyplot's global state or a window."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from io import BytesIO
from typing import Any

from matplotlib.figure import Figure

from kd.evaluation.plots import draw_curves, draw_perplexities


class NotebookFigure(Figure):
    """A figure that a notebook shows by itself, also where nothing has loaded pyplot."""

    def _repr_png_(self) -> bytes:
        image = BytesIO()
        self.savefig(image, format="png", dpi=100)
        return image.getvalue()


def plot_training(lines: Sequence[Mapping[str, Any]], teacher_perplexity: float | None) -> Figure:
    """Draw the losses by step beside the held-out perplexity, the teacher's as a line."""
    figure = NotebookFigure(figsize=(11.0, 4.2), layout="constrained")
    losses, perplexities = figure.subplots(1, 2)
    draw_curves(losses, lines)
    draw_perplexities(perplexities, lines, teacher_perplexity)
    return figure
