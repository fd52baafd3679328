"""``kd check``: test in minutes whether a job's student, loss and optimiser can learn."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import typer

from services.terminal import console
from services.terminal.exit_codes import FAILED

app = typer.Typer()


@app.command()
def check(
    job_file: console.JobFile, overrides: console.Overrides = None, home: console.Home = None
) -> None:
    """Train the student on a few sequences until it knows them by heart.

    If it does not learn them, the command shows the likely cause.
    """
    from kd.overfit_check import check_overfitting
    from services.terminal.in_process import make_phase_monitor

    settings = console.make_settings(home=home)
    config = console.load_job_file(job_file, overrides)
    os.chdir(settings.root)  # a job's relative paths start there
    verdict = check_overfitting(config, settings.home, make_phase_monitor())
    if not console.print_as_json(verdict.to_json()):
        console.print_facts(_subtract_floor(verdict.facts))
        if verdict.ok:
            console.out.print("\n".join(filter(None, [verdict.message, verdict.remedy])))
        else:
            console.print_error(verdict.message, verdict.remedy)
    raise typer.Exit(0 if verdict.ok else FAILED)


def _subtract_floor(facts: Mapping[str, Any]) -> dict[str, Any]:
    """Return the facts with every loss as its distance from the floor.

    The loss itself may be negative if samples stand for the tail, which would puzzle a reader.
    """
    floor = facts["floor"]
    return {
        **facts,
        "before": f"{facts['before'] - floor:.3f} above the floor",
        "after": f"{facts['after'] - floor:.3f} above the floor",
        "tried": {rate: round(after - floor, 3) for rate, after in facts["tried"].items()},
    }
