"""The command ``kd``.

Exit codes: 0 ok, 1 failed, 2 invalid job or usage, 3 no server, 4 verification failed, 130 Ctrl-C;
commands that wait for a job: 100 it failed, 103 it was cancelled.

Heavy modules are imported inside the command that needs them, so that ``kd --help`` is fast.
"""

from __future__ import annotations

import json
import os
import sys
import textwrap
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cache.errors import PotstillError
from services.terminal import console
from services.terminal.catalogue import Catalogue
from services.terminal.commands import (
    accounts,
    cache_exchange,
    caches,
    check,
    comparison,
    evaluate,
    jobs,
    keys,
    recovery,
    retention,
    run,
)
from services.terminal.commands.before import forecast, init, validate
from services.terminal.commands.data import backup, buckets
from services.terminal.commands.experiments import ablate, landscape
from services.terminal.commands.hub import export, report, runs, transfer
from services.terminal.exit_codes import FAILED, INVALID, UNREACHABLE

if TYPE_CHECKING:
    from services.settings import Settings

#: Settings of every command: -h, and the width of help where no terminal has one.
CONTEXT: dict[str, Any] = {"help_option_names": ["-h", "--help"]}
if not sys.stdout.isatty():
    CONTEXT["terminal_width"] = console.NO_TERMINAL_WIDTH
#: Exit codes of errors by their type; every other error is FAILED.
EXIT_OF_ERROR = {
    "invalid_config": INVALID,
    "keys_error": INVALID,
    "unsafe_bind": INVALID,
    "unreachable": UNREACHABLE,
}

LogAsJson = Annotated[
    bool, typer.Option("--json/--no-json", help="Write the log as JSON, like KD_LOG_FORMAT=json.")
]

app = typer.Typer(
    cls=Catalogue,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    # Frames and colours are for a terminal; a pipe gets plain lines of any length.
    rich_markup_mode="rich" if sys.stdout.isatty() and sys.stderr.isatty() else None,
    context_settings=CONTEXT,
    help="Potstill: knowledge distillation as a service.",
)
caches.cache_app.add_typer(cache_exchange.app)
jobs.jobs_app.add_typer(recovery.app)
jobs.jobs_app.add_typer(comparison.app)
for module in (
    *(run, jobs, forecast, validate, init, check, evaluate, ablate, landscape),
    *(caches, transfer, export, report, runs),
    *(keys, accounts, backup, buckets, retention),
):
    app.add_typer(module.app)


def _show_version(wanted: bool) -> None:
    if wanted:
        from kd.python.version import read_version

        console.out.print(read_version())
        raise typer.Exit


@app.callback()
def kd(
    verbose: Annotated[
        bool, typer.Option("-v", "--verbose", help="Show the traceback of an error.")
    ] = False,
    version: Annotated[
        bool,
        typer.Option(
            "--version", help="Show the version and exit.", callback=_show_version, is_eager=True
        ),
    ] = False,
) -> None:
    """Potstill: knowledge distillation as a service."""


# ---------------------------------------------------------------------- the service


@app.command()
def up(
    host: Annotated[str | None, typer.Option(help="Address to listen on.")] = None,
    port: Annotated[
        int | None, typer.Option(min=0, max=65535, help="Port to listen on; 0 = any free one.")
    ] = None,
    workers: Annotated[
        int, typer.Option(min=1, help="How many workers to run; each runs one stage at a time.")
    ] = 1,
    home: console.Home = None,
) -> None:
    """Run the whole service in this terminal: job store, API and workers. Ctrl-C stops it."""
    import threading

    from services.terminal.commands.up import running
    from services.terminal.in_process import interrupt_on_signals

    interrupt_on_signals()
    with running(console.make_settings(host=host, port=port, home=home), workers, _say) as settings:
        if console.mode.as_json:
            # One line, because the command goes on: a program reads the line and uses the service.
            facts = {"server": settings.server, "home": str(settings.home), "pid": os.getpid()}
            print(json.dumps(facts), flush=True)
        else:
            console.out.print(
                f"Potstill is up at {settings.server}"
                f"  (data and logs in {settings.home}; Ctrl-C stops it)"
            )
        try:
            threading.Event().wait()
        except KeyboardInterrupt:
            _say("stopping; a running job saves its state first")


@app.command()
def serve(
    host: Annotated[str | None, typer.Option(help="Address to listen on.")] = None,
    port: Annotated[int | None, typer.Option(min=0, max=65535, help="Port to listen on.")] = None,
    as_json: LogAsJson = False,
) -> None:
    """Run only the API; KD_REDIS_URL names the job store."""
    from services.api.__main__ import run_api

    log_format = "json" if as_json else None  # None: as KD_LOG_FORMAT says
    run_api(_require_store(console.make_settings(host=host, port=port, log_format=log_format)))


@app.command()
def worker(
    queues: Annotated[
        str, typer.Option(help="Stages that the worker runs, separated by commas.")
    ] = "precompute,train",
    as_json: LogAsJson = False,
) -> None:
    """Run only one worker; KD_REDIS_URL names the job store."""
    from kd.config.kinds import list_stage_names
    from services.worker.__main__ import run_worker

    names = [name.strip() for name in queues.split(",")]
    stages = list_stage_names("worker")
    if unknown := set(names) - set(stages):
        detail = f"{', '.join(unknown)}: the stages are {', '.join(stages)}"
        raise typer.BadParameter(detail, param_hint="--queues")
    run_worker(_require_store(console.make_settings(log_format="json" if as_json else None)), names)


