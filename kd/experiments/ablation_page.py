"""The report of an ablation, and its page: what each setting changes, as plots and tables."""

from __future__ import annotations

import html
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import accumulate, pairwise
from typing import Any

import yaml

from cache.json_object import Json
from kd.experiments.drawing import INK, QUIET, SERIES, draw_svg, style_line
from kd.experiments.page import make_element, make_plots, make_table, render_page
from kd.experiments.plan import AblationAxis, AblationPlan
from kd.files import format_bytes

_CURVES = {
    "loss": ("Training loss", "nats per token"),
    "perplexity": ("Held-out perplexity", ""),
    "kl": ("Held-out KL(teacher ‖ student)", "nats per token"),
}
#: The columns of figures: each with the key of a run, and what formats its value.
_FIGURES: dict[str, tuple[str, Callable[[float], str]]] = {
    "held-out perplexity": ("held_out_perplexity", "{:,.2f}".format),
    "KL to the teacher": ("held_out_kl", "{:.4f}".format),
    "same best token": ("held_out_agreement", "{:.1%}".format),
    "training time": ("train_seconds", "{:,.1f} s".format),
    "tokens/s": ("tokens_per_second", "{:,.0f}".format),
    "peak memory": ("peak_memory_bytes", format_bytes),
}
#: An axis of seeds shows by how much runs differ that have the same settings.
_SEED_AXIS = "train.seed"
_ABOUT_FIGURES = (
    "The figures in the tables are measured after training, on the held-out text and records of "
    "the job itself. Curves of the KL are shown where a run has those records and that temperature "
    f"while it trains. One run with another seed would differ too: --axis {_SEED_AXIS}=1,2,3 shows "
    "by how much. Time and speed are those of this machine, with all that it did besides."
)
_EMPTY = "–"
#: Nats per token that the overview spans at least, so that it does not enlarge what is nothing.
_LEAST_SPAN = 0.02


@dataclass(frozen=True)
class RunReport:
    """One run: ``state`` is waiting, finished or failed; ``folder`` is relative to the ablation's.

    ``own_records``: it was trained on other records than the job itself. ``temperature`` is what
    its job has in the section loss. ``curves`` are pairs of (tokens trained, value). ``figures``
    are empty unless the run has finished; None in them is not known.
    """

    label: str
    folder: str
    state: str
    error: str
    own_records: bool
    temperature: object
    curves: Mapping[str, Sequence[tuple[float, float]]]
    figures: Mapping[str, float | None]


@dataclass(frozen=True)
class AblationReport:
    """All that an ablation has found: its plan, and its runs by digest."""

    plan: AblationPlan
    runs: Mapping[str, RunReport]

    def to_json(self) -> Json:
        """Return the content of report.json, in which a run has its figures beside its state."""
        base = self.plan.base
        train = base.require_train()
        runs = {digest: asdict(run) for digest, run in self.runs.items()}
        return {
            "name": base.name,
            "job": base.model_dump(mode="json"),
            "steps": train.max_steps,
            "seed": train.seed,
            "base": self.plan.base_digest,
            "axes": [asdict(axis) for axis in self.plan.axes],
            "runs": {digest: run | run.pop("figures") for digest, run in runs.items()},
        }


#: A setting that has a run: its label, the run, and the digest of the run.
Row = tuple[str, RunReport, str]


def render_ablation(report: AblationReport) -> str:
    """Render the report of an ablation as one HTML page."""
    base = report.plan.base
    return render_page(
        f"Ablation of {base.name}",
        [
            *_introduce(report),
            *_draw_overview(report),
            *(part for axis in report.plan.axes for part in _render_axis(report, axis)),
            "<h2>The job</h2>",
            "<details><summary>All fields of the job with which the runs are compared</summary>",
            make_element("pre", yaml.safe_dump(base.model_dump(mode="json"), sort_keys=False)),
            "</details>",
        ],
    )


def _introduce(report: AblationReport) -> list[str]:
    runs = report.runs.values()
    train = report.plan.base.require_train()
    states = [run.state for run in runs]
    tokens = next((run.figures["tokens"] for run in runs if run.figures.get("tokens")), None)
    length = f"{train.max_steps:,} steps" + (f" ({tokens:,} tokens)" if tokens else "")
    counts = [f"{states.count('finished')} of {len(states)} runs have finished"]
    counts += [f"{states.count('failed')} failed"] if "failed" in states else []
    text = (
        f"The runs of an axis differ in nothing else. All have seed {train.seed}, the same "
        f"order of the data, and as many tokens as {length} of the job itself, unless the axis is "
        f"one of these. {', '.join(counts)}."
    )
    return [make_element("p", text), make_element("p", _ABOUT_FIGURES, "quiet")]


# ---------------------------------------------------------------------- overview


