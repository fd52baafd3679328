"""The reference pages of docs/, made from the descriptions in the code.

Each page begins with a text that people write. Below a mark, ``make docs`` writes blocks of
Markdown: headings, paragraphs, and tables of what the code describes. A test compares the pages
with what this module renders. Needs no torch and no Redis.
"""

from __future__ import annotations

import dataclasses
import inspect
import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import typer
from pydantic.json_schema import JsonSchemaValue as Schema

import kd
from kd.config.fields.described import FieldHelp, describe_fields, describe_value, list_sections
from services.api.app import create_app
from services.settings import Settings
from services.terminal.catalogue import CATALOGUE, walk
from services.terminal.cli import app

DOCS = Path(__file__).parents[1] / "docs"
Row = tuple[str, ...]


def render_page(name: str) -> str:
    """Render the page with this file name: what people wrote above its mark, and the rest."""
    source, list_blocks = PAGES[name]
    written = (DOCS / name).read_text(encoding="utf-8").partition("<!--")[0]
    mark = f"<!-- The rest is written by `make docs` from {source}: edit it there. -->"
    blocks = [written, mark, *list_blocks()]
    return "\n\n".join(block.strip() for block in blocks if block.strip()) + "\n"


def make_table(columns: Row, rows: Iterable[Row]) -> str:
    """Make a table. Bars and line ends in its cells are escaped."""
    cells = [[" ".join(cell.split()).replace("|", "\\|") for cell in row] for row in rows]
    lines = [f"| {' | '.join(row)} |" for row in [list(columns), *cells]]
    return "\n".join([lines[0], "|---" * len(columns) + "|", *lines[1:]])


# ---------------------------------------------------------------------- configuration.md

#: The sections of a job whose fields are levers, and the single fields of others that are.
_LEVER_SECTIONS = ("loss", "train", "resume", "checks", "evaluation", "search")
_LEVER_FIELDS = (
    "teacher.quantization",
    "teacher.parallel",
    "student.from_teacher",
    "student.lora",
    "data.streaming",
)


def _make_anchor(places: tuple[str, ...]) -> str:
    """The anchor of the heading of a section at these places, as GitHub makes it."""
    return re.sub(r"[^\w-]", "", "-".join(places))


def list_configuration() -> Iterator[str]:
    """The levers by section, and one table of fields for each section of a job."""
    sections = list_sections()
    lines = []
    for section in sections:
        place = section.places[0]
        levers = [
            f"`{field.name}`"
            for field in section.fields
            if place in _LEVER_SECTIONS or field.place in _LEVER_FIELDS
        ]
        if levers:
            lines.append(f"- [`{place}`](#{_make_anchor(section.places)}): {', '.join(levers)}")
    yield "\n".join(lines)
    for section in sections:
        places = ", ".join(f"`{place}`" for place in section.places if place) or "The job"
        yield f"## {places}" + (f" with `{section.key}`" if section.key else "")
        yield section.meaning
        yield make_fields_table(section.fields)


def make_fields_table(fields: Iterable[FieldHelp]) -> str:
    """Make a table of fields, of a job or of the operator's settings."""
    rows = ((f"`{each.name}`", each.value, each.default, each.meaning) for each in fields)
    return make_table(("key", "value", "default", "meaning"), rows)


# ---------------------------------------------------------------------- settings.md

#: A setting for tests only, which the page leaves out.
_TEST_FIELD = "child_module"


def list_settings() -> Iterator[str]:
    """One table of all environment variables."""
    fields = describe_fields(Settings.model_json_schema(), {})
    yield make_fields_table(
        each._replace(place=f"KD_{each.name.upper()}")
        for each in fields
        if each.name != _TEST_FIELD
    )


# ---------------------------------------------------------------------- cli.md

#: Options that every command has, or that only concern the shell.
_LEFT_OUT = {"help", "install_completion", "show_completion"}
#: A parameter that more commands have than this is described once, at the start of the page.
_MANY_COMMANDS = 8
#: The shared options that a command names. All commands have the others, --json and --quiet.
_NAMED_OPTIONS = ("`--home", "`--server", "`--set")
#: The help of a parameter: its meaning, then default and bounds in brackets.
_PARAMETER_HELP = re.compile(r"(.*?)\s*(?:\[([^\[\]]*)\])?", re.DOTALL)


