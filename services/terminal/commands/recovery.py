"""``kd gc`` and ``kd jobs adopt``: runs that no job record names, to remove or to restore.

Records lie in the job store, and runs in folders. If the data of the job store are lost, the
folders stay: with artifacts that nobody lists, and with checkpoints that nobody continues.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from services.terminal.commands.upkeep import STORE_TIMEOUT, Yes, find_embedded_url, parse_age
from services.terminal.console import (
    AsJson,
    Home,
    audit_command,
    make_settings,
    out,
    print_json,
    print_table,
)

if TYPE_CHECKING:
    from services.settings import Settings
    from services.store.jobs.store import JobStore

app = typer.Typer()
adopt_app = typer.Typer()


@app.command()
def gc(
    older_than: Annotated[
        str, typer.Option(help="Remove runs to which nothing was written for: 90m, 12h, 7d, 2w.")
    ] = "7d",
    yes: Yes = False,
    home: Home = None,
    as_json: AsJson = False,
) -> None:
    """Remove the folders of runs that no job record names.

    The job store must run. Folders of `kd run` are never removed. The command lists what it will
    remove, and asks first. With --json it removes nothing unless --yes is given. `kd jobs adopt`
    restores a record instead, and `kd cache gc` removes caches.
    """
    from cache.disk import list_file_sizes, remove_path
    from services.store.run_folder import is_held

    settings = make_settings(home=home)
    seconds = parse_age(older_than)
    with _connect(settings) as store:
        found = _find_unknown_runs(settings, store, seconds)
        sizes = {folder: sum(list_file_sizes(folder).values()) for folder in found}
        if not as_json:
            _print_runs(sizes)
        if found and not yes and not as_json:
            typer.confirm("Remove them?", abort=True, err=True)
        removed = []
        # A job may have been adopted, or a run begun, while the command asked.
        for folder in _find_unknown_runs(settings, store, seconds) if yes or not as_json else []:
            if folder in sizes and not is_held(folder):
                remove_path(folder)
                removed.append(folder)
    if as_json:
        listed = [{"path": str(path), "bytes": sizes[path]} for path in (removed if yes else found)]
        print_json({"removed": yes, "runs": listed})
    elif found:
        total = sum(sizes[folder] for folder in removed)
        out.print(f"{len(removed)} of {len(found)} removed, {total} bytes")


@adopt_app.command()
def adopt(
    folders: Annotated[
        list[Path], typer.Argument(help="Folders of jobs, below KD_HOME/runs.", metavar="FOLDER...")
    ],
    owner: Annotated[
        str, typer.Option(help="Name of the key to which the jobs will belong.")
    ] = "local",
    home: Home = None,
) -> None:
    """Restore the records of jobs from their run folders, after the job store has lost them.

    A run that had ended becomes a job that succeeded, with its artifacts. Any other becomes a job
    that failed, and `kd jobs retry` continues it. Events and metrics of the lost record stay lost.
    """
    from services.store.run_folder import read_run

    settings = make_settings(home=home)
    runs = [read_run(_require_own_folder(settings, folder)) for folder in folders]
    with _connect(settings) as store:
        for run in runs:
            if not store.adopt(run, owner):
                out.print(f"{run.id}: has a record already")
                continue
            audit_command(settings, "job.adopt", run.id, owner=owner)
            out.print(f"{run.id}: {'failed' if run.error else 'succeeded'}")
            if run.error:
                out.print(run.error["remedy"], markup=False)


@contextmanager
def _connect(settings: Settings) -> Iterator[JobStore]:
    """Connect to the job store. Raises ``StoreUnavailable`` if there is none or it is silent."""
    from redis.exceptions import RedisError

    from services.store.connection import connect_redis
    from services.store.embedded import StoreUnavailable
    from services.store.jobs.store import JobStore

    remedy = "Start the service with `kd up`, or set KD_REDIS_URL or --home to its job store."
    url = settings.redis_url or find_embedded_url(settings.home / "redis")
    if url is None:
        raise StoreUnavailable(f"There is no job store in {settings.home}.", remedy)
    with connect_redis(url, STORE_TIMEOUT) as client:
        try:
            client.ping()
        except RedisError as error:
            raise StoreUnavailable(f"The job store does not answer: {error}.", remedy) from None
        yield JobStore(client, settings.max_attempts)


def _find_unknown_runs(settings: Settings, store: JobStore, older_than: float) -> list[Path]:
    """The folders of jobs without a record that no process has changed for ``older_than`` s."""
    import time

    from cache.disk import find_last_change
    from services.store.run_folder import JOB_ID, is_held

    folders = {
        folder.name: folder
        for folder in (settings.home / "runs").glob("job_*")
        if JOB_ID.fullmatch(folder.name) and folder.is_dir() and not folder.is_symlink()
    }
    unknown = [folders[name] for name in store.list_unknown(sorted(folders))]
    oldest = time.time() - older_than
    return [
        folder for folder in unknown if not is_held(folder) and find_last_change(folder) <= oldest
    ]


def _require_own_folder(settings: Settings, folder: Path) -> Path:
    """The folder's real path. Raises ``RunFolderError`` if it is not a run of this data folder."""
    from services.store.run_folder import RunFolderError

    found = folder.resolve()
    runs = (settings.home / "runs").resolve()
    if found.parent != runs or not found.is_dir():
        raise RunFolderError(
            f"{folder} is no folder below {runs}.",
            "Name the folder of a job there, or another data folder with --home.",
        )
    return found


def _print_runs(sizes: dict[Path, int]) -> None:
    if not sizes:
        out.print("nothing to remove")
        return
    print_table(["BYTES", "PATH"], [[str(size), str(path)] for path, size in sizes.items()])
    out.print("`kd jobs adopt FOLDER` restores the record of a run that should stay.", markup=False)
