"""``kd report``: the report of a run as text, as JSON, or as one HTML page."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from services.terminal.console import AsJson, Home, make_settings, out, print_json, print_page

app = typer.Typer()


@app.command()
def report(
    run: Annotated[
        str,
        typer.Argument(
            metavar="RUN", help="A run: its folder, the beginning of its name, or `last`."
        ),
    ],
    as_html: Annotated[
        bool,
        typer.Option(
            "--html/--no-html",
            help="Write one HTML file that needs nothing else: report.html in the run's folder.",
        ),
    ] = False,
    target: Annotated[
        Path | None, typer.Option("--out", help="Where to write the HTML file instead.")
    ] = None,
    home: Home = None,
    as_json: AsJson = False,
) -> None:
    """Show the report of a finished run, or write it as one HTML file."""
    from kd.experiments.run_page import read_report, write_page
    from kd.files import find_run

    settings = make_settings(home=home)
    folder = Path(run) if Path(run).is_dir() else find_run(run, settings.runs)
    if folder is None:
        from kd.errors import DataError

        raise DataError(f"There is no run {run!r} under {settings.runs}.", "Name a run's folder.")
    if as_html or target is not None:
        page = write_page(folder, target)
        print_json({"page": str(page)}) if as_json else out.print(str(page), soft_wrap=True)
    elif as_json:
        print_json(read_report(folder))
    else:
        from kd.evaluation.report import render_report

        print_page(render_report(read_report(folder)))
