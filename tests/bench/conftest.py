"""A bench run as a command."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from bench.support.paths import ROOT


@pytest.fixture
def print_page(tmp_path: Path) -> Callable[..., str]:
    """Runs a bench with flags, on one thread, and returns the page that it prints and writes."""
    from bench.support.waiting import PATIENCE_SECONDS

    def run(*command: str) -> str:
        out = tmp_path / "page.md"
        found = subprocess.run(
            [sys.executable, *command, "--out", str(out)],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            timeout=PATIENCE_SECONDS,
        )
        assert found.returncode == 0, found.stderr
        text = out.read_text(encoding="utf-8")
        assert found.stdout == text
        assert text.startswith("Machine: ")
        return text

    return run
