"""``python -m services.api.plan_child``: checks and plans jobs for the API that started it.

It writes a line once it is ready, then reads one order a line from stdin and writes one answer a
line to stdout, both JSON:

    {"wish": "plan" | "estimate" | "check" | "size", "config": {...}, "owner": "...", "team": "..."}
    {"result": {...}} | {"problems": [...]} | {"store_error": "..."} | {"limit": "memory"}
    | {"failure": {"type": "...", "detail": "...", "remedy": "..."}}
"""

from __future__ import annotations

import json
import os
import signal
import sys
from typing import Any

from redis.exceptions import RedisError

from cache.errors import PotstillError
from kd.buckets.inputs import begin_downloads
from kd.capture.estimate.job import estimate_by_table
from kd.config.job import JobConfig
from kd.config.jobfile import parse_config
from kd.errors import ConfigError
from kd.memory.model_memory import estimate_least_memory
from kd.preflight.problems import Folders, require_no_problems
from services.api.kept_answers import KeptAnswers
from services.api.line_process import limit_memory
from services.api.planning import estimate_capture, plan_job
from services.process import logs
from services.settings import Settings
from services.store.connection import connect_redis
from services.store.jobs.store import JobStore
from services.store.tenancy import build_confinement


def answer_order(
    order: dict[str, Any], settings: Settings, store: JobStore, kept: KeptAnswers
) -> dict[str, Any]:
    """Return the answer to one order."""
    begin_downloads(settings.home)
    try:
        config = parse_config(order["config"])
        limits = build_confinement(settings, store, order["owner"], order["team"])
        # A bucket may not answer, and the worker looks into it: a new job does not wait for it.
        asked = order["wish"] in ("plan", "estimate")
        require_no_problems(config, Folders(settings.root, settings.home, limits, asked=asked))
        if not asked:
            return {"result": _measure(config, settings, kept, order["wish"] == "size")}
        if order["wish"] == "estimate":
            caches = settings.locate_caches(config.cache.store)
            return {
                "result": estimate_by_table(config, settings.root, caches).model_dump(mode="json")
            }
        plan = plan_job(config, settings, store.list_workers(), kept)
        return {"result": plan.model_dump(mode="json")}
    except ConfigError as error:
        return {"problems": [problem.to_json() for problem in error.problems]}
    except RedisError as error:
        return {"store_error": str(error)}
    except MemoryError:
        return {"limit": "memory"}
    except PotstillError as error:
        return {"failure": error.to_json()}


def _measure(
    config: JobConfig, settings: Settings, kept: KeptAnswers, sized: bool
) -> dict[str, Any]:
    """Return the least memory of a job and the bytes of its cache; None where they are unknown."""
    found = estimate_capture(config, settings, kept) if sized else None
    least_memory = estimate_least_memory(config, settings.root)
    return {"least_memory": least_memory, "bytes": None if found is None else found.bytes}


def main() -> None:
    """Answer orders until stdin ends."""
    # The end of stdin ends this process; a signal to the group of a terminal does not. The kernel
    # cannot watch the parent: it would watch the thread that started this process, which may end.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # What a library prints must not be taken for an answer.
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    # One order at a time is one thread's work, and each thread more keeps memory of its own.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    settings = Settings()
    logs.configure(settings)
    limit_memory(settings.plan_memory_bytes)
    assert settings.redis_url is not None
    store = JobStore(connect_redis(settings.redis_url), settings.max_attempts, settings.home)
    kept = KeptAnswers()
    print("ready", file=answers, flush=True)
    for line in sys.stdin:
        answer = answer_order(json.loads(line), settings, store, kept)
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()
