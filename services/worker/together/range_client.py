"""The ranges of shards as the child sees them: it asks its supervisor (``range_server``)."""

from __future__ import annotations

import json
import os
import queue
import threading
from collections.abc import Callable
from dataclasses import asdict

from kd.progress import Event, SharedCapture, make_interruption
from services.worker.stage_messages import RangeAnswer, RangeAsk

#: Time between two looks whether the run should stop, while no answer comes.
LOOK_SECONDS = 0.25


class RangeClient:
    """``kd.progress.ShardRanges`` over two pipes: events to the supervisor, answers from it."""

    def __init__(
        self, send: Callable[[Event], None], answers: int, shared: SharedCapture | None
    ) -> None:
        """``answers`` is the file descriptor of the pipe with the answers."""
        self.shared = shared
        self._send = send
        self._answers: queue.SimpleQueue[RangeAnswer] = queue.SimpleQueue()
        self._numbers: dict[range, int] = {}
        self._finished: frozenset[int] = frozenset()
        threading.Thread(target=self._read, args=(answers,), name="ranges", daemon=True).start()

    def open(self, shared: SharedCapture, shards: int, check_stop: Callable[[], None]) -> None:
        """Let workers take the ``shards`` of a capture, from now on."""
        self._ask(RangeAsk("open", shared=shared, shards=shards), check_stop)

    def take(self, check_stop: Callable[[], None]) -> range | None:
        """Return the shards to capture next; an empty range where there are none now."""
        answer = self._ask(RangeAsk("take"), check_stop)
        if answer.answer == "done":
            return None
        if answer.answer == "wait":
            return range(0)
        shards = range(answer.first, answer.stop)
        self._numbers[shards] = answer.number
        return shards

    def finish(self, shards: range, sequences: int) -> None:
        """Tell that all ``shards`` of a range are sealed, which hold ``sequences``."""
        number = self._numbers.pop(shards)
        self._tell(RangeAsk("finish", number=number, sequences=sequences))

    def is_finished(self, shards: range) -> bool:
        """Whether another worker was faster with a range that this one has."""
        return self._numbers.get(shards) in self._finished

    def _ask(self, ask: RangeAsk, check_stop: Callable[[], None]) -> RangeAnswer:
        self._tell(ask)
        while True:
            try:
                answer = self._answers.get(timeout=LOOK_SECONDS)
            except queue.Empty:
                check_stop()
                continue
            if answer.answer == "stop":
                raise make_interruption("between two ranges of shards; all shards are sealed")
            return answer

    def _tell(self, ask: RangeAsk) -> None:
        self._send(Event("ranges", asdict(ask)))

    def _read(self, answers: int) -> None:
        """Read the answers until the supervisor closes the pipe."""
        with os.fdopen(answers, encoding="utf-8") as lines:
            for line in lines:
                answer = json.loads(line)
                if "finished" in answer:
                    self._finished = frozenset(answer["finished"])
                else:
                    self._answers.put(RangeAnswer(**answer))
        self._answers.put(RangeAnswer("stop"))
