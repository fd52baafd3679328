"""Numbers of a row that share a scale in int4, and the names of quantisations. Imports no torch.

A name is what the identity of a cache has as ``teacher.quantization``:

    int8            one scale for each row
    int4            a scale and an offset for each 128 numbers of a row
    int4-group-64   128 numbers, or 64 where only they divide the row
    int4-group-32   128 numbers, or 64 or 32 where only they divide the row

A row that no group of its name divides stays as it is. So ``int4`` alone, the name of all caches
that were captured before there were smaller groups, still says what was rounded.
"""

from __future__ import annotations

from collections.abc import Iterable

#: The numbers of a group, the largest first: all that torch's kernels take, but for 256.
INT4_GROUPS = (128, 64, 32)
_PREFIX = "int4-group-"


def choose_int4_group(width: int, smallest: int = INT4_GROUPS[-1]) -> int | None:
    """Choose the largest group that divides a row of ``width`` numbers; None if none does."""
    return next((each for each in INT4_GROUPS if each >= smallest and width % each == 0), None)


def name_quantization(quantization: str, widths: Iterable[int]) -> str:
    """Return the name of ``teacher.quantization`` for linear layers of these input ``widths``."""
    if quantization != "int4":
        return quantization
    groups = [group for group in map(choose_int4_group, widths) if group is not None]
    smallest = min(groups, default=INT4_GROUPS[0])
    return "int4" if smallest == INT4_GROUPS[0] else f"{_PREFIX}{smallest}"


def read_smallest_group(name: str) -> int:
    """Return the smallest group that the int4 quantisation ``name`` has."""
    return int(name.removeprefix(_PREFIX)) if name.startswith(_PREFIX) else INT4_GROUPS[0]


def read_quantization(name: str) -> str | None:
    """Return the value of ``teacher.quantization`` that has ``name``; None for plain weights."""
    return name.partition("-")[0] or None
