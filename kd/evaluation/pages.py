"""What was found, as Markdown: the table of models, samples, tasks, pictures."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from kd.evaluation.plots import TITLES

Found = Mapping[str, Any]
_PERCENT = "{:.1%}".format
_COLUMNS: tuple[tuple[str, str, Callable[[float], str]], ...] = (
    ("perplexity", "perplexity", "{:,.2f}".format),
    ("bits_per_byte", "bits per byte", "{:.4f}".format),
    ("kl", "KL(teacher ‖ student)", "{:.4f}".format),
    ("agreement", "same best token", _PERCENT),
    ("top_k_agreement", "of the best {top_k} in common", _PERCENT),
    ("total_variation", "total variation (1 − acceptance)", "{:.4f}".format),
    ("calibration_error", "calibration error", "{:.4f}".format),
)


def table_of_models(models: Mapping[str, Found], top_k: int = 0) -> list[str]:
    """A row for each model, a column for each thing that is known of any of them."""
    shown = [column for column in _COLUMNS if any(found.get(column[0]) is not None for found in models.values())]
    if not shown:
        return []
    rows = [
        [name, *("" if found.get(key) is None else form(found[key]) for key, _, form in shown)]
        for name, found in models.items()
    ]
    heading = ["held-out text", *(title.format(top_k=top_k) for _, title, _ in shown)]
    return [_row(heading), "|---|" + "---:|" * len(shown), *map(_row, rows), ""]


def closing_sections(report: Found) -> list[str]:
    """Tasks, samples and pictures of a report, where it has them."""
    found = report.get("evaluation") or {}
    return [
        *_checks(report.get("checks") or ()),
        *_tasks(found.get("tasks") or {}),
        *_samples(found.get("samples") or {}),
        *_pictures(report),
        *_profile(report.get("profile") or {}),
    ]


def _checks(verdicts: Sequence[Mapping[str, Any]]) -> list[str]:
    """What the checks of the training objected to, each with its step; that all is well in one line."""
    wrong = [verdict for verdict in verdicts if not verdict["ok"] or verdict["check"] == "spike"]
    sound = ", ".join(dict.fromkeys(verdict["check"] for verdict in verdicts if verdict not in wrong))
    lines = [f"- Step {verdict['step']:,}, {verdict['check']}: {verdict['message']}" for verdict in wrong]
    return [*([f"- Checks passed: {sound}."] if sound else []), *(["", "## Checks", "", *lines] if lines else [])]


def _profile(profile: Mapping[str, Any]) -> list[str]:
    """Where the time of the training went, and what it needed."""
    if not profile:
        return []
    rows = [
        [phase["name"], f"{phase['count']:,}", f"{phase['seconds']:.1f}", f"{phase['mean_milliseconds']:.1f}",
         _PERCENT(phase["share"])]
        for phase in profile["phases"]
    ]  # fmt: skip
    used = f"{profile['peak_memory_bytes'] / 2**20:,.0f} MiB of memory at most"
    if profile.get("mfu") is not None:
        used += f", {profile['mfu']:.1%} of the device's peak arithmetic"
    table = [_row(["phase", "times", "seconds", "mean ms", "share"]), "|---|--:|--:|--:|--:|", *map(_row, rows)]
    return ["", "## Where the time went", "", f"{used}.", "", *table]


def _tasks(tasks: Mapping[str, Mapping[str, float]]) -> list[str]:
    rows = [[task, metric, f"{value:.4f}"] for task, found in tasks.items() for metric, value in found.items()]
    return ["", "## Tasks", "", _row(["task", "metric", ""]), "|---|---|---:|", *map(_row, rows)] if rows else []


def _samples(samples: Mapping[str, Sequence[Mapping[str, str]]]) -> list[str]:
    lines = []
    for texts in zip(*samples.values(), strict=True):
        lines += ["", *_quoted(texts[0]["prompt"])]
        for name, text in zip(samples, texts, strict=True):
            lines += ["", f"{name}:", "", *_quoted(text["text"])]
    return ["", "## Samples", *lines] if lines else []


def _quoted(text: str) -> list[str]:
    """A text as it is: an indented block, in which Markdown means nothing."""
    return [f"    {line}" for line in text.splitlines() or [""]]


def _pictures(report: Found) -> list[str]:
    return [line for name in report.get("plots") or () for line in ("", f"![{TITLES[name]}]({name})")]


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"
