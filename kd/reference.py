"""The tables of ``docs/configuration.md``, from the descriptions, bounds and defaults in ``kd.config``.

``make docs`` writes the file; a test compares it with what this module renders. Imports no torch.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from typing import Any

from kd.config.job import JobConfig

INTRODUCTION = """\
# Configuration

<!-- Written by `make docs` from kd/config: edit the descriptions there. -->

A job is one tree of settings. The YAML file of `kd run`, the body of `POST /jobs` and the overrides of the command line
(`--set train.max_steps=100`) share these names. Unknown keys are refused, and so are values out of bounds.
`kd validate job.yaml` checks a job without starting it.
"""

_BOUNDS = {"minimum": "≥ {}", "exclusiveMinimum": "> {}", "maximum": "≤ {}", "exclusiveMaximum": "< {}"}
_TYPES = {"boolean": "true or false", "integer": "integer", "number": "number", "string": "text"}


def render() -> str:
    """The whole page, as markdown."""
    schema = JobConfig.model_json_schema()
    return "\n".join([INTRODUCTION, *_section("", schema, schema["$defs"])])


def _section(path: str, schema: dict[str, Any], definitions: dict[str, Any]) -> Iterator[str]:
    """A heading, a table of the fields, and then each section inside this one."""
    yield f"## {f'`{path}`' if path else 'The job'}\n\n{schema['description']}\n"
    yield "| key | value | default | meaning |\n|---|---|---|---|"
    fields = schema["properties"]
    for name, field in fields.items():
        default = "required" if name in schema.get("required", []) else _default(field)
        yield f"| `{name}` | {_value(field)} | {default} | {_cell(_described(field, definitions))} |"
    yield ""
    for name, field in fields.items():
        many = "[]" if any("items" in option for option in _alternatives(field)) else ""
        for reference in _references(field):
            yield from _section(f"{path}.{name}{many}".removeprefix("."), definitions[reference], definitions)


def _described(field: dict[str, Any], definitions: dict[str, Any]) -> str:
    """A field's description; the schema leaves it out where it equals the one of the section that the field holds."""
    return str(field["description"] if "description" in field else definitions[_references(field)[0]]["description"])


def _alternatives(field: dict[str, Any]) -> list[dict[str, Any]]:
    """What a field may be, each as a schema of its own; null, the absence of a value, is left out."""
    options = field.get("anyOf") or field.get("oneOf") or [field]
    return [option for option in options if option.get("type") != "null"]


def _references(field: dict[str, Any]) -> list[str]:
    """Names of the sections that a field holds; ``data.validation`` is like ``data.train`` and is not repeated."""
    if field.get("title") == "Validation":
        return []
    options = [inner for option in _alternatives(field) for inner in _alternatives(option.get("items", option))]
    return [option["$ref"].rpartition("/")[2] for option in options if "$ref" in option]


def _value(field: dict[str, Any]) -> str:
    return " or ".join(dict.fromkeys(_kind(option) for option in _alternatives(field)))


def _kind(option: dict[str, Any]) -> str:
    """One alternative in words, with its bounds."""
    if "$ref" in option:
        return "section"
    if option.get("type") == "array":
        return "list of " + _value(option["items"])
    if option.get("type") == "object":
        return "mapping of numbers"
    if "enum" in option or "const" in option:
        return ", ".join(f"`{choice}`" for choice in option.get("enum", [option.get("const")]))
    bounds = [text.format(f"{option[key]:.10g}") for key, text in _BOUNDS.items() if key in option]
    pattern = [f"matching `{_cell(option['pattern'])}`"] if "pattern" in option else []
    return " ".join([_TYPES[option["type"]], ", ".join(bounds + pattern)]).strip()


def _default(field: dict[str, Any]) -> str:
    value = field.get("default")
    return "–" if value in (None, []) else f"`{json.dumps(value)}`"


def _cell(text: str) -> str:
    """``text`` as the cell of a table: on one line, its bars escaped."""
    return " ".join(text.split()).replace("|", "\\|")


if __name__ == "__main__":
    sys.stdout.reconfigure(encoding="utf-8")  # type: ignore[union-attr]
    sys.stdout.write(render())
