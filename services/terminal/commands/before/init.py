"""``kd init``: write a job file from a template, and ask for what it needs."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import typer

from services.terminal.console import AsJson, notes, out, print_json, write_new_file

TEMPLATES = Path(__file__).resolve().parents[2] / "templates"
#: What a template needs, as it is asked for on a terminal.
QUESTIONS = {
    "teacher": "Teacher (a folder, or a name on the hub)",
    "student": "Student (a folder or a name on the hub, or `4 layers` of the teacher)",
    "train": "Text to train on (files, a folder or a glob)",
    "validation": "Held-out text (empty: a part of the text above)",
}
#: The answers that may be empty.
OPTIONAL = ("validation",)

app = typer.Typer()


def list_templates() -> list[str]:
    """List the names of the templates."""
    return sorted(path.stem for path in TEMPLATES.glob("*.yaml"))


@app.command()
def init(
    file: Annotated[Path, typer.Argument(help="New job file.")] = Path("job.yaml"),
    template: Annotated[
        str, typer.Option(help="What the job does: distill, chat, lora or search.")
    ] = "distill",
    teacher: Annotated[str | None, typer.Option(help="The teacher: a folder or a hub id.")] = None,
    student: Annotated[
        str | None,
        typer.Option(help="The student: a folder or a hub id, or `4 layers` of the teacher."),
    ] = None,
    train: Annotated[str | None, typer.Option(help="Files, folder or glob to train on.")] = None,
    validation: Annotated[str | None, typer.Option(help="Held-out files.")] = None,
    as_json: AsJson = False,
) -> None:
    """Write a job file from a template; on a terminal, ask for what is not given."""
    given = {"teacher": teacher, "student": student, "train": train, "validation": validation}
    if template not in list_templates():
        raise typer.BadParameter(
            f"{template!r}: the templates are {', '.join(list_templates())}",
            param_hint="--template",
        )
    write_new_file(file, fill_template(template, file.stem, {**given, **_ask(given)}))
    print_json({"file": str(file)}) if as_json else out.print(f"wrote {file}", soft_wrap=True)
    notes.print(
        f"next: kd validate {file}; kd estimate {file}; kd run {file}", soft_wrap=True, markup=False
    )


def _ask(given: Mapping[str, str | None]) -> dict[str, str]:
    """Ask for the answers that are missing; without a terminal they are refused by name."""
    missing = [name for name, value in given.items() if value is None]
    if not sys.stdin.isatty():
        needed = [f"--{name}" for name in missing if name not in OPTIONAL]
        if needed:
            raise typer.BadParameter(
                f"Missing {', '.join(needed)}: without a terminal nothing can be asked."
            )
        return {}
    return {
        name: typer.prompt(
            QUESTIONS[name],
            default="" if name in OPTIONAL else None,
            show_default=False,
            err=True,
        )
        for name in missing
    }


def fill_template(template: str, name: str, answers: Mapping[str, str | None]) -> str:
    """Return the job file; its comments stay.

    Raises ``ConfigError`` if an answer cannot stand in its field.
    """
    from kd.config.jobfile import parse_config, parse_yaml

    text = (TEMPLATES / f"{template}.yaml").read_text(encoding="utf-8")
    filled = text.format(
        name=_write_value(name),
        teacher=_write_value(answers["teacher"] or ""),
        student=_describe_student(answers["student"] or ""),
        train=_write_value(answers["train"] or ""),
        validation=_write_value(answers.get("validation") or ""),
    )
    if not answers.get("validation"):
        filled = filled.replace('  validation: ""\n', "")
    parse_config(parse_yaml(filled))
    return filled


def _describe_student(answer: str) -> str:
    """The line of the section ``student``: layers of the teacher, or a model."""
    count, _, word = answer.strip().partition(" ")
    if count.isdecimal() and word in ("layer", "layers"):
        return f"from_teacher: {{layers: {count}}}"
    return f"model: {_write_value(answer)}"


def _write_value(text: str) -> str:
    """The text as a value of YAML; JSON's strings are strings of YAML, too."""
    return json.dumps(text, ensure_ascii=False)
