"""Describe the fields of a job from their descriptions, bounds and defaults in ``kd.config``.

``make docs`` writes ``docs/configuration.md`` with it; a test compares the file with the output of
this module. ``kd explain`` describes single fields. Imports no torch.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from typing import Any, NamedTuple

from kd.config.job import JobConfig

INTRODUCTION = """\
# Configuration

<!-- Written by `make docs` from kd/config: edit the descriptions there. -->

A job is one tree of settings. The YAML file of `kd run`, the body of `POST /jobs` and the overrides
of the command line (`--set train.max_steps=100`) use the same names. Unknown keys and values out of
bounds are refused. `null` means "use the default". `kd validate job.yaml` checks a job without
starting it.
"""

_BOUNDS = {
    "minimum": "≥ {}",
    "exclusiveMinimum": "> {}",
    "maximum": "≤ {}",
    "exclusiveMaximum": "< {}",
}
_TYPES = {"boolean": "true or false", "integer": "integer", "number": "number", "string": "text"}


def render_configuration() -> str:
    """Return the whole page as Markdown."""
    schema = JobConfig.model_json_schema()
    definitions = schema["$defs"]
    places = dict[str, list[str]]()
    for place, name in _walk_sections("", schema, definitions):
        places.setdefault(name, []).append(place)
    tables = [
        make_table(_make_heading(name, places, definitions), definitions[name], definitions)
        for name in places
    ]
    return "\n".join([INTRODUCTION, make_table("The job", schema, definitions), *tables])


class FieldHelp(NamedTuple):
    """A field of a job: its place, what it may be, its default, and what it means."""

    place: str
    value: str
    default: str
    meaning: str

    @classmethod
    def of(cls, place: str, section: dict[str, Any], definitions: dict[str, Any]) -> FieldHelp:
        """Describe the last part of ``place``, which is a field of ``section``."""
        name = place.rpartition(".")[2]
        field = section["properties"][name]
        return cls(
            place,
            _describe_value(field, definitions).replace("`", "").replace("\\|", "|"),
            "required"
            if name in section.get("required", [])
            else _format_default(field).strip("`–"),
            " ".join(_find_description(field, definitions).split()),
        )


def explain_field(place: str) -> list[FieldHelp]:
    """Describe the field at ``place``, such as cache.threshold, and the fields that it holds.

    Numbers of items, as in data.train.0.path, may stand in ``place``. Where several sections may be
    at one place, the field of each is described. Empty where there is no such field.
    """
    schema = JobConfig.model_json_schema()
    definitions = schema["$defs"]
    names = [name for name in place.replace("[]", "").split(".") if not name.isdigit()]
    holders, found = [schema], list[FieldHelp]()
    for depth, name in enumerate(names, start=1):
        holders = [each for each in holders if name in each["properties"]]
        here = ".".join(names[:depth])
        found = [FieldHelp.of(here, each, definitions) for each in holders]
        holders = [
            definitions[_name_section(option)]
            for each in holders
            for _, option in _list_held(each["properties"][name])
            if "$ref" in option
        ]
    inner = (
        FieldHelp.of(f"{here}.{name}", each, definitions)
        for each in holders
        for name in each["properties"]
    )
    return list(dict.fromkeys([*found, *inner])) if found else []


def _walk_sections(
    path: str, schema: dict[str, Any], definitions: dict[str, Any]
) -> Iterator[tuple[str, str]]:
    """Yield the place and the name of every section below ``schema``, outer sections first."""
    for field, options in schema["properties"].items():
        for suffix, option in _list_held(options):
            if "$ref" in option:
                place = f"{path}{field}{suffix}"
                name = _name_section(option)
                yield place, name
                yield from _walk_sections(f"{place}.", definitions[name], definitions)


def _list_held(field: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield each type that a field or its items may have, with the suffix for its place.

    The suffix is ``[]`` for the items of a list and ``.*`` for the values of a mapping.
    """
    for option in _list_alternatives(field):
        if "items" in option:
            yield from (("[]", inner) for inner in _list_alternatives(option["items"]))
        elif option.get("type") == "object" and "properties" not in option:
            yield from ((".*", inner) for inner in _list_alternatives(_find_value_schema(option)))
        else:
            yield "", option


