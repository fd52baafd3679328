"""A job's events on a terminal: a bar per stage. Where nobody looks (a pipe, a log) a plain line now and then."""

from __future__ import annotations

import time
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TaskID, TextColumn
from rich.table import Column
from rich.text import Text

from services.schemas import TERMINAL

LINE_SECONDS = 10.0


class Display:
    """Shows events as they come; one for a whole job."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._progress = Progress(
            SpinnerColumn(finished_text="✓"),
            TextColumn("{task.description:<22}"),
            BarColumn(bar_width=16),
            TextColumn("{task.fields[note]}", table_column=Column(no_wrap=True)),
            console=console,
            disable=not console.is_terminal,
        )
        self._bars: dict[str, TaskID] = {}
        self._stage = ""
        self._metrics: dict[str, Any] = {}
        self._line_at = 0.0

    def __enter__(self) -> Display:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def show(self, kind: str, data: dict[str, Any]) -> None:
        """Show one event."""
        handler = getattr(self, f"_on_{kind}", None)
        if handler is not None:
            handler(data)

    def _on_stage(self, data: dict[str, Any]) -> None:
        self._stage = data.get("stage") or self._stage
        phase = data.get("phase") or ""
        bar = self._bar()
        self._progress.update(bar, description=f"{self._stage} · {phase}" if phase else self._stage)
        self._plain(phase)

    def _on_progress(self, data: dict[str, Any]) -> None:
        note = _note(data, self._metrics)
        done, total = data.get("done"), data.get("total")
        self._progress.update(self._bar(), completed=done or 0, total=total, note=note)
        if done == total or time.monotonic() - self._line_at > LINE_SECONDS:
            self._plain(note)

    def _on_metrics(self, data: dict[str, Any]) -> None:
        self._metrics |= data

    def _on_evaluation(self, data: dict[str, Any]) -> None:
        parts = [_number("held-out perplexity", data.get("validation_perplexity"), ".2f")]
        parts += [_number("KL", data.get("validation_kl"), ".3f")]
        parts += [_number("agreement", data.get("validation_agreement"), ".1%")]
        self._say(f"step {data.get('step')}: " + ", ".join(filter(None, parts)))

    def _on_cache(self, data: dict[str, Any]) -> None:
        reused = " (captured before)" if data.get("reused") else ""
        whole = "every byte is as it was sealed" if data.get("verified") else ""
        size = _number("bytes per token", data.get("bytes_per_token"), ".1f")
        facts = ", ".join(filter(None, [size, whole]))
        self._say(": ".join(filter(None, [f"cache {str(data.get('fingerprint'))[:12]}", facts])) + reused)

    def _on_reason(self, data: dict[str, Any]) -> None:
        self._say(str(data["reason"]))

    def _on_warning(self, data: dict[str, Any]) -> None:
        self._say(f"warning: {data.get('message')}")

    def _on_status(self, data: dict[str, Any]) -> None:
        self._stage = data.get("stage") or self._stage
        if data["status"] in ("cancelling", "pausing"):
            self._say(f"{data['status']}: the run saves its state and stops")
        elif data["status"] in (*TERMINAL, "paused"):
            self._say(data["status"])
        else:
            self._plain(data["status"])

    def _bar(self) -> TaskID:
        if self._stage not in self._bars:
            for bar in self._bars.values():  # what came before is over, whether it counted anything or not
                self._progress.update(bar, total=1, completed=1)
            self._bars[self._stage] = self._progress.add_task(self._stage, total=None, note="")
        return self._bars[self._stage]

    def _say(self, text: str) -> None:
        self._progress.console.print(Text(text))

    def _plain(self, text: str) -> None:
        """A line of the stage, where there is one: not all that is shown is a job."""
        if not self._console.is_terminal:
            self._line_at = time.monotonic()
            self._say(f"{self._stage}: {text}" if self._stage else text)


def _note(progress: dict[str, Any], metrics: dict[str, Any]) -> str:
    parts = [f"{progress.get('done')}/{progress.get('total')} {progress.get('unit') or ''}"]
    if progress.get("eta_seconds"):
        minutes, seconds = divmod(int(progress["eta_seconds"]), 60)
        parts.append(f"{minutes // 60}:{minutes % 60:02}:{seconds:02} left")
    if progress.get("tokens_per_second"):
        parts.append(f"{progress['tokens_per_second']:,.0f} tok/s")
    parts += [_number("loss", metrics.get("loss"), ".3f"), _number("ppl", metrics.get("perplexity"), ".1f")]
    return "  ".join(filter(None, parts))


def _number(name: str, value: float | None, form: str) -> str:
    return "" if value is None else f"{name} {value:{form}}"
