"""The error of a rank, as JSON for the process that started it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from cache.errors import PotstillError
from cache.json_object import Json
from kd.errors import ConfigError, Problem
from kd.files import read_json, write_json


class RankError(Exception):
    """An unexpected error of a rank; the message names its class."""


def write_failure(folder: Path, rank: int, error: BaseException) -> None:
    """Write the error of ``rank`` into ``folder``."""
    content: Json = {"name": type(error).__name__}
    if isinstance(error, ConfigError):
        content["problems"] = [each.to_json() for each in error.problems]
    elif isinstance(error, PotstillError):
        content |= {"detail": error.detail, "remedy": error.remedy}
    else:
        content |= {"detail": str(error), "unexpected": True}
    write_json(folder / f"error-{rank}.json", content)


def read_first_failure(folder: Path) -> Exception | None:
    """Rebuild the error that ended the ranks; None if no rank has written one.

    It is the earliest one. Later ones are mostly of ranks that had lost the first, and the errors
    of a lost connection are unexpected, so one of ours comes before them.
    """
    # By the clock of the disk: those of hosts may differ.
    paths = sorted(folder.glob("error-*.json"), key=lambda path: path.stat().st_mtime_ns)
    found = [read_json(path) for path in paths]
    found.sort(key=lambda each: ("unexpected" in each, each["name"] == "Interrupted"))
    if not found:
        return None
    content = found[0]
    name = content["name"]
    if "unexpected" in content:
        return RankError(f"{name}: {content['detail']}")
    if "problems" in content:
        return ConfigError([Problem(**each) for each in content["problems"]])
    kind = {each.__name__: each for each in _list_classes(PotstillError)}.get(name, PotstillError)
    return kind(content["detail"], content["remedy"])


def _list_classes(kind: type[PotstillError]) -> Iterator[type[PotstillError]]:
    for each in kind.__subclasses__():
        yield each
        yield from _list_classes(each)
