"""Parse YAML, JSON and ``--set a.b=c`` into a job, or into a list of everything that is wrong.

A record holds every field of the version that wrote it. A field that it lacks keeps the meaning
that it had then, which a default of today may not have. ``kd.config.fields.removed`` has the
fields that are no more.
"""

from __future__ import annotations

import difflib
import json
import re
import types
import typing
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any

import yaml
from pydantic import BaseModel, Tag, ValidationError

from kd.config.cache import FINGERPRINT_PATTERN
from kd.config.fields.removed import REMOVED, drop_removed
from kd.config.job import NAME_PATTERN, JobConfig
from kd.config.routing.parts import find_route_problems
from kd.errors import ConfigError, Problem

#: The meaning in words of the pattern that a text field must match.
PATTERNS_IN_WORDS = {
    FINGERPRINT_PATTERN: "must be a whole fingerprint, 32 hexadecimal digits",
    NAME_PATTERN: (
        "must be 1 to 63 lower-case letters, digits, dots, dashes and underscores, "
        "the first a letter or a digit"
    ),
}
#: Half of a UTF-16 pair has no UTF-8 form. NUL ends a string in the calls of the system.
_UNUSABLE = re.compile("[\0\ud800-\udfff]")
#: What was done before a field existed, where its default does something else.
MEANT_BEFORE: Mapping[str, Mapping[str, object]] = {
    "data": {"document_separator": ""},
    "train": {"lm_head_floor": 0.0},
    "loss": {"tail_control": False},
    "evaluation": {"samples": 0, "continuations": 0},
    "checks": {"max_skipped": 0},
}


def parse_config(data: Any) -> JobConfig:
    """Return the job that ``data`` (parsed YAML or JSON) describes.

    Raises ``ConfigError`` with every problem in it.
    """
    if not isinstance(data, Mapping):
        got = "a list" if isinstance(data, list) else _show_value(data)
        what = f"a job must be a mapping, but got {got}."
        raise ConfigError.of_field("", what, "See examples/austen/job.yaml.")
    if problems := list(find_unusable_text(data)):
        raise ConfigError(problems)
    try:
        config = JobConfig.model_validate(data)
    except ValidationError as error:
        raise ConfigError(translate_errors(error.errors())) from None
    if problems := list(find_route_problems(config)):
        raise ConfigError(problems)
    return config


def find_unusable_text(data: Any, pointer: str = "") -> Iterator[Problem]:
    """Find every string in ``data`` (parsed JSON or YAML) that is not Unicode text or holds NUL.

    ``pointer`` is the JSON pointer of ``data`` itself. A key has the pointer of its mapping.
    """
    if isinstance(data, str):
        yield from _check_text(data, pointer)
    elif isinstance(data, Mapping):
        for key, value in data.items():
            if isinstance(key, str) and _UNUSABLE.search(key):
                yield from _check_text(key, pointer, "the key ")
            else:
                yield from find_unusable_text(value, f"{pointer}/{escape_pointer(key)}")
    elif isinstance(data, list | tuple):
        for index, value in enumerate(data):
            yield from find_unusable_text(value, f"{pointer}/{index}")


def escape_pointer(part: Any) -> str:
    """Return a key or an index as it stands in a JSON pointer (RFC 6901)."""
    return str(part).replace("~", "~0").replace("/", "~1")


def _check_text(text: str, pointer: str, what: str = "") -> Iterator[Problem]:
    found = _UNUSABLE.search(text)
    if found is None:
        return
    character = ord(found[0])
    name = "half of a surrogate pair" if character else "the character NUL"
    detail = f"{what}{text[:60]!a} holds {name} (U+{character:04X}) at character {found.start()}."
    yield Problem(pointer, detail, "Send Unicode text without it.")


def load_config(path: Path, overrides: Iterable[str] = ()) -> JobConfig:
    """Read a YAML or JSON job file and apply ``a.b=value`` overrides (values are YAML)."""
    return parse_config(apply_overrides(read_job_file(path), overrides))