def list_commands() -> Iterator[str]:
    """The commands by group, the shared parameters, and then each command."""
    commands = {
        path: typer.Context(command, info_name=f"kd {path}")
        for path, command in walk(typer.main.get_command(app))
        if not command.hidden
    }
    for group in dict.fromkeys(each.group for each in CATALOGUE.values()):
        paths = [path for path in commands if CATALOGUE[path].group == group]
        links = [f"[`kd {path}`](#kd-{path.replace(' ', '-')})" for path in paths]
        yield f"**{group}**: {', '.join(links)}."
    parameters = {path: _describe_parameters(context) for path, context in commands.items()}
    uses = Counter(row for rows in parameters.values() for row in rows)
    shared = {row for row, number in uses.items() if number > _MANY_COMMANDS}
    yield "Every command has `--json` and `--quiet`. These parameters mean the same everywhere:"
    yield _list_rows(sorted(shared))
    for path, context in commands.items():
        usage = " ".join(context.command.collect_usage_pieces(context))
        named = [f"{n.split()[0]}`" for n, _ in parameters[path] if n.startswith(_NAMED_OPTIONS)]
        yield f"## kd {path}"
        yield from _list_paragraphs(context.command.help or "")
        yield f"```text\nkd {path} {usage}\n```"
        yield _list_rows(row for row in parameters[path] if row not in shared)
        yield f"Also: {', '.join(named)}." if named else ""


def _list_rows(rows: Iterable[Row]) -> str:
    return "\n".join(f"- {name}: {meaning}" for name, meaning in rows)


def _list_paragraphs(text: str) -> list[str]:
    """List the paragraphs of a text, each on one line, without click's mark for kept line ends."""
    return [" ".join(each.replace("\b", "").split()) for each in text.strip().split("\n\n")]


def _describe_parameters(context: Any) -> list[Row]:
    """Describe each parameter of a command: its name; its meaning with default and bounds."""
    rows: list[Row] = []
    for parameter in context.command.params:
        if parameter.name in _LEFT_OUT or getattr(parameter, "hidden", False):
            continue
        name, text = parameter.get_help_record(context)
        name = name.replace(" range>", ">").replace("<list[str]>", "<str> ...")
        meaning, extra = _PARAMETER_HELP.fullmatch(text.replace("\b", "")).groups()  # type: ignore[union-attr]
        # The usage shows which arguments are required, and the introduction that flags are off.
        told = parameter.param_type_name == "argument" and extra == "required"
        if extra and not told and not extra.startswith("default: no-"):
            meaning = f"{meaning.rstrip('.')} ({extra})."
        rows.append((f"`{name}`", " ".join(meaning.split())))
    return rows


# ---------------------------------------------------------------------- api.md

#: The schema of a job's body. docs/configuration.md describes it and all that it holds.
_JOB_SCHEMA = "JobConfig"
#: What ``services.api.openapi`` says of an answer that has no description of its own.
_SUCCESS = "The request succeeded"
#: Parameters that the introduction describes once.
_COMMON_PARAMETERS = ("job_id", "fingerprint", "Idempotency-Key")
#: The fields of a model that only wraps a list. Its answer is described by the items of the list.
_LIST_FIELDS = {"data", "has_more", "next_cursor"}


