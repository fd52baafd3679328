"""Searches for a learning rate: their jobs, and a study that exists only in this process."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from bench.support.harness import make_config
from kd.search.study import make_study, should_prune

RATES = {"train.learning_rate": {"min": 1e-4, "max": 0.9, "log": True}}


def search_job(**changes: Any) -> dict[str, Any]:
    """Return the sections of a search with four short trials, with ``changes`` applied."""
    search = {
        "space": RATES,
        "trials": 4,
        "sampler": "random",
        **changes.pop("search", {}),
    }
    steps = {"max_steps": 3, "eval_steps": 1}
    return {
        "data": {"train": "text.txt", "validation_fraction": 0.1},
        "train": steps,
        "search": search,
        **changes,
    }


class Memory:
    """A journal of a study that is only in memory."""

    def __init__(self) -> None:
        self.lines: list[dict[str, Any]] = []

    def read_logs(self, log_number_from: int) -> Iterator[dict[str, Any]]:
        yield from self.lines[log_number_from:]

    def append_logs(self, logs: list[dict[str, Any]]) -> None:
        self.lines += logs


def memory_study_runs() -> None:
    """Run a study of 15 trials with its sampler in this process."""
    job = make_config(
        "sweep",
        "search",
        **search_job(search={"sampler": "tpe", "trials": 15}),
    )
    study = make_study(job, Memory())
    while trial := study.start_trial():
        values = study.suggest_values(trial)
        study.report_loss(trial, 1, values["train.learning_rate"])
        should_prune(trial)
        study.end_trial(trial, "complete")
