"""``kd submit``, ``kd watch`` and ``kd jobs``: the jobs of a running service."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from itertools import islice
from typing import TYPE_CHECKING, Annotated, Any

import typer

from services.terminal import console

if TYPE_CHECKING:
    from cache.json_object import Json
    from kd.client.client import Client
    from kd.client.wire.history import JobEvent
    from kd.client.wire.jobs import Job
    from kd.config.job import JobConfig
    from kd.progress import Event

#: The exit codes of commands that wait for a job to end.
EXIT_OF_STATUS = {"succeeded": 0, "failed": 100, "cancelled": 103}
#: The pause between two reads of a log that is followed.
FOLLOW_SECONDS = 1.0

app = typer.Typer()
jobs_app = typer.Typer(no_args_is_help=True, help="Jobs of a running service.")
app.add_typer(jobs_app, name="jobs")


@app.command()
def submit(
    job_file: console.JobFile,
    overrides: console.Overrides = None,
    follow: Annotated[
        bool,
        typer.Option(
            "--follow/--no-follow",
            " /--detach",
            help="Follow the job until it ends, or only print its id.",
        ),
    ] = True,
    server: console.Server = None,
) -> None:
    """Submit a job to the service and follow it; Ctrl-C leaves it running.

    For a service on this machine, relative paths in the job are relative to the current folder. For
    any other service they are relative to the folder of the service.
    """
    from services.terminal.client import connect, dump

    config = console.load_job_file(job_file, overrides)
    with connect(server) as client:
        job = client.submit(_place_paths(client, config))
        if not follow:
            console.print_result(dump(job), job.id)
            _print_reason(job)
            return
        console.notes.print(f"{job.id}: {job.name}")
        # A worker may claim the job before its events are read, so the reason is printed now.
        _print_reason(job)
        _follow(client, job.id, explained=job.reason is not None)


@app.command()
def watch(job: console.JobName, server: console.Server = None) -> None:
    """Follow a job until it ends; Ctrl-C leaves it running."""
    from services.terminal.client import connect, find_job

    with connect(server) as client:
        _follow(client, find_job(client, job).id)


@app.command("open")
def open_page(
    job: Annotated[
        str | None, typer.Argument(metavar="[ID]", help="The job to show. Default: all jobs.")
    ] = None,
    server: console.Server = None,
) -> None:
    """Open the dashboard in the browser, and print its address."""
    import webbrowser

    from services.terminal.client import connect, find_job

    with connect(server) as client:
        client.version()  # a service must answer there
        below = "" if job is None else f"/jobs/{find_job(client, job).id}"
        page = f"{client.server}{below}"
    opened = webbrowser.open(page)
    console.print_result({"address": page, "opened": opened}, page)
    if not opened:
        console.notes.print("No browser could be started here; open the address in one.")


@jobs_app.command("ls")
def jobs_ls(
    status: Annotated[str | None, typer.Option(help="List only jobs with this status.")] = None,
    kind: Annotated[str | None, typer.Option(help="List only jobs of this kind.")] = None,
    label: Annotated[
        str | None, typer.Option(help="List only jobs with this label, as name:value.")
    ] = None,
    search: Annotated[
        str | None,
        typer.Option(help="List only jobs with this text in their id, name, labels or models."),
    ] = None,
    trials: Annotated[bool, typer.Option(help="List the trials of searches, too.")] = True,
    limit: Annotated[int, typer.Option(min=1, max=100, help="How many jobs to list at most.")] = 20,
    server: console.Server = None,
) -> None:
    """List jobs, newest first."""
    from services.terminal.client import connect, read_pages

    # As they are typed: the server knows which there are, and says so.
    query = {"status": status, "kind": kind, "label": label, "q": search, "limit": limit}
    query |= {} if trials else {"trials": "false"}
    with connect(server) as client:
        jobs = list(islice(read_pages(client, "/jobs", query), limit))
    if console.print_as_json(jobs):
        return
    columns = ("id", "name", "kind", "status", "stage")
    # Without prices there are no costs, and no column for them.
    priced = any(job["cost"] is not None for job in jobs)
    rows = []
    for job in jobs:
        done = job["progress"]["fraction"]
        row = [console.format_value(job[column]) for column in columns]
        row += [console.format_time(job["created_at"]), "" if done is None else f"{done:.0%}"]
        rows.append([*row, _format_cost(job["cost"])] if priced else row)
    titles = [*map(str.upper, columns), "CREATED", "DONE", *(["COST"] if priced else [])]
    console.print_table(titles, rows, spare=("KIND", "STAGE"))


@jobs_app.command("show")
def jobs_show(job: console.JobName, server: console.Server = None) -> None:
    """Show one job."""
    from services.terminal.client import connect, dump, find_job

    with connect(server) as client:
        record = dump(find_job(client, job))
    if console.print_as_json(record):
        return
    tables = {"metrics": ["METRIC", "VALUE"], "artifacts": ["FILE", "PATH"]}
    left_out = {"config", "links", *tables}
    record["least_memory_bytes"] = record.pop("least_memory", None)
    console.print_facts({name: value for name, value in record.items() if name not in left_out})
    for field, titles in tables.items():
        if values := record.get(field):
            console.out.print()
            rows = [[name, console.format_value(value, name)] for name, value in values.items()]
            console.print_table(titles, [row for row in rows if row[1]])


@jobs_app.command("cancel")
def jobs_cancel(job: console.JobName, server: console.Server = None) -> None:
    """Stop a job for good; a running job saves its state first."""
    _act("cancel", job, server)


@jobs_app.command("pause")
def jobs_pause(job: console.JobName, server: console.Server = None) -> None:
    """Stop a job for now; a running job saves its state first, and then frees its worker."""
    _act("pause", job, server)


@jobs_app.command("resume")
def jobs_resume(job: console.JobName, server: console.Server = None) -> None:
    """Continue a paused job from its saved state."""
    _act("resume", job, server)


@jobs_app.command("retry")
def jobs_retry(job: console.JobName, server: console.Server = None) -> None:
    """Queue a failed or cancelled job again; it continues from its last checkpoint."""
    _act("retry", job, server)


@jobs_app.command("clone")
def jobs_clone(
    job: console.JobName, overrides: console.Overrides = None, server: console.Server = None
) -> None:
    """Submit the same job again, changed by --set."""
    from kd.config.jobfile import apply_overrides, parse_config
    from services.terminal.client import connect, dump, find_job

    with connect(server) as client:
        original = find_job(client, job)
        changes = apply_overrides({}, overrides or ())
        changed = parse_config(apply_overrides(original.config, overrides or ()))
        placed = _place_paths(client, changed, parse_config(original.config))
        record = client.clone(original, _choose_leaves(placed, changes))
    console.print_result(dump(record), record.id)
    _print_reason(record)


@jobs_app.command("rm")
def jobs_rm(
    names: Annotated[
        list[str], typer.Argument(metavar="ID...", help="Ids of jobs, or beginnings of them.")
    ],
    artifacts: Annotated[
        bool, typer.Option(help="Also delete their checkpoints, logs and artifacts.")
    ] = False,
    server: console.Server = None,
) -> None:
    """Delete jobs that have ended."""
    from services.terminal.client import connect, find_job

    with connect(server) as client:
        job_ids = [find_job(client, name).id for name in names]
        for job_id in job_ids:
            client.delete(job_id, artifacts=artifacts)
            if not console.mode.as_json:
                console.out.print(f"{job_id}: deleted")
    console.print_as_json([{"id": job_id, "deleted": True} for job_id in job_ids])


@jobs_app.command("logs")
def jobs_logs(
    job: console.JobName,
    tail: Annotated[
        int | None, typer.Option(min=1, max=10_000, help="Print only this many lines from the end.")
    ] = None,
    follow: Annotated[
        bool,
        typer.Option("--follow/--no-follow", "-f", help="Keep printing until the job has ended."),
    ] = False,
    server: console.Server = None,
    as_json: Annotated[
        bool, typer.Option("--json/--no-json", help='Print each line as an object {"line": ...}.')
    ] = False,
) -> None:
    """Print the output of a job's processes."""
    from services.terminal.client import connect, find_job

    with connect(server) as client:
        job_id = find_job(client, job).id
        pieces = _follow_log(client, job_id) if follow else iter([client.log(job_id, tail=tail)])
        written = 0
        for piece in _make_json_lines(pieces) if as_json else pieces:
            # Bytes, because the libraries of a run choose the encoding of its log.
            sys.stdout.flush()
            sys.stdout.buffer.write(piece)
            sys.stdout.buffer.flush()
            written += len(piece)
        if not written:
            console.notes.print(
                "The log is empty: it holds what the libraries of a run print, and they have"
                f" printed nothing. `kd jobs events {job_id}` shows what the job did.",
                markup=False,
            )


