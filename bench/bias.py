"""Measure the bias of sampled cache records on real text, by decade of the token's probability.

    python bench/bias.py [--teacher FOLDER [--gguf-file NAME]] [--text FILE] [--positions 32]
                         [--rounds 40] [--draws 32]

The teacher reads the text once. The records of some of its positions are then drawn, rounded and
decoded again and again, and the mean weights are compared with p_T (``bench.support.bias``).

1e-2, ...     the relative error, with its standard error, of the mean weight of all tail tokens
              whose probability at T = 1 is from 1e-2 to 1e-1, and so on. "-" means that the tail
              has no such token.
rms z         the root mean square of the error over its standard error, for each position and
              decade; 1 where there is no bias, and a little more because 40 rounds estimate the
              standard error
largest z     the largest |z| of them, and of the decades
ratio         the bound of the only part of a weight that cannot be unbiased, a ratio of rounded
              numbers, for a single token. It has both signs, and almost none is left in a sum.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bench.records import Truth, add_source_options, format_table, read_teacher
from bench.support.bias import DECADES, BiasRow, bound_rounding, measure_bias
from cache.codec import Codec
from kd.capture.knots import choose_knots
from kd.models.loading import hide_progress_bars

#: What is measured, and at which temperatures.
CODECS: list[tuple[str, dict[str, Any], tuple[float, ...]]] = [
    ("threshold 0.04", {"profile": "threshold", "threshold": 0.04, "clusters": 1}, (1.0,)),
    (
        "tempered 0.0155, T from 0.5 to 2",
        {"profile": "tempered", "threshold": 0.0155, "temperatures": (0.5, 2.0)},
        (1.0, 1.5, 2.0),
    ),
    (
        "tempered 0.0155, T from 1 to 4",
        {"profile": "tempered", "threshold": 0.0155, "temperatures": (1.0, 4.0)},
        (1.0, 1.5, 2.0, 4.0),
    ),
]
COLUMNS = ["what", "T", *DECADES, "rms z", "largest z", "ratio"]


@torch.no_grad()
def make_rows(
    name: str,
    options: dict[str, Any],
    temperatures: tuple[float, ...],
    truth: Truth,
    arguments: argparse.Namespace,
) -> list[list[str]]:
    """Measure one codec; returns a row for each temperature."""
    own = 1 if options["profile"] == "threshold" else arguments.draws
    codec = Codec(vocabulary_size=truth.head.vocabulary, draws=own, **options)
    hidden_ND = torch.cat(truth.hidden)
    gold_N = torch.cat(truth.gold)
    chosen = np.linspace(0, len(gold_N) - 1, min(arguments.positions, len(gold_N))).astype(int)
    logits_NV = truth.head.compute_logits(hidden_ND[chosen])
    knots = 0
    if codec.profile == "tempered":
        knots = choose_knots(truth.hidden[0], truth.gold[0], truth.head, codec).count
    found = measure_bias(
        codec,
        logits_NV,
        gold_N[chosen],
        temperatures,
        arguments.rounds,
        arguments.draws,
        knots,
    )
    return [[name, *make_cells(codec, row)] for row in found]


def make_cells(codec: Codec, row: BiasRow) -> list[str]:
    """Return the cells of a row after its name."""
    decades = [
        f"{bias:+.2%} ± {error:.2%}" if error > 0 else "-"
        for bias, error in zip(row.bias_D, row.error_D, strict=True)
    ]
    bound = bound_rounding(codec, row.temperature)
    ratio = f"{bound:.2%}" if bound else "none"
    return [f"{row.temperature:g}", *decades, f"{row.rms_z:.2f}", f"{row.largest_z:.1f}", ratio]


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_source_options(parser, sequences=4, length=256)
    parser.add_argument("--positions", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--draws", type=int, default=32, help="draws of each round, 1 to 64")
    parser.add_argument("--out", type=Path, help="write the table to this file too")
    arguments = parser.parse_args()
    hide_progress_bars()
    truth, _ = read_teacher(arguments)
    about = (
        f"Teacher {arguments.teacher.name}, V = {truth.head.vocabulary:,}; "
        f"{arguments.positions} positions of {arguments.text.name}, "
        f"{arguments.rounds * arguments.draws:,} draws each."
    )
    rows = [row for each in CODECS for row in make_rows(*each, truth, arguments)]
    page = "\n".join([about, "", *format_table(COLUMNS, rows)])
    print(page)
    if arguments.out:
        arguments.out.write_text(page + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
