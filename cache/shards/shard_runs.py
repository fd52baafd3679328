"""Numbers of shards as runs of consecutive ones, so that a million of them take little memory."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import chain


@dataclass(frozen=True)
class ShardRuns:
    """Numbers of shards in some order. They are iterated, counted and looked up, never listed."""

    runs: tuple[range, ...]

    @classmethod
    def of(cls, numbers: Iterable[int]) -> ShardRuns:
        """Join each number of ``numbers`` that follows the one before it with that one."""
        runs: list[range] = []
        for number in numbers:
            if runs and runs[-1].stop == number:
                runs[-1] = range(runs[-1].start, number + 1)
            else:
                runs.append(range(number, number + 1))
        return cls(tuple(runs))

    @property
    def first(self) -> int:
        """The first number, of which there must be at least one."""
        return self.runs[0][0]

    @property
    def last(self) -> int:
        """The last number, of which there must be at least one."""
        return self.runs[-1][-1]

    def __len__(self) -> int:
        return sum(map(len, self.runs))

    def __iter__(self) -> Iterator[int]:
        return chain.from_iterable(self.runs)

    def __contains__(self, number: int) -> bool:
        return any(number in run for run in self.runs)

    def __add__(self, other: ShardRuns) -> ShardRuns:
        return ShardRuns(self.runs + other.runs)
