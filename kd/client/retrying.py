"""How often and how long a client repeats a request, and when it gives up."""

from __future__ import annotations

import random
import time
from dataclasses import dataclass

from cache.errors import PotstillError
from kd.client.errors import Refused, Unreachable, is_transient
from kd.client.requests import Request
from kd.client.transport import Answer, Model, Transport, make_refused, parse_answer

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
        self.reset()

    def reset(self) -> None:
        """Begin anew: the server has answered."""
        self._pause = FIRST_PAUSE_SECONDS
        self._deadline: float | None = None

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


@dataclass(frozen=True)
class Retrier:
    """Sends each request until it succeeds, or ``patience`` seconds have passed."""

    transport: Transport
    patience: float

    def call(self, request: Request, *accepted: int, after_loss: int | None = None) -> Answer:
        """Send a request until it succeeds, or has a status of ``accepted``.

        ``after_loss`` is a status that is accepted once the answer to an earlier attempt was lost:
        that attempt may have done what is asked for. Raises ``Refused`` or ``Unreachable`` if
        another attempt is of no use, or came too late.
        """
        backoff = Backoff(self.patience)
        lost = False
        while True:
            try:
                answer = self.transport.send(request)
                expected = (*accepted, after_loss) if lost else accepted
                if answer.is_success or answer.status_code in expected:
                    return answer
                raise make_refused(answer)
            except (Refused, Unreachable) as error:
                lost = lost or isinstance(error, Unreachable)
                time.sleep(backoff.next_pause(error))

    def fetch(self, model: type[Model], request: Request) -> Model:
        """Send a request; return the answer as a ``model``."""
        return parse_answer(model, self.call(request))
