"""``kd runs``: list and remove the runs on this machine."""

from __future__ import annotations

from typing import Annotated

import typer

from services.terminal import console
from services.terminal.commands.upkeep import Yes

app = typer.Typer()
runs_app = typer.Typer(no_args_is_help=True, help="Runs on this machine, in KD_HOME.")
app.add_typer(runs_app, name="runs")
COLUMNS = {
    "name": "NAME", "kind": "KIND", "state": "STATE", "teacher": "TEACHER", "student": "STUDENT",
    "parameters": "PARAMETERS", "bits_per_byte": "BITS/BYTE", "kl": "KL", "seconds": "SECONDS",
    "bytes": "BYTES", "began": "BEGAN",
}  # fmt: skip


@runs_app.command("ls")
def runs_ls(home: console.Home = None) -> None:
    """List all runs, the newest first: those of `kd run`, of Python and of the service.

    Compare bits per byte only between runs with the same held-out text.
    """
    from kd.python.runs import list_runs

    found = [run.to_json() for run in list_runs(console.make_settings(home=home).home)]
    if not console.print_as_json(found):
        rows = [[console.format_value(run[name], name) for name in COLUMNS] for run in found]
        console.print_table(list(COLUMNS.values()), rows)


@runs_app.command("rm")
def runs_rm(
    names: Annotated[
        list[str],
        typer.Argument(metavar="RUN...", help="Runs: their names, or the beginnings of them."),
    ],
    yes: Yes = False,
    home: console.Home = None,
) -> None:
    """Remove the folders of runs, with their students and checkpoints.

    The run of a job of the service goes with its record: use `kd jobs rm ID --artifacts`.
    """
    from kd.errors import ModelError
    from kd.files import find_run
    from kd.python.runs import remove_run, summarise_run
    from services.store.run_folder import JOB_ID

    settings = console.make_settings(home=home)
    folders = []
    for name in names:
        folder = find_run(name, settings.runs)
        if folder is None:
            detail = f"There is no run {name!r} under {settings.runs}."
            raise ModelError(detail, "`kd runs ls` lists them.")
        if JOB_ID.fullmatch(folder.name):
            remedy = f"Use `kd jobs rm {folder.name} --artifacts`."
            raise ModelError(f"{folder.name} is the run of a job of the service.", remedy)
        folders.append(folder)
    sizes = {folder: summarise_run(folder).bytes for folder in folders}
    if not yes:
        for folder, size in sizes.items():
            console.out.print(
                f"{folder}: {console.format_value(size, 'bytes')}", markup=False, soft_wrap=True
            )
        typer.confirm("Remove them?", abort=True, err=True)
    for folder, size in sizes.items():
        remove_run(folder)
        console.audit_command(settings, "run.remove", folder.name, bytes=size)
    gone = [{"name": folder.name, "bytes": size} for folder, size in sizes.items()]
    console.print_result(
        gone, f"{len(gone)} removed, {console.format_value(sum(sizes.values()), 'bytes')}"
    )
