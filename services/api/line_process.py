"""A process of the API that answers each line of JSON with one line of JSON.

It does work that reads files or imports much. In a process of its own this holds up no other
request, its memory and its time have limits, and what libraries keep is gone when the process ends.
One process does one thing at a time; it starts with the first order, and anew after one that broke
a limit.

An order is a JSON object. The answer is one of these, or an object that only this process gives:

    {"result": {...}} | {"limit": "memory"}
    | {"failure": {"type": "...", "detail": "...", "remedy": "..."}}
"""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, Literal

from cache.errors import PotstillError
from cache.json_object import Json
from services.api.turns import NoTurn, Turns
from services.process import logs
from services.settings import Settings

#: The time that the process may take to start. It only imports what it needs.
START_SECONDS = 60.0
#: Orders that may wait for the one that is answered. Each holds one of the threads that answer all
#: requests.
MOST_WAITING = 64


class NoAnswer(Exception):
    """An order has no answer.

    ``reason``: the process was ``busy`` with others all the time, or too many wait already; it
    broke a ``limit``; it ended by itself (``crash``); or it did not start (``unavailable``).
    """

    def __init__(self, reason: Literal["busy", "limit", "crash", "unavailable"]) -> None:
        super().__init__(reason)
        self.reason = reason


class LineProcess:
    """Runs ``python -m module`` with these variables besides ours. Thread-safe.

    The module writes a line once it is ready. ``seconds`` is the time that an answer may take, and
    the time that an order waits for others.
    """

    def __init__(self, module: str, environment: Mapping[str, str], seconds: float) -> None:
        self._module = module
        self._environment = dict(environment)
        self._seconds = seconds
        self._turns = Turns(MOST_WAITING)
        self._child: subprocess.Popen[bytes] | None = None

    def ask(self, order: Any, group: str = "") -> Any:
        """Return the answer to ``order``; both are JSON values. Raises ``NoAnswer``.

        Orders of each ``group`` take turns with those of others.
        """
        try:
            with self._turns.take(group, self._seconds):
                return json.loads(self._exchange(json.dumps(order).encode() + b"\n"))
        except NoTurn:
            raise NoAnswer("busy") from None

    def close(self) -> None:
        """End the process."""
        child = self._child
        if child is not None:
            child.kill()  # a call that waits for an answer ends too
            with suppress(NoTurn), self._turns.take("", self._seconds):
                self._end(child)

    def _exchange(self, order: bytes) -> bytes:
        child = self._child
        if child is None or child.poll() is not None:
            child = self._child = self._start()
        began = time.monotonic()
        if reply := _call(child, order, self._seconds):
            return reply
        self._end(child)
        raise NoAnswer("limit" if time.monotonic() - began >= self._seconds else "crash")

    def _start(self) -> subprocess.Popen[bytes]:
        child = subprocess.Popen(
            [sys.executable, "-m", self._module],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=os.environ | self._environment,
        )
        if not _call(child, b"", START_SECONDS):
            self._end(child)
            raise NoAnswer("unavailable")
        return child

    def _end(self, child: subprocess.Popen[bytes]) -> None:
        self._child = None
        with child:  # its end closes the pipes, and waits for the process
            child.kill()


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


def answer_orders(start: Callable[[Settings], Callable[[Json], Json]]) -> None:
    """Answer orders in this process until stdin ends; ``start`` returns what answers one order."""
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
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    most = settings.plan_memory_bytes
    most = most if hard == resource.RLIM_INFINITY else min(most, hard)
    resource.setrlimit(resource.RLIMIT_DATA, (most, most))
    answer = start(settings)
    print("ready", file=answers, flush=True)
    for line in sys.stdin:
        try:
            found = answer(json.loads(line))
        except MemoryError:
            found = {"limit": "memory"}
        except PotstillError as error:
            found = {"failure": error.to_json()}
        print(json.dumps(found), file=answers, flush=True)
