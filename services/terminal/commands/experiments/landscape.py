"""``kd landscape``: the loss around a finished student."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from services.terminal.console import (
    AsJson,
    Home,
    err,
    make_settings,
    notes,
    out,
    print_json,
    print_table,
)

if TYPE_CHECKING:
    from services.settings import Settings

RunName = Annotated[
    str,
    typer.Argument(
        metavar="RUN", help="A finished run: its folder, the beginning of its name, or `last`."
    ),
]
Points = Annotated[int, typer.Option(min=3, max=201, help="Points along each side of the plane.")]
LinePoints = Annotated[int, typer.Option(min=5, max=1001, help="Points on the line.")]
Radius = Annotated[
    float,
    typer.Option(min=0.001, max=100, help="Half the width of the plane, in norms of the weights."),
]
Sequences = Annotated[
    int,
    typer.Option(min=1, max=4096, help="Sequences of the training text, and of the held-out text."),
]
Seed = Annotated[int, typer.Option(min=0, help="Seed of the directions and sequences.")]
Folder = Annotated[
    Path | None, typer.Option("--out", help="Folder of the page. Default: RUN/landscape.")
]

app = typer.Typer()


@app.command()
def landscape(
    run: RunName,
    points: Points = 15,
    line_points: LinePoints = 31,
    radius: Radius = 1.0,
    sequences: Sequences = 16,
    seed: Seed = 0,
    folder: Folder = None,
    home: Home = None,
    as_json: AsJson = False,
) -> None:
    """Plot the loss around a finished student, and on the line from its first to its last weights.

    Writes landscape.json and one page with the plots.
    """
    settings = make_settings(home=home)
    folder = None if folder is None else folder.resolve()
    run_dir = _find_run(run, settings)
    from kd.errors import Interrupted
    from kd.experiments.landscape import LandscapeOptions, survey
    from kd.face.running import lossy, stop_on_signals
    from kd.progress import Event, Monitor
    from services.terminal.display import Display

    options = LandscapeOptions(points, line_points, radius, sequences, seed)
    folder = folder or run_dir / "landscape"
    tell = partial(err.print, markup=False, soft_wrap=True)
    with Display(notes) as display, stop_on_signals(tell) as stop:

        def show(event: Event) -> None:
            display.show(event.type, event.data)

        try:
            found = survey(
                run_dir, settings.home, folder, options, Monitor(lossy(show), stop.is_set)
            )
        except Interrupted as error:
            err.print(str(error))
            raise KeyboardInterrupt from None
    if as_json:
        print_json(found)
        return
    print_table(
        ["", "loss of the student", "mean rise half way out", "barrier from start to end"],
        [
            [name.replace("_", "-"), *(_format(value) for value in values)]
            for name, *values in (
                (
                    name,
                    loss,
                    found["plane"]["rise"][name],
                    found["line"]["barrier"][name],
                )
                for name, loss in found["plane"]["centre"].items()
            )
        ],
    )
    out.print(f"\npage: {folder / 'index.html'}", markup=False, soft_wrap=True)


def _find_run(name: str, settings: Settings) -> Path:
    """Return the folder of the run called ``name``; the work is then done in the job's root."""
    name = str(Path(name).resolve()) if Path(name).exists() else name
    os.chdir(settings.root)  # a job's relative paths start there
    # The libraries read these variables when they are imported, which happens below.
    os.environ.update(settings.environment())
    os.environ.setdefault("TQDM_DISABLE", "1")
    from kd.errors import ModelError
    from kd.files import find_run

    if Path(name).is_dir():
        return Path(name)
    found = find_run(name, settings.home / "runs")
    if found is None:
        raise ModelError(
            f"there is no run {name!r} under {settings.home / 'runs'}.",
            "Name a finished run, its folder, or `last`.",
        )
    return found


def _format(value: float | None) -> str:
    return "" if value is None else f"{value:.4f}"
