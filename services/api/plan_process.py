"""The process that checks and plans jobs for ``POST /jobs/validate``, as the API uses it.

A plan reads models and tokenises text, so ``services.api.plan_child`` makes it in a process of its
own.
"""

from __future__ import annotations

from typing import Literal

from redis.exceptions import RedisError

from cache.json_object import Json
from kd.config.job import JobConfig
from kd.errors import ConfigError, Problem
from services.api.order_process import OrderProcess, make_failure_problem
from services.store.callers import Caller

Wish = Literal["plan", "estimate", "check", "size"]


class PlanProcess(OrderProcess):
    """Asks the process of ``services.api.plan_child``. Thread-safe."""

    module = "services.api.plan_child"
    slug = "check"
    process = "The process that checks jobs"
    busy = "Other jobs were checked for {seconds:g} s, or too many wait for it already."
    limit = "The check of this job took more than {seconds:g} s, or more than {bytes} bytes."
    remedy = "Name fewer or smaller files, or run `kd validate` where the files are."

    def check(self, wish: Wish, config: JobConfig, caller: Caller) -> Json:
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
        answer = self.fetch(order, caller.team)
        if "problems" in answer:
            raise ConfigError([Problem(**each) for each in answer["problems"]])
        if "store_error" in answer:
            raise RedisError(answer["store_error"])
        if "failure" in answer:
            raise make_failure_problem(500, answer["failure"])
        return dict(answer["result"])
