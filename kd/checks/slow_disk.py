"""Watch whether training waits for the disk of its cache.

A run waits for data because the disk is slow, or because decoding is: only the disk is meant here.
So the seconds in which files were read must make up half of what the run waited, or more.
"""

from __future__ import annotations

from cache.reading.file_reads import DiskReads
from kd.checks.watch import STARVATION_SHARE, WARM_UP, StepSeconds
from kd.config.train import TrainConfig
from kd.text.steps.reading import count_loader_threads

#: Steps over which rates are taken. Few, so that a slow disk is told at the start of a run.
STEPS = 10
#: The least share of the wait that was spent on reading files.
DISK_SHARE = 0.5


class DiskWatch:
    """The watch over the disk of one run, which warns once.

    ``reads`` are those of the source. It is silent if they are None: all sequences are in memory,
    or the job wants no alarms.
    """

    def __init__(self, options: TrainConfig, reads: DiskReads | None) -> None:
        self._train = options
        self._reads = reads
        self._steps = 0
        self._begin()

    def _begin(self) -> None:
        """Begin to count anew."""
        self._waited = self._worked = 0.0
        self._tokens = 0
        self._bytes_before = 0 if self._reads is None else self._reads.bytes
        self._seconds_before = 0.0 if self._reads is None else self._reads.seconds

    def observe_step(self, tokens: int, seconds: StepSeconds) -> str | None:
        """Record a step of ``tokens`` targets; return the warning if it is time for one."""
        if self._reads is None:
            return None
        self._steps += 1
        self._waited += seconds.waited
        self._worked += seconds.worked
        self._tokens += tokens
        if self._steps == WARM_UP:
            self._begin()
        if self._steps <= WARM_UP or (self._steps - WARM_UP) % STEPS:
            return None
        warning = self._describe(self._reads)
        self._begin()
        if warning is not None:
            self._reads = None  # it has been told
        return warning

    def _describe(self, reads: DiskReads) -> str | None:
        whole = self._waited + self._worked
        # Seconds of threads that read at the same time add up.
        reading = (reads.seconds - self._seconds_before) / max(count_loader_threads(self._train), 1)
        share = self._waited / max(whole, 1e-9)
        if share <= STARVATION_SHARE or reading < DISK_SHARE * self._waited:
            return None
        rate = (reads.bytes - self._bytes_before) / max(reading, 1e-9) / 1e6
        taken = self._tokens / max(self._worked, 1e-9)
        return (
            f"The disk of the cache is slow: it gives {rate:.3g} MB/s. The last {STEPS} steps "
            f"waited for data {share:.0%} of their time, and took {self._tokens / whole:,.0f} "
            f"tokens/s; without waiting they would take {taken:,.0f}. Set train.order "
            f"(now {self._train.order}) to windows, or copy the cache to a local disk."
        )
