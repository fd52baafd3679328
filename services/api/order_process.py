"""A process of the API that answers orders, as the API sees it: its failures are problems."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from cache.json_object import Json
from services.api.answers.problems import ApiProblem
from services.api.line_process import LineProcess, NoAnswer
from services.settings import Settings


@dataclass(frozen=True)
class ProcessTexts:
    """What problems say of a process: the begin of their slug, its name, and sentences.

    ``busy`` and ``limit`` may name ``{seconds}`` and ``{bytes}``; ``remedy`` belongs to a limit.
    """

    slug: str
    process: str
    busy: str
    limit: str
    remedy: str


class OrderProcess(LineProcess):
    """Asks a process in which ``services.api.line_process.answer_orders`` runs. Thread-safe."""

    def __init__(self, module: str, settings: Settings, texts: ProcessTexts) -> None:
        super().__init__(module, settings.environment(), settings.plan_seconds)
        self._limits = {"seconds": settings.plan_seconds, "bytes": settings.plan_memory_bytes}
        self._texts = texts

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
        texts = self._texts
        log = "The server's log shows the reason."
        detail, remedy = {
            "busy": (texts.busy.format(**self._limits), "Try again."),
            "limit": (texts.limit.format(**self._limits), texts.remedy),
            "memory": (f"{texts.process} needed more memory than it may have.", texts.remedy),
            "crash": (f"{texts.process} ended by itself.", log),
            "unavailable": (f"{texts.process} did not start.", log),
        }[reason]
        slug = f"{texts.slug}-{'unavailable' if remedy == log else 'limit'}"
        return ApiProblem(503, detail, remedy, slug, headers={"Retry-After": "10"})


def make_failure_problem(status: int, failure: Mapping[str, str]) -> ApiProblem:
    """Return the problem of an error that was raised in the process."""
    slug = failure["type"].replace("_", "-")
    return ApiProblem(status, failure["detail"], failure["remedy"], slug)
