"""A report's sections as Markdown: the table of models, checks, tasks, samples, plots and time."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from cache.perplexity import FEW_TOKENS
from kd.evaluation.plots import TITLES
from kd.files import format_bytes
from kd.progress import Notice

Facts = Mapping[str, Any]
_PERCENT = "{:.1%}".format
#: White space of a sample that is shown as it is: an empty line, and an indent.
_SHOWN_BREAKS = 2
_SHOWN_SPACES = 16
#: A column of a table of models: key of the facts, title, format.
Column = tuple[str, str, Callable[[Any], str]]
_COLUMNS: tuple[Column, ...] = (
    ("perplexity", "perplexity", "{:,.2f}".format),
    ("perplexity_interval", "95 % interval", "{low:,.2f} to {high:,.2f}".format_map),
    ("tokens", "of tokens", "{:,}".format),
    ("bits_per_byte", "bits per byte", "{:.4f}".format),
    ("kl", "KL(teacher ‖ student)", "{:.4f}".format),
    ("agreement", "same best token", _PERCENT),
    ("top_k_agreement", "of the best {top_k} in common", _PERCENT),
    ("total_variation", "total variation (1 − acceptance)", "{:.4f}".format),
    ("calibration_error", "calibration error", "{:.4f}".format),
)


def format_model_table(models: Mapping[str, Facts], top_k: int = 0) -> list[str]:
    """A table with a row for each model and a column for each fact that at least one model has.

    A perplexity of few tokens has its interval beside it.
    """
    shown = {}
    for name, found in models.items():
        few = (found.get("tokens") or 0) < FEW_TOKENS
        shown[name] = found if few else {**found, "perplexity_interval": None}
    columns = [(key, title.format(top_k=top_k), form) for key, title, form in _COLUMNS]
    table = _format_facts("held-out text", shown, columns)
    return [*table, ""] if table else []


def _format_facts(corner: str, models: Mapping[str, Facts], columns: Sequence[Column]) -> list[str]:
    """A table with a row for each model, and those of ``columns`` that at least one model has."""
    known = {key for found in models.values() for key in found if found[key] is not None}
    shown = [column for column in columns if column[0] in known]
    if not shown:
        return []
    rows = [
        [name, *("" if found.get(key) is None else form(found[key]) for key, _, form in shown)]
        for name, found in models.items()
    ]
    heading = [corner, *(title for _, title, _ in shown)]
    return [_format_row(heading), "|---|" + "---:|" * len(shown), *map(_format_row, rows)]


def _format_domains(domains: Mapping[str, Facts]) -> list[str]:
    """A section with the student's scores in each domain; nothing without domains."""
    table = _format_facts("domain", domains, _COLUMNS)
    return ["", "## By domain", "", *table] if table else []


def format_verdict(report: Facts) -> list[str]:
    """The verdict on the teacher as the first lines of a page: a quotation, if it is a warning."""
    verdict = report.get("verdict")
    if verdict is None:
        return []
    line = " ".join(filter(None, (verdict["message"], verdict["remedy"])))
    return [line if verdict["ok"] else f"> Warning: {line}", ""]


def format_closing_sections(report: Facts) -> list[str]:
    """The sections that the report has data for: from its checks to where the time went."""
    found = report.get("evaluation") or {}
    notices = [f"- {Notice(**each)}" for each in report.get("notices") or ()]
    return [
        *_format_checks(report.get("checks") or ()),
        *(["", "## Found in the inputs", "", *notices] if notices else []),
        *_format_domains(report.get("domains") or {}),
        *_format_tasks(found.get("tasks") or {}),
        *_format_costs(found),
        *_format_samples(found.get("samples") or {}),
        *(row for name in report.get("plots") or () for row in ("", f"![{TITLES[name]}]({name})")),
        *_format_profile(report.get("profile") or {}),
    ]


def _format_checks(verdicts: Sequence[Mapping[str, Any]]) -> list[str]:
    """One line with the checks that passed, and a line with the step for each objection.

    What to do about it stands in the first line of each check.
    """
    # A spike is shown even where the run recovered from it.
    wrong = [each for each in verdicts if not each["ok"] or each["check"] == "spike"]
    sound = ", ".join(dict.fromkeys(each["check"] for each in verdicts if each not in wrong))
    remedies = {each["check"]: each.get("remedy") or "" for each in reversed(wrong)}
    lines = []
    for each in wrong:
        said = f"{each['message']} {remedies.pop(each['check'], '')}".rstrip()
        lines.append(f"- Step {each['step']:,}, {each['check']}: {said}")
    return [
        *([f"- Checks passed: {sound}."] if sound else []),
        *(["", "## Checks", "", *lines] if lines else []),
    ]


