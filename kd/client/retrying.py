"""How long a client waits before it sends a request again, and when it gives up."""

from __future__ import annotations

import random
import time

from cache.errors import PotstillError
from kd.client.errors import is_transient

#: The first pause. Each further one is twice as long, up to ``MOST_PAUSE_SECONDS``.
FIRST_PAUSE_SECONDS = 0.25
MOST_PAUSE_SECONDS = 8.0


class Backoff:
    """Counts the pauses of one request.

    Exponential, with jitter, so that many clients do not come back at once. A ``Retry-After``
    of the server is respected. ``patience`` is how long a server may be away, in seconds.
    """

    def __init__(self, patience: float) -> None:
        self._patience = patience
        self._pause = FIRST_PAUSE_SECONDS
        self._deadline: float | None = None

    def reset(self) -> None:
        """Begin anew: the server has answered."""
        self._pause = FIRST_PAUSE_SECONDS
        self._deadline = None

    def next_pause(self, error: PotstillError) -> float:
        """Return the seconds to wait before the next attempt.

        Raises ``error`` if another attempt is of no use, or would come after the patience.
        """
        if not is_transient(error):
            raise error
        now = time.monotonic()
        if self._deadline is None:
            self._deadline = now + self._patience
        pause = max(self._pause * random.uniform(0.75, 1.25), getattr(error, "retry_after", 0.0))
        if now + pause > self._deadline:
            raise error
        self._pause = min(2 * self._pause, MOST_PAUSE_SECONDS)
        return pause
