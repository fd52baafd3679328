"""Ranges of shards between the child that captures them and the job store.

    child --asks on stdout--> RangeServer --open, take, finish, beat--> table of ranges in Redis
    child <--answers, a pipe-- RangeServer <--a range, wait, done, stop--

    ask                             answer
    {ask: open, shared, shards}     {answer: go | stop}
    {ask: take}                     {answer: range, number, first, stop}, or
                                    {answer: wait | done | stop}
    {ask: finish, number, ...}      none
                                    {finished: [numbers]}, at any time: another worker was faster

While Redis is away the child goes on with the range that it has, and its asks wait.
"""

from __future__ import annotations

import json
import logging
import os
import queue
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from typing import Any, ClassVar

from pydantic import TypeAdapter
from redis.exceptions import RedisError

from cache.json_object import Json
from cache.remote.address import name_place
from kd.config.job import JobConfig
from kd.files import find_caches
from kd.progress import Event, SharedCapture
from services.process.lasting_loops import BlockLoop
from services.settings import Settings
from services.store.connection import describe_failure
from services.store.jobs.leases import BEAT_SECONDS, BEATS_PER_LEASE
from services.store.ranges import Membership, RangeTable, RangeView, ReportedProgress, TakenRange
from services.worker.stage_messages import RangeAnswer, RangeAsk

#: Opens the table of ranges with what its workers share, and the number of shards. It returns the
#: membership, or None if fenced.
OpenTable = Callable[[SharedCapture, int], Membership | None]

log = logging.getLogger("potstill.worker")


@dataclass(eq=False)
class RangeServer(BlockLoop):
    """Answers one child, and keeps its membership alive, with a lease in seconds.

    ``member`` is None for the child that leads the capture, until it opens the table with
    ``_open_table``; ``_report`` then gets the progress of all workers after each beat.
    """

    _table: RangeTable
    _lease: float
    member: Membership | None = None
    _open_table: OpenTable | None = None
    _report: Callable[[Event], None] | None = None
    #: Whether the capture goes on: "stop" and "fenced" tell a helper to end.
    reply: str = "go"
    _pipe: int | None = None
    _reported: ReportedProgress = field(default_factory=ReportedProgress)
    _total: int = 0
    _warnings: list[str] = field(default_factory=list)
    _known: frozenset[int] = frozenset()
    _asks: queue.SimpleQueue[RangeAsk] = field(default_factory=queue.SimpleQueue)
    _unanswered: RangeAsk | None = None

    loop: ClassVar[str] = "ranges"

    def __exit__(self, *_: object) -> None:
        super().__exit__()
        self.close_pipe()

    def open_pipe(self) -> int:
        """Open the pipe of the answers; return its end for the child."""
        read_end, self._pipe = os.pipe()
        return read_end

    def close_pipe(self) -> None:
        """Close the pipe, so that the child learns that no answer will come."""
        if self._pipe is not None:
            os.close(self._pipe)
            self._pipe = None

    def take(self, event: Event) -> bool:
        """Take an event of the child, if it is for this server; returns whether it is."""
        kind, data = event.type, event.data
        if kind == "ranges":
            self._asks.put(TypeAdapter(RangeAsk).validate_python(data))
            return True
        if kind == "progress" and self.member is not None and data.get("unit") == "sequences":
            rates = (data["per_second"], data["tokens"], data["tokens_per_second"])
            self._reported = ReportedProgress(data["done"], *rates)
            self._total = data["total"]
            return True
        if self._report is None and kind == "warning":
            self._warnings.append(data["message"])
        # The other events of a helper are reported for the job by the worker that leads.
        return self._report is None

    def leave(self, warning: str = "") -> None:
        """End the membership, if Redis answers; else its lease runs out."""
        if self.member is not None:
            with suppress(RedisError):
                self._table.leave(self.member, warning)

    def _run(self) -> None:
        interval = min(BEAT_SECONDS, self._lease / BEATS_PER_LEASE)
        beat_at = time.monotonic()
        while not self._closing.is_set():
            try:
                if time.monotonic() >= beat_at:
                    beat_at = time.monotonic() + interval
                    self._beat()
                self._answer_next(max(beat_at - time.monotonic(), 0.0))
            except RedisError as error:
                log.warning("no ranges while the job store %s", describe_failure(error))
                self._closing.wait(interval)

    def _answer_next(self, seconds: float) -> None:
        """Answer the next ask that comes within ``seconds``; one that failed is answered again."""
        if self._unanswered is None:
            try:
                self._unanswered = self._asks.get(timeout=min(seconds, 0.25))
            except queue.Empty:
                return
        answer = self._answer(self._unanswered)
        self._unanswered = None
        if answer is not None:
            self._send(asdict(answer))

    def _answer(self, ask: RangeAsk) -> RangeAnswer | None:
        if ask.ask == "open":
            assert self._open_table is not None and ask.shared is not None
            self.member = self._open_table(ask.shared, ask.shards)
            return RangeAnswer("stop" if self.member is None else "go")
        assert self.member is not None
        if ask.ask == "finish":
            self._table.finish(self.member, ask.number, ask.sequences)
            return None
        found = self._table.take(self.member)
        if isinstance(found, TakenRange):
            return RangeAnswer("range", found.number, found.first, found.stop)
        # A helper that another job needs ends like one for which nothing is left.
        return RangeAnswer("done" if found == "leave" else found)

    def _beat(self) -> None:
        if self.member is None:
            return
        warnings = list(self._warnings)
        answer = self._table.beat(self.member, self._lease, self._reported, warnings)
        del self._warnings[: len(warnings)]
        self.reply = answer.reply
        if answer.finished - self._known:
            self._known = answer.finished
            self._send({"finished": sorted(answer.finished)})
        if self._report is not None and (view := self._table.view(self.member.id)) is not None:
            self._report(compute_progress(view, self._total))

    def _send(self, answer: Json) -> None:
        if self._pipe is None:
            return
        with suppress(BrokenPipeError):  # the child has ended
            os.write(self._pipe, json.dumps(answer).encode() + b"\n")


def find_place(settings: Settings, config: JobConfig) -> str:
    """Return the name of the store of caches, which all workers of one capture must share."""
    return name_place(find_caches(settings.home, config.cache.store or settings.store))


def count_workers(config: JobConfig) -> int | None:
    """Return the number of workers that may capture for a job; None for any number."""
    wanted: Any = config.resources.workers
    return None if wanted == "auto" else int(wanted)


def compute_progress(view: RangeView, total: int) -> Event:
    """Return the progress event of all workers of a capture; ``total`` sequences in all."""
    done = min(view.sequences + view.unfinished, total)
    data = {
        "done": done,
        "total": total,
        "unit": "sequences",
        "fraction": round(done / total, 6) if total else 0.0,
        "eta_seconds": round((total - done) / view.pace, 1) if view.pace > 0 else None,
        "per_second": round(view.pace, 3),
        "tokens": view.tokens,
        "tokens_per_second": round(view.rate, 1),
    }
    return Event("progress", data)
