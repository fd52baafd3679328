"""``kd eval``: compare a finished model with its teacher on a job's held-out text."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from services.terminal import console

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
    job_file: console.JobFile,
    overrides: console.Overrides = None,
    folder: Annotated[
        Path | None,
        typer.Option(
            "--out", help="Folder of the report. Default: RUN/evaluation, or a folder in KD_HOME."
        ),
    ] = None,
    home: console.Home = None,
) -> None:
    """Measure a model on a job's held-out text, and write a report.

    The report compares the model with its teacher and with its start, and holds samples and tasks.
    """
    from kd.preflight.problems import Folders, require_no_problems
    from services.terminal.in_process import enter_root

    settings = console.make_settings(home=home)
    config = console.load_job_file(job_file, overrides)
    require_no_problems(config, Folders(settings.root, settings.home))
    folder = folder.absolute() if folder is not None else None
    target = str(Path(target).resolve()) if Path(target).exists() else target
    enter_root(settings)
    from kd.examine import ExaminedModel, examine
    from kd.progress import Event, Monitor

    def show(event: Event) -> None:
        if text := event.data.get("phase"):
            console.notes.print(text, markup=False)
        elif event.type == "warning" and (text := event.data.get("message")):
            console.err.print(text, markup=False)

    found = ExaminedModel.find(target, settings.home)
    folder = folder or found.folder(settings.home, config.name)
    report = examine(config, found, settings.home, folder, Monitor(show))
    if not console.print_as_json(report):
        console.out.print((folder / "report.md").read_text(encoding="utf-8"), markup=False)
        console.out.print(f"report: {folder / 'report.md'}", soft_wrap=True)