def read_job_file(path: Path) -> Any:
    """Parse a YAML or JSON job file. Raises ``ConfigError`` if that cannot be done."""
    try:
        return parse_yaml(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        remedy = "Give the path of a YAML file; examples/austen/job.yaml is one."
        raise ConfigError.of_field("", f"no job file at {path}.", remedy) from None
    except (OSError, UnicodeDecodeError) as error:
        what = f"{path} cannot be read: {error}."
        raise ConfigError.of_field("", what, "Give the path of a UTF-8 YAML file.") from None
    except yaml.YAMLError as error:
        raise _make_yaml_error("", str(path), error) from None


def _make_yaml_error(pointer: str, what: str, error: yaml.YAMLError) -> ConfigError:
    """Return the error of ``what``, a file or a value, which is not YAML."""
    detail = f"{what} is not valid YAML: {' '.join(str(error).split())}."
    remedy = "Mend it there; a text with : or # needs quotation marks."
    return ConfigError.of_field(pointer, detail, remedy)


def parse_yaml(text: str) -> Any:
    """Parse ``text`` (YAML or JSON). Raises ``yaml.YAMLError`` also for a key given twice."""
    loader = UniqueKeyLoader(text)
    try:
        return loader.get_single_data()
    finally:
        loader.dispose()


class UniqueKeyLoader(yaml.SafeLoader):
    """A SafeLoader that refuses a key that a mapping has twice; SafeLoader silently takes the last.

    It checks mappings as they are written: a key may override one that a merge key (``<<``) adds.
    """

    def compose_mapping_node(self, anchor: dict[Any, yaml.Node]) -> yaml.MappingNode:
        """Compose the node as SafeLoader does, and check its keys."""
        mapping = super().compose_mapping_node(anchor)
        first: dict[tuple[str, str], int] = {}
        for key, _ in mapping.value:
            name = (key.tag, str(key.value))
            line = key.start_mark.line + 1
            if (
                name in first
                and key.tag != "tag:yaml.org,2002:merge"
                and isinstance(key, yaml.ScalarNode)
            ):
                where = f"line {line}" if line == first[name] else f"lines {first[name]} and {line}"
                raise yaml.YAMLError(f"key {key.value!r} is given twice ({where})")
            first.setdefault(name, line)
        return mapping


def apply_overrides(data: Any, overrides: Iterable[str]) -> Any:
    """Return ``data`` with each ``a.b=value`` set in it; ``data`` itself does not change."""
    for override in overrides:
        dotted, separator, text = override.partition("=")
        keys = dotted.strip().split(".")
        if not separator or not all(keys):
            what = f"override {override!r} is not of the form a.b=value."
            raise ConfigError.of_field("", what, "Example: --set train.max_steps=100")
        try:
            data = set_value(data, keys, parse_yaml(text))
        except yaml.YAMLError as error:
            what = f"override {override!r}"
            raise _make_yaml_error("/" + "/".join(keys), what, error) from None
    return data


def set_value(data: Any, keys: list[str], value: Any) -> Any:
    """Return ``data`` with ``value`` at the path ``keys``; missing mappings are added."""
    if not keys:
        return value
    inner = dict(data) if isinstance(data, Mapping) else {}
    inner[keys[0]] = set_value(inner.get(keys[0]), keys[1:], value)
    return inner


def translate_errors(errors: Iterable[Mapping[str, Any]]) -> list[Problem]:
    """Turn pydantic's errors into problems: a pointer into the job, a sentence, and a remedy.

    The remedy for an unknown key or choice is the known one that looks most like it. A value that
    fits no form of its field gives one problem, not one for each form.
    """
    # pydantic reports an error for each form that it tried: those of one place become one problem.
    forms_of: dict[tuple[Any, ...], list[Mapping[str, Any]]] = {}
    for number, error in enumerate(errors):
        path, _, of_many = _walk_location(error["loc"])
        forms_of.setdefault((*path,) if of_many else (number, *error["loc"]), []).append(error)
    return [_translate_error(same) for same in forms_of.values()]


def _translate_error(errors: list[Mapping[str, Any]]) -> Problem:
    """Describe the problem at one place; ``errors`` has one error for each form that was tried."""
    error = errors[0]
    path, section, _ = _walk_location(error["loc"])
    pointer = "".join("/" + escape_pointer(part) for part in path)
    names = [part for part in path if isinstance(part, str)]
    reading = "docs/configuration.md describes the fields."
    if names:
        reading = f"`kd explain {'.'.join(names[:2])}` describes the field."
    if error["type"] == "extra_forbidden" and section is not None:
        removed = REMOVED.get(".".join(map(str, path)))
        if removed is not None:
            return Problem(pointer, "is no field of a job any more.", removed.instead)
        known = _suggest_known(path[-1], list(section.model_fields), "keys")
        return Problem(pointer, f"unknown key {path[-1]!r}.", known)
    if error["type"] == "missing":
        return Problem(pointer, "is required but missing.", reading)
    if error["type"] == "string_too_short" and error["input"] == "":
        return Problem(pointer, "is empty; give a value.", reading)
    if error["type"] == "value_error":
        return Problem(pointer, str(error["msg"]).removeprefix("Value error, ") + ".", reading)
    if error["type"] == "string_pattern_mismatch" and (
        words := PATTERNS_IN_WORDS.get(error["ctx"]["pattern"])
    ):
        is_fingerprint = error["ctx"]["pattern"] == FINGERPRINT_PATTERN
        if is_fingerprint and re.fullmatch("[0-9a-f]{1,31}", error["input"]):
            reading = f"`kd cache info {error['input']}` prints it."
        return Problem(pointer, f"{words}, but got {error['input']!r}.", reading)
    first, *others = map(_translate_message, errors)
    # "Input should be a number, or a section": the words before the second form are not repeated.
    message = ", or ".join([first, *(other.removeprefix("Input should be ") for other in others)])
    got = error.get("input")
    shown = ""
    if got is None or isinstance(got, str | int | float | bool):
        shown = f", but got {_show_value(got)}"
    choices = re.findall(r"'([^']+)'", str(error.get("ctx", {}).get("expected", "")))
    known = _suggest_known(got, choices) if isinstance(got, str) else ""
    return Problem(pointer, f"{message}{shown}.", known or reading)


#: Messages in the words of YAML, by the type of a pydantic error that uses the words of Python.
_FORMS_IN_YAML = {
    "tuple_type": "Input should be a list",
    "dict_type": "Input should be a mapping",
    "model_type": "Input should be a section (a mapping of fields)",
    # The same error for the body of a request.
    "model_attributes_type": "Input should be a section (a mapping of fields)",
}


def _translate_message(error: Mapping[str, Any]) -> str:
    """Return pydantic's message in the words of YAML."""
    if error["type"] in ("too_long", "too_short"):
        message = str(error["msg"]).removesuffix(" after validation")
        message = message.replace(" after validation,", ",")
        return message.replace("Tuple ", "List ").replace("Dictionary ", "Mapping ")
    return _FORMS_IN_YAML.get(error["type"], str(error["msg"]))


def _show_value(value: Any) -> str:
    """Format ``value`` as YAML writes it: null, true and false, not None, True and False."""
    return json.dumps(value) if value is None or isinstance(value, bool) else repr(value)


def _suggest_known(given: Any, known: list[str], what: str | None = None) -> str:
    """Suggest the entry of ``known`` that looks like ``given``.

    If none does: list all of them under the word ``what``, or return nothing without that word.
    """
    close = difflib.get_close_matches(str(given).lower(), known, n=1, cutoff=0.5)
    if close:
        return f"Did you mean {close[0]}?"
    return f"Known {what}: {', '.join(known)}." if what else ""


def _walk_location(location: Iterable[Any]) -> tuple[list[Any], type[BaseModel] | None, bool]:
    """Split a pydantic location into the path of the value and what stands there.

    Returns the keys and indices without the names of the forms that a value may have, the section
    that has or lacks the last key, and whether the error is about one form of several.
    """
    path: list[Any] = []
    section: type[BaseModel] | None = None
    annotation: Any = JobConfig
    of_many = False
    for part in location:
        forms = _list_forms(annotation)
        of_many = len(forms) > 1
        if of_many:  # this part names the form that pydantic tried
            annotation = forms.get(part)
            of_many = annotation is None
        elif part != "[key]":
            path.append(part)
            section, annotation = _look_inside(next(iter(forms.values()), None), part)
    return path, section, of_many


def _list_forms(annotation: Any) -> dict[Any, Any]:
    """Return the types that a value may have besides None, by their tag or else by themselves."""
    origin = typing.get_origin(annotation)
    parts = typing.get_args(annotation)
    if origin is Annotated:
        tags = [each.tag for each in parts[1:] if isinstance(each, Tag)]
        return dict.fromkeys(tags, parts[0]) or _list_forms(parts[0])
    if origin in (typing.Union, types.UnionType):
        return {name: form for part in parts for name, form in _list_forms(part).items()}
    return {} if annotation in (None, type(None)) else {annotation: annotation}


def _look_inside(form: Any, key: Any) -> tuple[type[BaseModel] | None, Any]:
    """Return ``form`` if it is a section, and the type of what ``form`` holds under ``key``."""
    if isinstance(form, type) and issubclass(form, BaseModel):
        field = form.model_fields.get(key)
        return form, field.annotation if field is not None else None
    held = typing.get_args(form)
    if typing.get_origin(form) is dict:
        return None, held[1]
    return None, held[0] if typing.get_origin(form) is tuple else None


# ---------------------------------------------------------------------- records of earlier versions


def fill_record(written: Any) -> Any:
    """Return the JSON of a job's record in the fields of today.

    Fields that the record lacks are there, as they were meant; the removed ones are not.
    """
    if not isinstance(written, dict):
        return written
    known = drop_removed(written)
    before = {
        section: {**meant, **known[section]}
        for section, meant in MEANT_BEFORE.items()
        if isinstance(known.get(section), dict)
    }
    return known | before


def read_record(written: Any) -> JobConfig:
    """Return the job of a record; raises ``ConfigError`` as ``parse_config`` does."""
    return parse_config(fill_record(written))


def keep_meaning(config: JobConfig, written: Any) -> JobConfig:
    """Return ``config``, which continues the run of the record ``written``, as was meant there.

    A field that the record lacks, or that a continued run has kept so, is taken from it where
    ``config`` leaves it open.
    """
    changes = {}
    filled = fill_record(written) if isinstance(written, dict) else {}
    for name, meant in MEANT_BEFORE.items():
        section = getattr(config, name)
        known = filled.get(name)
        if section is None or not isinstance(known, dict):
            continue
        kept = {
            field: value
            for field, value in meant.items()
            if known[field] == value and field not in section.model_fields_set
        }
        changes[name] = section.model_copy(update=kept)
    return config.model_copy(update=changes)
