"""The process that looks into caches, as the API uses it: ``services.api.reading.child``."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from cache.json_object import Json
from services.api.answers.problems import ApiProblem
from services.api.order_process import OrderProcess, make_failure_problem

Wish = Literal["statistics", "shards", "records", "teacher"]


class ReadingProcess(OrderProcess):
    """Asks the process that reads caches. Thread-safe.

    ``read`` raises ``ApiProblem``: 404 for a cache or a sequence that is not there, 409 for a cache
    that is not sealed or damaged, and 503 if other looks or this one take too long or too much.
    """

    module = "services.api.reading.child"
    slug = "reading"
    process = "The process that reads caches"
    busy = "Other requests that read caches took {seconds:g} s, or too many wait already."
    limit = "Reading the cache took more than {seconds:g} s, or more than {bytes} bytes."
    remedy = "Use `kd cache stats` and `kd cache verify` where the cache is."

    def read(self, wish: Wish, folder: Path, **details: Any) -> Json:
        """Return what ``wish`` names of the cache in ``folder``.

        ``services.api.reading.child`` lists the wishes, their ``details`` and what they show.
        """
        answer = self.fetch({"wish": wish, "folder": str(folder), **details})
        if "no_sequence" in answer:
            count = answer["no_sequence"]
            detail = f"The cache {folder.name} has no such sequence: it has {count}."
            raise ApiProblem(404, detail, "Numbers of sequences begin at 0.")
        if "failure" in answer:
            gone = answer["failure"]["type"] == "cache_missing"
            raise make_failure_problem(404 if gone else 409, answer["failure"])
        return dict(answer["result"])
