"""The report of a run as one HTML page that can be mailed: its Markdown, and its curves as SVG."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml
from markdown_it import MarkdownIt

from kd.errors import DataError
from kd.evaluation.doubts import find_perplexity
from kd.evaluation.plots import CURVES, TITLES, Lines, draw_perplexities, list_drawings
from kd.evaluation.report import Report, render_report
from kd.evaluation.teacher_comparison import TEACHER
from kd.experiments.drawing import draw_svg
from kd.experiments.page import make_element, make_plots, render_page
from kd.files import read_json, write_text
from kd.tracking.metrics import read_metrics

PAGE = "report.html"


def read_report(run_dir: Path) -> Report:
    """Read the report of the run in ``run_dir``. Raises ``DataError`` where it has none."""
    report: Report | None = read_json(run_dir / "report.json")
    if report is None or "steps" not in report:
        remedy = "Name a run whose training has finished."
        raise DataError(f"{run_dir} has no report of a training.", remedy)
    return report


def write_page(run_dir: Path, out: Path | None = None) -> Path:
    """Write the page of the run in ``run_dir``, by default into it; return its path."""
    page = run_dir / PAGE if out is None else out
    report = read_report(run_dir)
    lines = read_metrics(run_dir / "metrics.jsonl")
    write_text(page, render_run(report, lines, read_json(run_dir / "config.json") or {}))
    return page


def render_run(report: Report, lines: Lines, config: Report) -> str:
    """Render a report with the ``lines`` of metrics.jsonl and the job as one HTML page.

    It holds the facts of report.json and no address of anything outside.
    """
    reader = MarkdownIt("commonmark", {"html": False}).enable("table")
    # Without its title. HTML in it, for example in a sample, is text; links and pictures could lead
    # outside, but samples are blocks of code, in which there are none.
    body = reader.render(render_report(report | {"plots": None}).partition("\n")[2])
    body = body.replace("<table>", '<div class="scroll"><table>')
    begin, mark, rest = body.replace("</table>", "</table></div>").partition("<h2>")
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


def _draw_plots(report: Report, lines: Lines) -> list[str]:
    """Draw the curves of the training, and the plots of the evaluation in depth."""
    key = "learning_rate"
    rates = [(line["step"], line[key]) for line in lines if line.get(key) is not None]

    def draw_rates(figure: Any) -> None:
        axes = figure.subplots()
        axes.plot(*zip(*rates, strict=True))
        axes.set(title="Learning rate", xlabel="step", ylim=(0, None))

    drawings: dict[str, Callable[[Any], None]] = {}
    if any(line.get("validation_perplexity") is not None for line in lines):
        teacher = find_perplexity(report, TEACHER)
        drawings["Held-out perplexity"] = lambda figure: draw_perplexities(
            figure.subplots(), lines, teacher
        )
    if rates:
        drawings["Learning rate"] = draw_rates
    models = (report.get("evaluation") or {}).get("models") or {}
    found = list_drawings(models, lines)
    first = {TITLES[CURVES]: found.pop(CURVES)} if CURVES in found else {}
    drawings = first | drawings | {TITLES[name]: draw for name, draw in found.items()}
    return [draw_svg(draw, title) for title, draw in drawings.items()]
