"""``kd report``: the report of a run as text, as JSON, or as one HTML page."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from services.terminal.console import Home, make_settings, print_as_json, print_page, print_result

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
) -> None:
    """Show the report of a finished run, or write it as one HTML file."""
    from kd.errors import DataError
    from kd.experiments.run_page import read_report, write_page
    from kd.files import find_run

    settings = make_settings(home=home)
    folder = Path(run) if Path(run).is_dir() else find_run(run, settings.runs)
    if folder is None:
        raise DataError(f"There is no run {run!r} under {settings.runs}.", "Name a run's folder.")
    if as_html or target is not None:
        page = write_page(folder, target)
        print_result({"page": str(page)}, str(page))
    elif not print_as_json(found := read_report(folder)):
        from kd.evaluation.report import render_report

        print_page(render_report(found))
