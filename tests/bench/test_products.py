"""bench/products.py prints each of its rows, with errors in the order that the page states."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from bench.support.paths import ROOT
from bench.support.waiting import PATIENCE_SECONDS

SIZES = ["--vocabulary", "700", "--width", "128", "--positions", "8"]


@pytest.mark.long
def test_the_tables_of_a_small_head() -> None:
    done = subprocess.run(
        [sys.executable, "bench/products.py", *SIZES],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=PATIENCE_SECONDS,
    )
    assert done.returncode == 0, done.stderr
    rows = [line.strip("| ").split(" | ") for line in done.stdout.splitlines() if "|" in line]
    errors = {row[0]: float(row[1]) for row in rows if len(row) == 4 and row[1][0].isdigit()}
    assert len(errors) == 12
    for largest in (20, 36):
        rounded = errors[f"rounded to bfloat16, largest logit {largest}"]
        assert errors[f"float32, largest logit {largest}"] < rounded / 1000
    for stored, products in (("bfloat16", 3), ("float32", 6)):
        strict = errors[f"{stored} weight: float32"]
        assert errors[f"{stored} weight: split, {products} products in bfloat16"] <= 1.5 * strict
        two_parts = errors[f"{stored} weight: hi hi + hi lo + lo hi"]
        assert 2 * strict < two_parts < errors[f"{stored} weight: TF32"] / 10
    heads = [row for row in rows if len(row) == 7][1:]  # below the names of the columns
    moved = [[float(cell.replace(",", "")) for cell in row[1:]] for row in heads]
    assert len(moved) == 4
    for _, _, before, now, floor, gap in moved:
        assert floor <= now < before and abs(now - floor - gap) < 0.11
