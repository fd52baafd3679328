"""Time and memory of variants of one task, compared in one run, and the table that shows them.

Other work on the machine comes and goes, so a time alone says little. Here the variants take turns,
round after round. The ratio of two variants is taken within each round, and the median of the
rounds counts.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import multiprocessing
import statistics
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

MIB = 2**20


@dataclass(frozen=True)
class Timing:
    """Seconds of a run (median), and its speed relative to the first variant's.

    The speed is a median, with the least and the most of the rounds.
    """

    seconds: float
    speed: float
    slowest: float
    fastest: float


def interleave(variants: dict[str, Callable[[], Any]], rounds: int) -> dict[str, Timing]:
    """Time every variant once a round, in a rotating order, after one run of each to warm up."""
    names = list(variants)
    for run in variants.values():
        run()
    rows = []
    for turn in range(rounds):
        order = names[turn % len(names) :] + names[: turn % len(names)]
        taken = {name: time_run(variants[name]) for name in order}
        rows.append(taken)
    timings = {}
    for name in names:
        ratios = [row[names[0]] / row[name] for row in rows]
        middle = statistics.median(row[name] for row in rows)
        timings[name] = Timing(middle, statistics.median(ratios), min(ratios), max(ratios))
    return timings


def time_run(run: Callable[[], Any]) -> float:
    """Measure the wall time of ``run`` in seconds, from an idle device to an idle device."""
    synchronize()
    began = time.perf_counter()
    run()
    synchronize()
    return time.perf_counter() - began


def use_one_heap() -> None:
    """Let all threads allocate from the main thread's heap, as a real training does.

    With heaps of their own (glibc), threads return the memory of a step to the system, and the next
    step asks for it again: some thousand page faults in one step and none in another. Call it
    before there are threads.
    """
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).mallopt(-8, 1)  # M_ARENA_MAX


def synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


# ---------------------------------------------------------------------- memory


def measure_extra_memory(run: Callable[[], Any]) -> float | None:
    """Measure the MiB that a run needs at its peak beyond the memory before it; None if unknown.

    A first run, which is not measured, allocates what stays: the optimiser's state and the
    libraries' workspaces. On a CPU the result is right only in a process that measures nothing
    else.
    """
    run()
    synchronize()
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        run()
        synchronize()
        return (torch.cuda.max_memory_allocated() - before) / MIB
    return _measure_extra_resident(run)


def _measure_extra_resident(run: Callable[[], Any]) -> float | None:
    with contextlib.suppress(OSError, AttributeError):
        # Return freed memory to the system, so that the run cannot use it again unseen.
        ctypes.CDLL(None).malloc_trim(0)
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    before = _read_resident("VmRSS")
    run()
    peak = _read_resident("VmHWM")
    return None if before is None or peak is None else (peak - before) / MIB


def _read_resident(field: str) -> int | None:
    """Read ``field`` of Linux's account of this process, in bytes; None on other systems."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith(field + ":"):
                return int(line.split()[1]) * 1024
    return None


@contextlib.contextmanager
def fresh_processes(preload: list[str]) -> Iterator[ProcessPoolExecutor]:
    """Yield a pool that runs each call in a new process, with ``preload`` imported."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["__main__", *preload])
    with ProcessPoolExecutor(1, mp_context=context, max_tasks_per_child=1) as pool:
        yield pool


# ---------------------------------------------------------------------- the floor


@dataclass(frozen=True)
class Machine:
    """The rates of this machine: products in FLOP/s, copies in bytes/s (read and written)."""

    products: float
    copies: float

    def floor(self, flops: float, moved: float) -> float:
        """Return the least seconds that ``flops`` and ``moved`` bytes can take."""
        return flops / self.products + moved / self.copies


def measure_machine(dtype: torch.dtype, size: int) -> Machine:
    """Measure the best of 20 square products of ``size`` and of 20 copies of 16 size² bytes."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    square = torch.randn(size, size, device=device, dtype=dtype)
    flat = torch.empty(4 * size * size, device=device)
    product = torch.empty_like(square)
    copy = torch.ones_like(flat)
    product_s, copy_s = (
        min(time_run(run) for _ in range(20))
        for run in (lambda: torch.mm(square, square, out=product), lambda: copy.copy_(flat))
    )
    return Machine(2 * size**3 / product_s, 2 * flat.nbytes / copy_s)


# ---------------------------------------------------------------------- the table


@dataclass(frozen=True)
class TimingRow:
    """A variant of a task, in runs of ``tokens`` tokens; ``memory`` in MiB, ``floor`` in s."""

    task: str
    variant: str
    tokens: int
    timing: Timing
    memory: float | None
    floor: float


def render_timings(rows: list[TimingRow]) -> str:
    """Return the rows as a markdown table."""
    lines = [
        "| task | variant | tokens/s | ms | floor, ms | speed (least-most) | extra memory, MiB |",
        "|---|---|--:|--:|--:|--:|--:|",
    ]
    for row in rows:
        timing = row.timing
        memory = "-" if row.memory is None else f"{row.memory:,.0f}"
        ratio = f"{timing.speed:,.2f} ({timing.slowest:,.2f}-{timing.fastest:,.2f})"
        cells = [
            row.task,
            row.variant,
            f"{row.tokens / timing.seconds:,.0f}",
            f"{timing.seconds * 1e3:,.1f}",
        ]
        lines.append(f"| {' | '.join([*cells, f'{row.floor * 1e3:,.1f}', ratio, memory])} |")
    return "\n".join(lines)