_COSTS: tuple[Column, ...] = (
    ("parameters", "parameters", "{:,}".format),
    ("disk_bytes", "on disk", format_bytes),
    ("memory_bytes", "weights in memory", format_bytes),
    ("working_bytes", "and at work", format_bytes),
    ("read_tokens_per_second", "reads, tokens/s", "{:,.0f}".format),
    ("write_tokens_per_second", "writes, tokens/s", "{:,.0f}".format),
)
_ADVANTAGES = {
    "times_fewer_parameters": "{:.1f} times fewer parameters",
    "times_smaller_on_disk": "files {:.1f} times smaller",
    "times_less_memory": "{:.1f} times less memory for its weights",
    "times_faster_reading": "{:.1f} times the speed of reading",
    "times_faster_writing": "{:.1f} times the speed of writing",
}
#: The same of a student that is larger, as one in float32 is beside a quantised GGUF file.
_DISADVANTAGES = {
    "times_fewer_parameters": "{:.1f} times as many parameters",
    "times_smaller_on_disk": "files {:.1f} times as large",
    "times_less_memory": "{:.1f} times as much memory for its weights",
}


def _format_costs(found: Facts) -> list[str]:
    """Format the size, memory and speed of both models, and the savings of the student."""
    costs = found.get("costs") or {}
    if not costs:
        return []
    advantages = found.get("student_is") or {}
    saved = []
    for key, text in _ADVANTAGES.items():
        ratio = advantages.get(key)
        if ratio is not None and 0 < ratio < 1 and key in _DISADVANTAGES:
            saved.append(_DISADVANTAGES[key].format(1 / ratio))
        elif ratio is not None:
            saved.append(text.format(ratio))
    why = found.get("without_teacher")
    return [
        "",
        "## On this device",
        "",
        *([f"Compared with its teacher, the student has {', '.join(saved)}.", ""] if saved else []),
        *([f"The teacher was left out: {why}.", ""] if why else []),
        *_format_facts("", costs, _COSTS),
    ]


def _format_profile(profile: Mapping[str, Any]) -> list[str]:
    """Where the time of the training went, and the memory that it needed."""
    if not profile:
        return []
    rows = [
        [
            phase["name"],
            f"{phase['count']:,}",
            f"{phase['seconds']:.1f}",
            f"{phase['mean_milliseconds']:.1f}",
            _PERCENT(phase["share"]),
        ]
        for phase in profile["phases"]
    ]
    used = f"{profile['peak_memory_bytes'] / 2**20:,.0f} MiB of memory at most"
    if profile.get("mfu") is not None:
        used += f", {profile['mfu']:.1%} of the device's peak arithmetic"
    heading = _format_row(["phase", "times", "seconds", "mean ms", "share"])
    table = [heading, "|---|--:|--:|--:|--:|", *map(_format_row, rows)]
    return ["", "## Where the time went", "", f"{used}.", "", *table]


def _format_tasks(tasks: Mapping[str, Mapping[str, float]]) -> list[str]:
    rows = [[task, name, f"{value:.4f}"] for task in tasks for name, value in tasks[task].items()]
    if not rows:
        return []
    heading = _format_row(["task", "metric", ""])
    return ["", "## Tasks", "", heading, "|---|---|---:|", *map(_format_row, rows)]


def _format_samples(samples: Mapping[str, Sequence[Mapping[str, str]]]) -> list[str]:
    lines = []
    # Each model has one text for each prompt; the page groups them by prompt.
    for number, texts in enumerate(zip(*samples.values(), strict=True), 1):
        lines += ["", f"### Prompt {number}", "", *_fence(texts[0]["prompt"].lstrip(" "))]
        for name, text in zip(samples, texts, strict=True):
            lines += ["", f"The {name} continues:", "", *_fence(text["text"])]
    return ["", "## Samples", *lines] if lines else []


def _fence(text: str) -> list[str]:
    """A text verbatim, as a block of code that no mark in the text ends."""
    fence = "`" * max(3, max(map(len, re.findall("`+", text)), default=0) + 1)
    return [f"{fence}text", *show_white_space(text).split("\n"), fence]


def show_white_space(text: str) -> str:
    """Put marks, such as ↵×12, in place of white space that would leave a page empty.

    Two line breaks and an indent stay as they are, beside other text.
    """
    if not text:
        return "(no text)"

    def mark(found: re.Match[str]) -> str:
        space = found[0]
        breaks = len(f"{space}.".splitlines()) - 1
        others = len(space) - breaks
        if space != text and breaks <= _SHOWN_BREAKS and others <= _SHOWN_SPACES:
            return space
        marks = (("↵", breaks), ("␣", others))
        return " ".join(f"{sign}×{count}" for sign, count in marks if count)

    return re.sub(r"\s+", mark, text)


def _format_row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"
