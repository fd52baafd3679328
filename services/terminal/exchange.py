"""``kd cache import`` and ``kd cache export``: teacher records of other tools, in and out."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.text import Text

from services.terminal.caches import cache_folder
from services.terminal.console import AsJson, Fingerprint, Home, err, make_settings, plain, print_json, table

if TYPE_CHECKING:
    from kd.progress import Monitor

app = typer.Typer()

ImportFormat = Annotated[str, typer.Argument(metavar="FORMAT", help="distillkit, vllm, axolotl or parquet.")]
Paths = Annotated[list[Path], typer.Argument(help="Files, or folders of them; validation* files are held out.")]
Tokenizer = Annotated[str, typer.Option(help="Folder of the tokenizer that the records were made with.")]
Entries = Annotated[int | None, typer.Option("--k", min=1, help="Entries of a record. Default: as many as there are.")]
Length = Annotated[int | None, typer.Option(min=2, help="Cut longer rows at so many tokens. Default: cut nothing.")]
Config = Annotated[Path | None, typer.Option(help="DistillKit's compression_config.yaml. Default: beside the data.")]
HeldOut = Annotated[float, typer.Option(min=0.0, max=0.5, help="Share of the sequences to hold out, from the end.")]
Teacher = Annotated[str, typer.Option(help="Name of the teacher, for people.")]
Tolerance = Annotated[
    float | None, typer.Option(min=0.0, help="How far probabilities may sum above 1. Default: what rounding explains.")
]
Ahead = Annotated[bool, typer.Option("--ahead", help="axolotl: lists are about the token after the one they stand at.")]
ExportFormat = Annotated[str, typer.Option("--format", help="parquet or distillkit.")]
Out = Annotated[Path, typer.Option(help="New folder to write to.")]


@app.command("import")
def cache_import(
    format: ImportFormat,
    paths: Paths,
    tokenizer: Tokenizer,
    k: Entries = None,
    sequence_length: Length = None,
    config: Config = None,
    validation_fraction: HeldOut = 0.0,
    teacher_name: Teacher = "",
    mass_tolerance: Tolerance = None,
    ahead: Ahead = False,
    home: Home = None,
    as_json: AsJson = False,
) -> None:
    """Make a cache of profile topk from another tool's teacher records."""
    from kd.exchange.importing import Request, import_records
    from kd.models import hide_progress_bars

    hide_progress_bars()
    request = Request(
        format=format,
        paths=tuple(paths),
        tokenizer=tokenizer,
        k=k,
        sequence_length=sequence_length,
        validation_fraction=validation_fraction,
        config=config,
        teacher_name=teacher_name,
        tolerance=mass_tolerance,
        ahead=ahead,
    )
    with _shown() as monitor:
        summary = import_records(request, make_settings(home=home).caches, monitor)
    _print(summary, as_json)


@app.command("export")
def cache_export(
    fingerprint: Fingerprint,
    format: ExportFormat,
    out: Out,
    k: Entries = None,
    home: Home = None,
    as_json: AsJson = False,
) -> None:
    """Write a cache as a dataset of another tool, into a new folder."""
    from cache.store import open_cache
    from kd.exchange.exporting import export_records

    store = open_cache(cache_folder(fingerprint, home))
    with _shown() as monitor:
        summary = export_records(store, format, out, k, monitor)
    if "warning" in summary and not as_json:
        err.print(Text.assemble(("warning: ", "bold yellow"), summary.pop("warning")))
    _print(summary, as_json)


@contextmanager
def _shown() -> Iterator[Monitor]:
    """A monitor whose events are shown on the terminal."""
    from kd.progress import Event, Monitor
    from services.terminal.follow import Display

    with Display(err) as display:

        def show(event: Event) -> None:
            display.show(event.type, event.data)

        yield Monitor(show)


def _print(summary: dict[str, Any], as_json: bool) -> None:
    if as_json:
        print_json(summary)
        return
    texts = {name: ", ".join(value) if isinstance(value, list) else plain(value) for name, value in summary.items()}
    table(["", ""], [[name, text] for name, text in texts.items()])
