"""``kd export``: a finished student as a merged model, an adapter, or a GGUF file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from services.terminal.commands.hub.transfer import Source, find_source
from services.terminal.console import Home, make_settings, print_summary

app = typer.Typer()

#: The forms, which ``kd.exchange.students`` has too; that module loads torch.
FORMS = ("merged", "adapter", "gguf")
PRECISIONS = ("auto", "f32", "f16", "bf16", "q8_0")


@app.command()
def export(
    student: Source,
    to: Annotated[
        str,
        typer.Option(
            metavar="merged|adapter|gguf",
            help="merged: one whole model; adapter: LoRA adapters in peft's format; gguf: one "
            "file for llama.cpp.",
        ),
    ],
    out: Annotated[
        Path | None,
        typer.Option(
            help="New folder or file. Default: beside the student, named after the format."
        ),
    ] = None,
    converter: Annotated[
        str | None,
        typer.Option(
            help="llama.cpp's folder, or its convert_hf_to_gguf.py. Default: the one on PATH."
        ),
    ] = None,
    outtype: Annotated[
        str,
        typer.Option(
            metavar="|".join(PRECISIONS),
            help="Precision of a GGUF file. auto: the student's precision.",
        ),
    ] = "auto",
    home: Home = None,
) -> None:
    """Write a finished student in another format."""
    for option, given, known in (("--to", to, FORMS), ("--outtype", outtype, PRECISIONS)):
        if given not in known:
            raise typer.BadParameter(f"{given!r} is none of {', '.join(known)}", param_hint=option)
    from kd.exchange.students import StudentExport
    from kd.models.loading import hide_progress_bars
    from services.terminal.in_process import showing_events

    hide_progress_bars()
    folder = find_source(student, make_settings(home=home))
    name = f"{folder.name}.gguf" if to == "gguf" else f"{folder.name}-{to}"
    target = (out or folder.with_name(name)).absolute()
    with showing_events() as monitor:
        summary = StudentExport(folder, to, target, converter, outtype).run(monitor)  # type: ignore[arg-type]
    print_summary(summary)
