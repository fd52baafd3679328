"""Turns at one thing that answers one order at a time, fair between groups of those who wait."""

from __future__ import annotations

import itertools
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass


class NoTurn(Exception):
    """No turn came in time, or too many of the same group wait."""


@dataclass(eq=False)
class _Waiting:
    group: str
    is_sent_away: bool = False


class Turns:
    """Gives the next turn to the group whose last one is longest ago. Thread-safe.

    ``most`` may wait. Where they do, the group of which most wait loses its latest one to another.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._changed = threading.Condition()
        self._waiting: list[_Waiting] = []
        self._is_taken = False
        self._numbers = itertools.count(1)
        #: The number of the last turn of each group.
        self._last: dict[str, int] = {}

    @contextmanager
    def take(self, group: str, seconds: float) -> Iterator[None]:
        """Have a turn in this block; raise ``NoTurn`` if none comes within ``seconds``."""
        mine = _Waiting(group)
        with self._changed:
            self._make_room(group)
            self._waiting.append(mine)
            came = self._changed.wait_for(lambda: self._has_come(mine), seconds)
            self._waiting.remove(mine)
            if not came or mine.is_sent_away:
                self._changed.notify_all()
                raise NoTurn
            self._is_taken = True
            self._last[group] = next(self._numbers)
        try:
            yield
        finally:
            with self._changed:
                self._is_taken = False
                self._changed.notify_all()

    def _has_come(self, mine: _Waiting) -> bool:
        staying = [each for each in self._waiting if not each.is_sent_away]
        first = min(staying, key=lambda each: self._last.get(each.group, 0), default=None)
        return mine.is_sent_away or (not self._is_taken and first is mine)

    def _make_room(self, group: str) -> None:
        counts = Counter(each.group for each in self._waiting if not each.is_sent_away)
        if counts.total() < self._most:
            return
        largest, count = counts.most_common(1)[0]
        if counts[group] + 1 >= count:
            raise NoTurn
        latest = [each for each in self._waiting if each.group == largest][-1]
        latest.is_sent_away = True
        self._changed.notify_all()
