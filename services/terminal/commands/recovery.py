"""``kd jobs adopt``: runs that no job record names, to restore.

Records lie in the job store, and runs in folders. If the data of the job store are lost, the
folders stay: with artifacts that nobody lists, and with checkpoints that nobody continues. `kd gc`
removes such a folder.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from services.terminal.commands.upkeep import STORE_TIMEOUT, find_embedded_url
from services.terminal.console import Home, audit_command, make_settings, mode, out, print_as_json

if TYPE_CHECKING:
    from services.settings import Settings
    from services.store.jobs.store import JobStore

#: What helps where no job store answers.
START = "Start the service with `kd up`, or set KD_REDIS_URL or --home to its job store."

app = typer.Typer()


@app.command()
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

    A finished run becomes a job that succeeded, with its artifacts. Any other run becomes a job
    that failed, and `kd jobs retry` continues it. The events and metrics of the lost record are not
    restored.
    """
    from services.store.run_folder import RunFolderError, read_run

    settings = make_settings(home=home)
    home_runs = settings.runs.resolve()
    for folder in folders:
        if folder.resolve().parent != home_runs or not folder.is_dir():
            remedy = "Name the folder of a job there, or another data folder with --home."
            raise RunFolderError(f"{folder} is not a folder below {home_runs}.", remedy)
    runs = [read_run(folder.resolve()) for folder in folders]
    found = []
    with connect_store(settings) as store:
        for run in runs:
            adopted = store.adopt(run, owner)
            if adopted:
                audit_command(settings, "job.adopt", run.id, owner=owner)
            status = "failed" if run.error else "succeeded"
            # What became of a run that has a record is told by the record, not by its folder.
            found.append({"id": run.id, "adopted": adopted, "status": status if adopted else None})
            if not mode.as_json:
                out.print(f"{run.id}: {status if adopted else 'has a record already'}")
                if adopted and run.error:
                    out.print(run.error["remedy"], markup=False)
    print_as_json(found)


@contextmanager
def connect_store(settings: Settings, remedy: str = START) -> Iterator[JobStore]:
    """Connect to the job store. Raises ``StoreUnavailable`` if there is none or it is silent."""
    from redis.exceptions import RedisError

    from services.store.connection import connect_redis, describe_failure
    from services.store.embedded import StoreUnavailable
    from services.store.jobs.store import JobStore

    url = settings.redis_url or find_embedded_url(settings.home / "redis")
    if url is None:
        raise StoreUnavailable(f"There is no job store in {settings.home}.", remedy)
    with connect_redis(url, STORE_TIMEOUT) as client:
        try:
            client.ping()
        except RedisError as error:
            raise StoreUnavailable(f"The job store {describe_failure(error)}.", remedy) from None
        yield JobStore(client, settings.max_attempts)
