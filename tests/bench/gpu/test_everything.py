"""The commands for a machine with a GPU work in a bare checkout, one part beside the others."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from bench.gpu import chunk_sizes
from bench.gpu.everything import PARTS, find_test_files, list_commands, run_part
from bench.gpu.reference_run import widen_vocabulary
from bench.support.paths import AUSTEN, ROOT
from bench.support.waiting import PATIENCE_SECONDS
from kd.capture.recording import LOGIT_ELEMENTS
from kd.models.tokenizers import load_tokenizer
from tests.support.stages import TINY

#: Packages of the project that a machine for benches need not have.
LACKING = (
    "accelerate", "celery", "datasets", "fastapi", "kombu", "optuna", "peft", "prometheus_client",
    "pytorch_optimizer", "redis", "rich", "schedulefree", "structlog", "typer", "uvicorn",
    "pydantic_settings",
)  # fmt: skip
BENCHES = (
    "bench.speed", "bench.roofline", "bench.gpu.reference_run", "bench.gpu.chunk_sizes",
    "bench.gpu.table",
)  # fmt: skip
WITHOUT = f"""
import importlib, sys

sys.modules.update(dict.fromkeys({LACKING!r}))
for name in sys.argv[1:]:
    importlib.import_module(name)
"""


@pytest.mark.long
def test_the_benches_need_no_package_but_those_that_the_page_names() -> None:
    page = (ROOT / "docs/benchmarks/gpu.md").read_text(encoding="utf-8")
    assert "torch 2.11 or later, transformers, numpy, zarr, pydantic and pyyaml" in page
    found = subprocess.run(
        [sys.executable, "-c", WITHOUT, *BENCHES],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=PATIENCE_SECONDS,
    )
    assert found.returncode == 0, found.stderr


def test_every_part_has_a_command_and_each_file_with_gpu_tests_is_run(tmp_path: Path) -> None:
    commands = list_commands(tmp_path)
    assert tuple(commands) == PARTS
    for command in commands.values():
        assert command[0] == "-m" or (ROOT / command[0]).is_file()
    assert "tests/system/test_gpu.py" in commands["tests"]
    assert "tests/kd/models/products/test_float8.py" in find_test_files()


@pytest.mark.parametrize(
    ("code", "seconds", "state"),
    [
        ("print('a line')", PATIENCE_SECONDS, "done"),
        ("print('a line'); raise SystemExit(3)", PATIENCE_SECONDS, "failed 3"),
        ("print('a line', flush=True); import time; time.sleep(600)", 8.0, "no time"),
    ],
)
def test_a_part_tells_how_it_ended_and_leaves_what_it_printed(
    code: str, seconds: float, state: str, tmp_path: Path
) -> None:
    outcome = run_part("speed", ["-c", code], tmp_path, seconds)
    assert outcome.state == state
    assert (tmp_path / "speed.log").read_text() == "a line\n"


def test_a_wider_vocabulary_changes_no_token(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(AUSTEN / "teacher")
    tokenizer.save_pretrained(tmp_path)
    widen_vocabulary(tmp_path / "tokenizer.json", 5000)
    wider = load_tokenizer(tmp_path)
    text = "It was a truth; the number 7, and unused 4000."
    assert len(wider) == 5000
    assert wider(text)["input_ids"] == tokenizer(text)["input_ids"]
    known = json.loads((tmp_path / "tokenizer.json").read_text(encoding="utf-8"))["model"]["vocab"]
    assert len(set(known.values())) == len(known)


@pytest.mark.long
def test_a_reference_run_prints_both_phases_beside_their_forecast(
    print_page: Callable[..., str],
) -> None:
    page = print_page("bench/gpu/reference_run.py", "--small", "--steps", "3")
    rows = {
        line.split("|")[1].strip(): line.split("|")[2:-1]
        for line in page.splitlines()
        if "|" in line
    }
    for phase in ("capture", "training"):
        tokens, told, measured, rate, told_memory, memory, of_peak = map(str.strip, rows[phase])
        assert int(tokens.replace(",", "")) > 1000
        assert min(map(float, (told, measured, told_memory, memory))) > 0
        assert float(rate.replace(",", "")) > 0
        assert of_peak == "-", "the peak of this CPU is not known"
    assert "Failed: none." in page
    assert "V = 8,192" in page


def test_a_smaller_chunk_is_read_in_more_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """The table's rows differ in nothing but the logits that are in memory at a time."""
    monkeypatch.setitem(LOGIT_ELEMENTS, "cpu", 8 * 512)
    rows = chunk_sizes.measure(TINY, 1)
    assert [row[:2] for row in rows] == [
        [f"{512 * count:,}", f"{count}"] for count in (8, 16, 32, 64)
    ]
    assert LOGIT_ELEMENTS["cpu"] == 8 * 512
