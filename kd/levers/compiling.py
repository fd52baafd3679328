"""torch.compile for the student's body, and what became of it."""

from __future__ import annotations

import importlib.util
import os
import shutil
from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from kd.config.train import Compile
from kd.errors import TrainingError


@dataclass(frozen=True)
class CompileReport:
    """``graphs`` were compiled; ``breaks`` says why each of them had to end before the model did."""

    graphs: int
    breaks: tuple[str, ...]

    def __str__(self) -> str:
        graphs = f"torch.compile made {self.graphs} graph{'s' * (self.graphs != 1)}"
        return f"{graphs}, broken by: {'; '.join(self.breaks)}" if self.breaks else f"{graphs} without a break"


@dataclass(frozen=True)
class Compilation:
    """A student that compiles itself when it is first called; the counts are torch's, of the whole process."""

    graphs: int
    breaks: dict[str, int]

    def report(self) -> CompileReport:
        """What was compiled since: right after the first step, for whatever torch meets later it compiles again."""
        graphs, breaks = _counts()
        new = (_short(reason) for reason, count in breaks.items() if count > self.breaks.get(reason, 0))
        return CompileReport(graphs - self.graphs, tuple(sorted(new)))


def compile_student(student: PreTrainedModel, mode: Compile) -> Compilation | None:
    """Have ``student``'s body compiled in ``mode`` at its next call, in place: weights and names stay; None for none.

    Raises ``TrainingError`` where there is no compiler.
    """
    if mode == "none":
        return None
    _require_compiler(student.device)
    body: nn.Module = student.base_model
    body.compile(mode=mode)
    return Compilation(*_counts())


def _require_compiler(device: torch.device) -> None:
    """torch would find out in the middle of the first step."""
    names = ("g++", "clang++") if device.type == "cpu" else ("gcc", "clang", "cc")
    given = os.environ.get("CXX" if device.type == "cpu" else "CC")
    missing = [] if any(map(shutil.which, (given,) if given else names)) else [f"a compiler ({' or '.join(names)})"]
    if device.type == "cuda" and importlib.util.find_spec("triton") is None:
        missing.append("the package triton")
    if missing:
        raise TrainingError(
            f"train.compile needs {' and '.join(missing)}, which cannot be found.",
            "Install it, or set train.compile to none.",
        )


def _counts() -> tuple[int, dict[str, int]]:
    """Graphs and graph breaks, each by its reason, of this process so far."""
    from torch._dynamo.utils import counters  # torch._dynamo takes a second to import

    found: dict[str, Any] = counters
    breaks = Counter(found["graph_break"]) + Counter(found["unimplemented"])  # releases differ in where they count
    return found["stats"]["unique_graphs"], dict(breaks)


def _short(reason: str) -> str:
    """What and why, of the many lines that torch has to say."""
    lines = [line.strip() for line in reason.strip().splitlines()]
    why = next((line.removeprefix("Explanation: ") for line in lines if line.startswith("Explanation: ")), "")
    return f"{lines[0]} ({why})" if why else lines[0]
