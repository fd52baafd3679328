"""The kernels as they are compiled for each kind of GPU: nothing spilled, rows in wide loads."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from bench.support.paths import ROOT
from bench.support.waiting import PATIENCE_SECONDS

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None and not os.environ.get("CI"), reason="needs triton"
)
#: Most registers of a thread: 64 leave room for half of a multiprocessor's warps, 128 for a
#: quarter; with 255 one program of 8 warps is resident, and above it registers spill.
REGISTERS = {
    ("reduce_rows", "loss"): 64,
    ("reduce_rows", "loss, full"): 224,
    ("write_gradient", "loss"): 32,
    ("write_gradient", "loss, full"): 48,
}
#: Logits of a thread: a block over 256 threads.
LOGITS = {"reduce_rows": 16, "write_gradient": 8}
BYTES = {"bfloat16": 2, "float32": 4}
#: The vocabulary whose rows are padded. The bias of a head has no padding: it is read number by
#: number there, one for each logit.
PADDED = "151,669"


def compile_rows(folder: Path, *flags: str) -> list[list[str]]:
    """The rows of the table that the command prints."""
    command = [sys.executable, "bench/gpu/kernel_builds.py", *flags]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "TRITON_CACHE_DIR": str(folder)}
    done = subprocess.run(
        command,
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=PATIENCE_SECONDS,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("Compiled by triton ")
    lines = [line for line in done.stdout.splitlines() if line.startswith("| ")]
    return [line.strip("| ").split(" | ") for line in lines[1:]]


def read_accesses(cell: str) -> dict[int, int]:
    """How many accesses there are of each width in bytes."""
    return {int(width): int(count) for count, width in re.findall(r"(\d+) x (\d+)", cell)}


def require_sound(row: list[str]) -> None:
    kernel, rows, dtype, vocabulary, loads, stores, spilled, *registers = row
    assert spilled == "0", row
    assert max(int(cell.split()[0]) for cell in registers) <= REGISTERS[kernel, rows], row
    wide = LOGITS[kernel] * BYTES[dtype] // 16
    found = read_accesses(loads)
    assert found.pop(16) >= wide, row
    # Beside the logits a thread reads a few numbers of its row.
    bias = LOGITS[kernel] if (vocabulary, rows) == (PADDED, "loss, full") else 0
    assert sum(found.values()) <= 4 + bias and set(found) <= {4}, row
    if kernel == "write_gradient":
        assert read_accesses(stores) == {16: wide}, row


@pytest.mark.long
def test_nothing_spills_and_loads_are_wide_on_the_oldest_and_the_newest_gpu(tmp_path: Path) -> None:
    flags = ["--capability", "75", "100", "--vocabulary", "128256", "--dtype", "bfloat16"]
    rows = compile_rows(tmp_path, *flags)
    assert {(row[0], row[1]) for row in rows} == REGISTERS.keys()
    for row in rows:
        require_sound(row)


@pytest.mark.slow
def test_nothing_spills_and_loads_are_wide_on_every_gpu(tmp_path: Path) -> None:
    rows = compile_rows(tmp_path)
    assert {(row[0], row[1]) for row in rows} == REGISTERS.keys()
    assert {row[2] for row in rows} == BYTES.keys()
    page = (ROOT / "docs/benchmarks/gpu.md").read_text(encoding="utf-8")
    for row in rows:
        require_sound(row)
        assert "-" not in row[7:], "compiled for every kind of GPU"
        # The page leaves out the rows of float32.
        assert row[2] == "float32" or f"| {' | '.join(row)} |\n" in page
