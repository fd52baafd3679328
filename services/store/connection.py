"""Connections to the job store, and its name for Celery. ``redis_url.py`` explains the URLs."""

from __future__ import annotations

from typing import Any, NamedTuple, cast
from urllib.parse import quote, urlsplit

import redis.asyncio
import redis.asyncio.sentinel
from redis import Redis
from redis.asyncio.retry import Retry as AsyncRetry
from redis.backoff import NoBackoff
from redis.retry import Retry
from redis.sentinel import Sentinel

from services.redis_url import parse_sentinels, parse_tls

#: Connections of one client at most. The library's own limit of 100 would refuse request or
#: stream number 101.
MOST_CONNECTIONS = 10_000


def connect_redis(url: str, timeout: float = 2.0) -> Redis:
    """Return a client whose calls fail within ``timeout`` seconds."""
    options: dict[str, Any] = {
        "protocol": 2,
        "decode_responses": True,
        "socket_timeout": timeout,
        "socket_connect_timeout": timeout,
        "socket_keepalive": True,
        "max_connections": MOST_CONNECTIONS,
        # The library's own retries would turn 2 seconds into 25.
        "retry": Retry(NoBackoff(), 0),
    }
    group = parse_sentinels(url)
    if group is None:
        return Redis.from_url(url, **options)
    asked = {"socket_timeout": timeout, "socket_connect_timeout": timeout, **group.tls}
    server: dict[str, Any] = {"db": group.db, **group.credentials, **group.tls}
    watchers: Any = cast(Any, Sentinel)(
        list(group.hosts), sentinel_kwargs=asked, **options, **server
    )
    found = watchers.master_for(group.master)
    return cast(Redis, found)


def describe_silence(error: Exception) -> str:
    """Say as the end of a sentence why a job store does not answer: the library's own words."""
    return str(error).rstrip(".")


def connect_events(url: str) -> redis.asyncio.Redis:
    """Return a client for streams of events, with time-outs that are longer than their polls."""
    options: dict[str, Any] = {
        "protocol": 2,
        "decode_responses": True,
        "socket_timeout": 5,
        "socket_connect_timeout": 2,
        "max_connections": MOST_CONNECTIONS,
        # No retries here: a tail and its clients wait and read again by themselves.
        "retry": AsyncRetry(NoBackoff(), 0),
    }
    group = parse_sentinels(url)
    if group is None:
        return redis.asyncio.Redis.from_url(url, **options)
    asked = {"socket_timeout": 2, "socket_connect_timeout": 2, **group.tls}
    server: dict[str, Any] = {"db": group.db, **group.credentials, **group.tls}
    watchers: Any = cast(Any, redis.asyncio.sentinel.Sentinel)(
        list(group.hosts), sentinel_kwargs=asked, **options, **server
    )
    found = watchers.master_for(group.master)
    return cast(redis.asyncio.Redis, found)


class Broker(NamedTuple):
    """The job store as Celery's transport names it."""

    url: str
    transport_options: dict[str, Any]
    #: Parameters of TLS; None without TLS.
    use_ssl: dict[str, Any] | None


def make_broker(url: str, socket_timeout: float) -> Broker:
    """Translate a URL of the job store for Celery; ``socket_timeout`` is in seconds."""
    tls = parse_tls(url)
    group = parse_sentinels(url)
    if group is None:  # the transport would take parameters of TLS from the URL, but not all
        return Broker(urlsplit(url)._replace(query="").geturl() if tls else url, {}, tls or None)
    user = ":".join(
        quote(group.credentials.get(name, ""), safe="") for name in ("username", "password")
    )
    urls = [f"sentinel://{user}@{host}:{port}/{group.db}" for host, port in group.hosts]
    asked = {"socket_timeout": socket_timeout, "socket_connect_timeout": socket_timeout}
    options = {"master_name": group.master, "sentinel_kwargs": {**asked, **group.tls}}
    return Broker(";".join(urls), options, tls or None)
