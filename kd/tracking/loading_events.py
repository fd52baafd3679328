"""Report the loading of a model's weights, which may take minutes, as the progress of a run.

transformers draws a bar for it, and lets one function decide what is drawn: ``set_tqdm_hook``.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sized
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import transformers

from kd.progress import Monitor, ProgressMeter

#: The bars that count weights begin with this word; others count files to write and the like.
_LOADING = "Loading"
#: Seconds of loading before the first report, and between two reports.
_SECONDS = 2.0


@contextmanager
def reported_loading(monitor: Monitor) -> Iterator[None]:
    """Report the weights that transformers loads in this block, as events ``progress``.

    A model that is loaded within two seconds is not reported.
    """

    def make_bar(
        make: Callable[..., Any], arguments: tuple[Any, ...], options: dict[str, Any]
    ) -> Any:
        bar = make(*arguments, **options)
        items = arguments[0] if arguments else options.get("iterable")
        total = options.get("total") or (len(items) if isinstance(items, Sized) else None)
        if total is None or not str(options.get("desc", "")).startswith(_LOADING):
            return bar
        return _ReportedBar(bar, ProgressMeter(total, "weights"), monitor)

    before = transformers.utils.logging.set_tqdm_hook(make_bar)
    try:
        yield
    finally:
        transformers.utils.logging.set_tqdm_hook(before)


class _ReportedBar(AbstractContextManager["_ReportedBar"]):
    """A bar of tqdm that also reports what it counts."""

    def __init__(self, bar: Any, meter: ProgressMeter, monitor: Monitor) -> None:
        self._bar = bar
        self._meter = meter
        self._monitor = monitor
        self._new = 0
        self._reported_at = time.monotonic()

    def __iter__(self) -> Iterator[Any]:
        for item in self._bar:
            yield item
            self._count(1)

    def update(self, count: int = 1) -> None:
        """Count ``count`` more weights."""
        self._bar.update(count)
        self._count(count)

    def _count(self, count: int) -> None:
        self._new += count
        if time.monotonic() - self._reported_at < _SECONDS:
            return
        self._monitor.emit("progress", **self._meter.advance(self._new, 0))
        self._new = 0
        self._reported_at = time.monotonic()

    def __exit__(self, *_: object) -> None:
        self._bar.close()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._bar, name)
