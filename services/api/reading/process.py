"""The process that looks into caches, as the API uses it: ``services.api.reading.child``."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Any

from services.api.answers.problems import ApiProblem
from services.api.line_process import LineProcess, NoAnswer
from services.settings import Settings

#: The status of a failure, by the type of its error. Others say that the cache cannot be read now.
_STATUSES = {"cache_missing": 404}


class ReadingProcess:
    """Asks the process that reads caches. Thread-safe.

    Each method raises ``ApiProblem``: 404 for a cache that is gone, 409 for one that is not sealed
    or damaged, and 503 if other looks or this one take too long or too much.
    """

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._process = LineProcess(
            "services.api.reading.child", settings.environment(), settings.plan_seconds
        )

    def read_statistics(self, folder: Path, seed: int) -> dict[str, Any]:
        """Return histograms of a sample of the records."""
        return self._ask("statistics", folder, seed=seed)

    def read_shards(self, folder: Path, damaged: Collection[str], expected: int) -> dict[str, Any]:
        """Return the state of each shard.

        ``damaged`` are lines of a verification, ``expected`` is the number of shards that a capture
        under way will write, or 0.
        """
        return self._ask("shards", folder, damaged=list(damaged), expected=expected)

    def read_records(self, folder: Path, sequence: int, start: int, limit: int) -> dict[str, Any]:
        """Return records of one sequence with their text; 404 if there is no such sequence."""
        return self._ask("records", folder, sequence=sequence, start=start, limit=limit)

    def read_teacher(self, folder: Path) -> dict[str, Any]:
        """Return the name of the cache's teacher, its revision, and whether it was spread."""
        return self._ask("teacher", folder)

    def close(self) -> None:
        """End the process."""
        self._process.close()

    def _ask(self, wish: str, folder: Path, **order: Any) -> dict[str, Any]:
        try:
            answer = self._process.ask({"wish": wish, "folder": str(folder), **order})
        except NoAnswer as error:
            raise self._explain(error) from None
        return self._take_result(answer, folder)

    def _take_result(self, answer: dict[str, Any], folder: Path) -> dict[str, Any]:
        if "no_sequence" in answer:
            raise ApiProblem(
                404,
                f"The cache {folder.name} has no such sequence: it has {answer['no_sequence']}.",
                "Numbers of sequences begin at 0.",
            )
        if "limit" in answer:
            raise self._explain(NoAnswer("limit"))
        if "failure" in answer:
            failure = answer["failure"]
            slug = failure["type"].replace("_", "-")
            status = _STATUSES.get(failure["type"], 409)
            raise ApiProblem(status, failure["detail"], failure["remedy"], slug)
        result: dict[str, Any] = answer["result"]
        return result

    def _explain(self, error: NoAnswer) -> ApiProblem:
        headers = {"Retry-After": "10"}
        limit = self._settings.plan_seconds
        if error.reason in ("unavailable", "crash"):
            what = "ended by itself" if error.reason == "crash" else "did not start"
            return ApiProblem(
                503,
                f"The process that reads caches {what}.",
                "The server's log shows the reason.",
                "reading-unavailable",
                headers=headers,
            )
        if error.reason == "busy":
            detail = f"Other requests that read caches took {limit:g} s, or too many wait already."
            return ApiProblem(503, detail, "Try again.", "reading-limit", headers=headers)
        memory = self._settings.plan_memory_bytes
        return ApiProblem(
            503,
            f"Reading the cache took more than {limit:g} s, or more than {memory} bytes.",
            "Use `kd cache stats` and `kd cache verify` where the cache is.",
            "reading-limit",
            headers=headers,
        )
