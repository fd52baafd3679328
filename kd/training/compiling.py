"""torch.compile for the student's body, and the report of its graphs."""

from __future__ import annotations

import importlib.util
import os
import shutil
from collections import Counter
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from kd.checks.verdict import Verdict
from kd.config.train import Compile
from kd.errors import TrainingError
from kd.models.layers import find_body, find_decoder_layers


@dataclass(frozen=True)
class Compilation:
    """The state before a compilation, which happens when the student is first called.

    ``graphs`` and ``breaks`` are torch's counts for the whole process until then.
    """

    graphs: int
    breaks: dict[str, int]

    def report(self) -> Verdict:
        """The verdict on the graphs compiled since then: their number, and why they break.

        A graph that breaks is no error, but it loses speed. Call it right after the first step:
        graphs of later steps are compiled again for other shapes.
        """
        counted, reasons = _read_counts()
        graphs = counted - self.graphs
        new = [reason for reason, count in reasons.items() if count > self.breaks.get(reason, 0)]
        breaks = sorted(map(_shorten_reason, new))
        broken = f", broken by: {'; '.join(breaks)}" if breaks else " without a break"
        message = f"torch.compile made {graphs} graph{'s' * (graphs != 1)}{broken}."
        remedy = "See TORCH_LOGS=graph_breaks for the places." if breaks else ""
        return Verdict("compile", not breaks, message, remedy, {"graphs": graphs, "breaks": breaks})


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