def list_api() -> Iterator[str]:
    """Every route with its parameters and answers, then the models of bodies and answers."""
    # With a key file, so that the page describes keys. Neither the file nor Redis is opened.
    document = create_app(
        Settings(redis_url="redis://127.0.0.1:1/0", api_keys_file=Path("keys"))
    ).openapi()
    schemas = document["components"]["schemas"]
    operations = [
        (f"### `{method.upper()} {path}`", operation)
        for path, methods in document["paths"].items()
        for method, operation in methods.items()
    ]
    for tag in dict.fromkeys(operation["tags"][0] for _, operation in operations):
        yield f"## {tag.capitalize()}"
        for heading, operation in operations:
            if operation["tags"][0] == tag:
                yield heading
                yield from _list_operation(operation, schemas)
    contents = [[each.get("requestBody"), each["responses"]] for _, each in operations]
    yield "## Bodies and answers"
    for name, model in _find_models(contents, schemas, {}).items():
        if not _wraps_list(model):
            yield f"### {name}"
            yield model["description"]
            yield "\n".join(_list_model_fields(model))


def _list_operation(operation: Schema, schemas: dict[str, Schema]) -> Iterator[str]:
    yield operation["description"]
    parameters = operation.get("parameters", ())
    shown = [each for each in parameters if each["name"] not in _COMMON_PARAMETERS]
    yield "\n".join(map(_describe_parameter_of_path, shown))
    if body := operation.get("requestBody"):
        yield f"Body: {_describe_content(body, schemas)}."
    answers = [
        f"{status}: {_describe_answer(answer, schemas)}"
        for status, answer in operation["responses"].items()
        if int(status) < 400
    ]
    yield f"Answer {answers[0]}." if len(answers) == 1 else "Answers:"
    yield "\n".join(f"- {each}." for each in answers if len(answers) > 1)


def _describe_parameter_of_path(parameter: Schema) -> str:
    schema = parameter["schema"]
    name = f"{'?' if parameter['in'] == 'query' else ''}{parameter['name']}"
    meaning = parameter.get("description", "") or schema.get("description", "")
    default = schema.get("default")
    remark = "" if default in (None, False) else f" Default {default}."
    return f"- `{name}` ({describe_value(schema, _link_model)}): {meaning}{remark}"


def _describe_answer(answer: Schema, schemas: dict[str, Schema]) -> str:
    meaning = answer["description"].strip().rstrip(".")
    headers = ", ".join(f"`{name}`" for name in answer.get("headers", ()))
    parts = [
        "" if meaning == _SUCCESS else meaning,
        _describe_content(answer, schemas) if "content" in answer else "",
        f"with {headers}" if headers else "",
    ]
    return "; ".join(filter(None, parts))


def _describe_content(described: Schema, schemas: dict[str, Schema]) -> str:
    """Describe the first media type; one other than JSON stands for its content."""
    media_type, content = next(iter(described["content"].items()))
    if not media_type.endswith("json"):
        return str(media_type)
    schema = content.get("schema", {})
    model = schemas.get(schema.get("$ref", "").rpartition("/")[2], {})
    if not _wraps_list(model):
        return describe_value(schema, _link_model)
    items = describe_value(model["properties"]["data"], _link_model)
    return items.replace("list of", "page of") if "next_cursor" in model["properties"] else items


def _wraps_list(model: Schema) -> bool:
    return set(model.get("properties", ())) in ({"data"}, _LIST_FIELDS)


def _link_model(name: str) -> str:
    return "[a job](configuration.md)" if name == _JOB_SCHEMA else f"[{name}](#{name.lower()})"


def _find_models(node: Any, schemas: Schema, found: dict[str, Schema]) -> dict[str, Schema]:
    """Add the models to which ``node`` refers to ``found``, each before the models inside it."""
    for name in re.findall(r'"#/components/schemas/(\w+)"', json.dumps(node)):
        if name != _JOB_SCHEMA and name not in found:
            found[name] = schemas[name]
            _find_models(schemas[name], schemas, found)
    return found


def _list_model_fields(model: Schema) -> Iterator[str]:
    """Yield a line for each field that its name and type do not explain; the last names the rest.

    Values are shown if they are words to choose from, or other models.
    """
    plain = []
    for name, field in model["properties"].items():
        value = describe_value(field, _link_model)
        shown = f" ({value})" if "`" in value or "](" in value else ""
        if meaning := field.get("description", ""):
            yield f"- `{name}`{shown}: {' '.join(meaning.split())}"
        else:
            plain.append(f"`{name}`{shown}")
    if plain:
        yield f"- {', '.join(plain)}"


