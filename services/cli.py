"""The command ``kd``.

Exit codes: 0 ok, 1 failed, 2 invalid job or usage, 3 no server, 4 verification failed, 130 Ctrl-C;
commands that wait for a job: 100 it failed, 103 it was cancelled.

What is heavy is imported inside the command that needs it: ``kd --help`` answers at once.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cache.errors import PotstillError
from services.terminal import backup, caches, check, estimate, evaluate, exchange, jobs, keys
from services.terminal.console import (
    AsJson,
    Home,
    JobFile,
    Overrides,
    Server,
    complain,
    err,
    load,
    make_settings,
    out,
    print_json,
    table,
)

if TYPE_CHECKING:
    from services.settings import Settings

FAILED, INVALID, UNREACHABLE = 1, 2, 3
EXIT_OF_ERROR = {
    "invalid_config": INVALID,
    "keys_error": INVALID,
    "unsafe_bind": INVALID,
    "unreachable": UNREACHABLE,
}

app = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Potstill: knowledge distillation as a service.",
)
app.add_typer(jobs.app)
app.add_typer(estimate.app)
app.add_typer(check.app)
app.add_typer(evaluate.app)
caches.cache_app.add_typer(exchange.app)
app.add_typer(caches.app)
app.add_typer(keys.app)
app.add_typer(backup.app)


def _show_version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        out.print(version("potstill"))
        raise typer.Exit


@app.callback()
def kd(
    verbose: Annotated[bool, typer.Option("-v", "--verbose", help="Show tracebacks.")] = False,
    version: Annotated[
        bool, typer.Option("--version", help="Show the version and exit.", callback=_show_version, is_eager=True)
    ] = False,
) -> None:
    """Potstill: knowledge distillation as a service."""


# ---------------------------------------------------------------------- the service


@app.command()
def up(
    host: Annotated[str | None, typer.Option(help="Address to listen on.")] = None,
    port: Annotated[int | None, typer.Option(help="Port to listen on; 0 = any free one.")] = None,
    workers: Annotated[int, typer.Option(min=1, help="Workers; each runs one stage at a time.")] = 1,
    home: Home = None,
) -> None:
    """Run the whole service in this terminal: job store, API and workers. Ctrl-C stops all of it."""
    import threading

    from services.terminal.up import running

    _interrupt_on_signals()
    with running(make_settings(host=host, port=port, home=home), workers, err.print) as settings:
        out.print(f"Potstill is up at {settings.server}  (data and logs in {settings.home}; Ctrl-C stops it)")
        try:
            threading.Event().wait()
        except KeyboardInterrupt:
            err.print("stopping; a run under way saves its state first")


@app.command()
def serve(
    host: Annotated[str | None, typer.Option(help="Address to listen on.")] = None,
    port: Annotated[int | None, typer.Option(help="Port to listen on.")] = None,
) -> None:
    """Run the API alone; KD_REDIS_URL names the job store."""
    from services.api.__main__ import run as serve_api

    serve_api(_with_store(make_settings(host=host, port=port)))


@app.command()
def worker(
    queues: Annotated[str, typer.Option(help="Stages to work on, separated by commas.")] = "precompute,train",
) -> None:
    """Run one worker alone; KD_REDIS_URL names the job store."""
    from services.settings import STAGES
    from services.worker.__main__ import run as work

    names = [name.strip() for name in queues.split(",")]
    if strange := set(names) - set(STAGES):
        raise typer.BadParameter(f"{', '.join(strange)}: stages are {', '.join(STAGES)}", param_hint="--queues")
    work(_with_store(make_settings()), names)


@app.command()
def demo(
    baseline: Annotated[bool, typer.Option("--baseline", help="Train a student without a teacher too.")] = False,
    home: Home = None,
) -> None:
    """Distil the example through the whole service on this machine, and print its report."""
    from services.terminal.demo import run_demo

    _interrupt_on_signals()
    raise typer.Exit(run_demo(make_settings(home=home), baseline, out, err))


# ---------------------------------------------------------------------- jobs


@app.command()
def run(
    job_file: JobFile,
    overrides: Overrides = None,
    run_dir: Annotated[Path | None, typer.Option(help="Folder of the run. Default: runs/NAME under KD_HOME.")] = None,
    home: Home = None,
    as_json: AsJson = False,
) -> None:
    """Run a job here and now, in this process: no server, no job store. Ctrl-C saves; the same command goes on."""
    from services.terminal.local import run_here

    _interrupt_on_signals()
    settings = make_settings(home=home)
    config = load(job_file, overrides)
    report = run_here(config, settings, (run_dir or settings.run_dir(config.name)).resolve(), err)
    _print_report(report, as_json)


@app.command()
def validate(job_file: JobFile, overrides: Overrides = None, home: Home = None, as_json: AsJson = False) -> None:
    """Say what is wrong with a job, as far as it can be known without loading a model.

    What it asks for and this machine has not installed is a warning: its worker may be another machine.
    """
    from kd.errors import ConfigError
    from kd.extras import missing_extras
    from kd.validate import check_inputs

    settings, warnings = make_settings(home=home), []
    try:
        config = load(job_file, overrides)
        warnings = missing_extras(config)
        problems = check_inputs(config, settings.root, settings.home)
    except ConfigError as error:
        problems = error.problems
    if as_json:
        found = {"problems": problems, "warnings": warnings}
        print_json({"valid": not problems} | {name: [each.to_json() for each in found[name]] for name in found})
    elif not problems:
        out.print(f"{job_file} is a valid job: {config.kind} {config.name}")
    for problem in () if as_json else problems:
        complain(str(problem), "")
    for warning in () if as_json else warnings:
        err.print(f"warning: {warning}", markup=False)
    raise typer.Exit(INVALID if problems else 0)


@app.command()
def doctor(home: Home = None, server: Server = None, as_json: AsJson = False) -> None:
    """Say whether this machine has what Potstill needs."""
    from services.terminal.doctor import examine

    findings = examine(make_settings(home=home, server=server))
    if as_json:
        print_json([{"what": finding.what, "ok": finding.ok, "detail": finding.detail} for finding in findings])
    else:
        table(["", "", ""], [["ok" if finding.ok else "no", finding.what, finding.detail] for finding in findings])
    raise typer.Exit(0 if all(finding.ok for finding in findings if finding.needed) else FAILED)


def _with_store(settings: Settings) -> Settings:
    if settings.redis_url is None:
        raise PotstillError("KD_REDIS_URL is not set.", "Name the job store with it, or use `kd up`, which brings one.")
    return settings


def _print_report(report: dict[str, Any], as_json: bool) -> None:
    if as_json:
        print_json(report)
        return
    for name, path in report.get("artifacts", {}).items():
        out.print(f"{name}: {path}", soft_wrap=True)
    page = Path(report.get("artifacts", {}).get("report.md", ""))
    if page.is_file():
        out.print(page.read_text(encoding="utf-8"), markup=False)


def _interrupt_on_signals() -> None:
    """SIGINT and SIGTERM both raise KeyboardInterrupt; a shell starts background jobs with SIGINT ignored."""
    import signal

    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.default_int_handler)


def main() -> None:
    """The entry point: an error is a sentence, a remedy and an exit code; -v adds the traceback."""
    verbose = "-v" in sys.argv or "--verbose" in sys.argv
    try:
        app()
    except PotstillError as error:
        complain(error.detail, error.remedy)
        code = INVALID if getattr(error, "status", None) == 422 else EXIT_OF_ERROR.get(error.type, FAILED)
        if verbose:
            err.print_exception()
        sys.exit(code)
    except ModuleNotFoundError as error:  # the base install has what the API needs, and no torch
        complain(f"{error.name} is not installed.", "pip install 'potstill[worker]' has all that a run needs.")
        sys.exit(FAILED)
    except Exception as error:
        complain(f"{type(error).__name__}: {error}", "" if verbose else "`kd -v ...` shows where.")
        if verbose:
            err.print_exception()
        sys.exit(FAILED)


if __name__ == "__main__":
    main()
