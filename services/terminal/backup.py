"""Commands ``kd backup`` and ``kd restore``: every job, cache and run of a service in one folder, and back."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from services.terminal.console import AsJson, Home, err, make_settings, out, print_json

app = typer.Typer()


@app.command()
def backup(
    folder: Annotated[Path, typer.Argument(help="Folder to write, which must not exist yet.")],
    pause: Annotated[float, typer.Option(min=0.1, max=3600, help="Seconds that writes may wait.")] = 5.0,
    home: Home = None,
    as_json: AsJson = False,
) -> None:
    """Write every job, cache and run into a new folder; the service may go on meanwhile."""
    from services.backup import make_backup, store_of

    settings = make_settings(home=home)
    with store_of(settings) as client:
        made = make_backup(folder.resolve(), settings, client, pause)
    print_json({**made.to_json(), "files": len(made.files)}) if as_json else out.print(
        f"{folder}: {made.keys} keys of the job store, {len(made.files)} files, {made.bytes} bytes"
    )


@app.command()
def restore(
    folder: Annotated[Path, typer.Argument(help="Folder that `kd backup` wrote.")],
    force: Annotated[bool, typer.Option("--force", help="Replace the jobs, caches and runs that are there.")] = False,
    check: Annotated[bool, typer.Option("--check", help="Only compare the backup with its own digests.")] = False,
    home: Home = None,
) -> None:
    """Put back what `kd backup` wrote, once every byte of it is proven; the API and the workers must be stopped."""
    from services.backup import restore_backup, store_of, verified

    found = verified(folder.resolve())
    out.print(f"{folder}: {len(found.files)} files are as they were written on {found.created_at}")
    if check:
        return
    settings = make_settings(home=home)
    if found.home != str(settings.home):
        err.print(f"The records name paths under {found.home}, where this was; KD_HOME is now {settings.home}.")
    with store_of(settings) as client:
        released = restore_backup(folder.resolve(), found, settings, client, force)
    out.print(f"restored; {len(released)} jobs that were running wait for a worker, or are as they were asked to be")