# ---------------------------------------------------------------------- python.md

_EXAMPLE = re.compile(r"\n(?:    .*\n|\n)+")
#: The widest line of a signature.
_WIDTH = 100


def list_python() -> Iterator[str]:
    """The docstring of ``kd``, then the signature and the docstring of each public name."""
    prose = _format_prose(kd)
    example = _EXAMPLE.search(prose)
    assert example is not None, "the docstring of kd has an example"
    block = f"\n\n```python\n{inspect.cleandoc(example[0]).strip()}\n```\n\n"
    yield prose[: example.start()] + block + prose[example.end() :]
    yield "In the signatures, `Named` is a string or a path (`str | os.PathLike`)."
    public = {name: getattr(kd, name) for name in kd.__all__}
    for title, of_class in (("Functions", False), ("Classes", True)):
        yield f"## {title}"
        for name, thing in public.items():
            if inspect.isclass(thing) == of_class:
                yield f"### kd.{name}"
                yield f"```text\n{_format_signature(f'kd.{name}', thing)}\n```"
                yield _format_prose(thing)
                yield "\n".join(_list_members(thing)) if of_class else ""


def _format_prose(thing: Any) -> str:
    """A docstring as Markdown: its double backticks are single ones there."""
    return (inspect.getdoc(thing) or "").replace("``", "`")


def _format_signature(name: str, thing: Any) -> str:
    """The signature on one line, or with one parameter a line if that is too long."""
    if dataclasses.is_dataclass(thing):
        parameters = [f"{each.name}: {each.type}" for each in dataclasses.fields(thing)]
        returns = ""
    else:
        signature = inspect.signature(thing)
        parameters = list(_list_parameters(signature))
        empty = signature.return_annotation is inspect.Signature.empty or inspect.isclass(thing)
        returns = "" if empty else f" -> {signature.return_annotation}"
    line = f"{name}({', '.join(parameters)}){returns}"
    if len(line) <= _WIDTH:
        return line
    return "\n".join([f"{name}(", *(f"    {each}," for each in parameters), f"){returns}"])


def _list_parameters(signature: inspect.Signature) -> Iterator[str]:
    """The parameters as they are written, with the star before those that need a name."""
    starred = False
    for each in signature.parameters.values():
        starred |= each.kind is each.VAR_POSITIONAL
        if each.kind is each.KEYWORD_ONLY and not starred:
            starred = True
            yield "*"
        default = each.default
        written = str(each.replace(default=inspect.Parameter.empty)).replace("'", "")
        if default is not inspect.Parameter.empty:
            written += f" = {default.__name__ if inspect.isfunction(default) else repr(default)}"
        yield written


def _list_members(thing: type) -> Iterator[str]:
    """The public methods and properties of a class, and the first paragraph of each.

    Those that it has from a library are left out.
    """
    ours = [each for each in thing.__mro__ if each.__module__.startswith("kd.")]
    members = {name: member for each in reversed(ours) for name, member in vars(each).items()}
    for name, member in sorted(members.items()):
        documented = isinstance(member, property) or inspect.isfunction(member)
        if documented and not name.startswith("_") and (prose := _format_prose(member)):
            call = name if isinstance(member, property) else f"{name}()"
            yield f"- `{call}`: {_list_paragraphs(prose)[0]}"


#: The pages: where the descriptions of each are, and what lists the blocks made from them.
PAGES: dict[str, tuple[str, Callable[[], Iterable[str]]]] = {
    "configuration.md": ("kd/config", list_configuration),
    "settings.md": ("services/settings.py", list_settings),
    "cli.md": ("services/terminal", list_commands),
    "api.md": ("services/api", list_api),
    "python.md": ("kd/__init__.py and the docstrings of its names", list_python),
}

if __name__ == "__main__":
    # All are rendered before the first is written, because an error must leave none changed.
    for name, text in {name: render_page(name) for name in PAGES}.items():
        (DOCS / name).write_text(text, encoding="utf-8")
