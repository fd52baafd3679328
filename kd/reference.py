"""The tables of ``docs/configuration.md``, from the descriptions, bounds and defaults in ``kd.config``.

``make docs`` writes the file; a test compares it with what this module renders. Imports no torch.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from typing import Any

from kd.config.job import JobConfig
from kd.config.placement import PLACEMENT

INTRODUCTION = """\
# Configuration

<!-- Written by `make docs` from kd/config: edit the descriptions there. -->

A job is one tree of settings. The YAML file of `kd run`, the body of `POST /jobs` and the overrides of the command line
(`--set train.max_steps=100`) share these names. Unknown keys are refused, and so are values out of bounds; `null` is
a field's default. `kd validate job.yaml` checks a job without starting it.
"""

_BOUNDS = {"minimum": "≥ {}", "exclusiveMinimum": "> {}", "maximum": "≤ {}", "exclusiveMaximum": "< {}"}
_TYPES = {"boolean": "true or false", "integer": "integer", "number": "number", "string": "text"}


def render() -> str:
    """The whole page, as markdown."""
    schema = JobConfig.model_json_schema()
    # What a job is comes before what it asks of the service, which pydantic puts first: it is inherited.
    schema["properties"] = dict(sorted(schema["properties"].items(), key=lambda item: item[0] in PLACEMENT))
    definitions, places = schema["$defs"], dict[str, list[str]]()
    for place, name in _below("", schema, definitions):
        places.setdefault(name, []).append(place)
    tables = [table(_heading(name, places, definitions), definitions[name], definitions) for name in places]
    return "\n".join([INTRODUCTION, table("The job", schema, definitions), *tables])


def _below(path: str, schema: dict[str, Any], definitions: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Place and name of every section below ``schema``, each before what is inside of it."""
    for field, options in schema["properties"].items():
        for suffix, option in _held(options):
            if "$ref" in option:
                place, name = f"{path}{field}{suffix}", _name(option)
                yield place, name
                yield from _below(f"{place}.", definitions[name], definitions)


def _held(field: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """What a field and its items may be, with what that adds to the place: ``[]`` of a list, ``.*`` of a mapping."""
    for option in _alternatives(field):
        if "items" in option:
            yield from (("[]", inner) for inner in _alternatives(option["items"]))
        elif option.get("type") == "object" and "properties" not in option:
            yield from ((".*", inner) for inner in _alternatives(_values(option)))
        else:
            yield "", option


def _heading(name: str, places: dict[str, list[str]], definitions: dict[str, Any]) -> str:
    """All places of a section, for it is told once; where another one may stand too, the key that tells them apart."""
    shared = any(set(places[name]) & set(others) for other, others in places.items() if other != name)
    told_by = f" with `{definitions[name]['required'][0]}`" if shared else ""
    return ", ".join(f"`{place}`" for place in places[name]) + told_by


def table(heading: str, schema: dict[str, Any], definitions: dict[str, Any]) -> str:
    """A heading and a table of the fields."""
    lines = [f"## {heading}\n\n{schema['description']}\n", "| key | value | default | meaning |\n|---|---|---|---|"]
    for name, field in schema["properties"].items():
        default = "required" if name in schema.get("required", []) else _default(field)
        meaning = _cell(_described(field, definitions))
        lines.append(f"| `{name}` | {_value(field, definitions)} | {default} | {meaning} |")
    return "\n".join([*lines, ""])


def _described(field: dict[str, Any], definitions: dict[str, Any]) -> str:
    """A field's description; the schema leaves it out where it equals the one of the section that the field holds."""
    if "description" in field:
        return str(field["description"])
    return next(str(definitions[_name(option)]["description"]) for _, option in _held(field) if "$ref" in option)


def _alternatives(field: dict[str, Any]) -> list[dict[str, Any]]:
    """What a field may be, each as a schema of its own; null, the absence of a value, is left out."""
    options = field.get("anyOf") or field.get("oneOf") or [field]
    return [option for option in options if option.get("type") != "null"]


def _name(option: dict[str, Any]) -> str:
    """The section that an alternative is."""
    return str(option["$ref"]).rpartition("/")[2]


def _value(field: dict[str, Any], definitions: dict[str, Any]) -> str:
    """All alternatives in words; of several sections, each with the key that tells it from the others."""
    options = _alternatives(field)
    several = sum("$ref" in option for option in options) > 1
    told = [
        f"section with `{definitions[_name(option)]['required'][0]}`"
        if several and "$ref" in option
        else _kind(option, definitions)
        for option in options
    ]
    return " or ".join(dict.fromkeys(told))


def _kind(option: dict[str, Any], definitions: dict[str, Any]) -> str:
    """One alternative in words, with its bounds."""
    if "$ref" in option:
        return "section"
    if option.get("type") == "array":
        return "list of " + _value(option["items"], definitions)
    if option.get("type") == "object":
        kind, _, limits = _value(_values(option), definitions).partition(" ")
        return f"mapping of names to {kind}s {limits}".strip()
    if "enum" in option or "const" in option:
        return ", ".join(f"`{choice}`" for choice in option.get("enum", [option.get("const")]))
    bounds = [text.format(f"{option[key]:.10g}") for key, text in _BOUNDS.items() if key in option]
    pattern = [f"matching `{_cell(option['pattern'])}`"] if "pattern" in option else []
    return " ".join([_TYPES[option["type"]], ", ".join(bounds + pattern)]).strip()


def _values(option: dict[str, Any]) -> dict[str, Any]:
    """What a mapping's values are; one whose names follow a pattern says it under that pattern."""
    values: dict[str, Any] = option.get("additionalProperties") or next(iter(option["patternProperties"].values()))
    return values


def _default(field: dict[str, Any]) -> str:
    value = field.get("default")
    return "–" if value in (None, []) else f"`{json.dumps(value)}`"


def _cell(text: str) -> str:
    """``text`` as the cell of a table: on one line, its bars escaped."""
    return " ".join(text.split()).replace("|", "\\|")


if __name__ == "__main__":
    sys.stdout.reconfigure(encoding="utf-8")  # type: ignore[union-attr]
    sys.stdout.write(render())
