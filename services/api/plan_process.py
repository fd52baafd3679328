"""The process that checks and plans jobs for ``POST /jobs/validate``, as the API uses it.

A plan reads models and tokenises text, so ``services.api.plan_child`` makes it in a process of its
own.
"""

from __future__ import annotations

from typing import Any, Literal

from redis.exceptions import RedisError

from kd.config.job import JobConfig
from kd.errors import ConfigError, Problem
from services.api.answers.problems import ApiProblem
from services.api.line_process import LineProcess, NoAnswer
from services.settings import Settings
from services.store.callers import Caller

Wish = Literal["plan", "estimate", "check", "size"]


class PlanProcess:
    """Asks the process of ``services.api.plan_child``. Thread-safe."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._process = LineProcess(
            "services.api.plan_child", settings.environment(), settings.plan_seconds
        )

    def ask(self, wish: Wish, config: JobConfig, caller: Caller) -> dict[str, Any]:
        """Return the plan, or the estimate, of a job of ``caller`` as JSON.

        ``check`` returns the memory that it needs at least, ``size`` also the bytes of its cache.
        Raises ``ConfigError`` with all problems of the job, ``RedisError`` if the job store does
        not answer, and ``ApiProblem`` (503) if other plans or this one take too long or too much.
        """
        order = {
            "wish": wish,
            "config": config.model_dump(mode="json"),
            "owner": caller.name,
            "team": caller.team,
        }
        try:
            answer = self._process.ask(order, caller.team)
        except NoAnswer as error:
            raise self._explain(error) from None
        return _take_result(answer)

    def close(self) -> None:
        """End the process."""
        self._process.close()

    def _explain(self, error: NoAnswer) -> ApiProblem:
        limit = self._settings.plan_seconds
        memory = self._settings.plan_memory_bytes
        if error.reason == "busy":
            return _make_limit_problem(
                f"Other jobs were checked for {limit:g} s, or too many wait for it already.",
                "Try again.",
            )
        if error.reason == "limit":
            return _make_limit_problem(
                f"The check of this job took more than {limit:g} s, or more than {memory} bytes.",
                "Name fewer or smaller files, or run `kd validate` where the files are.",
            )
        what = "ended by itself" if error.reason == "crash" else "did not start"
        return ApiProblem(
            503,
            f"The process that checks jobs {what}.",
            "The server's log shows the reason.",
            "check-unavailable",
            headers={"Retry-After": "5"},
        )


def _take_result(answer: dict[str, Any]) -> dict[str, Any]:
    """Return the result in the answer of the process, or raise its error."""
    if "problems" in answer:
        raise ConfigError([Problem(**each) for each in answer["problems"]])
    if "store_error" in answer:
        raise RedisError(answer["store_error"])
    if "failure" in answer:
        failure = answer["failure"]
        slug = failure["type"].replace("_", "-")
        raise ApiProblem(500, failure["detail"], failure["remedy"], slug)
    if "limit" in answer:
        raise _make_limit_problem(
            "The check of this job took more memory than it may.",
            "Name fewer or smaller files, or run `kd validate` where the files are.",
        )
    result: dict[str, Any] = answer["result"]
    return result


def _make_limit_problem(detail: str, remedy: str) -> ApiProblem:
    headers = {"Retry-After": "10"}
    return ApiProblem(503, detail, remedy, "check-limit", headers=headers)
