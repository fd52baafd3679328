"""``kd check``: whether a job's student, loss and optimiser can learn at all, before it runs for hours."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import typer

from services.terminal.console import (
    AsJson,
    Home,
    JobFile,
    Overrides,
    complain,
    err,
    load,
    make_settings,
    out,
    print_facts,
    print_json,
)

if TYPE_CHECKING:
    from kd.checks.verdict import Verdict

FAILED = 1

app = typer.Typer()


@app.command()
def check(job_file: JobFile, overrides: Overrides = None, home: Home = None, as_json: AsJson = False) -> None:
    """Train the student on a handful of sequences: it must learn them by heart, else say what is likely wrong."""
    from kd.checks.rehearsal import rehearse
    from kd.progress import Event, Monitor

    def show(event: Event) -> None:
        if event.type == "stage" and event.data.get("phase"):
            err.print(event.data["phase"])

    settings = make_settings(home=home)
    config = load(job_file, overrides)
    os.chdir(settings.root)  # what a job's relative paths resolve against
    verdict = rehearse(config, settings.home, Monitor(show))
    if as_json:
        print_json(verdict.to_json())
    else:
        _print(verdict)
    raise typer.Exit(0 if verdict.ok else FAILED)


def _print(verdict: Verdict) -> None:
    print_facts(_above_floor(verdict.facts))
    if not verdict.ok:
        complain(verdict.message, verdict.remedy)
        return
    out.print(verdict.message)
    if verdict.remedy:
        out.print(verdict.remedy)


def _above_floor(facts: dict[str, Any]) -> dict[str, Any]:
    """Every loss as what lies between it and the floor: itself it may be negative, where samples stand for a tail."""
    floor = facts["floor"]
    return {
        **facts,
        "before": f"{facts['before'] - floor:.3f} above the floor",
        "after": f"{facts['after'] - floor:.3f} above the floor",
        "tried": {rate: round(after - floor, 3) for rate, after in facts["tried"].items()},
    }
