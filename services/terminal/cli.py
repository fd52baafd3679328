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
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cache.errors import PotstillError
from services.terminal.catalogue import Catalogue
from services.terminal.commands import (
    accounts,
    caches,
    check,
    comparison,
    evaluate,
    exchange,
    jobs,
    keys,
    recovery,
    retention,
)
from services.terminal.commands.before import forecast, init, validate
from services.terminal.commands.data import backup, buckets, upgrade
from services.terminal.commands.experiments import ablate, landscape
from services.terminal.commands.hub import exchange as hub_exchange
from services.terminal.commands.hub import export, report, runs
from services.terminal.console import (
    NO_TERMINAL_WIDTH,
    AsJson,
    Home,
    JobFile,
    Overrides,
    Server,
    err,
    load_job_file,
    make_settings,
    notes,
    out,
    print_error,
    print_json,
    print_page,
    print_table,
    write_any_letters,
)
from services.terminal.exit_codes import FAILED, INVALID, UNREACHABLE

if TYPE_CHECKING:
    from kd.config.fields.described import FieldHelp
    from services.settings import Settings

#: Settings of every command: -h, and the width of help where no terminal has one.
CONTEXT: dict[str, Any] = {"help_option_names": ["-h", "--help"]}
if not sys.stdout.isatty():
    CONTEXT["terminal_width"] = NO_TERMINAL_WIDTH
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
app.add_typer(jobs.app)
app.add_typer(forecast.app)
app.add_typer(validate.app)
app.add_typer(init.app)
app.add_typer(check.app)
app.add_typer(evaluate.app)
app.add_typer(ablate.app)
app.add_typer(landscape.app)
caches.cache_app.add_typer(exchange.app)
app.add_typer(caches.app)
app.add_typer(hub_exchange.app)
app.add_typer(export.app)
app.add_typer(report.app)
app.add_typer(runs.app)
app.add_typer(keys.app)
app.add_typer(accounts.app)
app.add_typer(backup.app)
app.add_typer(buckets.app)
app.add_typer(retention.app)
app.add_typer(upgrade.app)
jobs.jobs_app.add_typer(recovery.app)
jobs.jobs_app.add_typer(comparison.app)


def _show_version(wanted: bool) -> None:
    if wanted:
        from kd.face.version import read_version

        out.print(read_version())
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
    home: Home = None,
    as_json: AsJson = False,
) -> None:
    """Run the whole service in this terminal: job store, API and workers. Ctrl-C stops it."""
    import threading

    from services.terminal.commands.up import running

    _interrupt_on_signals()
    with running(make_settings(host=host, port=port, home=home), workers, _say) as settings:
        if as_json:
            # One line, because the command goes on: a program reads the line and uses the service.
            facts = {"server": settings.server, "home": str(settings.home), "pid": os.getpid()}
            print(json.dumps(facts), flush=True)
        else:
            out.print(
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

    run_api(_require_store(make_settings(host=host, port=port, log_format=_choose_log(as_json))))


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
        raise typer.BadParameter(
            f"{', '.join(unknown)}: the stages are {', '.join(stages)}", param_hint="--queues"
        )
    run_worker(_require_store(make_settings(log_format=_choose_log(as_json))), names)


@app.command()
def demo(
    baseline: Annotated[
        bool,
        typer.Option("--baseline/--no-baseline", help="Also train a student without a teacher."),
    ] = False,
    home: Home = None,
    as_json: AsJson = False,
) -> None:
    """Run the example job through the whole service on this machine, and print its report."""
    from services.terminal.commands.demo import print_demo, run_demo, succeeded

    _interrupt_on_signals()
    jobs = run_demo(make_settings(home=home), baseline, notes)
    print_json(jobs) if as_json else print_demo(jobs, out, notes)
    raise typer.Exit(0 if succeeded(jobs) else FAILED)


@app.command()
def example(
    folder: Annotated[
        Path, typer.Argument(help="Folder to write to. Default: the current folder.")
    ] = Path(),
    as_json: AsJson = False,
) -> None:
    """Write the job, teacher and text of the example to examples/austen."""
    from services.terminal.commands.demo import copy_example

    written = copy_example(folder)
    if as_json:
        print_json({"folder": str(written), "job": str(written / "job.yaml")})
        return
    out.print(f"wrote {written}; try: kd run {written / 'job.yaml'}", soft_wrap=True)


# ---------------------------------------------------------------------- jobs


@app.command()
def run(
    job_file: JobFile,
    overrides: Overrides = None,
    run_dir: Annotated[
        Path | None, typer.Option(help="Folder of the run. Default: runs/NAME in KD_HOME.")
    ] = None,
    home: Home = None,
    as_json: AsJson = False,
) -> None:
    """Run a job in this process, without a server or a job store.

    Ctrl-C saves the state and stops, and so do SIGTERM and the end of the terminal; the same
    command continues from there.
    """
    from services.terminal.commands.run import run_here

    _interrupt_on_signals()
    settings = make_settings(home=home)
    config = load_job_file(job_file, overrides)
    report = run_here(config, settings, (run_dir or settings.run_dir(config.name)).resolve(), notes)
    if as_json:
        print_json(report)
        return
    artifacts = report.get("artifacts", {})
    for name, path in artifacts.items():
        out.print(f"{name}: {path}", soft_wrap=True)
    page = Path(artifacts.get("report.md", ""))
    if page.is_file():
        print_page(page.read_text(encoding="utf-8"))


@app.command()
def doctor(home: Home = None, server: Server = None, as_json: AsJson = False) -> None:
    """Check whether this machine has what Potstill needs."""
    from services.terminal.commands.doctor import examine_machine

    findings = examine_machine(make_settings(home=home, server=server))
    if as_json:
        print_json(
            [
                {"what": finding.what, "ok": finding.ok, "detail": finding.detail}
                for finding in findings
            ]
        )
    else:
        print_table(
            ["", "", ""],
            [["ok" if finding.ok else "no", finding.what, finding.detail] for finding in findings],
        )
    raise typer.Exit(0 if all(finding.ok for finding in findings if finding.needed) else FAILED)


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
    as_json: AsJson = False,
) -> None:
    """Explain an error, with its cause and remedy, or a field of a job and the fields in it."""
    from kd.config.fields.described import explain_field
    from services.terminal.explanations import find_entry, list_codes

    if not code:
        codes = list_codes()
        print_json(codes) if as_json else out.print("\n".join(codes), markup=False)
        return
    entry = find_entry(code)
    if entry is None and (fields := explain_field(code)):
        _print_fields(fields) if not as_json else print_json([each._asdict() for each in fields])
        return
    if entry is None:
        raise typer.BadParameter(
            f"{code!r} is neither a code of an error nor a field of a job. `kd explain` lists the "
            "codes, and `kd explain train` the fields of a section.",
            param_hint="CODE",
        )
    if as_json:
        print_json({"code": code.replace("-", "_"), "entry": entry})
    else:
        out.print(entry, markup=False, highlight=False, soft_wrap=True)


