"""Commands about the jobs of a running service: submit, watch, and ``kd jobs``."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from itertools import islice
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
    moment,
    out,
    plain,
    print_facts,
    print_json,
    table,
)

if TYPE_CHECKING:
    from services.terminal.client import Client

EXIT_OF_STATUS = {"succeeded": 0, "failed": 100, "cancelled": 103}
FOLLOW_SECONDS = 1.0

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
    kind: Annotated[str | None, typer.Option(help="Only jobs of this kind.")] = None,
    label: Annotated[str | None, typer.Option(help="Only jobs with this label, as name:value.")] = None,
    limit: Annotated[int, typer.Option(min=1, max=100, help="How many.")] = 20,
    server: Server = None,
    as_json: AsJson = False,
) -> None:
    """List jobs, newest first."""
    with _client(server) as client:
        jobs = list(islice(client.jobs(status=status, kind=kind, label=label), limit))
    if as_json:
        print_json(jobs)
        return
    columns = ("id", "name", "kind", "status", "stage")
    rows = [[*(plain(job[column]) for column in columns), moment(job["created_at"]), _percent(job)] for job in jobs]
    table([*(column.upper() for column in columns), "CREATED_AT", "DONE"], rows, spare=("KIND", "STAGE"))


@jobs_app.command("show")
def jobs_show(job: JobName, server: Server = None, as_json: AsJson = False) -> None:
    """Show how one job goes."""
    with _client(server) as client:
        record = client.job(job)
    if as_json:
        print_json(record)
        return
    print_facts({name: value for name, value in record.items() if name not in ("config", "links")})


@jobs_app.command("cancel")
def jobs_cancel(job: JobName, server: Server = None, as_json: AsJson = False) -> None:
    """Ask a job to stop; a running one saves its state first."""
    _act("cancel", job, server, as_json)


@jobs_app.command("pause")
def jobs_pause(job: JobName, server: Server = None, as_json: AsJson = False) -> None:
    """Stop a job for now; a running one saves its state first, and its worker is free for others then."""
    _act("pause", job, server, as_json)


@jobs_app.command("resume")
def jobs_resume(job: JobName, server: Server = None, as_json: AsJson = False) -> None:
    """Let a paused job go on from where it stopped."""
    _act("resume", job, server, as_json)


@jobs_app.command("retry")
def jobs_retry(job: JobName, server: Server = None, as_json: AsJson = False) -> None:
    """Queue a failed or cancelled job again; it goes on from its last checkpoint."""
    _act("retry", job, server, as_json)


@jobs_app.command("clone")
def jobs_clone(job: JobName, overrides: Overrides = None, server: Server = None, as_json: AsJson = False) -> None:
    """Post the same job once more, changed by --set."""
    from kd.jobfile import apply_overrides

    with _client(server) as client:
        record = client.post(f"/jobs/{client.job(job)['id']}/clone", apply_overrides({}, overrides or ()))
    print_json(record) if as_json else out.print(record["id"])


@jobs_app.command("rm")
def jobs_rm(
    names: Annotated[list[str], typer.Argument(metavar="ID...", help="Job ids, or beginnings of them.")],
    artifacts: Annotated[bool, typer.Option("--artifacts", help="Checkpoints, logs and artifacts go too.")] = False,
    server: Server = None,
) -> None:
    """Forget jobs that have ended."""
    with _client(server) as client:
        for job_id in [client.job(name)["id"] for name in names]:
            client.delete(f"/jobs/{job_id}", artifacts=artifacts)
            out.print(f"{job_id}: deleted")


@jobs_app.command("logs")
def jobs_logs(
    job: JobName,
    tail: Annotated[int | None, typer.Option(min=1, max=10_000, help="Only so many lines of the end.")] = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on until the job has ended.")] = False,
    server: Server = None,
) -> None:
    """Print what a job's processes printed."""
    with _client(server) as client:
        job_id = client.job(job)["id"]
        if tail is not None and not follow:
            _write(client.text(f"/jobs/{job_id}/logs", tail=tail).encode())
            return
        for piece in _log_of(client, job_id, follow):
            _write(piece)


