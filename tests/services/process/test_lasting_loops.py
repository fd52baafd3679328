"""A loop that dies of an error is started again, and /metrics counts it."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Iterator

import pytest
from redis.exceptions import RedisError

from bench.support.harness import Parts
from services.process import lasting_loops
from services.process.lasting_loops import flush_restarts, keep_running, keep_running_async
from services.store.connection import connect_redis
from services.store.jobs.store import JobStore


class DyingLoop:
    """A loop that dies a few times of an error before it ends."""

    def __init__(self, deaths: int) -> None:
        self.left = deaths

    def run(self) -> None:
        """Die, or end."""
        if self.left:
            self.left -= 1
            raise OSError(28, "No space left on device")

    async def run_async(self) -> None:
        """Die, or end."""
        self.run()


@pytest.fixture(autouse=True)
def _fast(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(lasting_loops, "RESTART_SECONDS", 0.01)
    lasting_loops._restarts.clear()
    yield
    lasting_loops._restarts.clear()


def test_loops_that_die_are_started_again_and_counted(
    parts: Parts, caplog: pytest.LogCaptureFixture
) -> None:
    loop = DyingLoop(3)
    keep_running("waiter", loop.run, threading.Event())
    asyncio.run(keep_running_async("reconciler", DyingLoop(2).run_async))
    assert loop.left == 0
    assert caplog.text.count("died and is started again") == 5
    assert "No space left on device" in caplog.text
    flush_restarts(parts.jobs)
    flush_restarts(parts.jobs)
    counted = {
        labels["loop"]: number
        for name, labels, number in parts.jobs.read_counters()
        if name == "kd_loop_restarts_total"
    }
    assert counted == {"reconciler": 2.0, "waiter": 3.0}


def test_counts_wait_while_redis_is_away(parts: Parts, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL)
    keep_running("waiter", DyingLoop(1).run, threading.Event())
    with pytest.raises(RedisError):
        flush_restarts(JobStore(connect_redis("redis://127.0.0.1:1/0")))
    flush_restarts(parts.jobs)
    assert ("kd_loop_restarts_total", {"loop": "waiter"}, 1.0) in parts.jobs.read_counters()


def test_a_loop_that_is_to_stop_is_not_started_again() -> None:
    stopping = threading.Event()
    stopping.set()
    loop = DyingLoop(5)
    keep_running("waiter", loop.run, stopping)
    assert loop.left == 4


def test_a_cancelled_loop_ends() -> None:
    async def wait() -> None:
        await asyncio.sleep(60)

    async def cancel() -> None:
        task = asyncio.create_task(keep_running_async("waiter", wait))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(cancel())
