"""``kd estimate``: what a job's capture will need, before it runs."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Annotated

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
    print_facts,
    print_json,
)

if TYPE_CHECKING:
    from kd.config.job import JobConfig
    from kd.estimate import Estimate
    from services.settings import Settings

FAILED = 1

app = typer.Typer()


@app.command()
def estimate(
    job_file: JobFile,
    overrides: Overrides = None,
    fast: Annotated[bool, typer.Option("--fast", help="From a table: load no teacher, read a sample of text.")] = False,
    home: Home = None,
    as_json: AsJson = False,
) -> None:
    """Say what a job's capture will need: tokens, bytes on disk, hours on this device."""
    from kd.errors import ConfigError
    from kd.validate import check_inputs

    settings = make_settings(home=home)
    config = load(job_file, overrides)
    if found := check_inputs(config, settings.root, settings.home):
        raise ConfigError(found)
    estimated = _by_table(config, settings) if fast else _by_trial(config, settings)
    if as_json:
        print_json(estimated.to_json())
    else:
        print_facts({name: value for name, value in estimated.to_json().items() if name != "hours"})  # has seconds
    if not estimated.fits:
        complain(
            f"The disk of {settings.caches} cannot hold it.",
            "Free space, set KD_HOME to another disk, or keep less: a larger cache.threshold, or fewer sequences.",
        )
    raise typer.Exit(0 if estimated.fits else FAILED)


def _by_table(config: JobConfig, settings: Settings) -> Estimate:
    from kd.estimate import estimate_by_table

    return estimate_by_table(config, settings.root, settings.home)


def _by_trial(config: JobConfig, settings: Settings) -> Estimate:
    from kd.models import hide_progress_bars
    from kd.progress import Event, Monitor
    from kd.trial import estimate_by_trial

    def show(event: Event) -> None:
        if event.data.get("phase"):
            err.print(event.data["phase"])

    hide_progress_bars()
    os.chdir(settings.root)  # what a job's relative paths resolve against
    return estimate_by_trial(config, settings.home, Monitor(show))
