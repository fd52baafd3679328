"""The page of a study, in markdown: its settings, the table of shares, and where they differ.

Shapes: K seeds, N held-out targets.
"""

from __future__ import annotations

import math
import platform
import statistics

import numpy as np
import torch
from numpy.typing import NDArray

from bench.support.quality.rows import FULL, PLAIN
from bench.support.quality.runs import Finished
from bench.support.quality.shares import (
    DECADES,
    FREQUENCIES,
    Part,
    Ratio,
    Share,
    split_difference,
)
from bench.support.quality.study import Study
from cache.rounding import KNOWN_STEP, UNKNOWN

#: The finished students of each row by seed.
Found = dict[str, dict[int, Finished]]

NOTES = (
    "Shares: the difference of the losses summed over the seeds, with its 95 % interval over the "
    "seeds and over blocks of 64 held-out tokens. Hours are those of the steps. Bytes with * are "
    "those of the method's own format; all others are on the disk, everything included."
)


def render_page(study: Study, found: Found) -> str:
    """Render all that is finished; rows of which no student is finished are left out."""
    parts = [describe_study(study), render_shares(study, found), NOTES]
    if FULL in found:
        for title, values_N, ranges in (
            ("the teacher's probability of the next word", read_teacher(study), DECADES),
            (
                "how often the next word is in the training text",
                count_gold_tokens(study),
                FREQUENCIES,
            ),
        ):
            if values_N is not None:
                parts.append(render_differences(found, title, values_N, ranges))
    return "\n\n".join(parts)


def describe_study(study: Study) -> str:
    """Describe teacher, student, text and training in one paragraph."""
    job = study.make_job(study.rows[0], study.seeds.start)
    options = job.require_train()
    student = job.student
    assert student is not None
    assert job.teacher is not None
    if student.from_teacher is not None:
        shape = f"{student.from_teacher.layers} of the teacher's layers"
    else:
        assert student.init is not None, "a study's student is one of the two"
        shape = f"{student.init.layers} fresh layers of width {student.init.hidden_size}"
    corpus = study.text.corpus
    batch = options.batch_size * options.gradient_accumulation_steps
    steps = options.max_steps or 0
    seen = steps * batch / len(corpus.train)
    changed = f" Set: {', '.join(study.overrides)}." if study.overrides else ""
    return (
        f"Teacher {job.teacher.gguf_file or study.text.teacher.folder.name}, V = "
        f"{study.text.vocabulary:,}. Students: {shape}{', untied' * study.untied}; "
        f"{steps:,} steps of {batch} x {job.data.sequence_length} tokens, learning rate "
        f"{options.learning_rate:g}, warm-up {options.warmup_steps}, "
        f"{options.lr_scheduler_type}.{changed} {len(corpus.train):,} training sequences, each "
        f"seen {seen:.3g} times; {corpus.validation.positions:,} held-out tokens. "
        f"{platform.system()} {platform.machine()}, torch {torch.__version__}."
    )


def render_shares(study: Study, found: Found) -> str:
    """Render the table of rows."""
    columns = ["told", "entries", "bytes/token", "held-out CE, mean (each seed)"]
    columns += ["KL", "ECE", "acceptance", "share of the gap", "over seeds", "over text", "hours"]
    lines = [f"| {' | '.join(columns)} |", "|---|--:|--:|---|--:|--:|--:|--:|--:|--:|--:|"]
    targets_S = study.text.corpus.validation.target_mask.sum(1)
    for row in study.rows:
        if students := found.get(row.name):
            lines.append(_render_row(row.name, students, find_share(found, row.name, targets_S)))
    return "\n".join(lines)