@jobs_app.command("events")
def jobs_events(
    job: console.JobName,
    types: Annotated[
        str | None, typer.Option(help="Print only events of these types, separated by commas.")
    ] = None,
    server: console.Server = None,
) -> None:
    """Print the events of a job, oldest first."""
    from services.terminal.client import connect, dump, find_job

    wanted = None if types is None else types.split(",")
    with connect(server) as client:
        events = [dump(each) for each in client.past_events(find_job(client, job), types=wanted)]
    if console.print_as_json(events):
        return
    rows = [
        [console.format_time(each["ts"]), each["type"], console.format_value(each["data"])]
        for each in events
    ]
    console.print_table(["TIME", "TYPE", "DATA"], rows)


def _place_paths(client: Client, config: JobConfig, original: JobConfig | None = None) -> Json:
    """Return the body of a job; paths that it shares with ``original`` are those of the service.

    Its other relative paths become absolute if the service sees the files of this machine. If not,
    they are sent as they are, and a line says what they mean.
    """
    from kd.preflight.named_paths import list_relative_paths, make_paths_absolute
    from services.process.file_view import identify_file_view

    root = console.make_settings().root
    known = list_relative_paths(original, root) if original is not None else []
    relative = [each for each in list_relative_paths(config, root) if each not in known]
    if relative and client.version().file_view == identify_file_view():
        return make_paths_absolute(config, root)
    if relative:
        console.notes.print(
            f"The service does not see the files of this machine: {relative[0].name} and other"
            " relative paths of the job start in the folder of the service (KD_ROOT).",
            markup=False,
        )
    return config.model_dump(mode="json")


