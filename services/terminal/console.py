"""What every command shares: its options, its settings, and how it speaks. Imports nothing heavy."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from kd.config.job import JobConfig
    from services.settings import Settings

NO_TERMINAL_WIDTH = 10_000  # into a pipe or a log nothing is wrapped or cut off

out = Console(width=None if sys.stdout.isatty() else NO_TERMINAL_WIDTH)
err = Console(stderr=True, width=None if sys.stderr.isatty() else NO_TERMINAL_WIDTH)

JobFile = Annotated[Path, typer.Argument(help="Job file, YAML or JSON.")]
JobName = Annotated[str, typer.Argument(metavar="ID", help="Job id, the beginning of one, or `last`.")]
Overrides = Annotated[list[str] | None, typer.Option("--set", help="Override a value: --set train.max_steps=100")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Server = Annotated[str | None, typer.Option("--server", help="Address of the service. Default: KD_SERVER.")]
Home = Annotated[Path | None, typer.Option("--home", help="Data folder. Default: KD_HOME, or ./potstill-data.")]
Fingerprint = Annotated[str, typer.Argument(help="Fingerprint of a cache, or the beginning of one.")]


def make_settings(**changes: Any) -> Settings:
    """The settings, with those ``changes`` that are not None; a wrong variable is a usage error."""
    from pydantic import ValidationError

    from services.settings import Settings

    try:
        return Settings(**{name: value for name, value in changes.items() if value is not None})
    except ValidationError as error:
        wrong = "; ".join(f"KD_{'.'.join(map(str, item['loc'])).upper()}: {item['msg']}" for item in error.errors())
        raise typer.BadParameter(wrong, param_hint="environment") from None


def load(job_file: Path, overrides: list[str] | None) -> JobConfig:
    """The job in the file."""
    from kd.jobfile import load_config

    return load_config(job_file, overrides or ())


def complain(detail: str, remedy: str) -> None:
    """Print an error and what to do about it."""
    err.print(Text.assemble(("error: ", "bold red"), detail))
    if remedy:
        err.print(Text.assemble(("remedy: ", "bold"), remedy))


def table(columns: list[str], rows: list[list[str]]) -> None:
    """Print a table."""
    grid = Table(*columns, box=None, show_header=any(columns), pad_edge=False)
    for row in rows:
        grid.add_row(*map(Text, row))
    out.print(grid)


def plain(value: Any) -> str:
    """A JSON value for people."""
    if isinstance(value, dict):
        return ", ".join(f"{name} {plain(item)}" for name, item in value.items() if item is not None)
    if isinstance(value, list):
        return ", ".join(map(plain, value))
    return f"{value:.6g}" if isinstance(value, float) else "" if value is None else str(value)


def print_json(value: Any) -> None:
    """Print a JSON value for programs."""
    sys.stdout.write(json.dumps(value, indent=2, ensure_ascii=False) + "\n")
