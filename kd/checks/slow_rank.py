"""Watch whether the other ranks wait for a slow one.

Ranks train in lock step: who waits for a slow rank needs as long for a step as that rank itself. So
the time of a whole step tells nothing, and only what a rank does between two exchanges with the
others is measured, by phases of the stopwatch:

    data      it waits for its own micro-batches
    forward   ddp: gradients are exchanged in the backward pass alone
    alone     fsdp, hsdp: the decoder layers, each after its weights were gathered
              pipeline: the forward pass of a stage, after it has received hidden states
    head      LM head and loss; fsdp gathers their weights before the forward pass

The backward pass does the same work on the same device, and is left out: gradients are exchanged in
it. The time of a rank is compared with the median of all ranks, of an even number with the lower of
the two in the middle: so a slow rank of two, or a slow host of two, is compared with a fast one.
Stages of a pipeline have different layers, so that a slow one is no alarm.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean, median, median_low

from kd.checks.verdict import Verdict, format_names

#: The phases of what a rank does alone, by ``train.strategy``. A step enters the first once.
OWN_PHASES = {
    "ddp": ("data", "forward", "head"),
    "fsdp": ("data", "alone", "head"),
    "hsdp": ("data", "alone", "head"),
    "pipeline": ("data", "alone"),
}
#: The kind of the scalars; the name of each is that of a rank.
RANK_SECONDS = "rank_seconds"
#: Times the median from which on a rank is slow.
SLOW_FACTOR = 1.3
#: A window has so many parts, of so many steps at least. The median of its parts counts: what
#: disturbs two of them is no alarm.
PARTS, PART_STEPS = 5, 10


def compare_ranks(seconds: Mapping[str, float]) -> dict[str, float]:
    """Return the seconds of each rank as a multiple of their median, the slowest rank first."""
    usual = max(median_low(seconds.values()), 1e-9)
    order = sorted(seconds, key=seconds.__getitem__, reverse=True)
    return {name: seconds[name] / usual for name in order}


def count_by_host(ranks: Iterable[str]) -> str:
    """Return how many of the ``ranks`` each host has, such as "2 on gpu-a, 2 on gpu-b"."""
    hosts = Counter(name.partition(" on ")[2] for name in ranks)
    return format_names([f"{count} on {host}" for host, count in hosts.items()])


class RankWatch:
    """The watch over the ranks of one run.

    A rank that is slow in two windows in a row is told once, and again only after two windows in
    which it was not. ``hosts`` has the name of each rank's host.
    """

    def __init__(
        self, hosts: Sequence[str], strategy: str, logging_steps: int, alarms: bool
    ) -> None:
        self.phases = OWN_PHASES.get(strategy, ())
        self._names = [f"rank {rank} on {host}" for rank, host in enumerate(hosts)]
        self._part = -(-PART_STEPS // logging_steps)
        self._alarms = alarms and len(hosts) > 1 and strategy != "pipeline"
        self._reports: list[Sequence[float]] = []
        self._slow: set[str] = set()
        self._told: set[str] = set()

    def name(self, seconds: Iterable[float]) -> dict[str, float]:
        """Return the ``seconds`` of all ranks by their names, such as "rank 1 on gpu-a"."""
        return dict(zip(self._names, seconds, strict=True))

    def observe(self, seconds: Mapping[str, float]) -> list[Verdict]:
        """Record the seconds of a step on each rank, a mean since the last report.

        Returns an alarm at the end of a window if it is due.
        """
        if self._alarms:
            self._reports.append([*seconds.values()])
        if len(self._reports) < PARTS * self._part:
            return []
        usual = self.name(map(self._find_usual, zip(*self._reports, strict=True)))
        self._reports.clear()
        times = compare_ranks(usual)
        before, self._slow = self._slow, {name for name in times if times[name] >= SLOW_FACTOR}
        new = (self._slow & before) - self._told
        self._told = (self._told | new) & (self._slow | before)
        named = [f"{name} ({times[name]:.2f} times the median)" for name in times if name in new]
        message = f"The other ranks wait for {format_names(named)}."
        return [Verdict("slow_rank", False, message, _REMEDY, {"seconds": usual})] if new else []

    def _find_usual(self, seconds: Sequence[float]) -> float:
        starts = range(0, len(seconds), self._part)
        return median(fmean(seconds[at : at + self._part]) for at in starts)


_REMEDY = (
    "Look for other programs, a hot device and a slow disk on its host, or train on other devices."
)