def _draw_overview(report: AblationReport) -> list[str]:
    """Draw by how much each setting changes the held-out loss; nothing without two runs."""
    base = report.runs[report.plan.base_digest].figures.get("held_out_loss")
    bars = [
        (axis.name, row.label, loss - base)
        for axis in report.plan.axes
        for row in axis.rows
        if base is not None
        and row.run is not None
        and row.run != report.plan.base_digest
        and (loss := report.runs[row.run].figures.get("held_out_loss")) is not None
    ]
    if not bars:
        return []
    spread = [abs(change) for name, _, change in bars if name == _SEED_AXIS]

    def draw(figure: Any) -> None:
        axes = figure.subplots()
        # A gap is where the axis changes.
        gaps = [1.0 if one == other else 1.6 for (one, *_), (other, *_) in pairwise(bars)]
        places = list(accumulate(gaps, initial=0.0))
        names = list(dict.fromkeys(name for name, _, _ in bars))
        for place, (name, _, change) in zip(places, bars, strict=True):
            axes.barh(place, change, height=0.7, color=SERIES[names.index(name) % len(SERIES)])
            side, gap = ("left", 3) if change >= 0 else ("right", -3)
            axes.annotate(
                f"{change:+.3f}", (change, place), (gap, 0), textcoords="offset points",
                va="center", ha=side, fontsize=8, color=QUIET,
            )  # fmt: skip
        if spread:
            axes.axvspan(-max(spread), max(spread), color=QUIET, alpha=0.15, linewidth=0)
        axes.axvline(0, color=INK, linewidth=0.8)
        axes.set_yticks(places, [f"{name}: {label}" for name, label, _ in bars])
        axes.set_xlabel("held-out loss minus the job's own held-out loss, nats per token")
        axes.invert_yaxis()
        axes.set_axisbelow(True)
        low, high = (pick([0.0, *(change for *_, change in bars)]) for pick in (min, max))
        room = max(high - low, _LEAST_SPAN) * 0.16
        axes.set_xlim(low - room, high + room)
        axes.grid(axis="y", visible=False)
        axes.tick_params(axis="y", length=0, labelcolor=INK)

    said = "Bars to the left are better than the job itself."
    if spread:
        said += " Within the grey band, differences may come from the seed alone."
    title = "What each setting changes"
    height = 1.0 + 0.24 * len(bars) + 0.15 * len(report.plan.axes)
    return [
        f"<h2>{title}</h2>",
        make_element("p", said, "quiet"),
        f'<div style="max-width: 56rem">{draw_svg(draw, title, 8.4, height)}</div>',
    ]


# ---------------------------------------------------------------------- an axis


def _render_axis(report: AblationReport, axis: AblationAxis) -> list[str]:
    rows = [(row.label, report.runs[row.run], row.run) for row in axis.rows if row.run is not None]
    wrong = [
        *((row.label, "refused", row.refusal) for row in axis.rows if row.run is None),
        *((label, "failed", run.error) for label, run, _ in rows if run.state == "failed"),
    ]
    parts = [make_element("h2", axis.name)]
    parts += [make_element("p", axis.why, "quiet")] if axis.why else []
    parts += [
        f'<p class="bad"><b>{html.escape(label)}</b> {what}: {html.escape(why)}</p>'
        for label, what, why in wrong
    ]
    drawings = [_draw_curve(report, axis, rows, name) for name in _CURVES]
    return [*parts, make_plots(filter(None, drawings)), _make_axis_table(report, rows)]


def _draw_curve(report: AblationReport, axis: AblationAxis, rows: list[Row], name: str) -> str:
    """Draw one curve of every run of an axis; empty where no run has it."""
    title, unit = _CURVES[name]
    base = report.runs[report.plan.base_digest]
    # A KL is comparable if it is to the same records at the same temperature.
    same = (base.own_records, base.temperature)
    lines = [
        (number, label, run.curves[name])
        for number, (label, run, _) in enumerate(rows)
        if run.curves[name] and (name != "kl" or (run.own_records, run.temperature) == same)
    ]
    if not lines:
        return ""

    def draw(figure: Any) -> None:
        from matplotlib.ticker import EngFormatter

        axes = figure.subplots()
        for number, label, points in lines:
            places, values = zip(*points, strict=True)
            # Later lines are thinner, so that a line below an equal one is seen.
            width = 1.2 + 1.6 * 0.7**number * (number < len(lines) - 1)
            axes.plot(places, values, label=label, linewidth=width, **style_line(number))
        axes.set_title(title)
        axes.set_ylabel(unit)
        axes.set_xlabel("tokens trained")
        axes.xaxis.set_major_formatter(EngFormatter(sep=""))
        _set_scale(axes, [value for *_, points in lines for _, value in points])
        axes.legend()

    return draw_svg(draw, f"{title} by {axis.name}")


def _set_scale(axes: Any, values: Sequence[float]) -> None:
    """Use a logarithmic scale where the untrained student would hide all that follows."""
    from matplotlib.ticker import NullFormatter, ScalarFormatter

    if min(values) > 0 and max(values) > 5 * min(values):
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter(ScalarFormatter())
        is_narrow = max(values) < 30 * min(values)
        axes.yaxis.set_minor_formatter(ScalarFormatter() if is_narrow else NullFormatter())
        axes.tick_params(axis="y", which="minor", labelsize=7)


def _make_axis_table(report: AblationReport, rows: list[Row]) -> str:
    base = report.runs[report.plan.base_digest]
    found = [run.figures.get("held_out_loss") for _, run, _ in rows]
    losses = [loss for loss in found if loss is not None]
    # Equal runs, as of activation checkpointing, have no best one.
    best = min(losses) if len(set(losses)) > 1 else None
    cells = []
    marks = []
    for number, (label, run, digest) in enumerate(rows):
        color = f"var(--series-{number % len(SERIES) + 1})"
        is_base = digest == report.plan.base_digest and label != base.label
        itself = " (the job itself)" if is_base else ""
        key = f'<span class="key" style="background: {color}"></span>{html.escape(label + itself)}'
        cells.append([key, *_format_figures(run)])
        marks.append("best" if best is not None and found[number] == best else "")
    return make_table(["", *_FIGURES], cells, marks)


def _format_figures(run: RunReport) -> list[str]:
    if not run.figures:
        return [make_element("td", run.state, "quiet")] + [_EMPTY] * (len(_FIGURES) - 1)
    shown = [(run.figures[name], form) for name, form in _FIGURES.values()]
    return [_EMPTY if value is None else form(value) for value, form in shown]
