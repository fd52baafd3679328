"""How much one key may ask: a bucket of requests for each class, and a number of event streams open at once.

    post, get     a bucket that holds a minute's requests and fills up again steadily: a burst is fine, a flood is not
    sse           a lease for each open stream, renewed while it is read, so that those of a dead process are freed;
                  with it the key is looked at again, and the stream of a revoked one ends

Every answer says how much is left, by the headers RateLimit and RateLimit-Policy (IETF draft) and, with a 429,
Retry-After. Buckets and leases are in Redis, so that several API processes share them. Where Redis is away nobody is
counted: what needs the store fails by itself then, and what does not goes on.

kd:rate:{class}:{name}   hash   tokens left, and when that was so         kd:streams:{name}   zset   streams by lease
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
import uuid
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Any

from fastapi import Request
from fastapi.concurrency import run_in_threadpool
from redis.commands.core import Script
from redis.exceptions import RedisError

from services.api.problems import ApiProblem
from services.jobs import connect
from services.settings import Settings

WINDOW_SECONDS = 60
STREAM_LEASE_SECONDS = 30.0
#: Not worth a long wait: the store behind it has two seconds of its own, and every answer comes within three.
TIMEOUT_SECONDS = 0.5
AWAY_SECONDS = 5.0
SAFE_METHODS = frozenset({"GET", "HEAD", "OPTIONS"})

# Times are of the server's clock; one that jumps back gives no tokens, and takes none.
TAKE = """
local clock = redis.call('TIME')
local now = clock[1] * 1000 + math.floor(clock[2] / 1000)
local capacity, window = tonumber(ARGV[1]), tonumber(ARGV[2])
local rate = capacity / window
local before = redis.call('HMGET', KEYS[1], 'tokens', 'at')
local tokens = math.min(capacity, (before[1] or capacity) + math.max(0, now - (before[2] or now)) * rate)
local taken = tokens >= 1 and 1 or 0
tokens = tokens - taken
local full = math.ceil((capacity - tokens) / rate)
redis.call('HSET', KEYS[1], 'tokens', string.format('%.6f', tokens), 'at', now)
redis.call('PEXPIRE', KEYS[1], full + 1000)
return {taken, math.floor(tokens), math.ceil(math.max(0, 1 - tokens) / rate), full}
"""

# A stream that had its place keeps it, also where its lease ran out while Redis was away.
HOLD = """
local clock = redis.call('TIME')
local now = clock[1] * 1000 + math.floor(clock[2] / 1000)
local lease, most = tonumber(ARGV[2]), tonumber(ARGV[3])
redis.call('ZREMRANGEBYSCORE', KEYS[1], '-inf', now)
if most > 0 and redis.call('ZCARD', KEYS[1]) >= most then return 0 end
redis.call('ZADD', KEYS[1], now + lease, ARGV[1])
redis.call('PEXPIRE', KEYS[1], lease)
return 1
"""

log = logging.getLogger("potstill.api")


@dataclass
class Hold:
    """A place among the streams of a caller; ``lost`` once the stream must not go on."""

    lost: bool = False


class Limiter:
    """The buckets and leases of every caller. Thread-safe."""

    def __init__(self, settings: Settings) -> None:
        assert settings.redis_url is not None
        self._redis = connect(settings.redis_url, TIMEOUT_SECONDS)
        self._take, self._hold = self._redis.register_script(TAKE), self._redis.register_script(HOLD)
        self._rates = {"post": settings.rate_post, "get": settings.rate_get}
        self._streams = settings.rate_sse
        self._away_until = 0.0

    def close(self) -> None:
        """Close the connections."""
        self._redis.close()

    def take(self, request: Request, name: str) -> None:
        """Count a request of ``name``; raises ``ApiProblem`` 429 where its bucket is empty."""
        kind = "get" if request.method in SAFE_METHODS else "post"
        rate = self._rates[kind]
        reply = self._ask(self._take, f"kd:rate:{kind}:{name}", rate, WINDOW_SECONDS * 1000)
        if reply is None:
            return
        taken, left, wait_ms, full_ms = reply
        headers = {
            "RateLimit-Policy": f'"{kind}";q={rate};w={WINDOW_SECONDS}',
            "RateLimit": f'"{kind}";r={left};t={math.ceil(full_ms / 1000)}',
        }
        request.state.headers = headers
        if not taken:
            seconds = max(1, math.ceil(wait_ms / 1000))
            detail = f"{name} may send {rate} requests of this kind a minute."
            raise ApiProblem(429, detail, f"Try again in {seconds} s.", headers={"Retry-After": str(seconds)})

    @asynccontextmanager
    async def streaming(self, name: str, may_go_on: Callable[[], bool]) -> AsyncIterator[Hold]:
        """Hold one of the streams of ``name``; raises ``ApiProblem`` 429 where it has as many as it may.

        ``may_go_on`` is asked in a thread with every renewal of the lease; the hold is lost once it denies.
        """
        stream, key = uuid.uuid4().hex, f"kd:streams:{name}"
        if await self._renew(key, stream, self._streams) == 0:
            detail = f"{name} holds {self._streams} event streams open, and may not open more."
            remedy = "Close one, or read GET /jobs/{id}/events page by page."
            raise ApiProblem(429, detail, remedy, headers={"Retry-After": str(math.ceil(STREAM_LEASE_SECONDS))})
        hold = Hold()
        keeper = asyncio.create_task(self._keep(key, stream, hold, may_go_on))
        try:
            yield hold
        finally:
            keeper.cancel()
            with suppress(asyncio.CancelledError):
                await keeper
            await run_in_threadpool(self._forget, key, stream)

    async def _keep(self, key: str, stream: str, hold: Hold, may_go_on: Callable[[], bool]) -> None:
        while not hold.lost:
            await asyncio.sleep(STREAM_LEASE_SECONDS / 3)
            await self._renew(key, stream, 0)
            hold.lost = not await run_in_threadpool(may_go_on)

    async def _renew(self, key: str, stream: str, most: int) -> int | None:
        lease = int(STREAM_LEASE_SECONDS * 1000)
        reply: int | None = await run_in_threadpool(self._ask, self._hold, key, stream, lease, most)
        return reply

    def _forget(self, key: str, stream: str) -> None:
        with suppress(RedisError):  # its lease runs out
            self._redis.zrem(key, stream)

    def _ask(self, script: Script, key: str, *arguments: str | int) -> Any:
        """The script's reply, or None where Redis does not serve, which is not tried again for some seconds."""
        if time.monotonic() < self._away_until:
            return None
        try:
            return script(keys=[key], args=list(arguments))
        except RedisError as error:
            self._away_until = time.monotonic() + AWAY_SECONDS
            log.warning("requests are not counted for %.0f s: Redis does not serve: %s", AWAY_SECONDS, error)
            return None
