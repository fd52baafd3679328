"""Progress bars of a run, in a terminal and in a notebook, from its events."""

from __future__ import annotations

import sys
import time
import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from cache.json_object import Json
from kd.progress import Event

#: Seconds between two lines of progress where no bar is drawn.
LINE_SECONDS = 30.0


class ProgressBars(AbstractContextManager["ProgressBars"]):
    """Shows one bar for each stage of a run, and its warnings; ``shown`` False keeps it silent.

    Use it as a context: at the end it closes the bars. ``warnings`` are all that the run sent.
    """

    def __init__(self, shown: bool = True) -> None:
        self._shown = shown
        self._stage = ""
        self._bar: Any = None
        self._notes: dict[str, str] = {}
        self._told_at = 0.0
        self.warnings: list[str] = []
        # A widget in a notebook, or text where ipywidgets is missing. Loaded before transformers
        # loads it, because it warns once of the missing ipywidgets.
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            from tqdm.auto import tqdm
        self._tqdm: Any = tqdm

    def __exit__(self, *_: object) -> None:
        self._close()

    def listen(self, event: Event) -> None:
        """Show one event; types that no bar shows are ignored."""
        if event.type == "warning":
            self.warnings.append(str(event.data.get("message")))
            self.tell(f"warning: {event.data.get('message')}")
        elif self._shown and event.type in ("stage", "progress", "metrics", "evaluation"):
            getattr(self, f"_show_{event.type}")(event.data)

    def tell(self, message: str) -> None:
        """Print a line on standard error, above the bar."""
        if not self._shown:
            return
        if self._bar is None:
            print(message, file=sys.stderr)  # noqa: T201  the line is the purpose
        else:
            self._bar.write(message, file=sys.stderr)

    def _show_stage(self, data: Json) -> None:
        stage = data.get("stage") or self._stage
        if stage != self._stage or self._bar is None:
            self._close()
            self._stage = stage
            # None: no bar where the output is no terminal. That of a notebook says that it is none.
            disable = False if "ipykernel" in sys.modules else None
            self._bar = self._tqdm(desc=stage, unit=" steps", disable=disable, dynamic_ncols=True)
        title = f"{stage}: {data['phase']}" if data.get("phase") else stage
        self._bar.set_description_str(title)
        self._tell_without_bar(title)

    def _show_progress(self, data: Json) -> None:
        if self._bar is None:
            return
        done, total = data.get("done"), data.get("total")
        self._bar.total = total
        self._bar.unit = f" {data.get('unit') or 'steps'}"
        # A smaller number is a new count.
        if int(done or 0) < self._bar.n:
            self._bar.reset(total=total)
        # ``update`` keeps to the least time between two drawings.
        self._bar.update(int(done or 0) - self._bar.n)
        if done == total or time.monotonic() - self._told_at > LINE_SECONDS:
            self._tell_without_bar(f"{self._stage}: {done} of {total}{self._bar.unit}")

    def _show_metrics(self, data: Json) -> None:
        self._note("loss", data.get("loss"))
        self._note("train ppl", data.get("train_perplexity"))

    def _show_evaluation(self, data: Json) -> None:
        self._note("held-out ppl", data.get("validation_perplexity"))
        # One that is not finite comes from another process as null.
        if (perplexity := data.get("validation_perplexity")) is not None:
            self._tell_without_bar(f"step {data.get('step')}: held-out perplexity {perplexity:.4g}")

    def _tell_without_bar(self, line: str) -> None:
        """Print a line where no bar is drawn: in a pipe or a log."""
        if self._bar is not None and self._bar.disable:
            self._told_at = time.monotonic()
            self.tell(line)

    def _note(self, name: str, value: Any) -> None:
        if isinstance(value, int | float) and self._bar is not None:
            self._notes[name] = f"{value:.4g}"
            self._bar.set_postfix(self._notes, refresh=False)

    def _close(self) -> None:
        if self._bar is not None:
            self._bar.refresh()
            self._bar.close()
            self._bar = None


@contextmanager
def library_bars_hidden() -> Iterator[None]:
    """Hide the bars of transformers, as a run does, and let it show them again afterwards."""
    from transformers.utils import logging

    bars: Any = logging  # its functions have no types
    shown = bars.is_progress_bar_enabled()
    bars.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            bars.enable_progress_bar()
