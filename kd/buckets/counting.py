"""How much of a download has come, how fast it comes, and how long the rest takes."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor, wait

from kd.files import format_bytes

#: Seconds between two reports.
_REPORT_SECONDS = 2.0
#: Bytes from which on the rate is worth telling.
_MEASURED_BYTES = 1 << 20

#: Receives a line about a download that goes on, and may raise to give up.
Report = Callable[[str], None]


class DownloadEnded(Exception):
    """Another part of the download has failed, or nobody wants it any more."""


class DownloadCount:
    """Bytes of the download of ``what`` that came so far, of ``total`` if that is known."""

    def __init__(self, what: str, total: int | None) -> None:
        self._what = what
        self._total = total
        self._bytes = 0
        self._ended = False
        self._began = time.monotonic()

    def add(self, size: int) -> None:
        """Count ``size`` more bytes; raise ``DownloadEnded`` where nothing more is to come."""
        if self._ended:
            raise DownloadEnded
        self._bytes += size

    def end(self) -> None:
        """Let every later ``add`` raise."""
        self._ended = True

    def describe(self) -> str:
        """Say how far the download is, its rate, and the time that is left."""
        parts = [format_bytes(self._bytes)]
        if self._total is not None:
            parts = [f"{parts[0]} of {format_bytes(self._total)}"]
        if self._bytes > _MEASURED_BYTES:
            pace = self._bytes / max(time.monotonic() - self._began, 1e-9)
            parts.append(f"{format_bytes(pace)} a second")
            if self._total is not None:
                parts.append(f"{_format_seconds(max(0, self._total - self._bytes) / pace)} left")
        return f"downloading {self._what}: {', '.join(parts)}"


def _format_seconds(seconds: float) -> str:
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"


def follow_download(
    count: DownloadCount, tasks: Iterable[Callable[[], object]], report: Report, parallel: int = 1
) -> None:
    """Carry out ``tasks``, some at a time, and report every two seconds; the first error ends all.

    Each task calls ``count.add`` for what has come.
    """
    reported_at = time.monotonic()
    with ThreadPoolExecutor(parallel, thread_name_prefix="download") as pool:
        try:
            left: set[Future[object]] = {pool.submit(task) for task in tasks}
            while left:
                done, left = wait(left, timeout=0.2)
                for each in done:
                    each.result()
                if time.monotonic() - reported_at > _REPORT_SECONDS:
                    reported_at = time.monotonic()
                    report(count.describe())
        except BaseException:
            count.end()
            pool.shutdown(wait=True, cancel_futures=True)
            raise
