"""The processes that share a stage of a job, as their process ids."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from kd.files import RANKS


def find_ranks(home: Path) -> dict[int, int]:
    """The process ids of the ranks whose run folders are ``home`` or below it, by their number.

    Other tests on this machine have ranks of their own.
    """
    found = {}
    for pid, words in _list_commands(home):
        if words[2:4] == [b"-m", b"kd.rank"] and (rank := _read_rank(pid)) is not None:
            found[rank] = pid
    return found


def list_processes(home: Path) -> list[int]:
    """The process ids of these ranks, and of torchrun, which runs them."""
    return [pid for pid, _ in _list_commands(home)]


def find_parent(pid: int) -> int:
    """The process id of the parent of ``pid``, which must be alive."""
    # The fields follow the name, which is in brackets and may hold anything.
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def _read_rank(pid: int) -> int | None:
    """The rank that torchrun gave a process; None if the process has just ended."""
    try:
        variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return None
    return next((int(each[5:]) for each in variables if each.startswith(b"RANK=")), None)


def _list_commands(home: Path) -> Iterator[tuple[int, list[bytes]]]:
    """Process id and command line of each process that names a folder of ranks below ``home``."""
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            words = (folder / "cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        named = any(
            each.startswith(bytes(home)) and each.endswith(f"/{RANKS}".encode()) for each in words
        )
        if named and int(folder.name) != os.getpid():
            yield int(folder.name), words
