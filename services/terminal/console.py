"""The options, settings and output functions that all commands share. Imports nothing heavy."""

from __future__ import annotations

import io
import json
import os
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.cells import cell_len
from rich.console import Console
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from kd.config.job import JobConfig
    from services.settings import Settings

#: The width of a pipe or a log, so that no line is wrapped or cut.
NO_TERMINAL_WIDTH = 10_000
#: Spaces between the columns of a table.
GAP = 2
#: The longest cell that is never wrapped, in characters.
WORD = 12
#: Longer cells that are not wrapped either: the id of a job or a cache, a number, a time.
UNBREAKABLE = re.compile(
    r"job_[0-9a-z]+|[0-9a-f]{12,64}|[-+]?[\d.,]+(e-?\d+)?|\d{4}-\d\d-\d\d[T ][\d:]{8}"
)

out = Console(width=None if sys.stdout.isatty() else NO_TERMINAL_WIDTH)
err = Console(stderr=True, width=None if sys.stderr.isatty() else NO_TERMINAL_WIDTH)
#: Progress and hints, which --quiet silences.
notes = Console(stderr=True, width=None if sys.stderr.isatty() else NO_TERMINAL_WIDTH)


@dataclass
class OutputMode:
    """How the command prints its result; the option --json sets it."""

    as_json: bool = False


mode = OutputMode()

JobFile = Annotated[Path, typer.Argument(help="Job file, in YAML or JSON.")]
JobName = Annotated[
    str, typer.Argument(metavar="ID", help="Id of a job, the beginning of one, or `last`.")
]
Overrides = Annotated[
    list[str] | None,
    typer.Option("--set", help="Override a value of the job: --set train.max_steps=100"),
]
Server = Annotated[
    str | None, typer.Option("--server", help="Address of the service. Default: KD_SERVER.")
]
Home = Annotated[
    Path | None, typer.Option("--home", help="Data folder. Default: KD_HOME, or ./potstill-data.")
]
Fingerprint = Annotated[
    str, typer.Argument(help="Fingerprint of a cache, or the beginning of one.")
]


def make_settings(**changes: Any) -> Settings:
    """Return the settings with those ``changes`` that are not None.

    A wrong environment variable is a usage error.
    """
    from pydantic import ValidationError

    from services.settings import Settings

    try:
        return Settings(**{name: value for name, value in changes.items() if value is not None})
    except ValidationError as error:
        wrong = "; ".join(
            f"KD_{'.'.join(map(str, item['loc'])).upper()}: {item['msg']}"
            for item in error.errors()
        )
        raise typer.BadParameter(wrong, param_hint="environment") from None


def audit_command(settings: Settings, action: str, target: str, **more: Any) -> None:
    """Write into the audit log what a command did on this machine.

    A data folder that does not exist is made only if a setting or an option names it.
    """
    import getpass

    from cache.errors import StorageError
    from services.store.audit import AuditLog

    if not settings.home.is_dir() and "home" not in settings.model_fields_set:
        return
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # a user without an entry, as in a container
        user = str(os.getuid())
    try:
        AuditLog(settings).write(f"os:{user}", action, target, **more)
    except (StorageError, OSError) as error:
        print_error(
            f"The audit log was not written: {error}",
            "The command was carried out; make room in KD_HOME/audit, or let it be written.",
        )


def write_new_file(path: Path, text: str) -> None:
    """Write a file that must not be there yet. Raises ``PotstillError`` if it cannot be made."""
    from cache.errors import PotstillError

    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(text)
    except OSError as error:
        detail = f"{path} cannot be written: {error.strerror}."
        raise PotstillError(detail, "Give the name of a new file.") from None


def load_job_file(job_file: Path, overrides: list[str] | None) -> JobConfig:
    """Return the job in the file, with the overrides applied."""
    from kd.config.jobfile import load_config

    return load_config(job_file, overrides or ())


def print_error(detail: str, remedy: str, place: str = "") -> None:
    """Print an error, its remedy, and the ``place`` of its entry in the documentation."""
    # Text, because rich would read brackets in a plain string as markup.
    err.print(Text.assemble(("error: ", "bold red"), detail))
    if remedy:
        err.print(Text.assemble(("remedy: ", "bold"), remedy))
    if place:
        command = f"kd explain {place.rpartition('#')[2]}"
        err.print(Text.assemble(("help: ", "bold"), f"{place}, or `{command}`"))


def print_table(columns: list[str], rows: list[list[str]], spare: tuple[str, ...] = ()) -> None:
    """Print a table as wide as the terminal: text is wrapped, and ids, numbers and times are whole.

    If not all columns fit, those in ``spare`` are left out, in this order. In a pipe every row is
    one line of any length, and ``-`` stands for an empty cell of a column with a title.
    """
    if out.width == NO_TERMINAL_WIDTH:
        _print_lines(columns, rows)
        return
    cells = [[row[place] for row in rows] for place in range(len(columns))]
    kept = list(range(len(columns)))
    for title in spare:
        widths = [_measure_column(columns[place], cells[place]) for place in kept]
        if sum(widths) + GAP * (len(kept) - 1) <= out.width:
            break
        kept.remove(columns.index(title))
    grid = Table(box=None, show_header=any(columns), pad_edge=False)
    for place in kept:
        whole = _is_whole(cells[place])
        least = max(map(cell_len, [columns[place], *cells[place]])) if whole else None
        grid.add_column(columns[place], no_wrap=whole, min_width=least, overflow="fold")
    for row in rows:
        grid.add_row(*(Text(row[place]) for place in kept))
    out.print(grid, crop=False)


