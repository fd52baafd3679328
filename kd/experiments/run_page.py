"""The report of a run as one HTML page that can be mailed: its Markdown, and its curves as SVG."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from markdown_it import MarkdownIt

from kd.errors import DataError
from kd.evaluation.doubts import find_perplexity
from kd.evaluation.plots import CONTEXT, RELIABILITY, TITLES, draw_context, draw_reliability
from kd.evaluation.report import render_report
from kd.evaluation.teacher_comparison import TEACHER
from kd.experiments.drawing import QUIET, draw_svg
from kd.experiments.page import make_element, make_plots, render_page
from kd.files import read_json, write_text
from kd.tracking.metrics import read_metrics

Facts = dict[str, Any]
Lines = Sequence[Mapping[str, Any]]
PAGE = "report.html"
_LOSSES = {
    "loss": "loss",
    "kd_loss": "divergence from the teacher",
    "ce_loss": "cross-entropy",
    "validation_kl": "held-out KL",
}


def read_report(run_dir: Path) -> Facts:
    """Read the report of the run in ``run_dir``. Raises ``DataError`` where it has none."""
    report: Facts | None = read_json(run_dir / "report.json")
    if report is None or "steps" not in report:
        raise DataError(
            f"{run_dir} has no report of a training.", "Name a run whose training has finished."
        )
    return report


def write_page(run_dir: Path, out: Path | None = None) -> Path:
    """Write the page of the run in ``run_dir``, by default into it; return its path."""
    page = run_dir / PAGE if out is None else out
    report = read_report(run_dir)
    lines = read_metrics(run_dir / "metrics.jsonl")
    write_text(page, render_run(report, lines, read_json(run_dir / "config.json") or {}))
    return page


def render_run(report: Facts, lines: Lines, config: Facts) -> str:
    """Render a report with the ``lines`` of metrics.jsonl and the job as one HTML page.

    It holds the facts of report.json and no address of anything outside.
    """
    body = _render_markdown(render_report(report | {"plots": None}))
    begin, mark, rest = body.partition("<h2>")
    return render_page(
        str(report["name"]),
        [
            begin,
            make_plots(_draw_plots(report, lines)),
            mark + rest,
            "<h2>The job</h2>",
            "<details><summary>All fields of the job</summary>",
            make_element("pre", yaml.safe_dump(config, sort_keys=False, allow_unicode=True)),
            "</details>",
        ],
    )


def _render_markdown(text: str) -> str:
    """Render Markdown without its title as HTML; HTML in it, for example in a sample, is text."""
    reader = MarkdownIt("commonmark", {"html": False}).enable("table")
    html = reader.render(text.partition("\n")[2])
    # Links and pictures could lead outside; samples are blocks of code, where there are none.
    return html.replace("<table>", '<div class="scroll"><table>').replace(
        "</table>", "</table></div>"
    )


def _draw_plots(report: Facts, lines: Lines) -> list[str]:
    """Draw the curves of the training, and the plots of the evaluation in depth."""
    drawings: list[tuple[str, Callable[[Any], None]]] = []
    if any(line.get("loss") is not None for line in lines):
        drawings.append(("Training", lambda figure: _draw_losses(figure, lines)))
    if any(line.get("validation_perplexity") is not None for line in lines):
        drawings.append(
            ("Held-out perplexity", lambda figure: _draw_perplexity(figure, report, lines))
        )
    if any(line.get("learning_rate") is not None for line in lines):
        drawings.append(("Learning rate", lambda figure: _draw_rate(figure, lines)))
    models = (report.get("evaluation") or {}).get("models") or {}
    for name, key, draw in (
        (RELIABILITY, "reliability", draw_reliability),
        (CONTEXT, "kl_by_context", draw_context),
    ):
        if found := {model: facts[key] for model, facts in models.items() if facts.get(key)}:
            drawings.append((TITLES[name], _bind(draw, found)))
    return [draw_svg(draw, title) for title, draw in drawings]


def _bind(draw: Callable[[Any, Any], None], found: Any) -> Callable[[Any], None]:
    return lambda figure: draw(figure, found)


def _draw_losses(figure: Any, lines: Lines) -> None:
    axes = figure.subplots()
    for key, label in _LOSSES.items():
        if points := _collect(lines, key):
            style = "o-" if key.startswith("validation") else "-"
            axes.plot(*zip(*points, strict=True), style, label=label, markersize=3)
    axes.set(title="Training", xlabel="step", ylabel="nats per token")
    axes.legend()


def _draw_perplexity(figure: Any, report: Facts, lines: Lines) -> None:
    axes = figure.subplots()
    points = _collect(lines, "validation_perplexity")
    axes.plot(*zip(*points, strict=True), "o-", markersize=3, label="student")
    teacher = find_perplexity(report, TEACHER)
    if teacher is not None:
        axes.axhline(teacher, linestyle="--", color=QUIET, label="teacher")
    # A student without training may be a thousand times worse than one with it.
    axes.set_yscale("log")
    axes.set(title="Held-out perplexity", xlabel="step")
    axes.legend()


def _draw_rate(figure: Any, lines: Lines) -> None:
    axes = figure.subplots()
    axes.plot(*zip(*_collect(lines, "learning_rate"), strict=True))
    axes.set(title="Learning rate", xlabel="step", ylim=(0, None))


def _collect(lines: Lines, key: str) -> list[tuple[int, float]]:
    return [(line["step"], line[key]) for line in lines if line.get(key) is not None]
