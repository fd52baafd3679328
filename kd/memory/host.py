"""The memory of this host or container, and the processes that the kernel killed to free memory.

    cgroup v2   memory.max             memory.events: oom_kill
    cgroup v1   memory.limit_in_bytes  memory.oom_control: oom_kill
    the host    /proc/meminfo          /proc/vmstat: oom_kill

Without Linux, no kills are known.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

from cache.reading.arrays import MEMORY_BYTES

#: Part of the host's memory that decoded chunks of a cache may take.
CHUNK_SHARE = 1 / 8
#: Files that count kills, by version of cgroup.
COUNTERS = ("memory.events", "memory.oom_control")
#: Files with the limit of memory, by version of cgroup.
LIMITS = ("memory.max", "memory.limit_in_bytes")


@dataclass(frozen=True)
class OomKills:
    """Processes that the kernel killed to free memory: in this control group, and on the host."""

    group: int
    host: int

    @classmethod
    def count(cls) -> OomKills:
        """The counts now; 0 if they are not known."""
        counts = [read_number(file, "oom_kill") for file in _find_files(COUNTERS, around=False)]
        return cls(
            sum(count for count in counts if count),
            read_number(Path("/proc/vmstat"), "oom_kill") or 0,
        )

    def since(self, earlier: OomKills) -> str:
        """Where a process was killed since ``earlier``: "container", "host", or "" for nowhere."""
        if self.group > earlier.group:
            return "container"
        return "host" if self.host > earlier.host else ""


def read_memory_bytes() -> int:
    """Bytes of memory that this process can have: the host's, or the limit of a control group."""
    host = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limits = [read_number(file, "") for file in _find_files(LIMITS, around=True)]
    return min([host, *(limit for limit in limits if limit)])


def read_free_bytes(limit: int | None, processes: int) -> int:
    """Bytes that this process may still take, one of ``processes`` that take as much at once.

    ``limit`` are the bytes that all of them may have; None for those of this machine.
    """
    allowed = min(limit or sys.maxsize, read_memory_bytes()) // processes
    own = psutil.Process().memory_info().rss
    return max(min(allowed - own, psutil.virtual_memory().available // processes), 0)


def choose_chunk_memory() -> int:
    """Choose the bytes that decoded chunks of a cache may take, by the memory of the host."""
    return min(MEMORY_BYTES, int(read_memory_bytes() * CHUNK_SHARE))


def find_own_groups() -> list[Path]:
    """The control groups of this process that can limit memory, one for each hierarchy."""
    found = [mount / inner for mount, inner in _find_groups()]
    return [group for group in found if _limits_memory(group)]


def _limits_memory(group: Path) -> bool:
    if (group / LIMITS[1]).is_file():
        return True
    controllers = group / "cgroup.controllers"
    return controllers.is_file() and "memory" in controllers.read_text(encoding="utf-8").split()


def _find_files(names: tuple[str, ...], around: bool) -> Iterator[Path]:
    """Files of this control group, and with ``around`` of the visible groups around it."""
    for mount, inner in _find_groups():
        own = mount / inner
        groups = [own, *(each for each in own.parents if around and each.is_relative_to(mount))]
        yield from (file for group in groups for name in names if (file := group / name).is_file())


def _find_groups() -> Iterator[tuple[Path, str]]:
    """Mounts of the hierarchies that limit memory, and the place of this process below each."""
    try:
        mounts = Path("/proc/self/mountinfo").read_text(encoding="utf-8").splitlines()
        paths = Path("/proc/self/cgroup").read_text(encoding="utf-8").splitlines()
    except OSError:
        return
    own = dict(line.split(":", 2)[1:] for line in paths)
    first = next((path for names, path in own.items() if "memory" in names.split(",")), None)
    path_of = {"cgroup": first, "cgroup2": own.get("")}
    for line in mounts:
        before, _, after = line.partition(" - ")
        root, mount = before.split()[3:5]
        kind = after.split()[0]
        options = after.split()[-1].split(",")
        path = path_of.get(kind)
        if path is not None and (kind == "cgroup2" or "memory" in options):
            yield Path(mount), _make_relative(path, root)


def _make_relative(path: str, root: str) -> str:
    """``path`` as seen from ``root``.

    It may lie outside, as in a container of an older runtime. The mount itself counts then.
    """
    inside = os.path.relpath(path, root)
    return "." if path.startswith("/..") or inside.startswith("..") else inside


def read_number(file: Path, name: str) -> int | None:
    """The number after ``name`` at the start of a line, or None."""
    try:
        found = re.search(rf"^{name} ?(\d+)$", file.read_text(encoding="utf-8"), re.MULTILINE)
    except OSError:
        return None
    return int(found[1]) if found else None
