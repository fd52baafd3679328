"""The page: where another program is better, and the table."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass

from bench.peers.results import STUDENTS, Result

MEBIBYTE = 2**20
MEGABYTE = 10**6

#: The results of each program, one for each seed.
Found = dict[str, list[Result]]


@dataclass(frozen=True)
class Column:
    """A figure of the table; ``times``: its ratio to ours stands beside it.

    Less of it is better, unless ``more``. ``optional``: a figure of 0 means that the program has no
    such thing.
    """

    heading: str
    value: Callable[[Result], float]
    form: str
    times: bool = False
    more: bool = False
    optional: bool = False

    def show(self, value: float) -> str:
        """Return the text of a figure."""
        return "none" if self.optional and value == 0 else format(value, self.form)


COLUMNS = (
    Column("step, s", lambda each: each.step, ".3f", times=True),
    Column("a student alone, s", lambda each: each.alone, ",.0f", times=True),
    Column(f"one of {STUDENTS}, s", lambda each: each.shared, ",.0f", times=True),
    Column("to capture, MiB", lambda each: each.capture.peak / MEBIBYTE, ",.0f", optional=True),
    Column("to train, MiB", lambda each: each.training.peak / MEBIBYTE, ",.0f", times=True),
    Column("on disk, MB", lambda each: each.disk / MEGABYTE, ",.1f", optional=True),
    Column("cross-entropy", lambda each: each.loss, ".4f"),
    Column("KL", lambda each: each.kl, ".4f"),
    Column("agreement", lambda each: 100 * each.agreement, ".2f", more=True),
    Column("lines", lambda each: each.lines, ".0f"),
)


def average(column: Column, results: list[Result]) -> float:
    """Return the mean of a figure over the seeds."""
    return statistics.fmean(column.value(each) for each in results)


def find_ratio(column: Column, results: list[Result], ours: list[Result]) -> float:
    """Return the median of theirs / ours, within each seed: the runs of a seed took turns."""
    pairs = zip(results, ours, strict=True)
    return statistics.median(column.value(a) / column.value(b) for a, b in pairs)


def render_table(found: Found, ours: str) -> str:
    """Return the table: means over the seeds, and in brackets how many times ours."""
    lines = [
        f"| program | {' | '.join(each.heading for each in COLUMNS)} |",
        f"|---|{'--:|' * len(COLUMNS)}",
    ]
    for name, results in found.items():
        cells = [render_cell(each, results, found.get(ours)) for each in COLUMNS]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def render_cell(column: Column, results: list[Result], ours: list[Result] | None) -> str:
    """Return the mean of a figure, with its ratio to ours where the column has one."""
    mean = column.show(average(column, results))
    if ours is None or results is ours or not column.times:
        return mean
    return f"{mean} ({find_ratio(column, results, ours):.2f}×)"


def render_better(found: Found, ours: str) -> str:
    """Return a line for each figure in which another program is better than ours.

    A program counts if its mean is better; the brackets have the figure of each seed.
    """
    lines = [line for column in COLUMNS if (line := render_better_figure(column, found, ours))]
    return "\n".join(lines or ["- in no figure."])


def render_better_figure(column: Column, found: Found, ours: str) -> str | None:
    """Return the line of one figure; None if ours is the best."""
    own = average(column, found[ours])
    sign = -1 if column.more else 1
    better = {
        name: results
        for name, results in found.items()
        if sign * average(column, results) < sign * own
    }
    if not better:
        return None
    texts = [f"{name} {show_seeds(column, results)}" for name, results in better.items()]
    return f"- {column.heading}: {', '.join(texts)}; ours {show_seeds(column, found[ours])}."


def show_seeds(column: Column, results: list[Result]) -> str:
    """Return the mean of a figure, and that of each seed."""
    seeds = ", ".join(column.show(column.value(each)) for each in results)
    return f"{column.show(average(column, results))} ({seeds})"


def render_skipped(skipped: dict[str, str]) -> str:
    """Return a line for each program that could not be had, with the reason."""
    return "\n".join(f"- {name} was skipped: {reason}." for name, reason in skipped.items())
