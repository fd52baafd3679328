"""``python -m services.api.plan_child``: checks and plans jobs for the API that started it.

Its orders, and the answers besides those of ``services.api.line_process``:

    {"wish": "plan" | "estimate" | "check" | "size", "config": {...}, "owner": "...", "team": "..."}
    {"problems": [...]} | {"store_error": "..."}
"""

from __future__ import annotations

from collections.abc import Callable

from redis.exceptions import RedisError

from cache.json_object import Json
from kd.buckets.inputs import begin_downloads
from kd.capture.estimate.job import estimate_by_table
from kd.config.jobfile import parse_config
from kd.config.routing.parts import list_members
from kd.errors import ConfigError
from kd.memory.model_memory import estimate_least_memory
from kd.preflight.problems import Folders, require_no_problems
from services.api.kept_answers import KeptAnswers
from services.api.line_process import answer_orders
from services.api.planning import estimate_capture, plan_job
from services.settings import Settings
from services.store.connection import connect_redis
from services.store.jobs.store import JobStore
from services.store.tenancy import build_confinement


def answer_order(order: Json, settings: Settings, store: JobStore, kept: KeptAnswers) -> Json:
    """Return the answer to one order."""
    begin_downloads(settings.home)
    try:
        config = parse_config(order["config"])
        limits = build_confinement(settings, store, order["owner"], order["team"])
        # A bucket may not answer, and the worker looks into it: a new job does not wait for it.
        asked = order["wish"] in ("plan", "estimate")
        require_no_problems(config, Folders(settings.root, settings.home, limits, asked=asked))
        if not asked:
            # Of several teachers each has a cache of its own.
            jobs = [each.job for each in list_members(config)] if order["wish"] == "size" else []
            found = [estimate_capture(job, settings, kept) for job in jobs]
            sizes = [each.bytes for each in found if each is not None]
            least_memory = estimate_least_memory(config, settings.root)
            return {
                "result": {"least_memory": least_memory, "bytes": sum(sizes) if sizes else None}
            }
        if order["wish"] == "estimate":
            caches = settings.locate_caches(config.cache.store)
            estimate = estimate_by_table(config, settings.root, caches)
            return {"result": estimate.model_dump(mode="json")}
        plan = plan_job(config, settings, store.list_workers(), kept)
        return {"result": plan.model_dump(mode="json")}
    except ConfigError as error:
        return {"problems": [problem.to_json() for problem in error.problems]}
    except RedisError as error:
        return {"store_error": str(error)}


def start(settings: Settings) -> Callable[[Json], Json]:
    """Connect to the job store; return what answers an order."""
    assert settings.redis_url is not None
    store = JobStore(connect_redis(settings.redis_url), settings.max_attempts, settings.home)
    kept = KeptAnswers()
    return lambda order: answer_order(order, settings, store, kept)


if __name__ == "__main__":
    answer_orders(start)
