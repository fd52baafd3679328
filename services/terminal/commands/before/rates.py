"""``kd lr``: the learning rate over a whole run, before it starts."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from services.terminal.console import (
    Home,
    JobFile,
    Overrides,
    load_job_file,
    make_settings,
    out,
    print_as_json,
    print_facts,
    print_table,
)

Plot = Annotated[Path | None, typer.Option("--out", help="Also plot the rates into this PNG file.")]

app = typer.Typer()


@app.command()
def lr(
    job_file: JobFile, overrides: Overrides = None, plot: Plot = None, home: Home = None
) -> None:
    """Show the learning rate over a job's whole run, as a table and a plot.

    Trains nothing. Use --set to try another schedule: --set train.lr_scheduler_type=cosine. A
    schedule that depends on the held-out loss is shown as if this loss never fell.
    """
    from kd.forecast.learning_rates import plan_rates

    settings = make_settings(home=home)
    config = load_job_file(job_file, overrides)
    picture = None if plot is None else plot.resolve()
    os.chdir(settings.root)  # a job's relative paths start there
    found = plan_rates(config, settings.root, settings.home)
    if picture is not None:
        found.draw(picture)
    if print_as_json(found.to_json()):
        return
    print_facts(
        {
            "schedule": found.schedule,
            "steps": len(found.rates),
            "sequences_per_step": found.sequences_per_step,
            "peak": f"{found.peak:.4g}",
        }
    )
    out.print("")
    rows = [
        [f"{row['step']:,}", f"{row['rate']:.4g}", f"{row['share']:.1%}"]
        for row in found.list_rows()
    ]
    print_table(["step", "learning rate", "of the peak"], rows)
    if picture is not None:
        out.print(f"\nplot: {picture}", markup=False, soft_wrap=True)