def _print_fields(fields: Sequence[FieldHelp]) -> None:
    """Print each field of a job on a line, and below it what it means."""
    for each in fields:
        default = f"; default {each.default}" if each.default not in ("", "required") else ""
        needed = ", required" if each.default == "required" else ""
        out.print(f"{each.place}: {each.value}{default}{needed}", markup=False, highlight=False)
        text = textwrap.fill(
            each.meaning, min(out.width, 100), initial_indent="    ", subsequent_indent="    "
        )
        out.print(text, markup=False, highlight=False, soft_wrap=True)


def _say(text: str) -> None:
    """Print a line to stderr. It is lost where a full disk or a closed terminal takes none."""
    with suppress(OSError):
        notes.print(text, markup=False)


def _choose_log(as_json: bool) -> str | None:
    """The format of the log that --json asks for; None leaves it to KD_LOG_FORMAT."""
    return "json" if as_json else None


def _require_store(settings: Settings) -> Settings:
    """Return ``settings``; refuse a job store of another format, and one that would lose jobs.

    One that does not answer yet is waited for later.
    """
    if settings.redis_url is None:
        raise PotstillError(
            "KD_REDIS_URL is not set.",
            "Set it to the address of the job store, or use `kd up`, which brings one.",
        )
    from redis.exceptions import RedisError

    from services.store.connection import connect_redis, find_volatility, require_suitable_store
    from services.store.formats import require_known_records

    with suppress(RedisError), connect_redis(settings.redis_url) as client:
        require_suitable_store(client)
        require_known_records(client)
        if warning := find_volatility(client):
            _say(f"Warning: {warning}")
    return settings


def _interrupt_on_signals() -> None:
    """Make SIGINT, SIGTERM and the end of the terminal (SIGHUP) raise KeyboardInterrupt.

    SIGINT is set too, because a shell starts background jobs with SIGINT ignored. An ignored
    SIGHUP stays so: `nohup` asks for it. A terminal may send SIGHUP twice, and the second one is
    no second Ctrl-C, which would stop at once.
    """
    import signal

    def hang_up(*_: object) -> None:
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        raise KeyboardInterrupt

    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        signal.signal(signal.SIGHUP, hang_up)


def main() -> None:
    """Run the command; print an error with its remedy, and exit with its code.

    With -v the traceback is printed too.
    """
    verbose = "-v" in sys.argv or "--verbose" in sys.argv
    write_any_letters()
    try:
        app()
    except PotstillError as error:
        print_error(error.detail, error.remedy, error.help)
        code = (
            INVALID
            if getattr(error, "status", None) == 422
            else EXIT_OF_ERROR.get(error.type, FAILED)
        )
        if verbose:
            err.print_exception()
        sys.exit(code)
    except ModuleNotFoundError as error:  # the base install has what the API needs, and no torch
        print_error(
            f"{error.name} is not installed.",
            "pip install 'potstill[worker]' installs all that a run needs.",
        )
        sys.exit(FAILED)
    except Exception as error:
        print_error(
            f"{type(error).__name__}: {error}",
            "" if verbose else "`kd -v ...` shows the traceback.",
            PotstillError("").help,
        )
        if verbose:
            err.print_exception()
        sys.exit(FAILED)


if __name__ == "__main__":
    main()
