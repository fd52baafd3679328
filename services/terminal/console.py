"""What every command shares: its options, its settings, and how it speaks. Imports nothing heavy."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping
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

NO_TERMINAL_WIDTH = 10_000  # into a pipe or a log nothing is wrapped or cut off
GAP, WORD = 2, 12  # between columns; a cell of so many characters is not wrapped
#: Longer ones that are not, either: an id of a job or a cache, a number, a time.
WHOLE = re.compile(r"job_[0-9a-z]+|[0-9a-f]{12,64}|[-+]?[\d.,]+(e-?\d+)?|\d{4}-\d\d-\d\d[T ][\d:]{8}")

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


def table(columns: list[str], rows: list[list[str]], spare: tuple[str, ...] = ()) -> None:
    """Print a table, as wide as the terminal: text wraps there, ids, numbers and times are never cut.

    Columns in ``spare`` are left out, in this order, where there is no room for all. Into a pipe goes a line for each
    row, of any length, and ``-`` where a column with a title has nothing to say.
    """
    if out.width == NO_TERMINAL_WIDTH:
        _print_lines(columns, rows)
        return
    cells = {title: [row[place] for row in rows] for place, title in enumerate(columns)} if any(columns) else {}
    for title in spare:
        if sum(map(_room, cells, cells.values())) + GAP * (len(cells) - 1) <= out.width:
            break
        del cells[title]
    kept = [place for place, title in enumerate(columns) if title in cells or not cells]
    grid = Table(box=None, show_header=any(columns), pad_edge=False)
    for place in kept:
        whole = _is_whole([row[place] for row in rows])
        least = max(map(cell_len, [columns[place], *(row[place] for row in rows)])) if whole else None
        grid.add_column(columns[place], no_wrap=whole, min_width=least, overflow="fold")
    for row in rows:
        grid.add_row(*(Text(row[place]) for place in kept))
    out.print(grid, crop=False)


def _print_lines(columns: list[str], rows: list[list[str]]) -> None:
    titled = any(columns)
    lines = [columns, *([" ".join(cell.split("\n")) or "-" * titled for cell in row] for row in rows)]
    widths = [max(map(cell_len, cells)) for cells in zip(*lines, strict=True)]
    for line in lines if titled else lines[1:]:
        padded = (cell + " " * (width - cell_len(cell) + GAP) for cell, width in zip(line, widths, strict=True))
        sys.stdout.write("".join(padded).rstrip() + "\n")


def _room(title: str, cells: list[str]) -> int:
    """What a column takes at least."""
    widest = max(map(cell_len, [title, *cells]))
    return widest if _is_whole(cells) else max(cell_len(title), min(widest, WORD))


def _is_whole(cells: list[str]) -> bool:
    return all(len(cell) <= WORD or WHOLE.fullmatch(cell) for cell in cells)


def moment(time: str) -> str:
    """A time of the API's to the second, in UTC as it is; without a space where a program may cut columns."""
    return time[:19] if out.width == NO_TERMINAL_WIDTH else time[:19].replace("T", " ")


def print_facts(facts: Mapping[str, Any]) -> None:
    """Print what has a value, a line for each, with its name and its unit for people."""
    texts = {_label(name): plain(value, name) for name, value in facts.items()}
    table(["", ""], [[name, text] for name, text in texts.items() if text])


def plain(value: Any, name: str = "") -> str:
    """A JSON value for people; ``name``, the field's, tells bytes, seconds and times from other values."""
    if isinstance(value, dict):
        return ", ".join(f"{_label(key)} {plain(item, key)}" for key, item in value.items() if item is not None)
    if isinstance(value, list):
        return ", ".join(plain(item, name) for item in value)
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int) and name.rpartition("_")[2] == "bytes":
        return _size(value)
    if isinstance(value, int | float) and name.rpartition("_")[2] == "seconds":
        return _duration(value)
    if isinstance(value, str) and (name.endswith("_at") or name == "created"):
        return moment(value)
    return f"{value:.6g}" if isinstance(value, float) else "" if value is None else str(value)


def _label(name: str) -> str:
    """A field's name without the unit, which the value has."""
    named = {"bytes": "size", "seconds": "time"}.get(name, name)
    return named.removesuffix("_bytes").removesuffix("_seconds").replace("_", " ")


def _size(count: int) -> str:
    """Bytes in the largest unit of which there is one, to three digits."""
    size, units = float(count), ["bytes", "KiB", "MiB", "GiB", "TiB"]
    while size >= 1023.5 and len(units) > 1:  # 1023.5 would be shown as 1024
        size, units = size / 1024, units[1:]
    return f"{size:.{0 if size >= 99.95 or units[0] == 'bytes' else 1}f} {units[0]}"


def _duration(seconds: float) -> str:
    if seconds < 60:
        return f"{seconds:.3g} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"


def print_json(value: Any) -> None:
    """Print a JSON value for programs."""
    sys.stdout.write(json.dumps(value, indent=2, ensure_ascii=False) + "\n")
