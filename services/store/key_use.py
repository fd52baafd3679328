"""When each API key was last used, in Redis: the key file holds only what the operator decided."""

from __future__ import annotations

import time
from contextlib import suppress
from datetime import UTC, datetime
from typing import cast

from redis import Redis
from redis.exceptions import RedisError

#: A hash: short id of a key -> the time of its last use, in milliseconds.
KEY = "kd:keys:used"
#: Uses of a key that follow each other within this time are one.
EVERY_SECONDS = 60.0


class KeyUse:
    """Notes uses, each key at most once a minute, so that a request seldom waits for it."""

    def __init__(self, client: Redis) -> None:
        self._redis = client
        self._noted = dict[str, float]()

    def note(self, key_id: str) -> None:
        """Note that a key was used now. A request goes on without it while Redis is away."""
        now = time.monotonic()
        if now - self._noted.get(key_id, -EVERY_SECONDS) < EVERY_SECONDS:
            return
        self._noted[key_id] = now
        with suppress(RedisError):
            self._redis.hset(KEY, key_id, str(round(time.time() * 1000)))

    def read(self) -> dict[str, datetime]:
        """Short ids of keys -> the times of their last uses. Raises ``RedisError``."""
        found = cast(dict[str, str], self._redis.hgetall(KEY))
        return {key: datetime.fromtimestamp(int(ms) / 1000, UTC) for key, ms in found.items()}
