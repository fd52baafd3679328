"""``kd backup`` and ``kd restore``: copy all data of a service into a folder, and put it back."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from services.terminal import console

app = typer.Typer()


@app.command()
def backup(
    folder: Annotated[Path, typer.Argument(help="New folder for the backup.")],
    pause: Annotated[
        float,
        typer.Option(
            min=0.1,
            max=3600,
            help="Longest time, in seconds, for which the backup may delay writes.",
        ),
    ] = 5.0,
    home: console.Home = None,
) -> None:
    """Write every job, cache and run into a new folder; the service may keep running."""
    from services.store.backup import Lacking, make_backup, open_store

    settings = console.make_settings(home=home)
    with open_store(settings) as client:
        made = make_backup(folder.resolve(), settings, client, pause)
    console.audit_command(settings, "backup.create", str(folder.resolve()))
    lacking = Lacking.read(folder)
    if settings.in_bucket:
        console.notes.print(
            f"The caches in {settings.store} are not copied: copy the bucket with its own tools.",
            markup=False,
        )
    for line in lacking.describe():
        console.notes.print(line, markup=False)
    console.print_result(
        {**made.to_json(), "files": len(made.files), "lacking": asdict(lacking)},
        f"{folder}: {made.keys} keys of the job store, {len(made.files)} files, {made.bytes} bytes",
    )


@app.command()
def restore(
    folder: Annotated[Path, typer.Argument(help="Folder that `kd backup` wrote.")],
    force: Annotated[
        bool,
        typer.Option(help="Replace the jobs, caches, runs, files, models and data that exist now."),
    ] = False,
    check: Annotated[
        bool, typer.Option(help="Only check the backup against its digests; restore nothing.")
    ] = False,
    home: console.Home = None,
) -> None:
    """Check every byte of a backup of `kd backup`, and restore it.

    The API and the workers must be stopped.
    """
    from services.store.backup import Lacking, open_store, restore_backup, verify_backup

    found = verify_backup(folder.resolve())
    lacking = Lacking.read(folder)
    facts = {
        "files": len(found.files),
        "created_at": found.created_at,
        "restored": not check,
        "lacking": asdict(lacking),
    }
    if not console.mode.as_json:
        console.out.print(
            f"{folder}: {len(found.files)} files are unchanged since {found.created_at}"
        )
    for line in lacking.describe():
        console.notes.print(line, markup=False)
    if check:
        console.print_as_json(facts)
        return
    settings = console.make_settings(home=home)
    if found.home != str(settings.home):
        console.notes.print(
            f"The records name paths in {found.home}, the data folder of the backup;"
            f" KD_HOME is now {settings.home}."
        )
    with open_store(settings) as client:
        released = restore_backup(folder.resolve(), found, settings, client, force)
    console.audit_command(settings, "backup.restore", str(folder.resolve()))
    console.print_result(
        {**facts, "released": released},
        f"restored; of the running jobs, {len(released)} now wait for a worker, or are paused or"
        " cancelled if that was asked",
    )
