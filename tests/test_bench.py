"""The benchmark runs and prints its whole table. What it measures is not judged: a time is no test."""

from __future__ import annotations

import math
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent
HARD, RECORDS = "fused, hard labels alone", "fused, records, alpha 0.1"
TEMPERED = "fused, tempered records at T = 2, alpha 0.1"
VARIANTS = {
    "capture": ["teacher's bare forward", "records read", "records read and sealed", "tempered records read"],
    "step": ["cross-entropy, all logits", HARD, RECORDS],
    "head": ["cross-entropy, all logits", "torch's linear_cross_entropy", HARD, RECORDS, TEMPERED],
    "loader": ["the student's step on records", "cache to batches"],
}
NUMBER = r"[\d.,]*\d"
NOTES = {
    "capture": f"its records hold the next token, {NUMBER} head and {NUMBER} tail entries a token; tempered ones "
    r"\d+ nodes",
    "loader": f"{NUMBER} entries and {NUMBER} bytes a token, {NUMBER} in a batch; in a second one core reads {NUMBER} "
    f"tokens, {NUMBER} entries, and the first look at a shard of {NUMBER} tokens costs -?{NUMBER} ms more",
}
if not hasattr(torch.nn.functional, "linear_cross_entropy"):
    VARIANTS["head"].remove("torch's linear_cross_entropy")


def numbers(cells: list[str]) -> list[float]:
    return [float(number) for cell in cells for number in re.findall(r"[\w.]+", cell.replace(",", ""))]


@pytest.fixture(scope="module")
def output(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    out = tmp_path_factory.mktemp("bench") / "table.md"
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-W", "error::UserWarning", "bench/speed.py", "--quick", "--out", str(out)]
    found = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=240)
    assert found.returncode == 0, found.stderr
    return found.stdout, out


def test_every_row_is_there_with_finite_numbers(output: tuple[str, Path]) -> None:
    rows = [line.strip("| ").split(" | ") for line in output[0].splitlines() if line.startswith("| ")][1:]
    assert [row[:2] for row in rows] == [[task, each] for task, variants in VARIANTS.items() for each in variants]
    for row in rows:
        speed, milliseconds, _, *ratio = numbers(row[2:6])
        assert len(ratio) == 3 and all(math.isfinite(number) for number in numbers(row[2:6])), row
        assert speed > 0 and milliseconds > 0 and ratio[1] <= ratio[0] <= ratio[2], row


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="only Linux tells a process's peak")
def test_memory_is_measured(output: tuple[str, Path]) -> None:
    cells = [line.strip("| ").split(" | ")[-1] for line in output[0].splitlines() if line.startswith("| ")][1:]
    assert all(cell.replace(",", "").isdigit() for cell in cells), cells


def test_the_machine_is_named_and_the_file_holds_the_same_text(output: tuple[str, Path]) -> None:
    text, out = output
    assert text.startswith("Machine: ") and f"torch {torch.__version__}" in text
    assert out.read_text(encoding="utf-8") == text


def test_what_is_no_ratio_stands_below(output: tuple[str, Path]) -> None:
    notes = [line for line in output[0].splitlines() if line.startswith("- ")]
    for note, (task, expected) in zip(notes, NOTES.items(), strict=True):
        assert re.fullmatch(rf"- {task}: {expected}\.", note), note


def test_an_unknown_size_is_refused() -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "bench/speed.py", "--student", "large"]
    found = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120)
    assert found.returncode == 2 and "--student" in found.stderr
