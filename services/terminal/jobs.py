"""Commands about the jobs of a running service: submit, watch, and ``kd jobs``."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any

import typer

from services.terminal.console import (
    AsJson,
    JobFile,
    JobName,
    Overrides,
    Server,
    complain,
    err,
    load,
    make_settings,
    out,
    plain,
    print_json,
    table,
)

if TYPE_CHECKING:
    from services.terminal.client import Client

EXIT_OF_STATUS = {"succeeded": 0, "failed": 100, "cancelled": 103}

app = typer.Typer()
jobs_app = typer.Typer(no_args_is_help=True, help="Jobs of a running service.")
app.add_typer(jobs_app, name="jobs")


@app.command()
def submit(
    job_file: JobFile,
    overrides: Overrides = None,
    follow: Annotated[bool, typer.Option("--follow/--detach", help="Follow the job to its end.")] = True,
    server: Server = None,
    as_json: AsJson = False,
) -> None:
    """Post a job to the service and follow it; Ctrl-C leaves it running."""
    config = load(job_file, overrides)
    with _client(server) as client:
        job = client.post("/jobs", config.model_dump(mode="json"))
        if not follow:
            print_json(job) if as_json else out.print(job["id"])
            return
        err.print(f"{job['id']}: {job['name']}")
        _follow(client, job["id"], as_json)


@app.command()
def watch(job: JobName, server: Server = None, as_json: AsJson = False) -> None:
    """Follow a job to its end; Ctrl-C leaves it running."""
    with _client(server) as client:
        _follow(client, client.job(job)["id"], as_json)


@jobs_app.command("ls")
def jobs_ls(
    status: Annotated[str | None, typer.Option(help="Only jobs of this status.")] = None,
    limit: Annotated[int, typer.Option(min=1, max=100, help="How many.")] = 20,
    server: Server = None,
    as_json: AsJson = False,
) -> None:
    """List jobs, newest first."""
    with _client(server) as client:
        jobs = client.get("/jobs", limit=limit, status=status)["data"]
    if as_json:
        print_json(jobs)
        return
    columns = ("id", "name", "kind", "status", "stage", "created_at")
    rows = [[*(job[column] for column in columns), _percent(job)] for job in jobs]
    table([*(column.upper() for column in columns), "DONE"], rows)


@jobs_app.command("show")
def jobs_show(job: JobName, server: Server = None, as_json: AsJson = False) -> None:
    """Show how one job goes."""
    with _client(server) as client:
        record = client.job(job)
    if as_json:
        print_json(record)
        return
    shown = {name: value for name, value in record.items() if name != "config" and value not in (None, {})}
    table(["", ""], [[name, plain(value)] for name, value in shown.items()])


@jobs_app.command("cancel")
def jobs_cancel(job: JobName, server: Server = None, as_json: AsJson = False) -> None:
    """Ask a job to stop; a running one saves its state first."""
    with _client(server) as client:
        record = client.post(f"/jobs/{client.job(job)['id']}/cancel")
    waiting = " (it stops as soon as its state is saved)" if record["status"] == "running" else ""
    print_json(record) if as_json else out.print(f"{record['id']}: {record['status']}{waiting}")


@contextmanager
def _client(server: str | None) -> Iterator[Client]:
    from services.terminal.client import Client

    with Client(server or make_settings().server) as client:
        yield client


def _follow(client: Client, job_id: str, as_json: bool) -> None:
    from services.terminal.follow import Display

    try:
        with Display(err) as display:
            for kind, data in client.events(job_id):
                display.show(kind, data)
    except KeyboardInterrupt:
        err.print(f"The job goes on. `kd watch {job_id}` follows it, `kd jobs cancel {job_id}` stops it.")
        raise
    job = client.get(f"/jobs/{job_id}")
    if as_json:
        print_json(job)
    elif job["error"]:
        complain(job["error"]["detail"], job["error"]["remedy"])
    for name, path in {} if as_json else job["artifacts"].items():
        out.print(f"{name}: {path}", soft_wrap=True)
    raise typer.Exit(EXIT_OF_STATUS[job["status"]])


def _percent(job: dict[str, Any]) -> str:
    fraction = job["progress"]["fraction"]
    return "" if fraction is None else f"{fraction:.0%}"