def _make_heading(name: str, places: dict[str, list[str]], definitions: dict[str, Any]) -> str:
    """Return the heading of a section, which is shown once: all of its places.

    If another section may stand at the same place, the heading names the key that only this has.
    """
    shared = any(
        set(places[name]) & set(others) for other, others in places.items() if other != name
    )
    distinguished = f" with `{definitions[name]['required'][0]}`" if shared else ""
    return ", ".join(f"`{place}`" for place in places[name]) + distinguished


def make_table(heading: str, schema: dict[str, Any], definitions: dict[str, Any]) -> str:
    """Return a heading and a table of the fields of one section."""
    lines = [
        f"## {heading}\n\n{schema['description']}\n",
        "| key | value | default | meaning |\n|---|---|---|---|",
    ]
    for name, field in schema["properties"].items():
        default = "required" if name in schema.get("required", []) else _format_default(field)
        meaning = _escape_cell(_find_description(field, definitions))
        lines.append(
            f"| `{name}` | {_describe_value(field, definitions)} | {default} | {meaning} |"
        )
    return "\n".join([*lines, ""])


def _find_description(field: dict[str, Any], definitions: dict[str, Any]) -> str:
    """Return the description of a field, or else of the section that the field holds.

    The schema omits the description of a field that equals the one of its section.
    """
    if "description" in field:
        return str(field["description"])
    return next(
        str(definitions[_name_section(option)]["description"])
        for _, option in _list_held(field)
        if "$ref" in option
    )


def _list_alternatives(field: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the schema of each type that a field may have, except null."""
    options = field.get("anyOf") or field.get("oneOf")
    if options is None:
        return [] if field.get("type") == "null" else [field]
    return [each for option in options for each in _list_alternatives(option)]


def _name_section(option: dict[str, Any]) -> str:
    """Return the name of the section to which an alternative refers."""
    return str(option["$ref"]).rpartition("/")[2]


def _describe_value(field: dict[str, Any], definitions: dict[str, Any]) -> str:
    """Describe all types of a field in words.

    If several of them are sections, each is named by the key that only it requires.
    """
    options = _list_alternatives(field)
    several = sum("$ref" in option for option in options) > 1
    described = [
        f"section with `{definitions[_name_section(option)]['required'][0]}`"
        if several and "$ref" in option
        else _describe_alternative(option, definitions)
        for option in options
    ]
    return " or ".join(dict.fromkeys(described))


def _describe_alternative(option: dict[str, Any], definitions: dict[str, Any]) -> str:
    """Describe one type in words, with its bounds."""
    if "$ref" in option:
        return "section"
    if option.get("type") == "array":
        return "list of " + _describe_value(option["items"], definitions)
    if option.get("type") == "object":
        kind, _, limits = _describe_value(_find_value_schema(option), definitions).partition(" ")
        return f"mapping of names to {kind}s {limits}".strip()
    if "enum" in option or "const" in option:
        return ", ".join(f"`{choice}`" for choice in option.get("enum", [option.get("const")]))
    bounds = [text.format(f"{option[key]:.10g}") for key, text in _BOUNDS.items() if key in option]
    pattern = [f"matching `{_escape_cell(option['pattern'])}`"] if "pattern" in option else []
    return " ".join([_TYPES[option["type"]], ", ".join(bounds + pattern)]).strip()


def _find_value_schema(option: dict[str, Any]) -> dict[str, Any]:
    """Return the schema of a mapping's values.

    pydantic puts it under the pattern of the names, if the names have one.
    """
    values: dict[str, Any] = option.get("additionalProperties") or next(
        iter(option["patternProperties"].values())
    )
    return values


def _format_default(field: dict[str, Any]) -> str:
    value = field.get("default")
    # A default of null means that the field is off, or that its description names the default.
    return "–" if value in (None, [], {}) else f"`{json.dumps(value)}`"


def _escape_cell(text: str) -> str:
    """Format ``text`` for a cell of a table: on one line, its bars escaped."""
    return " ".join(text.split()).replace("|", "\\|")


if __name__ == "__main__":
    sys.stdout.reconfigure(encoding="utf-8")  # type: ignore[union-attr]
    sys.stdout.write(render_configuration())
