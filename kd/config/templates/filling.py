"""Fill the templates of job files with the names of models and texts; their comments stay."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

TEMPLATES = Path(__file__).resolve().parent
#: The answers that may be empty.
OPTIONAL = ("validation",)


def list_templates() -> list[str]:
    """List the names of the templates."""
    return sorted(path.stem for path in TEMPLATES.glob("*.yaml"))


def fill_template(template: str, name: str, answers: Mapping[str, str | None]) -> str:
    """Return the job file, with answers for teacher, gguf_file, student, train and validation.

    Raises ``ConfigError`` if an answer cannot stand in its field.
    """
    # Imported here, because `kd --help` would wait for it.
    from kd.config.jobfile import parse_config, parse_yaml

    filled = draft_template(template, name, answers)
    parse_config(parse_yaml(filled))
    return filled


def draft_template(template: str, name: str, answers: Mapping[str, str | None]) -> str:
    """Return the job file; a field without an answer is an empty text, or absent if it may be."""
    text = (TEMPLATES / f"{template}.yaml").read_text(encoding="utf-8")
    student = answers.get("student") or ""
    count, _, word = student.strip().partition(" ")
    if count.isdecimal() and word in ("layer", "layers"):
        student = f"from_teacher: {{layers: {count}}}"
    else:
        student = f"model: {_write_value(student)}"
    fields = ("teacher", "train", "validation")
    values = {field: _write_value(answers.get(field) or "") for field in fields}
    values["model"] = _write_value(answers.get("student") or "")
    if gguf_file := answers.get("gguf_file"):
        indent = text.partition("model: {teacher}")[0].rpartition("\n")[2]
        values["teacher"] += f"\n{indent}gguf_file: {_write_value(gguf_file)}"
    filled = text.format(name=_write_value(name), student=student, **values)
    if not answers.get("validation"):
        filled = filled.replace('  validation: ""\n', "")
    return filled


def describe_template(template: str) -> str:
    """Return the first sentence of the template's first comment: what its job does."""
    text = (TEMPLATES / f"{template}.yaml").read_text(encoding="utf-8")
    sentence, _, _ = text.removeprefix("# ").partition(". ")
    return f"{sentence}."


def _write_value(text: str) -> str:
    """The text as a value of YAML; JSON's strings are strings of YAML, too."""
    return json.dumps(text, ensure_ascii=False)
