"""The fields of a job: what each may be, its default and its meaning, by the schema of the job.

``kd explain`` prints single fields, and ``services.reference`` writes all of them into
``docs/configuration.md``. Imports no torch.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from typing import NamedTuple

from pydantic.json_schema import JsonSchemaValue as Schema

from kd.config.job import JobConfig

_BOUNDS = {
    "minimum": "≥ {}",
    "exclusiveMinimum": "> {}",
    "maximum": "≤ {}",
    "exclusiveMaximum": "< {}",
}
#: The types of a schema that have another name for people.
_TYPES = {"boolean": "true or false", "string": "text"}


class FieldHelp(NamedTuple):
    """A field: its place (train.optim), what it may be, its default and meaning, in Markdown."""

    place: str
    value: str
    default: str
    meaning: str

    @property
    def name(self) -> str:
        """The last part of the place."""
        return self.place.rpartition(".")[2]


class SectionHelp(NamedTuple):
    """A section of a job, which may stand at several places, and its fields.

    ``key`` is a field that only this section has, if another section may stand at the same place.
    """

    places: tuple[str, ...]
    key: str
    meaning: str
    fields: tuple[FieldHelp, ...]


def list_sections() -> list[SectionHelp]:
    """List every section of a job once, outer sections first; the place of the job is ""."""
    schema = JobConfig.model_json_schema()
    definitions = schema["$defs"]
    places: dict[str, list[str]] = {}
    for place, name in _walk_sections("", schema, definitions):
        places.setdefault(name, []).append(place)
    job = SectionHelp(("",), "", schema["description"], describe_fields(schema, definitions))
    sections = [job]
    for name, found in places.items():
        section = definitions[name]
        shared = any(set(found) & set(others) for each, others in places.items() if each != name)
        key = str(section["required"][0]) if shared else ""
        fields = describe_fields(section, definitions, f"{_simplify(found[0])}.")
        sections.append(SectionHelp(tuple(found), key, section["description"], fields))
    return sections


def explain_field(place: str) -> list[FieldHelp]:
    """Describe the field at ``place``, such as cache.threshold, and the fields that it holds.

    Numbers of items, as in data.train.0.path, may stand in ``place``. If several sections may be
    at one place, the field of each is described. Empty if there is no such field.
    """
    names = [name for name in place.replace("[]", "").split(".") if not name.isdigit()]
    schema = JobConfig.model_json_schema()
    definitions = schema["$defs"]
    sections = [("", schema)] + [
        (f"{_simplify(outer)}.", definitions[name])
        for outer, name in _walk_sections("", schema, definitions)
    ]
    fields = [
        each for at, section in sections for each in describe_fields(section, definitions, at)
    ]
    found = [each for each in fields if each.place.split(".") == names]
    held = [each for each in fields if each.place.split(".")[:-1] == names]
    plain = [
        each._replace(value=each.value.replace("`", ""), default=each.default.strip("`–"))
        for each in (*found, *held)
    ]
    return list(dict.fromkeys(plain)) if found else []


def describe_fields(
    section: Schema, definitions: dict[str, Schema], place: str = ""
) -> tuple[FieldHelp, ...]:
    """Describe the fields of a section; ``place`` is that of the section, with a point behind."""
    required = section.get("required", [])
    return tuple(
        FieldHelp(
            f"{place}{name}",
            _describe_field(field, definitions),
            "required" if name in required else _format_default(field),
            " ".join(_find_description(field, definitions).split()),
        )
        for name, field in section["properties"].items()
    )


def describe_value(schema: Schema, name_section: Callable[[str], str]) -> str:
    """Describe the values that ``schema`` allows, with their bounds, in Markdown.

    ``name_section`` says how a definition of the schema is called.
    """
    if "$ref" in schema:
        return name_section(_name_definition(schema))
    options = _list_alternatives(schema)
    if options != [schema]:
        return " or ".join(dict.fromkeys(describe_value(each, name_section) for each in options))
    if "enum" in schema or "const" in schema:
        return ", ".join(f"`{choice}`" for choice in schema.get("enum", [schema.get("const")]))
    if schema.get("type") == "array":
        return f"list of {describe_value(schema['items'], name_section)}"
    if inner := _find_value_schema(schema):
        kind, _, limits = describe_value(inner, name_section).partition(" ")
        return f"mapping of names to {kind}s {limits}".strip()
    if schema.get("format") == "date-time":
        return "time"
    bounds = [text.format(f"{schema[key]:.16g}") for key, text in _BOUNDS.items() if key in schema]
    if "pattern" in schema:
        bounds.append(f"matching `{schema['pattern']}`")
    kind = schema.get("type") or schema.get("title", "anything")
    return f"{_TYPES.get(kind, kind)} {', '.join(bounds)}".strip()


def _walk_sections(
    path: str, schema: Schema, definitions: dict[str, Schema]
) -> Iterator[tuple[str, str]]:
    """Yield the place and the name of every section below ``schema``, outer sections first."""
    for field, options in schema["properties"].items():
        for suffix, option in _list_held(options):
            if "$ref" in option:
                place = f"{path}{field}{suffix}"
                name = _name_definition(option)
                yield place, name
                yield from _walk_sections(f"{place}.", definitions[name], definitions)


def _simplify(place: str) -> str:
    """Return the place as a user types it: without the marks of items and of a mapping's values."""
    return re.sub(r"\[\]|\.\*", "", place)


