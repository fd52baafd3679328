"""``kd cache import`` and ``kd cache export``: convert teacher records from and to other tools."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.text import Text

from services.terminal import console
from services.terminal.commands.caches import find_cache_folder

app = typer.Typer()

ImportFormat = Annotated[
    str,
    typer.Argument(
        metavar="FORMAT", help="Format of the records: distillkit, vllm, axolotl or parquet."
    ),
]
Paths = Annotated[
    list[Path],
    typer.Argument(help="Files, or folders with files; files named validation* are held out."),
]
Entries = Annotated[
    int | None, typer.Option("--k", min=1, help="Entries of each record. Default: all that it has.")
]
Length = Annotated[
    int | None, typer.Option(min=2, help="Cut rows after this many tokens. Default: cut nothing.")
]
Config = Annotated[
    Path | None,
    typer.Option(help="DistillKit's compression_config.yaml. Default: the one beside the data."),
]
HeldOut = Annotated[
    float,
    typer.Option(min=0.0, max=0.5, help="Share of the sequences to hold out, taken from the end."),
]
Tolerance = Annotated[
    float | None,
    typer.Option(
        min=0.0,
        help="How far the sum of probabilities may exceed 1. Default: as far as rounding explains.",
    ),
]
Ahead = Annotated[
    bool, typer.Option(help="axolotl: each list describes the token after its own position.")
]
ExportFormat = Annotated[
    str, typer.Option("--format", help="Format to write: parquet or distillkit.")
]
Lossy = Annotated[
    bool, typer.Option(help="Leave out what the format cannot hold, such as a sampled tail.")
]


@app.command("import")
def cache_import(
    format: ImportFormat,
    paths: Paths,
    tokenizer: Annotated[str, typer.Option(help="Folder of the tokenizer that made the records.")],
    k: Entries = None,
    sequence_length: Length = None,
    config: Config = None,
    validation_fraction: HeldOut = 0.0,
    teacher_name: Annotated[str, typer.Option(help="Name of the teacher, for display only.")] = "",
    mass_tolerance: Tolerance = None,
    ahead: Ahead = False,
    home: console.Home = None,
) -> None:
    """Make a cache with profile topk from another tool's teacher records.

    A cache that was exported as Parquet without --k comes back as it was.
    """
    from kd.exchange.importing import ImportRequest, import_records
    from kd.models.loading import hide_progress_bars
    from services.terminal.in_process import showing_events

    hide_progress_bars()
    request = ImportRequest(
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
    with showing_events() as monitor:
        summary = import_records(request, console.make_settings(home=home).caches, monitor)
    _print(summary)


@app.command("export")
def cache_export(
    fingerprint: console.Fingerprint,
    format: ExportFormat,
    out: Annotated[Path, typer.Option(help="New folder for the dataset.")],
    k: Entries = None,
    lossy: Lossy = False,
    home: console.Home = None,
) -> None:
    """Write a cache as a dataset of another tool, into a new folder."""
    from cache.reading.usage import hold_for
    from cache.store import open_cache
    from kd.exchange.exporting import export_records
    from services.terminal.in_process import showing_events

    store = open_cache(find_cache_folder(fingerprint, home))
    hold_for(store, store.folder)
    with showing_events() as monitor:
        summary = export_records(store, format, out, k, monitor, lossy)
    settings = console.make_settings(home=home)
    console.audit_command(settings, "cache.export", store.folder.name, format=format, to=str(out))
    if "warning" in summary and not console.mode.as_json:
        console.err.print(Text.assemble(("warning: ", "bold yellow"), summary.pop("warning")))
    _print(summary)


def _print(summary: dict[str, Any]) -> None:
    if not console.print_as_json(summary):
        console.print_table(
            ["", ""], [[name, console.format_value(value)] for name, value in summary.items()]
        )
