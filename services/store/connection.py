"""Connections to the job store, and its name for Celery. ``redis_url.py`` explains the URLs."""

from __future__ import annotations

from typing import Any, NamedTuple, cast
from urllib.parse import quote, urlsplit

import redis.asyncio
import redis.asyncio.sentinel
from redis import Redis, exceptions
from redis.asyncio.retry import Retry as AsyncRetry
from redis.backoff import NoBackoff
from redis.retry import Retry
from redis.sentinel import Sentinel

from cache.errors import PotstillError
from services.redis_url import parse_sentinels, parse_tls

#: Connections of one client at most. The library's own limit of 100 would refuse request or
#: stream number 101.
MOST_CONNECTIONS = 10_000


def connect_redis(url: str, timeout: float = 2.0) -> Redis:
    """Return a client whose calls fail within ``timeout`` seconds."""
    # The library's own retries would turn 2 seconds into 25.
    more = {"socket_keepalive": True, "retry": Retry(NoBackoff(), 0)}
    return cast(Redis, _connect(Redis, Sentinel, url, timeout, timeout, **more))


def connect_events(url: str) -> redis.asyncio.Redis:
    """Return a client for streams of events, with time-outs that are longer than their polls."""
    # No retries here: a tail and its clients wait and read again by themselves.
    retry = AsyncRetry(NoBackoff(), 0)
    kinds = redis.asyncio.Redis, redis.asyncio.sentinel.Sentinel
    return cast(redis.asyncio.Redis, _connect(*kinds, url, 5, 2, retry=retry))


def _connect(
    client: Any, sentinel: Any, url: str, timeout: float, connect_timeout: float, **more: Any
) -> Any:
    """Make a client of one class, or the client of a master that the class ``sentinel`` finds."""
    options = {
        "protocol": 2,
        "decode_responses": True,
        "socket_timeout": timeout,
        "socket_connect_timeout": connect_timeout,
        "max_connections": MOST_CONNECTIONS,
        **more,
    }
    group = parse_sentinels(url)
    if group is None:
        return client.from_url(url, **options)
    limits = dict.fromkeys(("socket_timeout", "socket_connect_timeout"), connect_timeout)
    server = {"db": group.db, **group.credentials, **group.tls}
    watchers = sentinel(
        list(group.hosts), sentinel_kwargs={**limits, **group.tls}, **options, **server
    )
    return watchers.master_for(group.master)


def name_failure(error: Exception) -> str:
    """Say as the end of a sentence what a job store does in place of its work."""
    # The library has no class for a disk that cannot be written.
    if isinstance(error, exceptions.OutOfMemoryError) or str(error).startswith("MISCONF"):
        return "is full and takes no writes"
    if isinstance(error, exceptions.ReadOnlyError):
        return "is a read-only copy"
    if isinstance(error, exceptions.AuthenticationError):
        return "refuses the password"
    if isinstance(error, exceptions.NoPermissionError):
        return "does not allow this user a command"
    return "refuses a command" if isinstance(error, exceptions.ResponseError) else "does not answer"


def describe_failure(error: Exception) -> str:
    """Add the words of the error to its name; they may hold the address of the server."""
    return f"{name_failure(error)}: {str(error).rstrip('.') or type(error).__name__}"


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
    places = [f"[{host}]:{port}" if ":" in host else f"{host}:{port}" for host, port in group.hosts]
    urls = [f"sentinel://{user}@{place}/{group.db}" for place in places]
    asked = {"socket_timeout": socket_timeout, "socket_connect_timeout": socket_timeout}
    options = {"master_name": group.master, "sentinel_kwargs": {**asked, **group.tls}}
    return Broker(";".join(urls), options, tls or None)


# ---------------------------------------------------------------------- what a job store must be


class StoreUnsuitable(PotstillError):
    """The server of KD_REDIS_URL would lose jobs, or cannot run the scripts of the job store."""

    type = "store_unsuitable"


def ask_server(client: Redis, section: str | None = None) -> dict[str, Any]:
    """Return what INFO says; empty if this user may not ask. Raises ``RedisError``."""
    try:
        return client.info(section) if section else client.info()
    except exceptions.ResponseError:
        return {}


def require_suitable_store(client: Redis) -> None:
    """Raise ``StoreUnsuitable`` for a server that cannot be a job store."""
    if error := find_unsuitability(client):
        raise error


def find_unsuitability(client: Redis) -> StoreUnsuitable | None:
    """Find that the server belongs to a cluster, or removes keys when its memory is full."""
    if ask_server(client, "cluster").get("cluster_enabled"):
        return StoreUnsuitable(
            "The job store is a node of a Redis cluster, but the keys of a job must be on one "
            "server: a script changes several of them at once.",
            "Name a server without cluster mode in KD_REDIS_URL, or a master that Sentinel "
            "watches.",
        )
    memory = ask_server(client, "memory")
    policy = memory.get("maxmemory_policy", "noeviction")
    # Without a limit nothing is removed. Some servers do not show theirs.
    if policy != "noeviction" and memory.get("maxmemory", 1):
        return StoreUnsuitable(
            f"The job store removes keys when its memory is full (maxmemory-policy {policy}): "
            "jobs would vanish, and requests that are sent again would make second jobs.",
            "Set maxmemory-policy noeviction at the server.",
        )
    return None


def find_volatility(client: Redis) -> str:
    """Say that the server keeps nothing on a disk; empty if it does, or may not be asked."""
    found = ask_server(client, "persistence")
    if not found or found.get("aof_enabled"):
        return ""
    return "The job store keeps no append-only file: a crash of it loses jobs."
