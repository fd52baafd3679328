"""The processes that share a stage of a job, as their process ids."""

from __future__ import annotations

from pathlib import Path


def find_ranks(home: Path) -> dict[int, int]:
    """The process ids of the ranks whose run folders are below ``home``, by their number.

    Other tests on this machine have ranks of their own.
    """
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            words = (folder / "cmdline").read_bytes().split(b"\0")
            variables = (folder / "environ").read_bytes().split(b"\0")
        except OSError:
            continue
        if words[2:4] == [b"-m", b"kd.rank"] and words[4].startswith(bytes(home)):
            rank = next(each for each in variables if each.startswith(b"RANK="))
            found[int(rank[5:])] = int(folder.name)
    return found
