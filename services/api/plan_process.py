"""The process that checks and plans jobs for ``POST /jobs/validate``, as the API uses it.

A plan reads models and tokenises text. In a process of its own this holds up no other request, its
memory and its time have limits, and what libraries keep is gone when the process ends. One process
makes one plan at a time; it starts with the first plan, and anew after one that broke a limit.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from typing import Any, Literal

from redis.exceptions import RedisError

from kd.config.job import JobConfig
from kd.errors import ConfigError, Problem
from services.api.answers.problems import ApiProblem
from services.settings import Settings
from services.store.callers import Caller

#: The time that the process may take to start. It only imports what it needs.
START_SECONDS = 60.0

Wish = Literal["plan", "estimate"]


class PlanProcess:
    """Asks the process of ``services.api.plan_child``. Thread-safe."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._lock = threading.Lock()
        self._child: subprocess.Popen[bytes] | None = None

    def ask(
        self, wish: Wish, config: JobConfig, caller: Caller, devices: str | None = None
    ) -> dict[str, Any]:
        """Return the plan on ``devices``, or the estimate, of a job of ``caller`` as JSON.

        Raises ``ConfigError`` with all problems of the job, ``RedisError`` if the job store does
        not answer, and ``ApiProblem`` (503) if other plans or this one take too long or too much.
        """
        order = {
            "wish": wish,
            "config": config.model_dump(mode="json"),
            "owner": caller.name,
            "team": caller.team,
            "devices": devices,
        }
        limit = self._settings.plan_seconds
        if not self._lock.acquire(timeout=limit):
            raise _make_limit_problem(
                f"Other jobs were checked for {limit:g} s, and this one had to wait.", "Try again."
            )
        try:
            answer = json.loads(self._exchange(json.dumps(order).encode() + b"\n"))
        finally:
            self._lock.release()
        return _take_result(answer)

    def close(self) -> None:
        """End the process."""
        child = self._child
        if child is not None:
            child.kill()  # a call that waits for an answer ends too
            with self._lock:
                self._end(child)

    def _exchange(self, order: bytes) -> bytes:
        child = self._child
        if child is None or child.poll() is not None:
            child = self._child = self._start()
        limit = self._settings.plan_seconds
        if reply := _call(child, order, limit):
            return reply
        self._end(child)
        memory = self._settings.plan_memory_bytes
        raise _make_limit_problem(
            f"The check of this job took more than {limit:g} s, or more than {memory} bytes.",
            "Name fewer or smaller files, or run `kd validate` where the files are.",
        )

    def _start(self) -> subprocess.Popen[bytes]:
        child = subprocess.Popen(
            [sys.executable, "-m", "services.api.plan_child"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=os.environ | self._settings.environment(),
        )
        if not _call(child, b"", START_SECONDS):
            self._end(child)
            raise ApiProblem(
                503,
                "The process that checks jobs did not start.",
                "The server's log shows the reason.",
                "check-unavailable",
                headers={"Retry-After": "5"},
            )
        return child

    def _end(self, child: subprocess.Popen[bytes]) -> None:
        self._child = None
        child.kill()
        child.wait()
        for pipe in (child.stdin, child.stdout):
            assert pipe is not None
            pipe.close()


def _call(child: subprocess.Popen[bytes], order: bytes, seconds: float) -> bytes:
    """Send ``order`` and return the line of the answer; empty if the process ended or was killed.

    The process is killed if it does not answer within ``seconds``.
    """
    assert child.stdin is not None
    assert child.stdout is not None
    killer = threading.Timer(seconds, child.kill)
    killer.daemon = True
    killer.start()
    try:
        # Unbuffered, so that no bytes of a failed call are left for the end of the pipe.
        view = memoryview(order)
        while view:
            view = view[os.write(child.stdin.fileno(), view) :]
        return child.stdout.readline()
    except BrokenPipeError:
        return b""
    finally:
        killer.cancel()


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
