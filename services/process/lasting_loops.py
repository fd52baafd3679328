"""Loops that last as long as their process: an error ends one turn of a loop, not the loop.

A loop that dies is logged, counted, and started again after a second. The counts are kept here
until Redis takes them (``flush_restarts``), because Redis may be what the loop died of. GET
/metrics shows them as ``kd_loop_restarts_total``.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import ClassVar, Self

from redis.exceptions import RedisError

from services.store.connection import describe_failure
from services.store.jobs.store import JobStore

#: Time before a loop that died is started again.
RESTART_SECONDS = 1.0

log = logging.getLogger("potstill.loops")

_lock = threading.Lock()
_restarts: Counter[str] = Counter()


def keep_running(name: str, loop: Callable[[], None], stopping: threading.Event) -> None:
    """Call ``loop`` in this thread until it returns, and again whenever it dies of an error.

    Returns early if ``stopping`` is set after a death.
    """
    while True:
        try:
            loop()
            return
        except Exception:
            _note_death(name)
        if stopping.wait(RESTART_SECONDS):
            return


def start_loop(name: str, loop: Callable[[], None], stopping: threading.Event) -> threading.Thread:
    """Start a thread that keeps ``loop`` running; it does not hold up the end of the process."""
    thread = threading.Thread(
        target=keep_running, args=(name, loop, stopping), name=name, daemon=True
    )
    thread.start()
    return thread


class BlockLoop:
    """Keeps ``_run`` running in a thread for the length of a block, until ``_closing`` is set."""

    #: The name of the loop.
    loop: ClassVar[str]

    def __enter__(self) -> Self:
        self._closing = threading.Event()
        #: When the job store last answered.
        self._contact = time.monotonic()
        self._thread = start_loop(self.loop, self._run, self._closing)
        return self

    def __exit__(self, *_: object) -> None:
        """Wait for the end of the turn."""
        self._closing.set()
        self._thread.join()

    @property
    def outage_seconds(self) -> float:
        """Seconds since the job store last answered."""
        return time.monotonic() - self._contact

    def _run(self) -> None:
        raise NotImplementedError


async def keep_running_async(name: str, loop: Callable[[], Awaitable[None]]) -> None:
    """Await ``loop()`` until it returns or is cancelled, and again whenever it dies of an error."""
    while True:
        try:
            await loop()
            return
        except Exception:
            _note_death(name)
        await asyncio.sleep(RESTART_SECONDS)


async def repeat_in_thread(
    step: Callable[[], None], pause_seconds: float, stopping: threading.Event
) -> None:
    """Call ``step`` in a thread, with a pause after each call, until cancelled.

    A thread cannot be cancelled: ``stopping`` is set instead, and a long step looks at it. While
    Redis does not answer, the step is tried again after each pause.
    """
    try:
        while True:
            try:
                await asyncio.to_thread(step)
            except RedisError as error:
                log.warning("the job store %s", describe_failure(error))
            await asyncio.sleep(pause_seconds)
    finally:
        stopping.set()


def flush_restarts(store: JobStore) -> None:
    """Add the restarts of this process to the counters in Redis. Raises ``RedisError``.

    What could not be added is added by the next call.
    """
    with _lock:
        waiting = dict(_restarts)
    for name, number in waiting.items():
        store.count("kd_loop_restarts_total", number, loop=name)
        with _lock:
            _restarts[name] -= number
            if not _restarts[name]:
                del _restarts[name]


def _note_death(name: str) -> None:
    log.exception("the loop %s died and is started again", name)
    with _lock:
        _restarts[name] += 1
