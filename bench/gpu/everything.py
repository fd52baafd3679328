"""Run all that only a GPU can tell, one part after the other, within a limit of time.

    python bench/gpu/everything.py --out FOLDER [--minutes 9] [--parts tests rates ...]

    tests       pytest -m gpu, in four processes where pytest-xdist is installed
    rates       bench/roofline.py --measure: each stage beside its expected rate
    speed       bench/speed.py: capture, step, LM head and loader, beside plain torch
    reference   bench/gpu/reference_run.py: one job with a teacher of 1B parameters
    chunks      bench/gpu/chunk_sizes.py: a capture with more logits in memory at a time

It needs a checkout, not an installation, and no network. A part that fails, or that has no time
left, does not end the others. Each writes all that it prints to FOLDER/PART.log, and a bench its
page to FOLDER/PART.md. The exit status is 1 where a part failed.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.support.paths import ROOT

PARTS = ("tests", "rates", "speed", "reference", "chunks")
MARK = "pytest.mark.gpu"
#: Processes of the tests. Each takes about a gigabyte of the GPU's memory.
TEST_PROCESSES = 4


@dataclass(frozen=True)
class Outcome:
    """How a part ended, and after how many seconds."""

    part: str
    state: str
    seconds: float

    def __str__(self) -> str:
        return f"{self.part:<10} {self.state:<10} {self.seconds:6.0f} s"


def list_commands(out: Path) -> dict[str, list[str]]:
    """List the command of each part; each but the tests writes a page into ``out``."""
    benches = {
        "rates": ["bench/roofline.py", "--measure"],
        "speed": ["bench/speed.py"],
        "reference": ["bench/gpu/reference_run.py"],
        "chunks": ["bench/gpu/chunk_sizes.py"],
    }
    commands = {"tests": ["-m", "pytest", "-q", "-m", "gpu", *find_test_files()]}
    if importlib.util.find_spec("xdist") is not None:
        commands["tests"] += ["-n", str(TEST_PROCESSES)]
    for part, command in benches.items():
        commands[part] = [*command, "--out", str(out / f"{part}.md")]
    return commands


def find_test_files() -> list[str]:
    """Find the test files that need a GPU.

    Other files may need packages of the service, which a machine for benches lacks.
    """
    files = sorted((ROOT / "tests").rglob("test_*.py"))
    found = [file for file in files if MARK in file.read_text(encoding="utf-8")]
    return [str(file.relative_to(ROOT)) for file in found]


def run_part(part: str, command: Sequence[str], out: Path, seconds: float) -> Outcome:
    """Run a part for at most ``seconds``; its output goes to a file, line by line."""
    began = time.monotonic()
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])),
        "PYTHONUNBUFFERED": "1",
        "HF_HUB_OFFLINE": "1",
    }
    with (out / f"{part}.log").open("w", encoding="utf-8") as log:
        try:
            code = subprocess.run(
                [sys.executable, *command],
                check=False,
                cwd=ROOT,
                env=environment,
                stdout=log,
                stderr=subprocess.STDOUT,
                timeout=max(1.0, seconds),
            ).returncode
            state = "done" if code == 0 else f"failed {code}"
        except subprocess.TimeoutExpired:
            state = "no time"
    return Outcome(part, state, time.monotonic() - began)


def main() -> int:
    """Run the parts; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="folder of the pages and logs")
    parser.add_argument(
        "--minutes", type=float, default=9.0, help="the limit of all parts together"
    )
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    arguments = parser.parse_args()
    out = arguments.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    end = time.monotonic() + 60 * arguments.minutes
    commands = list_commands(out)
    outcomes = []
    for part in arguments.parts:
        outcomes.append(run_part(part, commands[part], out, end - time.monotonic()))
        print(outcomes[-1], flush=True)
    return int(any(outcome.state != "done" for outcome in outcomes))


if __name__ == "__main__":
    sys.exit(main())
