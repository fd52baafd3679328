"""``kd landscape``: the loss around a finished student."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from services.terminal.console import Home, make_settings, out, print_as_json, print_table

RunName = Annotated[
    str,
    typer.Argument(
        metavar="RUN", help="A finished run: its folder, the beginning of its name, or `last`."
    ),
]
Points = Annotated[int, typer.Option(min=3, max=201, help="Points along each side of the plane.")]
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
    line_points: Annotated[int, typer.Option(min=5, max=1001, help="Points on the line.")] = 31,
    radius: Radius = 1.0,
    sequences: Sequences = 16,
    seed: Seed = 0,
    folder: Folder = None,
    home: Home = None,
) -> None:
    """Plot the loss around a finished student, and on the line from its first to its last weights.

    Writes landscape.json and one page with the plots.
    """
    from kd.errors import ModelError
    from kd.files import find_run
    from services.terminal.in_process import enter_root, stopping_on_signals

    settings = make_settings(home=home)
    run = str(Path(run).resolve()) if Path(run).exists() else run
    folder = None if folder is None else folder.resolve()
    enter_root(settings)
    run_dir = Path(run) if Path(run).is_dir() else find_run(run, settings.runs)
    if run_dir is None:
        detail = f"there is no run {run!r} under {settings.runs}."
        raise ModelError(detail, "Name a finished run, its folder, or `last`.")
    folder = folder or run_dir / "landscape"
    from kd.experiments.landscape import LandscapeOptions, survey

    options = LandscapeOptions(points, line_points, radius, sequences, seed)
    with stopping_on_signals() as monitor:
        found = survey(run_dir, settings.home, folder, options, monitor)
    shown = found.to_json()
    if print_as_json(shown):
        return
    parts = (shown["plane"]["centre"], shown["plane"]["rise"], shown["line"]["barrier"])
    rows = []
    for name in found.plane.centre:
        figures = ["" if part[name] is None else f"{part[name]:.4f}" for part in parts]
        rows.append([name.replace("_", "-"), *figures])
    titles = ["loss of the student", "mean rise half way out", "barrier from start to end"]
    print_table(["", *titles], rows)
    out.print(f"\npage: {folder / 'index.html'}", markup=False, soft_wrap=True)