@app.command()
def demo(
    baseline: Annotated[bool, typer.Option(help="Also train a student without a teacher.")] = False,
    home: console.Home = None,
) -> None:
    """Run the example job through the whole service on this machine, and print its report."""
    from services.terminal.client import dump
    from services.terminal.commands.demo import print_demo, run_demo, succeeded
    from services.terminal.in_process import interrupt_on_signals

    interrupt_on_signals()
    jobs = run_demo(console.make_settings(home=home), baseline, console.notes)
    if not console.print_as_json(list(map(dump, jobs))):
        print_demo(jobs, console.out, console.notes)
    raise typer.Exit(0 if succeeded(jobs) else FAILED)


@app.command()
def example(
    folder: Annotated[
        Path, typer.Argument(help="Folder to write to. Default: the current folder.")
    ] = Path(),
) -> None:
    """Write the job, teacher and text of the example to examples/austen."""
    from services.terminal.commands.demo import copy_example

    written = copy_example(folder)
    job = written / "job.yaml"
    facts = {"folder": str(written), "job": str(job)}
    console.print_result(facts, f"wrote {written}; try: kd run {job}")


# ---------------------------------------------------------------------- help


@app.command()
def doctor(home: console.Home = None, server: console.Server = None) -> None:
    """Check whether this machine has what Potstill needs."""
    from services.terminal.commands.doctor import examine_machine

    found = examine_machine(console.make_settings(home=home, server=server))
    facts = [{"what": each.what, "ok": each.ok, "detail": each.detail} for each in found]
    if not console.print_as_json(facts):
        rows = [["ok" if each.ok else "no", each.what, each.detail] for each in found]
        console.print_table(["", "", ""], rows)
    raise typer.Exit(0 if all(each.ok for each in found if each.needed) else FAILED)


@app.command()
def explain(
    code: Annotated[
        str,
        typer.Argument(
            metavar="CODE or FIELD",
            help="Code of an error, such as cache_corrupt, or a field of a job, such as "
            "cache.threshold. None: list all codes.",
        ),
    ] = "",
) -> None:
    """Explain an error, with its cause and remedy, or a field of a job and the fields in it."""
    from kd.config.fields.described import explain_field
    from services.terminal.explanations import find_entry, list_codes

    if not code:
        codes = list_codes()
        console.print_result(codes, "\n".join(codes))
    elif entry := find_entry(code):
        console.print_result({"code": code.replace("-", "_"), "entry": entry}, entry)
    elif fields := explain_field(code):
        lines = []
        for each in fields:
            default = f"; default {each.default}" if each.default not in ("", "required") else ""
            needed = ", required" if each.default == "required" else ""
            lines.append(f"{each.place}: {each.value}{default}{needed}")
            meaning = textwrap.fill(each.meaning, min(console.out.width, 100) - 4)
            lines.append(textwrap.indent(meaning, "    "))
        console.print_result([each._asdict() for each in fields], "\n".join(lines))
    else:
        raise typer.BadParameter(
            f"{code!r} is neither a code of an error nor a field of a job. `kd explain` lists the "
            "codes, and `kd explain train` the fields of a section.",
            param_hint="CODE",
        )


def _say(text: str) -> None:
    """Print a line to stderr. It is lost where a full disk or a closed terminal takes none."""
    with suppress(OSError):
        console.notes.print(text, markup=False)


def _require_store(settings: Settings) -> Settings:
    """Return ``settings``; refuse a job store of another format, and one that would lose jobs.

    One that does not answer yet is waited for later.
    """
    if settings.redis_url is None:
        remedy = "Set it to the address of the job store, or use `kd up`, which brings one."
        raise PotstillError("KD_REDIS_URL is not set.", remedy)
    from redis.exceptions import RedisError

    from services.store.connection import connect_redis, find_volatility, require_suitable_store
    from services.store.jobs.store import JobStore

    with suppress(RedisError), connect_redis(settings.redis_url) as client:
        require_suitable_store(client)
        JobStore(client).require_known_format()
        if warning := find_volatility(client):
            _say(f"Warning: {warning}")
    return settings


def main() -> None:
    """Run the command; print an error with its remedy, and exit with its code.

    With -v the traceback is printed too.
    """
    verbose = "-v" in sys.argv or "--verbose" in sys.argv
    console.write_any_letters()
    try:
        app()
    except PotstillError as error:
        console.print_error(error.detail, error.remedy, error.help)
        if verbose:
            console.err.print_exception()
        invalid = getattr(error, "status", None) == 422
        sys.exit(INVALID if invalid else EXIT_OF_ERROR.get(error.type, FAILED))
    except ModuleNotFoundError as error:  # the base install has what the API needs, and no torch
        remedy = "pip install 'potstill[worker]' installs all that a run needs."
        console.print_error(f"{error.name} is not installed.", remedy)
        sys.exit(FAILED)
    except Exception as error:
        console.print_error(
            f"{type(error).__name__}: {error}",
            "" if verbose else "`kd -v ...` shows the traceback.",
            PotstillError("").help,
        )
        if verbose:
            console.err.print_exception()
        sys.exit(FAILED)


if __name__ == "__main__":
    main()
