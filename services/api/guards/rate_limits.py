"""Limits of each key: its requests a minute, and its event streams open at one time.

    post, get, validate
                  A token bucket holds the requests of one minute and refills at a steady rate, so
                  that a burst is allowed and a flood is not.
    sse           Each open stream has a lease, which is renewed while the stream is read. The
                  leases of a dead process therefore run out. Each renewal checks the key again,
                  and the stream of a revoked key ends.

Every answer shows what is left in the headers RateLimit and RateLimit-Policy (IETF draft); a 429
also has Retry-After. Buckets and leases are in Redis, so that several API processes share them.
While Redis is away no request is counted: requests that need the store fail anyway, and the other
requests need not fail.

    kd:rate:{class}:{name}   hash   the tokens left, and the time of that count
    kd:streams:{name}        zset   the open streams, scored by the end of their lease
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
from functools import partial
from typing import Any

from fastapi import Request
from fastapi.concurrency import run_in_threadpool
from redis.commands.core import Script
from redis.exceptions import RedisError

from services.api.answers.problems import ApiProblem
from services.process.lasting_loops import keep_running_async
from services.settings import Settings
from services.store.connection import connect_redis, describe_failure

#: The time in which an empty bucket fills up.
WINDOW_SECONDS = 60
STREAM_LEASE_SECONDS = 30.0
#: Time-out of a count in Redis. It is short because the job store may then wait two more seconds,
#: and every answer should come within three.
TIMEOUT_SECONDS = 0.5
#: How long no request is counted after Redis failed to answer.
AWAY_SECONDS = 5.0
#: Methods that change nothing: they take from the bucket "get", and may come from any page.
SAFE_METHODS = frozenset({"GET", "HEAD", "OPTIONS"})

# Times come from Redis's clock. If it jumps back, the bucket neither gains nor loses tokens.
TAKE_SCRIPT = """
local clock = redis.call('TIME')
local now = clock[1] * 1000 + math.floor(clock[2] / 1000)
local capacity, window = tonumber(ARGV[1]), tonumber(ARGV[2])
local rate = capacity / window
local before = redis.call('HMGET', KEYS[1], 'tokens', 'at')
local refill = math.max(0, now - (before[2] or now)) * rate
local tokens = math.min(capacity, (before[1] or capacity) + refill)
local taken = tokens >= 1 and 1 or 0
tokens = tokens - taken
local full = math.ceil((capacity - tokens) / rate)
redis.call('HSET', KEYS[1], 'tokens', string.format('%.6f', tokens), 'at', now)
redis.call('PEXPIRE', KEYS[1], full + 1000)
return {taken, math.floor(tokens), math.ceil(math.max(0, 1 - tokens) / rate), full}
"""

# A limit of 0 renews a lease without a check of the limit: an open stream keeps its place even if
# its lease ran out while Redis was away.
HOLD_SCRIPT = """
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
class StreamLease:
    """One of the streams that a caller may hold; ``lost`` means that the stream must end."""

    lost: bool = False


class Limiter:
    """Counts the requests and the open streams of every caller. Thread-safe."""

    def __init__(self, settings: Settings) -> None:
        assert settings.redis_url is not None
        self._redis = connect_redis(settings.redis_url, TIMEOUT_SECONDS)
        self._take = self._redis.register_script(TAKE_SCRIPT)
        self._hold = self._redis.register_script(HOLD_SCRIPT)
        self._rates = {
            "post": settings.rate_post,
            "get": settings.rate_get,
            "validate": settings.rate_validate,
        }
        self._streams = settings.rate_sse
        self._away_until = 0.0

    def close(self) -> None:
        """Close the connections to Redis."""
        self._redis.close()

    def count_request(self, request: Request, name: str) -> None:
        """Count a request of ``name``; raise ``ApiProblem`` 429 if its bucket is empty.

        The rate headers are put into ``request.state.headers``, from which every answer has them.
        """
        self._count(request, name, "get" if request.method in SAFE_METHODS else "post")

    def count_validation(self, request: Request, name: str) -> None:
        """Count a validation besides, which costs far more than another request of a client."""
        self._count(request, name, "validate")

    def _count(self, request: Request, name: str, kind: str) -> None:
        rate = self._rates[kind]
        reply = self._ask(self._take, f"kd:rate:{kind}:{name}", rate, WINDOW_SECONDS * 1000)
        if reply is None:
            return
        taken, left, wait_ms, full_ms = reply
        headers = {
            "RateLimit-Policy": f'"{kind}";q={rate};w={WINDOW_SECONDS}',
            "RateLimit": f'"{kind}";r={left};t={math.ceil(full_ms / 1000)}',
        }
        request.state.headers = {**getattr(request.state, "headers", {}), **headers}
        if not taken:
            seconds = max(1, math.ceil(wait_ms / 1000))
            detail = f"{name} may send {rate} requests of this kind a minute."
            pause = {"Retry-After": str(seconds)}
            raise ApiProblem(429, detail, f"Try again in {seconds} s.", headers=pause)

    @asynccontextmanager
    async def streaming(
        self, name: str, may_go_on: Callable[[], bool]
    ) -> AsyncIterator[StreamLease]:
        """Hold one of the streams of ``name``; raise ``ApiProblem`` 429 if it holds too many.

        Every renewal of the lease calls ``may_go_on`` in a thread; the lease is lost once that
        returns False.
        """
        stream = uuid.uuid4().hex
        key = f"kd:streams:{name}"
        if await self._renew(key, stream, self._streams) == 0:
            detail = f"{name} holds {self._streams} event streams open, and may not open more."
            remedy = "Close one, or read GET /jobs/{id}/events page by page."
            pause = {"Retry-After": str(math.ceil(STREAM_LEASE_SECONDS))}
            raise ApiProblem(429, detail, remedy, headers=pause)
        lease = StreamLease()
        keep = partial(self._keep, key, stream, lease, may_go_on)
        keeper = asyncio.create_task(keep_running_async("stream-leases", keep))
        try:
            yield lease
        finally:
            keeper.cancel()
            with suppress(asyncio.CancelledError):
                await keeper
            with suppress(RedisError):  # the lease then runs out by itself
                await run_in_threadpool(self._redis.zrem, key, stream)

    async def _keep(
        self, key: str, stream: str, lease: StreamLease, may_go_on: Callable[[], bool]
    ) -> None:
        while not lease.lost:
            # A third of the lease, so that one renewal may fail without the loss of the place.
            await asyncio.sleep(STREAM_LEASE_SECONDS / 3)
            await self._renew(key, stream, 0)
            lease.lost = not await run_in_threadpool(may_go_on)

    async def _renew(self, key: str, stream: str, most: int) -> int | None:
        lease = int(STREAM_LEASE_SECONDS * 1000)
        reply: int | None = await run_in_threadpool(self._ask, self._hold, key, stream, lease, most)
        return reply

    def _ask(self, script: Script, key: str, *arguments: str | int) -> Any:
        """Return the script's reply, or None if Redis does not answer.

        After a failure Redis is left alone for ``AWAY_SECONDS``, so that not every request waits.
        """
        if time.monotonic() < self._away_until:
            return None
        try:
            return script(keys=[key], args=list(arguments))
        except RedisError as error:
            self._away_until = time.monotonic() + AWAY_SECONDS
            text = "requests are not counted for %.0f s: the job store %s"
            log.warning(text, AWAY_SECONDS, describe_failure(error))
            return None
