"""The process that looks into caches, as the API uses it: ``services.api.reading.child``."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Any

from services.api.answers.problems import ApiProblem
from services.api.order_process import OrderProcess, ProcessTexts, make_failure_problem
from services.settings import Settings

TEXTS = ProcessTexts(
    slug="reading",
    process="The process that reads caches",
    busy="Other requests that read caches took {seconds:g} s, or too many wait already.",
    limit="Reading the cache took more than {seconds:g} s, or more than {bytes} bytes.",
    remedy="Use `kd cache stats` and `kd cache verify` where the cache is.",
)


class ReadingProcess(OrderProcess):
    """Asks the process that reads caches. Thread-safe.

    Each method raises ``ApiProblem``: 404 for a cache that is gone, 409 for one that is not sealed
    or damaged, and 503 if other looks or this one take too long or too much.
    """

    def __init__(self, settings: Settings) -> None:
        super().__init__("services.api.reading.child", settings, TEXTS)

    def read_statistics(self, folder: Path, seed: int) -> dict[str, Any]:
        """Return histograms of a sample of the records."""
        return self._look("statistics", folder, seed=seed)

    def read_shards(self, folder: Path, damaged: Collection[str], expected: int) -> dict[str, Any]:
        """Return the state of each shard.

        ``damaged`` are lines of a verification, ``expected`` is the number of shards that a capture
        under way will write, or 0.
        """
        return self._look("shards", folder, damaged=list(damaged), expected=expected)

    def read_records(self, folder: Path, sequence: int, start: int, limit: int) -> dict[str, Any]:
        """Return records of one sequence with their text; 404 if there is no such sequence."""
        return self._look("records", folder, sequence=sequence, start=start, limit=limit)

    def read_teacher(self, folder: Path) -> dict[str, Any]:
        """Return the name of the cache's teacher, its revision, and whether it was spread."""
        return self._look("teacher", folder)

    def _look(self, wish: str, folder: Path, **order: Any) -> dict[str, Any]:
        answer = self.fetch({"wish": wish, "folder": str(folder), **order})
        if "no_sequence" in answer:
            count = answer["no_sequence"]
            detail = f"The cache {folder.name} has no such sequence: it has {count}."
            raise ApiProblem(404, detail, "Numbers of sequences begin at 0.")
        if "failure" in answer:
            gone = answer["failure"]["type"] == "cache_missing"
            raise make_failure_problem(404 if gone else 409, answer["failure"])
        return dict(answer["result"])
