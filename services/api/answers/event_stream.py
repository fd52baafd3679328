"""The events of jobs as server-sent events, which keep the ids of their Redis streams.

One ``JobTail`` for each followed job reads the job's stream, however many clients follow the job:

    Redis stream --XREAD--> JobTail, which holds the newest events, each serialised once
                               |           |           |
                            client      client      client, each with its own place in the stream

A client whose place lies before the events that the tail holds reads pages from Redis by itself
until it has caught up. That holds for a client that begins, and for one that reads more slowly than
the job sends, so that no slow client takes memory or holds up the others.
"""

from __future__ import annotations

import asyncio
import time
from bisect import bisect_right
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from fastapi.responses import StreamingResponse
from fastapi.sse import KEEPALIVE_COMMENT, format_sse_event
from redis.asyncio import Redis
from redis.exceptions import RedisError

from kd.client.wire.jobs import TERMINAL_STATUSES

#: How long one read waits for new events: after each wait every stream checks whether it must end.
POLL_MS = 1000
#: Events of one read.
PAGE_EVENTS = 500
#: The events of a job, and their bytes, that a tail holds at most.
HELD_EVENTS = 1000
HELD_BYTES = 1 << 20
#: A client that got nothing for this time gets a comment, so that no proxy ends its stream.
PING_SECONDS = 15.0

#: The id of an event as Redis compares it: milliseconds and a number.
Place = tuple[int, int]
#: An event as Redis returns it: its id and its fields.
Entry = tuple[str, dict[str, str]]


class EventStreamResponse(StreamingResponse):
    """An answer of server-sent events that are serialised already."""

    media_type = "text/event-stream"


@dataclass(frozen=True)
class Page:
    """Events in the form in which they are sent; ``end`` is the place of the last of them."""

    end: Place
    content: bytes


class EventHub:
    """The tails of this process: one for each job that has followers. Not thread-safe."""

    def __init__(self, client: Redis) -> None:
        self._client = client
        self._tails: dict[str, JobTail] = {}

    @contextmanager
    def join_tail(self, job_id: str) -> Iterator[JobTail]:
        """Yield the tail of a job to one more follower. The tail ends with its last follower."""
        tail = self._tails.get(job_id)
        # A tail that has ended stays ended, but its job may have been queued again.
        if tail is None or tail.ended:
            tail = self._tails[job_id] = JobTail(self._client, job_id)
        tail.followers += 1
        try:
            yield tail
        finally:
            tail.followers -= 1
            if not tail.followers:
                tail.close()
                if self._tails.get(job_id) is tail:
                    del self._tails[job_id]


class JobTail:
    """The newest events of one job, which a task reads until the job has ended."""

    def __init__(self, client: Redis, job_id: str) -> None:
        self.followers = 0
        #: Whether no event will follow those that are held.
        self.ended = False
        self._client = client
        self._record = f"kd:job:{job_id}"
        self._stream = f"kd:job:{job_id}:events"
        self._places: list[Place] = []
        self._contents: list[bytes] = []
        self._held_bytes = 0
        #: The tail holds every event after this place; None until Redis has answered.
        self._start: Place | None = None
        self._changed = asyncio.Event()
        self._task = asyncio.create_task(self._run())

    def close(self) -> None:
        """Stop reading."""
        self._task.cancel()

    async def follow(self, after: str, stopping: Callable[[], bool]) -> AsyncIterator[bytes]:
        """Yield the events after id ``after`` until the job has ended; wait while Redis is away."""
        place = parse_place(after)
        quiet_since = time.monotonic()
        while not stopping():
            # Taken before the look at the events, so that no change is missed.
            changed = self._changed
            try:
                page = await self._read_page(place)
            except RedisError:
                # Not a wait for the tail, which may have ended.
                await asyncio.sleep(POLL_MS / 1000)
                continue
            if page is not None:
                place = page.end
                quiet_since = time.monotonic()
                yield page.content
            elif self.ended:
                return
            else:
                if time.monotonic() - quiet_since >= PING_SECONDS:
                    quiet_since = time.monotonic()
                    yield KEEPALIVE_COMMENT
                await changed.wait()

    async def find_newest(self) -> str:
        """Return the id of the newest event, as soon as Redis has answered."""
        while self._start is None and not self.ended:
            await self._changed.wait()
        place = self._places[-1] if self._places else self._start or (0, 0)
        return f"{place[0]}-{place[1]}"

    async def _read_page(self, place: Place) -> Page | None:
        """Return the next events after ``place``; None if there are none yet."""
        if self._start is None:
            return None
        if place < self._start:
            if entries := await self._read(place):
                return Page(parse_place(entries[-1][0]), b"".join(map(_serialise, entries)))
            # Redis has dropped the events between the two places.
            place = max(place, self._start)
        first = bisect_right(self._places, place)
        last = min(first + PAGE_EVENTS, len(self._places))
        if first == last:
            return None
        return Page(self._places[last - 1], b"".join(self._contents[first:last]))

    async def _run(self) -> None:
        try:
            while not self.ended:
                try:
                    self.ended = await self._read_more()
                except RedisError:
                    await asyncio.sleep(POLL_MS / 1000)
                self._wake_followers()
        finally:
            # If this task fails, its followers end, and their clients come back.
            self.ended = True
            self._wake_followers()

    async def _read_more(self) -> bool:
        """Hold the events that came since the last call; return whether no more can come."""
        # The status is read before the stream: if the job had ended by then, no event can follow
        # those that are read. A deleted job has no status, and counts as ended.
        status = await self._client.hget(self._record, "status") or "failed"
        ended = status in TERMINAL_STATUSES
        if self._start is None:
            newest: Any = await self._client.xrevrange(self._stream, count=1)
            self._start = parse_place(newest[0][0]) if newest else (0, 0)
            # The followers can begin to catch up now.
            self._wake_followers()
        place = self._places[-1] if self._places else self._start
        entries = await self._read(place, block=None if ended else POLL_MS)
        for entry in entries:
            content = _serialise(entry)
            self._places.append(parse_place(entry[0]))
            self._contents.append(content)
            self._held_bytes += len(content)
        self._release()
        return ended and len(entries) < PAGE_EVENTS

    async def _read(self, place: Place, block: int | None = None) -> list[Entry]:
        after = f"{place[0]}-{place[1]}"
        streams: Any = await self._client.xread(
            {self._stream: after}, count=PAGE_EVENTS, block=block
        )
        return streams[0][1] if streams else []

    def _release(self) -> None:
        """Let go of the oldest events above the limits."""
        count = 0
        while len(self._places) - count > HELD_EVENTS or self._held_bytes > HELD_BYTES:
            self._held_bytes -= len(self._contents[count])
            self._start = self._places[count]
            count += 1
        del self._places[:count]
        del self._contents[:count]

    def _wake_followers(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()


def parse_place(event_id: str) -> Place:
    """Return the two numbers of an event's id; the second is 0 if the id has only one."""
    milliseconds, _, number = event_id.partition("-")
    return int(milliseconds), int(number or 0)


def _serialise(entry: Entry) -> bytes:
    event_id, fields = entry
    # The data is JSON in Redis already, on one line.
    return format_sse_event(data_str=fields["data"], event=fields["type"], id=event_id)
