"""Runs a script whose memory is limited or measured, in a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest

from bench.support.paths import ROOT
from bench.support.waiting import PATIENCE_SECONDS


def run_memory_script(script: str, *arguments: str, **environment: str) -> dict[str, Any]:
    """The JSON that ``script`` prints; ``environment`` adds variables to those of this process."""
    if sys.platform != "linux":
        pytest.skip("only Linux keeps RLIMIT_AS and tells the peak of a process")
    # glibc raises its threshold for mmap with every large block that is freed, and then keeps such
    # blocks in a heap with holes: how much fits below a limit would be a matter of luck.
    variables = environment | {
        "OMP_NUM_THREADS": "1",
        "MALLOC_ARENA_MAX": "1",
        "MALLOC_MMAP_THRESHOLD_": "65536",
        "PYTHONPATH": str(ROOT),
    }
    done = subprocess.run(
        [sys.executable, "-c", script, *arguments],
        cwd=ROOT,
        env=os.environ | variables,
        capture_output=True,
        text=True,
        timeout=PATIENCE_SECONDS,
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found
