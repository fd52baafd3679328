"""Values that stay in memory up to a limit, for several threads."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from threading import Lock
from typing import Any, Generic, TypeVar

Value = TypeVar("Value")


class KeptValues(Generic[Value]):
    """Values by key, kept until their sizes add up to more than ``limit``; threads may share them.

    ``measure`` returns the size of a value; each counts as 1 by default. The least recently used
    value is dropped first. A value that is larger than the limit is returned but not kept.
    """

    def __init__(self, limit: int, measure: Callable[[Value], int] = lambda _: 1) -> None:
        self.limit = limit
        self._measure = measure
        self._kept: OrderedDict[Hashable, Value] = OrderedDict()
        self._making: dict[Hashable, Lock] = {}
        self._lock = Lock()
        #: Size of all values that are kept.
        self.size = 0

    def get(self, key: Hashable, make: Callable[..., Value], *arguments: Any) -> Value:
        """Return the value of ``key``, which ``make(*arguments)`` makes if none is kept.

        ``make`` runs outside the lock: other keys are served meanwhile, and a thread that wants the
        same key waits. Errors of ``make`` pass through, and the next caller tries again.
        """
        with self._lock:
            if key in self._kept:
                self._kept.move_to_end(key)
                return self._kept[key]
            making = self._making.setdefault(key, Lock())
        with making:
            with self._lock:
                if key in self._kept:
                    return self._kept[key]
            try:
                value = make(*arguments)
                self._keep(key, value)
            finally:
                with self._lock:
                    self._making.pop(key, None)
        return value

    def _keep(self, key: Hashable, value: Value) -> None:
        size = self._measure(value)
        with self._lock:
            # Two threads may make the same value where it was dropped between their turns.
            if size > self.limit or key in self._kept:
                return
            self._kept[key] = value
            self.size += size
            while self.size > self.limit:
                _, dropped = self._kept.popitem(last=False)
                self.size -= self._measure(dropped)
