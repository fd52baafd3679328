"""Jobs that train on text alone, and a stop in the middle of a run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from kd.config.job import JobConfig
from kd.config.jobfile import parse_config
from kd.progress import Event, Monitor
from kd.tracking.metrics import read_metrics


def make_text_job(train: dict[str, Any], **sections: Any) -> JobConfig:
    """Return a job on cross-entropy alone, with sequences of 16 tokens.

    The files that it names need not exist: a test passes its own source and student.
    """
    return parse_config(
        {
            "kind": "train",
            "student": {"init": {"layers": 2, "hidden_size": 16, "tokenizer": "."}},
            "data": {"train": "unused.txt", "sequence_length": 16},
            "loss": {"alpha": 1.0},
            "train": train,
            **sections,
        }
    )


def stop_after(step: int) -> Monitor:
    """Return a monitor that asks for a stop while ``step`` runs."""
    seen: list[int] = []

    def listen(event: Event) -> None:
        if event.type == "progress":
            seen.append(event.data["done"])

    return Monitor(listen, lambda: bool(seen) and seen[-1] >= step)


def read_history(run_dir: Path) -> list[dict[str, Any]]:
    """Return the lines of metrics.jsonl without what depends on the clock and the machine.

    The history of a run that was stopped must be that of an undisturbed one.
    """
    measured = ("throughput/", "loader/", "memory/")
    return [
        {name: value for name, value in line.items() if not name.startswith(measured)}
        for line in read_metrics(run_dir / "metrics.jsonl")
    ]
