"""``kd eval``: a finished model against its teacher, on a job's held-out text."""

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
    load,
    make_settings,
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
            metavar="RUN_OR_MODEL", help="A run: its folder, the beginning of its name, or `last`. A model, a hub id."
        ),
    ],
    job_file: JobFile,
    overrides: Overrides = None,
    folder: Annotated[
        Path | None, typer.Option("--out", help="Folder of the report. Default: RUN/evaluation, or below KD_HOME.")
    ] = None,
    home: Home = None,
    as_json: AsJson = False,
) -> None:
    """Measure a model on a job's held-out text: against its teacher, its start, samples, tasks; write a report."""
    settings = make_settings(home=home)
    config = _checked(load(job_file, overrides), settings)
    folder = folder.absolute() if folder is not None else None
    target = str(Path(target).resolve()) if Path(target).exists() else target
    os.chdir(settings.root)  # what a job's relative paths resolve against
    os.environ.update(settings.environment())
    os.environ.setdefault("TQDM_DISABLE", "1")
    from kd.evaluation.examine import Target, examine
    from kd.progress import Event, Monitor

    def show(event: Event) -> None:
        if text := event.data.get("phase") or (event.type == "warning" and event.data.get("message")):
            err.print(text, markup=False)

    found = Target.find(target, settings.home)
    folder = folder or found.folder(settings.home, config.name)
    report = examine(config, found, settings.home, folder, Monitor(show))
    if as_json:
        print_json(report)
        return
    out.print((folder / "report.md").read_text(encoding="utf-8"), markup=False)
    out.print(f"report: {folder / 'report.md'}", soft_wrap=True)


def _checked(config: JobConfig, settings: Settings) -> JobConfig:
    """The job, whose files are there."""
    from kd.errors import ConfigError
    from kd.validate import check_inputs

    if found := check_inputs(config, settings.root, settings.home):
        raise ConfigError(found)
    return config