def _list_held(field: Schema) -> Iterator[tuple[str, Schema]]:
    """Yield each type that a field or its items may have, with the suffix for its place.

    The suffix is ``[]`` for the items of a list and ``.*`` for the values of a mapping.
    """
    for option in _list_alternatives(field):
        if "items" in option:
            yield from (("[]", inner) for inner in _list_alternatives(option["items"]))
        elif values := _find_value_schema(option):
            yield from ((".*", inner) for inner in _list_alternatives(values))
        else:
            yield "", option


def _describe_field(field: Schema, definitions: dict[str, Schema]) -> str:
    """Describe what a field may be. Null is left out: it means the default.

    If it may hold several sections, each is named by the key that only it requires.
    """
    sections = {_name_definition(option) for _, option in _list_held(field) if "$ref" in option}

    def name_section(name: str) -> str:
        return (
            f"section with `{definitions[name]['required'][0]}`" if sections > {name} else "section"
        )

    options = [each for each in _list_alternatives(field) if each.get("type") != "null"]
    return describe_value({"anyOf": options}, name_section)


def _find_description(field: Schema, definitions: dict[str, Schema]) -> str:
    """Return the description of a field, or else of the section that the field holds.

    The schema omits the description of a field that equals the one of its section.
    """
    if "description" in field:
        return str(field["description"])
    return next(
        str(definitions[_name_definition(option)]["description"])
        for _, option in _list_held(field)
        if "$ref" in option
    )


def _list_alternatives(field: Schema) -> list[Schema]:
    """Return the schema of each type that a field may have."""
    options = field.get("anyOf") or field.get("oneOf")
    if options is None:
        return [field]
    return [each for option in options for each in _list_alternatives(option)]


def _name_definition(option: Schema) -> str:
    """Return the name of the definition to which an alternative refers."""
    return str(option["$ref"]).rpartition("/")[2]


def _find_value_schema(option: Schema) -> Schema | None:
    """Return the schema of a mapping's values; None if ``option`` is no mapping, or has no rule.

    pydantic puts it under the pattern of the names, if the names have one.
    """
    patterns = option.get("patternProperties", {})
    values = option.get("additionalProperties") or next(iter(patterns.values()), None)
    return values if isinstance(values, dict) else None


def _format_default(field: Schema) -> str:
    value = field.get("default")
    # A default of null means that the field is off, or that its description names the default.
    return "–" if value in (None, [], {}) else f"`{json.dumps(value)}`"
