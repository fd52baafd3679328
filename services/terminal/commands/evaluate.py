"""``kd eval``: compare a finished model with its teacher on a job's held-out text."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from services.terminal.console import (
    AsJson,
    Home,
    JobFile,
    Overrides,
    err,
    load_job_file,
    make_settings,
    notes,
    out,
    print_json,
)

if TYPE_CHECKING:
    from kd.config.job import JobConfig
    from services.settings import Settings

app = typer.Typer()


@app.command("eval")
def evaluate(
    target: Annotated[
        str,
        typer.Argument(
            metavar="RUN_OR_MODEL",
            help="A run (folder, beginning of its name, or `last`) or a model (folder or hub id).",
        ),
    ],
    job_file: JobFile,
    overrides: Overrides = None,
    folder: Annotated[
        Path | None,
        typer.Option(
            "--out", help="Folder of the report. Default: RUN/evaluation, or a folder in KD_HOME."
        ),
    ] = None,
    home: Home = None,
    as_json: AsJson = False,
) -> None:
    """Measure a model on a job's held-out text, and write a report.

    The report compares the model with its teacher and with its start, and holds samples and tasks.
    """
    settings = make_settings(home=home)
    config = _require_inputs(load_job_file(job_file, overrides), settings)
    folder = folder.absolute() if folder is not None else None
    target = str(Path(target).resolve()) if Path(target).exists() else target
    os.chdir(settings.root)  # a job's relative paths start there
    # The libraries read these variables when they are imported, which happens below.
    os.environ.update(settings.environment())
    os.environ.setdefault("TQDM_DISABLE", "1")
    from kd.examine import ExaminedModel, examine
    from kd.progress import Event, Monitor

    def show(event: Event) -> None:
        if text := event.data.get("phase"):
            notes.print(text, markup=False)
        elif event.type == "warning" and (text := event.data.get("message")):
            err.print(text, markup=False)

    found = ExaminedModel.find(target, settings.home)
    folder = folder or found.folder(settings.home, config.name)
    report = examine(config, found, settings.home, folder, Monitor(show))
    if as_json:
        print_json(report)
        return
    out.print((folder / "report.md").read_text(encoding="utf-8"), markup=False)
    out.print(f"report: {folder / 'report.md'}", soft_wrap=True)


def _require_inputs(config: JobConfig, settings: Settings) -> JobConfig:
    """Return ``config``; raise ``ConfigError`` if a file that it names is missing."""
    from kd.preflight.problems import Folders, require_no_problems

    require_no_problems(config, Folders(settings.root, settings.home))
    return config