def _print_lines(columns: list[str], rows: list[list[str]]) -> None:
    titled = any(columns)
    lines = [[" ".join(cell.split("\n")) or "-" * titled for cell in row] for row in rows]
    lines = [columns, *lines] if titled else lines
    widths = [max(map(cell_len, cells)) for cells in zip(*lines, strict=True)]
    for line in lines:
        pairs = zip(line, widths, strict=True)
        padded = (cell + " " * (width - cell_len(cell) + GAP) for cell, width in pairs)
        sys.stdout.write("".join(padded).rstrip() + "\n")


def _measure_column(title: str, cells: list[str]) -> int:
    """Return the least width of a column."""
    widest = max(map(cell_len, [title, *cells]))
    return widest if _is_whole(cells) else max(cell_len(title), min(widest, WORD))


def _is_whole(cells: list[str]) -> bool:
    return all(len(cell) <= WORD or UNBREAKABLE.fullmatch(cell) for cell in cells)


def format_time(time: str) -> str:
    """Format a time of the API to the second, in UTC.

    In a pipe the "T" stays, because a program may split the line at its spaces.
    """
    return time[:19] if out.width == NO_TERMINAL_WIDTH else time[:19].replace("T", " ")


def print_page(text: str) -> None:
    """Print Markdown: laid out in a terminal, as it is in a pipe."""
    if not out.is_terminal:
        out.print(text, markup=False, highlight=False, soft_wrap=True)
        return
    from rich.markdown import Markdown

    out.print(Markdown(text))


def print_facts(facts: Mapping[str, Any]) -> None:
    """Print each fact that has a value on its own line, with a readable name and unit."""
    texts = {_format_name(name): format_value(value, name) for name, value in facts.items()}
    print_table(["", ""], [[name, text] for name, text in texts.items() if text])


def format_value(value: Any, name: str = "") -> str:
    """Format a JSON value for people.

    The name of its field shows whether the value is in bytes, in seconds, or a time.
    """
    if isinstance(value, dict):
        return ", ".join(
            f"{_format_name(key)} {format_value(item, key)}"
            for key, item in value.items()
            if item is not None
        )
    if isinstance(value, list):
        return ", ".join(format_value(item, name) for item in value)
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int) and name.rpartition("_")[2] == "bytes":
        return _format_size(value)
    if isinstance(value, int | float) and name.rpartition("_")[2] == "seconds":
        return _format_duration(value)
    if isinstance(value, str) and (name.endswith("_at") or name in ("created", "began")):
        return format_time(value)
    return f"{value:.6g}" if isinstance(value, float) else "" if value is None else str(value)


def _format_name(name: str) -> str:
    """Return a field's name without its unit, which stands beside the value."""
    named = {"bytes": "size", "seconds": "time", "device_seconds": "device time"}.get(name, name)
    return named.removesuffix("_bytes").removesuffix("_seconds").replace("_", " ")


def _format_size(count: int) -> str:
    """Format bytes in the largest unit that gives at least 1, to three digits."""
    size = float(count)
    units = ["bytes", "KiB", "MiB", "GiB", "TiB"]
    while size >= 1023.5 and len(units) > 1:  # 1023.5 would be shown as 1024
        size /= 1024
        units = units[1:]
    return f"{size:.{0 if size >= 99.95 or units[0] == 'bytes' else 1}f} {units[0]}"


def _format_duration(seconds: float) -> str:
    if seconds < 60:
        return f"{seconds:.3g} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"


def print_as_json(value: Any) -> bool:
    """Print a value as JSON if the user gave --json; return whether it was printed."""
    if mode.as_json:
        print_json(value)
    return mode.as_json


def print_result(value: Any, text: str) -> None:
    """Print the result of a command: ``value`` as JSON with --json, and else ``text``."""
    if not print_as_json(value):
        out.print(text, markup=False, highlight=False, soft_wrap=True)


def print_summary(summary: Mapping[str, Any]) -> None:
    """Print the facts that a command found: as JSON with --json, and else a line for each."""
    if not print_as_json(summary):
        print_facts(summary)


def print_json(value: Any) -> None:
    """Print a JSON value for programs; where the locale cannot write all letters, as escapes."""
    escaped = not (sys.stdout.encoding or "").lower().startswith("utf")
    sys.stdout.write(json.dumps(value, indent=2, ensure_ascii=escaped) + "\n")


def write_any_letters() -> None:
    """Let stdout and stderr write a ``?`` for a letter that the encoding of the locale lacks."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper) and stream.errors == "strict":
            stream.reconfigure(errors="replace")