@jobs_app.command("events")
def jobs_events(
    job: JobName,
    types: Annotated[str | None, typer.Option(help="Only these types, separated by commas.")] = None,
    server: Server = None,
    as_json: AsJson = False,
) -> None:
    """Print what happened to a job, oldest first."""
    with _client(server) as client:
        events = list(_events_of(client, client.job(job)["id"], types))
    if as_json:
        print_json(events)
        return
    rows = [[moment(event["ts"]), event["type"], plain(event["data"])] for event in events]
    table(["TIME", "TYPE", "DATA"], rows)


@contextmanager
def _client(server: str | None) -> Iterator[Client]:
    from services.terminal.client import Client

    settings = make_settings()
    with Client(server or settings.server, settings.api_key) as client:
        yield client


def _act(action: str, name: str, server: str | None, as_json: bool) -> None:
    with _client(server) as client:
        record = client.post(f"/jobs/{client.job(name)['id']}/{action}")
    waiting = " (it stops as soon as its state is saved)" if record["status"] in ("cancelling", "pausing") else ""
    print_json(record) if as_json else out.print(f"{record['id']}: {record['status']}{waiting}")


def _log_of(client: Client, job_id: str, follow: bool) -> Iterator[bytes]:
    """The log, and with ``follow`` what is added to it until the job has ended."""
    if not follow:
        yield client.bytes_from(f"/jobs/{job_id}/logs", 0)
        return
    place, ended = 0, False
    while not ended:
        ended = client.patiently(partial(client.get, f"/jobs/{job_id}"))["status"] in EXIT_OF_STATUS
        piece = client.patiently(partial(client.bytes_from, f"/jobs/{job_id}/logs", place))
        yield piece
        place += len(piece)
        time.sleep(0 if ended else FOLLOW_SECONDS)


def _events_of(client: Client, job_id: str, types: str | None) -> Iterator[dict[str, Any]]:
    after, more = "0", True
    while more:
        page = client.get(f"/jobs/{job_id}/events", after=after, limit=1000, types=types)
        yield from page["data"]
        after, more = page["next_after"], page["has_more"]


def _write(text: bytes) -> None:
    """As it is: a log is in whatever encoding the libraries of a run chose."""
    sys.stdout.flush()
    sys.stdout.buffer.write(text)
    sys.stdout.buffer.flush()


def _follow(client: Client, job_id: str, as_json: bool) -> None:
    from services.terminal.follow import Display

    try:
        with Display(err) as display:
            for kind, data in _told(client, job_id):
                display.show(kind, data)
    except KeyboardInterrupt:
        err.print(f"The job goes on. `kd watch {job_id}` follows it, `kd jobs cancel {job_id}` stops it.")
        raise
    job = client.patiently(partial(client.get, f"/jobs/{job_id}"))
    if as_json:
        print_json(job)
    elif job["error"]:
        complain(job["error"]["detail"], job["error"]["remedy"])
    for name, path in {} if as_json else job["artifacts"].items():
        out.print(f"{name}: {path}", soft_wrap=True)
    raise typer.Exit(EXIT_OF_STATUS[job["status"]])


def _told(client: Client, job_id: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Its events; and once, where no worker could run it, why: that is in the record, and happens to no job."""
    told = False
    for kind, data in client.events(job_id):
        yield kind, data
        if not told and kind == "status" and data["status"] == "queued":
            job = client.patiently(partial(client.get, f"/jobs/{job_id}"))
            if told := job["status"] == "queued" and job["reason"] is not None:
                yield "reason", job


def _percent(job: dict[str, Any]) -> str:
    fraction = job["progress"]["fraction"]
    return "" if fraction is None else f"{fraction:.0%}"