def _choose_leaves(full: Any, wanted: Any) -> Any:
    """Return the part of ``full`` that ``wanted`` names: its keys, and the values of ``full``."""
    if not isinstance(wanted, dict) or not isinstance(full, dict):
        return full
    return {name: _choose_leaves(full.get(name), value) for name, value in wanted.items()}


def _print_reason(job: Job) -> None:
    """Print why a new job waits, if no worker can run it as it is."""
    if job.status == "queued" and job.reason is not None:
        console.err.print(f"warning: {job.reason}", markup=False)


def _act(action: str, name: str, server: str | None) -> None:
    from services.terminal.client import connect, find_job

    with connect(server) as client:
        record = client.request("POST", f"/jobs/{find_job(client, name).id}/{action}")
    stops = record["status"] in ("cancelling", "pausing")
    waiting = " (it stops as soon as its state is saved)" if stops else ""
    console.print_result(record, f"{record['id']}: {record['status']}{waiting}")


def _follow_log(client: Client, job_id: str) -> Iterator[bytes]:
    """Yield the log, and what is added to it until the job has ended."""
    from services.terminal.client import FOLLOW_PATIENCE

    client = client.with_patience(FOLLOW_PATIENCE)
    place = 0
    ended = False
    while not ended:
        # The status is read before the log, so that the last piece is read after the end.
        ended = client.job(job_id).ended
        piece = client.log(job_id, start=place)
        yield piece
        place += len(piece)
        time.sleep(0 if ended else FOLLOW_SECONDS)


def _make_json_lines(pieces: Iterator[bytes]) -> Iterator[bytes]:
    """Yield each line of a log as a JSON object on a line; a piece may end within a line."""
    rest = b""
    for piece in pieces:
        *lines, rest = (rest + piece).split(b"\n")
        yield b"".join(map(_make_json_line, lines))
    if rest:
        yield _make_json_line(rest)


def _make_json_line(line: bytes) -> bytes:
    text = line.decode("utf-8", "replace")
    return json.dumps({"line": text}, ensure_ascii=False).encode() + b"\n"


def _follow(client: Client, job_id: str, explained: bool = False) -> None:
    from services.terminal.client import FOLLOW_PATIENCE, dump
    from services.terminal.display import Display

    client = client.with_patience(FOLLOW_PATIENCE)
    try:
        with Display(console.notes) as display:
            for event in _follow_events(client, job_id, explained):
                display.show(event)
    except KeyboardInterrupt:
        console.notes.print(
            f"The job continues. `kd watch {job_id}` follows it,"
            f" `kd jobs cancel {job_id}` stops it."
        )
        raise
    job = client.job(job_id)
    if not console.print_as_json(dump(job)):
        if error := job.error:
            console.print_error(error.detail, error.remedy, error.help)
        for name, path in job.artifacts.items():
            console.out.print(f"{name}: {path}", soft_wrap=True)
    raise typer.Exit(EXIT_OF_STATUS[job.status])


def _follow_events(client: Client, job_id: str, explained: bool) -> Iterator[Event | JobEvent]:
    """Yield the job's events, and once the reason why no worker can run it unless ``explained``.

    That reason is only in the record, because nothing happens to the job. So is the status of an
    old job, whose events have expired.
    """
    from kd.progress import Event

    status = None
    for event in client.events(job_id):
        yield event
        status = event.data["status"] if event.type == "status" else status
        if not explained and event.type == "status" and status == "queued":
            job = client.job(job_id)
            if explained := job.status == "queued" and job.reason is not None:
                yield Event("reason", {"reason": job.reason})
    if status is None:
        yield Event("status", {"status": client.job(job_id).status})


def _format_cost(cost: Json | None) -> str:
    """Format a cost: final, or so far and of what is expected."""
    if cost is None:
        return ""
    amount = f"{cost['amount']:.4g}"
    return amount if cost["estimated"] is None else f"{amount} of {cost['estimated']:.4g}"
