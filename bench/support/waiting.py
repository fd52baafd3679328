"""Wait for something to become true, in benches and tests. It needs nothing of the service."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

#: Longer than anything here takes on a busy machine: it bounds a failure and measures nothing.
PATIENCE_SECONDS = 600.0


def wait_until(condition: Callable[[], T], seconds: float = PATIENCE_SECONDS) -> T:
    """Wait for the first true value of ``condition`` and return it."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if value := condition():
            return value
        time.sleep(0.03)
    raise AssertionError(f"not true within {seconds} s")
