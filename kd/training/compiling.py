"""torch.compile for the student's body, and the report of its graphs."""

from __future__ import annotations

import importlib.util
import os
import shutil
from collections import Counter
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from kd.config.train import Compile
from kd.errors import TrainingError
from kd.models.layers import find_body, find_decoder_layers


@dataclass(frozen=True)
class CompileReport:
    """The count of compiled ``graphs``, and the reasons of the ``breaks`` between them."""

    graphs: int
    breaks: tuple[str, ...]

    def __str__(self) -> str:
        graphs = f"torch.compile made {self.graphs} graph{'s' * (self.graphs != 1)}"
        if not self.breaks:
            return f"{graphs} without a break"
        return f"{graphs}, broken by: {'; '.join(self.breaks)}"


@dataclass(frozen=True)
class Compilation:
    """The state before a compilation, which happens when the student is first called.

    ``graphs`` and ``breaks`` are torch's counts for the whole process until then.
    """

    graphs: int
    breaks: dict[str, int]

    def report(self) -> CompileReport:
        """The graphs compiled since then.

        Call it right after the first step: graphs of later steps are compiled again for other
        shapes.
        """
        graphs, breaks = _read_counts()
        new = [reason for reason, count in breaks.items() if count > self.breaks.get(reason, 0)]
        return CompileReport(graphs - self.graphs, tuple(sorted(map(_shorten_reason, new))))


def compile_student(
    student: PreTrainedModel, mode: Compile, device: torch.device, sharded: bool = False
) -> Compilation | None:
    """Let torch compile ``student``'s body in ``mode`` at its next call; None for mode ``none``.

    It runs on ``device``. Where it is ``sharded``, the layers are compiled one by one: each is
    gathered before it is called. Weights and parameter names stay. Raises ``TrainingError`` where
    there is no compiler.
    """
    if mode == "none":
        return None
    _require_compiler(device)
    if not sharded:
        find_body(student).compile(mode=mode)
    else:
        for layer in find_decoder_layers(student):
            # The forward pass alone: FSDP gathers and frees in hooks around it.
            layer.forward = torch.compile(layer.forward, mode=mode)  # type: ignore[method-assign]
    return Compilation(*_read_counts())


def _require_compiler(device: torch.device) -> None:
    """Raise ``TrainingError`` where torch could not compile.

    torch itself would fail only in the middle of the first step.
    """
    names = ("g++", "clang++") if device.type == "cpu" else ("gcc", "clang", "cc")
    given = os.environ.get("CXX" if device.type == "cpu" else "CC")
    missing = []
    if not any(map(shutil.which, (given,) if given else names)):
        missing.append(f"a compiler ({' or '.join(names)})")
    if device.type == "cuda" and importlib.util.find_spec("triton") is None:
        missing.append("the package triton")
    if missing:
        detail = f"train.compile needs {' and '.join(missing)}, which cannot be found."
        raise TrainingError(detail, "Install it, or set train.compile to none.")


def _read_counts() -> tuple[int, dict[str, int]]:
    """The graphs of this process so far, and its graph breaks by their reason."""
    # Imported here, because torch._dynamo takes a second to import.
    from torch._dynamo.utils import counters

    # Some releases of torch count graph breaks under one of these names, others under the other.
    breaks = Counter(counters["graph_break"]) + Counter(counters["unimplemented"])
    return counters["stats"]["unique_graphs"], dict(breaks)


def _shorten_reason(reason: str) -> str:
    """The first line and the explanation of torch's long text."""
    first, *lines = [line.strip() for line in reason.strip().splitlines()]
    mark = "Explanation: "
    why = next((line.removeprefix(mark) for line in lines if line.startswith(mark)), "")
    return f"{first} ({why})" if why else first
