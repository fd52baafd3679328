"""The bench of the reader prints its whole tables. Measured times are not judged: they vary."""

import os
import subprocess
import sys

import pytest

from bench.reader import COLUMNS, OTHERS
from bench.support.harness import PATIENCE_SECONDS
from bench.support.paths import ROOT


@pytest.mark.slow
def test_every_row_is_there_with_rates_above_zero(tmp_path):
    out = tmp_path / "page.md"
    command = [sys.executable, "bench/reader.py", "--quick", "--rounds", "1", "--out", str(out)]
    found = subprocess.run(
        command,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=PATIENCE_SECONDS,
    )
    assert found.returncode == 0, found.stderr
    text = out.read_text(encoding="utf-8")
    assert found.stdout == text and text.startswith("Machine: ")
    rows = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("| ")]
    lengths, others = rows[:3], rows[3:]
    assert tuple(lengths[0]) == COLUMNS and [row[0] for row in lengths[1:]] == ["32", "64"]
    assert [row[0] for row in others] == ["profile", *OTHERS]
    for row in lengths[1:]:
        assert all(float(cell.replace(",", "")) > 0 for cell in row[:-1]), row
    assert "against a full shuffle" in text.splitlines()[-1]
