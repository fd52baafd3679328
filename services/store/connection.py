"""Connections to Redis."""

from __future__ import annotations

from redis import Redis
from redis.backoff import NoBackoff
from redis.retry import Retry

#: Connections of one client at most. The library's own limit of 100 would refuse request or
#: stream number 101.
MOST_CONNECTIONS = 10_000


def connect_redis(url: str, timeout: float = 2.0) -> Redis:
    """Return a client whose calls fail within ``timeout`` seconds."""
    return Redis.from_url(
        url,
        protocol=2,
        decode_responses=True,
        socket_timeout=timeout,
        socket_connect_timeout=timeout,
        socket_keepalive=True,
        max_connections=MOST_CONNECTIONS,
        # The library's own retries would turn 2 seconds into 25.
        retry=Retry(NoBackoff(), 0),
    )
