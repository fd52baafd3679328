"""A report's plots as PNG files: the run's curves, reliability, KL by length of context."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from io import BytesIO
from pathlib import Path
from typing import Any

from cache.disk import make_folder, storage_errors, write_file

CURVES = "curves.png"
RELIABILITY = "reliability.png"
CONTEXT = "kl_by_context.png"
TITLES = {
    CURVES: "Training",
    RELIABILITY: "Reliability: how often a model is right, by how sure it is",
    CONTEXT: "KL(teacher ‖ student) by the tokens of context",
}
Lines = Sequence[Mapping[str, Any]]


def draw_plots(folder: Path, models: Mapping[str, Mapping[str, Any]], lines: Lines) -> list[str]:
    """Draw a plot for each kind of data there is, and return the file names.

    The data are the measured ``models`` and the ``lines`` of metrics.jsonl.
    """
    drawings = list_drawings(models, lines)
    for name, draw in drawings.items():
        _save_figure(folder / name, draw)
    return list(drawings)


def list_drawings(
    models: Mapping[str, Mapping[str, Any]], lines: Lines
) -> dict[str, Callable[[Any], None]]:
    """Return what draws each plot for which there are data on a figure, by its file name."""

    def select(figure: str) -> dict[str, Lines]:
        return {name: found[figure] for name, found in models.items() if found.get(figure)}

    reliability = select("reliability")
    context = select("kl_by_context")
    has_loss = any("loss" in line for line in lines)
    drawings: dict[str, tuple[bool, Callable[[Any], None]]] = {
        CURVES: (has_loss, lambda figure: draw_curves(figure.subplots(), lines)),
        RELIABILITY: (bool(reliability), lambda figure: draw_reliability(figure, reliability)),
        CONTEXT: (bool(context), lambda figure: draw_context(figure, context)),
    }
    return {name: draw for name, (has_data, draw) in drawings.items() if has_data}


def draw_rates(path: Path, rates: Sequence[float]) -> None:
    """Draw the learning rate of each step of a run as a PNG file."""

    def draw(figure: Any) -> None:
        axes = figure.subplots()
        axes.plot(range(1, len(rates) + 1), rates)
        axes.set(title="Learning rate", xlabel="step", ylim=(0, None))
        axes.grid(alpha=0.3)

    _save_figure(path, draw)


def _save_figure(path: Path, draw: Callable[[Any], None]) -> None:
    """Draw on a new figure and write it, without pyplot's global state or a window."""
    # Imported here because most commands draw nothing.
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.0, 4.5), layout="constrained")
    draw(figure)
    image = BytesIO()
    figure.savefig(image, format="png", dpi=120)
    with storage_errors(path.parent):
        make_folder(path.parent)
        write_file(path, image.getvalue())


def draw_curves(axes: Any, lines: Lines) -> None:
    """Draw the losses of the steps and of the held-out text on one axis, in nats per token."""
    wanted = {
        "loss": ("loss", "-"),
        "kd_loss": ("divergence from the teacher", "-"),
        "ce_loss": ("cross-entropy", "-"),
        "validation_loss": ("held-out cross-entropy", "o-"),
        "validation_kl": ("held-out KL", "o-"),
    }
    for key, (label, style) in wanted.items():
        _draw_line(axes, lines, key, label, style)
    axes.set(xlabel="step", ylabel="nats per token", title=TITLES[CURVES])
    _explain_lines(axes)


def draw_perplexities(axes: Any, lines: Lines, teacher: float | None) -> None:
    """Draw the perplexity on the held-out text by step, on a logarithmic scale."""
    _draw_line(axes, lines, "validation_perplexity", "student", "o-")
    if teacher is not None:
        axes.axhline(teacher, color="grey", linestyle="--", linewidth=1, label="teacher")
    axes.set(xlabel="step", ylabel="perplexity", title="Held-out perplexity", yscale="log")
    _explain_lines(axes)


def _draw_line(axes: Any, lines: Lines, key: str, label: str, style: str) -> None:
    """Draw what ``lines`` have under ``key``, by step."""
    points = [(line["step"], line[key]) for line in lines if line.get(key) is not None]
    if points:
        axes.plot(*zip(*points, strict=True), style, label=label, markersize=3, linewidth=1)


def _explain_lines(axes: Any) -> None:
    """Add a grid, and a legend if there is a line."""
    axes.grid(alpha=0.3)
    if axes.lines:
        axes.legend()


def draw_reliability(figure: Any, curves: Mapping[str, Lines]) -> None:
    """Draw how often each model is right, by how sure it is."""
    axes = figure.subplots()
    axes.plot([0, 1], [0, 1], "--", color="grey", linewidth=1, label="as sure as right")
    for name, points in curves.items():
        places = [point["confidence"] for point in points], [point["accuracy"] for point in points]
        (line,) = axes.plot(*places, "-", label=name, linewidth=1)
        # The area of a point shows its share of the tokens.
        areas = [4 + 200 * point["share"] for point in points]
        axes.scatter(*places, s=areas, color=line.get_color(), alpha=0.5)
    axes.set(xlabel="confidence", ylabel="accuracy", title=TITLES[RELIABILITY])
    axes.set(xlim=(0, 1), ylim=(0, 1))
    _explain_lines(axes)


def draw_context(figure: Any, spans: Mapping[str, Lines]) -> None:
    """Draw the KL of each model from the teacher, by the tokens of context."""
    axes = figure.subplots()
    for name, points in spans.items():
        spans_and_kl = [point["first"] for point in points], [point["kl"] for point in points]
        axes.plot(*spans_and_kl, "o-", label=name)
    axes.set_xscale("log", base=2)  # the spans double
    axes.set(xlabel="tokens of context", ylabel="nats per token", title=TITLES[CONTEXT])
    _explain_lines(axes)
