"""A job's events as they leave the API: its Redis stream as server-sent events, whose ids are the stream's."""

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

from services.jobs import MOST_CONNECTIONS
from services.schemas import TERMINAL

POLL_MS = 1000
PAGE = 500


def event_client(url: str) -> Redis:
    """A client for streams: one connection per listener, time-outs longer than the polls."""
    return Redis.from_url(
        url,
        protocol=2,
        decode_responses=True,
        socket_timeout=5,
        socket_connect_timeout=2,
        max_connections=MOST_CONNECTIONS,
        retry=Retry(NoBackoff(), 0),
    )


async def follow(
    client: Redis, job_id: str, after: str, stopping: Callable[[], bool]
) -> AsyncIterator[ServerSentEvent]:
    """Events after stream id ``after`` until the job has ended; waits where Redis is away."""
    while not stopping():
        try:
            # The status first: seen as ended before the stream is read, nothing can follow what is read.
            ended = (await client.hget(f"kd:job:{job_id}", "status") or "failed") in TERMINAL  # or deleted
            entries = await _read(client, job_id, after, wait=not ended)
        except RedisError:
            await asyncio.sleep(POLL_MS / 1000)
            continue
        for after, fields in entries:
            yield ServerSentEvent(id=after, event=fields["type"], data=json.loads(fields["data"]))
        if ended and len(entries) < PAGE:
            return


async def _read(client: Redis, job_id: str, after: str, wait: bool) -> list[tuple[str, dict[str, Any]]]:
    block = POLL_MS if wait else None
    streams: Any = await client.xread({f"kd:job:{job_id}:events": after}, count=PAGE, block=block)
    return streams[0][1] if streams else []
