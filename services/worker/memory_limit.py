"""The memory that a child and its descendants may have, and what happens if they need more.

    cgroup v2   a group below the worker's own: memory.max; the kernel kills the whole group
    cgroup v1   the same with memory.limit_in_bytes; the kernel kills one process of the group
    otherwise   the supervisor adds up the memory of the process group in each of its turns

Address space is not limited (``RLIMIT_AS``): CUDA reserves far more of it than it uses.
"""

from __future__ import annotations

import logging
import os
import re
import time
from contextlib import suppress
from pathlib import Path

from kd.config.placement import Resources
from kd.memory.host import COUNTERS, find_own_groups, read_memory_bytes, read_number
from services.worker.devices import WorkerDevice

#: The part of the machine's memory that is left to everything but the child, and its bounds.
MARGIN_SHARE = 20
LEAST_MARGIN_BYTES = 256 << 20
LARGEST_MARGIN_SHARE = 4
#: Name of a child's group, before the process id.
GROUP_PREFIX = "potstill-"
#: Tries to remove a group: its processes are dead, but the kernel may still count them.
REMOVE_ATTEMPTS = 50
REMOVE_SECONDS = 0.02
#: Memory of a process that cannot be read from a file again, in /proc/PID/status.
_RESIDENT = re.compile(r"^Rss(?:Anon|Shmem):\s+(\d+) kB$", re.MULTILINE)
#: The same without what it shares with other processes, in /proc/PID/smaps_rollup.
_PROPORTIONAL = re.compile(r"^Pss_(?:Anon|Shmem):\s+(\d+) kB$", re.MULTILINE)

log = logging.getLogger("potstill.worker")


def choose_limit_bytes(needs: Resources, device: WorkerDevice) -> int:
    """The bytes that the child of a job may have.

    ``resources.memory`` of a job without a GPU is its limit. Any other job may have the memory of
    this machine or container, less a margin for the worker and its neighbours.
    """
    machine = read_memory_bytes()
    margin = min(max(machine // MARGIN_SHARE, LEAST_MARGIN_BYTES), machine // LARGEST_MARGIN_SHARE)
    on_gpu = bool(device.gpus) and needs.gpus != 0
    if needs.memory is None or on_gpu:
        return machine - margin
    return min(needs.memory, machine - margin)


class MemoryLimit:
    """Limits the memory of a process group until it is closed."""

    def __init__(self, pid: int, limit_bytes: int) -> None:
        """``pid`` leads the process group; it must not have started other processes yet."""
        self.limit_bytes = limit_bytes
        self._pid = pid
        self._exceeded = False
        self._closed = False
        self._group = make_group(pid, limit_bytes)
        self._kills_before = _count_kills(self._group)

    def __enter__(self) -> MemoryLimit:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def is_exceeded(self) -> bool:
        """Whether the processes needed more than the limit. Once it is true it stays true."""
        if not self._exceeded and not self._closed:
            if self._group is not None:
                self._exceeded = _count_kills(self._group) > self._kills_before
            else:
                self._exceeded = measure_group_bytes(self._pid, self.limit_bytes) > self.limit_bytes
        return self._exceeded

    def close(self) -> None:
        """Remove the control group. Its processes must have ended."""
        if self._group is not None:
            self.is_exceeded()
            _remove_group(self._group)
            self._group = None
        self._closed = True


def make_group(pid: int, limit_bytes: int) -> Path | None:
    """Put the process into a new control group with this limit; None where that is not allowed."""
    for own in find_own_groups():
        for left in own.glob(f"{GROUP_PREFIX}*"):
            with suppress(OSError):  # it is in use; the others are of workers that were killed
                left.rmdir()
        group = own / f"{GROUP_PREFIX}{pid}"
        try:
            # Groups below may limit memory then; version 1 needs no such permission. The kernel
            # refuses it (EBUSY) for a group of version 2 that contains processes, unless it is the
            # root of the hierarchy.
            control = own / "cgroup.subtree_control"
            if control.exists() and "memory" not in control.read_text().split():
                control.write_text("+memory")
            group.mkdir()
        except OSError:
            continue
        try:
            _write_limits(group, limit_bytes)
            (group / "cgroup.procs").write_text(str(pid))
        except OSError:
            _remove_group(group)
            continue
        return group
    return None


def _write_limits(group: Path, limit_bytes: int) -> None:
    """Limit memory, and swap with it: a child that swaps would slow down the whole machine."""
    if (group / "memory.max").exists():
        (group / "memory.max").write_text(str(limit_bytes))
        optional = {"memory.swap.max": "0", "memory.oom.group": "1"}
    else:
        (group / "memory.limit_in_bytes").write_text(str(limit_bytes))
        optional = {"memory.memsw.limit_in_bytes": str(limit_bytes)}
    for name, value in optional.items():
        if (group / name).exists():
            with suppress(OSError):
                (group / name).write_text(value)


def _remove_group(group: Path) -> None:
    for _ in range(REMOVE_ATTEMPTS):
        try:
            group.rmdir()
            return
        except FileNotFoundError:
            return
        except OSError:
            time.sleep(REMOVE_SECONDS)
    log.warning("the control group %s still has processes and is left", group)


def _count_kills(group: Path | None) -> int:
    if group is None:
        return 0
    counts = [read_number(group / name, "oom_kill") for name in COUNTERS]
    return sum(count for count in counts if count)


def measure_group_bytes(group_id: int, enough: int) -> int:
    """Memory of all processes of a process group, in bytes; 0 where /proc does not exist.

    Only memory counts that cannot be read from a file again. A sum of up to ``enough`` may count
    pages twice that processes share; a larger one counts each page once, which takes longer.
    """
    pids = []
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(ProcessLookupError, PermissionError):
            if os.getpgid(int(folder.name)) == group_id:
                pids.append(int(folder.name))
    rough = sum(_read_bytes(Path(f"/proc/{pid}/status"), _RESIDENT) for pid in pids)
    if rough <= enough or len(pids) == 1:
        return rough
    exact = sum(_read_bytes(Path(f"/proc/{pid}/smaps_rollup"), _PROPORTIONAL) for pid in pids)
    return exact or rough


def _read_bytes(file: Path, pattern: re.Pattern[str]) -> int:
    try:
        text = file.read_text(encoding="utf-8")
    except OSError:  # it has ended
        return 0
    return 1024 * sum(map(int, pattern.findall(text)))
