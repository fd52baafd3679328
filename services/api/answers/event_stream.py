"""A job's Redis stream as server-sent events, which keep the ids of the stream."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from typing import Any

from fastapi.sse import ServerSentEvent
from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import RedisError

from services.store.connection import MOST_CONNECTIONS
from services.store.schemas import TERMINAL_STATUSES

#: How long one read waits for new events: after each wait the stream checks whether it must end.
POLL_MS = 1000
#: Events of one read.
PAGE_EVENTS = 500


def connect_events(url: str) -> Redis:
    """Return a client for streams: one connection per listener, time-outs longer than the polls."""
    return Redis.from_url(
        url,
        protocol=2,
        decode_responses=True,
        socket_timeout=5,
        socket_connect_timeout=2,
        max_connections=MOST_CONNECTIONS,
        # No retries here: follow_events waits and reads again by itself.
        retry=Retry(NoBackoff(), 0),
    )


async def follow_events(
    client: Redis, job_id: str, after: str, stopping: Callable[[], bool]
) -> AsyncIterator[ServerSentEvent]:
    """Yield the events after id ``after`` until the job has ended; wait while Redis is away."""
    while not stopping():
        try:
            # The status is read before the stream: if the job had ended by then, no event can
            # follow those that are read. A deleted job has no status, and counts as ended.
            status = await client.hget(f"kd:job:{job_id}", "status") or "failed"
            ended = status in TERMINAL_STATUSES
            entries = await _read(client, job_id, after, wait=not ended)
        except RedisError:
            await asyncio.sleep(POLL_MS / 1000)
            continue
        for after, fields in entries:
            yield ServerSentEvent(id=after, event=fields["type"], data=json.loads(fields["data"]))
        if ended and len(entries) < PAGE_EVENTS:
            return


async def _read(
    client: Redis, job_id: str, after: str, wait: bool
) -> list[tuple[str, dict[str, Any]]]:
    block = POLL_MS if wait else None
    streams: Any = await client.xread(
        {f"kd:job:{job_id}:events": after}, count=PAGE_EVENTS, block=block
    )
    return streams[0][1] if streams else []
