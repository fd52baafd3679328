"""A process of the API that answers orders, as the API sees it: its failures are problems."""

from __future__ import annotations

from collections.abc import Mapping

from cache.json_object import Json
from services.api.answers.problems import ApiProblem
from services.api.line_process import LineProcess, NoAnswer
from services.settings import Settings


class OrderProcess(LineProcess):
    """Asks a process in which ``services.api.line_process.answer_orders`` runs. Thread-safe.

    A class of one such process names its ``module``, and says what problems say of it: the begin of
    their slug, its name, and sentences. ``busy`` and ``limit`` may name ``{seconds}`` and
    ``{bytes}``; ``remedy`` belongs to a limit.
    """

    module: str
    slug: str
    process: str
    busy: str
    limit: str
    remedy: str

    def __init__(self, settings: Settings) -> None:
        super().__init__(self.module, settings.environment(), settings.plan_seconds)
        self._limits = {"seconds": settings.plan_seconds, "bytes": settings.plan_memory_bytes}

    def fetch(self, order: Json, group: str = "") -> Json:
        """Return the answer to ``order``; raise ``ApiProblem`` 503 if it takes too long or much."""
        try:
            answer: Json = self.ask(order, group)
        except NoAnswer as error:
            raise self._explain(error.reason) from None
        if "limit" in answer:
            raise self._explain("memory")
        return answer

    def _explain(self, reason: str) -> ApiProblem:
        log = "The server's log shows the reason."
        detail, remedy = {
            "busy": (self.busy.format(**self._limits), "Try again."),
            "limit": (self.limit.format(**self._limits), self.remedy),
            "memory": (f"{self.process} needed more memory than it may have.", self.remedy),
            "crash": (f"{self.process} ended by itself.", log),
            "unavailable": (f"{self.process} did not start.", log),
        }[reason]
        slug = f"{self.slug}-{'unavailable' if remedy == log else 'limit'}"
        return ApiProblem(503, detail, remedy, slug, headers={"Retry-After": "10"})


def make_failure_problem(status: int, failure: Mapping[str, str]) -> ApiProblem:
    """Return the problem of an error that was raised in the process."""
    slug = failure["type"].replace("_", "-")
    return ApiProblem(status, failure["detail"], failure["remedy"], slug)
