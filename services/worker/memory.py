"""What this machine, or this container, has of memory, and whether the kernel has killed for want of it.

    cgroup v2   memory.max             memory.events: oom_kill
    cgroup v1   memory.limit_in_bytes  memory.oom_control: oom_kill
    the host    /proc/meminfo          /proc/vmstat: oom_kill

Off Linux nothing is known of kills.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

COUNTERS = ("memory.events", "memory.oom_control")
LIMITS = ("memory.max", "memory.limit_in_bytes")


@dataclass(frozen=True)
class Kills:
    """How many processes the kernel had killed for want of memory: in this process's control group, and on the host."""

    group: int
    host: int

    @classmethod
    def count(cls) -> Kills:
        """As of now; 0 where it cannot be known."""
        counts = [_number(file, "oom_kill") for file in _files(COUNTERS, around=False)]
        return cls(sum(count for count in counts if count), _number(Path("/proc/vmstat"), "oom_kill") or 0)

    def since(self, earlier: Kills) -> str:
        """Where a process was killed since ``earlier``: "container", "host", or nowhere."""
        if self.group > earlier.group:
            return "container"
        return "host" if self.host > earlier.host else ""


def memory_bytes() -> int:
    """Memory that this process can have: of the host, or as much of it as its control groups allow."""
    host = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limits = [_number(file, "") for file in _files(LIMITS, around=True)]
    return min([host, *(limit for limit in limits if limit)])


def _files(names: tuple[str, ...], around: bool) -> Iterator[Path]:
    """Of the control group of this process, and of those ``around`` it as far as they can be seen from here."""
    for mount, inner in _groups():
        own = mount / inner
        groups = [own, *(each for each in own.parents if each.is_relative_to(mount))] if around else [own]
        yield from (file for group in groups for name in names if (file := group / name).is_file())


def _groups() -> Iterator[tuple[Path, str]]:
    """Where the hierarchies that govern memory are mounted, and this process's place below."""
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
        kind, options = after.split()[0], after.split()[-1].split(",")
        path = path_of.get(kind)
        if path is not None and (kind == "cgroup2" or "memory" in options):
            yield Path(mount), _below(path, root)


def _below(path: str, root: str) -> str:
    """``path`` seen from ``root``; the mount itself where it lies outside, as in a container of an older runtime."""
    inside = os.path.relpath(path, root)
    return "." if path.startswith("/..") or inside.startswith("..") else inside


def _number(file: Path, name: str) -> int | None:
    """The number after ``name`` at the start of a line; None where there is none."""
    try:
        found = re.search(rf"^{name} ?(\d+)$", file.read_text(encoding="utf-8"), re.MULTILINE)
    except OSError:
        return None
    return int(found[1]) if found else None
