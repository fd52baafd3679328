"""``kd init``: write a job file from a template, and ask for what it needs."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import typer

from services.terminal.console import notes, print_result, write_new_file

#: What a template needs, as it is asked for on a terminal.
QUESTIONS = {
    "teacher": "Teacher (a folder, or a name on the hub)",
    "student": "Student (a folder or a name on the hub, or `4 layers` of the teacher)",
    "train": "Text to train on (files, a folder or a glob)",
    "validation": "Held-out text (empty: a part of the text above)",
}

app = typer.Typer()


@app.command()
def init(
    file: Annotated[Path, typer.Argument(help="New job file.")] = Path("job.yaml"),
    template: Annotated[
        str,
        typer.Option(help="distill, chat, context, lora, search, served, teachers or tokenizer."),
    ] = "distill",
    teacher: Annotated[str | None, typer.Option(help="The teacher: a folder or a hub id.")] = None,
    student: Annotated[
        str | None,
        typer.Option(help="The student: a folder or a hub id, or `4 layers` of the teacher."),
    ] = None,
    train: Annotated[str | None, typer.Option(help="Files, folder or glob to train on.")] = None,
    validation: Annotated[str | None, typer.Option(help="Held-out files.")] = None,
) -> None:
    """Write a job file from a template; on a terminal, ask for what you do not give."""
    from kd.config.templates.filling import fill_template, list_templates

    given = {"teacher": teacher, "student": student, "train": train, "validation": validation}
    if template not in list_templates():
        detail = f"{template!r}: the templates are {', '.join(list_templates())}"
        raise typer.BadParameter(detail, param_hint="--template")
    answers = {**given, **_ask(given)}
    answers["gguf_file"] = _find_gguf_file(Path(answers["teacher"] or ""))
    write_new_file(file, fill_template(template, file.stem, answers))
    print_result({"file": str(file)}, f"wrote {file}")
    notes.print(
        f"next: kd validate {file}; kd estimate {file}; kd run {file}", soft_wrap=True, markup=False
    )


def _find_gguf_file(teacher: Path) -> str | None:
    """Return the file that a teacher's folder holds in place of other weights, if it is one."""
    from kd.models.folder import ModelFolder

    files = ModelFolder(teacher).gguf_files
    return files[0] if len(files) == 1 and not (teacher / "config.json").exists() else None


def _ask(given: Mapping[str, str | None]) -> dict[str, str]:
    """Ask for the answers that are missing; without a terminal they are refused by name."""
    from kd.config.templates.filling import OPTIONAL

    missing = [name for name, value in given.items() if value is None]
    if sys.stdin.isatty():
        return {
            name: typer.prompt(
                QUESTIONS[name],
                default="" if name in OPTIONAL else None,
                show_default=False,
                err=True,
            )
            for name in missing
        }
    if needed := [f"--{name}" for name in missing if name not in OPTIONAL]:
        detail = f"Missing {', '.join(needed)}: without a terminal nothing can be asked."
        raise typer.BadParameter(detail)
    return {}
