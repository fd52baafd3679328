"""``kd estimate``: estimate what a job's capture needs, before it runs."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Annotated, Any

import typer

from services.terminal.console import (
    AsJson,
    Home,
    JobFile,
    Overrides,
    err,
    load_job_file,
    make_settings,
    out,
    print_error,
    print_facts,
    print_json,
)
from services.terminal.exit_codes import FAILED

if TYPE_CHECKING:
    from kd.capture.estimate import Estimate
    from kd.config.job import JobConfig
    from services.settings import Settings

app = typer.Typer()


@app.command()
def estimate(
    job_file: JobFile,
    overrides: Overrides = None,
    fast: Annotated[
        bool,
        typer.Option(
            "--fast/--no-fast",
            help="Estimate by table and arithmetic: load no model, and read a sample of the text.",
        ),
    ] = False,
    home: Home = None,
    as_json: AsJson = False,
) -> None:
    """Estimate a job's capture and its training: tokens, bytes, memory, and hours on this device.

    With --fast the training has no hours, because no step of it is timed.
    """
    from kd.preflight.problems import Folders, require_no_problems

    settings = make_settings(home=home)
    config = load_job_file(job_file, overrides)
    require_no_problems(config, Folders(settings.root, settings.home))
    capture, training = (
        _estimate_by_table(config, settings) if fast else _estimate_by_trial(config, settings)
    )
    found = {} if capture is None else capture.to_json()
    if as_json:
        print_json(found if training is None else {**found, "training": training})
    else:
        # The hours are left out, because the seconds are printed in readable units.
        print_facts({name: value for name, value in found.items() if name != "hours"})
        _print_training(training)
    fits = capture is None or capture.fits
    if not fits:
        print_error(
            f"The disk of {settings.caches} cannot hold the cache.",
            "Free space, set KD_HOME to another disk, or keep less: a larger cache.threshold,"
            " or fewer sequences.",
        )
    raise typer.Exit(0 if fits else FAILED)


def _print_training(training: dict[str, Any] | None) -> None:
    """Print the facts of the training, and the settings that would make it less noisy."""
    if training is None:
        return
    parts = training.get("memory") or {}
    facts = {
        "training_steps": training["steps"],
        "training_tokens": training["tokens"],
        "student_parameters": training["parameters"],
        "training_time_seconds": training.get("seconds"),
        "time_of_a_step_seconds": training.get("step_seconds"),
        "training_memory_bytes": training["memory_bytes"],
        "of_that": {f"{name}_bytes": size for name, size in parts.items()} or None,
        "gradient_noise": training.get("noise"),
    }
    print_facts({name: value for name, value in facts.items() if value is not None})
    for line in training.get("advice") or ():
        out.print(line, markup=False, soft_wrap=True)


def _estimate_by_table(
    config: JobConfig, settings: Settings
) -> tuple[Estimate | None, dict[str, Any] | None]:
    """Estimate the capture from the table, and the training by arithmetic."""
    from kd.capture.estimate import estimate_by_table
    from services.api.planning import plan_job

    capture = (
        None if config.kind == "train" else estimate_by_table(config, settings.root, settings.home)
    )
    if config.train is None:
        return capture, None
    plan = plan_job(config, settings, [])
    return capture, {
        "steps": plan.steps,
        "tokens": plan.tokens,
        "parameters": plan.memory.student_parameters,
        "memory_bytes": plan.memory.student_bytes,
    }


def _estimate_by_trial(
    config: JobConfig, settings: Settings
) -> tuple[Estimate | None, dict[str, Any] | None]:
    """Estimate the capture by running the teacher, and the training by a few steps."""
    from kd.forecast import estimate_job
    from kd.models.loading import hide_progress_bars
    from kd.progress import Event, Monitor

    def show(event: Event) -> None:
        if event.data.get("phase"):
            err.print(event.data["phase"])

    hide_progress_bars()
    os.chdir(settings.root)  # a job's relative paths start there
    capture, training = estimate_job(config, settings.home, Monitor(show))
    return capture, None if training is None else training.to_json()