def _render_row(name: str, students: dict[int, Finished], share: Share | None) -> str:
    figures = [each.figures for _, each in sorted(students.items())]
    first = figures[0]
    entries = "-" if first.entries is None else f"{first.entries:,.1f}"
    size = "-" if first.bytes_per_token is None else f"{first.bytes_per_token:,.1f}"
    size += "*" * (first.bytes_per_token is not None and not first.measured)
    losses = ", ".join(f"{each.loss:.4f}" for each in figures)
    mean = statistics.fmean(each.loss for each in figures)
    hours = statistics.fmean(each.seconds for each in figures) / 3600
    value, seeds, text = (
        ("-", "-", "-")
        if share is None
        else (
            f"{share.over_seeds.value:.1%}",
            _render_reach(share.over_seeds),
            _render_reach(share.over_text),
        )
    )
    measured = zip(*((each.kl, each.calibration, each.acceptance) for each in figures), strict=True)
    kl, calibration, acceptance = ("-" if None in each else _render_mean(each) for each in measured)
    return (
        f"| {name} | {entries} | {size} | {mean:.4f} ({losses}) | {kl} | {calibration} "
        f"| {acceptance} | {value} | {seeds} | {text} | {hours:.2f} |"
    )


def _render_mean(values: tuple[float | None, ...]) -> str:
    return f"{statistics.fmean(value for value in values if value is not None):.4f}"


def _render_reach(ratio: Ratio) -> str:
    return "-" if ratio.reach is None else f"±{100 * ratio.reach:.1f}"


def find_share(found: Found, name: str, targets_S: NDArray[np.int64]) -> Share | None:
    """Compute a row's share over the seeds that it has in common with both ends of the gap."""
    stacked = stack_losses(found, (PLAIN, FULL, name))
    return None if stacked is None else Share.of(*stacked, targets_S)


def stack_losses(found: Found, names: tuple[str, ...]) -> list[NDArray[np.float64]] | None:
    """Return the losses (K, N) of each row over their common seeds; None if there is none."""
    seeds = sorted(set.intersection(*(set(found.get(name, {})) for name in names)))
    if not seeds:
        return None
    return [np.stack([found[name][seed].losses_N for seed in seeds]) for name in names]


# ---------------------------------------------------------------------- where they differ


def read_teacher(study: Study) -> NDArray[np.float64] | None:
    """Read the teacher's probability of each held-out target, (N,), from a cache of the study."""
    row = next((row for row in study.rows if not row.plain), None)
    if row is None:
        return None
    store = study.open_caches(row)[0]
    _, records = store.read(store.validation)
    known_N = records["known"][:, 0].astype(np.float64)
    return np.where(known_N == UNKNOWN, 0.0, np.exp(-known_N * KNOWN_STEP))


def count_gold_tokens(study: Study) -> NDArray[np.float64]:
    """Count how often each held-out target is in the training text, (N,)."""
    corpus = study.text.corpus
    gold = corpus.train.find_gold_ids()
    counts_V = np.bincount(gold.astype(np.int64), minlength=study.text.vocabulary)
    return counts_V[corpus.validation.find_gold_ids().astype(np.int64)].astype(np.float64)


def render_differences(
    found: Found, title: str, values_N: NDArray[np.float64], ranges: tuple[tuple[str, float], ...]
) -> str:
    """Render the loss of each row against all of p by ranges of ``values_N``."""
    columns: dict[str, list[Part]] = {}
    for name in found:
        stacked = stack_losses(found, (name, FULL))
        if name != FULL and stacked is not None:
            columns[name] = split_difference(*stacked, values_N, ranges)
    if not columns:
        return ""
    about = (
        f'Held-out CE above that of "{FULL}" in nats, by {title}: the mean of these tokens, and '
        "in brackets their part of the row's whole difference."
    )
    lines = [
        about,
        "",
        f"| {' | '.join(['range', 'tokens', *columns])} |",
        f"|---|--:|{'---|' * len(columns)}",
    ]
    for parts in zip(*columns.values(), strict=True):
        cells = [_render_part(part) for part in parts]
        lines.append(f"| {parts[0].name} | {parts[0].targets:,} | {' | '.join(cells)} |")
    whole = [f"{sum(part.added for part in parts):+.4f}" for parts in columns.values()]
    lines.append(f"| all | {len(values_N):,} | {' | '.join(whole)} |")
    return "\n".join(lines)


def _render_part(part: Part) -> str:
    return "-" if math.isnan(part.within) else f"{part.within:+.4f} ({part.added:+.4f})"
