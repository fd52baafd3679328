"""Show a job's events: a progress bar for each stage, or plain lines in a pipe or a log."""

from __future__ import annotations

import time

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TaskID, TextColumn
from rich.table import Column
from rich.text import Text

from cache.json_object import Json
from kd.checks.slow_rank import RANK_SECONDS, compare_ranks, count_by_host
from kd.client.wire.history import JobEvent
from kd.client.wire.jobs import TERMINAL_STATUSES
from kd.progress import Event
from services.terminal.console import err

#: The least time between two progress lines in a pipe or a log.
LINE_SECONDS = 10.0


class Display:
    """Shows the events of one job as they come."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._progress = Progress(
            SpinnerColumn(finished_text="✓"),
            TextColumn("{task.description:<22}"),
            BarColumn(bar_width=16),
            TextColumn("{task.fields[note]}", table_column=Column(no_wrap=True)),
            console=console,
            # In a pipe or a log, a bar would only leave control characters.
            disable=not console.is_terminal,
        )
        self._bars: dict[str, TaskID] = {}
        self._stage = ""
        self._metrics: Json = {}
        self._ranks = ""
        self._line_at = 0.0

    def __enter__(self) -> Display:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def show(self, event: Event | JobEvent) -> None:
        """Show one event; types without a handler below are ignored."""
        handler = getattr(self, f"_on_{event.type}", None)
        if handler is not None:
            handler(event.data)

    def _on_stage(self, data: Json) -> None:
        self._stage = data.get("stage") or self._stage
        phase = data.get("phase") or ""
        bar = self._find_bar()
        self._progress.update(bar, description=f"{self._stage} · {phase}" if phase else self._stage)
        self._print_line(phase)

    def _on_progress(self, data: Json) -> None:
        note = _format_progress(data, self._metrics)
        done, total = data.get("done"), data.get("total")
        self._progress.update(self._find_bar(), completed=done or 0, total=total, note=note)
        if done == total or time.monotonic() - self._line_at > LINE_SECONDS:
            self._print_line(note)

    def _on_metrics(self, data: Json) -> None:
        self._metrics |= data

    def _on_scalars(self, data: Json) -> None:
        head = f"{RANK_SECONDS}/"
        named = {name.removeprefix(head): data[name] for name in data if name.startswith(head)}
        if not named:
            return
        self._metrics["slowest"] = next(iter(compare_ranks(named).items()))
        if (ranks := f"{len(named)} ranks: {count_by_host(named)}") != self._ranks:
            self._ranks = ranks
            self._print(ranks)

    def _on_check(self, data: Json) -> None:
        if not data["ok"]:
            self._on_warning({"message": f"{data['message']} {data['remedy']}".strip()})

    def _on_evaluation(self, data: Json) -> None:
        parts = [
            _format_perplexity(data),
            _format_number("KL", data.get("validation_kl"), ".3f"),
            _format_number("agreement", data.get("validation_agreement"), ".1%"),
        ]
        self._print(f"step {data.get('step')}: " + ", ".join(filter(None, parts)))

    def _on_cache(self, data: Json) -> None:
        facts = [
            _format_number("bytes per token", data.get("bytes_per_token"), ".1f"),
            "no byte has changed since it was sealed" if data.get("verified") else "",
            "faithful to its teacher" if data.get("faithful") else "",
        ]
        parts = [f"cache {str(data.get('fingerprint'))[:12]}", ", ".join(filter(None, facts))]
        reused = " (captured before)" if data.get("reused") else ""
        self._print(": ".join(filter(None, parts)) + reused)

    def _on_reason(self, data: Json) -> None:
        self._print(str(data["reason"]))

    def _on_warning(self, data: Json) -> None:
        text = f"warning: {data.get('message')}"
        # A quiet console drops what it is given, and a warning is not progress.
        err.print(text, markup=False) if self._console.quiet else self._print(text)

    def _on_status(self, data: Json) -> None:
        self._stage = data.get("stage") or self._stage
        if data["status"] in ("cancelling", "pausing"):
            self._print(f"{data['status']}: the job saves its state and stops")
        elif data["status"] in (*TERMINAL_STATUSES, "paused"):
            self._print(data["status"])
        else:
            self._print_line(data["status"])

    def _find_bar(self) -> TaskID:
        if self._stage not in self._bars:
            for bar in self._bars.values():
                # A new stage means that the earlier ones are done, even if they counted nothing.
                self._progress.update(bar, total=1, completed=1)
            self._bars[self._stage] = self._progress.add_task(self._stage, total=None, note="")
        return self._bars[self._stage]

    def _print(self, text: str) -> None:
        self._progress.console.print(Text(text))

    def _print_line(self, text: str) -> None:
        """Print a line in a pipe or a log; the display may have no stage, as for an import."""
        if not self._console.is_terminal:
            self._line_at = time.monotonic()
            self._print(f"{self._stage}: {text}" if self._stage else text)


def _format_progress(progress: Json, metrics: Json) -> str:
    parts = [f"{progress.get('done')}/{progress.get('total')} {progress.get('unit') or ''}"]
    if progress.get("eta_seconds"):
        minutes, seconds = divmod(int(progress["eta_seconds"]), 60)
        parts.append(f"ETA {minutes // 60}:{minutes % 60:02}:{seconds:02}")
    if progress.get("tokens_per_second"):
        parts.append(f"{progress['tokens_per_second']:,.0f} tok/s")
    parts += [
        _format_number("loss", metrics.get("loss"), ".3f"),
        _format_number("train ppl", metrics.get("train_perplexity"), ".1f"),
        "slowest {} ({:.2f} x)".format(*metrics["slowest"]) if "slowest" in metrics else "",
    ]
    return "  ".join(filter(None, parts))


def _format_perplexity(data: Json) -> str:
    """The held-out perplexity with its tokens, and with its interval where they are few."""
    perplexity, tokens = data.get("validation_perplexity"), data.get("validation_tokens")
    if perplexity is None or tokens is None:
        return _format_number("held-out perplexity", perplexity, ".2f")
    low, high = (data.get(f"validation_perplexity_{end}") for end in ("low", "high"))
    ends = "" if low is None or high is None else f", 95 % interval {low:,.2f} to {high:,.2f}"
    return f"held-out perplexity {perplexity:.2f} ({tokens:,} tokens{ends})"


def _format_number(name: str, value: float | None, form: str) -> str:
    return "" if value is None else f"{name} {value:{form}}"
