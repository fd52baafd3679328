"""Ranks that somebody else has started: ``torchrun ... -m kd.rank JOB``, by Slurm or Kubernetes.

Rank 0 runs the pipeline of the job. The others wait, and take part in each stage that ranks share.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch.distributed as dist

from cache.json_object import Json
from kd.parallel.group import Group
from kd.progress import Monitor

#: How long the others wait for rank 0, which may capture alone for days.
PATIENCE = timedelta(days=365)
#: What a rank does of an order.
Work = Callable[[Json, Monitor, Group], Json]

_leading: list[StandingRanks] = []


def find_standing_ranks() -> StandingRanks | None:
    """The ranks that this process leads, if it was started with them."""
    return _leading[-1] if _leading else None


class StandingRanks:
    """All ranks of a torchrun, and ``work``, which each of them does of an order of rank 0."""

    def __init__(self, group: Group, work: Work) -> None:
        self.group = group
        self._work = work
        self._waiting = dist.new_group(backend="gloo", timeout=PATIENCE)

    @contextmanager
    def leading(self) -> Iterator[None]:
        """Give orders in the block, as rank 0; at its end the others are let go."""
        _leading.append(self)
        try:
            yield
            self._share(None)
        finally:
            _leading.remove(self)

    def run(self, order: Json, monitor: Monitor) -> Json:
        """Have all ranks work on ``order``; returns what rank 0 made."""
        self._share(order)
        return self._work(order, monitor, self.group)

    def follow(self, monitor: Monitor) -> None:
        """Work on the orders of rank 0 until it lets the others go."""
        while (order := self._share(None)) is not None:
            self._work(order, monitor, self.group)

    def _share(self, order: Json | None) -> Json | None:
        dist.barrier(self._waiting)
        found: Json | None = self.group.share(order)
        return found
