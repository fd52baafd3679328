"""Measure a capture with several sizes of a chunk of logits, beside each other in every round.

    python bench/gpu/chunk_sizes.py [--small] [--rounds N] [--out FILE]

A chunk of many positions launches fewer operations and waits for the device less often; one of few
needs less memory. The size decides the last bits of a GPU's logits, so it is a constant
(``kd.capture.recording.LOGIT_ELEMENTS``) and does not follow the memory that is free. This table
says which constant is worth its memory.

    chunk      logits of a chunk: the constant, and others
    positions  how many positions have their logits in memory at once
    memory     the peak of a reading above the weights (only on a GPU)
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from unittest.mock import patch

import torch

from bench.gpu.stage_runs import run_capture
from bench.gpu.stage_work import REAL, SMALL, Sizes, list_stages
from bench.speed import name_machine
from bench.support.timing import MIB, interleave
from kd.capture.recording import LOGIT_ELEMENTS
from kd.memory.step_memory import read_peak_memory, reset_peak_memory
from kd.models.loading import hide_progress_bars
from kd.models.precision import pick_device

#: The sizes that are tried, as multiples of the constant.
MULTIPLES = (1, 2, 4, 8)


def measure(sizes: Sizes, rounds: int) -> list[list[str]]:
    """The rows of the table: the first stage of capture, with each size of a chunk."""
    device = pick_device()
    stage = next(each for each in list_stages(sizes) if each.kind == "capture")
    constant = LOGIT_ELEMENTS[device.type]
    with ExitStack() as stack:
        run = stack.enter_context(run_capture(stage, "-", sizes))
        before = torch.cuda.memory_allocated(device) if device.type == "cuda" else 0
        runs = {}
        peaks = {}
        for chunk in (multiple * constant for multiple in MULTIPLES):
            runs[str(chunk)] = with_chunk(run, device.type, chunk)
            peaks[str(chunk)] = measure_peak(runs[str(chunk)], device, before)
        timings = interleave(runs, rounds)
    rows = []
    for name, timing in timings.items():
        peak = peaks[name]
        rows.append([
            f"{int(name):,}", f"{max(int(name) // sizes.vocabulary, 1):,}",
            f"{stage.tokens / timing.seconds:,.0f}",
            f"{timing.speed:.3f} ({timing.slowest:.3f}-{timing.fastest:.3f})",
            "-" if peak is None else f"{peak / MIB:,.0f}",
        ])  # fmt: skip
    return rows


def with_chunk(run: Callable[[], object], device: str, chunk: int) -> Callable[[], object]:
    """``run`` with ``chunk`` logits in memory at a time."""

    def changed() -> object:
        with patch.dict(LOGIT_ELEMENTS, {device: chunk}):
            return run()

    return changed


def measure_peak(run: Callable[[], object], device: torch.device, before: int) -> int | None:
    """The most bytes that ``run`` holds of a GPU above ``before``; None on a CPU."""
    if device.type != "cuda":
        return None
    reset_peak_memory(device)
    run()
    return read_peak_memory(device) - before


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--small", action="store_true", help="a small model, on a GPU too")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path, help="also write the table to this file")
    arguments = parser.parse_args()
    hide_progress_bars()
    device = pick_device()
    sizes = SMALL if arguments.small or device.type == "cpu" else REAL
    lines = [
        f"Machine: {name_machine()}, torch {torch.__version__}. {sizes}",
        "",
        "| chunk, logits | positions | tokens/s | speed (least-most) | memory, MiB |",
        "|--:|--:|--:|--:|--:|",
        *(f"| {' | '.join(row)} |" for row in measure(sizes, arguments.rounds)),
    ]
    text = "\n".join(lines) + "\n"
    sys.stdout.write(text)
    if arguments.out is not None:
        arguments.out.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
