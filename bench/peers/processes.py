"""Run a program as a process of its own, and measure its seconds and its memory."""

from __future__ import annotations

import contextlib
import os
import statistics
import subprocess
import time
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import psutil

#: Seconds between two looks at the memory.
LOOK_SECONDS = 0.25
#: Characters of a program's last words in an error.
LAST_WORDS = 2000


@dataclass(frozen=True)
class Usage:
    """What a program took: seconds of the clock and of the cores, and bytes of memory at its peak.

    The seconds of the cores are those of all its threads and children.
    """

    seconds: float
    core_seconds: float
    peak: int


def run_measured(command: list[str], folder: Path, env: Mapping[str, str], log: Path) -> Usage:
    """Run ``command`` in ``folder``; its output goes to ``log``.

    The peak is that of the resident memory of the process with its children. Raises
    ``RuntimeError`` with the end of the log if the command fails.
    """
    with log.open("w", encoding="utf-8") as file:
        began = time.perf_counter()
        process = subprocess.Popen(command, cwd=folder, env=env, stdout=file, stderr=file)
        peak = 0
        while True:
            pid, status, used = os.wait4(process.pid, os.WNOHANG)
            if pid:
                break
            peak = max(peak, measure_tree(process.pid))
            time.sleep(LOOK_SECONDS)
        seconds = time.perf_counter() - began
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        words = log.read_text(encoding="utf-8")[-LAST_WORDS:]
        raise RuntimeError(f"{' '.join(command)} ended with {process.returncode}:\n{words}")
    # used.ru_maxrss is no peak of the program: it begins with the memory of this process.
    return Usage(seconds, used.ru_utime + used.ru_stime, peak)


def measure_tree(pid: int) -> int:
    """Measure the memory of a process and all its children, in bytes; 0 if it has ended.

    It is the peak so far of a process that is alone. Of several it is what they have now, and
    pages that several of them share count once.
    """
    try:
        root = psutil.Process(pid)
        if children := root.children(recursive=True):
            return sum(each.memory_full_info().pss for each in [root, *children])
    except psutil.Error:
        return 0
    return read_peak(pid)


def read_peak(pid: int) -> int:
    """Read the peak of a process's resident memory so far, in bytes; 0 if it has ended."""
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text(encoding="utf-8").splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    return 0


def read_step_seconds(times: Path) -> float:
    """Return the median seconds of a core between the ends of two steps, from clock.py's file."""
    ends = [float(line.split()[1]) for line in times.read_text(encoding="utf-8").splitlines()]
    return statistics.median(after - before for before, after in pairwise(ends))
