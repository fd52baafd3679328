"""``kd convert``: turn another tool's job file into ours."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from services.terminal.console import AsJson, out, print_json, write_new_file

Tool = Annotated[
    str, typer.Option("--from", help="Tool that the file is for: distillkit, axolotl or trl.")
]
Teacher = Annotated[
    str | None,
    typer.Option(
        help="Model to distil from, if the file is for plain fine-tuning with axolotl or TRL."
    ),
]
Written = Annotated[
    Path | None, typer.Option("--out", help="New file for the job. Default: print it.")
]

app = typer.Typer()


@app.command()
def convert(
    file: Annotated[Path, typer.Argument(help="The tool's YAML file.")],
    tool: Tool,
    teacher: Teacher = None,
    written: Written = None,
    as_json: AsJson = False,
) -> None:
    """Convert another tool's job file to a job for Potstill, and print it.

    Comments at its top name each field that has no counterpart, or has another meaning here. Reads
    no model and no data: check the job with `kd validate` and `kd estimate`.
    """
    from kd.exchange.job_files.conversion import convert_file

    found = convert_file(file, tool, teacher)
    if written is not None:
        write_new_file(written, found.render())
    if as_json:
        print_json({"job": found.job, "remarks": [each._asdict() for each in found.remarks]})
    elif written is None:
        out.print(found.render(), markup=False, highlight=False, soft_wrap=True, end="")
