"""A virtual environment for each program, which pip fills from its package index."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

from bench.support.paths import ROOT

CONSTRAINTS = ROOT / "constraints.txt"
#: Packages whose versions the page names.
SHOWN = ("torch", "transformers", "trl", "axolotl", "accelerate", "datasets", "potstill")
VERSIONS = (
    "import json; from importlib.metadata import distributions; "
    "print(json.dumps({each.name.lower(): each.version for each in distributions()}))"
)
#: What an environment that is complete holds.
COMPLETE = "complete.json"
#: How the variables begin that would change what a program does.
FOREIGN = ("KD_", "PYTHON", "HF_", "TRANSFORMERS_", "ACCELERATE_", "WANDB_")
THREADS = (
    "OMP_NUM_THREADS",
    "MKL_NUM_THREADS",
    "RAYON_NUM_THREADS",
    "TORCHINDUCTOR_COMPILE_THREADS",
)
#: No program reports to its authors that it runs.
NO_TRACKING = {"DO_NOT_TRACK": "1", "AXOLOTL_DO_NOT_TRACK": "1", "WANDB_MODE": "disabled"}


class Unavailable(Exception):
    """A program cannot be had here; the text says why."""


@dataclass(frozen=True)
class Environment:
    """What pip installs after torch, and the module whose import shows that it worked.

    ``pinned``: whether the versions of constraints.txt hold. Torch is of that file in any case.
    """

    name: str
    packages: tuple[str, ...]
    module: str
    pinned: bool = True

    def build(self, venvs: Path) -> Path:
        """Return the Python of the environment below ``venvs``; make it where it is not complete.

        Raises ``Unavailable`` if pip or the import fails.
        """
        folder = venvs / self.name
        python = folder / "bin" / "python"
        complete = folder / COMPLETE
        wanted = json.dumps(asdict(self))
        if complete.is_file() and complete.read_text(encoding="utf-8") == wanted:
            return python
        print(f"installing {' '.join(self.packages)}", file=sys.stderr, flush=True)
        run_quietly([sys.executable, "-m", "venv", "--clear", str(folder)])
        install = [str(python), "-m", "pip", "install", "--quiet"]
        torch = find_torch()
        # First and alone, so that no other package decides which build of it is taken.
        run_quietly([*install, torch])
        constraints = ["-c", str(CONSTRAINTS)] if self.pinned else []
        run_quietly([*install, *constraints, torch, *self.packages])
        run_quietly([str(python), "-c", f"import {self.module}"])
        complete.write_text(wanted, encoding="utf-8")
        return python


def find_torch() -> str:
    """Return the line of constraints.txt that pins torch."""
    lines = CONSTRAINTS.read_text(encoding="utf-8").splitlines()
    return next(line for line in lines if line.startswith("torch=="))


def run_quietly(command: list[str]) -> str:
    """Run a command and return what it prints; raise ``Unavailable`` with its last error."""
    done = subprocess.run(command, capture_output=True, text=True, env=clean(), check=False)
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if line.strip()]
        errors = [line for line in lines if "rror" in line] or lines or ["no message"]
        raise Unavailable(f"`{' '.join(command[1:4])} ...` failed: {errors[-1].strip()}")
    return done.stdout


def clean(**more: str) -> dict[str, str]:
    """Return the variables of this process, without ``FOREIGN`` ones and on one thread."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(FOREIGN)}
    threads = dict.fromkeys(THREADS, "1")
    fixed = {"TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1", **NO_TRACKING}
    return {**kept, **threads, **fixed, **more}


def list_versions(python: Path) -> str:
    """List the versions of the packages that matter, as they are installed for ``python``."""
    found = json.loads(run_quietly([str(python), "-c", VERSIONS]))
    return ", ".join(f"{name} {found[name]}" for name in SHOWN if name in found)


def describe_checkout(folder: Path) -> str:
    """Return the commit of a checkout, or say that it has none."""
    command = ["git", "-C", str(folder), "rev-parse", "HEAD"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return f"commit {done.stdout.strip()}" if done.returncode == 0 else "of no known commit"
